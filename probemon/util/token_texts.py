"""TokenTexts: the text that each token adds to a sequence.

texts = TokenTexts(decode)                   # decode(ids) of the tokenizer
for token_id in ids:
    print(texts.add(token_id), end="")
print(texts.finish())                        # an unfinished character
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT = 16  # tokens decoded again with the next one
_MOST_UNFINISHED = 64  # tokens without a complete character


class TokenTexts:
    """Turns token ids into text, one token at a time.

    Joined, the texts equal `decode` of all ids. If a character spans several tokens, the last one returns it and the
    others "". A character left unfinished at the end is U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._done, self._before = 0, ""  # how many ids were returned, and their text

    def add(self, token_id: int) -> str:
        """Return the next token's text."""
        self._ids.append(token_id)
        return self._next(at_end=False)

    def finish(self) -> str:
        """Return an unfinished character, or ""."""
        return self._next(at_end=True)

    def _next(self, at_end: bool) -> str:
        # Alone, a token may lose its leading space.
        previous, text = self._before, self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._done <= _MOST_UNFINISHED and not at_end:
            return ""
        if len(text) > len(previous):
            self._before = text
            if len(self._ids) > _CONTEXT:
                del self._ids[: self._done]
                self._before = self._decode(self._ids)
        self._done = len(self._ids)
        return text[len(previous) :]
