"""Own weights become a pack that reads the sites, and has the numbers, that were asked for."""

from __future__ import annotations

import pytest
import torch

from conftest import make_model
from probemon import DynamicProbeManager, ProbePack
from probemon.core.probes import as_site, parse_site
from probemon.errors import ConfigError, ImportRefused, UnknownSetting
from probemon.lab.importers.generic import import_weights

NAMES = [
    ("resid_post.15", "resid_post.15"),
    ("blocks.15.hook_resid_post", "resid_post.15"),
    ("blocks.15.hook_resid_pre", "resid_post.14"),
    ("blocks.3.hook_attn_out", "attn_out.3"),
    ("blocks.3.hook_mlp_out", "mlp_out.3"),
    ("model.layers.15", "resid_post.15"),
    ("model.layers.15.output", "resid_post.15"),
    ("layers.0", "resid_post.0"),
    ("transformer.h.7", "resid_post.7"),
    ("gpt_neox.layers.7.mlp", "mlp_out.7"),
    ("model.language_model.layers.2.self_attn", "attn_out.2"),
]


@pytest.mark.parametrize(("name", "site"), NAMES)
def test_names_of_other_tools_are_sites(name, site):
    assert as_site(name) == site
    if name != site:
        with pytest.raises(ConfigError, match=f"write '{site}'"):
            parse_site(name)


@pytest.mark.parametrize(
    "name", ["blocks.0.hook_resid_pre", "lm_head", "model.layers", "model.layers.x", "blocks.1.ln1", ""]
)
def test_other_names_are_left_as_they_are_and_refused(name):
    assert as_site(name) == name
    with pytest.raises(ConfigError, match=r"expected resid_post\.N"):
        parse_site(name)


def test_probes_of_several_layers_are_one_pack(tmp_path):
    model, generator = make_model(), torch.Generator().manual_seed(0)
    size = model.config.hidden_size
    weights = {name: (torch.randn(size, generator=generator), 0.25) for name in "abc"}
    sites = {"a": "blocks.0.hook_resid_post", "b": "model.layers.2", "c": "resid_post.0"}
    pack = import_weights(weights, tmp_path / "pack", site=sites, normalize="none")
    assert list(pack.sites) == ["resid_post.0", "resid_post.2"]
    ids = torch.tensor([[5, 6, 7, 8]])
    taken = {}
    for layer in (0, 2):
        model.model.layers[layer].register_forward_hook(
            lambda module, given, output, layer=layer: taken.__setitem__(
                layer, (output[0] if isinstance(output, tuple) else output)[0].detach()
            )
        )
    manager = DynamicProbeManager(pack, keep_top_k=0)
    with manager.attach(model) as run:
        out = model.generate(ids, max_new_tokens=1, eos_token_id=None, pad_token_id=0)
    result = run.result(out)
    for name, layer in (("a", 0), ("b", 2), ("c", 0)):
        expected = torch.sigmoid(taken[layer].double() @ weights[name][0].double() + 0.25)
        probe = pack.find(name)
        for t in range(4):
            scores = dict(zip(result.scores.active(t).tolist(), result.scores.active_scores(t).tolist(), strict=True))
            if probe in scores:
                assert scores[probe] == pytest.approx(float(expected[t]), abs=1e-5)
    assert any(pack.find("b") in result.scores.active(t) for t in range(4))


def test_site_names_every_probe_once(tmp_path):
    weights = {"a": (torch.ones(4), 0.0), "b": (torch.ones(4), 0.0)}
    for sites in ({"a": "resid_post.0"}, {"a": "resid_post.0", "b": "resid_post.1", "z": "resid_post.1"}):
        with pytest.raises(ImportRefused, match="site names other probes than there are"):
            import_weights(weights, tmp_path / "pack", site=sites, normalize="none")
    assert not (tmp_path / "pack").exists()


def test_dtype_rounds_or_keeps_and_lets_packs_merge(tmp_path):
    weights = {"a": (torch.full((16,), 1 + 2**-9), 0.5)}
    by_default = import_weights(weights, tmp_path / "default", site="resid_post.0", normalize="none")
    rounded = import_weights(weights, tmp_path / "rounded", site="resid_post.0", normalize="none", dtype="bf16")
    small = {"b": (torch.ones(16, dtype=torch.bfloat16), 0.5)}
    kept = import_weights(small, tmp_path / "kept", site="resid_post.0", normalize="none", dtype="fp32")
    assert (by_default.dtype, rounded.dtype, kept.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    with pytest.raises(ImportRefused, match="dtype is 'int8'"):
        import_weights(weights, tmp_path / "x", site="resid_post.0", normalize="none", dtype="int8")
    with pytest.raises(UnknownSetting, match="did you mean 'dtype'"):
        import_weights(weights, tmp_path / "x", site="resid_post.0", normalize="none", dtyp="bf16")
    assert isinstance(ProbePack.open(tmp_path / "rounded"), ProbePack)
