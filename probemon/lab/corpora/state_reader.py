"""Reads a host's hidden states at every token of documents, shard by shard.

    reader = StateReader(model, tokenizer, ["resid_post.15"], Reading())
    for document, tokens, states in reader.states(shards(read_documents("mails.jsonl"))):
        states["resid_post.15"]                     # [T, D], on the host's device and in its dtype

Chats become texts by the model's chat template; texts become tokens, windows and batches as
`probemon.lab.corpora.windows` has it. A forward ends after the last site.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints
from probemon.errors import AlignmentError, ChatRefused, ConfigError, NotSupportedHost
from probemon.host.abilities import Abilities
from probemon.host.adapters import needs_its_wrapper, rehearsal
from probemon.host.chat_dates import CHAT_DATE
from probemon.host.internals import has_accelerate_hook
from probemon.host.model import (
    compiled_parts,
    drops_at_random,
    find_layers,
    is_encoder_decoder,
    longest_input,
    unwrap,
)
from probemon.host.recurrent.state_sites import site_width
from probemon.host.tap import Tap, check_states, ran_again
from probemon.lab.corpora.documents import Document
from probemon.lab.corpora.windows import DocumentShard, Reading, WindowPiece, WindowTokens, batches, cut, encode
from probemon.packs.manifest import SO_FAR, scope_of


@dataclass(frozen=True)
class ShardPlan:
    """A shard ready for the host; its documents have the tokenizer's reasons too."""

    shard: DocumentShard
    documents: tuple[Document, ...]
    tokens: tuple[WindowTokens | None, ...]
    batches: list[list[WindowPiece]]
    n_tokens: int


class _ForwardEnd(BaseException):
    """Ends a forward that has shown all it has to; no `Exception`, so that nothing on its way out catches it."""


class _OwnForward(threading.local):
    """What this thread's own forward has shown of the states that are asked for, by site; None while there is none.

    `shape`: its rows and tokens. `where`: which of these are asked for.
    """

    seen: dict[str, list[Tensor]] | None = None
    shape: tuple[int, int]
    where: Tensor


