"""TokenTexts: what each token of a sequence adds to its text, as the tokens come.

texts = TokenTexts(decode)                   # decode(ids): the tokenizer's own
for token_id in ids:
    print(texts.add(token_id), end="")
print(texts.finish())                        # what was waiting for the rest of a character
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT = 16  # tokens that are decoded again with the next one, at most
_MOST_UNFINISHED = 64  # tokens that do not decode; of garbage so long, what comes later may be told otherwise


class TokenTexts:
    """Where several tokens make one character, the last adds it. Together the texts are what `decode` makes of all ids;
    of a character that stays unfinished, U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # those before `_done` have their texts, and are decoded again with those after them
        self._done, self._before = 0, ""  # what is decoded of these

    def add(self, token_id: int) -> str:
        """Take the next token and return what it adds."""
        self._ids.append(token_id)
        return self._next(at_end=False)

    def finish(self) -> str:
        """Return what the tokens so far add beside what was returned: an unfinished character."""
        return self._next(at_end=True)

    def _next(self, at_end: bool) -> str:
        # Decoded with the tokens before, since a token alone may lose the space that it begins with.
        before, now = self._before, self._decode(self._ids)
        if now.endswith("\ufffd") and len(self._ids) - self._done <= _MOST_UNFINISHED and not at_end:
            return ""
        if len(now) > len(before):
            self._before = now
            if len(self._ids) > _CONTEXT:
                del self._ids[: self._done]
                self._before = self._decode(self._ids)
        self._done = len(self._ids)
        return now[len(before) :]
