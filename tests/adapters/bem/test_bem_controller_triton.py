"""The Triton controller step, interpreted on a CPU or compiled for a GPU (`-m gpu`), equals the eager controller."""

import copy
import functools
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from test_bem_controller import Alone, check_row

from bem_oracle import codes_of_row, make_host, randomise
from conftest import PAD
from probemon.adapters.bem import BemConfig, Controller, ControllerState, FallbackPolicy, attach_bem
from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.fallback import FallbackGuard
from probemon.adapters.bem.kernels import controller as bem_controller
from probemon.adapters.bem.kernels import controller_forward as bem_step
from probemon.adapters.bem.state import Carry
from probemon.errors import ConfigError

PROGRAM = Path(__file__).parents[2] / "programs" / "cross_compile_controller.py"
# Shared memory that one program may have, in bytes, by compute capability.
LIMITS = {80: 163 << 10, 90: 227 << 10}
ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="no GPU, or Triton is in its interpreter")]

SMALL = {"chunk_tokens": 4, "prefix_tokens": 8, "width": 6, "rank": 3, "ema": 0.7, "token_limit": 9}
# Every set of routers that a policy can ask for, with sizes of one, primes and others that no tile divides.
VARIANTS = {
    "all": {**SMALL, "level": "auto", "sites": ("q", "o")},
    "chunk and token": {**SMALL, "level": "position", "chunk_tokens": 3, "prefix_tokens": 3, "width": 7, "rank": 1},
    "prefix and chunk": {
        **SMALL,
        "level": "prefix",
        "sites": ("k", "down"),
        "chunk_tokens": 1,
        "prefix_tokens": 5,
        "rank": 5,
    },
    "prefix": {**SMALL, "level": "prefix", "width": 1},
    "chunk": {**SMALL, "level": "chunk", "chunk_tokens": 5, "prefix_tokens": 10, "width": 17, "max_norm": 0.7},
    "token": {**SMALL, "level": "token", "max_norm": 50.0},
}
of_every_variant = pytest.mark.parametrize("variant", VARIANTS)
CARRIED = [field for field in fields(Carry) if field.name != "energy"]  # whose level has no kernel


