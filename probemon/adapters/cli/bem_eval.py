"""The command bem eval.

probemon bem eval demo adapter/ other-answers.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from probemon.adapters.cli.bem_rows import BatchRows, Data, MostTokens, as_dict, check_sizes, pad_of, read, say_measured
from probemon.cli import options as opt
from probemon.cli.common import load_aloud, progress_bar, use_threads
from probemon.cli.terminal import answer

Adapter = Annotated[Path, typer.Argument(metavar="ADAPTER", help="An adapter's folder.")]


def evaluate(
    model: opt.Model,
    adapter: Adapter,
    data: Data,
    batch: BatchRows = 8,
    most_tokens: MostTokens = 512,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the losses of ADAPTER and of the bare MODEL on DATA, with an interval of their difference by document.

    Give rows that did not train the adapter.
    """
    from probemon.adapters.bem import attach_bem
    from probemon.adapters.bem.evaluation.held_out import measure
    from probemon.adapters.bem.lessons import make_batches
    from probemon.adapters.bem.saved import read_saved

    check_sizes(most_tokens, batch)
    use_threads(threads)
    read_saved(adapter)
    rows = read(data)
    loaded_model, tokenizer = load_aloud(model, device, dtype)
    lessons, documents = rows.lessons(tokenizer, most_tokens)
    batches = [
        {key: tensor.to(loaded_model.device) for key, tensor in one.items()}
        for one in make_batches(lessons, batch, pad_of(tokenizer))
    ]
    with attach_bem(loaded_model, adapter) as bem, progress_bar("eval", total=len(lessons), unit="row") as bar:
        measured = measure(bem, batches, documents, bar.update)
    if as_json:
        answer({"adapter": str(adapter), **as_dict(measured)})
    else:
        say_measured(measured)
