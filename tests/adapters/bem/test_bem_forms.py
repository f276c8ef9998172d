"""Each update form equals sums over its indices in fp64 NumPy and independently computed numbers."""

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bem_oracle import matrix_of
from probemon.adapters.bem.forms.film import Film
from probemon.adapters.bem.forms.head_groups import (
    HeadGroups,
    gate_correlation,
    gates,
    group_energy,
)
from probemon.adapters.bem.forms.kronecker import Kronecker, closest_shapes
from probemon.adapters.bem.forms.rank_mask import RankMask, hadamard_transform, straight_through, top_mask
from probemon.errors import ConfigError


def f(k, *shape):
    return torch.sin(k + 1.7 * torch.arange(int(np.prod(shape)), dtype=torch.float64)).view(shape)


def generator():
    return torch.Generator().manual_seed(0)


def head_groups():
    form = HeadGroups(8, 3, groups=2, rank=2, generator=generator()).double()
    with torch.no_grad():
        form.V.copy_(f(2, 2, 4, 2))
        form.U.copy_(f(3, 2, 3, 2))
    return form


def rank_mask(**options):
    form = RankMask(8, 3, rank=4, active=2, generator=generator(), **options).double()
    with torch.no_grad():
        form.V.copy_(f(5, 8, 4))
        form.U.copy_(f(6, 3, 4))
    return form


def kronecker(terms=1):
    form = Kronecker(12, 6, shapes=((2, 4), (3, 3)), terms=terms, generator=generator()).double()
    with torch.no_grad():
        form.A.copy_(torch.stack([f(12, 2, 4), f(14, 2, 4)])[:terms])
        form.B.copy_(torch.stack([f(13, 3, 3), f(15, 3, 3)])[:terms])
    return form


def film():
    return Film(5, 4, n_codes=3, bound=0.1).double()


FORMS = {"head_groups": head_groups, "rank_mask": rank_mask, "kronecker": lambda: kronecker(2), "film": film}


@pytest.fixture(params=FORMS, ids=str)
def form(request):
    made = FORMS[request.param]()
    with torch.no_grad():
        if isinstance(made, Film):
            made.W.copy_(f(18, 8, 3))
            made.bias.copy_(f(19, 8))
    return made


def inputs(form, n_tokens=5):
    return f(20, n_tokens, form.n_in), f(21, n_tokens, form.n_codes), f(22, n_tokens, form.n_out)


def close(found, wanted, tolerance=1e-8):
    np.testing.assert_allclose(np.asarray(found.detach()).ravel(), wanted, rtol=0, atol=tolerance)


def test_head_groups_equal_the_oracle():
    form, x, codes = head_groups(), f(1, 3, 8), f(4, 3, 2)
    delta = form(x, codes, torch.zeros(3, 3, dtype=torch.float64))
    close(gates(codes)[0], [0.638681763, 0.731410745], 1e-9)
    close(delta[0], [-0.043197744, -0.070062147, 0.178669659], 1e-9)
    close(delta[2], [-0.280766133, 0.278256412, -0.257269460], 1e-9)
    close(delta.norm(), [0.953379979985], 1e-12)
    ones = torch.zeros(3, 2, dtype=torch.float64)  # of these every gate is 1
    close(form(x, ones, torch.zeros(3, 3, dtype=torch.float64)).norm(), [0.768057210720], 1e-12)
    close(torch.linalg.svdvals(matrix_of(form, ones[0])), [3.385215111, 0.404009477, 0], 1e-9)
    close(group_energy(x, 2)[0], [-0.782275343, -0.659342532], 1e-9)


def test_rank_masks_equal_the_oracle():
    form, x, codes = rank_mask(), f(1, 3, 8), f(7, 3, 4)
    masks = top_mask(codes, 2)
    assert masks.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1]]
    delta = form(x, codes, torch.zeros(3, 3, dtype=torch.float64))
    close(delta[0], [0.550963454, 0.027064935, -0.503903081], 1e-9)
    close(delta[2], [-1.237311057, -0.631196949, 0.139788969], 1e-9)
    close(delta.norm(), [1.821474050504], 1e-11)
    masked = (x @ form.V) * masks
    close(hadamard_transform(masked)[0], [-0.360445119, -0.636194595, -0.360445119, -0.636194595], 1e-9)


