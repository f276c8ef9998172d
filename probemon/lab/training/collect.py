"""Writes hidden states of texts with labels, token by token, for your own trainer.

    collected = collect(model, tokenizer, "mails.jsonl", "states/", sites=["resid_post.15"])
    x = collected.states("resid_post.15")[rows]                # [n, D] of rows [n] int64
    collected.known[:, collected.concepts.index("spam")]        # [R] int8: 1 present, 0 absent, -1 unknown

Files: `SITE.safetensors` (`states [R, D]`), `tokens.safetensors`, `texts.jsonl`, and `states.json` for resuming.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probemon.core.hierarchy import Ints
from probemon.core.probes import SITE
from probemon.errors import ConfigError, TrainingError
from probemon.host.chat_dates import CHAT_DATE
from probemon.lab.corpora.windows import Reading, cut
from probemon.lab.training.example_files import Source
from probemon.lab.training.examples import Examples, read_examples
from probemon.lab.training.groups import group_examples
from probemon.lab.training.labels import Known, parts_of
from probemon.lab.training.state_store import (
    SiteStates,
    StatePlan,
    StateStore,
    TextReader,
    collect_states,
    drawn_evenly,
    held,
)
from probemon.lab.training.texts import render
from probemon.util.checks import check_count
from probemon.util.counted import counted
from probemon.util.extras import import_arrow
from probemon.util.files import save_tensors, write_text_atomically

TOKENS, TEXTS, TABLE = "tokens.safetensors", "texts.jsonl", "states.parquet"
_BATCH = 4096  # rows of a parquet batch


@dataclass(frozen=True)
class Collected:
    """R tokens of texts: `document`, `position`, `token`, `start`, `end`, `group` `[R]`, `known [R, P]`.

    - `left_out`: tokens over the budget
    - `windowed`: texts of more than one window
    """

    folder: Path
    concepts: list[str]
    document: Ints
    position: Ints
    token: Ints
    start: Ints
    end: Ints
    group: Ints
    known: Known
    store: StateStore
    left_out: int = 0
    windowed: frozenset[int] = frozenset()

    def states(self, site: str) -> SiteStates:
        """Return the states of a site."""
        return self.store.states(site)

    def known_so_far(self) -> Known:
        """Return labels up to each token `[R, P]` int8: 1 present, 0 absent so far, -1 unknown.

        For probes of `ssm_state.N`. Raises `TrainingError` if earlier tokens are missing or in another window.
        """
        if self.windowed:
            raise TrainingError(
                f"text {min(self.windowed)} took more than one window, and states after the first lack the tokens"
                " before: collect with a longer window, or shorter texts"
            )
        so_far = np.empty_like(self.known)
        for document in np.unique(self.document):
            rows = np.flatnonzero(self.document == document)
            if (self.position[rows] != np.arange(len(rows))).any():
                raise TrainingError(
                    f"text {document}: only some tokens are in rows, so the tokens before are unknown: collect all"
                    " (no budget, and no chats)"
                )
            known = self.known[rows]
            was_unknown = np.logical_or.accumulate(known < 0, axis=0)
            was_there = np.logical_or.accumulate(known > 0, axis=0)
            so_far[rows] = np.where(was_there, 1, np.where(was_unknown, -1, 0))
        return so_far

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to one file, with `label:CONCEPT` columns and states as lists. Raises `MissingExtra`."""
        arrow = import_arrow("collecting states as parquet")
        target = Path(path)
        partial = target.with_name(f".{target.name}")
        try:
            first = self._table(arrow, 0)
            with arrow.parquet.ParquetWriter(partial, first.schema) as writer:
                writer.write_table(first)
                for begin in range(_BATCH, len(self.document), _BATCH):
                    writer.write_table(self._table(arrow, begin))
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def _table(self, arrow: Any, begin: int) -> Any:
        rows = slice(begin, begin + _BATCH)
        names = ("document", "position", "token", "start", "end", "group")
        columns = {name: getattr(self, name)[rows] for name in names}
        columns |= {f"label:{id}": self.known[rows, p] for p, id in enumerate(self.concepts)}
        numbers = torch.arange(begin, min(begin + _BATCH, len(self.document)))
        for site in self.store.sites:
            states = self.states(site)[numbers].float().numpy()
            flat = arrow.array(states.reshape(-1), type=arrow.float32())
            columns[site] = arrow.FixedSizeListArray.from_arrays(flat, states.shape[1])
        return arrow.table(columns)