def make(variant="all", hidden_size=10, device="cpu", **changes):
    """An eager controller with weights that route, and the same one fused: random data."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(3)
        eager = Controller(hidden_size, BemConfig(**VARIANTS[variant] | changes))
        for parameter in eager.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape))
    eager.to(device)
    fused = copy.deepcopy(eager)
    fused.fused = True
    return eager, fused


def columns(n_rows, n_columns, hidden_size=10, seed=0, device="cpu"):
    """Hidden states, and which are real: rows begin late, so that they are out of phase; one has padding inside."""
    generator = torch.Generator().manual_seed(seed)
    hidden, real = (
        torch.randn(n_rows, n_columns, hidden_size, generator=generator),
        torch.ones(n_rows, n_columns, dtype=torch.bool),
    )
    for row in range(n_rows):
        real[row, : 2 * row] = False
    real[-1, n_columns // 2 : n_columns // 2 + 3] = False
    hidden[~real] = float("nan")
    return hidden.to(device), real.to(device)


def run(controller, hidden, real, sizes, level=None):
    """Codes of each part, and the state after all."""
    state = ControllerState(len(hidden), level)
    return [
        controller(*part, state) for part in zip(hidden.split(sizes, dim=1), real.split(sizes, dim=1), strict=True)
    ], state


def assert_same_codes(mine, theirs, tolerance=2e-6):
    """Codes reach 3: within some roundings of fp32."""
    for field in fields(theirs):
        one, other = getattr(mine, field.name), getattr(theirs, field.name)
        assert (one is None) == (other is None), field.name
        if other is not None:
            assert one.shape == other.shape and one.is_floating_point() == other.is_floating_point(), field.name
            assert (
                torch.equal(one, other) if not other.is_floating_point() else (one - other).abs().max() <= tolerance
            ), field.name


def assert_same_carry(mine, theirs, tolerance=2e-6):
    for field in CARRIED:
        one, other = getattr(mine, field.name), getattr(theirs, field.name)
        assert one.shape == other.shape and one.is_floating_point() == other.is_floating_point(), field.name
        assert torch.equal(one, other) or (torch.where(one == other, 0.0, one - other)).abs().max() <= tolerance, (
            field.name
        )


def made_by(codes):
    """Names of what is computed in floating point."""
    return [name for name in (*LEVELS, "confidence") if getattr(codes, name) is not None]


@pytest.fixture
def launched(monkeypatch):
    """Grids of the launches of the fused step."""
    grids, kernel = [], bem_step.step
    monkeypatch.setattr(
        bem_step, "step", type("Counted", (), {"__getitem__": lambda self, grid: grids.append(grid) or kernel[grid]})()
    )
    return grids


@torch.no_grad()
@of_every_variant
def test_steps_equal_the_eager_controller(variant, launched):
    """In fp64, to about the error of its own fp32. After a prompt: across the ends of chunks and of the prefix, rows
    out of phase, up to the level's limit and beyond.
    """
    (eager, fused), (hidden, real) = make(variant), columns(3, 15)
    level = torch.tensor([2, 0, 1]) if variant == "all" else None
    sizes = [6] + [1] * 9
    (theirs, _), (mine, state) = (run(controller, hidden, real, sizes, level) for controller in (eager, fused))
    exact, after = run(eager.double(), hidden.double(), real, sizes, level)
    assert launched == [(3,)] * 9  # the prompt is read by the eager one
    own = max(
        float((getattr(one, name) - getattr(true, name)).abs().max())
        for one, true in zip(theirs, exact, strict=True)
        for name in made_by(true)
    )
    for one, true in zip(mine, exact, strict=True):
        assert_same_codes(one, true, max(1e-6, 2 * own))
    assert_same_carry(state.carry, after.carry, max(1e-6, 2 * own))
    z, was = state.history()
    assert (z - after.history()[0]).abs().max() < 2e-6 and torch.equal(was, real)
    assert {int(n) for n in state.carry.n} == {15, 13, 8}


@torch.no_grad()
def test_single_token_steps_equal_the_oracle():
    alone = Alone(level="position", token_limit=7)
    alone.controller.fused = True
    hidden, real = torch.randn(1, 10, 10), torch.ones(1, 10, dtype=torch.bool)
    codes, _ = run(alone.controller, hidden, real, [1] * 10)
    oracle = codes_of_row(alone, hidden[0].numpy())
    for t, one in enumerate(codes):
        check_row(one, 0, real[:, :1], [oracle[t]])


@torch.no_grad()
def test_padding_leaves_the_state_unchanged_and_has_no_code():
    (_, fused), (hidden, real) = make(), columns(4, 7)
    _, state = run(fused, hidden, real, [7], torch.tensor([0, 1, 2, 2]))
    before = state.carry
    real = torch.tensor([[True], [False], [True], [False]])
    hidden = torch.randn(4, 1, 10)
    hidden[1], hidden[3] = float("nan"), float("inf")
    codes = fused(hidden, real, state)
    for field in CARRIED:
        one, other = getattr(state.carry, field.name), getattr(before, field.name)
        assert torch.equal(one[[1, 3]], other[[1, 3]]) and (field.name in ("n", "open")) <= (
            not torch.equal(one[[0, 2]], other[[0, 2]])
        )
    for level in LEVELS:
        code = codes.of(level)
        assert not code[[1, 3]].any() and code[[0, 2]].all()
    assert (
        codes.chunk_index[:, 0].tolist() == [1, -1, 0, -1]
        and not codes.boundary[[1, 3]].any()
        and not codes.confidence[[1, 3]].any()
    )
    assert state.history()[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@torch.no_grad()
def test_nonfinite_hidden_state_affects_only_its_own_sequence():
    (_, fused), (hidden, real) = make(), columns(3, 6)
    level = torch.tensor([2, 2, 2])
    hidden[1, 5] = float("nan")
    ill, state = run(fused, hidden, real, [5, 1], level)
    hidden[1, 5] = 0.0
    well, other = run(fused, hidden, real, [5, 1], level)
    assert ill[1].token[1].isnan().all() and state.carry.code[1].isnan().all()
    assert torch.equal(ill[1].token[[0, 2]], well[1].token[[0, 2]]) and torch.equal(
        state.carry.code[[0, 2]], other.carry.code[[0, 2]]
    )


@torch.no_grad()
def test_fused_steps_and_eager_forwards_can_alternate():
    """What the eager one knows of the room in a chunk is kept right by steps."""
    (eager, fused), (hidden, real) = make(), columns(2, 20)
    level, order = torch.tensor([2, 1]), torch.rand(16, generator=torch.Generator().manual_seed(1)) < 0.5
    theirs, after = run(eager.double(), hidden.double(), real, [4] + [1] * 16, level)
    state, rooms = ControllerState(2, level), []
    mine = [fused(hidden[:, :4], real[:, :4], state)]
    for t, step in enumerate(order.tolist(), start=4):
        fused.fused = step
        mine.append(fused(hidden[:, t : t + 1], real[:, t : t + 1], state))
        rooms.append(state.room)
    assert max(rooms) > 0
    for one, other in zip(mine, theirs, strict=True):
        assert_same_codes(one, other)
    assert_same_carry(state.carry, after.carry)


@torch.no_grad()
def test_step_does_not_synchronise_with_the_device(monkeypatch):
    (_, fused), (hidden, real) = make(), columns(2, 12)
    _, state = run(fused, hidden[:, :5], real[:, :5], [5], torch.tensor([2, 2]))
    for name in ("item", "tolist", "__int__", "__bool__", "__float__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("waited for a value"))
    monkeypatch.setattr(
        bem_controller, "_forward", lambda settings, hidden, real, carry, weights: asked.append(real.shape) or made
    )  # the interpreter reads values
    asked, made = (
        [],
        (
            hidden.new_zeros(2, 1, 6),
            *astuple_of(state.carry),
            *[hidden.new_zeros(2, 1, 3)] * 3,
            hidden.new_zeros(2, 1),
            *[torch.zeros(2, 1, dtype=torch.int64)] * 3,
        ),
    )
    for t in range(5, 12):
        fused(hidden[:, t : t + 1], real[:, t : t + 1], state)
    assert asked == [(2, 1)] * 7 and state.room == 0 and not state.inside


def astuple_of(carry):
    return tuple(getattr(carry, field.name) for field in CARRIED)


# -- from any carry --------------------------------------------------------------------------------


def carried(config, n_rows, dtype=torch.float64, seed=0):
    """A carry as it may be in decoding. Rows: in a chunk, completing the first, one of the prefix, one beyond it,
    padding at a chunk's last place.
    """
    generator = torch.Generator().manual_seed(seed)
    size, width, rank = config.chunk_tokens, config.width, config.rank
    n = torch.tensor(
        [0, size - 1, config.prefix_tokens - 1, config.prefix_tokens + 2 * size - 1, size - 1, size + size // 2]
    )[:n_rows]
    open_ = (
        torch.randn(n_rows, size, width, generator=generator, dtype=dtype)
        * (torch.arange(size) < (n % size)[:, None])[..., None]
    )
    code, summary = (torch.randn(n_rows, m, generator=generator, dtype=dtype) for m in (rank, width))
    mass = torch.where(n < size, -torch.inf, torch.randn(n_rows, generator=generator, dtype=dtype))
    real = torch.tensor([True, True, True, True, False, True])[:n_rows, None]
    return Carry(n, open_, code, summary, mass, torch.rand(n_rows, generator=generator, dtype=dtype)), real


def outputs(controller, hidden, real, carry):
    """What a step makes, by name."""
    level = torch.full((len(real),), 2, device=real.device)
    how = controller._step if controller.fused else functools.partial(controller._route, closes=True, packing=None)
    with torch.no_grad():
        z, after, codes = how(carry, hidden, real, level)
    made = {"z": z, **{name: getattr(codes, name) for name in made_by(codes)}}
    return made | {f"carried {field.name}": getattr(after, field.name) for field in CARRIED if field.name != "n"}


@of_every_variant
@pytest.mark.parametrize(
    "dtypes", [(torch.float64,) * 2, (torch.float32,) * 2, (torch.float32, torch.bfloat16)], ids=str
)
def test_step_equals_the_eager_controller_from_any_carry(variant, dtypes):
    """In the dtype of the carry, whatever that of hidden states."""
    (dtype, of_hidden), (eager, fused) = dtypes, (controller.to(dtypes[0]) for controller in make(variant))
    carry, real = carried(eager.config, 6, dtype)
    hidden = torch.randn(6, 1, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(of_hidden)
    made, expected = (outputs(controller, hidden, real, carry) for controller in (fused, eager))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for name, exact in expected.items():
        assert made[name].dtype == exact.dtype == dtype, name
        assert torch.where(exact == made[name], 0.0, made[name] - exact).abs().max() < tolerance, name


def test_sequence_gives_the_same_bits_again_and_in_every_batch():
    _, fused = make(hidden_size=33)
    carry, real = carried(fused.config, 4, torch.float32)
    hidden = torch.randn(4, 1, 33, generator=torch.Generator().manual_seed(1))
    whole, again = outputs(fused, hidden, real, carry), outputs(fused, hidden, real, carry)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    for rows in ([3], [3, 0, 2]):
        some = outputs(fused, hidden[rows], real[rows], carry.select(torch.tensor(rows)))
        assert all(torch.equal(some[name], whole[name][rows]) for name in whole)


def test_empty_batch_gives_empty_codes():
    _, fused = make()
    made = outputs(fused, torch.zeros(0, 1, 10), torch.zeros(0, 1, dtype=torch.bool), fused.start(0))
    assert made["token"].shape == (0, 1, 3) and made["carried open"].shape == (0, 4, 6)


def test_strides_change_no_bit():
    _, fused = make()
    carry, real = carried(fused.config, 2, torch.float32)
    hidden = torch.randn(2, 3, 10)
    plain = outputs(fused, hidden[:, 1:2].contiguous(), real, carry)
    with torch.no_grad():
        for parameter in fused.parameters():
            if parameter.dim() == 2:
                parameter.set_(parameter.T.contiguous().T)
    turned = Carry(
        carry.n.repeat_interleave(2)[::2],
        *(t.transpose(0, -1).contiguous().transpose(0, -1) for t in astuple_of(carry)[1:]),
    )
    other = outputs(fused, hidden[:, 1:2], real.expand(2, 2)[:, 1:], turned)
    assert all(torch.equal(plain[name], other[name]) for name in plain)


# -- in an adapter ---------------------------------------------------------------------------------

BATCH = torch.tensor([[PAD, PAD, PAD, 1, 5, 9, 33], [1, 44, 3, 17, 8, 21, 30], [PAD, PAD, PAD, PAD, PAD, 21, 22]])
GREEDY = {
    "attention_mask": (BATCH != PAD).long(),
    "max_new_tokens": 6,
    "do_sample": False,
    "pad_token_id": PAD,
    "eos_token_id": None,
}
CONFIG = {
    "rank": 3,
    "width": 6,
    "chunk_tokens": 3,
    "prefix_tokens": 6,
    "token_limit": 8,
    "ema": 0.7,
    "spectral_cap": 1.5,
    "sites": ("v", "down"),
    "layers": (1,),
}


@pytest.mark.parametrize("level", ["position", "auto"])
def test_fused_generation_has_the_tokens_and_codes_of_the_reference(level, launched):
    host, config, found = make_host(), BemConfig(**CONFIG, level=level, auto_limits=(4, 7)), {}
    for impl in ("reference", "triton"):
        with randomise(attach_bem(host, config, impl=impl)) as bem:
            assert bem.controller.fused == (impl == "triton")
            seen = []
            handle = bem.controller.register_forward_hook(lambda controller, args, codes, seen=seen: seen.append(codes))
            found[impl] = host.generate(BATCH, **GREEDY), seen
            handle.remove()
            assert launched == ([] if impl == "reference" else [(3,)] * 5)
    (theirs, expected), (mine, codes) = found["reference"], found["triton"]
    assert torch.equal(mine, theirs) and len(codes) == len(expected) == 6
    for one, other in zip(codes, expected, strict=True):
        assert_same_codes(one, other)


@torch.no_grad()
def test_truncated_and_reordered_state_continues_with_steps(launched):
    """Rejected drafts were cut off, and beams took each other's places."""
    (eager, fused), (hidden, real), found = make(), columns(3, 14), []
    rows, level = torch.tensor([2, 0, 0]), torch.tensor([2, 0, 1])
    for controller, x in ((eager.double(), hidden.double()), (fused, hidden)):
        _, state = run(controller, x[:, :11], real[:, :11], [10, 1], level)
        state.truncate(9)
        state.select(rows)
        codes = [controller(x[rows, t : t + 1], real[rows, t : t + 1], state) for t in (9, 10, 11)]
        found.append((codes, state.carry))
    assert launched == [(3,)] * 4
    for mine, theirs in zip(found[1][0], found[0][0], strict=True):
        assert_same_codes(mine, theirs)
    assert_same_carry(found[1][1], found[0][1])


