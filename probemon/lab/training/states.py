"""Hidden states of a training: of the examples, and of ordinary text, which one model keeps for all trainings.

states = read_states(data, reader, folder, cache, budget=4 << 30, seed=0, progress=...)
for block in states.blocks(site, documents):      # rows of whole texts, in order, at most _BLOCK
    block.x, block.document, block.position
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints
from probemon.core.inputs import prepare_input
from probemon.core.probes import InputSpec
from probemon.errors import TrainingError
from probemon.lab.training.dataset import CARRIED, ELSEWHERE, ORDINARY, OWN, TEMPLATE, Dataset
from probemon.lab.training.state_store import StatePlan, StateStore, TextReader, collect_states, held

ELSEWHERE_FOLDER = "elsewhere"
_BLOCK = 1 << 14  # rows
_OWN_SHARE = 0.6  # of the budget, if it is short


@dataclass(frozen=True)
class Block:
    """Prepared states `x [n, D]` of whole texts; `document`, `position` `[n]`."""

    x: Tensor
    document: Ints
    position: Ints


@dataclass(frozen=True)
class States:
    """Rows of several stores. `kept [N]`: which texts have rows, all their labelled tokens."""

    stores: Sequence[tuple[StateStore, Ints]]  # with the text of each of the store's texts
    kept: np.ndarray
    dtype: torch.dtype

    def blocks(self, site: str, documents: np.ndarray, *, raw: bool = False) -> Iterator[Block]:
        """Yield the rows of texts `documents [N]` bool that are kept, prepared as probes read them, or `raw`.

        Raises `TrainingError` for states that are not finite.
        """
        for store, text_of in self.stores:
            states, document = store.states(site), text_of[store.document]
            rows = np.flatnonzero(documents[document])
            first = np.flatnonzero(np.diff(document[rows], prepend=-1))
            while len(rows):
                # Whole texts: the last begins before the block's end.
                later = first[first >= _BLOCK]
                end = int(later[0]) if len(later) else len(rows)
                chosen, rows, first = rows[:end], rows[end:], first[first >= end] - end
                x = states[torch.from_numpy(chosen)]
                x = x.float() if raw else prepare_input(x, spec_of(site), self.dtype).float()
                if not bool(x.isfinite().all()):
                    raise TrainingError(
                        f"{int((~x.isfinite()).any(1).sum())} of {len(x)} states at {site} are not finite in"
                        f" {str(self.dtype).removeprefix('torch.')}: choose other layers, or load the model in another"
                        " precision"
                    )
                yield Block(x, document[chosen], store.position[chosen])


def spec_of(site: str) -> InputSpec:
    """Return the input that probes of a site read."""
    return InputSpec(site, "rmsnorm")


def read_states(
    data: Dataset,
    reader: TextReader,
    folder: Path,
    cache: Path,
    *,
    dtype: torch.dtype,
    budget: int,
    seed: int,
    say: Callable[[str], None],
    progress: Callable[[int, int], object],
) -> States:
    """Read the states of all labelled tokens, as far as `budget` bytes allow.

    If they do not fit, texts in carriers are left out first, then whole texts, evenly. Those of ordinary text are kept
    in `cache`, where the next training of this model finds them.
    """
    kept = _within(data, reader.row_bytes, budget, seed)
    plans = []
    # Texts elsewhere apart: other ones may be tested on later.
    uses = {"ordinary text": (ORDINARY, TEMPLATE), "examples": (OWN, CARRIED), ELSEWHERE_FOLDER: (ELSEWHERE,)}
    for name, origins in uses.items():
        places = np.flatnonzero(kept & data.is_of(*origins))
        texts, tokens = [data.texts[i] for i in places.tolist()], [data.tokens[i] for i in places.tolist()]
        plan = StatePlan(reader, texts, tokens, [data.wanted[i] for i in places.tolist()])
        where = folder / name if name == ELSEWHERE_FOLDER else folder
        if origins[0] == ORDINARY:
            # One folder for a model and its layers: other texts replace it.
            model = [plan.key[name] for name in ("host", "adapters", "config", "dtype", "sites")]
            where = cache / sha256(json.dumps(model).encode()).hexdigest()[:16]
        if len(places):
            plans.append((name, plan, where, places))
    total = sum(len(tokens) for _, plan, _, _ in plans for tokens in plan.tokens)
    n_rows, done = sum(plan.n_rows for _, plan, _, _ in plans), 0
    say(
        f"{sum(len(plan.texts) for _, plan, _, _ in plans)} texts of {total} tokens; states of {n_rows} tokens at"
        f" {len(reader.sites)} layers ({n_rows * reader.row_bytes / 1e9:.2f} GB)"
    )

    def ran(n: int) -> None:
        nonlocal done
        done += n
        progress(done, total)

    stores = []
    for name, plan, where, places in plans:
        told = partial(_told, say, name)
        waiting = partial(told, f"another training reads into {where}: waiting for it")
        with held(where, waiting=waiting) if where != folder else nullcontext():
            stores.append((collect_states(plan, where, progress=ran, say=told), places))
    return States(stores, kept, dtype)


def _told(say: Callable[[str], None], name: str, line: str) -> None:
    say(f"{name}: {line}")


def _within(data: Dataset, row_bytes: int, budget: int, seed: int) -> np.ndarray:
    """Return which texts are kept `[N]`."""
    lengths = np.asarray([len(positions) for positions in data.wanted])
    most = budget / row_bytes
    kept = lengths > 0
    if lengths[kept].sum() > most:
        kept &= ~data.is_of(CARRIED)
    generator = np.random.default_rng([seed, 5])
    ordinary = data.is_of(ORDINARY, TEMPLATE)
    for use, share in ((ordinary, 1 - _OWN_SHARE), (~ordinary, _OWN_SHARE)):
        other = lengths[kept & ~use].sum()
        room = max(most * share, most - other)
        if lengths[kept & use].sum() > room:
            drawn = generator.permutation(np.flatnonzero(kept & use))
            kept[drawn[np.cumsum(lengths[drawn]) > room]] = False
    return kept
