"""Where a forward's time and memory go: each site by itself, the controller, and the most memory in use at a time.

    profile = profile_sites(bem, lambda: model(ids))
    profile.controller.seconds
    profile.sites["o_3"].update, profile.sites["o_3"].layer        # Span: seconds, n_calls
    peak_memory(lambda: model(ids))                                # bytes more than before

A profiler slows what it looks at: its seconds say where time goes. `probemon.adapters.bem.evaluation.latency` says how
long it is.
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
    """Seconds of the processor and of the GPU in what is named, and how often it ran."""

    seconds: float
    gpu_seconds: float
    n_calls: int


@dataclass(frozen=True)
class SiteProfile:
    """A site: the host's own layer, and the update of its output."""

    layer: TimedSpan
    update: TimedSpan


@dataclass(frozen=True)
class Profile:
    """What a call spent, by the key of each site; `total` is the whole call."""

    total: TimedSpan
    controller: TimedSpan
    sites: Mapping[str, SiteProfile]


def profile_sites(bem: Bem, call: Callable[[], object]) -> Profile:
    """Profile a call that runs the host with the adapter on it, by torch.profiler. Nothing is left on the host.

    Raises `BemError` where the adapter is off, or no forward of the host passed it.
    """
    if not isinstance(bem, Bem):
        raise BemError(f"{type(bem).__name__} is no adapter: give what attach_bem returned")
    if not bem.open:
        raise BemError("the adapter is not on its host, so there is nothing to profile: attach it")
    with ExitStack() as stack:
        _watch(stack, "controller", bem.controller, prefix="")
        for site in bem.sites:
            _watch(stack, site.key, site.module, prefix="layer ")
        with profile(activities=_activities()) as profiler, record_function(_name("call")):
            call()
    spans = {
        event.key: TimedSpan(event.cpu_time_total * 1e-6, getattr(event, "device_time_total", 0.0) * 1e-6, event.count)
        for event in profiler.key_averages()
        if event.key.startswith(_name("")) and event.device_type == torch.autograd.DeviceType.CPU
    }
    if _name("controller") not in spans:
        raise BemError("the call ran no forward of the host, so there is nothing to profile")
    nothing = TimedSpan(0.0, 0.0, 0)  # a site may be in a branch that this forward did not take
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
    """Return by how many bytes the memory of tensors on a device grew at most while a call ran: what the call returns,
    what it kept, and what it let go again. Raises `ConfigError` for a device that is neither the CPU nor a GPU that is
    there, and for what cannot be called.
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
    """Put spans around a module, and around what its other hooks do behind it."""
    open_spans: list[record_function] = []

    def begin(name: str) -> None:
        span = record_function(_name(name))
        span.__enter__()
        open_spans.append(span)

    def end() -> None:
        if open_spans:
            open_spans.pop().__exit__(None, None, None)

    def before(*_: Any) -> None:
        begin(f"{prefix}{key}")

    def between(*_: Any) -> None:
        end()
        if prefix:
            begin(f"update {key}")

    stack.callback(module.register_forward_pre_hook(before).remove)
    # First of all hooks: the adapter's own, which is the update, runs behind it and before the last.
    stack.callback(module.register_forward_hook(between, prepend=True).remove)
    if prefix:
        stack.callback(module.register_forward_hook(lambda *_: end()).remove)


def _name(part: str) -> str:
    return f"probemon: {part}"


def _activities() -> list[ProfilerActivity]:
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]
