"""Probes imported from other projects' files score as a plain fp64 evaluation of those files."""

import hashlib
import json
import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import foreign_files as foreign
from probemon import DynamicProbeManager, ProbePack
from probemon.core.reference import exhaustive_reference
from probemon.errors import HierarchyError, ImportRefused, PackError
from probemon.lab.importers import flat
from probemon.lab.importers.generic import import_safetensors, import_weights
from probemon.lab.importers.hallucination import import_head
from probemon.lab.importers.probekit import import_collection, import_file, import_probes
from probemon.lab.importers.probelab import import_files as import_probelab
from probemon.lab.importers.saelens import import_sae
from probemon.lab.importers.steerkit import import_files as import_steerkit

D, SITE = foreign.D, "resid_post.1"
READ = {"site": SITE, "normalize": "none"}
X = foreign.states()


def scores(pack, x=X):
    return exhaustive_reference({site: x for site in pack.sites}, pack)


def column(pack, concept, x=X):
    return scores(pack, x)[:, pack.find(concept)]


def close(found, expected, bound=1e-6):
    assert float(expected.std()) > 1000 * bound  # else anything would pass
    assert float((found.double() - expected).abs().max()) < bound


# -- probelab ------------------------------------------------------------------------------------


def test_probelab_probes_score_as_they_predict(tmp_path):
    folder = tmp_path / "probes"
    expected = {
        "lie": foreign.probelab_logistic(folder / "lie.pt"),
        "mean": foreign.probelab_mass_mean(folder / "mean.pt"),
        "net": foreign.probelab_mlp(folder / "net.pt"),
        "exit": foreign.probelab_eemlp(folder / "exit.pt"),
        "exit1": foreign.probelab_eemlp(folder / "exit1.pt", seed=35, n_layers=1),
    }
    pack = import_probelab(folder, tmp_path / "pack", **READ)
    assert str(pack.architecture) == "7-7-1" and pack.n_probes == 5
    for name, score in expected.items():
        close(column(pack, name), score(X))
    told = pack.manifest["provenance"]["import"]
    assert (
        told["source"] == "probelab"
        and set(told["files"]) == {f"{name}.pt" for name in expected}
        and told["stated"]["probes"]["exit"]["class"] == "EEMLP"
    )
    alone = import_probelab({"a lie": folder / "lie.pt"}, tmp_path / "alone", **READ, model="org/host")
    assert str(alone.architecture) == "linear" and alone.manifest["host"]["model_id"] == "org/host"
    close(column(alone, "a lie"), expected["lie"](X))