def test_kronecker_products_equal_the_oracle():
    x, one = f(8, 3, 12), torch.ones(3, 1, dtype=torch.float64)
    y = kronecker()(x, one, torch.zeros(3, 6, dtype=torch.float64))
    close(y[0], [2.003685060, 0.063625104, -1.955587313, 2.333521551, -1.208201649, -3.246868216], 1e-9)
    close(y.norm(), [8.140119950670], 1e-11)
    sigma1, frobenius = kronecker().sizes(one)
    close(sigma1, [3.474517204590] * 3, 1e-11)
    close(frobenius, [4.325150045175] * 3, 1e-11)
    assert int(torch.linalg.matrix_rank(matrix_of(kronecker(), one[0]))) == 4
    two = kronecker(2)
    both = torch.ones(1, 2, dtype=torch.float64)
    close(torch.linalg.svdvals(matrix_of(two, both[0]))[0], [4.997303125], 1e-9)
    norms = torch.linalg.matrix_norm(two.A, 2) * torch.linalg.matrix_norm(two.B, 2)
    close(norms.sum(), [6.690248026594], 1e-11)
    close(two.sizes(both)[1], [6.654605987680], 1e-11)


def test_film_equals_the_oracle():
    """Its heads are set so that they give the oracle's numbers: a code picks its token's row."""
    h, g, b = f(9, 3, 4), f(10, 3, 4), f(11, 3, 4)
    form = film()
    with torch.no_grad():
        form.W.copy_(torch.cat([g, b], dim=1).T)
    codes = torch.eye(3, dtype=torch.float64)
    out = form(torch.zeros(3, 5, dtype=torch.float64), codes, h)
    close(out[0], [0.315517342, -0.881950793, -0.101347850, 1.014447007], 1e-9)
    close((out - h).norm() / h.norm(), [0.103695225672], 1e-12)
    close(form.gamma_beta(codes)[0].abs().max(), [0.076128992994], 1e-8)
    close(form.saturation(form.gamma_beta(codes)[0]).mean(), [1 / 3], 1e-12)


def test_gate_correlation_is_measured_over_tokens():
    seen = gates(f(17, 8, 3))
    correlation = gate_correlation(seen)
    close(correlation[[0, 0, 1], [1, 2, 2]], [-0.165935040, -0.969171966, -0.081367251], 1e-9)


def test_output_equals_the_dense_matrix_and_sums_over_indices(form):
    x, codes, base = inputs(form)
    found = form(x, codes, base)
    if isinstance(form, Film):
        gamma, beta = form.gamma_beta(codes)
        assert matrix_of(form, codes[0]) is None
        torch.testing.assert_close(found, (1 + gamma) * base + beta, rtol=1e-14, atol=1e-14)
        return
    for token in range(len(x)):
        added = matrix_of(form, codes[token]) @ x[token]
        torch.testing.assert_close(found[token], base[token] + added, rtol=0, atol=1e-12)
    if isinstance(form, HeadGroups):
        parts, gate = x.view(5, 2, 4).numpy(), 2 / (1 + np.exp(-codes.numpy()))
        terms = np.einsum("mg,gor,gir,mgi->mo", gate, form.U.detach().numpy(), form.V.detach().numpy(), parts)
    elif isinstance(form, RankMask):
        mask = np.zeros((5, 4))
        for token, code in enumerate(codes.tolist()):
            for index in sorted(range(4), key=lambda i: (-code[i], i))[:2]:
                mask[token, index] = 1
        terms = np.einsum("or,mr,ir,mi->mo", form.U.detach().numpy(), mask, form.V.detach().numpy(), x.numpy())
    else:
        a, b, c = form.A.detach().numpy(), form.B.detach().numpy(), codes.numpy()
        terms = np.einsum("mk,kpa,kqb,mab->mpq", c, a, b, x.view(5, 4, 3).numpy()).reshape(5, 6)
    np.testing.assert_allclose(found.detach().numpy() - base.numpy(), terms, rtol=0, atol=1e-12)


@torch.no_grad()
def test_sizes_equal_those_of_the_dense_matrix(form):
    _, codes, _ = inputs(form)
    sigma1, frobenius = form.sizes(codes)
    for token, code in enumerate(codes):
        if isinstance(form, Film):
            (gamma,), (beta,) = form.gamma_beta(code[None])
            dense, added = torch.diag(gamma), beta
        else:
            dense, added = matrix_of(form, code), torch.zeros(1)
        assert float(frobenius[token]) == pytest.approx(math.hypot(float(dense.norm()), float(added.norm())), abs=1e-12)
        largest = float(torch.linalg.svdvals(dense)[0])
        if isinstance(form, Kronecker):
            assert largest <= float(sigma1[token]) + 1e-12 and float(sigma1[token]) <= float(frobenius[token]) + 1e-12
        else:
            assert float(sigma1[token]) == pytest.approx(largest, abs=1e-12)