def test_a_hook_may_replace_the_codes_of_a_step(launched):
    host = make_host()
    with randomise(attach_bem(host, BemConfig(**CONFIG))) as bem:
        bem.controller.fused = True
        bem.controller.register_forward_hook(
            lambda controller, args, codes: codes.replace(
                chunk=torch.zeros_like(codes.chunk), token=torch.zeros_like(codes.token)
            )
        )
        silenced = host.generate(BATCH, **GREEDY | {"max_new_tokens": 3})
    assert len(launched) == 2 and torch.equal(silenced, host.generate(BATCH, **GREEDY | {"max_new_tokens": 3}))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@torch.no_grad()
def test_failed_step_falls_back_and_the_next_one_continues(monkeypatch):
    eager, fused = make(chunk_tokens=2, prefix_tokens=4)
    hidden, real = (
        torch.randn(2, 12, 10, generator=torch.Generator().manual_seed(2)),
        torch.ones(2, 12, dtype=torch.bool),
    )
    level = torch.tensor([2, 2])
    hidden[0, 8], real[1, 0] = float("inf"), False
    guard = FallbackGuard(FallbackPolicy(latency_factor=None))
    fused.guard = guard
    theirs, _ = run(eager.double(), hidden.double(), real, [4] + [1] * 8, level)
    state = ControllerState(2, level)
    mine = [fused(hidden[:, :4], real[:, :4], state)]
    for t in range(4, 12):
        with monkeypatch.context() as patch:
            if t == 6:
                patch.setattr(bem_controller, "_forward", lambda *_: 1 / 0)
            mine.append(fused(hidden[:, t : t + 1], real[:, t : t + 1], state))
    assert (
        mine[3].fallback.all()
        and (mine[3].token == 1).all()
        and guard.counts.n_failed == 1
        and "ZeroDivisionError" in guard.counts.last_error
    )
    assert (
        mine[5].fallback[:, 0].tolist() == [True, False]
        and (mine[5].token[0] == 1).all()
        and guard.counts.n_not_finite == 3
    )
    for t in (1, 2, 4):
        assert_same_codes(mine[t], theirs[t])
    for t in range(5, 9):
        assert (mine[t].token[1] - theirs[t].token[1]).abs().max() < 1e-6 and not mine[t].fallback[1].any()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_controller_is_eager_when_gradients_are_needed(checkpointed, launched):
    (eager, fused), (hidden, real) = make(), columns(2, 6)
    fused.checkpointed = checkpointed
    for controller in (eager, fused):
        codes, _ = run(controller, hidden, real, [4, 1, 1], torch.tensor([2, 0]))
        sum((one.adaptive() ** 2).sum() + one.chunk.sum() for one in codes).backward()
    assert not launched
    for (name, one), other in zip(fused.named_parameters(), eager.parameters(), strict=True):
        assert (other.grad is None) == (one.grad is None) and (
            other.grad is None or torch.equal(one.grad, other.grad)
        ), name
    with torch.no_grad():
        run(fused, hidden, real, [4, 1, 1], torch.tensor([2, 0]))
    assert len(launched) == 2


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(2, 10)}, r"shapes .* expected hidden \[B, 1, D\]"),
        ({"hidden": torch.zeros(2, 2, 10)}, r"'hidden': \(\(\(2, 2, 10\), .* \(\(2, 1, 10\), "),
        ({"hidden": torch.zeros(2, 1, 9)}, "norm.weight"),
        ({"hidden": torch.zeros(2, 1, 10, dtype=torch.int64)}, "hidden.*int64"),
        ({"hidden": torch.zeros(2, 1, 10, device="meta")}, "meta"),
        ({"real": torch.ones(2, 1)}, "real.*float32"),
        ({"real": torch.ones(3, 1, dtype=torch.bool)}, "'real'"),
        ({"n": torch.zeros(2, dtype=torch.int32)}, "n.*int32"),
        ({"summary": torch.zeros(2, 6, dtype=torch.float64)}, "summary.*float64"),
        ({"log_mass": torch.zeros(2, 1)}, "'log_mass'"),
        ({"token.3.bias": None}, r"'token.3.bias': \(None, \(\(3,\)"),
        ({"project.bias": None}, "'project.bias'"),
        ({"code": torch.zeros(2, 65)}, "'token.3.bias'"),
    ],
)
def test_mismatched_inputs_are_refused_before_the_kernel_runs(change, message, launched):
    _, fused = make()
    start = fused.start(2)
    weights = {name: parameter.detach() for name, parameter in fused.named_parameters()}
    given = {
        "hidden": torch.zeros(2, 1, 10),
        "real": torch.ones(2, 1, dtype=torch.bool),
        **{field.name: getattr(start, field.name).detach() for field in CARRIED},
        **weights,
    } | change
    carry, weights = (
        [given[name] for name in bem_controller.CARRY],
        {name: given[name] for name in weights if given[name] is not None},
    )
    with pytest.raises(ConfigError, match=message):
        bem_controller.controller_step(given["hidden"], given["real"], carry, weights, fused.config)
    assert not launched


