"""The Triton update kernels, interpreted on a CPU or compiled for a GPU (`-m gpu`), equal fp64."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime import interpreter

from probemon.adapters.bem import update
from probemon.adapters.bem.kernels import update as bem_triton
from probemon.adapters.bem.kernels.update import generated_update
from probemon.errors import ConfigError

PROGRAM = Path(__file__).parents[2] / "programs" / "cross_compile_bem.py"
# Shared memory that one program may have, in bytes, by compute capability.
LIMITS = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
RANKS = (1, 3, 8, 16, 64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SCALE = 1.75
ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="no GPU, or Triton is in its interpreter")]


def case(m, n_in, n_out, rank, dtype=torch.float32, seed=0, weights=torch.float32):
    """x, V, U, codes, base: about as large as in a model."""
    g = torch.Generator().manual_seed(seed)
    x, v, u = (
        torch.randn(m, n_in, generator=g),
        torch.randn(n_in, rank, generator=g) / max(n_in, 1) ** 0.5,
        torch.randn(n_out, rank, generator=g),
    )
    codes, base = torch.randn(m, rank, generator=g), torch.randn(m, n_out, generator=g)
    return x.to(dtype), v.to(weights), u.to(weights), codes, base.to(dtype)


def oracle(x, v, u, codes, base=None, eps=0.0, scale=SCALE):
    """In fp64, and what the absolute values of all terms add up to: rounding errors are in proportion to it."""
    x, v, u, codes = x.double(), v.double(), u.double(), codes.double()
    live = (
        (codes.abs() > eps).any(dim=1, keepdim=True)
        if eps
        else torch.ones(len(codes), 1, dtype=torch.bool, device=codes.device)
    )
    codes = torch.where(live, codes, 0.0)
    exact, size = scale * ((x @ v) * codes) @ u.T, scale * ((x.abs() @ v.abs()) * codes.abs()) @ u.abs().T
    return (exact, size) if base is None else (exact + base.double(), size + base.double().abs())


def assert_close(mine, exact, size):
    """Within some roundings of fp32 on the way and one to the dtype at the end."""
    one = torch.finfo(mine.dtype)
    rounding = (
        one.eps if mine.dtype == torch.bfloat16 and not ON_GPU else one.eps / 2
    )  # Triton's interpreter cuts bf16 off
    allowed = 8 * 2.0**-24 * size + rounding * exact.abs() + one.smallest_normal
    assert ((mine.double() - exact).abs() <= allowed).all(), ((mine.double() - exact).abs() / allowed).max()


def bits(t):
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


@pytest.mark.parametrize(
    "rank, dtype", [*((rank, torch.float32) for rank in RANKS), (3, torch.float16), (8, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("m, n_in, n_out", [(1, 1, 1), (3, 16, 140), (9, 300, 19)])
def test_update_with_and_without_a_base_equals_fp64(m, n_in, n_out, rank, dtype):
    x, v, u, codes, base = case(m, n_in, n_out, rank, dtype)
    for weights in {torch.float32, dtype}:
        v, u = v.to(weights), u.to(weights)
        alone, added = generated_update(x, v, u, codes, SCALE), generated_update(x, v, u, codes, SCALE, base=base)
        assert alone.dtype == added.dtype == dtype
        assert_close(alone, *oracle(x, v, u, codes))
        assert_close(added, *oracle(x, v, u, codes, base))


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32), (torch.float64, torch.float32)], ids=str
)
def test_sum_with_a_base_has_the_bases_dtype(dtypes):
    x, v, u, codes, base = case(5, 12, 9, 4, dtypes[0])
    base = base.to(dtypes[1])
    out, *gradients = forward_and_backward(x, v, u, codes, base)
    assert [t.dtype for t in (out, *gradients)] == [dtypes[1], dtypes[0], *[torch.float32] * 3, dtypes[1]]
    assert_close(out, *oracle(x, v, u, codes, base))
    for mine, exact in zip(gradients, gradients_in_fp64((x, v, u, codes, base), weighting(out)), strict=True):
        assert_close(mine, *exact)


@pytest.mark.parametrize("n_in, n_out", [(0, 5), (7, 0), (7, 5)])
def test_empty_inputs_give_empty_outputs_and_zero_gradients(n_in, n_out):
    for m in (0, 2) if n_in * n_out == 0 else (0,):
        inputs = [t.requires_grad_() for t in case(m, n_in, n_out, 3)]
        out = generated_update(*inputs[:4], SCALE, base=inputs[4])
        assert torch.equal(out, inputs[4])  # there is nothing to be added: no rows, no outputs or no inputs
        out.sum().backward()
        assert all(t.grad.shape == t.shape and not t.grad.any() for t in inputs[:4])


def test_strides_change_no_bit():
    x, v, u, codes, base = case(11, 70, 45, 5)
    plain = generated_update(x, v, u, codes, SCALE, base=base)
    turned = generated_update(x, v.T.contiguous().T, u.T.contiguous().T, codes, SCALE, base=base)
    apart = [torch.cat([t, torch.full_like(t, float("nan"))], dim=1)[:, : t.shape[1]] for t in (x, v, u, codes, base)]
    assert torch.equal(plain, turned) and torch.equal(plain, generated_update(*apart[:4], SCALE, base=apart[4]))
    columns = [t.T.contiguous().T for t in (x, base)]
    assert torch.equal(plain, generated_update(columns[0], v, u, codes, SCALE, base=columns[1]))
    same = codes[:1].expand(11, 5)
    assert torch.equal(generated_update(x, v, u, same, SCALE), generated_update(x, v, u, same.contiguous(), SCALE))


def test_weights_with_strides_beyond_int32_are_copied(monkeypatch):
    """Place (size - 1) * stride is what the kernels count up to; on the device "meta" nothing takes memory."""
    last = torch.empty_strided((2, 8), (2**31 - 8, 1), device="meta")
    assert bem_triton._near(last) is last
    for far in ((2, 8), (2**31 - 7, 1)), ((4096, 8), (600_000, 1)), ((8, 4096), (1, 600_000)):
        assert bem_triton._near(torch.empty_strided(*far, device="meta")).is_contiguous()
    x, v, u, codes, _ = case(3, 30, 20, 4)
    plain = forward_and_backward(x, v, u, codes, torch.zeros(3, 20))
    kernel, strides = bem_triton._over_rows, []

    def seen(grid, *args, **options):
        strides.append([(t.stride(0), t.stride(1)) for t in args[1:3]])
        kernel[grid](*args, **options)

    monkeypatch.setattr(
        bem_triton, "_over_rows", type("Seen", (), {"__getitem__": lambda _, grid: functools.partial(seen, grid)})()
    )
    apart = [torch.cat([t, torch.full_like(t, float("nan"))], dim=1)[:, :4] for t in (v, u)]
    for farthest, expected in ((10**9, (8, 1)), (100, (4, 1))):
        monkeypatch.setattr(bem_triton, "_FARTHEST", farthest)
        strides.clear()
        inputs = [t.detach().requires_grad_() for t in (x, *apart, codes)]
        out = generated_update(*inputs, SCALE)
        out.backward(weighting(out))
        assert strides == [[expected] * 2] * 2
        assert all(torch.equal(a, b) for a, b in zip([out, *(t.grad for t in inputs)], plain[:5], strict=True))


def forward_and_backward(x, v, u, codes, base, eps=0.0, needs=(True,) * 5):
    """The output and the gradients of a fixed weighting of it."""
    inputs = [t.detach().clone().requires_grad_(need) for t, need in zip((x, v, u, codes, base), needs, strict=True)]
    out = generated_update(*inputs[:4], SCALE, base=inputs[4], eps=eps)
    out.backward(weighting(out))
    return [out.detach(), *(t.grad for t in inputs)]


def weighting(out):
    """Of each output, by its number in the row: a row's is the same in any batch."""
    return torch.cos(torch.arange(out.shape[1], device=out.device)).to(out.dtype).expand(out.shape)


