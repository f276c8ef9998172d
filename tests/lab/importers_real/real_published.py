"""Published probes score after import as lie-detectors and repeng compute them, on the states of a tiny Llama."""

import enum
import sys
import types

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

np.float_ = np.float64  # named by repeng 0.4.0, gone since numpy 2
from lie_detectors import PROBE_REGISTRY, ProbeArchitecture, load_probe  # noqa: E402
from repeng import ControlModel, ControlVector, DatasetEntry  # noqa: E402
from repeng.extract import project_onto_direction  # noqa: E402

from probemon import DynamicProbeManager  # noqa: E402
from probemon.errors import ImportRefused  # noqa: E402
from probemon.lab.importers.lie_detectors import import_lie_detectors  # noqa: E402
from probemon.lab.importers.repeng import import_control_vector  # noqa: E402

D, N_LAYERS = 16, 4
PRIVATE = "deception.detectors.utils.types"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=D, intermediate_size=24, num_hidden_layers=N_LAYERS, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def watched(pack, model, concept):
    """Scores of the tokens of a short generation, and what each block gave at them, by layer."""
    torch.manual_seed(1)
    with torch.no_grad(), DynamicProbeManager(pack).attach(model) as run:
        out = model.generate(torch.randint(3, 61, (1, 9)), max_new_tokens=4, do_sample=False, eos_token_id=None)
    given = {}
    hooks = [
        layer.register_forward_hook(lambda _, args, out, i=i: given.update({i: out}))
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(out[:, :-1])
    for hook in hooks:
        hook.remove()
    scored, probe = run.result(out).scores, pack.find(concept)
    tokens = [dict(zip(scored.active(i), scored.active_scores(i), strict=True)) for i in range(out.shape[1] - 1)]
    scores = torch.tensor([float(token[probe]) for token in tokens], dtype=torch.float64)
    return scores, {i: (one[0] if isinstance(one, tuple) else one)[0].double() for i, one in given.items()}


@pytest.mark.parametrize("layer", range(N_LAYERS))
@pytest.mark.parametrize("shape", ProbeArchitecture)
def test_lie_detectors_score_as_their_package_loads_them(tmp_path, model, shape, layer):
    torch.manual_seed(2)
    probe = PROBE_REGISTRY[shape](d_model=D, threshold=0.3)
    for name, tensor in probe.state_dict().items():
        if name != "threshold":
            tensor.copy_(torch.rand(D) + 0.5 if name == "dataset_std" else torch.randn(tensor.shape) / 6)
    private = enum.Enum("ProbeArchitecture", {one.name: one.value for one in ProbeArchitecture}, type=str)
    private.__module__ = PRIVATE
    alias, sys.modules[PRIVATE] = sys.modules[PRIVATE], types.ModuleType(PRIVATE)
    sys.modules[PRIVATE].ProbeArchitecture = private
    settings = {
        "probe_architecture": private(shape.value),
        "layer": layer,
        "l2_lambda": 1e-3,
        "train_dataset": "made up",
    }
    torch.save({"state_dict": probe.state_dict(), "hyperparams": settings}, tmp_path / "probe.pt")
    sys.modules[PRIVATE] = alias
    theirs = load_probe(tmp_path / "probe.pt").double()
    assert theirs.layer == layer and type(theirs) is type(probe)
    scores, states = watched(import_lie_detectors(tmp_path / "probe.pt", tmp_path / "pack"), model, "probe")
    with torch.no_grad():
        expected = theirs(states[theirs.layer])
    assert float((scores - torch.sigmoid(expected - theirs.threshold)).abs().max()) < 3e-6
    assert torch.equal(scores > 0.5, expected > theirs.threshold) and float(scores.std()) > 0.01


class Words:
    """A tokenizer of numbers."""

    def __call__(self, texts, padding, return_tensors):
        from transformers import BatchEncoding

        ids = torch.tensor([[int(word) for word in text.split()] for text in texts])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def test_control_vectors_score_as_repeng_projects(tmp_path, model):
    texts = torch.randint(3, 61, (12, 2, 7), generator=torch.Generator().manual_seed(3)).tolist()
    pairs = [DatasetEntry(*(" ".join(map(str, text)) for text in pair)) for pair in texts]
    vector = ControlVector.train(model, Words(), pairs)
    vector.export_gguf(tmp_path / "happy.gguf")
    assert sorted(vector.directions) == [1, 2, 3]
    pack = import_control_vector(tmp_path / "happy.gguf", tmp_path / "pack", layers=[1, 2], sharpness=0.5)
    for layer in (1, 2):
        scores, states = watched(pack, model, f"happy/{layer}")
        projected = project_onto_direction(states[layer].numpy(), vector.directions[layer].astype(np.float64))
        assert float((scores - torch.sigmoid(0.5 * torch.from_numpy(projected))).abs().max()) < 3e-6
    # Its hooks add direction.N to what block N gives, and its training reads the last block's after the final norm.
    plain, steered, ids = {}, {}, torch.tensor([[5, 9, 13]])
    with torch.no_grad():
        listed = model(ids, output_hidden_states=True).hidden_states
        wrapped = ControlModel(model, [1])
        wrapped.set_control(vector, coeff=1.0)
        for kept in (steered, plain):
            hook = model.model.layers[1].register_forward_hook(lambda _, args, out, kept=kept: kept.update(out=out))
            wrapped(ids)
            hook.remove()
            wrapped.reset()
        wrapped.unwrap()
    difference = (steered["out"] - plain["out"])[0]
    assert torch.allclose(difference, torch.from_numpy(vector.directions[1]).expand_as(difference), atol=1e-5)
    assert torch.equal(plain["out"], listed[2])
    with pytest.raises(ImportRefused, match="no direction for layer 3"):
        import_control_vector(tmp_path / "happy.gguf", tmp_path / "last", layers=[3])
