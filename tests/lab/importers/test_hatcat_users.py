"""HatCat packs for their users: matching hierarchies, unchanged levels, room to descend, and HatCat's own rule."""

import io
import json
import re
import shlex
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from rich.console import Console

import hatcat_packs as theirs
from arrangements import tokenizer
from conftest import HIDDEN, make_model, make_pack
from hatcat_packs import modules
from probemon import DynamicProbeManager
from probemon.cli import app as cli
from probemon.cli.watch.live_view import LiveView, PlainView, summary
from probemon.errors import ConfigError, ImportRefused
from probemon.lab.importers.hatcat import import_pack

D = 24


def bring(folder, target, **options):
    return import_pack(folder, target, **{"site": "resid_post.1", "normalize": "none", **options})


def parents(pack):
    return {concept["id"]: set(concept["parents"]) for concept in pack.concepts}


def forest(rng, n_roots, n, n_levels=4):
    """A random forest by "Name:level"; a child's level is its parent's and one, but for one in eight, which stays on
    it."""
    keys = [f"c{i}:0" for i in range(n_roots)]
    tree = {}
    for i in range(n_roots, n):
        parent = keys[int(rng.integers(0, len(keys)))]
        level = min(n_levels - 1, theirs.split(parent)[1] + int(rng.random() > 0.125))
        keys.append(f"c{i}:{level}")
        tree.setdefault(parent, []).append(keys[-1])
    return keys, tree


def probes_of(folder, keys, d=D):
    made = modules(["linear"], d, keys=keys)
    theirs.write_layered(folder, made)
    return made


# -- the hierarchy that fits ---------------------------------------------------------------------

TREE = {"A:0": ["B:1", "C:1"], "B:1": ["D:2", "E:2"]}
KEYS = ["A:0", "B:1", "C:1", "D:2", "E:2"]
STALE = {"A:0": ["Old:1", "Older:1"]}


def test_disconnected_levels_are_refused_with_every_remedy(tmp_path):
    probes_of(tmp_path / "lenses/mine", KEYS)
    theirs.write_json(tmp_path / "lenses/mine/pack_info.json", {"source_pack": "first-light"})
    with pytest.raises(ImportRefused, match="only the lowest level would ever be scored") as refused:
        bring(tmp_path / "lenses/mine", tmp_path / "ours")
    said = str(refused.value)
    for remedy in ("--hierarchy FILE", "the concept pack 'first-light'", "--flat", "--allow-unlisted"):
        assert remedy in said
    assert "may be it" not in said and not (tmp_path / "ours").exists()
    theirs.write_hierarchy(tmp_path / "lenses", TREE)
    with pytest.raises(ImportRefused, match=r"lenses/hierarchy\.json may be it"):
        bring(tmp_path / "lenses/mine", tmp_path / "ours")
    # Layer files that list no edge say as little.
    for level in range(3):
        theirs.write_json(
            tmp_path / f"lenses/mine/layer{level}.json",
            {
                "layer": level,
                "concepts": [
                    {"sumo_term": theirs.split(key)[0], "layer": level} for key in KEYS if key.endswith(str(level))
                ],
            },
        )
    with pytest.raises(ImportRefused, match=r"layer0\.json does not say what is above what"):
        bring(tmp_path / "lenses/mine", tmp_path / "ours")
    pack, report = bring(tmp_path / "lenses/mine", tmp_path / "ours", allow_unlisted=True)
    assert (
        report.note("unreachable").count == 4
        and str(report).startswith("warning: 4 of 5 probes are never scored (B:1, C:1, D:2, ...)")
        and pack.n_probes == 5
    )