def gradients_in_fp64(given, weight, eps=0.0):
    """Of each input, and what the absolute values of their terms add up to, as `oracle` has it of the output."""
    codes = torch.where((given[3].abs() > eps).any(dim=1, keepdim=True), given[3], 0.0) if eps else given[3]
    exact, sizes = (
        [t.double().requires_grad_() for t in of] for of in (given, [t.abs() for t in (*given[:3], codes, given[4])])
    )
    oracle(*exact, eps=eps)[0].backward(weight.double())
    oracle(*sizes)[0].backward(weight.double().abs())
    return [(t.grad, size.grad) for t, size in zip(exact, sizes, strict=True)]


@pytest.mark.parametrize("rank, dtype", [(1, torch.float32), (5, torch.bfloat16), (20, torch.float32)], ids=str)
def test_a_row_has_the_same_bits_again_and_in_every_batch(rank, dtype):
    given = x, v, u, codes, base = case(19, 40, 35, rank, dtype)
    once, again = forward_and_backward(*given), forward_and_backward(*given)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    out, of_x, _, _, of_codes, _ = once
    for rows in ([4], [18, 3], torch.randperm(19, generator=torch.Generator().manual_seed(1)).tolist()):
        some = forward_and_backward(x[rows], v, u, codes[rows], base[rows])
        assert (
            torch.equal(some[0], out[rows])
            and torch.equal(some[1], of_x[rows])
            and torch.equal(some[4], of_codes[rows])
        )


