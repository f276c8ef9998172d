"""The command bem distil.

probemon bem distil demo adapter/ answers.jsonl --out lora/
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from probemon.adapters.cli.bem_eval import Adapter
from probemon.adapters.cli.bem_rows import BatchRows, Data, MostTokens, batches_of, check_sizes, read
from probemon.cli import options as opt
from probemon.cli.common import load_aloud, use_threads
from probemon.cli.terminal import answer, say
from probemon.errors import ConfigError
from probemon.util.checks import check_number


def distil(
    model: opt.Model,
    adapter: Adapter,
    data: Data,
    out: Annotated[Path, typer.Option(help="The LoRA's folder, in PEFT's format, that is not there yet.")],
    steps: Annotated[
        int, typer.Option(help="Steps of training towards the adapter's outputs; 0: the LoRA that is nearest.")
    ] = 0,
    rank: Annotated[
        int, typer.Option(help="The LoRA's rank; 0 for the adapter's, or the least that is exact for another form.")
    ] = 0,
    labels: Annotated[float, typer.Option(help="With --steps: how much DATA's own labels count, 0 to 1.")] = 0.0,
    lr: Annotated[float, typer.Option(help="With --steps: the highest learning rate.")] = 1e-2,
    batch: BatchRows = 8,
    most_tokens: MostTokens = 512,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Make one static LoRA of ADAPTER, for servers that cannot route. DATA is typical input.

    The loss is reported; an adapter that routes much loses much.
    """
    from probemon.adapters.bem import attach_bem
    from probemon.adapters.bem.distil import distil as nearest_lora
    from probemon.adapters.bem.distil import distil_trained
    from probemon.adapters.bem.saved import read_saved
    from probemon.adapters.bem.training import TrainSettings
    from probemon.adapters.bem.twins import check_has_twin

    check_sizes(most_tokens, batch)
    if steps < 0 or rank < 0:
        raise ConfigError(f"--steps is {steps}, --rank {rank}: give 0 or more")
    if not steps and labels:
        raise ConfigError("--labels is for a trained LoRA: give --steps too")
    check_number("--labels", labels, low=0, high=1, remedy="give 0 to 1")
    settings = TrainSettings(n_steps=max(1, steps), lr=lr, n_warmup=min(10, steps // 10))
    if os.path.lexists(out):
        raise ConfigError(f"--out is {out}, which exists: give another name, or remove it first")
    use_threads(threads)
    check_has_twin(read_saved(adapter).config)
    rows = read(data)
    loaded_model, tokenizer = load_aloud(model, device, dtype)
    lessons, _ = rows.lessons(tokenizer, most_tokens)
    batches = batches_of(lessons, batch, loaded_model, tokenizer)
    with attach_bem(loaded_model, adapter) as bem:
        nearest = nearest_lora(bem, batches, rank=rank or None, ridge=None)
        lora, losses = nearest, list[float]()
        if steps:
            lora, history = distil_trained(bem, batches, settings, rank=rank or None, labels=labels)
            losses = history.losses
    lora.save(out)
    result = {
        "lora": str(out),
        "method": lora.method,
        "rank": lora.rank,
        "modules": len(lora.factors),
        "fitted_loses": nearest.error,
        "start": lora.start,
        "trained_loss": losses[-1] if losses else None,
    }
    if as_json:
        answer(result)
        return
    say(f"{out}: a LoRA of rank {lora.rank} for {len(lora.factors)} layers, {lora.method}")
    say(f"the LoRA fitted to the updates loses {100 * (nearest.error or 0.0):.1f} % of their square on this data")
    if losses:
        say(f"trained for {steps} steps from the {lora.start} start: loss {losses[0]:.4f}, at the end {losses[-1]:.4f}")