def test_flat_import_scores_every_probe_and_keeps_levels(tmp_path):
    probes_of(tmp_path / "theirs", KEYS)
    theirs.write_hierarchy(tmp_path / "theirs", STALE)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours", flat=True)
    assert {c["id"]: c["level"] for c in pack.concepts} == {key: theirs.split(key)[1] for key in KEYS} and not any(
        parents(pack).values()
    )
    assert pack.recommended == {"base_layers": [0, 1, 2]} and report.warning == ""
    manager = DynamicProbeManager(pack, impl="reference", strategy="descent")
    assert (manager.score_tokens(torch.randn(3, D)).coverage.active == 5).all()
    assert DynamicProbeManager(pack, impl="reference", base_layers=[0], strategy="descent").score_tokens(
        torch.randn(3, D)
    ).coverage.active.tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match="either flat or hierarchy"):
        bring(tmp_path / "theirs", tmp_path / "no", flat=True, hierarchy=tmp_path / "theirs")


def test_stale_hierarchy_is_ignored_for_matching_layer_files(tmp_path):
    probes_of(tmp_path / "theirs", KEYS)
    theirs.write_hierarchy(tmp_path / "theirs", STALE)
    theirs.write_layer_files(tmp_path / "theirs", TREE)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert (
        parents(pack) == {"A:0": set(), "B:1": {"A:0"}, "C:1": {"A:0"}, "D:2": {"B:1"}, "E:2": {"B:1"}}
        and report.warning == ""
    )
    assert report.note("unfit").examples == ("hierarchy.json names 1 of 5 probes, layer0.json 5",)
    assert (
        report.note("missing") is None and report.note("stale") is None
    )  # what was noted of the other one is gone with it


def test_stale_hierarchy_is_refused_and_a_better_one_is_named(tmp_path):
    probes_of(tmp_path / "pack/hierarchy", KEYS)
    theirs.write_hierarchy(tmp_path / "pack/hierarchy", STALE)
    with pytest.raises(
        ImportRefused,
        match=(
            r"hierarchy/hierarchy\.json does not name 4 of the 5 probes \(B:1, C:1, D:2, \.\.\.\): it is the hierarchy"
            r" of other probes"
        ),
    ) as refused:
        bring(tmp_path / "pack/hierarchy", tmp_path / "ours")
    assert "may be it" not in str(refused.value)
    theirs.write_hierarchy(tmp_path / "pack", TREE)
    with pytest.raises(ImportRefused, match=r"pack/hierarchy\.json may be it"):
        bring(tmp_path / "pack/hierarchy", tmp_path / "ours")
    for given in (tmp_path / "pack", tmp_path / "pack/hierarchy.json", str(tmp_path / "pack/hierarchy.json")):
        assert parents(bring(tmp_path / "pack/hierarchy", tmp_path / "ours", hierarchy=given, overwrite=True)[0])[
            "D:2"
        ] == {"B:1"}


def test_one_probe_in_five_may_be_unlisted(tmp_path):
    probes_of(tmp_path / "theirs", [*KEYS, "X:1"])
    theirs.write_hierarchy(tmp_path / "theirs", TREE)
    assert bring(tmp_path / "theirs", tmp_path / "ours")[1].note("unlisted").examples == ("X:1",)
    probes_of(tmp_path / "theirs", ["Y:2"])
    with pytest.raises(ImportRefused, match="does not name 2 of the 7 probes"):
        bring(tmp_path / "theirs", tmp_path / "more")


def test_hierarchy_may_be_a_file_or_folder_and_anything_else_is_refused(tmp_path):
    probes_of(tmp_path / "theirs", KEYS)
    theirs.write_hierarchy(tmp_path / "concepts", TREE)
    (tmp_path / "concepts/hierarchy.json").rename(tmp_path / "concepts/v4.json")
    theirs.write_layer_files(tmp_path / "layers", TREE)
    for given in ("concepts/v4.json", "layers", "layers/layer1.json"):
        pack, report = bring(tmp_path / "theirs", tmp_path / "ours", hierarchy=tmp_path / given, overwrite=True)
        assert parents(pack)["E:2"] == {"B:1"} and not report.notes, given
    (tmp_path / "notes.txt").write_text("no hierarchy")
    for given, words in (
        ("concepts", "concepts holds no concepts"),
        ("gone", "gone is not there: give hierarchy.json, or the folder"),
        ("notes.txt", r"notes\.txt is not a \.json file"),
    ):
        with pytest.raises(ImportRefused, match=words):
            bring(tmp_path / "theirs", tmp_path / "no", hierarchy=tmp_path / given)