def test_number_of_programs_changes_no_bit(monkeypatch):
    given = case(9, 40, 600, 16)  # five tiles of outputs
    grids, kernel = [], bem_triton._over_rows
    monkeypatch.setattr(
        bem_triton,
        "_over_rows",
        type("Counted", (), {"__getitem__": lambda self, grid: grids.append(grid) or kernel[grid]})(),
    )
    found = []
    for programs in (128, 6, 1):
        monkeypatch.setattr(bem_triton, "_PROGRAMS", programs)
        found.append(forward_and_backward(*given))
    assert grids == [(2, 5), (2, 1), (2, 3), (2, 1), (2, 1), (2, 1)]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_no_grad_and_frozen_inputs_save_and_compute_no_gradients(monkeypatch):
    x, v, u, codes, _ = case(3, 9, 7, 2)
    monkeypatch.setattr(bem_triton, "_empty_sums", lambda *_: pytest.fail("sums were kept"))
    with torch.no_grad():
        assert generated_update(x, v.requires_grad_(), u, codes.requires_grad_(), SCALE).grad_fn is None
    plain = generated_update(x, v.detach(), u, codes.detach(), SCALE)
    assert plain.grad_fn is None
    with_grad = generated_update(x.requires_grad_(), v.detach(), u, codes.detach(), SCALE)
    with_grad.sum().backward()  # that of x alone needs no sums either
    assert torch.equal(plain, with_grad) and x.grad.any()


def test_gradcheck_in_fp64():
    inputs = [t.double() for t in case(2, 2, 2, 2)]
    inputs[3][1] = 0  # codes of zero have a gradient
    inputs = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(
        lambda x, v, u, codes, base: generated_update(x, v, u, codes, SCALE, base=base), inputs
    )


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_zero_codes_have_a_gradient_at_eps_zero_in_every_implementation(impl):
    """So that a router that gives zeros can learn to give others."""
    given = case(5, 12, 9, 3)
    given[3][[1, 4]] = 0
    inputs = [t.clone().requires_grad_() for t in given]
    out = update.generated_update(*inputs[:4], SCALE, base=inputs[4], eps=0.0, impl=impl)
    out.backward(weighting(out))
    assert torch.equal(out[[1, 4]], given[4][[1, 4]]) and inputs[3].grad[[1, 4]].all()
    for mine, exact in zip(inputs, gradients_in_fp64(given, weighting(out)), strict=True):
        assert_close(mine.grad, *exact)