@pytest.mark.parametrize("changes, message", [({"rank": 65}, "rank 65"), ({"width": 1025, "rank": 1}, "width 1025")])
@torch.no_grad()
def test_sizes_unsupported_by_the_kernel_are_refused(changes, message, launched):
    _, fused = make("chunk", **changes)
    with pytest.raises(ConfigError, match=f"{message}.*use impl='reference'"):
        fused(torch.zeros(1, 1, 10), torch.ones(1, 1, dtype=torch.bool), ControllerState(1))
    with pytest.raises(ConfigError, match=r"the carry is torch.bfloat16.*use impl='reference'"):
        make("chunk")[1].bfloat16()(torch.zeros(1, 1, 10), torch.ones(1, 1, dtype=torch.bool), ControllerState(1))
    assert not launched


def test_every_kernel_compiles_for_real_chips_without_matrix_units_or_atomics():
    """At the default sizes; at all of them by scripts/benchmarks/gpu_check.sh."""
    all_sizes = os.environ.get("PROBEMON_EVERY_SIZE") == "1"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, PROGRAM, *([] if all_sizes else ["--sample"])]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    arches, n_made = (set(LIMITS), 2 * 2 + 2) if all_sizes else ({90}, 2)
    assert {one["arch"] for one in made} == arches and len(made) == n_made
    for one in made:
        assert one["cubin_bytes"] > 0 and one["shared"] <= LIMITS[one["arch"]], one
        assert not {"mma", "wgmma", "atom", "red"} & set(one["instructions"]), one
        assert "fma" in one["instructions"], one


