"""A pack written probe by probe equals one written whole; a failure leaves nothing behind."""

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nets import SHAPES, oracle, weights
from probemon import ProbePack
from probemon.core.probes import Architecture
from probemon.errors import ConfigError, HierarchyError, PackCorrupt, PackError
from probemon.packs.writer import PackWriter

N, D = 11, 13
ROOT = Path(__file__).parents[2]


def concepts(n=N):
    """Given in another order than they are numbered in."""
    return [{"id": f"c{i}", "name": f"concept {i}", "parents": [f"c{i + 2}"] if i + 2 < n else []} for i in range(n)]


def arguments(**changes):
    return {
        "name": "random",
        "concepts": concepts(),
        "score_rule": "path",
        "inputs": [{"site": "resid_post.1", "norm": "rmsnorm"}, {"site": "resid_post.0"}],
        "host": {"hidden_size": D},
        "licence": "CC0-1.0",
        "card": "Random.\n",
        "input_index": torch.arange(N) % 2,
        "alert_threshold": torch.linspace(0.1, 0.9, N),
        "aggregated": {"ema(0.3)": torch.linspace(0.2, 0.8, N)},
        "golden_hidden": torch.randn(3, 2, D, generator=torch.Generator().manual_seed(7)),
        "provenance": {"seed": 0},
        **changes,
    }


