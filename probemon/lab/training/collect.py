"""The first half of training, for a trainer of your own: hidden states of texts, token by token, with their labels.

    collected = collect(model, tokenizer, "mails.jsonl", "states/", sites=["resid_post.15"])
    x = collected.states("resid_post.15")[rows]                # [n, D] of rows [n] int64, as the model made them
    collected.known[:, collected.concepts.index("spam")]        # [R] int8: 1 there, 0 absent, -1 unknown
    collected.group                                             # [R] int64: what must not be split

The folder holds `SITE.safetensors` with `states [R, D]`; `tokens.safetensors` with `document`, `position`, `token`,
`start`, `end`, `group` `[R]` and `known [R, P]`; `texts.jsonl`; and `states.json`, by which a killed collection is
gone on with. `start` and `end` are characters of the text, -1 where the tokenizer does not say.
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
from probemon.lab.training.examples import read_examples
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
_BATCH = 4096  # rows of a batch of parquet


@dataclass(frozen=True)
class Collected:
    """R tokens of texts in a folder: `document`, `position`, `token`, `start`, `end`, `group` `[R]`, `known [R, P]`.

    `left_out`: how many tokens more the budget had no room for. `windowed`: texts that took more than one window.
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
        """Return `[R, P]` int8 what is known of each token and all before it in its text: 1 from the first token on at
        which the concept was there, 0 where it was absent at each so far, -1 where that is unknown.

        The labels of probes of a recurrent state (`ssm_state.N`). Raises `TrainingError` where tokens before a row are
        in no row, or were read in a window before its own.
        """
        if self.windowed:
            raise TrainingError(
                f"text {min(self.windowed)} took more than one window, and states behind the first know nothing of what"
                " came before: collect with a longer window, or shorter texts"
            )
        so_far = np.empty_like(self.known)
        for document in np.unique(self.document):
            rows = np.flatnonzero(self.document == document)
            if (self.position[rows] != np.arange(len(rows))).any():
                raise TrainingError(
                    f"of text {document} only some tokens are in rows, so nobody knows what came before: collect all"
                    " (without a budget, and texts that are no chats)"
                )
            known = self.known[rows]
            was_unknown = np.logical_or.accumulate(known < 0, axis=0)
            was_there = np.logical_or.accumulate(known > 0, axis=0)
            so_far[rows] = np.where(was_there, 1, np.where(was_unknown, -1, 0))
        return so_far

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to one file: a column for each of the above, `label:CONCEPT`, and each site's states as lists.

        Raises `MissingExtra` without pyarrow.
        """
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
    data: Source | Sequence[str | os.PathLike[str]],
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
    """Write the hidden states of texts to the folder `out`, and what is known of each token.

    - `data`: see `probemon.lab.training.examples`; texts need no labels here
    - `roles`: whose turns of a chat are kept
    - `chat_date`: the day, as YYYY-MM-DD, that chats are rendered with where the model's template writes today's date
    - `budget`: bytes of states at most; then tokens are drawn, each as likely. None for all of them

    What lies in `out` of the same texts is not read again. Raises `TrainingError`, `ConfigError`, `NotSupportedHost`.
    """
    examples = read_examples(data, exclusive=exclusive, text_field=text_field, labelled=False)
    reader = TextReader(model, tokenizer, sites, reading)
    texts = render(examples.texts, tokenizer, roles=roles, chat_date=chat_date)
    tokens = reader.tokens(texts)
    kept = [np.flatnonzero(text.counts(own)) for text, own in zip(texts, tokens, strict=True)]
    n_wanted = sum(map(len, kept))
    if budget is not None:
        of_one = f"{reader.row_bytes} bytes ({reader.row_bytes / 1e9:g} GB)"
        budget = check_count("budget", budget, remedy=f"give {of_one}, what one token takes, or more")
        if budget < reader.row_bytes:
            raise ConfigError(
                f"the budget is {counted(budget, 'byte')} ({budget / 1e9:g} GB), and the states of one token take"
                f" {of_one}: give that or more, or no budget for all tokens"
            )
        kept = drawn_evenly(kept, row_bytes=reader.row_bytes, budget=budget, seed=seed)
    with held(out):
        store = collect_states(StatePlan(reader, texts, tokens, kept), out, progress=progress)
        place = {id: p for p, id in enumerate(examples.concepts)}
        known = np.full((len(store.document), len(place)), -1, dtype=np.int8)
        for i, (example, text, own) in enumerate(zip(examples.texts, texts, tokens, strict=True)):
            of_text = np.full((len(own), len(place)), -1, dtype=np.int8)
            for part in parts_of(example, text, own, place):
                of_text[part.tokens] = part.known
            known[store.first[i] : store.first[i] + len(kept[i])] = of_text[kept[i]]
        group = group_examples(examples.texts, texts)
        rows = {
            name: np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(own, name) for own in tokens)])
            for name in ("ids", "start", "end")
        }
        at = np.cumsum([0, *map(len, tokens)])[store.document] + store.position
        found = Collected(
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
            frozenset(i for i, own in enumerate(tokens) if len(cut(own, i, reader.plain.window)) > 1),
        )
        _remove_earlier(found)
        _write(found, [text.text for text in texts], [text.where for text in texts], group)
    return found


def _remove_earlier(found: Collected) -> None:
    """Remove the states of sites, and the table, that an earlier run left: they are of other rows."""
    (found.folder / TABLE).unlink(missing_ok=True)
    for path in found.folder.glob("*.safetensors"):
        if SITE.fullmatch(path.stem) and path.stem not in found.store.sites:
            path.unlink()


def _write(found: Collected, texts: list[str], where: list[str], group: Ints) -> None:
    names = ("document", "position", "token", "start", "end", "group", "known")
    save_tensors(found.folder / TOKENS, {name: torch.from_numpy(getattr(found, name)).contiguous() for name in names})
    lines = [
        json.dumps({"text": text, "where": place, "group": int(number)})
        for text, place, number in zip(texts, where, group, strict=True)
    ]
    write_text_atomically(found.folder / TEXTS, "".join(line + "\n" for line in lines))
    write_text_atomically(found.folder / "concepts.json", json.dumps(found.concepts) + "\n")
