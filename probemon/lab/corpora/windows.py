"""Plans how documents are read: texts become tokens, tokens windows, windows batches.

    tokens = encode(tokenizer, "Whales sing.")
    windows = cut(tokens, place=0, window=Window(1024, 128))

Every token is scored once, in the window with most context. Special tokens before a text begin every window; those
after it end the windows of bidirectional models only. They are not scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.errors import ConfigError
from probemon.host.chat_dates import parse_date
from probemon.host.chat_forms import PARTS
from probemon.host.text_tokens import begins_with
from probemon.host.text_tokens import special_tokens as special_tokens_around
from probemon.lab.corpora.documents import Document
from probemon.util.checks import check_choice, check_count

# Larger shards batch better, but take more memory.
SHARD_DOCUMENTS, SHARD_CHARS = 256, 250_000
SPECIAL = ("bos", "tokenizer", "none")


@dataclass(frozen=True)
class WindowTokens:
    """Tokens of a text.

    - `ids [T]`; `start`, `end` `[T]`: offsets, -1 if unknown.
    - `prefix`, `suffix`: special tokens around it.
    - `own_prefix`: its first special tokens, for later windows.
    - `turn`, `part` `[T]`: of a chat, each token's message and index in `PARTS`, -1 outside of them; None if unknown.
    """

    ids: Ints
    start: Ints
    end: Ints
    prefix: tuple[int, ...]
    suffix: tuple[int, ...] = ()
    own_prefix: tuple[int, ...] = ()
    turn: Ints | None = None
    part: Ints | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def counted(self, on: Sequence[str]) -> Mask:
        """Return which tokens are of these parts of a chat `[T]`; of other texts, all are."""
        if not on or self.part is None:
            return np.ones(len(self), dtype=bool)
        return np.isin(self.part, [PARTS.index(part) for part in on])

    def only(self, tokens: Mask) -> WindowTokens:
        """Return some of the tokens."""
        turn, part = (None if values is None else values[tokens] for values in (self.turn, self.part))
        return replace(self, ids=self.ids[tokens], start=self.start[tokens], end=self.end[tokens], turn=turn, part=part)

    def prefix_at(self, begin: int) -> tuple[int, ...]:
        """Return the special tokens before a window at token `begin`."""
        return self.own_prefix if begin and self.own_prefix else self.prefix


@dataclass(frozen=True)
class Window:
    """The longest input, with special tokens, and the overlap, in tokens."""

    n_tokens: int = 1024
    overlap: int = 128

    def __post_init__(self) -> None:
        for name in ("n_tokens", "overlap"):
            object.__setattr__(
                self, name, check_count(f"window {name}", getattr(self, name), remedy="give a whole number of tokens")
            )
        if self.n_tokens < 2 * self.overlap or self.n_tokens < 2:
            raise ConfigError(
                f"windows of {self.n_tokens} tokens that overlap by {self.overlap}: give an overlap of at most half a"
                " window"
            )


@dataclass(frozen=True)
class Reading:
    """How documents become batches.

    - `window`: None for 1024 tokens or the model's limit.
    - `batch_tokens`, `batch_rows`: largest batch, with padding.
    - `special_tokens`, `parse_special`: see `encode`.
    - `chat_date`: YYYY-MM-DD for templates that write today's date; None for the pack's.
    - `on`: parts of chats whose tokens count: roles, and "reasoning"; empty for all. All tokens are read.
    """

    window: Window | None = None
    batch_tokens: int = 4096
    batch_rows: int = 64
    special_tokens: str = "bos"
    parse_special: bool = False
    chat_date: str | None = None
    on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "batch_rows"):
            object.__setattr__(self, name, check_count(name, getattr(self, name), least=1, remedy="give 1 or more"))
        if self.special_tokens not in SPECIAL:
            raise ConfigError(f"special_tokens is {self.special_tokens!r}: give one of {', '.join(SPECIAL)}")
        if self.chat_date is not None:
            parse_date(self.chat_date)
        if isinstance(self.on, str):
            raise ConfigError(f"on is {self.on!r}: give a list, such as ({self.on!r},)")
        for part in self.on:
            check_choice("on", part, PARTS)
        object.__setattr__(self, "on", tuple(sorted(set(self.on), key=PARTS.index)))

    def window_for(self, name: str, longest: int | None) -> Window:
        """Return the window for a model that takes `longest` tokens. Raises `ConfigError` if it is too large."""
        if self.window is None:
            n_tokens = min(1024, 1024 if longest is None else longest)
            return Window(n_tokens, n_tokens // 8)
        if longest is not None and self.window.n_tokens > longest:
            raise ConfigError(f"windows of {self.window.n_tokens} tokens: {name} takes at most {longest}")
        return self.window


@dataclass(frozen=True)
class WindowPiece:
    """An input: tokens `begin` to `stop` of document `place`, scored from `scored` on."""

    place: int
    begin: int
    scored: int
    stop: int
    n_prefix: int
    n_suffix: int = 0

    def __len__(self) -> int:
        return self.n_prefix + self.stop - self.begin + self.n_suffix


@dataclass(frozen=True)
class DocumentShard:
    """Documents written and resumed together; `is_last`: the input ends here."""

    index: int
    documents: tuple[Document, ...]
    is_last: bool = False

    @property
    def digest(self) -> str:
        """Hash of ids, contents and reasons."""
        return self.digest_of(len(self.documents))

    def digest_of(self, n_documents: int) -> str:
        """Digest of the first `n_documents`."""
        sha = hashlib.sha256()
        for document in self.documents[:n_documents]:
            for part in (str(document.index), document.id, document.said, document.reason):
                data = part.encode("utf-8", "surrogatepass")
                sha.update(f"{len(data)}:".encode())
                sha.update(data)
        return sha.hexdigest()


def encode(
    tokenizer: Any, text: str, *, special_tokens: str = "bos", parse_special: bool = False, after: bool = False
) -> WindowTokens:
    """Tokenise a text.

    - `special_tokens` before it: "tokenizer" (those that the tokenizer adds), "bos" (the same, else its
      beginning-of-sequence token) or "none". Not repeated.
    - `parse_special`: parse "<|im_start|>" in the text.
    - `after`: also add those after it.
    """
    fast, added = bool(getattr(tokenizer, "is_fast", False)), special_tokens != "none"
    encoding = tokenizer(
        text,
        add_special_tokens=added,
        split_special_tokens=not parse_special,
        return_offsets_mapping=fast,
        return_attention_mask=False,
        truncation=False,
        verbose=False,
    )
    ids = np.asarray(encoding["input_ids"], dtype=np.int64)
    before, behind = special_tokens_around(tokenizer, text) if added else ((), ())
    inside = slice(len(before), len(ids) - len(behind))
    if fast:
        offsets = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        start, end = offsets[inside, 0], offsets[inside, 1]
    else:
        start = end = np.full(len(ids[inside]), -1, dtype=np.int64)
    bos = getattr(tokenizer, "bos_token_id", None)
    if special_tokens == "bos" and not before and bos is not None:
        before = (int(bos),)
    has_own = begins_with(ids[inside], before)  # such as a rendered chat
    return WindowTokens(
        ids[inside], start, end, () if has_own else before, behind if after else (), before if has_own else ()
    )


def cut(tokens: WindowTokens, place: int, window: Window) -> list[WindowPiece]:
    """Cut a document into pieces, in order; each token is scored in one."""
    n_suffix, n = len(tokens.suffix), len(tokens)
    n_special = max(len(tokens.prefix), len(tokens.own_prefix)) + n_suffix
    if window.n_tokens - n_special <= window.overlap:
        raise ConfigError(
            f"windows of {window.n_tokens} tokens have {n_special} special ones and overlap by {window.overlap}:"
            " nothing is left"
        )
    pieces, begin, scored = [], 0, 0
    while scored < n:
        n_prefix = len(tokens.prefix_at(begin))
        stop = min(begin + window.n_tokens - n_prefix - n_suffix, n)
        pieces.append(WindowPiece(place, begin, scored, stop, n_prefix, n_suffix))
        begin, scored = stop - window.overlap, stop
    return pieces


def batches(
    pieces: Sequence[WindowPiece], *, max_tokens: int, max_rows: int, padded: bool = True
) -> list[list[WindowPiece]]:
    """Group pieces into batches of at most `max_tokens` (or one piece) and `max_rows`, longest first.

    `padded`: pieces of different lengths may share a batch.
    """
    grouped: list[list[WindowPiece]] = []
    longest = 0
    for piece in sorted(pieces, key=lambda piece: (-len(piece), piece.place, piece.begin)):
        if (
            not grouped
            or len(grouped[-1]) == max_rows
            or (len(grouped[-1]) + 1) * longest > max_tokens
            or not (padded or len(piece) == longest)
        ):
            grouped.append([])
            longest = len(piece)
        grouped[-1].append(piece)
    return grouped


def shards(documents: Iterable[Document]) -> Iterator[DocumentShard]:
    """Group documents into shards."""
    index, held, n_chars = 0, list[Document](), 0
    for document in documents:
        if held and (len(held) == SHARD_DOCUMENTS or n_chars + len(document.said) > SHARD_CHARS):
            yield DocumentShard(index, tuple(held))
            index, held, n_chars = index + 1, [], 0
        held.append(document)
        n_chars += len(document.said)
    if held or not index:  # an empty input is one empty shard
        yield DocumentShard(index, tuple(held), is_last=True)
