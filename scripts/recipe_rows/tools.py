"""Recipes of looking: profilers and memory monitors beside the monitor."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from recipe_rows.hosts import GREEDY, IDS, Watch, largest, make
from recipe_rows.rows import Found, recipe

CPU = [torch.profiler.ProfilerActivity.CPU]
BOTH = ("ltm", "mamba2", "falcon_h1")


@recipe(
    "profiler", "torch.profiler", "calls of aten::linear counted, less those of linear layers; logits that change",
    on=BOTH,
)  # fmt: skip
def profiler(kind: str) -> Found:
    model, calls = make(kind), []
    with torch.no_grad():
        expected = model(IDS).logits
        hooks = [
            module.register_forward_hook(lambda *_: calls.append(1))
            for module in model.modules()
            if isinstance(module, torch.nn.Linear)
        ]
        with Watch(model, states=False) as watch:
            model(IDS[:, :5])  # the first one in the block tries what the host can do
            calls.clear()
            with torch.profiler.profile(activities=CPU, record_shapes=True) as profile:
                logits = model(IDS).logits
        for hook in hooks:
            hook.remove()
    counted = {event.key: event.count for event in profile.key_averages()}.get("aten::linear", 0)
    value = abs(counted - len(calls)) + largest(logits, expected)
    return Found(value if counted else float("inf"), watch.distance(IDS, last=0))


@recipe(
    "profiler, a known sleep",
    "torch.profiler",
    "share of a planted sleep that record_function misses",
    on=("any",),
    bound=0.2,
)
def known_sleep(kind: str) -> Found:
    with torch.profiler.profile(activities=CPU) as profile, torch.profiler.record_function("planted"):
        time.sleep(0.05)
    microseconds = next(event.cpu_time_total for event in profile.key_averages() if event.key == "planted")
    return Found(max(0.0, 1 - microseconds / 50_000))


@recipe("memory profile", "torch.profiler", "bytes of a planted tensor, less those that were recorded", on=("any",))
def memory_profile(kind: str) -> Found:
    with torch.profiler.profile(activities=CPU, profile_memory=True) as profile:
        kept = torch.empty(123, 1000)
    recorded = sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.key == "aten::empty")
    return Found(float(abs(recorded - kept.nbytes)))


@recipe(
    "memory monitor", "psutil", "bytes of 64 MB that are touched, as a share of what resident memory grew by, less one",
    on=("any",), bound=0.1,
)  # fmt: skip
def memory_monitor(kind: str) -> Found:
    import psutil

    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    touched = torch.ones(16_000_000)
    grown = process.memory_info().rss - before
    return Found(abs(grown / touched.nbytes - 1))


@recipe(
    "tokens counted",
    "probemon",
    "tokens that the monitor counted, less those that the host ran",
    on=("mamba2", "falcon_h1"),
)
def tokens(kind: str) -> Found:
    model = make(kind)
    ran: list[Any] = []
    with Watch(model) as watch:
        model.generate(IDS[:1, :5], **{**GREEDY, "max_new_tokens": 1})  # tries what the host can do
        monitor = watch.states_recorder
        before = monitor.n_tokens
        hook = model.get_input_embeddings().register_forward_hook(lambda m, args, out: ran.append(args[0].numel()))
        out = model.generate(IDS[:, :9], **GREEDY)
        hook.remove()
    return Found(float(abs(monitor.n_tokens - before - sum(ran))), watch.distance(out))