@pytest.mark.parametrize("eps", [0.0, 0.9])
@pytest.mark.parametrize(
    "rank, dtype", [*((rank, torch.float32) for rank in RANKS), (5, torch.float16), (5, torch.bfloat16)], ids=str
)
def test_gradients_computed_in_parts_equal_fp64(rank, dtype, eps, monkeypatch):
    """eps > 0: of what was computed, so rows that were left out give and get none."""
    monkeypatch.setattr(bem_triton, "PART", 16)
    given = case(21, 35, 70, rank, dtype)
    given[3][[2, 7, *range(8, 16)]] *= 0.0 if eps == 0 else 0.1  # single rows and a whole block
    mine = forward_and_backward(*given, eps=eps)[1:]
    kept = (given[3].abs() > eps).any(dim=1) if eps else torch.ones(21, dtype=torch.bool)
    assert 0 < kept.sum() < 21 or eps == 0
    for i, exact in enumerate(gradients_in_fp64(given, weighting(given[4]), eps)):
        assert mine[i].dtype == given[i].dtype and exact[0].any()
        assert_close(mine[i], *exact)
    if eps:
        assert not mine[3][~kept].any() and not mine[0][~kept].any()
    else:
        assert mine[3][2].all() and not mine[0][2].any()  # a code of zero moves nothing, but has a gradient


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_skipped_row_adds_nothing_to_gradients():
    x, v, u, codes, base = case(7, 6, 5, 3)
    codes[2] *= 0.01
    without = [i for i in range(7) if i != 2]
    expected = forward_and_backward(x[without], v, u, codes[without], base[without], eps=0.1)
    x[2] = float("nan")
    zeroed = codes.clone()
    zeroed[2] = 0
    for eps, with_codes in (0.1, codes), (0.0, zeroed):
        out, of_x, of_v, of_u, of_codes, _ = forward_and_backward(x, v, u, with_codes, base, eps=eps)
        assert torch.equal(out[without], expected[0]) and torch.equal(out[2], base[2]) and not of_x[2].any()
        assert (of_v - expected[2]).abs().max() < 1e-5 and (of_u - expected[3]).abs().max() < 1e-5
        assert of_codes[2].isnan().all() if eps == 0 else not of_codes[2].any()
    x[2], v[0, 0] = 0.0, float("inf")
    assert not forward_and_backward(x, v, u, codes, base, eps=0.1)[4][2].any()


