"""Unsuitable hidden states are refused by name everywhere, and no kernel reads out of bounds."""

import numpy as np
import pytest
import torch

from conftest import HIDDEN, make_model, make_pack
from corpora import make_tokenizer
from nets import SHAPES, weights
from probemon import DynamicProbeManager
from probemon.core.inputs import FarTerms, prepare_input
from probemon.core.probes import NORMS, InputSpec
from probemon.core.reference import score_reference
from probemon.engine.kernels import score_probes
from probemon.engine.kernels.cpu import score_cpu
from probemon.errors import ConfigError, UnsupportedModel
from probemon.lab.corpora.corpus import CorpusScorer, score_documents
from probemon.lab.corpora.documents import Document
from probemon.lab.corpora.windows import Reading, shards

IMPLS = ("reference", "cpu", "numba", "triton")
STATES = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
BAD = {
    "narrow": (STATES[:, :-1], r"has shape \(4, 15\), expected \[N, 16\]"),
    "wide": (torch.cat([STATES, STATES], dim=1), r"has shape \(4, 32\), expected \[N, 16\]"),
    "one state": (STATES[0], r"has shape \(16,\)"),
    "a batch of rows": (STATES[None], r"has shape \(1, 4, 16\)"),
    "nothing at all": (torch.tensor(1.0), r"has shape \(\)"),
    "complex": (STATES.to(torch.complex64), "is complex64"),
    "whole": (STATES.to(torch.int64), "is int64"),
    "bool": (STATES > 0, "is bool"),
    "sparse": (STATES.to_sparse(), "is float32 sparse"),
    "meta": (STATES.to("meta"), "on the meta device"),
    "negating": (torch.complex(STATES, STATES).conj().imag, "is a view that negates"),
}
NO_TENSOR = {
    "numpy": (STATES.numpy(), "is ndarray"),
    "list": (STATES.tolist(), "is list"),
    "none": (None, "is NoneType"),
    "text": ("states", "is str"),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("what", [*BAD, *NO_TENSOR])
def test_manager_refuses_hidden_states_that_it_cannot_score(pack, two_sites, what, impl):
    hidden, words = (BAD | NO_TENSOR)[what]
    for one, given in ((pack, hidden), (two_sites, {"resid_post.2": STATES, "resid_post.0": hidden})):
        manager = DynamicProbeManager(one, impl=impl, strategy="descent")
        for call, before in ((manager.step, (None,)), (manager.score_tokens, ()), (manager.score_all, ())):
            with pytest.raises(ConfigError, match=f"hidden.* {words}"):
                call(*before, given)


def test_sites_of_different_lengths_and_foreign_states_are_named(two_sites):
    manager = DynamicProbeManager(two_sites)
    with pytest.raises(ConfigError, match=r"different lengths \{'resid_post.2': 4, 'resid_post.0': 3\}"):
        manager.score_tokens({"resid_post.2": STATES, "resid_post.0": STATES[:3]})
    with pytest.raises(ConfigError, match=r"has no site 'resid_post\.0'"):
        manager.step(None, {"resid_post.2": STATES})
    hidden = {"resid_post.2": STATES, "resid_post.0": STATES}
    state, _ = manager.step(None, hidden)
    rows = state.retained
    for wrong in (rows, 3, *map(type(state), (rows[:2], rows.astype(float), rows.tolist(), torch.from_numpy(rows)))):
        with pytest.raises(ConfigError, match=r"^state "):
            manager.step(wrong, hidden)


def launchers():
    from probemon.engine.kernels.numba_cpu import score_numba
    from probemon.engine.kernels.triton_pairs import score_triton

    lower = {"reference": score_reference, "cpu": score_cpu, "numba": score_numba, "triton": score_triton}
    whole = {impl: lambda *pairs, impl=impl: score_probes(*pairs, impl=impl) for impl in IMPLS}
    return [*lower.items(), *whole.items()]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernel_launchers_refuse_out_of_range_inputs(shape):
    net, rows, slots = weights(shape, HIDDEN, torch.float32), torch.tensor([0, 1, 3]), torch.tensor([10, 0, 4])
    for name, score in launchers():
        assert score(STATES, net, rows, slots).shape == (3,)
        for hidden, words in BAD.values():
            with pytest.raises(ConfigError, match=words):
                score(hidden, net, rows, slots)
        for wrong, words in (
            ((torch.tensor([0, 4, 1]), slots), "rows are 0 to 4, and there are 4"),
            ((torch.tensor([0, -1, 1]), slots), "rows are -1 to 1"),
            ((rows, torch.tensor([0, 11, 1])), "slots are 0 to 11, and there are 11"),
            ((rows, torch.tensor([0, -11, 1])), "slots are -11 to 1"),
            ((rows[:2], slots), r"rows is int64 \[2\]"),
            ((rows, slots[None]), r"rows is int64 \[3\]"),
            ((rows.float(), slots), "rows is float32"),
            ((rows, slots.int()), "slots is int32"),
            ((rows.to("meta"), slots), "meta"),
        ):
            with pytest.raises(ConfigError, match=words):
                score(STATES, net, *wrong)
                pytest.fail(f"{name} takes {wrong}")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shares", [False, True])
def test_kernel_skips_a_pair_out_of_range(shape, shares):
    """On a GPU the numbers are not looked at beforehand."""
    from probemon.engine.kernels import triton_pairs

    net = weights(shape, HIDDEN, torch.float32)
    rows = torch.tensor([0, 1, 2, 3, 0, 1, 2, 4, 0, 1, -1, 3, 3])
    slots = torch.tensor([2, 2, 2, 2, 5, 5, 5, 5, 7, 7, 7, 11, -1])
    out = torch.zeros(13)
    triton_pairs._score(STATES, net, rows, slots, out, shares, False)
    sound = torch.tensor([*[True] * 7, False, True, True, False, False, False])
    assert torch.equal(out.isfinite(), sound)
    assert torch.equal(out[sound], triton_pairs.score_triton(STATES, net, rows[sound], slots[sound]))


def test_descents_refuse_out_of_range_inputs(pack, two_sites):
    from probemon.engine.kernels.triton_cascade import DeviceCascade
    from probemon.engine.kernels.triton_pairs import normalise_triton

    manager = DynamicProbeManager(two_sites, impl="numba", strategy="descent")
    engine, plan, tree = manager.engine, manager.plan, two_sites.tree
    links = (tree.child_ptr, tree.child_idx, tree.parent_ptr, tree.parent_idx)
    rest = {"path_rule": True, "max_rounds": None, "max_active": 500, "everything": False}
    both, none = torch.cat([STATES, STATES]), np.zeros((4, tree.n), bool)
    cascade = DeviceCascade(plan, two_sites.weights, engine.scores.block_of)
    for n, x, retained in (
        (4, STATES, none),
        (5, both, none[:0]),
        (4, both, none[:3]),
        (4, both, none[:, :-1]),
        (4, both[:, :-1], none),
        (4, both.to("meta"), none),
    ):
        with pytest.raises(ConfigError):
            engine._ways["descent"]._net.descend(
                links,
                plan.tree.groups,
                engine.scores.block_of,
                2,
                x,
                n,
                plan.start,
                retained,
                plan.expand_threshold,
                two_sites.alert_threshold.numpy(),
                **rest,
            )
    kept = torch.full((4, 2), -1, dtype=torch.int32)
    for n, x, retained in (
        (4, STATES, kept),
        (5, both, None),
        (4, both, kept[:3]),
        (4, both, kept.long()),
        (4, both[:, :-1], kept),
        (4, both.to("meta"), kept),
    ):
        with pytest.raises(ConfigError):
            cascade.descend(x, n, retained)
    far = torch.full((4, 1), 1 << 30, dtype=torch.int32)  # a retained probe that is none
    expected, found = cascade.descend(both, 4, None), cascade.descend(both, 4, far)
    assert torch.equal(expected.count, found.count)
    for row, n in enumerate(found.count.tolist()):
        assert torch.equal(expected.ids[row, :n], found.ids[row, :n]) and torch.equal(
            expected.scores[row, :n], found.scores[row, :n]
        )
    for hidden, words in BAD.values():
        if hidden.dim() == 2 and hidden.shape[1] != HIDDEN:
            continue
        for normalise in (
            lambda x: prepare_input(x, InputSpec("resid_post.0"), torch.float32),
            lambda x: normalise_triton(x, "none", 0.0, torch.float32),
        ):
            with pytest.raises(ConfigError, match=words.removesuffix(r", expected \[N, 16\]")):
                normalise(hidden)


class Other(torch.nn.Module):
    """A feed-forward block that shows something else than `[rows, tokens, 16]`."""

    def __init__(self, block, change):
        super().__init__()
        self.block, self.change = block, change

    def forward(self, x):
        return self.change(self.block(x))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[..., :8], "gives 8 values a token, the pack reads 16"),
        (lambda x: torch.cat([x, x], dim=-1), "gives 32 values a token, the pack reads 16"),
        (lambda x: x[:, :, None].expand(-1, -1, 4, -1), r"gives \(.*, 4, 16\) for a forward of"),
        (lambda x: x[:, :1], "for a forward of"),
        (lambda x: x.to(torch.complex64), "expected floating point"),
    ],
    ids=["narrow", "wide", "streams", "one token", "complex"],
)
@pytest.mark.parametrize("impl", ["cpu", "numba"])
def test_corpus_states_of_another_shape_are_refused(tmp_path, change, words, impl):
    model = make_model()
    pack = make_pack(tmp_path / "pack", model, sites=("mlp_out.1",), n=6)
    block = model.model.layers[1].mlp
    shown = Other(block, change)
    model.model.layers[1].mlp = shown
    model.model.layers[1].forward = lambda hidden, **more: (shown(hidden), hidden)[
        1
    ]  # the host itself goes on with what it had
    manager = DynamicProbeManager(pack, impl=impl)
    documents = [Document(0, "a", "ab", "", {}), Document(1, "b", "abcd", "", {})]
    with pytest.warns(UserWarning), pytest.raises(UnsupportedModel, match=words):
        list(score_documents(manager, model, make_tokenizer(), documents))
    with pytest.warns(UserWarning), pytest.raises(UnsupportedModel, match=words):
        list(CorpusScorer(manager, model, make_tokenizer(), Reading()).reader.states(shards(documents)))


