"""If the controller fails, is slow, unsure or nonfinite, a static LoRA steers and the codes say so."""

import copy
import logging

import numpy as np
import pytest
import torch
from test_bem_cache import cached, full, some_ids
from transformers import DynamicCache

import probemon.adapters.bem.update as update_module
from bem_oracle import codes_of_row, dense_update, governed, make_host, randomise
from conftest import PAD
from probemon.adapters.bem import BemConfig, Codes, Controller, ControllerState, FallbackPolicy, attach_bem
from probemon.adapters.bem.fallback import FallbackGuard, Fallbacks
from probemon.adapters.routing.monitor import RoutingMonitor
from probemon.errors import BemStateError, KernelUnavailable

N = 3
SETTINGS = {
    "sites": ("q", "v", "o", "down"),
    "rank": 3,
    "width": 6,
    "chunk_tokens": N,
    "prefix_tokens": 2 * N,
    "token_limit": 8,
    "ema": 0.7,
    "spectral_cap": 1.5,
}
CONFIG = BemConfig(**SETTINGS)
FREE = BemConfig(**{**SETTINGS, "spectral_cap": None})
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
D = 10


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def policy(**settings):
    return FallbackPolicy(**{"clock": Clock(), **settings})


class Broken:
    """For the time of the block a method of the controller raises, or takes longer."""

    def __init__(self, controller, *names, error=None, clock=None, seconds=0.0):
        self.controller, self.names, self.error, self.clock, self.seconds, self.n_calls = (
            controller,
            names,
            error or RuntimeError("on purpose"),
            clock,
            seconds,
            0,
        )

    def _stand_in(self, original):
        def call(*args, **kwargs):
            self.n_calls += 1
            if self.clock is None:
                raise self.error
            self.clock.now += self.seconds
            return original(*args, **kwargs)

        return call

    def __enter__(self):
        for name in self.names:
            setattr(self.controller, name, self._stand_in(getattr(self.controller, name)))
        return self

    def __exit__(self, *_):
        for name in self.names:
            delattr(self.controller, name)


def watch(bem):
    seen = []
    bem.controller.register_forward_hook(lambda controller, args, codes: seen.append(codes))
    return seen


def static_where(mask):
    """Replaces codes by ones where `mask [B, T]`."""

    def replace(controller, args, codes):
        return codes.replace(
            **{name: torch.where(mask[..., None], 1.0, getattr(codes, name)) for name in ("chunk", "token")}
        )

    return replace


# -- on a host -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host():
    return make_host()


@pytest.fixture
def steered(host):
    with randomise(attach_bem(host, CONFIG, fallback=policy(min_confidence=0.01))) as bem:
        yield bem


def test_policy_changes_no_bit_of_a_healthy_run_and_logs_nothing(host, caplog):
    ids, given = some_ids(2), []
    for settings in ({}, {"fallback": FallbackPolicy(latency_factor=None)}):
        with randomise(attach_bem(host, CONFIG, **settings)) as bem, caplog.at_level(logging.WARNING):
            seen = watch(bem)
            given.append((full(host, ids), host.generate(ids, **GREEDY)))
        assert len(seen) == 9 and not any(codes.fallback.any() for codes in seen) and not caplog.records
    assert torch.equal(given[0][0], given[1][0]) and torch.equal(given[0][1], given[1][1])
    assert bem.fallbacks == Fallbacks(n_forwards=9)


