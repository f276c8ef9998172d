"""Reads a model's hidden states at every token of documents, shard by shard. A forward ends after the last site.

reader = StateReader(model, tokenizer, ["resid_post.15"], Reading())
for document, tokens, states in reader.states(shards(read_documents("mails.jsonl"))):
    states["resid_post.15"]                     # [T, D], on the model's device, in its dtype
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
from probemon.errors import AlignmentError, ChatRefused, ConfigError, UnsupportedModel
from probemon.host.abilities import Abilities
from probemon.host.adapters import needs_its_wrapper, rehearsal
from probemon.host.chat_dates import CHAT_DATE
from probemon.host.chat_forms import PARTS
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
from probemon.host.text_tokens import counted, in_ranges
from probemon.lab.corpora.documents import Document
from probemon.lab.corpora.windows import DocumentShard, Reading, WindowPiece, WindowTokens, batches, cut, encode
from probemon.packs.manifest import SO_FAR, scope_of


@dataclass(frozen=True)
class ShardPlan:
    """A shard ready for the model, with reasons from tokenisation."""

    shard: DocumentShard
    documents: tuple[Document, ...]
    tokens: tuple[WindowTokens | None, ...]
    batches: list[list[WindowPiece]]
    n_tokens: int


class _ForwardEnd(BaseException):
    """Ends a forward early; not an `Exception`, so that no handler catches it."""


class _OwnForward(threading.local):
    """States of this thread's forward by site, or None."""

    seen: dict[str, list[Tensor]] | None = None
    shape: tuple[int, int]
    where: Tensor


