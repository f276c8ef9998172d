"""Files written by the other projects' own packages score after import as those packages do."""

import json

import numpy as np
import probekit
import probelab
import pytest
import torch
from probekit.core.collection import ProbeCollection
from probelab.probes import EEMLP, MLP, Attention, Bilinear, Logistic, MassMean
from sae_lens import (
    GatedSAE,
    GatedSAEConfig,
    JumpReLUSAE,
    JumpReLUSAEConfig,
    StandardSAE,
    StandardSAEConfig,
    TopKSAE,
    TopKSAEConfig,
)
from sklearn.linear_model import LogisticRegression
from steerkit.probe import MultinomialProbe, Probe, _split_pair_indices, _stack_xy

from probemon.core.reference import exhaustive_reference
from probemon.errors import ImportRefused
from probemon.lab.importers.probekit import import_collection, import_file, import_probes
from probemon.lab.importers.probelab import import_files as import_probelab
from probemon.lab.importers.saelens import import_sae
from probemon.lab.importers.steerkit import import_files as import_steerkit

D, READ = 16, {"site": "resid_post.1", "normalize": "none"}
G = torch.Generator().manual_seed(0)
SPREAD, MEAN = torch.linspace(0.3, 4, D), torch.linspace(-3, 3, D)
TRAIN, NEW = (torch.randn(n, D, generator=G) * SPREAD + MEAN for n in (300, 60))
YES = (((TRAIN - MEAN) / SPREAD) @ torch.randn(D, generator=G) + torch.randn(300, generator=G) > 0).float()


def scores(pack, x=NEW):
    return exhaustive_reference({site: x for site in pack.sites}, pack)


def close(found, expected, bound=1e-6):
    assert float(expected.std()) > 0.02 and float((found.double() - expected.double()).abs().max()) < bound


# -- probelab ------------------------------------------------------------------------------------


def trained(probe):
    probe.initialize(TRAIN, YES)
    optimizer = torch.optim.Adam(probe.parameters(), lr=0.02) if list(probe.parameters()) else None
    for _ in range(30 if optimizer else 0):
        optimizer.zero_grad()
        probe.loss_on_batch(TRAIN, YES).backward()
        optimizer.step()
    return probe


def test_probelab_files_score_as_probelab_predicts(tmp_path):
    probes = {
        "lie": Logistic(seed=0),
        "mean": MassMean(normalize=True),
        "uncentred": MassMean(center=False),
        "net": MLP(hidden_dim=9, seed=0, dropout=0.1),
        "exit": EEMLP(n_layers=2, hidden_dim=5, seed=0),
    }
    for name, probe in probes.items():
        trained(probe).save(tmp_path / f"probes/{name}.pt")
    pack = import_probelab(tmp_path / "probes", tmp_path / "pack", **READ)
    for name, probe in probes.items():
        # probelab computes in fp32 itself; in fp64 it is what its file says.
        expected = type(probe).load(tmp_path / f"probes/{name}.pt").double().predict_tensor(NEW.double())
        close(scores(pack)[:, pack.find(name)], expected, 2e-6)
        close(scores(pack)[:, pack.find(name)], probe.predict_tensor(NEW), 1e-5)


def test_unsupported_probelab_probes_are_refused(tmp_path):
    for probe in (Bilinear(rank=2), Attention()):
        probe.initialize(TRAIN if isinstance(probe, Bilinear) else TRAIN[None], YES)
        probe.save(tmp_path / "p.pt")
        with pytest.raises(ImportRefused, match=f"probelab {type(probe).__name__}"):
            import_probelab(tmp_path / "p.pt", tmp_path / "pack", **READ)
    trained(MLP(activation="gelu", seed=0)).save(tmp_path / "gelu.pt")
    with pytest.raises(ImportRefused, match="gelu"):
        import_probelab(tmp_path / "gelu.pt", tmp_path / "pack", **READ)
    assert probelab.__name__ == "probelab" and not (tmp_path / "pack").exists()


# -- probekit ------------------------------------------------------------------------------------


def test_probekit_probes_score_as_the_sigmoid_of_their_score(tmp_path):
    from probekit.fitters.dim import fit_dim
    from probekit.fitters.logistic import fit_logistic

    x, y = TRAIN.numpy().astype(np.float64), YES.numpy().astype(int)
    x[:, 3] = 1.5  # a value that never varies
    probes = {
        "scaled": fit_logistic(x, y, cv_folds=None),
        "raw": fit_logistic(x, y, cv_folds=None, normalize=False),
        "means": fit_dim(x, y, normalize=True),
    }
    (tmp_path / "probes.json").write_text(
        json.dumps({name: probe.to_dict() for name, probe in probes.items()}, default=float)
    )
    packs = [
        import_probes(probes, tmp_path / "objects", **READ),
        import_file(tmp_path / "probes.json", tmp_path / "file", **READ),
        import_collection(ProbeCollection([*probes.values()]), list(probes), tmp_path / "collection", **READ),
    ]
    for i, pack in enumerate(packs):
        for name, probe in probes.items():
            logit = torch.from_numpy(np.asarray(probe.predict_score(NEW.double().numpy()), dtype=np.float64))
            close(scores(pack)[:, pack.find(name)], torch.sigmoid(logit), 2e-6 if i < 2 else 5e-6)
    assert probekit.__name__ == "probekit"


# -- steerkit ------------------------------------------------------------------------------------


class Handle:
    """What steerkit's fit asks of its model."""

    model_id, n_layers, d_model = "tiny", 4, D