def test_sums_over_rows_use_a_bounded_number_of_parts(monkeypatch):
    given = case(40, 5, 3, 1)
    grids, kernel = [], bem_triton._over_columns
    monkeypatch.setattr(
        bem_triton,
        "_over_columns",
        type("Counted", (), {"__getitem__": lambda self, grid: grids.append(grid) or kernel[grid]})(),
    )
    found = [forward_and_backward(*given)]
    monkeypatch.setattr(bem_triton, "PART", 8)
    found.append(forward_and_backward(*given))
    monkeypatch.setattr(bem_triton, "_MOST_PARTS", 3)
    found.append(forward_and_backward(*given))
    assert grids == [(1, 1)] * 2 + [(1, 5)] * 2 + [(1, 3)] * 2
    assert all((a - b).abs().max() < 1e-5 for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("wanted", range(5))
def test_gradient_has_the_same_bits_whichever_others_are_requested(wanted):
    given = case(6, 20, 12, 3)
    everything, alone = (
        forward_and_backward(*given),
        forward_and_backward(*given, needs=tuple(i == wanted for i in range(5))),
    )
    assert torch.equal(everything[0], alone[0])
    for i, (one, other) in enumerate(zip(everything[1:], alone[1:], strict=True)):
        assert torch.equal(one, other) if i == wanted else other is None


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_codes_give_exact_zeros_and_keep_the_base_bit_identical(dtype):
    x, v, u, codes, base = case(19, 33, 40, 4, dtype)
    dead = [0, 5, *range(8, 16), 18]
    codes[dead], x[5, 2], x[9] = 0, float("nan"), float("inf")
    base[:, :4] = torch.tensor([-0.0, float("inf"), float("nan"), torch.finfo(dtype).smallest_normal / 4]).to(dtype)
    alone, added = generated_update(x, v, u, codes, SCALE), generated_update(x, v, u, codes, SCALE, base=base)
    kept = generated_update(
        x, v, u, codes.clone().requires_grad_(), SCALE
    ).detach()  # with its x V, of which some is NaN
    assert (
        not bits(alone[dead]).any() and not bits(kept[dead]).any() and torch.equal(bits(added[dead]), bits(base[dead]))
    )
    live = [i for i in range(19) if i not in dead]
    assert_close(alone[live], *oracle(x[live], v, u, codes[live]))
    untrained = generated_update(x[live], v, torch.zeros_like(u), codes[live], SCALE, base=base[live])
    assert torch.equal(bits(untrained), bits(base[live]))


def test_nonfinite_inputs_affect_only_their_own_row():
    x, v, u, codes, _ = case(10, 12, 9, 3)
    healthy = generated_update(x, v, u, codes, SCALE)
    x[1, 3], codes[4, 2], codes[6] = float("nan"), float("nan"), torch.tensor([float("nan"), 0.0, 0.0])
    ill = generated_update(x, v, u, codes, SCALE, eps=0.1)
    assert ill[[1, 4, 6]].isnan().all()
    healthy_rows = [0, 2, 3, 5, 7, 8, 9]
    assert torch.equal(ill[healthy_rows], healthy[healthy_rows])


def test_rows_under_eps_are_skipped_within_the_bound_in_any_block():
    x, v, u, codes, base = case(20, 30, 25, 4)
    eps = 0.5
    codes[:9] = codes[:9].clamp(-eps, eps)  # eps itself is left out: a block and a row
    codes[0, 0], codes[15], codes[15, 1] = -eps, 0.0, 0.51
    full, sparse = generated_update(x, v, u, codes, SCALE), generated_update(x, v, u, codes, SCALE, eps=eps)
    assert not sparse[:9].any() and torch.equal(sparse[15], full[15]) and full[:9].any(dim=1).all()
    bound = SCALE * torch.linalg.matrix_norm(u, 2) * torch.linalg.matrix_norm(v, 2) * eps * x.norm(dim=1)
    assert ((full - sparse).norm(dim=1) <= bound).all()
    added = generated_update(x, v, u, codes, SCALE, base=base, eps=eps)
    assert torch.equal(added[:9], base[:9])
    for row in (3, 15):
        assert torch.equal(generated_update(x[[row]], v, u, codes[[row]], SCALE, eps=eps), sparse[[row]])


@pytest.mark.skipif(ON_GPU, reason="counts what the interpreter reads")
def test_block_of_skipped_rows_reads_only_its_codes(monkeypatch):
    """Unless x V is kept, for the gradient of codes of zero."""
    x, v, u, codes, _ = case(16, 60, 10, 5)
    codes[:9] = 0  # a block, and a row of the next
    n_read, builder = [], interpreter.interpreter_builder
    load = builder.create_masked_load
    monkeypatch.setattr(
        builder,
        "create_masked_load",
        lambda ptrs, mask, *rest: n_read.append(int(mask.data.sum())) or load(ptrs, mask, *rest),
    )
    counted = []
    for rows, gradient in (slice(0, 8), False), (slice(8, 16), False), (slice(0, 8), True):
        n_read.clear()
        generated_update(x[rows], v, u, codes[rows].clone().requires_grad_(gradient), SCALE)
        counted.append(sum(n_read))
    assert counted == [8 * 5, 8 * 5 + (7 + 5) * 60 + 5 * 10, 8 * 5 + (8 + 5) * 60]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 3, 5)}, r"shapes .* flatten batch"),
        ({"x": torch.zeros(2, 4)}, "shapes"),
        ({"V": torch.zeros(5, 2)}, "shapes"),
        ({"U": torch.zeros(3, 4)}, "shapes"),
        ({"codes": torch.zeros(3, 3)}, "shapes"),
        ({"base": torch.zeros(2, 5)}, "shapes"),
        ({"V": torch.zeros(5, 65), "U": torch.zeros(4, 65), "codes": torch.zeros(2, 65)}, "rank 65"),
        ({"V": torch.zeros(5, 0), "U": torch.zeros(4, 0), "codes": torch.zeros(2, 0)}, "rank 0"),
        ({"V": torch.zeros(5, 3, dtype=torch.int8)}, "V is torch.int8"),
        ({"codes": torch.zeros(2, 3, device="meta")}, "codes is .* on meta"),
        ({"base": torch.zeros(2, 4, dtype=torch.int32)}, "base is torch.int32"),
        ({"eps": -0.1}, "eps -0.1"),
        ({"eps": float("nan")}, "eps nan"),
    ],
)
def test_mismatched_inputs_are_refused_before_the_kernel_runs(change, message):
    fitting = {
        "x": torch.zeros(2, 5),
        "V": torch.zeros(5, 3),
        "U": torch.zeros(4, 3),
        "codes": torch.zeros(2, 3),
        "scale": 1.0,
    }
    with pytest.raises(ConfigError, match=message):
        generated_update(**fitting | change)


