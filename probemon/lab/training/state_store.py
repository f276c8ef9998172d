"""Hidden states of chosen tokens on disk: written once, gone on with after a kill, read as memory.

    plan = StatePlan.of(readers, texts, budget=4 << 30, seed=0)    # which tokens of which texts, within a budget
    store = collect_states(plan, "states/", progress=bar.update)   # nothing to do where they lie there already
    store.states("resid_post.15")[rows]                            # [n, D] of rows [n], as the host made them
    store.document, store.position                                 # [R] int64: of which text and which of its tokens

A folder holds one safetensors file a site, and `states.json`, which is replaced after every shard of texts and
says how many rows are whole. What makes states what they are is hashed into
their key: weights, adapters, precision, tokens, sites, windows, versions. States of another key are replaced. What
no key can say, a hook that steers, shows in a few texts that are read again before states are taken. Whoever reads or
writes a folder holds it, `with held(folder)`: two runs of unlike texts would write into each other's states.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from probemon.core.dtypes import code_of, of_dtype
from probemon.core.hierarchy import Ints
from probemon.core.probes import check_sites_once, is_recurrent
from probemon.engine.audit import sample
from probemon.errors import TrainingError
from probemon.host.fingerprint import adapters_fingerprint, config_fingerprint, weights_fingerprint
from probemon.lab.corpora.documents import Document
from probemon.lab.corpora.state_reader import StateReader, give_back
from probemon.lab.corpora.windows import DocumentShard, Reading, WindowTokens, shards
from probemon.lab.training.texts import Text
from probemon.util.files import write_text_atomically

STATE, BUDGET = "states.json", 4 << 30
_FORMAT = 4
# Of texts that lie there so many are read again. Their states may differ by a share of their length, by rounding: of
# any token by the first number, and on average, since rounding goes all ways and steering one, by the second.
_READ_AGAIN = 8
_ROUNDING = {
    torch.float32: (1e-3, 1e-4),
    torch.float64: (1e-3, 1e-4),
    torch.float16: (0.02, 1e-3),
    torch.bfloat16: (0.1, 3e-3),
}


@dataclass(frozen=True)
class SiteKind:
    """What a state of a site is: `width` values of a dtype. Those of recurrent layers are fp32 in every host."""

    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


class TextReader:
    """Tokens and states of texts: those of chats, whose template has its special tokens in the text, are read as such.

    reader = TextReader(model, tokenizer, ["resid_post.15"])
    """

    def __init__(self, model: Any, tokenizer: Any, sites: Sequence[str], reading: Reading | None = None) -> None:
        check_sites_once(sites)
        reading = reading or Reading()
        self.plain = StateReader(model, tokenizer, sites, reading)
        self.chats = StateReader(model, tokenizer, sites, replace(reading, special_tokens="none", parse_special=True))
        self.sites = tuple(sites)

    @property
    def host(self) -> Any:
        """The host itself, without wrappers."""
        return self.plain.host

    @property
    def kinds_of(self) -> dict[str, SiteKind]:
        """How many values a state has at each site, and in which dtype."""
        return {
            site: SiteKind(width, torch.float32 if is_recurrent(site) else self.host.dtype)
            for site, width in self.plain.widths.items()
        }

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of a token at all sites."""
        return sum(kind.row_bytes for kind in self.kinds_of.values())

    def kinds(self, texts: Sequence[Text]) -> list[tuple[StateReader, list[int]]]:
        """Return a reader, and the texts `[n]` that are for it, by place: plain ones first."""
        chosen: list[tuple[StateReader, list[int]]] = [
            (self.plain, [i for i, text in enumerate(texts) if not text.is_chat]),
            (self.chats, [i for i, text in enumerate(texts) if text.is_chat]),
        ]
        return [(reader, places) for reader, places in chosen if places]

    def tokens(self, texts: Sequence[Text]) -> list[WindowTokens]:
        """Return the tokens of each text. Raises `TrainingError` for one that has none."""
        found: dict[int, WindowTokens] = {}
        for reader, places in self.kinds(texts):
            for shard in _shards(texts, places):
                planned = reader.plan(shard)
                for document, tokens in zip(planned.documents, planned.tokens, strict=True):
                    if tokens is None:
                        raise TrainingError(f"{texts[places[document.index]].where}: {document.reason}")
                    found[places[document.index]] = tokens
        return [found[i] for i in range(len(texts))]