# -- room, dtype, what is read first -------------------------------------------------------------


def test_many_base_concepts_leave_room_to_descend(tmp_path):
    tree = {f"r{i}:0": [f"a{i}:1", f"b{i}:1"] for i in range(300)} | {f"s{i}:0": [] for i in range(220)}
    keys = [*tree, *(child for children in tree.values() for child in children)]
    (tmp_path / "theirs/probes/activation").mkdir(parents=True)
    made = modules(["linear"], 3, keys=keys)
    by_bank = {key: theirs.state_of(made[key]) for key in keys}
    for level in (0, 1):  # few files: banks whose parents nobody names
        (tmp_path / f"theirs/banks/layer{level}").mkdir(parents=True)
        torch.save(
            {theirs.split(key)[0]: state for key, state in by_bank.items() if key.endswith(str(level))},
            tmp_path / f"theirs/banks/layer{level}/All.bank.pt",
        )
    theirs.write_hierarchy(tmp_path / "theirs", tree)
    pack, _ = bring(tmp_path / "theirs", tmp_path / "ours")
    assert pack.n_probes == 1120 and pack.recommended["max_loaded_probes"] == 1120
    hidden = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    scores = DynamicProbeManager(pack, impl="reference", strategy="descent").score_tokens(hidden)
    roots = {key: i for i, key in enumerate(tree)}
    expected = torch.stack([theirs.expected(made[key], hidden, "none") for key in roots], dim=1) > 0.3
    opened = 2 * expected[:, :300].sum(dim=1)  # the auto threshold of an independent pack is 0.3
    assert (
        scores.coverage.active.tolist() == (520 + opened).tolist()
        and not scores.coverage.dropped.any()
        and opened.min() > 0
    )


def test_ambiguous_bank_probe_takes_the_level_without_a_file(tmp_path):
    """A's children B:1 and B:2 have one name: a file of its own says which one A's bank holds."""
    keys = ["A:0", "B:1", "B:2"]
    made = modules(["linear"], 3, keys=keys)
    folder = tmp_path / "theirs"
    for key, place in (("A:0", "layer0/A.pt"), ("B:1", "individual/layer1/B.pt")):
        (folder / place).parent.mkdir(parents=True)
        torch.save(theirs.state_of(made[key]), folder / place)
    (folder / "banks/layer1").mkdir(parents=True)
    torch.save({"B": theirs.state_of(made["B:2"])}, folder / "banks/layer1/A.bank.pt")
    theirs.write_hierarchy(folder, {"A:0": ["B:1", "B:2"]})
    pack, report = bring(folder, tmp_path / "ours")
    assert pack.n_probes == 3 and [note.kind for note in report.notes] == ["repeated"]
    hidden = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    found = DynamicProbeManager(pack, impl="reference").score_all(hidden)
    for key in keys:
        expected = theirs.expected(made[key], hidden, "none")
        assert float((found[:, pack.find(key)].double() - expected).abs().max()) < 1e-6
    (folder / "individual/layer1/B.pt").unlink()  # now nothing says which
    pack, report = bring(folder, tmp_path / "again")
    told = report.note("ambiguous").examples
    assert pack.n_probes == 2 and told == ("B of banks/layer1/A.bank.pt for B:1, of levels 1, 2",)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_requested_dtype_is_the_packs(tmp_path, dtype):
    made = {
        key: theirs.module(variant, D, i, torch.bfloat16)
        for i, (key, variant) in enumerate({"A:0": "LayerNorm", "B:0": "plain", "C:0": "linear"}.items())
    }
    theirs.write_layered(tmp_path / "theirs", made)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours", dtype=dtype)
    assert pack.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
    hidden = torch.randn(40, D, generator=torch.Generator().manual_seed(1))
    scores = DynamicProbeManager(pack, impl="reference").score_all({"resid_post.1": hidden})
    worst = max(
        float((scores[:, pack.find(key)] - theirs.expected(module, hidden, "none")).abs().max())
        for key, module in made.items()
    )
    assert worst < 1e-6 if dtype == "float32" else 1e-4 < worst < 0.02
    assert (report.note("widened").count if dtype == "float32" else report.note("widened") is None) == (
        3 if dtype == "float32" else True
    )


