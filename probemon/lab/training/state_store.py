"""Hidden states of chosen tokens on disk: resumable, and read by row.

    store = collect_states(StatePlan(reader, texts, tokens, kept), "states/")
    store.states("resid_post.15")[rows]                            # [n, D] of rows [n], in the model's dtype

A folder has one safetensors file for each site, and `states.json` with a key: a hash of weights, adapters, precision,
tokens, sites, windows, versions. States with another key are replaced. A few texts are read again first, because the
key misses steering hooks. Use a folder only `with held(folder)`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from probemon.core.dtypes import code_of, of_dtype
from probemon.core.hierarchy import Ints
from probemon.core.probes import as_site, check_sites_once, is_recurrent
from probemon.errors import TrainingError
from probemon.host.fingerprint import adapters_fingerprint, config_fingerprint, weights_fingerprint
from probemon.lab.corpora.documents import Document
from probemon.lab.corpora.state_reader import StateReader, give_back
from probemon.lab.corpora.windows import DocumentShard, Reading, WindowTokens, shards
from probemon.lab.training.texts import Text
from probemon.util.files import write_text_atomically

STATE, BUDGET = "states.json", 4 << 30
# Parts of a key, as people call them.
_NAMES = {
    "host": "model",
    "tokens_sha256": "text or tokens of it",
    "rows": "number of tokens",
    "sites": "choice of layers",
    "torch": "version of torch",
}
_FORMAT = 4
# Texts read again; largest median of the tokens' relative differences, and that of the mean, which steering shifts.
_READ_AGAIN = 8
_PATIENCE = 3 * 3600.0  # seconds to wait for another run
_LEAST_RUN = 16  # rows, on average, that are read at once
_ROUNDING = {
    torch.float32: (1e-3, 1e-4),
    torch.float64: (1e-3, 1e-4),
    torch.float16: (0.01, 1e-3),
    torch.bfloat16: (0.05, 5e-3),
}


@dataclass(frozen=True)
class SiteKind:
    """`width` and dtype of a site's states; fp32 for recurrent layers."""

    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


class TextReader:
    """Tokens and states of texts; special tokens in chats are parsed."""

    def __init__(self, model: Any, tokenizer: Any, sites: Sequence[str], reading: Reading | None = None) -> None:
        sites = [as_site(site) for site in sites]
        check_sites_once(sites)
        reading = reading or Reading()
        self.plain = StateReader(model, tokenizer, sites, reading)
        self.chats = StateReader(model, tokenizer, sites, replace(reading, special_tokens="none", parse_special=True))
        self.sites = tuple(sites)

    @property
    def host(self) -> Any:
        """The unwrapped model."""
        return self.plain.host

    @property
    def kinds_of(self) -> dict[str, SiteKind]:
        """Width and dtype by site."""
        return {
            site: SiteKind(width, torch.float32 if is_recurrent(site) else self.host.dtype)
            for site, width in self.plain.widths.items()
        }

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's states at all sites."""
        return sum(kind.row_bytes for kind in self.kinds_of.values())

    def kinds(self, texts: Sequence[Text]) -> list[tuple[StateReader, list[int]]]:
        """Return readers with the indices of their texts, plain ones first."""
        chosen: list[tuple[StateReader, list[int]]] = [
            (self.plain, [i for i, text in enumerate(texts) if not text.is_chat]),
            (self.chats, [i for i, text in enumerate(texts) if text.is_chat]),
        ]
        return [(reader, places) for reader, places in chosen if places]

    def tokens(self, texts: Sequence[Text]) -> list[WindowTokens]:
        """Return the tokens of each text. Raises `TrainingError` for one without tokens."""
        by_place: dict[int, WindowTokens] = {}
        for reader, places in self.kinds(texts):
            for shard in shards_of(texts, places):
                planned = reader.plan(shard)
                for document, tokens in zip(planned.documents, planned.tokens, strict=True):
                    if tokens is None:
                        raise TrainingError(f"{texts[places[document.index]].where}: {document.reason}")
                    by_place[places[document.index]] = tokens
        return [by_place[i] for i in range(len(texts))]


