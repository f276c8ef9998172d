"""The command watch.

probemon watch demo probes/wordnet-smollm2-135m --prompt "Tell me about whales."
probemon watch demo probes/wordnet-smollm2-135m --pack probes/wordnet-smollm2-135m-mlp
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from probemon.cli.common import chat_messages, check_generation, load_aloud, pack_for, use_threads
from probemon.cli.options import (
    PROMPT,
    AlertSet,
    AuditRate,
    Device,
    LastLineJson,
    MaxNewTokens,
    Model,
    MorePacks,
    PackOfModel,
    Plain,
    Prompt,
    Strict,
    Threads,
)
from probemon.cli.terminal import answer, terminal

if TYPE_CHECKING:
    from probemon.manager import DynamicProbeManager
    from probemon.monitor.overhead import Overhead
    from probemon.monitor.result import Result


def watch(
    model: Model,
    pack: PackOfModel = None,
    more_packs: MorePacks = None,
    prompt: Prompt = PROMPT,
    max_new_tokens: MaxNewTokens = 48,
    plain: Plain = False,
    as_json: LastLineJson = False,
    alert_set: AlertSet = None,
    audit_rate: AuditRate = 0.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure the overhead: bare and watched, alternating.")
    ] = False,
    device: Device = "cpu",
    threads: Threads = 0,
    strict: Strict = False,
) -> None:
    """Generate from MODEL and show the concepts of PACK token by token; with --pack those of several packs at once."""
    check_generation(prompt, max_new_tokens)
    from probemon.engine.kernels import check_device
    from probemon.packs.group import open_packs

    check_device(device)
    use_threads(threads)
    # First: it takes milliseconds, the model seconds.
    opened = open_packs([pack_for(model, pack), *(more_packs or ())], alert_set)
    host, tokenizer = load_aloud(model, device)
    from probemon.cli.live_view import LiveView, PlainView, summary
    from probemon.manager import DynamicProbeManager

    manager = DynamicProbeManager(opened, device=device, audit_rate=audit_rate)
    console, messages = terminal(soft_wrap=False), chat_messages(tokenizer, prompt)
    title = f"{model} watched by {opened.name}"
    view: PlainView | LiveView
    if plain or not console.is_terminal:
        view = PlainView(console)
        console.print(f"{title}: {opened.n_probes} probes; prompt: {prompt}")
    else:
        view = LiveView(console, title=title)
    result = None
    with view:
        for event in manager.stream(
            host, tokenizer, messages, strict=strict, max_new_tokens=max_new_tokens, do_sample=False
        ):
            view.show(event)
            result = event.result or result
    assert result is not None
    cost = _measure(manager, host, tokenizer, messages) if measure else None
    summary(console, result, _lines(manager, result, cost, audited=bool(audit_rate)))
    if as_json:
        answer(_as_dict(manager, result, cost, audited=bool(audit_rate)))


def _measure(manager: DynamicProbeManager, host: Any, tokenizer: Any, messages: Any) -> Overhead:
    from probemon.monitor.overhead import overhead
    from probemon.monitor.stream import encode

    inputs = {name: value.to(host.device) for name, value in encode(tokenizer, messages).items()}
    aside = terminal(error=True)
    with aside.status("measuring the overhead") if aside.is_terminal else nullcontext() as status:
        return overhead(manager, host, inputs, progress=lambda line: status.update(line) if status else None)


def _per_token(result: Result) -> tuple[float, float]:
    """How many probes were evaluated, and how many active, in the mean over the tokens seen."""
    cover = result.coverage
    return float(cover.evaluated[cover.seen].mean()), float(cover.active[cover.seen].mean())


def _lines(manager: DynamicProbeManager, result: Result, cost: Overhead | None, *, audited: bool) -> list[str]:
    """What stands below the strongest concepts: counts, what ran, what it cost, what the silence of probes means."""
    from probemon.monitor.result import without_thresholds

    pack, strategy = manager.pack, manager.strategy
    evaluated, active = _per_token(result)
    lines = [
        (
            f"{len(result)} tokens ({int((result.phase == 1).sum())} generated), {result.coverage.n_unseen} unseen (the"
            " last one generated is never run by the host)"
        ),
        (
            f"{pack.n_probes} probes, {active:.0f} active and {evaluated:.0f} evaluated a token,"
            f" {int(result.coverage.dropped.sum())} dropped"
        ),
        f"kernel: {manager.impl} ({manager.impl_why})",
        f"strategy: {strategy.step} for a token, {strategy.batch} for a prompt: {strategy.why}",
    ]
    if audited:
        lines.append(f"audit: {result.audit}")
    if cost is not None:
        lines.append(
            f"host {cost.host_ms:.1f} ms a token bare, {cost.watched_ms:.1f} watched ({cost.overhead_pct:+.1f} %;"
            f" {cost.monitor_ms:.2f} ms inside our hooks; medians of {cost.n_steps} steps each, alternating)"
        )
    n_mute = int(pack.alert_threshold.isnan().sum())
    if n_mute < pack.n_probes:
        by = f"by its set {pack.alert_set}" if pack.alert_set else "which the pack's card tells of"
        lines.append(
            f'A concept shown is over its alert threshold, {by}. "right": how much of what it fires at was right on'
            " the text that the pack was calibrated on."
            if not np.isnan([pack.precision(probe) for probe in range(pack.n_probes)]).all()
            else f"A concept shown is over its alert threshold, {by}; false alarms are expected, at the rate that the"
            " card states."
        )
    n_ranked = int(without_thresholds(pack).sum())
    if n_ranked:
        lines.append(
            f"{n_ranked} of {pack.n_probes} probes are of packs without any alert threshold: their concepts"
            " are shown by rank, which does not say that they are there. probemon calibrate sets thresholds"
        )
    if n_mute > n_ranked:  # their silence says nothing
        lines.append(
            f"{n_mute - n_ranked} of {pack.n_probes} probes have no alert threshold, so that they are never shown,"
            " whatever they score: probemon calibrate sets one"
        )
    return lines


def _as_dict(manager: DynamicProbeManager, result: Result, cost: Overhead | None, *, audited: bool) -> dict[str, Any]:
    from probemon.monitor.result import without_thresholds

    pack = manager.pack
    evaluated, active = _per_token(result)
    return {
        "tokens": len(result),
        "generated_tokens": int((result.phase == 1).sum()),
        "host_ms_per_token": cost and round(cost.host_ms, 3),
        "monitor_ms_per_token": cost and round(cost.monitor_ms, 3),
        "watched_ms_per_token": cost and round(cost.watched_ms, 3),
        "overhead_pct": cost and round(cost.overhead_pct, 2),
        "probes_total": pack.n_probes,
        "probes_evaluated_per_token": round(evaluated, 2),
        "probes_active_per_token": round(active, 2),
        "dropped": int(result.coverage.dropped.sum()),
        "unseen_tokens": result.coverage.n_unseen,
        "audit": result.audit.as_dict() if audited else None,
        "probes_without_threshold": int(pack.alert_threshold.isnan().sum()),
        "alert_set": pack.alert_set,
        "probes_ranked": int(without_thresholds(pack).sum()),
        "strategy": {"token": manager.strategy.step, "prompt": manager.strategy.batch},
    }