def test_dtype_may_be_narrowed_and_no_other_is_accepted(tmp_path):
    theirs.write_layered(
        tmp_path / "theirs", {"A:0": theirs.module("plain", D, 0), "B:0": theirs.module("plain", D, 1, torch.bfloat16)}
    )
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours", dtype="bfloat16")
    assert pack.dtype == torch.bfloat16 and report.note("rounded").examples == ("A:0 (float32 to bfloat16)",)
    for wrong in ("float64", "fp32", "", None, torch.float32):
        with pytest.raises(ConfigError, match=r"dtype is .*: give auto, float32, bfloat16"):
            bring(tmp_path / "theirs", tmp_path / "no", dtype=wrong)


def test_never_scored_probes_are_the_first_warning_with_remedies(tmp_path):
    keys = ["Root:0", "Child:1", "Lost:2", "Deep:3"]
    probes_of(tmp_path / "theirs", keys)
    theirs.write_hierarchy(tmp_path / "theirs", {"Root:0": ["Child:1"], "Lost:2": ["Deep:3"]})
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    first = str(report).splitlines()[0]
    assert first.startswith("warning: 2 of 4 probes are never scored (Lost:2, Deep:3)")
    for remedy in ("base_layers", "always on", "--hierarchy FILE", "--flat"):
        assert remedy in first
    assert (
        json.loads(json.dumps(pack.manifest["provenance"]["import"]))["warning"]
        == report.warning
        == first.removeprefix("warning: ")
    )
    assert (
        DynamicProbeManager(pack, impl="reference", strategy="descent", load_threshold=-1.0, base_layers=[0, 2])
        .score_tokens(torch.randn(3, D))
        .coverage.active
        == 4
    ).all()
    theirs.write_hierarchy(tmp_path / "theirs", {"Root:0": ["Child:1"], "Child:1": ["Lost:2"], "Lost:2": ["Deep:3"]})
    assert not str(bring(tmp_path / "theirs", tmp_path / "whole")[1]).startswith("warning")


# -- their rule ----------------------------------------------------------------------------------


def seed_rule(children, base, score, n_tokens, *, threshold, keep_top_k):
    """The rule of the first implementation in plain Python: what is scored at each token, by name. One level a token;
    the base counts in `keep_top_k`."""
    loaded = set(base)
    for t in range(n_tokens):
        scores = {name: score(name, t) for name in loaded}
        below = {
            child
            for name in loaded
            if scores[name] > threshold
            for child in children.get(name, [])
            if child not in loaded
        }
        scores |= {name: score(name, t) for name in below}
        yield scores
        others = sorted(scores.keys() - base, key=lambda name: -scores[name])
        loaded = set(base) | set(others[: max(0, keep_top_k - len(base))])


@pytest.mark.parametrize("seed", range(3))
def test_manager_can_reproduce_the_hatcat_rule_with_two_settings(tmp_path, seed):
    rng = np.random.default_rng(seed)
    keys, tree = forest(rng, 14, 260)
    made = probes_of(tmp_path / "theirs", keys)
    theirs.write_hierarchy(tmp_path / "theirs", tree)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert report.note("not_down").count > 5  # levels as they state them
    base = {key for key in keys if key.endswith(":0")}
    n_tokens = 60
    hidden = (
        torch.randn(n_tokens, D, generator=torch.Generator().manual_seed(seed)).cumsum(0)
        / torch.arange(1, n_tokens + 1).sqrt()[:, None]
    )
    everything = {key: theirs.expected(module, hidden, "none").tolist() for key, module in made.items()}
    manager = DynamicProbeManager(
        pack,
        base_layers=[0],
        load_threshold=0.3,
        keep_top_k=30 - len(base) if len(base) < 30 else 0,
        max_rounds=1,
        impl="reference",
        strategy="descent",
    )
    state, n_equal, sizes = None, 0, []
    for t, expected in enumerate(
        seed_rule(tree, base, lambda name, t: everything[name][t], n_tokens, threshold=0.3, keep_top_k=30)
    ):
        state, scores = manager.step(state, hidden[t : t + 1])
        ours = {
            pack.concepts[probe]["id"]: float(value)
            for probe, value in zip(scores.probes.tolist(), scores.values.tolist(), strict=True)
        }
        assert ours.keys() == expected.keys() and max(abs(ours[name] - expected[name]) for name in ours) < 1e-6
        n_equal, sizes = n_equal + 1, [*sizes, len(ours)]
    assert n_equal == n_tokens and max(sizes) > 40 > 30 >= len(base)
    # By default a token goes to the bottom, and 30 are kept besides the base: more is scored.
    usual = DynamicProbeManager(pack, load_threshold=0.3, impl="reference", strategy="descent")
    assert usual.step(None, hidden[:1])[1].coverage.active[0] > sizes[0]