class StateReader:
    """Reads hidden states of a host in eval mode at `sites`.

    `so_far`: what is made of the states tells of all tokens so far, as those of `ssm_state.N` do in any case. Documents
    of more than one window are then left out: behind the first nothing would be known of what came before.

    Raises `NotSupportedHost` where the host has an encoder, its answers depend on what it read before, or a site is not
    what its name says, `ConfigError` where it is training.
    """

    def __init__(
        self, model: Any, tokenizer: Any, sites: Sequence[str], reading: Reading, *, so_far: bool = False
    ) -> None:
        host = unwrap(model)
        if is_encoder_decoder(host):
            raise NotSupportedHost(
                f"{type(host).__name__} has an encoder: what its decoder would read a document as is unknown. Give a"
                " decoder alone"
            )
        dropping = "the whole" if host.training else drops_at_random(model)
        if dropping is not None:
            raise ConfigError(
                f"{dropping} of {type(host).__name__} is training, and drops at random: call model.eval()"
            )
        self.tokenizer, self.reading, self.sites = tokenizer, reading, tuple(sites)
        self._so_far = so_far or scope_of(sites) == SO_FAR
        self.window = reading.window_for(type(host).__name__, longest_input(host))
        self.model, self.host = model, host
        # Where padding gets into a row, or its length into others, only rows of one length share a batch.
        abilities = Abilities(host)
        abilities.check_streams(self.sites)
        abilities.check_again(self.window.n_tokens)
        self._padded, self._looks_ahead = (
            abilities.takes_padding(self.window.n_tokens),
            abilities.looks_ahead(self.window.n_tokens),
        )
        wrapped = needs_its_wrapper(model, host)
        self._runs = model if wrapped else find_layers(host)[0]
        self._may_stop = may_be_left(host) and not wrapped  # PEFT's wrapper would leave its hooks on
        self._rehearses = rehearsal(host)
        self.widths = {site: site_width(host, site) for site in self.sites}
        self._known = False  # that a forward shows each site once
        self._open = _OwnForward()
        self._stop = False

    def around(self) -> dict[str, list[int]]:
        """Return the special tokens before and after every window."""
        tokens = self._encoded("a")
        return {"before": list(tokens.prefix), "after": list(tokens.suffix)}

    def tap(self) -> Tap:
        """Return what `run` needs around it: the hooks on the host."""
        return Tap(self.host, self.sites, self._tapped)

    def states(self, shards: Iterable[DocumentShard]) -> Iterator[tuple[Document, WindowTokens, dict[str, Tensor]]]:
        """Return the documents that can be read, with their tokens and hidden states `[T, D]` at the sites."""
        for shard in shards:
            planned = self.plan(shard)
            lengths = [0 if encoded is None else len(encoded) for encoded in planned.tokens]
            room: list[dict[str, Tensor]] = [{} for _ in lengths]
            with self.tap():
                for rows in planned.batches:
                    sizes = [piece.stop - piece.scored for piece in rows]
                    for site, hidden in self.run(rows, planned.tokens).items():
                        for piece, part in zip(rows, hidden.split(sizes), strict=True):
                            whole = room[piece.place].setdefault(
                                site, hidden.new_empty(lengths[piece.place], hidden.shape[1])
                            )
                            whole[piece.scored : piece.stop] = part
            for document, tokens, encoded in zip(planned.documents, planned.tokens, room, strict=True):
                if tokens is not None:
                    yield document, tokens, encoded

    def plan(self, shard: DocumentShard) -> ShardPlan:
        """Tokenise a shard, and plan its batches."""
        documents, tokens, pieces = list(shard.documents), [], []
        for place, document in enumerate(documents):
            document, encoded, reason = self._read(document)
            documents[place] = document
            windows = [] if encoded is None else cut(encoded, place, self.window)
            if len(windows) > 1 and self._so_far:
                reason = (
                    f"{len(encoded or ()):,} tokens, more than a window of {self.window.n_tokens:,} takes: behind it"
                    " scores of all tokens so far would begin anew. Give a longer window"
                )
                encoded, windows = None, []
            if reason:
                documents[place] = replace(document, reason=reason)
            tokens.append(encoded)
            pieces += windows
        grouped = batches(
            pieces, max_tokens=self.reading.batch_tokens, max_rows=self.reading.batch_rows, padded=self._padded
        )
        return ShardPlan(
            shard,
            tuple(documents),
            tuple(tokens),
            grouped,
            sum(len(encoded) for encoded in tokens if encoded is not None),
        )

    def _encoded(self, text: str, *, is_chat: bool = False) -> WindowTokens:
        reading = self.reading
        if is_chat:  # a template writes every special token itself
            return encode(self.tokenizer, text, special_tokens="none", parse_special=True)
        return encode(
            self.tokenizer,
            text,
            special_tokens=reading.special_tokens,
            parse_special=reading.parse_special,
            after=self._looks_ahead,
        )

    def _read(self, document: Document) -> tuple[Document, WindowTokens | None, str]:
        """Return a document, a chat with its text, its tokens, and the reason where there are none."""
        if document.reason:
            return document, None, document.reason
        try:
            if document.chat:
                document = document.rendered(self.tokenizer, self.reading.chat_date or CHAT_DATE)
            encoded = self._encoded(document.text, is_chat=bool(document.chat))
        except ChatRefused as error:
            return document, None, str(error)
        except Exception as error:  # one text must not cost the others
            return document, None, f"cannot be tokenised ({type(error).__name__}: {error})"
        return (document, encoded, "") if len(encoded) else (document, None, "no tokens")

    def arrays(
        self, rows: Sequence[WindowPiece], tokens: Sequence[WindowTokens | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and mask `[B, L]` of a batch, on the host's device, and which of `[B * L]` are scored in it."""
        longest = max(map(len, rows))
        ids, mask = np.zeros((len(rows), longest), dtype=np.int64), np.zeros((len(rows), longest), dtype=np.int64)
        at: list[Ints] = []
        for row, piece in enumerate(rows):
            encoded = tokens[piece.place]
            assert encoded is not None
            ids[row, : len(piece)] = [
                *encoded.prefix_at(piece.begin),
                *encoded.ids[piece.begin : piece.stop],
                *encoded.suffix,
            ]
            mask[row, : len(piece)] = 1  # padding follows the text, where no state of it can see it: see _padded
            first = row * longest + piece.n_prefix - piece.begin
            at.append(np.arange(first + piece.scored, first + piece.stop))
        ids_at, mask_at = (torch.from_numpy(array).to(self.host.device) for array in (ids, mask))
        return ids_at, mask_at, torch.from_numpy(np.concatenate(at))

    def run(self, rows: Sequence[WindowPiece], tokens: Sequence[WindowTokens | None]) -> dict[str, Tensor]:
        """Run the host over a batch; return the states `[N, D]` of the tokens scored in it, row by row, by site."""
        ids, mask, where = self.arrays(rows, tokens)
        seen: dict[str, list[Tensor]] = {site: [] for site in self.sites}
        self._stop = self._may_stop and self._known
        with torch.inference_mode():
            own = self._open  # of this thread: others may run the same model
            own.seen, own.shape, own.where = seen, (ids.shape[0], ids.shape[1]), where
            try:
                with suppress(_ForwardEnd):
                    self._runs(input_ids=ids, attention_mask=mask, use_cache=False)
            finally:
                own.seen = None
        for site, states in seen.items():
            if len(states) != 1:
                raise AlignmentError(
                    ran_again(site) if states else f"a forward of the host ended without reaching {site}"
                )
        self._known = True
        return {site: states for site, [states] in seen.items()}

    def _tapped(self, site: str, hidden: Tensor) -> None:
        own = self._open
        if own.seen is not None and not (
            self._rehearses is not None and self._rehearses()
        ):  # else a forward of somebody else's
            check_states(site, hidden, own.shape, self.widths[site])
            # Copied now: the layer may go on to add to what its block gave, in place (Falcon).
            states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, own.where.to(hidden.device))
            own.seen[site].append(states)
            if self._stop and all(own.seen.values()):
                raise _ForwardEnd


def give_back() -> None:
    """Give freed memory back to the system. The C library keeps pieces of what each shard took, and over hours their
    gaps add up to gigabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def may_be_left(host: Any) -> bool:
    """Return whether a forward may be ended half-way: not where accelerate's hooks put weights back after a layer, nor
    where a compiled layer is one piece.
    """
    moved = any(has_accelerate_hook(module) for module in host.modules())
    return not moved and not compiled_parts(host)
