"""The command bem eval.

probemon bem eval demo adapter/ other-answers.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from probemon.adapters.cli.bem_measured import LORA, Measured, asked
from probemon.adapters.cli.bem_rows import BatchRows, Data, MostTokens, batches_of, check_sizes, read
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
    """Measure ADAPTER, the bare MODEL and the LoRA in ADAPTER's folder "lora" on DATA, with intervals by document.

    Give rows that did not train the adapter.
    """
    from probemon.adapters.bem import attach_bem
    from probemon.adapters.bem.evaluation.beside import n_of, saved_lora
    from probemon.adapters.bem.evaluation.held_out import by_document, measure, share_at_limits
    from probemon.adapters.bem.saved import read_saved

    check_sizes(most_tokens, batch)
    use_threads(threads)
    read_saved(adapter)
    rows = read(data)
    loaded_model, tokenizer = load_aloud(model, device, dtype)
    lessons, documents = rows.lessons(tokenizer, most_tokens)
    batches = batches_of(lessons, batch, loaded_model, tokenizer)
    with attach_bem(loaded_model, adapter) as bem, progress_bar("eval", total=len(lessons), unit="row") as bar:
        measured = Measured(measure(bem, batches, documents, bar.update), asked(lessons, tokenizer))
        measured.at_limits = {"eval": share_at_limits(bem, batches)}
        measured.answer("adapter", loaded_model, tokenizer)
    folder = adapter / LORA
    if folder.is_dir():
        with saved_lora(loaded_model, folder):
            measured.lora = by_document(loaded_model, batches, documents)
            measured.n_trainable_of_lora = n_of(folder)
            measured.answer("LoRA", loaded_model, tokenizer)
    else:
        measured.why_no_lora = f"{folder} is not there; `bem train` makes it"
    if as_json:
        answer({"adapter": str(adapter), **measured.as_dict()})
    else:
        measured.say()