class StateReader:
    """Reads hidden states of a model in eval mode at `sites`.

    `so_far`: states summarise all tokens so far, as `ssm_state.N` always do; documents over one window are refused.

    Raises `ConfigError` if the model is training, `UnsupportedModel` if it has an encoder, keeps state between inputs,
    or does not match its sites.
    """

    def __init__(
        self, model: Any, tokenizer: Any, sites: Sequence[str], reading: Reading, *, so_far: bool = False
    ) -> None:
        decoder = unwrap(model)
        if is_encoder_decoder(decoder):
            raise UnsupportedModel(
                f"{type(decoder).__name__} has an encoder: it is unknown how its decoder would read a document. Give a"
                " decoder alone"
            )
        training_part = "the whole" if decoder.training else drops_at_random(model)
        if training_part is not None:
            raise ConfigError(
                f"{training_part} of {type(decoder).__name__} is training, and drops at random: call model.eval()"
            )
        self.tokenizer, self.reading, self.sites = tokenizer, reading, tuple(sites)
        self._so_far = so_far or scope_of(sites) == SO_FAR
        self.window = reading.window_for(type(decoder).__name__, longest_input(decoder))
        self.model, self.host = model, decoder
        # Else only rows of one length share a batch.
        abilities = Abilities(decoder)
        abilities.check_streams(self.sites)
        abilities.check_again(self.window.n_tokens)
        self._padded, self._looks_ahead = (
            abilities.takes_padding(self.window.n_tokens),
            abilities.looks_ahead(self.window.n_tokens),
        )
        wrapped = needs_its_wrapper(model, decoder)
        self._runs = model if wrapped else find_layers(decoder)[0]
        self._may_stop = may_be_left(decoder) and not wrapped  # PEFT's wrapper would leave its hooks
        self._rehearses = rehearsal(decoder)
        self.widths = {site: site_width(decoder, site) for site in self.sites}
        self._known = False  # whether a forward shows each site once
        self._open = _OwnForward()
        self._stop = False

    def around(self) -> dict[str, list[int]]:
        """Return the special tokens before and after every window."""
        tokens = self._encoded("a")
        return {"before": list(tokens.prefix), "after": list(tokens.suffix)}

    def tap(self) -> Tap:
        """Return the hooks that `run` needs."""
        return Tap(self.host, self.sites, self._tapped)

    def states(self, shards: Iterable[DocumentShard]) -> Iterator[tuple[Document, WindowTokens, dict[str, Tensor]]]:
        """Yield readable documents with tokens and hidden states `[T, D]` by site."""
        for shard in shards:
            planned = self.plan(shard)
            lengths = [0 if encoded is None else len(encoded) for encoded in planned.tokens]
            collected: list[dict[str, Tensor]] = [{} for _ in lengths]
            with self.tap():
                for rows in planned.batches:
                    sizes = [piece.stop - piece.scored for piece in rows]
                    for site, hidden in self.run(rows, planned.tokens).items():
                        for piece, part in zip(rows, hidden.split(sizes), strict=True):
                            full = collected[piece.place].setdefault(
                                site, hidden.new_empty(lengths[piece.place], hidden.shape[1])
                            )
                            full[piece.scored : piece.stop] = part
            for document, tokens, encoded in zip(planned.documents, planned.tokens, collected, strict=True):
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
                    f"{len(encoded or ()):,} tokens, more than a window of {self.window.n_tokens:,} takes: after it"
                    " scores of all tokens so far would restart. Give a longer window"
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
        if is_chat:
            return encode(self.tokenizer, text, special_tokens="none", parse_special=True)
        return encode(
            self.tokenizer,
            text,
            special_tokens=reading.special_tokens,
            parse_special=reading.parse_special,
            after=self._looks_ahead,
        )

    def _with_parts(self, document: Document, tokens: WindowTokens) -> WindowTokens:
        """Return a chat's tokens with their parts. Raises `ChatRefused` if the parts to count are unknown or empty."""
        on = self.reading.on
        if not document.chat or not len(tokens):
            return tokens
        if document.parts:
            turn, part = (np.full(len(tokens), -1, dtype=np.int64) for _ in range(2))
            try:
                for one in document.parts:
                    place = [(one.start, one.stop)]
                    if tokens.start[0] >= 0:
                        mask = in_ranges(tokens.start, tokens.end, place)
                    else:
                        mask = counted(self.tokenizer, document.text, tokens.ids.tolist(), place)
                    turn[mask], part[mask] = one.turn, PARTS.index(one.part)
            except ConfigError as error:
                document = replace(document, unplaced=str(error))
            else:
                tokens = replace(tokens, turn=turn, part=part)
        if on and tokens.part is None and document.unplaced:
            raise ChatRefused(f"which of its tokens are of {' or '.join(on)} is unknown: {document.unplaced}")
        if on and not (tokens.part is not None and tokens.counted(on).any()):
            raise ChatRefused(f"it has no text of {' or '.join(on)}, which is to count")
        return tokens

    def _read(self, document: Document) -> tuple[Document, WindowTokens | None, str]:
        """Return a document, its tokens, and a reason if there are none."""
        if document.reason:
            return document, None, document.reason
        try:
            if document.chat:
                document = document.rendered(self.tokenizer, self.reading.chat_date or CHAT_DATE)
            encoded = self._encoded(document.text, is_chat=bool(document.chat))
            encoded = self._with_parts(document, encoded)
        except ChatRefused as error:
            return document, None, str(error)
        except Exception as error:
            return document, None, f"cannot be tokenised ({type(error).__name__}: {error})"
        return (document, encoded, "") if len(encoded) else (document, None, "no tokens")

    def arrays(
        self, rows: Sequence[WindowPiece], tokens: Sequence[WindowTokens | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and mask `[B, L]` of a batch, and the scored indices of `[B * L]`."""
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
            mask[row, : len(piece)] = 1  # right padding; see _padded
            first = row * longest + piece.n_prefix - piece.begin
            at.append(np.arange(first + piece.scored, first + piece.stop))
        ids_at, mask_at = (torch.from_numpy(array).to(self.host.device) for array in (ids, mask))
        return ids_at, mask_at, torch.from_numpy(np.concatenate(at))

    def run(self, rows: Sequence[WindowPiece], tokens: Sequence[WindowTokens | None]) -> dict[str, Tensor]:
        """Run the model over a batch; return states `[N, D]` of its scored tokens, by site."""
        ids, mask, where = self.arrays(rows, tokens)
        seen: dict[str, list[Tensor]] = {site: [] for site in self.sites}
        self._stop = self._may_stop and self._known
        with torch.inference_mode():
            forward = self._open  # of this thread
            forward.seen, forward.shape, forward.where = seen, (ids.shape[0], ids.shape[1]), where
            try:
                with suppress(_ForwardEnd):
                    self._runs(input_ids=ids, attention_mask=mask, use_cache=False)
            finally:
                forward.seen = None
        for site, states in seen.items():
            if len(states) != 1:
                raise AlignmentError(
                    ran_again(site) if states else f"a forward of the model ended without reaching {site}"
                )
        self._known = True
        return {site: states for site, [states] in seen.items()}

    def _tapped(self, site: str, hidden: Tensor) -> None:
        forward = self._open
        if forward.seen is not None and not (
            self._rehearses is not None and self._rehearses()
        ):  # else another caller's forward
            check_states(site, hidden, forward.shape, self.widths[site])
            # The layer may modify its block's output in place (Falcon).
            states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, forward.where.to(hidden.device))
            forward.seen[site].append(states)
            if self._stop and all(forward.seen.values()):
                raise _ForwardEnd


def give_back() -> None:
    """Return freed memory to the system: fragments grow to gigabytes over hours."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def may_be_left(host: Any) -> bool:
    """Whether a forward may end early: not with accelerate's hooks or compiled layers."""
    moved = any(has_accelerate_hook(module) for module in host.modules())
    return not moved and not compiled_parts(host)
