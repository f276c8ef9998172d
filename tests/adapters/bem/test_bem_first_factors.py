"""A start from the model's weights equals NumPy's singular vectors, and overlap equals a plain loop."""

import math

import numpy as np
import pytest
import torch

from bem_oracle import VOCAB, make_host, randomise
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.first_factors import overlap, rearranged
from probemon.adapters.bem.losses import LossWeights, adapter_losses
from probemon.errors import ConfigError, UnsupportedModel

COMMON = {"width": 6, "chunk_tokens": 4, "prefix_tokens": 8, "start": "svd", "spectral_cap": None}
LOW_RANK = BemConfig(rank=3, sites=("v", "o", "down"), **COMMON)
KRONECKER = BemConfig(form="kronecker", terms=3, sites=("o", "down"), **COMMON)
IDS = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def test_low_rank_start_is_the_best_subspace_of_each_weight():
    host = make_host()
    bare = logits(host)
    with attach_bem(host, LOW_RANK) as bem:
        assert torch.equal(logits(host), bare)
        for site in bem.sites:
            weight, v = site.module.weight.double().numpy(), bem.updates[site.key].V.detach().double().numpy()
            _, sizes, right = np.linalg.svd(weight)
            np.testing.assert_allclose(3 * v.T @ v, np.eye(3), atol=1e-5)  # a random column has a norm of 1 / sqrt(3)
            np.testing.assert_allclose(3 * v @ v.T, right[:3].T @ right[:3], atol=1e-4)
            left_out = np.linalg.norm(weight - weight @ (3 * v @ v.T))
            assert left_out == pytest.approx(math.sqrt((sizes[3:] ** 2).sum()), rel=1e-4)
            assert all(column[np.abs(column).argmax()] > 0 for column in v.T)


def test_kronecker_start_is_that_of_van_loan_and_pitsianis():
    """With the best A for its B, the sum of products is the best one: the rest has the other singular values."""
    host = make_host()
    bare = logits(host)
    with attach_bem(host, KRONECKER) as bem:
        assert torch.equal(logits(host), bare)
        for site in bem.sites:
            form, weight = bem.updates[site.key], site.module.weight.double().numpy()
            (a1, a2), (b1, b2) = form.shapes
            blocks = np.array(
                [weight[i * b1 : (i + 1) * b1, j * b2 : (j + 1) * b2].ravel() for i in range(a1) for j in range(a2)]
            )
            np.testing.assert_array_equal(rearranged(site.module.weight.double(), form.shapes).numpy(), blocks)
            b = form.B.detach().double().numpy()
            unit = b.reshape(3, -1) / math.sqrt(b1 / 3)
            np.testing.assert_allclose(unit @ unit.T, np.eye(3), atol=1e-5)
            a = (blocks @ unit.T).T.reshape(3, a1, a2)
            best = sum(np.kron(a[k], unit[k].reshape(b1, b2)) for k in range(3))
            sizes = np.linalg.svd(blocks, compute_uv=False)
            assert np.linalg.norm(weight - best) == pytest.approx(math.sqrt((sizes[3:] ** 2).sum()), rel=1e-4)


@pytest.mark.parametrize("config", [LOW_RANK, KRONECKER], ids=lambda config: config.form)
def test_start_is_deterministic_and_replaced_by_saved_factors(config, tmp_path, monkeypatch):
    host = make_host()
    with attach_bem(host, config) as bem:
        first = {name: tensor.clone() for name, tensor in bem.state_dict().items()}
    with randomise(attach_bem(host, config)) as bem:
        assert bem.state_dict().keys() == first.keys()
        steered = logits(host)
        bem.save_pretrained(tmp_path)
    with attach_bem(host, config) as bem:
        assert all(torch.equal(tensor, first[name]) for name, tensor in bem.state_dict().items())
    monkeypatch.setattr(torch.linalg, "svd", None)  # a saved adapter decomposes nothing
    with attach_bem(host, tmp_path) as bem:
        assert bem.config == config and torch.equal(logits(host), steered)


