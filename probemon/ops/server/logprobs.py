"""Log probabilities of tokens, as the model gives them: log-softmax in fp32 of its logits, before penalties, biases,
temperature and filters change them. vLLM reports the same by default (`raw_logprobs`).

logprobs = Logprobs(prompt_ids, n_top=5, prompt=True)
with logprobs.following(model):         # keeps the logits of this thread's forwards
    ...
    logprobs.take(token_id)             # TokenLogprob of the token sampled after the last forward
logprobs.of_prompt                      # one for each token; the first has none
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from probemon.host.model import unwrap

_ROWS = 64  # positions of a prompt at a time: each has as many numbers as the vocabulary
_LEAST = -9999.0  # JSON has no infinity; OpenAI's stand-in
_FIRST_BYTE_TOKEN = "<0x"  # of tokenizers with a token for each byte


class TokenLogprob(NamedTuple):
    """A token's log probability, None for a prompt's first; `top`: of the likeliest tokens, the likeliest first."""

    token_id: int
    value: float | None
    top: tuple[tuple[int, float], ...] = ()


class Logprobs:
    """Computes the log probabilities of one answer, of its prompt too if `prompt`."""

    def __init__(self, prompt_ids: Sequence[int], n_top: int, *, prompt: bool) -> None:
        self._prompt_ids, self._n_top = prompt_ids, n_top
        self.of_prompt = [TokenLogprob(prompt_ids[0], None)] if prompt else []
        self._n_left = len(prompt_ids) - 1 if prompt else 0  # tokens of the prompt without one
        self._thread = threading.get_ident()
        self._last: Tensor | None = None  # logits [V]

    @contextmanager
    def following(self, model: Any) -> Iterator[None]:
        """Keep the logits of forwards in this thread."""
        self._thread = threading.get_ident()
        handle = unwrap(model).register_forward_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()

    def take(self, token_id: int) -> TokenLogprob:
        """Return that of the token sampled after the last forward."""
        assert self._last is not None
        [value] = self._values(self._last[None], [token_id])
        return value

    # -- inside ----------------------------------------------------------------------------------

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:  # another answer's
            return
        logits = output.logits[0]
        if self._n_left:
            at = len(self._prompt_ids) - self._n_left
            ids = self._prompt_ids[at : at + len(logits)]
            for begin in range(0, len(ids), _ROWS):
                end = min(begin + _ROWS, len(ids))
                self.of_prompt += self._values(logits[begin:end], ids[begin:end])
            self._n_left -= len(ids)
        self._last = logits[-1].clone()  # so that those of a whole prompt are not kept

    def _values(self, logits: Tensor, ids: Sequence[int]) -> list[TokenLogprob]:
        values = logits.float().log_softmax(-1)
        own = values.gather(1, torch.tensor(ids, device=values.device)[:, None])[:, 0].tolist()
        best, places = (one.tolist() for one in values.topk(min(self._n_top, values.shape[-1])))
        return [
            TokenLogprob(id, max(value, _LEAST), tuple(zip(row, (max(one, _LEAST) for one in top), strict=True)))
            for id, value, row, top in zip(ids, own, places, best, strict=True)
        ]


# -- OpenAI's objects ----------------------------------------------------------------------------


class ToldToken(NamedTuple):
    """A token's text, and its bytes in UTF-8; None if the tokenizer does not tell those of a part of a character."""

    text: str
    bytes: list[int] | None


@dataclass(frozen=True)
class ToldLogprob:
    """A token with its log probability, for clients. `start`: of its text, in the prompt's or the answer's."""

    token: ToldToken
    value: float | None
    top: list[tuple[ToldToken, float]]
    start: int

    def chat(self) -> dict[str, Any]:
        """Return an item of `logprobs.content`."""
        return {**_chat_token(self.token, self.value), "top_logprobs": [_chat_token(*one) for one in self.top]}


def told(logprob: TokenLogprob, start: int, tokens: Callable[[int], ToldToken]) -> ToldLogprob:
    """Return a log probability with texts instead of ids."""
    top = [(tokens(id), value) for id, value in logprob.top]
    return ToldLogprob(tokens(logprob.token_id), logprob.value, top, start)


def completion_logprobs(entries: Sequence[tuple[ToldLogprob, int]]) -> dict[str, list[Any]]:
    """Return the `logprobs` of a completion; beside each entry, where its text begins: the prompt's or the answer's."""
    return {
        "tokens": [entry.token.text for entry, _ in entries],
        "token_logprobs": [entry.value for entry, _ in entries],
        "top_logprobs": [_by_text(entry) for entry, _ in entries],
        "text_offset": [begin + entry.start for entry, begin in entries],
    }


def _by_text(entry: ToldLogprob) -> dict[str, float] | None:
    """Return the likeliest tokens and the token itself; of several with one text, the likeliest."""
    if entry.value is None:
        return None
    values: dict[str, float] = {}
    for token, value in [*entry.top, (entry.token, entry.value)]:
        values.setdefault(token.text, value)
    return values


def _chat_token(token: ToldToken, value: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": value, "bytes": token.bytes}


def told_token(tokenizer: Any, text: str, token_id: int) -> ToldToken:
    """Return a token; `text` is its own decoded text."""
    if "\ufffd" not in text:
        return ToldToken(text, list(text.encode()))
    written = tokenizer.convert_ids_to_tokens(token_id)
    if not isinstance(written, str):
        return ToldToken(text, None)
    if written.startswith(_FIRST_BYTE_TOKEN) and written.endswith(">"):
        return ToldToken(text, [int(written[3:-1], 16)])
    found = [_BYTES.get(character) for character in written]
    return ToldToken(text, None if None in found else [byte for byte in found if byte is not None])


def _byte_characters() -> dict[str, int]:
    """Return the bytes that characters stand for in the tokens of byte-level BPE (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_BYTES = _byte_characters()