def test_every_kernel_compiles_for_real_chips_without_matrix_units_or_atomics():
    """At sizes that need most; at all of them by scripts/benchmarks/gpu_check.sh."""
    all_sizes = os.environ.get("PROBEMON_EVERY_SIZE") == "1"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, PROGRAM, *([] if all_sizes else ["--sample"])]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    arches, n_made = (set(LIMITS), 2 * (2 * (6 + 3) + (2 + 2)) + 3 * (2 + 2)) if all_sizes else ({86}, 2 + 1 + 1 + 1)
    assert {one["arch"] for one in made} == arches and len(made) == n_made
    for one in made:
        assert one["cubin_bytes"] > 0 and one["shared"] <= LIMITS[one["arch"]], one
        assert "fma" in one["instructions"] and not {"mma", "wgmma", "atom", "red"} & set(one["instructions"]), one


@functools.cache
def on_device(m, n_in, n_out, rank, dtype):
    return [t.cuda() for t in case(m, n_in, n_out, rank, dtype)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "m, n_in, n_out, rank", [(1, 576, 576, 8), (19, 1536, 576, 5), (300, 4096, 4096, 8), (1030, 700, 900, 64)]
)
class TestOnAGpu:
    pytestmark = on_a_gpu

    def test_update_and_gradients_equal_fp64(self, m, n_in, n_out, rank, dtype):
        given = on_device(m, n_in, n_out, rank, dtype)
        out, *gradients = forward_and_backward(*given)
        assert_close(out, *oracle(*given))
        for mine, exact in zip(gradients, gradients_in_fp64(given, weighting(out)), strict=True):
            assert_close(mine, *exact)

    def test_a_row_has_the_same_bits_again_and_in_every_batch(self, m, n_in, n_out, rank, dtype):
        x, v, u, codes, base = given = on_device(m, n_in, n_out, rank, dtype)
        once = forward_and_backward(*given)
        assert all(torch.equal(a, b) for a, b in zip(once, forward_and_backward(*given), strict=True))
        for rows in ([0], [m - 1], torch.randperm(m)[: m // 2 + 1].tolist()):
            some = forward_and_backward(x[rows], v, u, codes[rows], base[rows])
            assert all(torch.equal(some[i], once[i][rows]) for i in (0, 1, 4))