@dataclass(frozen=True)
class StatePlan:
    """Which states are kept: those of tokens `kept` (positions, in order) of each text."""

    reader: TextReader
    texts: Sequence[Text]
    tokens: Sequence[WindowTokens]
    kept: Sequence[Ints]

    @property
    def n_rows(self) -> int:
        return sum(map(len, self.kept))

    def kinds(self) -> list[tuple[StateReader, list[int]]]:
        """Return a reader, and the texts that it reads, by place: those of which tokens are kept."""
        read = [(reader, [i for i in places if len(self.kept[i])]) for reader, places in self.reader.kinds(self.texts)]
        return [(reader, places) for reader, places in read if places]

    @property
    def key(self) -> dict[str, Any]:
        """What the states depend on, as JSON."""
        host, digest = self.reader.host, hashlib.sha256()
        for text, tokens, kept in zip(self.texts, self.tokens, self.kept, strict=True):
            for part in (np.asarray([text.is_chat, len(tokens), len(kept)]), tokens.ids, kept, *_around(tokens)):
                digest.update(np.asarray(part, dtype=np.int64).tobytes())
        window = self.reader.plain.window
        return {
            "format": _FORMAT,
            "host": weights_fingerprint(host),
            "adapters": adapters_fingerprint(self.reader.plain.model, host),
            "config": config_fingerprint(host),
            "dtype": str(host.dtype).removeprefix("torch."),
            "device": host.device.type,
            "widths": [kind.width for kind in self.reader.kinds_of.values()],
            "sites": list(self.reader.sites),
            "window": [window.n_tokens, window.overlap],
            "rows": self.n_rows,
            "tokens_sha256": digest.hexdigest(),
            "torch": torch.__version__,
        }


def _around(tokens: WindowTokens) -> tuple[Ints, Ints]:
    return np.asarray(tokens.prefix, dtype=np.int64), np.asarray(tokens.suffix, dtype=np.int64)


def within_budget(
    wanted: Sequence[Ints], whole: Sequence[bool], *, row_bytes: int, budget: int, seed: int
) -> list[Ints]:
    """Return which of the `wanted` positions of each text are kept, in at most about `budget` bytes.

    Texts that are `whole` keep all their tokens, or none: a running score over some of them is not that of the text.
    Where not all have room, whole texts take at most three quarters of it, in an order drawn by the seed; of the others
    tokens are drawn, each as likely, by the seed and by their place alone; a text of which none was keeps its last.
    """
    lengths, is_whole = np.asarray(list(map(len, wanted)), dtype=np.int64), np.asarray(whole, dtype=bool)
    room = budget / row_bytes
    taken = is_whole.copy()
    if lengths.sum() > room:
        drawn = np.random.default_rng(seed).permutation(np.flatnonzero(is_whole))
        taken[drawn[np.cumsum(lengths[drawn]) > 0.75 * room]] = False
    n_others = int(lengths[~is_whole].sum())
    share = min(1.0, max(0.0, room - int(lengths[taken].sum())) / n_others) if n_others else 1.0
    kept = []
    for i, positions in enumerate(wanted):
        if is_whole[i]:
            positions = positions if taken[i] else positions[:0]
        elif share < 1 and len(positions):
            chosen = sample(share, seed, i, positions)
            # It would be left out else.
            positions = positions[-1:] if chosen is None else positions[chosen]
        kept.append(positions)
    return kept