def test_a_fresh_form_changes_nothing_and_has_a_gradient():
    made = [
        HeadGroups(12, 6, groups=3, rank=2, generator=generator()),
        RankMask(12, 6, rank=4, active=2, generator=generator()),
        RankMask(12, 6, rank=4, active=2, hadamard=True, generator=generator()),
        Kronecker(12, 6, shapes=closest_shapes(12, 6), terms=2, generator=generator()),
        Film(12, 6, n_codes=3),
    ]
    for form in made:
        x, codes, base = (tensor.float() for tensor in inputs(form))
        codes.requires_grad_()
        out = form(x, codes, base)
        assert torch.equal(out, base), type(form)
        out.square().sum().backward()
        gradients = {name: float(p.grad.abs().max()) for name, p in form.named_parameters() if p.grad is not None}
        assert max(gradients.values()) > 1e-3, type(form)


def test_masks_have_exactly_k_ones_and_ties_go_to_the_lowest_index():
    tied = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 2.0]])
    assert top_mask(tied, 2).tolist() == [[1, 1, 0, 0], [0, 1, 1, 0]]
    codes = f(30, 50, 7).requires_grad_()
    for active in range(1, 8):
        mask = straight_through(codes, active)
        torch.testing.assert_close(mask.detach(), top_mask(codes.detach(), active), rtol=0, atol=1e-15)
        assert (top_mask(codes.detach(), active).sum(dim=1) == active).all()
    (gradient,) = torch.autograd.grad((straight_through(codes, 3) * f(31, 50, 7)).sum(), codes)
    border = codes.detach().sort(dim=1, descending=True).values[:, 2:3]
    soft = torch.sigmoid(codes.detach() - border)
    torch.testing.assert_close(gradient, f(31, 50, 7) * soft * (1 - soft))


def test_shared_mask_computes_only_its_active_components():
    for options in ({}, {"hadamard": True}):
        form = rank_mask(**options)
        x, codes, base = inputs(form)
        codes = codes[:1].expand(5, -1)
        dense = form(x, codes, base)  # with gradients: all components
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            gathered = form(x, codes, base)
        torch.testing.assert_close(gathered, dense.detach(), rtol=0, atol=1e-13)
        if not options:
            assert counted.get_total_flops() == 5 * 2 * 2 * (8 + 3)


def test_product_counts_equal_those_of_torch(form):
    """A multiply-add is two; the same for every code."""
    x, codes, base = inputs(form, 7)
    wanted = {
        HeadGroups: lambda: 2 * form.rank * (form.n_in + form.n_codes * form.n_out),
        RankMask: lambda: 2 * form.rank * (form.n_in + form.n_out),
        Kronecker: lambda: 2 * form.n_codes * kronecker_products(*form.shapes),
        Film: lambda: 2 * form.n_codes * 2 * form.n_out,
    }[type(form)]()
    for changed in (codes, -codes):
        with FlopCounterMode(display=False) as counted:
            form(x, changed, base)
        assert counted.get_total_flops() == 7 * wanted


def kronecker_products(a, b):
    """Of one term, the cheaper side first."""
    return min(a[0] * b[1] * (a[1] + b[0]), a[1] * b[0] * (b[1] + a[0]))


def test_film_stays_within_its_bound_and_ignores_nonfinite_codes():
    form = film()
    with torch.no_grad():
        form.W.copy_(100 * f(18, 8, 3))
    x, codes, base = inputs(form)
    codes[1, 0], codes[3, 2] = float("nan"), float("inf")
    out = form(x, codes, base)
    assert torch.equal(out[[1, 3]], base[[1, 3]]) and int(form.n_not_finite) == 2
    assert (out - base).abs().max() <= 0.1 * (1 + base.abs().max()) + 1e-12 and not torch.equal(out[0], base[0])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: HeadGroups(9, 4, groups=4, rank=1, generator=generator()), "4 groups of a site with 9 inputs"),
        (lambda: RankMask(8, 4, rank=4, active=5, generator=generator()), "5 active components of 4"),
        (lambda: RankMask(8, 4, rank=6, active=2, hadamard=True, generator=generator()), "rank of 6: give a power"),
        (lambda: Kronecker(8, 4, shapes=((2, 2), (2, 2)), terms=1, generator=generator()), "make 4 by 4, and the site"),
    ],
)
def test_mismatched_sizes_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
