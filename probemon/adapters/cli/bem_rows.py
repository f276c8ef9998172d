"""Input of the bem commands: rows of texts, answers and chats.

rows = read(["sums.jsonl"])                                # checked, before a model is loaded
lessons, documents = rows.lessons(tokenizer, most_tokens=512)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli.terminal import say
from probemon.errors import ConfigError
from probemon.util.checks import check_count

if TYPE_CHECKING:
    from probemon.adapters.bem.lessons import Lesson
    from probemon.adapters.bem.losses import Batch

Data = Annotated[
    list[str],
    typer.Argument(
        metavar="DATA",
        help=(
            "Rows: .jsonl, .csv, .tsv or .parquet, each with 'prompt' and 'answer', or 'text', or 'messages'; rows of"
            " one 'group' are one document."
        ),
    ),
]
MostTokens = Annotated[int, typer.Option(help="Tokens at which a row is cut.")]
BatchRows = Annotated[int, typer.Option("--batch", help="Rows of a batch.")]


@dataclass(frozen=True)
class Rows:
    """Rows with their places in files, and the number of each row's document."""

    rows: Sequence[tuple[str, Mapping[str, Any]]]
    documents: Sequence[int]

    def lessons(self, tokenizer: Any, most_tokens: int) -> tuple[list[Lesson], list[int]]:
        """Return rows as tokens, and their documents. Reports rows left out on stderr. Raises `ConfigError` if none is
        left.
        """
        from probemon.adapters.bem.lessons import make_lesson

        lessons, documents, reasons = list[Any](), list[int](), list[str]()
        for (where, row), document in zip(self.rows, self.documents, strict=True):
            try:
                lessons.append(make_lesson(row, where, tokenizer, most_tokens))
                documents.append(document)
            except ConfigError as error:
                reasons.append(str(error))
        if not lessons:
            raise ConfigError(f"no row can be used: {reasons[0]}")
        if reasons:
            say(f"{len(reasons)} rows are left out, the first: {reasons[0]}", error=True)
        return lessons, documents


def read(files: Sequence[str]) -> Rows:
    """Read and check rows. Raises `TrainingError`, `ConfigError`."""
    from probemon.adapters.bem.lessons import check_row, content_of
    from probemon.lab.training.example_files import read_rows
    from probemon.lab.training.examples import group_of
    from probemon.lab.training.groups import group_texts

    rows, groups = list[Any](), list[str | None]()
    for where, row in read_rows(files):
        check_row(row, where)
        rows.append((where, row))
        groups.append(group_of(row.get("group")))
    if not rows:
        raise ConfigError("there is no row: give texts, answers to prompts, or chats")
    return Rows(rows, group_texts([content_of(row) for _, row in rows], groups).tolist())


def check_sizes(most_tokens: int, batch: int) -> None:
    """Raise `ConfigError` for too small a row or batch."""
    check_count("--most-tokens", most_tokens, least=2, remedy="give 2 or more")
    check_count("--batch", batch, least=1, remedy="give 1 or more")


def batches_of(lessons: Sequence[Lesson], n_rows: int, model: Any, tokenizer: Any) -> list[Batch]:
    """Return padded batches of `n_rows` rows, on the model's device."""
    from probemon.adapters.bem.lessons import make_batches

    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(int(id) for id in ids if id is not None)
    batches = make_batches(lessons, n_rows, pad)
    return [{name: tensor.to(model.device) for name, tensor in batch.items()} for batch in batches]