# -- on a GPU --------------------------------------------------------------------------------------

REAL = {"level": "auto", "sites": ("q", "o"), "rank": 8, "width": 64, "chunk_tokens": 8, "prefix_tokens": 16}


@pytest.mark.parametrize(
    "n_rows, hidden_size, changes",
    [(1, 576, {}), (5, 4096, {"chunk_tokens": 7, "prefix_tokens": 14}), (70, 2560, {"width": 200, "rank": 13})],
    ids=str,
)
class TestOnAGpu:
    pytestmark = on_a_gpu

    @torch.no_grad()
    def test_steps_equal_the_eager_controller(self, n_rows, hidden_size, changes):
        eager, fused = make(hidden_size=hidden_size, device="cuda", **REAL | changes)
        hidden, real = columns(n_rows, 2 * n_rows + 30, hidden_size, device="cuda")
        exact, level = copy.deepcopy(eager).double(), torch.full((n_rows,), 2, device="cuda")
        sizes = [2 * n_rows, *[1] * 30]
        (right, _), (theirs, _), (mine, state) = (
            run(c, x, real, sizes, level) for c, x in ((exact, hidden.double()), (eager, hidden), (fused, hidden))
        )
        for true, other, one in zip(right, theirs, mine, strict=True):
            for name in (*LEVELS, "confidence"):
                error, own = (
                    (getattr(codes, name).double() - getattr(true, name)).abs().max() for codes in (one, other)
                )
                assert error <= max(3e-6, 2 * own), name
            assert all(
                torch.equal(getattr(one, name), getattr(other, name)) for name in ("chunk_index", "boundary", "level")
            )
        assert state.carry.n.tolist() == real.sum(dim=1).tolist()

    def test_sequence_gives_the_same_bits_again_and_in_every_batch(self, n_rows, hidden_size, changes):
        _, fused = make(hidden_size=hidden_size, device="cuda", **REAL | changes)
        carry, real = carried(fused.config, min(n_rows, 6), torch.float32)
        rows = torch.arange(n_rows) % len(real)
        carry, real = Carry(*(t.cuda() for t in astuple_of(carry.select(rows)))), real[rows].cuda()
        hidden = torch.randn(n_rows, 1, hidden_size, generator=torch.Generator().manual_seed(1)).cuda()
        whole, again = outputs(fused, hidden, real, carry), outputs(fused, hidden, real, carry)
        assert all(torch.equal(whole[name], again[name]) for name in whole)
        for some in ([0], [n_rows - 1], torch.randperm(n_rows)[: n_rows // 2 + 1].tolist()):
            made = outputs(fused, hidden[some], real[some], carry.select(torch.tensor(some, device="cuda")))
            assert all(torch.equal(made[name], whole[name][some]) for name in whole)

    @torch.no_grad()
    def test_a_step_can_be_captured_in_a_graph(self, n_rows, hidden_size, changes):
        """So it waits for nothing and allocates as torch does."""
        _, fused = make(hidden_size=hidden_size, device="cuda", **REAL | changes)
        carry, real = fused.start(n_rows), torch.ones(n_rows, 1, dtype=torch.bool, device="cuda")
        hidden, level = torch.randn(n_rows, 1, hidden_size, device="cuda"), torch.full((n_rows,), 2, device="cuda")
        expected = fused._step(carry, hidden, real, level)[2].token
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = fused._step(carry, hidden, real, level)[2].token
        graph.replay()
        assert torch.equal(found, expected)
