"""Every example of the importer page runs, in order, on files as other projects write them."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import foreign_files as foreign
import hatcat_packs as hatcat
from probemon import ProbePack
from probemon.cli import app as cli
from probemon.host.model import find_layers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/importers.md").read_text(encoding="utf-8")
PAGE, _ = TEXT.split("\n## HatCat details\n")  # run by tests/lab/importers/test_hatcat_users.py


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with every file that the page speaks of."""
    here = tmp_path_factory.mktemp("page")
    lenses = here / "lens_packs/mine"
    hatcat.write_layered(lenses, hatcat.modules(["plain"], foreign.D))
    hatcat.write_hierarchy(lenses)
    foreign.probelab_logistic(here / "probelab-probes/lie.pt")
    foreign.probelab_mlp(here / "probelab-probes/net.pt")
    (here / "probekit.json").write_text(
        json.dumps({"deception": foreign.probekit_dict()[0], "refusal": foreign.probekit_dict(45, False)[0]})
    )
    foreign.steerkit_probe(here / "steerkit-probes/refusal.safetensors")
    foreign.sae(here / "sae", "jumprelu")
    (here / "sae-names.json").write_text('{"7": "cats"}')
    foreign.hallucination_head(here / "hallucination-head")
    foreign.lie_detector(here / "dyl-org-host/probe.pt", None, layer=2)
    (here / "dyl-org-host/sweep.json").write_text("{}")
    foreign.control_vector(here / "happy.gguf", [1, 2, 3])
    tensors = {
        "animal.weight": (1, 12),
        "animal.bias": (1,),
        "kinds.weight": (5, 12),
        "kinds.bias": (5,),
        "fc1.weight": (6, 12),
        "fc1.bias": (6,),
        "fc2.weight": (1, 6),
        "mean": (12,),
        "std": (12,),
    }
    save_file(
        {name: foreign.random(*shape, seed=i).abs() + 0.1 for i, (name, shape) in enumerate(tensors.items())},
        here / "heads.safetensors",
    )
    (mapping,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    (here / "heads.json").write_text(mapping)
    return here


def test_every_python_example_runs(place):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 10
    (place / "example.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=place,
        capture_output=True,
        text=True,
        env={**__import__("os").environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "HatCat" in PAGE and "probes" in done.stdout
    for name in (
        "mine-too",
        "sklearn",
        "lie",
        "probekit-too",
        "refusal",
        "cats",
        "hallucination-too",
        "lies-too",
        "happy-too",
        "own",
        "heads",
    ):
        assert ProbePack.open(place / "packs" / name, verify=True).n_probes
    assert [c["id"] for c in ProbePack.open(place / "packs/sklearn").concepts] == [
        "deception",
        "refusal",
        "humour",
        "animal/cat",
        "animal/dog",
        "animal/owl",
        "creature/cat",
        "creature/dog",
        "creature/owl",
    ]
    assert ProbePack.open(place / "packs/sklearn").softmax_group.tolist() == [-1] * 3 + [0] * 3 + [-1] * 3


COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[2])
def test_every_command_runs_and_says_what_it_made(place, monkeypatch, capsys, line):
    monkeypatch.chdir(place)
    name, *arguments = shlex.split(line)
    assert name == "probemon" and run(monkeypatch, capsys, *arguments)[0] == 0
    target = Path(arguments[3])
    code, out, _ = run(monkeypatch, capsys, *arguments, "--overwrite", "--json")
    told, pack = json.loads(out), ProbePack.open(target, verify=True)
    assert (
        code == 0
        and told["n_probes"] == pack.n_probes
        and told["directory"] == str(target)
        and told["report"] == json.loads(json.dumps(pack.manifest["provenance"]["import"]))
    )
    code, _, error = run(monkeypatch, capsys, *arguments)
    assert code == 2 and error.startswith(f"probemon: {target} exists") and error.count("\n") == 1


def run(monkeypatch, capsys, *arguments):
    """Exit status, standard output and standard error of a command."""
    monkeypatch.setattr(sys, "argv", ["probemon", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, error = capsys.readouterr()
    return ended.value.code, out, error


def test_every_importer_has_its_command_and_its_section():
    assert {line.split()[2] for line in COMMANDS} == {
        "hatcat",
        "probelab",
        "probekit",
        "steerkit",
        "saelens",
        "hallucination",
        "lie-detectors",
        "repeng",
        "safetensors",
    }
    for section in re.findall(r"\]\(#([\w-]+)\)", PAGE):
        assert any(
            re.sub(r"[^\w]+", "-", line[3:].lower()) == section for line in TEXT.splitlines() if line.startswith("## ")
        ), section


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["probelab", "nothing.pt", "p", "--site", "resid_post.1", "--normalize", "none"], "nothing.pt"),
        (
            ["probelab", "probelab-probes", "p", "--site", "layer.1", "--normalize", "none"],
            "site 'layer.1' is not supported",
        ),
        (["probelab", "probelab-probes", "p"], "Missing option '--site'"),
        (["probelab", "probelab-probes", "p", "--site", "resid_post.1"], "Missing option '--normalize'"),
        (
            ["probelab", "probelab-probes", "p", "--site", "resid_post.1", "--normalize", "l2"],
            "normalize is 'l2': give one of 'none', 'layernorm', 'rmsnorm'",
        ),
        (["probekit", "probekit.json", "p", "--site", "resid_post.1"], "Missing option '--normalize'"),
        (["hallucination", "hallucination-head", "p"], "Missing option '--normalize'"),
        (["hatcat", "lens_packs/mine", "p", "--site", "resid_post.1"], "Missing option '--normalize'"),
        (["steerkit", "steerkit-probes", "p"], "Missing option '--scale'"),
        (["saelens", "sae", "p", "--features", "3-x"], "'3-x' is neither a number nor a range"),
        (["saelens", "sae", "p", "--features", "3,99"], "no feature 99"),
        (["saelens", "sae", "p", "--features", "3-999999999"], "no feature 9: the SAE has features 0 to 8"),
        (["saelens", "sae", "p", "--features", "1,7-3"], "'7-3' is backwards"),
        (["saelens", "sae", "p", "--sharpness", "1e-30"], "sharpness is 1e-30: give a number from 0.001 to 1000"),
        (["saelens", "sae", "p", "--names", "heads.json"], "names by number of feature"),
        (["saelens", "sae", "p", "--names", "long.json"], "names by number of feature"),
        (["saelens", "sae", "p", "--names", "twice.json"], "names by number of feature"),
        (["saelens", "probelab-probes", "p"], "cfg.json is missing"),
        (["safetensors", "heads.safetensors", "p", "--mapping", "sae-names.json"], "no field '7'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(place, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(place)
    Path("long.json").write_text('{"7": "cats", "12345678901": "dogs"}')
    Path("twice.json").write_text('{"7": "cats", "07": "dogs"}')
    code, out, error = run(monkeypatch, capsys, "import", *arguments)
    assert code == 2 and message in error and error.startswith("probemon: ") and error.count("\n") == 1 and not out
    assert not (place / "p").exists()


@pytest.mark.parametrize("command", ["hatcat", "probelab", "probekit", "safetensors"])
def test_help_names_every_kind_of_site(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "300")
    _, out, _ = run(monkeypatch, capsys, "import", command, "--help")
    assert all(site in out for site in ("resid_post.N", "attn_out.N", "mlp_out.N"))


def test_command_error_points_to_its_own_help(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    code, _, error = run(monkeypatch, capsys, "import", "hatcat", "lens_packs/mine", "p", "--site", "resid_post.1")
    assert code == 2 and error == "probemon: Missing option '--normalize'. (see probemon import hatcat --help)\n"
    _, _, error = run(monkeypatch, capsys, "import", "hatbat")
    assert error.endswith("(see probemon import --help)\n") and error.count("\n") == 1


def test_bare_command_prints_its_help(monkeypatch, capsys):
    _, asked, _ = run(monkeypatch, capsys, "import", "--help")
    code, out, error = run(monkeypatch, capsys, "import")
    assert code == 0 and not error and out.strip() == asked.strip() and out.count("\n") > 10 and "saelens" in out


def test_inspect_shows_only_known_model_details(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for line in COMMANDS[:2]:
        run(monkeypatch, capsys, *shlex.split(line)[1:], "--overwrite")
    _, out, _ = run(monkeypatch, capsys, "inspect", "packs/probelab")
    assert "for a model that is not stated (hidden size 12), read at resid_post.15" in out and "None" not in out
    code, _, error = run(monkeypatch, capsys, "inspect", "packs/probelab/manifest.json")
    assert (
        code == 2
        and error == "probemon: packs/probelab/manifest.json is a file: give the folder of the pack, packs/probelab\n"
    )


def test_page_states_the_enforced_size_limits():
    from probemon.lab.importers import flat, foreign_files, weights

    bounds = [
        line
        for line in PAGE.split("## Size limits")[1].splitlines()
        if line.startswith("| a ") or line.startswith("| the ")
    ]
    stated = [re.search(r"\| (\d+) ([GM])iB", line) for line in bounds]
    sizes = [int(found[1]) << {"G": 30, "M": 20}[found[2]] for found in stated]
    assert sizes == [
        foreign_files.MAX_BYTES,
        weights.MAX_BYTES,
        weights._MAX_PICKLE_BYTES,
        weights.MAX_JSON_BYTES,
        flat.MAX_PACK_BYTES,
    ]


NO_EMBEDDINGS = {"Mamba": "mamba", "Mamba-2": "mamba2", "Falcon-Mamba": "falcon_mamba", "RWKV": "rwkv"}


@pytest.mark.parametrize("kind", ["llama", "gpt2", *NO_EMBEDDINGS.values()])
def test_page_states_which_hidden_state_belongs_to_a_site(kind):
    """As the page says: one further than the block, but for hosts that list no embeddings; the last is a norm's."""
    settings = {
        "llama": {"intermediate_size": 24, "num_attention_heads": 2},
        "gpt2": {"n_head": 2},
        "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1},
    }.get(kind, {})
    config = AutoConfig.for_model(kind, vocab_size=61, hidden_size=16, num_hidden_layers=3, **settings)
    host, blocks = AutoModelForCausalLM.from_config(config).eval(), []
    for layer in find_layers(host)[1]:
        layer.register_forward_hook(lambda module, args, out: blocks.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        states = host(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
    first = 0 if kind in NO_EMBEDDINGS.values() else 1
    for i, block in enumerate(blocks):
        same = [j for j, state in enumerate(states) if torch.equal(state, block)]
        assert same == ([i + first] if i + first < len(states) - 1 else []), (kind, i)
    said = " ".join(PAGE.split())
    assert "The last one of most decoders is taken after the final norm" in said
    assert all(name in said.split("Two kinds of `hidden_states` differ.")[1] for name in NO_EMBEDDINGS)