# -- what is seen --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A host, its tokenizer, a pack without thresholds, and one with."""
    folder = tmp_path_factory.mktemp("watched")
    model = make_model()
    mute = make_pack(folder / "mute", model, name="mute", rule="independent", alert_threshold=None)
    return model, tokenizer(), mute, make_pack(folder / "rated", model, name="rated", rule="independent", n=12, seed=3)


def by_score(pack, scores, most):
    """The best of what is active by score, then number, in plain Python."""
    active = list(zip(scores.active(0).tolist(), scores.active_scores(0).tolist(), strict=True))
    return [
        (pack.concepts[probe]["id"], score)
        for probe, score in sorted(active, key=lambda pair: (-pair[1], pair[0]))[:most]
    ]


def test_pack_without_thresholds_ranks_concepts_and_says_none_fire(watched):
    model, tokens, mute, _ = watched
    manager = DynamicProbeManager(mute, impl="reference", strategy="descent")
    wide, plain = (
        Console(width=150, height=60, record=True, force_terminal=live, file=io.StringIO()) for live in (True, False)
    )
    with LiveView(wide, title="t", n_rows=40) as live, PlainView(plain) as lines:
        for event in manager.stream(model, tokens, "w1 w5", max_new_tokens=5, do_sample=False):
            assert [(concept.concept, concept.score) for concept in event.ranked(3)] == by_score(
                mute, event.scores, 3
            ) and event.leading(3) == []
            assert not any(concept.fired for concept in event.ranked(10))
            live.show(event)
            lines.show(event)
            result = event.result
    listed = plain.export_text().splitlines()
    assert (
        len(listed) == 5
        and all("ranked, not firing: concept" in line for line in listed[:-1])
        and "unseen" in listed[-1]
        and "alert" not in "".join(listed)
    )
    wide.print(live.render())
    shown = wide.export_text()
    assert "ranked, not firing if there is no alert" in shown and shown.count("not firing") > 5 and "nan" not in shown
    summary(plain, result, [])
    text = plain.export_text()
    best = result.top(1, phase="generated")[0]
    assert (
        "ranked, not firing: highest scores over the generated tokens" in text
        and f"{best.score:.2f}" in text
        and "no concept fired" not in text
    )


def test_only_packs_without_thresholds_are_ranked_in_a_group(watched):
    model, tokens, mute, rated = watched
    manager = DynamicProbeManager([mute, rated], impl="reference", strategy="descent")
    console = Console(width=200, record=True, file=io.StringIO())
    n_fired = 0
    with PlainView(console) as view:
        for event in manager.stream(model, tokens, "w1 w5", max_new_tokens=5, do_sample=False):
            assert all(concept.concept.startswith("mute:") for concept in event.ranked(5)) and all(
                concept.concept.startswith("rated:") for concept in event.leading(5)
            )
            assert len(event.ranked(5)) == (0 if event.unseen else 5)
            n_fired += len(event.leading(3))
            view.show(event)
    lines = console.export_text()
    assert (
        n_fired
        and len(re.findall(r"rated:[^;]*? \+\d", lines)) == n_fired
        and lines.count("ranked, not firing: mute:") == 4
    )
    alone = DynamicProbeManager(rated, impl="reference", strategy="descent")
    assert all(
        event.ranked(5) == [] for event in alone.stream(model, tokens, "w1 w5", max_new_tokens=2, do_sample=False)
    )


