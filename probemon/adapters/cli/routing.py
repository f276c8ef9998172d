"""The command routing.

probemon routing mixtral-folder --prompt "Tell me about whales."
probemon routing mamba2-folder --states --prompt "Tell me about whales."
probemon routing demo --bem adapter/ --prompt "Tell me about whales." --out routing.parquet
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli import options as opt
from probemon.cli.common import chat_messages, check_generation, load_aloud, use_threads
from probemon.cli.terminal import answer, terminal
from probemon.errors import ConfigError
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.adapters.routing import RoutingMonitor
    from probemon.tracking.align import PlacedTokens


def routing(
    model: opt.Model,
    prompt: opt.Prompt = opt.PROMPT,
    max_new_tokens: opt.MaxNewTokens = 48,
    bem: Annotated[
        Path | None, typer.Option(help="A BEM adapter to attach: the folder that its save_pretrained wrote.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where every decision is written: a name that ends with .jsonl or .parquet.")
    ] = None,
    states: Annotated[
        bool,
        typer.Option("--states", help="Follow the states of recurrent layers too: norm, growth, what is new in them."),
    ] = False,
    window: Annotated[int, typer.Option(help="Tokens of the smallest windows that alerts look at.")] = 256,
    plain: opt.Plain = False,
    as_json: opt.JsonBesideView = False,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
) -> None:
    """Generate from MODEL and show where its routers send each token (experts, X-LoRA, BEM codes), and how far back the
    states of its recurrent layers reach.

    The demo model has neither: give it an adapter with --bem.
    """
    check_generation(prompt, max_new_tokens)
    if out is not None and out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--out is {out}: give a name that ends with .jsonl or .parquet")
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"--out is {out}, which exists: give another name, or remove it first")
    from probemon.adapters.cli.routing_view import LiveRouting, PlainRouting, summary
    from probemon.adapters.routing import RoutingJsonLines, RoutingMonitor, RoutingParquet, RoutingSettings
    from probemon.engine.kernels import check_device

    check_device(device)
    use_threads(threads)
    RoutingSettings(window=window)  # a check before the model is loaded
    if bem is not None:
        from probemon.adapters.bem import attach_bem
        from probemon.adapters.bem.saved import read_saved

        read_saved(bem)
    sink = None if out is None else RoutingParquet(out) if out.suffix == ".parquet" else RoutingJsonLines(out)
    loaded_model, tokenizer = load_aloud(model, device, dtype)
    adapter = None if bem is None else attach_bem(loaded_model, bem)
    monitor = RoutingMonitor(loaded_model, RoutingSettings(bem=adapter, states=states, window=window))
    if sink is not None and not monitor.sources:
        raise ConfigError(f"--out is for decisions of routers, and {model} has none: --json has what its layers keep")
    console = terminal(soft_wrap=False, error=as_json)
    view: PlainRouting | LiveRouting
    if plain or not console.is_terminal:
        view = PlainRouting(console)
        n_layers = 0 if monitor.recurrent is None else len(monitor.recurrent.sites)
        layers = f", {n_layers} recurrent layers" if n_layers else ""
        console.print(f"{model}: {counted(len(monitor.sites) - n_layers, 'router')}{layers} watched; prompt: {prompt}")
    else:
        view = LiveRouting(console, title=f"{model} routing")
    with nullcontext() if isinstance(view, PlainRouting) else view:
        n_generated = _generate(loaded_model, tokenizer, prompt, max_new_tokens, monitor, view, sink)
    report = monitor.report()
    summary(console, report)
    if as_json:
        answer({"generated_tokens": n_generated, **report})


def _generate(
    host: Any, tokenizer: Any, prompt: str, max_new_tokens: int, monitor: RoutingMonitor, view: Any, sink: Any
) -> int:
    from probemon.monitor.stream import encode

    encoded = encode(tokenizer, chat_messages(tokenizer, prompt))
    inputs = {name: encoded[name].to(host.device) for name in ("input_ids", "attention_mask") if name in encoded}

    def texts(placed: PlacedTokens) -> Callable[[int], str]:
        ids = dict(zip(placed.columns.tolist(), placed.ids.tolist(), strict=True))
        return lambda position: str(tokenizer.decode([ids[position]]))

    if monitor.sources:
        monitor.listen(lambda placed, decisions, record: view.show(texts(placed), record, monitor.report))
    elif monitor.recurrent is not None:  # next to routers, only the tables show them
        monitor.recurrent.listen(
            lambda row, placed, tallies: view.show_states(texts(placed), placed, tallies, monitor.report)
        )
    monitor.on_alert(view.show_alert)
    with monitor:
        if sink is not None:
            monitor.add_sink(sink)
        out = host.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return int(out.shape[1] - inputs["input_ids"].shape[1])
