"""Time of a forward by site and in the controller, and its peak memory.

    profile = profile_sites(bem, lambda: model(ids))
    profile.controller.seconds
    profile.sites["o_3"].update, profile.sites["o_3"].layer        # TimedSpan
    peak_memory(lambda: model(ids))                                # bytes more than before

A profiler slows the call, so take durations without one (`torch.utils.benchmark`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from probemon.adapters.bem.attached import Bem
from probemon.errors import BemError, ConfigError
from probemon.util.checks import check_callable, shown


@dataclass(frozen=True)
class TimedSpan:
    """CPU and GPU seconds, and number of calls."""

    seconds: float
    gpu_seconds: float
    n_calls: int


@dataclass(frozen=True)
class SiteProfile:
    """The model's own layer, and the update of its output."""

    layer: TimedSpan
    update: TimedSpan


@dataclass(frozen=True)
class Profile:
    """Spans of a call, with sites by key."""

    total: TimedSpan
    controller: TimedSpan
    sites: Mapping[str, SiteProfile]


def profile_sites(bem: Bem, call: Callable[[], object]) -> Profile:
    """Profile a call that runs the model. Raises `BemError` if the adapter is off, or no forward ran."""
    if not isinstance(bem, Bem):
        raise BemError(f"{type(bem).__name__} is not an adapter: give what attach_bem returned")
    if not bem.open:
        raise BemError("the adapter is not on its model, so there is nothing to profile: attach it")
    with ExitStack() as stack:
        _watch(stack, "controller", bem.controller, prefix="")
        for site in bem.sites:
            _watch(stack, site.key, site.module, prefix="layer ")
        with profile() as profiler, record_function(_name("call")):
            call()
    spans = {
        event.key: TimedSpan(event.cpu_time_total * 1e-6, getattr(event, "device_time_total", 0.0) * 1e-6, event.count)
        for event in profiler.key_averages()
        if event.key.startswith(_name("")) and event.device_type == torch.autograd.DeviceType.CPU
    }
    if _name("controller") not in spans:
        raise BemError("the call ran no forward of the model, so there is nothing to profile")
    nothing = TimedSpan(0.0, 0.0, 0)  # a site may not have run
    return Profile(
        spans[_name("call")],
        spans[_name("controller")],
        {
            site.key: SiteProfile(
                spans.get(_name(f"layer {site.key}"), nothing), spans.get(_name(f"update {site.key}"), nothing)
            )
            for site in bem.sites
        },
    )


def peak_memory(call: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """Return the peak growth in bytes of tensor memory during a call. Raises `ConfigError` for a device that is not
    there, or if `call` is not callable.
    """
    check_callable("peak_memory", call)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {shown(device)}: give 'cpu' or a GPU, as 'cuda' or 'cuda:0'") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(device)!r}, whose memory is not counted here: give 'cpu' or a GPU ('cuda')")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device is {str(device)!r}, and torch sees {torch.cuda.device_count()} GPUs: give one of those, or"
                " 'cpu'"
            )
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    used = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        used += change.nbytes()
        most = max(most, used)
    return most


def _watch(stack: ExitStack, key: str, module: nn.Module, prefix: str) -> None:
    """Put spans around a module, and around its other hooks."""
    open_spans: list[record_function] = []

    def begin(name: str) -> None:
        span = record_function(_name(name))
        span.__enter__()
        open_spans.append(span)

    def end() -> None:
        if open_spans:
            open_spans.pop().__exit__(None, None, None)

    def between(*_: Any) -> None:
        end()
        if prefix:
            begin(f"update {key}")

    stack.callback(module.register_forward_pre_hook(lambda *_: begin(f"{prefix}{key}")).remove)
    # First: the adapter's hook, the update, runs between this and the last.
    stack.callback(module.register_forward_hook(between, prepend=True).remove)
    if prefix:
        stack.callback(module.register_forward_hook(lambda *_: end()).remove)


def _name(part: str) -> str:
    return f"probemon: {part}"