def test_typed_and_out_of_memory_errors_are_raised_even_with_a_policy(host, steered):
    for error in (BemStateError("typed"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        cache = DynamicCache()
        cached(host, some_ids(2, 4), [4], cache=cache)
        with Broken(steered.controller, "advance", error=error), pytest.raises(type(error)):
            host(some_ids(2, 1), past_key_values=cache)
        assert steered.state(cache).n_columns == 4
    assert steered.fallbacks.n_failed == 0 and steered.breaker.state == "closed"
    steered.detach()
    with (
        randomise(attach_bem(host, CONFIG)) as bem,
        Broken(bem.controller, "advance"),
        pytest.raises(RuntimeError, match="on purpose"),
    ):
        full(host, some_ids())


@pytest.mark.parametrize("broken", ["advance", "features", "_code"])
def test_failing_controller_falls_back_to_a_static_lora(host, broken, caplog):
    """The same logits, greedy tokens and beams as of the host with W + s U V^T."""
    ids = some_ids(2)
    with randomise(attach_bem(host, FREE, fallback=policy(n_failures=20))) as bem:
        merged = copy.deepcopy(make_host())
        with torch.no_grad():
            for site in bem.sites:
                block = merged.model.layers[site.layer].get_submodule(
                    {"down": "mlp.down_proj"}.get(site.kind, f"self_attn.{site.kind}_proj")
                )
                block.weight += dense_update(bem.updates[site.key], torch.ones(3), FREE.scale)
        seen = watch(bem)
        with Broken(bem.controller, broken), caplog.at_level(logging.WARNING):
            found = full(host, ids)
            assert torch.equal(host.generate(ids, **GREEDY), merged.generate(ids, **GREEDY))
            assert torch.equal(host.generate(ids, **GREEDY, num_beams=3), merged.generate(ids, **GREEDY, num_beams=3))
        routed = full(host, ids)
    assert (found - full(merged, ids)).abs().max() < 1e-5 and (found - routed).abs().max() > 0.1
    assert (
        all(codes.fallback.all() and codes.confidence.isnan().all() for codes in seen[:-1])
        and not seen[-1].fallback.any()
    )
    assert (
        bem.fallbacks.n_failed == bem.fallbacks.n_forwards - 1 == 17
        and bem.fallbacks.last_error == "RuntimeError: on purpose"
    )
    assert bem.fallbacks.n_unread == (17 if broken == "features" else 0)
    assert len([record for record in caplog.records if "on purpose" in record.getMessage()]) == 17


def test_static_fallback_obeys_the_same_limits(host):
    config = BemConfig(**{**SETTINGS, "spectral_cap": 0.4, "trust_region": 0.9})
    with randomise(attach_bem(host, config, fallback=policy())) as bem:
        ones = {"chunk": np.ones(3), "token": np.ones(3), "level": "token"}
        _, weights = governed(bem, ones)
        applied = bem.governor.apply({chunked: torch.ones(1, 1, 3) for chunked in (True, False)})
        assert max(np.linalg.norm(weight, 2) for weight in weights.values()) <= 0.4 * (1 + 1e-6)
        layer, seen = host.model.layers[0].mlp.down_proj, []
        with (
            Broken(bem.controller, "advance"),
            layer.register_forward_hook(lambda module, args, output: seen.append((args[0], output))),
        ):
            full(host, some_ids(1, 5))
        [(x, y)] = seen
        added = (y - torch.nn.functional.linear(x, layer.weight)).double()
        assert (added - x.double() @ torch.from_numpy(weights["down.0"]).T).abs().max() < 1e-5 and applied[
            "down_0"
        ].max() < 1


@pytest.mark.parametrize("sizes", [[1] * 18, [4, 1, 1, 3, 1, 1, 1, 6]], ids=["one by one", "pieces"])
@pytest.mark.parametrize("broken", ["advance", "features", "_code"])
def test_cached_steps_after_a_failure_are_correct(host, steered, broken, sizes):
    """As a whole forward whose codes are 1 where they were told to be; keys and values that are cached stay."""
    ids, cache, seen, parts, at = some_ids(2), DynamicCache(), watch(steered), [], 0
    for step, size in enumerate(sizes):
        before = [layer.keys.clone() for layer in cache.layers] if at else []
        given = ids[:, at : at + size]
        if step in (4, 5):
            with Broken(steered.controller, broken), torch.no_grad():
                parts.append(host(given, past_key_values=cache).logits)
        else:
            with torch.no_grad():
                parts.append(host(given, past_key_values=cache).logits)
        assert all(torch.equal(layer.keys[:, :, :at], keys) for layer, keys in zip(cache.layers, before, strict=at > 0))
        at += size
    told = torch.cat([codes.fallback for codes in seen], dim=1)
    first = sum(sizes[:4])
    failed = slice(first, first + sum(sizes[4:6]))
    assert told[:, failed].all() and not told[:, :first].any()
    if broken == "features":  # unknown from the next chunk on, as the moving average never forgets
        unknown = torch.arange(18) >= (first // N + 1) * N
        assert torch.equal(told, (unknown | told[0]).expand(2, -1)) and told[:, (first // N + 1) * N :].all()
    else:
        assert not told[:, failed.stop :].any()
    with steered.controller.register_forward_hook(static_where(told)):
        whole = full(host, ids)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-5 and (whole - full(host, ids)).abs().max() > 0.01


def test_sequence_with_nonfinite_features_falls_back_alone_from_there_on(host, steered):
    ids, seen = some_ids(3), watch(steered)

    def poison(controller, args):  # what it reads, and not what the host does
        hidden, real, state = args
        hidden = hidden.clone()
        hidden[1, torch.arange(hidden.shape[1]) == 7 - state.n_columns] = float("nan")
        return hidden, real, state

    healthy = full(host, ids)
    with steered.controller.register_forward_pre_hook(poison):
        found = full(host, ids)
        stepped = cached(host, ids, [1] * 18)
    told = seen[1].fallback
    assert (stepped - found).abs().max() < 1e-5 * found.abs().max()
    assert torch.equal(found[[0, 2]], healthy[[0, 2]]) and torch.equal(found[1, :7], healthy[1, :7])
    # Its own token, and all of the chunks after it: the rest of chunk 2 is of what was known before.
    assert told[1].tolist() == [t == 7 or t >= 9 for t in range(18)] and not told[[0, 2]].any()
    assert torch.equal(torch.cat([codes.fallback for codes in seen[2:]], dim=1), told)
    assert (
        torch.isfinite(seen[1].chunk).all()
        and torch.isfinite(seen[1].token).all()
        and (seen[1].token[1, 9:] == 1).all()
    )
    assert steered.fallbacks.n_not_finite == 1 + 1 + 9 and steered.breaker.state == "closed", (
        "one row is no reason to leave the others alone"
    )
    with steered.controller.register_forward_pre_hook(poison):
        for _ in range(4):  # sequences in which it happens again
            full(host, ids)
    assert steered.breaker.state == "open"


def test_low_confidence_tokens_fall_back_and_cached_equals_full(host):
    """The tokens under the threshold are those of the oracle."""
    ids = some_ids(2)
    with randomise(attach_bem(host, CONFIG, fallback=policy())) as bem:
        hidden = host.get_input_embeddings()(ids).detach()
        oracle = torch.tensor([[token["confidence"] for token in codes_of_row(bem, row.numpy())] for row in hidden])
    limit = float((oracle.unique()[:-1].diff() / 2 + oracle.unique()[:-2]).median())
    with randomise(attach_bem(host, CONFIG, fallback=policy(min_confidence=limit))) as bem:
        seen = watch(bem)
        whole = full(host, ids)
        assert torch.equal(seen[0].fallback, oracle < limit) and 0 < int(seen[0].fallback.sum()) < 36
        assert (seen[0].confidence - oracle).abs().max() < 2e-6  # what it was, and not what took its place
        for sizes in ([1] * 18, [7, 7, 4]):
            assert (cached(host, ids, sizes) - whole).abs().max() < 1e-5
        assert bem.breaker.state == "closed" and bem.fallbacks.n_unsure > 0
    with randomise(attach_bem(host, CONFIG)) as bem, bem.controller.register_forward_hook(static_where(oracle < limit)):
        assert (full(host, ids) - whole).abs().max() < 1e-6


def test_slow_controller_is_skipped_and_later_retried(host):
    """While the breaker is open the routers are not run; the codes after it are those of a controller that was never
    left out.
    """
    given = policy(n_baseline=4)
    ids, clock = some_ids(1, 60), given.clock
    with randomise(attach_bem(host, CONFIG, fallback=given)) as bem:
        seen, cache, controller = watch(bem), DynamicCache(), bem.controller

        def step(t):
            with torch.no_grad():
                host(ids[:, t : t + 1], past_key_values=cache)

        with Broken(controller, "_code", clock=clock, seconds=0.01):
            for t in range(20):
                step(t)
        assert bem.breaker.state == "closed"
        with Broken(controller, "_code", clock=clock, seconds=0.03):
            for t in range(20, 25):
                step(t)
        assert bem.breaker.state == "open"
        with Broken(controller, "_code", clock=clock) as counted:
            for t in range(25, 32):
                step(t)
            assert counted.n_calls == 0
        clock.now += 60
        with Broken(controller, "_code", clock=clock, seconds=0.01):
            for t in range(32, 60):
                step(t)
        assert bem.breaker.state == "closed" and bem.breaker.n_opened == 1 and bem.fallbacks.n_refused == 7
        assert [bool(codes.fallback) for codes in seen] == [25 <= t < 32 for t in range(60)]
        full(host, ids)
        for name in ("chunk", "token"):
            difference = (
                (torch.cat([getattr(codes, name) for codes in seen[:-1]], dim=1) - getattr(seen[-1], name))
                .abs()
                .amax(dim=-1)[0]
            )
            assert difference[:25].max() < 1e-5 and difference[32:].max() < 1e-5 and difference[25:32].min() > 1e-3
        for name in ("chunk_index", "boundary", "level"):
            assert torch.equal(torch.cat([getattr(codes, name) for codes in seen[:-1]], dim=1), getattr(seen[-1], name))


def test_routing_telemetry_counts_fallback_tokens(host, steered):
    with RoutingMonitor(host, bem=steered) as monitor:
        cache = DynamicCache()
        cached(host, some_ids(1, 6), [6], cache=cache)
        with Broken(steered.controller, "advance"):
            cached(host, some_ids(1, 2), [2], cache=cache)
    assert [stream["fallback_rate"] for stream in monitor.report()["streams"]] == [0.25, 0.25]


def test_saved_adapter_can_be_attached_with_a_policy(host, tmp_path):
    with randomise(attach_bem(host, CONFIG)) as bem:
        bem.save_pretrained(tmp_path)
    with attach_bem(host, tmp_path, fallback=policy()) as bem, Broken(bem.controller, "advance"):
        full(host, some_ids())
        assert bem.fallbacks.n_failed == 1
    assert attach_bem(host, CONFIG).detach() is None and bem.breaker.state == "closed"


# -- the controller alone --------------------------------------------------------------------------


def guarded(level="token", **settings):
    config = BemConfig(**{**SETTINGS, "sites": ("down",), "level": level})
    torch.manual_seed(0)
    controller = Controller(D, config).requires_grad_(False)
    with torch.no_grad():
        for parameter in controller.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    controller.guard = FallbackGuard(policy(window=99, n_failures=99, **settings))
    return controller


def test_codes_fall_back_as_long_as_they_depend_on_lost_features():
    """Token codes: of the prefix for good, after the prefix until the next chunk is complete; cut off, they were never
    missed.
    """
    hidden, real = torch.randn(1, 24, D), torch.ones(1, 24, dtype=torch.bool)
    for lost, expected in ((1, [1, *range(3, 24)]), (13, [13, 15, 16, 17])):
        controller, state, parts = guarded(), ControllerState(1), []
        for t in range(24):
            if t == lost:
                with Broken(controller, "advance", "features"):
                    parts.append(controller(hidden[:, t : t + 1], real[:, :1], state))
                assert controller.guard.counts.n_unread == 1
            else:
                parts.append(controller(hidden[:, t : t + 1], real[:, :1], state))
        told = torch.cat([codes.fallback for codes in parts], dim=1)[0]
        whole = controller(hidden, real, ControllerState(1))
        assert told.nonzero()[:, 0].tolist() == expected
        found = torch.cat([codes.token for codes in parts], dim=1)[0]
        assert (found - whole.token[0])[~told].abs().max() < 1e-6 and (found[told] == 1).all()
        state.truncate(lost)
        again = controller(hidden[:, lost:], real[:, lost:], state)
        assert not again.fallback.any() and (again.token - whole.token[:, lost:]).abs().max() < 1e-6


def test_padding_never_falls_back_and_levels_are_still_decided():
    controller = guarded("auto")
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :4] = False
    with Broken(controller, "advance"):
        state = ControllerState(2)
        codes = controller(torch.randn(2, 9, D), real, state)
    assert (
        isinstance(codes, Codes)
        and torch.equal(codes.fallback, real)
        and state.level.tolist() == [0, 0]
        and state.n_columns == 9
    )
    for name in ("prefix", "chunk", "token"):
        assert torch.equal(codes.of(name), real[..., None].float().expand(-1, -1, 3))
    assert codes.chunk_index[0].tolist() == [-1] * 4 + [0, 0, 0, 1, 1] and codes.boundary[0].nonzero()[
        :, 0
    ].tolist() == [4, 7]
    assert torch.equal(codes.confidence.isnan(), real) and not codes.confidence[~real].any()


# -- the implementation ----------------------------------------------------------------------------


def test_auto_chooses_an_implementation_once_and_says_why(host, monkeypatch, caplog):
    with caplog.at_level(logging.INFO), attach_bem(host, CONFIG, impl="auto") as bem:
        assert (bem.impl, bem.impl_why) == (
            "reference",
            "the kernels are for GPUs, and a site or the layer that is read is on cpu",
        )
        assert any("reference: the kernels are for GPUs" in record.getMessage() for record in caplog.records)
    with attach_bem(host, CONFIG) as bem:
        assert (bem.impl, bem.impl_why) == ("reference", "it was asked for")


@pytest.mark.parametrize(
    "error, expected",
    [
        (None, ("triton", "every site is on a GPU")),
        (KernelUnavailable("needs triton"), ("reference", "needs triton")),
        (OSError("no cc"), ("reference", "OSError: no cc")),
    ],
)
def test_auto_tries_the_kernel_on_a_gpu(monkeypatch, error, expected):
    tried = []

    def trial(x, v, u, codes, scale, impl):
        tried.append(impl)
        if error is not None:
            raise error
        return x

    monkeypatch.setattr(update_module, "generated_update", trial)
    monkeypatch.setattr(torch, "ones", lambda *size, device, dtype: torch.zeros(*size, dtype=dtype) + 1)
    impl, why = update_module.choose_impl("auto", [torch.device("cuda", 0), torch.device("cuda", 0)], BemConfig())
    assert impl == expected[0] and expected[1] in why and tried == ["triton"]