def writer(path, net, **changes):
    return PackWriter(path, architecture=Architecture.of(net, "net"), dtype=net["w1"].dtype, **arguments(**changes))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("rule", ["path", "independent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_probe_by_probe_in_any_order_equals_a_pack_written_whole(tmp_path, shape, dtype, rule):
    net = weights(SHAPES[shape], D, dtype, N)
    whole = ProbePack.write(tmp_path / "whole", weights=net, **arguments(score_rule=rule))
    with writer(tmp_path / "single", net, score_rule=rule) as made:
        for i in torch.randperm(N, generator=torch.Generator().manual_seed(1)).tolist():
            made.put(i, {key: tensor[i] for key, tensor in net.items()})
    with writer(tmp_path / "sliced", net, score_rule=rule) as slices:
        for start, stop in ((4, N), (0, 3), (3, 4)):
            slices.put_slice(start, {key: tensor[start:stop] for key, tensor in net.items()})
    assert files(tmp_path / "single") == files(tmp_path / "whole") == files(tmp_path / "sliced")
    assert (
        whole.verify() == made.opened.verify() == 0
        and ProbePack.open(tmp_path / "single", verify=True).name == "random"
    )
    for i, concept in enumerate(whole.concepts):
        for key, tensor in net.items():
            assert torch.equal(whole.weights[key][i], tensor[int(concept["id"][1:])])


def test_written_file_equals_one_from_safetensors(tmp_path):
    pack = ProbePack.write(tmp_path / "pack", weights=weights((4, 3), D, torch.bfloat16, N), **arguments())
    save_file(load_file(pack.directory / "probes.safetensors"), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (pack.directory / "probes.safetensors").read_bytes()


def test_put_returns_the_probes_scores_on_golden_states(tmp_path):
    net = weights((4, 3), D, torch.float32, N)
    changes = {
        "inputs": [{"site": "resid_post.1"}],
        "input_index": None,
        "golden_hidden": torch.randn(5, 1, D),
        "score_rule": "independent",
    }
    with writer(tmp_path / "pack", net, **changes) as made:
        own = made.put_slice(0, net)
    assert own.shape == (5, N) and (own - oracle(net, changes["golden_hidden"][:, 0])).abs().max() < 1e-6
    with writer(tmp_path / "none", net, golden_hidden=None) as made:
        assert made.put_slice(0, net) is None


def test_small_write_blocks_change_nothing(tmp_path, monkeypatch):
    net = weights((4, 3), D, torch.float32, N)
    ProbePack.write(tmp_path / "whole", weights=net, **arguments())
    monkeypatch.setattr("probemon.packs.writer._BLOCK_BYTES", 700)
    ProbePack.write(tmp_path / "blocks", weights=net, **arguments())
    assert files(tmp_path / "whole") == files(tmp_path / "blocks")


def test_card_provenance_and_quality_can_change_until_the_end(tmp_path):
    net = weights((), D, torch.float32, N)
    with writer(tmp_path / "pack", net) as made:
        made.put_slice(0, net)
        made.card, made.quality, made.provenance["late"] = "# later\n", {"x": 1}, True
    assert (tmp_path / "pack/README.md").read_text() == "# later\n"
    manifest = made.opened.manifest
    assert manifest["quality"] == {"x": 1} and manifest["provenance"] == {"seed": 0, "late": True}


def broken(net, **changes):
    return {key: tensor.clone() for key, tensor in net.items()} | changes


@pytest.mark.parametrize(
    "put, error, words",
    [
        (lambda made, net: None, PackError, r"11 of 11 probes were not put \('c0', 'c1', 'c2', 'c3', 'c4', \.\.\.\)"),
        (
            lambda made, net: made.put_slice(0, {key: tensor[:10] for key, tensor in net.items()}),
            PackError,
            r"1 of 11 probes were not put \('c10'\)",
        ),
        (
            lambda made, net: [made.put(3, {key: tensor[3] for key, tensor in net.items()}) for _ in range(2)],
            PackError,
            "'c3' is put twice",
        ),
        (lambda made, net: made.put_slice(1, net), PackError, r"probes 1\.\.11 of 11"),
        (
            lambda made, net: made.put_slice(
                0, broken(net, w1=net["w1"].double(), w2=net["w2"].double(), w3=net["w3"].double())
            ),
            PackError,
            "float64, the pack's",
        ),
        (
            lambda made, net: made.put_slice(0, broken(net, w1=net["w1"][..., :-1])),
            PackError,
            "over 12 values .* over 13",
        ),
        (
            lambda made, net: made.put_slice(
                0, broken(net, b2=net["b2"].index_fill(0, torch.tensor([6]), float("inf")))
            ),
            PackCorrupt,
            "b2 of concept 'c6' is not finite",
        ),
        (
            lambda made, net: made.put_slice(0, broken(net, w1=net["w1"] * 1e30, w2=net["w2"] * 1e30)),
            PackCorrupt,
            "does not score a number on the golden states",
        ),
        (
            lambda made, net: (made.put_slice(0, net), made.quality.update(x=object())),
            PackError,
            "the manifest cannot be written as JSON",
        ),
        (lambda made, net: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_failed_write_is_named_and_leaves_nothing(tmp_path, put, error, words):
    net = weights((4, 3), D, torch.float32, N)
    with pytest.raises(error, match=words), writer(tmp_path / "pack", net) as made:
        put(made, net)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PackError, match="not written yet"):
        assert made.opened


def test_finite_weights_whose_sum_overflows_are_accepted(tmp_path):
    net = weights((), D, torch.float32, N)
    net["w1"][3] = 3e38
    pack = ProbePack.write(tmp_path / "pack", weights=net, **arguments(golden_hidden=None))
    assert bool((pack.weights["w1"][pack.find("c3")] == 3e38).all())


def test_failed_overwrite_keeps_the_old_pack(tmp_path):
    net = weights((), D, torch.float32, N)
    ProbePack.write(tmp_path / "pack", weights=net, **arguments())
    before = files(tmp_path / "pack")
    with pytest.raises(PackError, match="were not put"), writer(tmp_path / "pack", net, overwrite=True):
        pass
    assert files(tmp_path / "pack") == before and len(list(tmp_path.iterdir())) == 1
    with writer(tmp_path / "pack", net, overwrite=True, card="# new\n") as made:
        made.put_slice(0, net)
    assert (tmp_path / "pack/README.md").read_text() == "# new\n" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"score_rule": "vote"}, ConfigError, "vote"),
        ({"concepts": [{"id": "a"}]}, PackError, "'a' lacks name, parents"),
        ({"concepts": [{"id": "a", "name": "a", "parents": ["a"]}]}, HierarchyError, "cycle"),
        (
            {"golden_hidden": torch.zeros(3, 1, D)},
            PackError,
            r"golden_hidden has shape \(3, 1, 13\), expected \(G, 2, 13\)",
        ),
        ({"input_index": torch.full((N,), 2)}, PackError, r"input_index must lie in 0\.\.1"),
        ({"dtype": torch.int16}, ConfigError, "int16"),
    ],
)
def test_invalid_pack_is_refused_before_anything_is_written(tmp_path, changes, error, words):
    made = {"architecture": Architecture(D), "dtype": torch.float32, **arguments(), **changes}
    with pytest.raises(error, match=words):
        PackWriter(tmp_path / "pack", **made)
    assert list(tmp_path.iterdir()) == []


def test_text_that_utf8_cannot_hold_is_named(tmp_path):
    net = weights((), D, torch.float32, N)
    odd = concepts()
    odd[4]["definition"] = "half of a pair: \ud800"
    with pytest.raises(PackError, match="concept 'c4' cannot be written as JSON in UTF-8"):
        ProbePack.write(tmp_path / "pack", weights=net, **arguments(concepts=odd))
    assert list(tmp_path.iterdir()) == []


def test_disk_that_is_too_small_is_reported_at_the_start(tmp_path):
    net = weights((), 4096, torch.float32, N)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # as a full disk: the file cannot grow
    try:
        with pytest.raises(PackError, match=r"pack cannot be written \(File too large.*make room"):
            PackWriter(
                tmp_path / "pack",
                architecture=Architecture(4096),
                dtype=torch.float32,
                **arguments(host={}, golden_hidden=None),
            ).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [] and net["w1"].nbytes > 100_000


def test_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError, match="cannot be written"):
        ProbePack.write(tmp_path / "file/pack", weights=weights((), D, torch.float32, N), **arguments())


