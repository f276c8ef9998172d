"""The command watch.

probemon watch demo --prompt "Tell me about whales."
probemon watch demo --concept animal --stop-on whale:1 --out scores.jsonl --json
probemon watch demo --deployment examples/watch.yaml
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli import options as opt
from probemon.cli.common import (
    chat_messages,
    check_beside_file,
    check_fits,
    check_generation,
    demo_packs,
    load_aloud,
    make_manager,
    pack_for,
    sampling_arguments,
    use_threads,
)
from probemon.cli.registry import followers_of_view
from probemon.cli.signals import on_interrupt
from probemon.cli.terminal import answer, terminal
from probemon.util.counted import counted
from probemon.util.harmless_text import clip

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from probemon.cli.watch.live_view import LiveView, PlainView
    from probemon.cli.watch.rules import Showing, Watching
    from probemon.manager import DynamicProbeManager
    from probemon.monitor.overhead import Overhead

_PROMPT_SHOWN = 200


def watch(
    model: opt.Model,
    pack: opt.PackOfModel = None,
    more_packs: opt.MorePacks = None,
    prompt: opt.Prompt = opt.PROMPT,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 48,
    sample: opt.Sample = False,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    seed: opt.Seed = None,
    concept: opt.OnlyConcepts = None,
    min_strength: opt.MinStrength = 0.0,
    stop_on: opt.StopOn = None,
    aggregate: opt.StopAggregate = "none",
    out: opt.ScoresOut = None,
    plain: opt.Plain = False,
    as_json: opt.JsonBesideView = False,
    alert_set: opt.AlertSet = None,
    audit_rate: opt.AuditRate = 0.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure the overhead: bare and watched, step by step.")
    ] = False,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    strict: opt.Strict = False,
    deployment: opt.DeploymentFile = None,
) -> None:
    """Generate from MODEL and show the concepts of PACK token by token; with --pack those of several packs at once.

    Without PACK the model demo has two: nouns, and concepts of the library.

    For a model with memory slots it also shows which token each memory was reading.

    Ctrl-C ends it early, with exit status 130.
    """
    check_generation(prompt, max_new_tokens)
    sampling = sampling_arguments(sample, temperature, top_p, seed)
    from probemon.cli.watch.rules import Showing, Watching, check_watched, scores_sink, stop_rules
    from probemon.engine.kernels import check_device
    from probemon.packs.group import open_packs
    from probemon.packs.local import DEMO

    check_device(device)
    use_threads(threads)
    # Before the slow model.
    brief = model == DEMO and not (deployment or pack or more_packs)
    if deployment is not None:
        check_beside_file(pack or more_packs, alert_set, audit_rate)
        manager = _deployed(deployment, device)
    else:
        manager = make_manager(
            demo_packs(alert_set) if brief else open_packs([pack_for(model, pack), *(more_packs or ())], alert_set),
            device=device,
            audit_rate=audit_rate,
        )
    opened = manager.pack
    showing = Showing.of(opened, concept or (), min_strength, brief=brief)
    watching = Watching(stop_rules(opened, stop_on or (), aggregate), scores_sink(out), showing.running)
    check_watched(manager, concept or ())
    loaded, tokenizer = load_aloud(model, device, dtype)
    from probemon.cli.watch.answer import WatchAnswer
    from probemon.cli.watch.live_view import summary
    from probemon.host.compatibility import check_readable
    from probemon.host.model import unwrap

    check_readable(opened, unwrap(loaded), strict=strict)  # before the view claims to watch
    console, messages = terminal(soft_wrap=False, error=as_json), chat_messages(tokenizer, prompt, system)
    check_fits(loaded, tokenizer, messages)
    view = _view(console, f"{model} watched by {opened.name}", opened.n_probes, prompt, plain, showing)
    view.risen, result = watching.risen, None
    _seed(seed)
    generate = {"strict": strict, "prepare": watching.prepare, "max_new_tokens": max_new_tokens, **sampling}
    generate["followers"] = followers_of_view(loaded)
    with view, on_interrupt(watching.interrupt):
        for event in manager.stream(loaded, tokenizer, messages, **generate):
            view.show(event)
            result = event.result or result
    assert result is not None
    cost = _measure(manager, loaded, tokenizer, messages, watching) if measure else None
    watched = WatchAnswer(manager, result, watching, showing, cost=cost, audited=bool(manager.audit_rate))
    summary(console, result, watched.lines(), showing, risen=watching.risen)
    if as_json:
        answer(watched.as_dict(prompt=prompt, system=system, seed=seed))
    if watching.interrupted:
        raise typer.Exit(130)


def _deployed(file: Path, device: str) -> DynamicProbeManager:
    from probemon.manager import DynamicProbeManager

    return DynamicProbeManager.from_deployment(file, device=device)


def _view(
    console: Console, title: str, n_probes: int, prompt: str, plain: bool, showing: Showing
) -> PlainView | LiveView:
    """Return the live view, or the plain one below a title."""
    from probemon.cli.watch.live_view import LiveView, PlainView

    if console.is_terminal and not plain:
        return LiveView(console, title=title, above=showing.above, brief=showing.brief)
    console.print(f"{title}: {counted(n_probes, 'probe')}; prompt: {clip(prompt, _PROMPT_SHOWN)}")
    return PlainView(console, above=showing.above, brief=showing.brief)


def _seed(seed: int | None) -> None:
    import torch

    if seed is not None:
        torch.manual_seed(seed)


def _measure(
    manager: DynamicProbeManager, model: Any, tokenizer: Any, messages: Any, watching: Watching
) -> Overhead | None:
    from probemon.monitor.overhead import overhead
    from probemon.monitor.stream import encode

    if watching.interrupted:
        return None
    inputs = {name: value.to(model.device) for name, value in encode(tokenizer, messages).items()}
    aside = terminal(error=True)
    try:
        with aside.status("measuring the overhead, up to a minute") if aside.is_terminal else nullcontext() as status:
            return overhead(manager, model, inputs, progress=lambda line: status.update(line) if status else None)
    except KeyboardInterrupt:
        watching.interrupt()
        return None