# -- their page ----------------------------------------------------------------------------------


def test_every_example_of_the_hatcat_page_runs_with_the_shown_output(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs/importers.md").read_text(encoding="utf-8")
    page = page.split("\n## HatCat details\n")[1]
    blocks = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    host = tmp_path / "host"
    model = make_model()
    model.save_pretrained(host)
    tokenizer().save_pretrained(host)
    keys, tree = forest(np.random.default_rng(5), 6, 60)
    made = modules(["plain"], HIDDEN, keys=keys)
    theirs.write_layered(tmp_path / "lens_packs/mine", made)
    theirs.write_hierarchy(tmp_path / "concept_packs/mine", tree)
    monkeypatch.chdir(tmp_path)

    def run(line):
        # The site of a host of three layers, and the host itself, where the page speaks of a real one.
        monkeypatch.setattr(
            sys,
            "argv",
            shlex.split(
                line.replace("resid_post.15", "resid_post.1")
                .replace(" demo ", f" {host} ")
                .replace("Tell me about whales.", "w1 w5")
            ),
        )
        with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cli.main()
        out, error = capsys.readouterr()
        assert ended.value.code == 0, error
        return out

    imported, shown = map(run, commands)
    assert (
        imported.splitlines()[0].startswith("packs/mine: 60 probes")
        and shown.count("ranked, not firing") > 10
        and "by rank, which does not say that they are there" in shown
    )
    held = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(block, held)
    pack, n_base = held["pack"], held["n_base"]
    assert n_base == sum(key.endswith(":0") for key in keys) and {c["id"]: c["level"] for c in pack.concepts} == {
        key: theirs.split(key)[1] for key in keys
    }
    assert (
        (held["theirs"].config.max_rounds, held["theirs"].config.keep_top_k) == (1, 30 - n_base)
        and held["usual"].config.max_rounds is None
        and held["usual"].config.keep_top_k == 30
    )
    for option in re.findall(r"^\| `(--[a-z-]+)", page, flags=re.MULTILINE):
        assert option in {
            name
            for parameter in typer.main.get_command(cli.app).commands["import"].commands["hatcat"].params
            for name in parameter.opts
        }


def test_never_scored_probes_are_the_first_line_of_the_command(tmp_path, monkeypatch, capsys):
    probes_of(tmp_path / "theirs", KEYS)
    for extra in ([], ["--json"]):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "probemon",
                "import",
                "hatcat",
                str(tmp_path / "theirs"),
                str(tmp_path / f"ours{len(extra)}"),
                "--site",
                "resid_post.1",
                "--normalize",
                "none",
                "--allow-unlisted",
                *extra,
            ],
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, error = capsys.readouterr()
        assert ended.value.code == 0
        warning = "warning: 4 of 5 probes are never scored (B:1, C:1, D:2, ...)"
        assert (error if extra else out).startswith(warning) and (
            json.loads(out)["report"]["warning"].startswith(warning.removeprefix("warning: "))
            if extra
            else out.count("warning:") == 1
        )


def test_concepts_listed_without_edges_belong_to_the_hierarchy(tmp_path):
    """Roots without children, as `{"Name:0": []}`: they are in the hierarchy, so it is that of the probes."""
    from probemon.lab.importers.hatcat_report import KINDS
    from probemon.lab.importers.hatcat_tree import node_of, read_graph
    from probemon.lab.importers.report import Notes
    from probemon.lab.importers.weights import Folder

    keys = [f"Root{i}:0" for i in range(9)]
    (tmp_path / "hierarchy.json").write_text(
        json.dumps(
            {
                "parent_to_children": {**{key: [] for key in keys}, "Root0:0": ["Child:1"]},
                "child_to_parent": {"Child:1": "Root0:0"},
            }
        )
    )
    graph = read_graph(Folder(tmp_path), Notes(KINDS))
    assert set(graph.parents) == {node_of(key) for key in [*keys, "Child:1"]}