def check_few(numba_inputs, hidden, spec, dtype, values):
    """All at once gives the same values, their largest where all are finite, and the same far states."""
    width = hidden.shape[1]
    generator = torch.Generator().manual_seed(1)
    terms = FarTerms(torch.randn(width, generator=generator).double().numpy(), np.eye(1, width, dtype=np.float32), 9.0)
    found, largest, far = numba_inputs.prepare_few(hidden, spec, dtype, terms)
    assert torch.equal(found.view(torch.int32), values.view(torch.int32))
    if values.isfinite().all():
        assert largest is not None and np.array_equal(largest, values.abs().amax(dim=1).numpy())
    else:
        assert largest is None
    exact = numba_inputs.prepare_numba(hidden, spec, torch.float32).contiguous().numpy()
    assert np.array_equal(far, numba_inputs.far_few(exact, *terms))
    assert numba_inputs.prepare_few(hidden, spec, dtype, None)[2] is None


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_input_preparation_equals_the_reference_bit_for_bit(norm, dtype, of):
    numba_inputs = pytest.importorskip("probemon.engine.kernels.numba_inputs")
    generator = torch.Generator().manual_seed(0)
    for n, d in [(1, 1), (1, 7), (1, 576), (3, 64), (40, 130), (0, 8)]:
        for eps in (1e-5, 1e-38, 0.0):
            x = torch.randn(n, d, generator=generator) * 10.0 ** torch.randint(-30, 30, (n, 1), generator=generator)
            x[::5, ::3] = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 3e38])[n % 5]
            x[1::7] = 0
            hidden, spec = x.to(of), InputSpec("resid_post.0", norm, eps)
            expected = prepare_input(hidden, spec, dtype)
            found = numba_inputs.prepare_numba(hidden, spec, dtype)
            assert found.dtype == torch.float32 and torch.equal(found.isnan(), expected.isnan())
            number = ~expected.isnan()
            assert torch.equal(found[number], expected.float()[number])
            assert torch.equal(found.signbit()[number], expected.signbit()[number])
            check_few(numba_inputs, hidden, spec, dtype, found)
    strided = torch.randn(64, 9, generator=generator).T
    spec = InputSpec("resid_post.0", norm, 1e-5)
    assert torch.equal(numba_inputs.prepare_numba(strided, spec, dtype), prepare_input(strided, spec, dtype).float())