def test_files_of_equal_name_each_have_their_hash(tmp_path):
    files = {name: tmp_path / name / "probe.pt" for name in ("lie", "mean")}
    foreign.probelab_logistic(files["lie"])
    foreign.probelab_mass_mean(files["mean"])
    told = import_probelab(files, tmp_path / "pack", **READ).manifest["provenance"]["import"]["files"]
    assert told == {f"{name}: probe.pt": hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


@pytest.mark.parametrize("kind", ["Attention", "Bilinear", "MultiMax"])
def test_probelab_probes_of_several_tokens_are_refused_by_name(tmp_path, kind):
    foreign._saved(tmp_path / "probes/x.pt", kind, {"norm.weight": torch.ones(D)})
    foreign.probelab_logistic(tmp_path / "probes/fine.pt")
    with pytest.raises(ImportRefused, match=f"x.pt is a probelab {kind}"):
        import_probelab(tmp_path / "probes", tmp_path / "pack", **READ)
    assert not (tmp_path / "pack").exists()


def test_unsupported_probelab_networks_are_refused(tmp_path):
    foreign.probelab_mlp(tmp_path / "gelu.pt", activation="gelu")
    with pytest.raises(ImportRefused, match="activation 'gelu'"):
        import_probelab(tmp_path / "gelu.pt", tmp_path / "pack", **READ)
    foreign.probelab_eemlp(tmp_path / "deep.pt", n_layers=3)
    with pytest.raises(ImportRefused, match="EEMLP of 3 layers"):
        import_probelab(tmp_path / "deep.pt", tmp_path / "pack", **READ)


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('the file was executed')",)


def test_malicious_probes_are_refused_naming_what_they_would_run(tmp_path):
    torch.save({"class": "Logistic", "init_kwargs": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ImportRefused, match="exec"):
        import_probelab(tmp_path / "evil.pt", tmp_path / "pack", **READ)
    (tmp_path / "probe.pkl").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/probe.joblib").write_bytes(b"")
    for source in ({"a": tmp_path / "probe.pkl"}, tmp_path / "probe.pkl", tmp_path / "folder"):
        with pytest.raises(ImportRefused, match="a pickle, and loading one runs what is in it: load it yourself"):
            import_probelab(source, tmp_path / "pack", **READ)


# -- probekit ------------------------------------------------------------------------------------


class Norm:
    def __init__(self, mean, std, count):
        self.mean, self.std, self.count = np.array(mean), np.array(std), count


class Probe:
    """As probekit's LinearProbe holds it."""

    def __init__(self, weights, bias, normalization, metadata):
        self.weights, self.bias, self.metadata = np.array(weights, dtype=np.float32), bias, metadata
        self.normalization = normalization and Norm(**normalization)


class Collection:
    def __init__(self, probes):
        self.weights, self.biases = (
            torch.tensor(np.stack([getattr(p, name) for p in probes]), dtype=torch.float32)
            for name in ("weights", "bias")
        )
        self.normalizations = [p.normalization for p in probes]

    def to_tensor(self):
        return self.weights, self.biases


def test_probekit_probes_score_as_their_sigmoid(tmp_path):
    said = {"scaled": foreign.probekit_dict(), "raw": foreign.probekit_dict(seed=45, normalized=False)}
    (tmp_path / "probes.json").write_text(json.dumps({name: probe for name, (probe, _) in said.items()}))
    (tmp_path / "scaled.json").write_text(json.dumps(said["scaled"][0]))
    objects = {name: Probe(**probe) for name, (probe, _) in said.items()}
    packs = [
        import_file(tmp_path / "probes.json", tmp_path / "file", **READ),
        import_probes(objects, tmp_path / "objects", **READ),
        import_probes({name: probe for name, (probe, _) in said.items()}, tmp_path / "dicts", **READ),
        import_collection(Collection(list(objects.values())), list(objects), tmp_path / "collection", **READ),
    ]
    for pack in packs:
        for name, (_, score) in said.items():
            close(column(pack, name), score(X))
    assert packs[0].concepts[0]["solver"] == "LogisticRegression"
    close(column(import_file(tmp_path / "scaled.json", tmp_path / "one", **READ), "scaled"), said["scaled"][1](X))


def test_invalid_probekit_probes_are_refused(tmp_path):
    probe, _ = foreign.probekit_dict()
    bad = {
        "2 rows, of classes": {**probe, "weights": [[0.0] * D] * 2},
        "its mean has shape": {**probe, "normalization": {"mean": [0.0], "std": [1.0]}},
        "expected numbers": {**probe, "weights": [0.0, "x"]},
        "'weights' is 3, expected list": {**probe, "weights": 3},
        "normalization: expected numbers": {**probe, "normalization": {"mean": {}}},
        "its mean has shape \\(\\) or": {**probe, "normalization": "none"},
        "expected numbers ": {**probe, "bias": None, "weights": [[0.0], [0.0, 1.0]]},
        "has 'normalisation', which": {**probe, "normalisation": probe["normalization"]},
    }
    for message, entry in bad.items():
        with pytest.raises(ImportRefused, match=message):
            import_probes({"x": entry}, tmp_path / "pack", **READ)
    with pytest.raises(ImportRefused, match="is a str: give a probekit LinearProbe"):
        import_probes({"x": "probe"}, tmp_path / "pack", **READ)
    with pytest.raises(ImportRefused, match="1 names for 2 probes"):
        import_collection(Collection([Probe(**probe)] * 2), ["a"], tmp_path / "pack", **READ)
    for text, message in (
        ("[]", "expected an object, found list"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"\\ud800": ' + json.dumps(probe) + "}", "not valid JSON"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ImportRefused, match=message):
            import_file(tmp_path / "bad.json", tmp_path / "pack", **READ)
    assert not (tmp_path / "pack").exists()


# -- steerkit ------------------------------------------------------------------------------------


def test_steerkit_probes_score_as_their_fits_at_the_given_scale(tmp_path):
    folder = tmp_path / "probes"
    score = {
        "refusal": foreign.steerkit_probe(folder / "refusal.safetensors"),
        "humour": foreign.steerkit_probe(folder / "humour.safetensors", seed=55, layer=0, length=2.0),
    }
    pack = import_steerkit(folder, tmp_path / "pack", scale={"refusal": 3.0, "humour": 2.0})
    assert pack.sites == ["resid_post.0", "resid_post.2"] and pack.manifest["host"] == {
        "model_id": "tiny",
        "hidden_size": D,
        "n_layers": 4,
    }
    for name, expected in score.items():
        close(column(pack, name), expected(X))
    norm = import_steerkit(
        {"refusal": folder / "refusal.safetensors"}, tmp_path / "norm", scale=np.float32(3.0)
    )  # as NumPy gives the norm of a fit in fp32
    assert (
        torch.equal(column(norm, "refusal"), column(pack, "refusal"))
        and norm.manifest["provenance"]["import"]["stated"]["scale"] == 3.0
    )
    raw = import_steerkit(folder, tmp_path / "raw", scale=1.0, bias=False, method="diff_of_means")
    for name, expected in score.items():
        close(column(raw, name), expected(X, method="diff_of_means", scale=1.0, shift=False))
    assert "are not probabilities" in (tmp_path / "raw/README.md").read_text()
    before = import_steerkit({"pre": foreign_pre(tmp_path)}, tmp_path / "pre", scale=1.0, site="resid_post.1")
    assert before.sites == ["resid_post.1"]


def foreign_pre(tmp_path):
    foreign.steerkit_probe(tmp_path / "pre.safetensors", hook_site="resid_pre", hook_name="blocks.2.hook_resid_pre")
    return tmp_path / "pre.safetensors"


def test_steerkit_probes_without_a_site_or_with_classes_are_refused(tmp_path):
    def refused(message, scale=1.0, **changes):
        more = {name: changes.pop(name) for name in ("method", "site") if name in changes}
        foreign.steerkit_probe(tmp_path / "p.safetensors", **changes)
        with pytest.raises(ImportRefused, match=message):
            import_steerkit(tmp_path / "p.safetensors", tmp_path / "pack", scale=scale, **more)

    refused("reads the embedding", layer=-1)
    refused("reads the final norm", layer=4)
    refused("reads 'mlp_out'", hook_site="mlp_out")
    refused("reads 'resid_pre' of layer 0", hook_site="resid_pre", layer=0)
    refused("site='resid_post.3' was given", site="resid_post.3")
    refused("softmax over several", kind="multinomial")
    tensors = load_file(tmp_path / "p.safetensors")
    save_file({**tensors, "scaler_mean": torch.zeros(4)}, tmp_path / "s.safetensors", {"layer": "2"})
    with pytest.raises(ImportRefused, match="has a tensor 'scaler_mean'"):
        import_steerkit(tmp_path / "s.safetensors", tmp_path / "pack", scale=1.0)
    refused("layer 'two'", layer="two")
    refused("bias_json is not valid JSON", bias_json="{")
    refused("'logistic' is '1'", bias_json='{"logistic": "1"}')
    refused("method 'pca'", method="pca")
    refused("scale is 0", scale=0)
    refused("scale is given for", scale={"q": 1.0})
    foreign.steerkit_probe(tmp_path / "q.safetensors", model_id="other")
    with pytest.raises(ImportRefused, match="different models"):
        import_steerkit(
            {"p": tmp_path / "p.safetensors", "q": tmp_path / "q.safetensors"}, tmp_path / "pack", scale=1.0
        )
    save_file({"x": torch.ones(2)}, tmp_path / "r.safetensors")
    with pytest.raises(ImportRefused, match="no tensor direction"):
        import_steerkit(tmp_path / "r.safetensors", tmp_path / "pack", scale=1.0)
    assert not (tmp_path / "pack").exists()


# -- SAELens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("architecture", ["standard", "jumprelu", "gated", "transcoder", "jumprelu_transcoder"])
def test_sae_probes_fire_exactly_if_features_are_active(tmp_path, architecture, norm):
    encode = foreign.sae(tmp_path / "sae", architecture, normalize_activations=norm)
    pack = import_sae(tmp_path / "sae", tmp_path / "pack")
    x = foreign.states(500)
    expected, found = encode(x), scores(pack, x).double()
    assert pack.sites == ["resid_post.1"] and (pack.alert_threshold == 0.5).all() and pack.concepts[3]["id"] == "f3"
    active = expected > 0
    assert 0.05 < active.double().mean() < 0.95
    logit = torch.logit(found)
    sure = logit.abs() > 1e-5
    assert sure.double().mean() > 0.99 and torch.equal((found > 0.5)[sure], active[sure])
    if architecture == "gated":
        assert (
            "The encoder is gated: logits say when a feature is active, not its activation."
            in (tmp_path / "pack/README.md").read_text()
        )
        return
    threshold = torch.tensor([concept["sae_threshold"] for concept in pack.concepts], dtype=torch.float64)
    assert (threshold >= 0).all() and ("jumprelu" not in architecture) == (threshold == 0).all()
    readable = active & (logit < 8)  # a score near 1 has few digits left for its logit
    assert float((logit + threshold - expected)[readable].abs().max()) < (2e-3 if norm == "none" else 3e-3)
    fires = DynamicProbeManager(pack).score_tokens(x[:20].float())
    assert [fires.fired(i).tolist() for i in range(20)] == [
        found[i].gt(0.5).nonzero()[:, 0].tolist() for i in range(20)
    ]


def test_selected_sae_features_keep_their_names(tmp_path):
    encode = foreign.sae(tmp_path / "sae", apply_b_dec_to_input=False)
    pack = import_sae(
        tmp_path / "sae", tmp_path / "pack", features=[7, 2], names={2: "cats"}, sharpness=0.1, name="mine"
    )
    assert [(c["id"], c["name"], c["sae_feature"]) for c in pack.concepts] == [
        ("f7", "feature 7", 7),
        ("f2", "cats", 2),
    ] and pack.name == "mine"
    expected = encode(X)[:, [7, 2]]
    active = expected > 0
    close(scores(pack)[active], torch.sigmoid(0.1 * expected[active]))
    assert float(scores(pack)[~active].max()) <= 0.5 and pack.manifest["host"]["model_id"] == "tiny"
    for i, chosen in enumerate((np.array([7, 2]), torch.tensor([7, 2]))):
        assert torch.equal(
            scores(
                import_sae(
                    tmp_path / "sae", tmp_path / f"{i}", features=chosen, names={np.int64(2): "cats"}, sharpness=0.1
                )
            ),
            scores(pack),
        )


def test_sae_on_centered_states_scores_uncentered_states(tmp_path):
    x = X.double()
    for norm, given in (
        ("none", {"model_from_pretrained_kwargs": {"center_writing_weights": True}}),
        ("constant_norm_rescale", {"model_from_pretrained_kwargs": None}),
    ):
        encode = foreign.sae(tmp_path / norm, metadata=given, normalize_activations=norm)
        more = {} if norm == "none" else {"centered": True}
        pack = import_sae(tmp_path / norm, tmp_path / f"{norm} pack", sharpness=0.05, **more)
        expected = encode(x - x.mean(-1, keepdim=True))
        close(scores(pack)[expected > 0], torch.sigmoid(0.05 * expected[expected > 0]))


def test_bf16_sae_stays_bf16_and_scaled_activations_need_their_scale(tmp_path):
    encode = foreign.sae(tmp_path / "half", dtype=torch.bfloat16)
    pack = import_sae(tmp_path / "half", tmp_path / "half pack")
    expected = encode(X.bfloat16())
    assert pack.dtype == torch.bfloat16
    readable = (expected > 0) & (expected < 8)
    close(scores(pack)[readable], torch.sigmoid(expected[readable]), 2e-6)
    encode = foreign.sae(tmp_path / "scaled", normalize_activations="expected_average_only_in")
    with pytest.raises(ImportRefused, match="activation_scale= is the factor"):
        import_sae(tmp_path / "scaled", tmp_path / "pack")
    pack = import_sae(tmp_path / "scaled", tmp_path / "pack", activation_scale=0.3, sharpness=0.1)
    expected = encode(0.3 * X)
    close(scores(pack)[expected > 0], torch.sigmoid(0.1 * expected[expected > 0]))


def test_old_sae_config_format_is_read(tmp_path):
    folder = tmp_path / "old"
    encode = foreign.sae(folder)
    said = json.loads((folder / "cfg.json").read_text())
    said |= {"hook_point": "blocks.3.hook_resid_post", "normalize_activations": False, "activation_fn_str": "relu"}
    del said["metadata"], said["architecture"]
    (folder / "cfg.json").write_text(json.dumps(said))
    with pytest.raises(ImportRefused, match="does not say how the model was loaded: give centered=False"):
        import_sae(folder, tmp_path / "pack")
    pack = import_sae(folder, tmp_path / "pack", centered=False, sharpness=0.1)
    assert pack.sites == ["resid_post.3"]
    expected = encode(X)
    close(scores(pack)[expected > 0], torch.sigmoid(0.1 * expected[expected > 0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "topk"}, "the encoder is topk"),
        ({"activation_fn_str": "tanh-relu"}, "standard with tanh-relu"),
        ({"reshape_activations": "hook_z"}, "heads of attention"),
        ({"normalize_activations": "covariance_whitening"}, "covariance_whitening"),
        ({"normalize_activations": 3}, "normalised by 3"),
        ({"metadata": {"hook_name": "blocks.2.hook_z"}}, "reads blocks.2.hook_z"),
        ({"metadata": {"hook_name": "blocks.0.hook_resid_pre"}}, "reads blocks.0.hook_resid_pre"),
        ({"metadata": {"hook_name": "blocks.1.hook_mlp_out"}}, "give site="),
        ({"metadata": 3}, "'metadata' is 3"),
        ({"architecture": 7}, "'architecture' is 7"),
        ({"apply_b_dec_to_input": "yes"}, "'apply_b_dec_to_input' is 'yes'"),
    ],
)
def test_unsupported_sae_encoders_are_refused(tmp_path, changes, message):
    foreign.sae(tmp_path / "sae")
    said = json.loads((tmp_path / "sae/cfg.json").read_text())
    if isinstance(changes.get("metadata"), dict):
        changes = {"metadata": {**said["metadata"], **changes["metadata"]}}
    (tmp_path / "sae/cfg.json").write_text(json.dumps({**said, **changes}))
    with pytest.raises(ImportRefused, match=message):
        import_sae(tmp_path / "sae", tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_threshold_unused_by_the_sae_architecture_is_refused(tmp_path):
    foreign.sae(tmp_path / "sae", architecture="jumprelu")
    said = json.loads((tmp_path / "sae/cfg.json").read_text())
    (tmp_path / "sae/cfg.json").write_text(json.dumps({**said, "architecture": "standard"}))
    with pytest.raises(ImportRefused, match="has a tensor 'threshold', which an encoder of architecture 'standard'"):
        import_sae(tmp_path / "sae", tmp_path / "pack")


def test_invalid_sae_requests_are_refused(tmp_path):
    foreign.sae(tmp_path / "sae")
    for message, more in {
        "no feature 9": {"features": [9]},
        "no feature -1": {"features": [-1]},
        "no feature '2'": {"features": ["2"]},
        "names 3 twice": {"features": [3, 3]},
        "features is empty": {"features": []},
        "no feature 11": {"names": {11: "x"}},
        "sharpness is 0": {"sharpness": 0},
        "not centred, and centered=True was given": {"centered": True},
        "only of that": {"activation_scale": 2.0},
        "site='resid_post.4' was given": {"site": "resid_post.4"},
    }.items():
        with pytest.raises(ImportRefused, match=message):
            import_sae(tmp_path / "sae", tmp_path / "pack", **more)
    (tmp_path / "sae/cfg.json").unlink()
    with pytest.raises(ImportRefused, match=r"cfg.json is missing"):
        import_sae(tmp_path / "sae", tmp_path / "pack")
    (tmp_path / "sae/cfg.json").symlink_to("/etc/hostname")
    with pytest.raises(ImportRefused, match="link that leads outside"):
        import_sae(tmp_path / "sae", tmp_path / "pack")


def test_wide_saes_are_scored_completely_at_every_token(tmp_path):
    foreign.sae(tmp_path / "sae", n_features=601)
    pack = import_sae(tmp_path / "sae", tmp_path / "pack")
    assert DynamicProbeManager(pack).score_tokens(X[:3]).coverage.active.tolist() == [601] * 3


# -- a hallucination head ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "file"), [(torch.bfloat16, "probe_head.bin"), (torch.float32, "probe_head.safetensors")]
)
def test_hallucination_heads_score_as_the_originals(tmp_path, dtype, file):
    score = foreign.hallucination_head(tmp_path / "head", dtype=dtype, file=file, lora=dtype == torch.bfloat16)
    pack = import_head(tmp_path / "head", tmp_path / "pack", normalize="none", model="org/host")
    assert (
        pack.sites == ["resid_post.3"]
        and pack.dtype == dtype
        and pack.manifest["host"].get("adapters") == (["default"] if dtype == torch.bfloat16 else None)
    )
    close(column(pack, "hallucination"), score(X.to(dtype)))


def test_a_damaged_head_is_refused(tmp_path):
    foreign.hallucination_head(tmp_path / "head")
    (tmp_path / "head/probe_config.json").write_text('{"layer_idx": -1}')
    with pytest.raises(ImportRefused, match="layer_idx is -1"):
        import_head(tmp_path / "head", tmp_path / "pack", normalize="none")
    (tmp_path / "head/probe_config.json").write_text('{"layer_idx": 3, "hidden_size": 7}')
    with pytest.raises(ImportRefused, match="says 7 values"):
        import_head(tmp_path / "head", tmp_path / "pack", normalize="none")
    foreign.hallucination_head(tmp_path / "other", file="probe_head.safetensors")
    (tmp_path / "other/probe_head.safetensors").rename(tmp_path / "head/probe_head.safetensors")
    with pytest.raises(
        ImportRefused, match=r"probe_head\.bin and probe_head\.safetensors: which is the head is unknown"
    ):
        import_head(tmp_path / "head", tmp_path / "pack", normalize="none")
    (tmp_path / "head/probe_head.safetensors").unlink()
    (tmp_path / "head/probe_head.bin").unlink()
    with pytest.raises(ImportRefused, match="holds none of"):
        import_head(tmp_path / "head", tmp_path / "pack", normalize="none")


# -- weights of one's own ------------------------------------------------------------------------


def network(*widths, seed=0):
    return [
        (foreign.random(b, a, seed=seed + i), foreign.random(b, seed=seed + 50 + i))
        for i, (a, b) in enumerate(pairwise(widths))
    ]


def evaluated(layers, x):
    h = x.double()
    for i, (weight, bias) in enumerate(layers):
        h = h @ weight.double().T + bias.double()
        h = h.relu() if i < len(layers) - 1 else h
    return torch.sigmoid(h[:, 0])


@pytest.mark.parametrize(
    "others", [[], [(D, 1, 1)], [(D, 7, 1)], [(D, 5, 3, 1)], [(D, 7, 1), (D, 1, 1, 1)], [(D, 2, 9, 1), (D, 13, 1)]]
)
def test_probes_of_every_shape_are_embedded_exactly(tmp_path, others):
    probes = {"linear": network(D, 1, seed=100)} | {
        f"p{i}": network(*widths, seed=300 + 10 * i) for i, widths in enumerate(others)
    }
    pack = import_weights(probes, tmp_path / "pack", site=SITE, normalize="none")
    depth = max(len(layers) for layers in probes.values())
    assert len(pack.architecture.hidden) == depth - 1
    for name, layers in probes.items():
        close(column(pack, name), evaluated(layers, X))


def test_weights_may_be_tensors_arrays_lists_and_numbers(tmp_path):
    weight = foreign.random(D, seed=3)
    probes = {
        "tensor": (weight, torch.tensor(0.5)),
        "row": (weight[None], torch.tensor([0.5])),
        "array": (weight.numpy(), 0.5),
        "list": (weight.tolist(), [0.5]),
    }
    pack = import_weights(probes, tmp_path / "pack", site=SITE, normalize="rmsnorm", eps=1e-5, n_layers=3)
    found = scores(pack)
    z = X.double() / (X.double().pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
    close(found[:, 0], torch.sigmoid(z @ weight.double() + 0.5))
    assert (found == found[:, :1]).all() and pack.manifest["host"]["n_layers"] == 3
    half = import_weights(
        {"half": (weight.bfloat16(), torch.tensor([0.5]))}, tmp_path / "half", site=SITE, normalize="none"
    )
    assert half.dtype == torch.bfloat16 and torch.equal(half.weights["w1"][0, 0], weight.bfloat16())


def test_site_that_the_model_lacks_is_refused(tmp_path):
    for site, n_layers in (("resid_post.3", 3), ("mlp_out.40", 12)):
        with pytest.raises(ImportRefused, match=rf"{site}' exceeds a model of {n_layers} layers, 0 to {n_layers - 1}"):
            import_weights(
                {"a": (torch.ones(D), 0.0)}, tmp_path / "pack", site=site, normalize="none", n_layers=n_layers
            )
    assert not list(tmp_path.iterdir())


def test_invalid_weights_are_refused(tmp_path):
    w = foreign.random(D)
    bad = {
        "do not follow one another": [(torch.ones(3, D), torch.ones(3)), (torch.ones(1, 4), torch.ones(1))],
        "has 2 outputs": (torch.ones(2, D), torch.ones(2)),
        "3 hidden layers": network(D, 2, 2, 2, 1),
        "not a finite number": (w * float("inf"), 0.0),
        "is not .weight, bias.": (w,),
        "is not .weight, bias., nor": 5,
        "has no layers": [],
        "not follow": (torch.ones(0), 0.0),
        "is torch.int64, expected float16": (torch.ones(1, D, dtype=torch.int64), torch.zeros(1)),
    }
    for message, given in bad.items():
        with pytest.raises(ImportRefused, match=message):
            import_weights({"x": given}, tmp_path / "pack", site=SITE, normalize="none")
    for name in ("", 3):
        with pytest.raises(ImportRefused, match="give it a name"):
            import_weights({name: (w, 0.0)}, tmp_path / "pack", site=SITE, normalize="none")
    with pytest.raises(ImportRefused, match="past the largest number"):
        import_weights({"x": (w.double() * 1e60, 0.0)}, tmp_path / "pack", site=SITE, normalize="none")
    assert not (tmp_path / "pack").exists()


def mapped(tmp_path, **changes):
    tensors = {
        "head.weight": foreign.random(1, D, seed=1),
        "head.bias": foreign.random(1, seed=2),
        "many.weight": foreign.random(5, D, seed=3),
        "many.bias": foreign.random(5, seed=4),
    }
    tensors |= {
        "fc1.weight": foreign.random(6, D, seed=5),
        "fc1.bias": foreign.random(6, seed=6),
        "fc2.weight": foreign.random(6, seed=7),
        "mean": foreign.random(D, seed=8),
        "std": foreign.random(D, seed=9).abs() + 0.3,
    }
    save_file(tensors, tmp_path / "heads.safetensors")
    mapping = {
        "site": SITE,
        "normalize": "none",
        "model": "org/host",
        "standardize": {"mean": "mean", "scale": "std"},
        "probes": {
            "lie": {"weight": "head.weight", "bias": "head.bias"},
            "whale": {
                "weight": "many.weight",
                "bias": "many.bias",
                "row": 3,
                "name": "Whale",
                "alert_threshold": 0.75,
                "parents": ["lie"],
            },
            "net": {"layers": [{"weight": "fc1.weight", "bias": "fc1.bias"}, {"weight": "fc2.weight"}]},
        },
    }
    (tmp_path / "heads.json").write_text(json.dumps({**mapping, **changes}))
    return tensors


def test_any_safetensors_file_with_a_mapping_is_a_pack(tmp_path):
    t = mapped(tmp_path)
    pack = import_safetensors(tmp_path / "heads.safetensors", tmp_path / "pack", mapping=tmp_path / "heads.json")
    z = (X.double() - t["mean"].double()) / t["std"].double()
    close(column(pack, "lie"), evaluated([(t["head.weight"], t["head.bias"])], z))
    close(column(pack, "Whale"), evaluated([(t["many.weight"][3:4], t["many.bias"][3:4])], z))
    close(
        column(pack, "net"), evaluated([(t["fc1.weight"], t["fc1.bias"]), (t["fc2.weight"][None], torch.zeros(1))], z)
    )
    assert (
        pack.path(pack.find("Whale")) == ["lie", "Whale"]
        and math.isnan(pack.alert_threshold[pack.find("lie")])
        and pack.alert_threshold[pack.find("Whale")] == 0.75
    )
    assert pack.manifest["host"]["model_id"] == "org/host" and list(pack.manifest["provenance"]["import"]["files"]) == [
        "heads.safetensors"
    ]
    other = import_safetensors(
        tmp_path / "heads.safetensors",
        tmp_path / "other",
        mapping=json.loads((tmp_path / "heads.json").read_text()),
        site="resid_post.2",
        normalize="layernorm",
        model="x/y",
    )
    assert (
        other.manifest["inputs"][0]["site"] == "resid_post.2"
        and other.inputs[0].norm == "layernorm"
        and other.manifest["host"]["model_id"] == "x/y"
    )


LIE = {"weight": "head.weight", "bias": "head.bias"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probes": {}}, "no probe to import"),
        ({"probes": []}, "'probes' is"),
        ({"probes": {"x": 3}}, "expected an object, found int"),
        ({"probe": {}}, "no field 'probe'"),
        ({"probes": {"x": {**LIE, "bais": "y"}}}, "no field 'bais'"),
        ({"probes": {"x": {"weight": "nothing"}}}, "no tensor 'nothing'"),
        ({"probes": {"x": {"weight": "many.weight"}}}, "has 5 outputs"),
        ({"probes": {"x": {**LIE, "row": 1}}}, "has rows 0 to 0"),
        ({"probes": {"x": {**LIE, "row": True}}}, "'row' is True"),
        ({"probes": {"x": {"weight": "many.weight", "bias": "head.bias", "row": 0}}}, "has 5 rows, its bias 1 values"),
        ({"probes": {"x": {**LIE, "layers": []}}}, "'weight'.*or 'layers'"),
        ({"probes": {"x": {}}}, "'weight'.*or 'layers'"),
        ({"probes": {"x": {"layers": [LIE], "bias": "head.bias"}}}, "'bias' is next to 'layers'"),
        ({"probes": {"x": {"layers": [LIE], "row": 0}}}, "'row' is next to 'layers'"),
        ({"probes": {"x": {**LIE, "alert_threshold": 10**400}}}, "not a finite number"),
        ({"probes": {"x": {**LIE, "parents": [["y"]]}}}, "'parents' is"),
        ({"standardize": {"mean": "mean", "scale": "nothing"}}, "no tensor 'nothing'"),
        ({"standardize": {"mean": "mean", "scale": "head.bias"}}, "its scale has shape"),
        ({"normalize": None}, "does not say how the state is normalised|'normalize' is None"),
        ({"site": ""}, "no file says where"),
        ({"normalize": "batchnorm"}, "normalize is 'batchnorm'"),
    ],
)
def test_invalid_mappings_are_refused(tmp_path, changes, message):
    mapped(tmp_path, **changes)
    with pytest.raises(ImportRefused, match=message):
        import_safetensors(tmp_path / "heads.safetensors", tmp_path / "pack", mapping=tmp_path / "heads.json")
    assert not (tmp_path / "pack").exists()


def test_unknown_parents_and_cycles_are_hierarchy_errors(tmp_path):
    for probes in ({"x": {**LIE, "parents": ["y"]}}, {"x": {**LIE, "parents": ["y"]}, "y": {**LIE, "parents": ["x"]}}):
        mapped(tmp_path, probes=probes)
        with pytest.raises(HierarchyError):
            import_safetensors(tmp_path / "heads.safetensors", tmp_path / "pack", mapping=tmp_path / "heads.json")


def test_damaged_and_oversized_files_are_refused_before_reading(tmp_path, monkeypatch):
    mapped(tmp_path)
    whole = (tmp_path / "heads.safetensors").read_bytes()
    for bad in (b"", whole[:50], whole[:-10], b"\xff" * 8 + whole[8:]):
        (tmp_path / "bad.safetensors").write_bytes(bad)
        with pytest.raises(ImportRefused, match=r"cannot be read as safetensors|is empty: fetch it again"):
            import_safetensors(tmp_path / "bad.safetensors", tmp_path / "pack", mapping=tmp_path / "heads.json")
    with open(tmp_path / "large.safetensors", "wb") as file:
        file.truncate((8 << 30) + 1)  # a hole: no disk, no time
    with pytest.raises(ImportRefused, match="8,589,934,593 bytes"):
        import_safetensors(tmp_path / "large.safetensors", tmp_path / "pack", mapping=tmp_path / "heads.json")
    # One tensor named often enough is more than memory; it is counted before it is copied.
    monkeypatch.setattr(flat, "MAX_PACK_BYTES", 1000 * 4 * D)
    monkeypatch.setattr(flat.Classifier, "standardised", lambda *_: pytest.fail("it was copied"))
    mapped(tmp_path, probes={f"p{i}": LIE for i in range(1001)})
    with pytest.raises(ImportRefused, match="make several packs"):
        import_safetensors(tmp_path / "heads.safetensors", tmp_path / "pack", mapping=tmp_path / "heads.json")
    assert not (tmp_path / "pack").exists()


def test_flat_pack_behaves_like_any_pack(tmp_path):
    pack = import_weights(
        {"a": (foreign.random(D), 0.0), "b": (foreign.random(D, seed=1), 0.0)},
        tmp_path / "pack",
        site=SITE,
        normalize="none",
    )
    again = ProbePack.open(tmp_path / "pack", verify=True)
    assert again.tree.n == 2 and set(again.tree.level.tolist()) == {0} and again.score_rule == "independent"
    card = (tmp_path / "pack/README.md").read_text()
    assert "2 probes imported from weights in memory" in card and "was not measured here" in card
    with pytest.raises(PackError, match="exists"):
        import_weights({"a": (foreign.random(D), 0.0)}, tmp_path / "pack", site=SITE, normalize="none")
    assert pack.find("b") == 1


def test_reading_uses_no_more_memory_than_stated(tmp_path):
    """Of JSON the dearest found: objects within objects, a letter that makes every other as wide, and one that is
    written as an escape.
    """
    torch.save({"w": torch.zeros(8 << 20)}, tmp_path / "a.pt")
    objects = '{"":' * 200 + "0" + "}" * 200
    (tmp_path / "a.json").write_text("[" + ",".join([objects] * 5000) + ',"\U0001f600\\u00e9"]', encoding="utf-8")
    program = """
import re, sys
from pathlib import Path
from probemon.lab.importers.foreign_files import read_json
from probemon.lab.importers.weights import load_plain
def most():  # getrusage's would be that of the process this one was made by
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
path = Path(sys.argv[1])
before = most()
(read_json if path.suffix == ".json" else load_plain)(path)
print((most() - before) / path.stat().st_size)
"""
    for name, times, beside in (("a.pt", 3, 150 << 20), ("a.json", 60, 0)):
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / name], capture_output=True, text=True, check=True
        )
        size = (tmp_path / name).stat().st_size
        assert 0.5 < float(done.stdout) < times + beside / size, name