def test_columns_beyond_the_rank_of_a_weight_are_random():
    host = make_host()
    with attach_bem(host, BemConfig(rank=20, sites=("o",), **COMMON)) as bem:  # of 16 by 16
        v = bem.updates["o_1"].V.detach()
    with attach_bem(host, BemConfig(rank=20, sites=("o",), **{**COMMON, "start": "random"})) as bem:
        plain = bem.updates["o_1"].V.detach()
    assert torch.equal(v[:, 16:], plain[:, 16:]) and not torch.isclose(v[:, :16], plain[:, :16]).any(dim=0).all()


def test_start_needs_plain_weights_and_a_form_with_factors():
    with pytest.raises(UnsupportedModel, match=r"site down.0: start='svd' needs .* use start='random'"):
        attach_bem(make_host("mixtral"), BemConfig(sites=("down",), **COMMON))
    for wrong in ({"start": "pca"}, {"form": "film"}, {"form": "rank_mask", "active": 2}):
        with pytest.raises(ConfigError, match="start is"):
            BemConfig(**{**COMMON, **wrong})


FORMS = {
    "low_rank": {"rank": 3},
    "head_groups": {"groups": 2, "rank": 3, "sites": ("o",)},
    "rank_mask": {"rank": 4, "active": 2},
    "kronecker": {"terms": 3},
}


def columns_of(form, update):
    """Lists of vectors that should be orthogonal."""
    if form == "kronecker":
        return [[b.flatten().tolist() for b in update.B]]
    blocks = update.V if form == "head_groups" else [update.V]
    return [block.T.tolist() for block in blocks]


@pytest.mark.parametrize("form", FORMS)
def test_overlap_equals_a_plain_loop_and_finite_differences(form):
    host = make_host().double()
    config = BemConfig(form=form, **FORMS[form], **{**COMMON, "start": "random"})
    batch = {"input_ids": IDS, "labels": IDS}
    with randomise(attach_bem(host, config)) as bem:
        bem.double()
        by_site = []
        for update in bem.updates.values():
            squares = []
            for vectors in columns_of(form, update):
                for i, a in enumerate(vectors):
                    for j, b in enumerate(vectors):
                        dot, sizes = (sum(x * y for x, y in zip(a, b, strict=True)), (math.hypot(*a), math.hypot(*b)))
                        squares += [(dot / sizes[0] / sizes[1]) ** 2] if i != j else []
            by_site.append(sum(squares) / len(squares))
        value = overlap(bem.updates.values())
        assert float(value.detach()) == pytest.approx(sum(by_site) / len(by_site), rel=1e-10)
        losses = adapter_losses(bem, batch, LossWeights(lm=0, kl=0, entropy=0, update=0, decorrelation=0, flips=0,
                                                        orthogonality=0.5))  # fmt: skip
        assert float(losses.total.detach()) == pytest.approx(0.5 * float(value.detach()), rel=1e-6)
        assert "orthogonality" not in adapter_losses(bem, batch).terms
        factor = next(iter(bem.updates.values()))
        factor = factor.B if form == "kronecker" else factor.V
        (gradient,) = torch.autograd.grad(value, factor)
        with torch.no_grad():
            for at in [(0,) * factor.dim(), tuple(n - 1 for n in factor.shape)]:
                ends = []
                for step in (1e-6, -1e-6):
                    factor[at] += step
                    ends.append(float(overlap(bem.updates.values())))
                    factor[at] -= step
                assert float(gradient[at]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-9)


@torch.no_grad()
def test_overlap_of_copies_is_one_of_a_start_by_svd_zero_and_of_films_refused():
    host = make_host()
    with attach_bem(host, LOW_RANK) as bem:
        assert float(overlap(bem.updates.values())) < 1e-10
        for update in bem.updates.values():
            update.V[:] = update.V[:, :1]
        assert float(overlap(bem.updates.values())) == pytest.approx(1)
    with attach_bem(host, BemConfig(rank=1)) as bem:
        assert float(overlap(bem.updates.values())) == 0
    with attach_bem(host, BemConfig(form="film")) as bem, pytest.raises(ConfigError, match="a film has no factors"):
        overlap(bem.updates.values())
