"""An int8 copy of a pack scores within its stated error, in every implementation."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from conftest import HIDDEN, make_pack
from probemon import DynamicProbeManager, ProbePack
from probemon.cli.app import app
from probemon.engine.kernels import IMPLS
from probemon.errors import ConfigError, PackCorrupt, PackError
from probemon.packs.quantize import quantize, quantize_weights
from probemon.util.files import sha256


@pytest.fixture(scope="module")
def small(pack, tmp_path_factory):
    return quantize(pack, tmp_path_factory.mktemp("int8") / "small")


def test_int8_weights_are_within_half_a_step_of_the_original():
    w = torch.randn(7, 5, 33, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    w[3, 2] = 0
    made = quantize_weights({"w1": w, "b1": torch.ones(7, 5)})
    back = made["w1"].double() * made["w1_scale"].double()[..., None]
    assert (
        made["w1"].dtype == torch.int8
        and ((back - w.double()).abs() <= made["w1_scale"].double()[..., None] * 0.5001).all()
    )
    assert int(made["w1"].abs().max()) == 127 and made["w1_scale"][3, 2] == 1 and not made["w1"][3, 2].any()


def test_int8_copy_states_its_measured_error(pack, small):
    stated = small.manifest["quality"]["int8"]
    error = (small.golden_scores - pack.golden_scores).abs()
    assert stated["states"] == "golden" and stated["n_states"] == len(pack.golden_hidden)
    assert (
        stated["max_score_error"] == pytest.approx(float(error.max()), abs=1e-7)
        and 0 < stated["max_score_error"] < 0.05
    )
    changed = (small.golden_scores > small.alert_threshold) != (pack.golden_scores > pack.alert_threshold)
    assert (
        stated["n_fired_changed"] == int(changed.sum())
        and stated["n_fired"] == int((pack.golden_scores > pack.alert_threshold).sum()) > 0
    )
    assert (
        small.manifest["provenance"]["quantized_from"]["sha256"]
        == pack.manifest["files"]["probes.safetensors"]["sha256"]
    )
    assert f"{stated['max_score_error']:.2g}" in (small.directory / "README.md").read_text()
    assert [c["id"] for c in small.concepts] == [c["id"] for c in pack.concepts]


def test_pack_without_golden_states_reports_random_states(model, tmp_path):
    stated = quantize(make_pack(tmp_path / "a", model, golden_hidden=None), tmp_path / "b").manifest["quality"]["int8"]
    assert stated["states"] == "random" and stated["max_score_error"] > 0


@pytest.mark.parametrize("arena", [None, 9], ids=["resident", "paged"])
@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation_scores_the_int8_copy_as_the_reference(small, impl, arena):
    arena_bytes = arena and arena * small.weight_bytes() // small.n_probes
    manager = DynamicProbeManager(
        small, impl=impl, arena_bytes=arena_bytes, strategy="descent"
    )  # not measured: the interpreter takes long
    states = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = DynamicProbeManager(small, impl="reference").score_all(states)
    assert (manager.score_all(states) - expected).abs().max() < 1e-6
    mine, theirs = (
        manager.score_tokens(states, prompt_len=2),
        DynamicProbeManager(small, impl="reference").score_tokens(states, prompt_len=2),
    )
    assert np.array_equal(mine.probes, theirs.probes) and np.array_equal(mine.ptr, theirs.ptr)
    manager.arena.check_integrity()


def test_damaged_scale_is_detected(small, tmp_path):
    tensors = load_file(small.directory / "probes.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in ("concepts.jsonl", "README.md"):
        (copy / file).write_bytes((small.directory / file).read_bytes())

    def write(tensors):
        save_file(tensors, copy / "probes.safetensors")
        manifest = json.loads((small.directory / "manifest.json").read_text())
        manifest["files"]["probes.safetensors"] = {
            "sha256": sha256(copy / "probes.safetensors"),
            "size": (copy / "probes.safetensors").stat().st_size,
        }
        (copy / "manifest.json").write_text(json.dumps(manifest))

    write({**tensors, "w1_scale": tensors["w1_scale"].index_fill(0, torch.tensor([5]), float("nan"))})
    with pytest.raises(PackCorrupt, match=r"w1_scale of concept .* is not finite"):
        ProbePack.open(copy).check_finite()
    write({name: t for name, t in tensors.items() if name != "w3_scale"})
    with pytest.raises(PackCorrupt, match=r"scales \['w1_scale'\], expected \['w1_scale', 'w3_scale'\]"):
        ProbePack.open(copy)
    write({**tensors, "w3": tensors["w3"].to(torch.float32)})
    with pytest.raises(PackCorrupt, match=r"w3 is torch.float32, w1 torch.int8: one dtype a pack"):
        ProbePack.open(copy)


def test_int8_pack_is_not_quantised_again_and_nothing_is_overwritten(pack, small, tmp_path):
    with pytest.raises(ConfigError, match="int8 already"):
        quantize(small, tmp_path / "twice")
    with pytest.raises(PackError, match="exists"):
        quantize(pack, small.directory)


def test_quantize_command_prints_size_and_error(pack, tmp_path):
    done = CliRunner().invoke(app, ["quantize", str(pack.directory), str(tmp_path / "out"), "--json"])
    told = json.loads(done.stdout)
    assert (
        told["weight_bytes"] < told["source_weight_bytes"]
        and told["max_score_error"] == ProbePack.open(tmp_path / "out").manifest["quality"]["int8"]["max_score_error"]
    )
    assert (
        "scores move by at most"
        in CliRunner().invoke(app, ["quantize", str(pack.directory), str(tmp_path / "again")]).stdout
    )