def collect(
    model: Any,
    tokenizer: Any,
    data: Source | Sequence[str | os.PathLike[str]] | Examples,
    out: str | os.PathLike[str],
    *,
    sites: Sequence[str],
    roles: Sequence[str] = ("assistant",),
    exclusive: bool = False,
    text_field: str = "text",
    budget: int | None = None,
    seed: int = 0,
    chat_date: str = CHAT_DATE,
    reading: Reading | None = None,
    progress: Callable[[int], object] | None = None,
) -> Collected:
    """Write the hidden states of texts to the folder `out`, with labels.

    - `data`: see `probemon.lab.training.examples`; labels are optional
    - `roles`: turns of a chat to keep, or "reasoning"
    - `chat_date`: YYYY-MM-DD, for templates that write today's date
    - `budget`: most bytes of states, of tokens drawn evenly. None for all

    States in `out` of the same texts are reused. Raises `TrainingError`, `ConfigError`, `UnsupportedModel`.
    """
    if isinstance(data, Examples):
        examples = data
    else:
        examples = read_examples(data, exclusive=exclusive, text_field=text_field, labelled=False)
    reader = TextReader(model, tokenizer, sites, reading)
    texts = render(examples.texts, tokenizer, roles=roles, chat_date=chat_date)
    tokens = reader.tokens(texts)
    positions = [np.flatnonzero(text.counts(encoded)) for text, encoded in zip(texts, tokens, strict=True)]
    n_wanted = sum(map(len, positions))
    if budget is not None:
        size = f"{reader.row_bytes} bytes ({reader.row_bytes / 1e9:g} GB)"
        budget = check_count("budget", budget, remedy=f"give {size}, for one token, or more")
        if budget < reader.row_bytes:
            raise ConfigError(
                f"the budget is {counted(budget, 'byte')} ({budget / 1e9:g} GB), and the states of one token take"
                f" {size}: give that or more, or no budget for all tokens"
            )
        positions = drawn_evenly(positions, row_bytes=reader.row_bytes, budget=budget, seed=seed)
    with held(out):
        store = collect_states(StatePlan(reader, texts, tokens, positions), out, progress=progress)
        place = {id: p for p, id in enumerate(examples.concepts)}
        known = np.full((len(store.document), len(place)), -1, dtype=np.int8)
        for i, (example, text, encoded) in enumerate(zip(examples.texts, texts, tokens, strict=True)):
            labels = np.full((len(encoded), len(place)), -1, dtype=np.int8)
            for part in parts_of(example, text, encoded, place):
                labels[part.tokens] = part.known
            known[store.first[i] : store.first[i] + len(positions[i])] = labels[positions[i]]
        group = group_examples(examples.texts, texts, examples.known()).number
        rows = {
            name: np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(encoded, name) for encoded in tokens)])
            for name in ("ids", "start", "end")
        }
        at = np.cumsum([0, *map(len, tokens)])[store.document] + store.position
        collected = Collected(
            Path(out),
            list(place),
            store.document,
            store.position,
            rows["ids"][at],
            rows["start"][at],
            rows["end"][at],
            group[store.document],
            known,
            store,
            n_wanted - len(store.document),
            frozenset(i for i, encoded in enumerate(tokens) if len(cut(encoded, i, reader.plain.window)) > 1),
        )
        _remove_earlier(collected)
        _write(collected, [text.text for text in texts], [text.where for text in texts], group)
    return collected


def _remove_earlier(collected: Collected) -> None:
    (collected.folder / TABLE).unlink(missing_ok=True)
    for path in collected.folder.glob("*.safetensors"):
        if SITE.fullmatch(path.stem) and path.stem not in collected.store.sites:
            path.unlink()


def _write(collected: Collected, texts: list[str], where: list[str], group: Ints) -> None:
    names = ("document", "position", "token", "start", "end", "group", "known")
    save_tensors(
        collected.folder / TOKENS, {name: torch.from_numpy(getattr(collected, name)).contiguous() for name in names}
    )
    lines = [
        json.dumps({"text": text, "where": place, "group": int(number)})
        for text, place, number in zip(texts, where, group, strict=True)
    ]
    write_text_atomically(collected.folder / TEXTS, "".join(line + "\n" for line in lines))
    write_text_atomically(collected.folder / "concepts.json", json.dumps(collected.concepts) + "\n")