def pairs(layers):
    positive, negative = TRAIN[YES > 0], TRAIN[YES == 0]
    n = min(len(positive), len(negative))
    return {layer: torch.stack([positive[:n], negative[:n]], dim=1) for layer in layers}


def test_steerkit_files_score_as_their_fit_if_the_scale_is_given(tmp_path):
    acts = pairs([-1, 0, 2, 4])
    probes = Probe.fit_all(acts, Handle(), test_fraction=0.0)
    for layer, probe in probes.items():
        probe.save(tmp_path / f"probes/at{layer}.safetensors")
    # The fit that steerkit made, made again: the order of its rows is part of it.
    x, y = _stack_xy(acts[2], _split_pair_indices(len(acts[2]), 0.0, 42)[0])
    fit = LogisticRegression(max_iter=2000, C=1.0).fit(x, y)
    length = float(np.linalg.norm(fit.coef_))
    files = {"early": tmp_path / "probes/at0.safetensors", "late": tmp_path / "probes/at2.safetensors"}
    pack = import_steerkit(files, tmp_path / "pack", scale=length)
    assert pack.sites == ["resid_post.0", "resid_post.2"] and pack.manifest["host"] == {
        "model_id": "tiny",
        "hidden_size": D,
        "n_layers": 4,
    }
    close(scores(pack)[:, pack.find("late")], torch.from_numpy(fit.predict_proba(NEW.double().numpy())[:, 1]), 2e-6)
    raw = import_steerkit(files["late"], tmp_path / "raw", scale=1.0, bias=False, method="mass_mean")
    close(
        scores(raw)[:, 0], torch.sigmoid(NEW.double() @ Probe.load(files["late"]).get_direction("mass_mean").double())
    )
    for layer, what in ((-1, "the embedding"), (4, "the final norm")):
        with pytest.raises(ImportRefused, match=what):
            import_steerkit(tmp_path / f"probes/at{layer}.safetensors", tmp_path / "no", scale=1.0)


def test_steerkit_softmax_over_concepts_is_refused(tmp_path):
    acts = pairs([1])
    probe = MultinomialProbe.fit_at_layer(
        {"a": acts, "b": {1: acts[1].flip(1)}, "c": {1: acts[1] + 1}}, 1, Handle(), test_fraction=0.0
    )
    probe.save(tmp_path / "m.safetensors")
    with pytest.raises(ImportRefused, match="softmax over several concepts"):
        import_steerkit(tmp_path / "m.safetensors", tmp_path / "pack", scale=1.0)


# -- SAELens -------------------------------------------------------------------------------------


def sae(kind, config, **more):
    made = kind(config(d_in=D, d_sae=40, **more))
    with torch.no_grad():
        for i, (name, parameter) in enumerate(made.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.5)
            if name == "threshold":
                parameter.abs_()
    return made


@pytest.mark.parametrize("norm", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize(
    ("kind", "config"), [(StandardSAE, StandardSAEConfig), (JumpReLUSAE, JumpReLUSAEConfig), (GatedSAE, GatedSAEConfig)]
)
def test_saelens_features_fire_exactly_if_active_in_saelens(tmp_path, kind, config, norm):
    made = sae(kind, config, normalize_activations=norm)
    made.cfg.metadata.hook_name = "blocks.2.hook_resid_pre"
    made.save_model(tmp_path / "sae")
    if norm != "layer_norm":  # which subtracts the mean anyway
        with pytest.raises(ImportRefused, match="does not say how the model was loaded"):
            import_sae(tmp_path / "sae", tmp_path / "pack")
    pack = import_sae(tmp_path / "sae", tmp_path / "pack", centered=False, sharpness=0.2)
    with torch.no_grad():
        activation = kind.load_from_disk(tmp_path / "sae", dtype="float64").encode(NEW.double())
    found, active = scores(pack).double(), activation > 0
    sure = (found - 0.5).abs() > 1e-5
    assert pack.sites == ["resid_post.1"] and 0.05 < active.double().mean() < 0.95 and sure.double().mean() > 0.99
    assert torch.equal((found > 0.5)[sure], active[sure])
    if kind is not GatedSAE:
        threshold = torch.tensor([concept["sae_threshold"] for concept in pack.concepts], dtype=torch.float64)
        close(found[active], torch.sigmoid(0.2 * (activation - threshold))[active], 1e-6 if norm == "none" else 5e-6)


def test_saelens_hooks_of_attention_and_mlp_outputs_are_sites(tmp_path):
    made = sae(StandardSAE, StandardSAEConfig)
    for hook, site in (("hook_mlp_out", "mlp_out.2"), ("hook_attn_out", "attn_out.2")):
        made.cfg.metadata.hook_name, made.cfg.metadata.model_name = f"blocks.2.{hook}", "gpt2-small"
        made.save_model(tmp_path / hook)
        pack = import_sae(tmp_path / hook, tmp_path / f"{hook} pack", centered=False, sharpness=0.2)
        with torch.no_grad():
            activation = made.encode(NEW).double()
        assert pack.sites == [site]
        close(scores(pack)[activation > 0], torch.sigmoid(0.2 * activation[activation > 0]), 2e-6)


def test_saelens_topk_encoders_are_refused(tmp_path):
    made = sae(TopKSAE, TopKSAEConfig, k=4)
    made.cfg.metadata.hook_name = "blocks.2.hook_resid_post"
    made.save_model(tmp_path / "sae")
    with pytest.raises(ImportRefused, match="the encoder is topk"):
        import_sae(tmp_path / "sae", tmp_path / "pack", centered=False)