@dataclass(frozen=True)
class StatePlan:
    """The states to keep: tokens `kept` (positions, in order) of each text."""

    reader: TextReader
    texts: Sequence[Text]
    tokens: Sequence[WindowTokens]
    kept: Sequence[Ints]

    @property
    def n_rows(self) -> int:
        return sum(map(len, self.kept))

    def kinds(self) -> list[tuple[StateReader, list[int]]]:
        """Like `TextReader.kinds`, for texts with kept tokens."""
        readers = [
            (reader, [i for i in places if len(self.kept[i])]) for reader, places in self.reader.kinds(self.texts)
        ]
        return [(reader, places) for reader, places in readers if places]

    @cached_property
    def key(self) -> dict[str, Any]:
        """Everything that the states depend on, as JSON."""
        model, digest = self.reader.host, hashlib.sha256()
        for text, tokens, positions in zip(self.texts, self.tokens, self.kept, strict=True):
            for part in (
                np.asarray([text.is_chat, len(tokens), len(positions)]),
                tokens.ids,
                positions,
                *_around(tokens),
            ):
                digest.update(np.asarray(part, dtype=np.int64).tobytes())
        window = self.reader.plain.window
        return {
            "format": _FORMAT,
            "host": weights_fingerprint(model),
            "adapters": adapters_fingerprint(self.reader.plain.model, model),
            "config": config_fingerprint(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "widths": [kind.width for kind in self.reader.kinds_of.values()],
            "sites": list(self.reader.sites),
            "window": [window.n_tokens, window.overlap],
            "rows": self.n_rows,
            "tokens_sha256": digest.hexdigest(),
            "torch": torch.__version__,
        }


def _around(tokens: WindowTokens) -> tuple[Ints, Ints]:
    return np.asarray(tokens.prefix, dtype=np.int64), np.asarray(tokens.suffix, dtype=np.int64)


def drawn_evenly(wanted: Sequence[Ints], *, row_bytes: int, budget: int, seed: int) -> list[Ints]:
    """Return the kept positions of each text: as many as fit `budget` bytes, drawn evenly."""
    ends = np.cumsum([0, *map(len, wanted)])
    chosen = np.zeros(ends[-1], dtype=bool)
    chosen[np.random.default_rng(seed).permutation(len(chosen))[: budget // row_bytes]] = True
    return [positions[chosen[first:end]] for positions, first, end in zip(wanted, ends[:-1], ends[1:], strict=True)]


@dataclass(frozen=True)
class StateStore:
    """States in a folder: `document`, `position` `[R]` of each row; `first [N]` row of each text."""

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
    """States of a site, `shape` [R, D], from byte `begin` of a file; rows are read on demand."""

    path: Path
    begin: int
    shape: tuple[int, int]
    dtype: torch.dtype

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return a copy of rows `[n, D]`."""
        if not len(rows):
            return torch.zeros(0, self.shape[1], dtype=self.dtype)
        row_bytes, places = self.shape[1] * self.dtype.itemsize, rows.numpy()
        runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        if len(runs) * _LEAST_RUN > len(places):
            # Mapped pages count as this process's memory.
            mapped = np.memmap(self.path, mode="r", offset=self.begin, shape=(self.shape[0], row_bytes))
            return torch.from_numpy(mapped[places]).view(self.dtype)
        found = np.empty((len(places), row_bytes), dtype=np.uint8)
        with self.path.open("rb") as stream:
            at = 0
            for run in runs:
                stream.seek(self.begin + int(run[0]) * row_bytes)
                stream.readinto(memoryview(found[at : at + len(run)]).cast("B"))  # type: ignore[arg-type]
                at += len(run)
        return torch.from_numpy(found).view(self.dtype)


@contextmanager
def held(
    folder: str | os.PathLike[str], *, waiting: Callable[[], object] | None = None, seconds: float = _PATIENCE
) -> Iterator[None]:
    """Lock a folder of states, made if missing, for the block.

    Raises `TrainingError` if another run has it, at once or, with `waiting`, which is called first, after `seconds`;
    or if the folder cannot be made.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TrainingError(f"{folder} cannot hold states ({error.strerror}): choose another folder") from error
    try:
        _lock(descriptor, waiting, seconds)
        yield
    except BlockingIOError:
        raise TrainingError(
            f"another run works with the states in {folder}: wait for it, or choose another folder for them"
        ) from None
    finally:
        os.close(descriptor)


def _lock(descriptor: int, waiting: Callable[[], object] | None, seconds: float) -> None:
    """Lock without a lock file. Raises `BlockingIOError`."""
    until, told = time.monotonic() + seconds, False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None or time.monotonic() > until:
                raise
        if not told:
            waiting()
        told = True
        time.sleep(0.2)


def collect_states(
    plan: StatePlan,
    folder: str | os.PathLike[str],
    *,
    progress: Callable[[int], object] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> StateStore:
    """Read the states of a plan into a folder; existing ones are reused. Raises `TrainingError` if it has other files.

    `progress` gets numbers of tokens, `say` whether kept states are used, or why not.
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
    rows, done, changed = _begun(folder, key, kinds)
    if changed:
        say(f"states in {folder} are read anew: {changed}")
    if done and (moved := _moved(plan, store, order[:done], rows)):
        say(f"states in {folder} are read anew: {moved}")
        rows, done = 0, 0
    elif done:
        say(f"states of {done} of {len(order)} texts are taken from {folder}")
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
            for shard in shards_of(plan.texts, places[skipped:]):
                for read_document, tokens, states in reader.states([shard]):
                    kept_positions = torch.from_numpy(plan.kept[places[skipped + read_document.index]])
                    for site, hidden in states.items():
                        files.append(site, hidden[kept_positions.to(hidden.device)])
                    rows += len(kept_positions)
                    done += 1
                    if progress is not None:
                        progress(len(tokens))
                files.flush()
                give_back()
                write_text_atomically(folder / STATE, _stated(key, rows, done))
            skipped = 0
    return store


def _moved(plan: StatePlan, store: StateStore, done: Sequence[int], n_rows: int) -> str:
    """Return how the model's states of a few short texts differ from the kept ones, or "".

    A median over tokens: read in another batch, single tokens of bf16 models move by half their length.
    """
    sampled = sorted((i for i in done if len(plan.kept[i])), key=lambda i: (len(plan.tokens[i]), i))[:_READ_AGAIN]
    differences: dict[str, list[Tensor]] = {site: [] for site in store.sites}
    for reader, places in plan.reader.kinds([plan.texts[i] for i in sampled]):
        for document, _, states in reader.states(shards_of(plan.texts, [sampled[place] for place in places])):
            i = sampled[places[document.index]]
            rows = torch.arange(len(plan.kept[i])) + int(store.first[i])
            for site, hidden in states.items():
                stored = replace(store.states(site), shape=(n_rows, store.kinds[site].width))
                before, now = stored[rows].double(), hidden.cpu()[torch.from_numpy(plan.kept[i])].double()
                differences[site].append((now - before) / before.norm(dim=1, keepdim=True).clamp(min=1e-12))
    # Recurrent layers also read the model's dtype.
    most, mean_limit = of_dtype(_ROUNDING, plan.reader.host.dtype, "rounding of states")
    for site, of_site in differences.items():
        parts = torch.cat(of_site)
        median, mean = float(parts.norm(dim=1).median()), float(parts.median(dim=0).values.norm())
        if median > most or mean > mean_limit:
            return (
                f"the model gives other states now (at {site} by {median:.2g} of their length, {mean:.2g} in common;"
                f" rounding is up to {most:g} and {mean_limit:g})"
            )
    return ""


def shards_of(texts: Sequence[Text], places: Sequence[int]) -> Iterator[DocumentShard]:
    """Return texts `places` as documents, in order; `index` is the place in `places`."""
    return shards(Document(i, texts[place].where, texts[place].text) for i, place in enumerate(places))


def _begun(folder: Path, key: Mapping[str, Any], kinds: Mapping[str, SiteKind]) -> tuple[int, int, str]:
    """Return the numbers of stored rows and texts of this key, or what differs from it. Raises `TrainingError`."""
    state = folder / STATE
    if folder.exists() and not state.is_file() and any(folder.iterdir()):
        raise TrainingError(f"{folder} holds other files than states: choose another folder for them")
    try:
        saved = json.loads(state.read_text(encoding="utf-8"))
        is_complete = all(
            (folder / _file(site)).stat().st_size >= saved["rows"] * kind.row_bytes for site, kind in kinds.items()
        )
        if saved["key"] == key and is_complete:
            return int(saved["rows"]), int(saved["texts"]), ""
        other = [_NAMES.get(name, name) for name in key if saved["key"].get(name) != key[name]]
        return 0, 0, f"another {', another '.join(other)}" if other else "a file is shorter than stated"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, 0, ""


def _stated(key: Mapping[str, Any], rows: int, texts: int) -> str:
    return json.dumps({"key": key, "rows": rows, "texts": texts}, indent=1) + "\n"


def _file(site: str) -> str:
    return f"{site}.safetensors"


def _header(site: str, rows: int, kind: SiteKind) -> bytes:
    shape = {"dtype": code_of(kind.dtype), "shape": [rows, kind.width], "data_offsets": [0, rows * kind.row_bytes]}
    text = json.dumps({"__metadata__": {"site": site}, "states": shape}).encode()
    text += b" " * (-len(text) % 64)
    return struct.pack("<Q", len(text)) + text


class _Files:
    """Files of all sites, written from row `rows` on."""

    def __init__(self, folder: Path, kinds: Mapping[str, SiteKind], n_rows: int, rows: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._open: dict[str, BinaryIO] = {}
        for site, kind in kinds.items():
            stream = (folder / _file(site)).open("r+b" if (folder / _file(site)).exists() else "w+b")
            header = _header(site, n_rows, kind)
            stream.write(header)
            # Drop rows after the last whole shard.
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
