"""The command routing.

probemon routing mixtral-folder --prompt "Tell me about whales."
probemon routing demo --bem adapter/ --prompt "Tell me about whales." --out routing.parquet
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli.common import load_aloud, use_threads
from probemon.cli.terminal import answer, terminal
from probemon.errors import ConfigError

if TYPE_CHECKING:
    from probemon.telemetry import RoutingMonitor

PROMPT = "Tell me about whales and the ships that hunted them."


def routing(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=(
                "A model folder, a hub name, or 'demo' for the bundled SmolLM2-135M-Instruct (which routes nothing"
                " without --bem)."
            ),
        ),
    ],
    prompt: Annotated[str, typer.Option(help="What to say to the model.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 48,
    bem: Annotated[
        Path | None, typer.Option(help="A BEM adapter to attach: the folder that its save_pretrained wrote.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where every decision is written: a name that ends with .jsonl or .parquet.")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of the smallest windows that alerts look at.")] = 256,
    plain: Annotated[
        bool, typer.Option("--plain", help="One line a token, for pipes (the default where there is no terminal).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
    dtype: Annotated[
        str, typer.Option(help="Of the model: bfloat16, float32, float16 or auto (what its files have).")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads for the model; 0: what torch chooses.")] = 0,
) -> None:
    """Generate from MODEL and show where its routers send each token: experts, X-LoRA, BEM codes."""
    if not prompt.strip():
        raise ConfigError("the prompt is empty: say something with --prompt")
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {max_new_tokens}: give 1 or more")
    if out is not None and out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--out is {out}: give a name that ends with .jsonl or .parquet")
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"--out is {out}, which exists: give another name, or remove it first")
    from probemon.cli.routing_view import LiveRouting, PlainRouting, RoutingView, summary
    from probemon.engine.kernels import check_device
    from probemon.telemetry import RoutingJsonLines, RoutingMonitor, RoutingParquet, RoutingSettings

    check_device(device)
    use_threads(threads)
    sink = None if out is None else RoutingParquet(out) if out.suffix == ".parquet" else RoutingJsonLines(out)
    host, tokenizer = load_aloud(model, device, dtype)
    adapter = None
    if bem is not None:
        from probemon.bem import attach_bem

        adapter = attach_bem(host, bem)
    monitor, console = RoutingMonitor(host, RoutingSettings(bem=adapter, window=window)), terminal(soft_wrap=False)
    view: RoutingView
    if plain or not console.is_terminal:
        view = PlainRouting(console)
        console.print(f"{model}: {len(monitor.sites)} routers watched; prompt: {prompt}")
    else:
        view = LiveRouting(console, title=f"{model} routing")
    with view:
        n_generated = _generate(host, tokenizer, prompt, max_new_tokens, monitor, view, sink)
    report = monitor.report()
    summary(console, report)
    if as_json:
        answer({"generated_tokens": n_generated, **report})


def _generate(
    host: Any, tokenizer: Any, prompt: str, max_new_tokens: int, monitor: RoutingMonitor, view: Any, sink: Any
) -> int:
    from transformers.generation.streamers import BaseStreamer

    from probemon.monitor.stream import encode

    class Ids(BaseStreamer):  # a token is put here before the forward that routes it
        def __init__(self) -> None:
            self.ids: list[int] = []

        def put(self, value: Any) -> None:
            self.ids += value.reshape(-1).tolist()

        def end(self) -> None:
            pass

    messages: Any = [{"role": "user", "content": prompt}] if getattr(tokenizer, "chat_template", None) else prompt
    inputs = {
        name: value.to(host.device)
        for name, value in encode(tokenizer, messages).items()
        if name in ("input_ids", "attention_mask")
    }
    streamer = Ids()
    monitor.listen(
        lambda placed, decisions, record: view.show(
            lambda position: tokenizer.decode([streamer.ids[position]]), record, monitor.report
        )
    )
    monitor.on_alert(view.tell)
    with monitor:
        if sink is not None:
            monitor.add_sink(sink)
        out = host.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    return int(out.shape[1] - inputs["input_ids"].shape[1])