def test_writer_memory_does_not_grow_with_the_pack(tmp_path):
    program = f"""
import resource, sys, torch
from probemon.packs.writer import PackWriter
from probemon.core.probes import Architecture
n, d = 32, 16384
concepts = [{{"id": str(i), "name": str(i), "parents": []}} for i in range(n)]
probe = {{"w1": torch.ones(64, d), "b1": torch.zeros(64), "w3": torch.ones(64), "b3": torch.zeros(())}}
def write(path, n):
    shape = {{"architecture": Architecture(d, (64,)), "dtype": torch.float32, "score_rule": "independent"}}
    about = {{"inputs": [{{"site": "resid_post.0"}}], "host": {{}}, "licence": "x", "card": "x"}}
    with PackWriter(path, name="x", concepts=concepts[:n], **shape, **about) as writer:
        for i in range(n):
            writer.put(i, probe)
write({str(tmp_path / "small")!r}, 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write({str(tmp_path / "large")!r}, n)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert (tmp_path / "large/probes.safetensors").stat().st_size > 128 << 20
    assert int(done.stdout) * 1024 < 32 << 20


def test_single_value_with_an_odd_stride_is_written_correctly():
    from probemon.packs.writer import _bytes_of

    odd = torch.arange(9)[4:5].as_strided((1,), (3,), 4)
    assert odd.is_contiguous() and bytes(_bytes_of(odd)) == (4).to_bytes(8, "little")


def test_only_a_pack_is_overwritten_and_other_files_survive(tmp_path, monkeypatch):
    """What is refused stays as it was, and leaves no other name behind."""
    net = weights((), D, torch.float32, N)

    def write(path, **how):
        return ProbePack.write(path, weights=net, **arguments(), overwrite=True, **how)

    write(tmp_path / "pack")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "pack")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    write(tmp_path / "mixed")
    (tmp_path / "mixed/thesis.txt").write_text("years of work")
    write(tmp_path / "damaged")
    (tmp_path / "damaged/manifest.json").write_text("{")
    (tmp_path / "folder/.cache").mkdir(parents=True)
    there = sorted(path for path in tmp_path.rglob("*"))
    for name, words in (
        ("thesis", "thesis holds thesis.txt, which is not part of a pack and would be lost"),
        ("mixed", "mixed holds thesis.txt"),
        ("file", "file is a file, not a pack"),
        ("link", "link is a link, not a pack"),
        ("nowhere", "nowhere is a link"),
        ("damaged", "damaged is not a whole pack"),
        ("folder", "folder holds .cache|folder holds no pack"),
    ):
        with pytest.raises(PackError, match=words):
            write(tmp_path / name)
        with pytest.raises(PackError, match=f"{name} exists"):
            ProbePack.write(tmp_path / name, weights=net, **arguments())
    monkeypatch.chdir(tmp_path / "pack")
    with pytest.raises(PackError, match="is the folder that this is run in"):
        write(tmp_path / "pack")
    monkeypatch.chdir(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*")) == there
    (tmp_path / "empty").mkdir()
    for name in ("pack", "empty"):
        write(tmp_path / name)
    (tmp_path / "pack/.cache/huggingface").mkdir(parents=True)  # as a download to a folder leaves it
    (tmp_path / "pack/.gitattributes").write_text("")
    assert write(tmp_path / "pack").n_probes == N


def test_folder_that_appears_at_the_target_is_not_replaced(tmp_path):
    net = weights((), D, torch.float32, N)
    with pytest.raises(PackError, match=r"holds thesis\.txt"), writer(tmp_path / "pack", net, overwrite=True) as made:
        made.put_slice(0, net)
        (tmp_path / "pack").mkdir()
        (tmp_path / "pack/thesis.txt").write_text("years of work")
    assert [path.name for path in tmp_path.iterdir()] == ["pack"] and (tmp_path / "pack/thesis.txt").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=str)
def test_interrupted_command_removes_its_partial_pack(tmp_path, number):
    n = 20_000
    ProbePack.write(
        tmp_path / "large",
        name="large",
        concepts=[{"id": str(i), "name": str(i), "parents": []} for i in range(n)],
        weights=weights((), 500, torch.float32, n),
        score_rule="independent",
        inputs=[{"site": "resid_post.0"}],
        host={},
        licence="CC0-1.0",
        card="Random.\n",
    )
    words = [
        str(Path(sys.executable).with_name("probemon")),
        "pack",
        "rename",
        str(tmp_path / "large"),
        str(tmp_path / "made"),
        "--name",
        "other",
    ]
    for _ in range(3):  # where the machine is busy elsewhere, the signal may come too late
        process = subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=partial(signal.signal, number, signal.SIG_DFL),
        )  # under nohup it would be ignored
        while process.poll() is None and not list(tmp_path.glob(".made-*")):
            time.sleep(0.001)
        process.send_signal(number)
        if process.wait() != 0:
            break
        shutil.rmtree(tmp_path / "made")
    assert process.returncode == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


@pytest.mark.parametrize("where", ["id", "name", "pack"])
def test_names_with_control_characters_are_refused(tmp_path, where):
    """A terminal would act on them: packs come from strangers."""
    net, name = weights((), D, torch.float32, N), "\x1b[31mred\x1b[2J"
    changes = (
        {"name": name}
        if where == "pack"
        else {
            "concepts": [
                {**concepts()[0], where: name, "parents": []},
                *({**one, "parents": []} for one in concepts()[1:]),
            ]
        }
    )
    with pytest.raises(
        PackError,
        match=r"(concept's (id|name)|pack's name) is '\\x1b\[31mred.*: give a text without control characters",
    ):
        ProbePack.write(tmp_path / "pack", weights=net, **arguments(**changes))
    assert not list(tmp_path.iterdir())
    written = json.dumps(name)[1:-1]
    dull = "n" * len(written)  # a file that is longer than it was is refused for that
    harmless = (
        {"name": dull}
        if where == "pack"
        else {"concepts": [{**one, "parents": [], where: f"{dull}{i}"} for i, one in enumerate(concepts())]}
    )
    ProbePack.write(tmp_path / "pack", weights=net, **arguments(**harmless))
    file = tmp_path / "pack" / ("manifest.json" if where == "pack" else "concepts.jsonl")
    file.write_text(file.read_text().replace(dull, written))
    with pytest.raises(PackCorrupt, match=r"\\x1b\[31mred.* a terminal would act on its control characters"):
        ProbePack.open(tmp_path / "pack")


@pytest.mark.parametrize("change", [{"architecture": {"kind": "mlp", "hidden": [10**9]}}, {"dtype": "float8"}], ids=str)
def test_manifest_that_contradicts_its_weights_is_refused(tmp_path, change):
    ProbePack.write(tmp_path / "pack", weights=weights((), D, torch.float32, N), **arguments())
    manifest = json.loads((tmp_path / "pack/manifest.json").read_text())
    (tmp_path / "pack/manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(PackCorrupt, match=f"{next(iter(change))} is .* the manifest says"):
        ProbePack.open(tmp_path / "pack")