def drawn_evenly(wanted: Sequence[Ints], *, row_bytes: int, budget: int, seed: int) -> list[Ints]:
    """Return which of the `wanted` positions of each text are kept: as many as `budget` bytes hold, each as likely."""
    ends = np.cumsum([0, *map(len, wanted)])
    chosen = np.zeros(ends[-1], dtype=bool)
    chosen[np.random.default_rng(seed).permutation(len(chosen))[: budget // row_bytes]] = True
    return [positions[chosen[first:end]] for positions, first, end in zip(wanted, ends[:-1], ends[1:], strict=True)]


@dataclass(frozen=True)
class StateStore:
    """States in a folder: `document`, `position` `[R]` of each row; `first [N]`, the first row of each text. `kinds`:
    of each site, what its states are.
    """

    folder: Path
    kinds: Mapping[str, SiteKind]
    document: Ints
    position: Ints
    first: Ints

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites, in order."""
        return tuple(self.kinds)

    def states(self, site: str) -> SiteStates:
        """Return the states of a site."""
        kind, n_rows = self.kinds[site], len(self.document)
        header = _header(site, n_rows, kind)
        return SiteStates(self.folder / _file(site), len(header), (n_rows, kind.width), kind.dtype)


@dataclass(frozen=True)
class SiteStates:
    """The states of a site, `shape` [R, D], from `begin` on in a file. Rows are read as they are asked for."""

    path: Path
    begin: int
    shape: tuple[int, int]
    dtype: torch.dtype

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return rows `[n, D]` by their numbers, as a copy."""
        if not len(rows):
            return torch.zeros(0, self.shape[1], dtype=self.dtype)
        # Mapped anew each time: pages that were read count as this process's memory as long as they are mapped.
        row_bytes = self.shape[1] * self.dtype.itemsize
        mapped = np.memmap(self.path, mode="r", offset=self.begin, shape=(self.shape[0], row_bytes))
        return torch.from_numpy(mapped[rows.numpy()]).view(self.dtype)


@contextmanager
def held(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a folder of states, which is made if it is not there, until the end of the block or of the process.

    Raises `TrainingError` where another run holds it, or it cannot be held.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TrainingError(f"{folder} cannot hold states ({error.strerror}): choose another folder") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the folder itself: nothing is left beside the states
        yield
    except BlockingIOError:
        raise TrainingError(
            f"another run works with the states in {folder}: wait for it, or choose another folder for them"
        ) from None
    finally:
        os.close(descriptor)


def collect_states(
    plan: StatePlan, folder: str | os.PathLike[str], *, progress: Callable[[int], object] | None = None
) -> StateStore:
    """Read the states of a plan into a folder; what lies there already of the same plan is not read again.

    `progress` is called with the number of tokens that ran. Raises `TrainingError` where the folder holds other files.
    """
    folder = Path(folder)
    kinds, key = plan.reader.kinds_of, plan.key
    order = [i for _, places in plan.kinds() for i in places]
    document = np.repeat(np.asarray(order, dtype=np.int64), [len(plan.kept[i]) for i in order])
    position = np.concatenate([np.zeros(0, dtype=np.int64), *(plan.kept[i] for i in order)])
    lengths = [len(plan.kept[i]) for i in order]
    first = np.zeros(len(plan.texts), dtype=np.int64)
    first[order] = np.cumsum(lengths) - lengths
    store = StateStore(folder, kinds, document, position, first)
    rows, done = _begun(folder, key, kinds)
    if done and not _are_still_so(plan, store, order[:done], rows):
        rows, done = 0, 0
    if done == len(order):
        if progress is not None:
            progress(sum(len(plan.tokens[i]) for i in order))
        return store
    with _Files(folder, kinds, len(document), rows) as files:
        write_text_atomically(folder / STATE, _stated(key, rows, done))
        skipped = done
        for reader, places in plan.kinds():
            if skipped >= len(places):
                skipped -= len(places)
                continue
            for shard in _shards(plan.texts, places[skipped:]):
                for read, tokens, states in reader.states([shard]):
                    kept = torch.from_numpy(plan.kept[places[skipped + read.index]])
                    for site, hidden in states.items():
                        files.append(site, hidden[kept.to(hidden.device)])
                    rows += len(kept)
                    done += 1
                    if progress is not None:
                        progress(len(tokens))
                files.flush()
                give_back()
                write_text_atomically(folder / STATE, _stated(key, rows, done))
            skipped = 0
    return store


def _are_still_so(plan: StatePlan, store: StateStore, done: Sequence[int], n_rows: int) -> bool:
    """Whether the host still makes the `n_rows` states that lie there, of a few of the texts `done`, short ones."""
    some = sorted((i for i in done if len(plan.kept[i])), key=lambda i: (len(plan.tokens[i]), i))[:_READ_AGAIN]
    moved: dict[str, list[Tensor]] = {site: [] for site in store.sites}
    for reader, places in plan.reader.kinds([plan.texts[i] for i in some]):
        for read, _, states in reader.states(_shards(plan.texts, [some[place] for place in places])):
            i = some[places[read.index]]
            rows = torch.arange(len(plan.kept[i])) + int(store.first[i])
            for site, hidden in states.items():
                there = replace(store.states(site), shape=(n_rows, store.kinds[site].width))
                before, now = there[rows].double(), hidden.cpu()[torch.from_numpy(plan.kept[i])].double()
                moved[site].append((now - before) / before.norm(dim=1, keepdim=True).clamp(min=1e-12))
    # Of recurrent layers, too: what they read is the host's.
    of_token, of_all = of_dtype(_ROUNDING, plan.reader.host.dtype, "rounding of states")
    return all(
        bool((parts := torch.cat(of_site)).norm(dim=1).le(of_token).all() and parts.mean(dim=0).norm() <= of_all)
        for of_site in moved.values()
    )


def _shards(texts: Sequence[Text], places: Sequence[int]) -> Iterator[DocumentShard]:
    return shards(Document(i, texts[place].where, texts[place].text) for i, place in enumerate(places))


def _begun(folder: Path, key: Mapping[str, Any], kinds: Mapping[str, SiteKind]) -> tuple[int, int]:
    """Return how many rows and texts of a key lie in a folder. Raises `TrainingError` for a folder of other things."""
    state = folder / STATE
    if folder.exists() and not state.is_file() and any(folder.iterdir()):
        raise TrainingError(f"{folder} holds other files than states: choose another folder for them")
    try:
        stated = json.loads(state.read_text(encoding="utf-8"))
        whole = all(
            (folder / _file(site)).stat().st_size >= stated["rows"] * kind.row_bytes for site, kind in kinds.items()
        )
        if stated["key"] == key and whole:
            return int(stated["rows"]), int(stated["texts"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0, 0


def _stated(key: Mapping[str, Any], rows: int, texts: int) -> str:
    return json.dumps({"key": key, "rows": rows, "texts": texts}, indent=1) + "\n"


def _file(site: str) -> str:
    return f"{site}.safetensors"


def _header(site: str, rows: int, kind: SiteKind) -> bytes:
    """The beginning of a safetensors file with the one tensor `states`."""
    shape = {"dtype": code_of(kind.dtype), "shape": [rows, kind.width], "data_offsets": [0, rows * kind.row_bytes]}
    text = json.dumps({"__metadata__": {"site": site}, "states": shape}).encode()
    text += b" " * (-len(text) % 64)
    return struct.pack("<Q", len(text)) + text


class _Files:
    """The files of a folder, one a site, written from row `rows` on."""

    def __init__(self, folder: Path, kinds: Mapping[str, SiteKind], n_rows: int, rows: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._open: dict[str, BinaryIO] = {}
        for site, kind in kinds.items():
            stream = (folder / _file(site)).open("r+b" if (folder / _file(site)).exists() else "w+b")
            header = _header(site, n_rows, kind)
            stream.write(header)
            # What was written after the last shard that is whole is written again.
            stream.truncate(len(header) + rows * kind.row_bytes)
            stream.seek(0, os.SEEK_END)
            self._open[site] = stream

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            stream.close()

    def append(self, site: str, states: Tensor) -> None:
        self._open[site].write(states.contiguous().cpu().view(torch.uint8).numpy().tobytes())

    def flush(self) -> None:
        for stream in self._open.values():
            stream.flush()
            os.fsync(stream.fileno())
