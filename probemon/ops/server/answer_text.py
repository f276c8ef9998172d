"""The text of an answer as its tokens come, and how much of it may be sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from probemon.util.token_texts import TokenTexts


class AnswerText:
    """The decoded text up to the first stop string.

    Text that may begin a stop string is withheld; with `hold`, all text until `allow`.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), *, hold: bool = False
    ) -> None:
        self.spans: list[tuple[int, int]] = []
        self.met_stop = False
        self._pieces, self._stops = TokenTexts(decode), stops
        self._text = ""
        self._limit: int | None = None  # no text from here on
        self.n_allowed, self._hold = 0, hold  # may be shown
        self._n_taken, self._ended = 0, False

    @property
    def text(self) -> str:
        """Return the text that may be shown."""
        return self._text[: self._n_allowed_characters()]

    def add(self, token_id: int) -> None:
        """Add the next token."""
        begin = len(self._text)
        self._extend(self._pieces.add(token_id))
        self.spans.append((begin, len(self._text)))

    def token_text(self, index: int) -> str:
        """Return a token's shown text."""
        start, end = self.span(index)
        return self._text[start:end]

    def span(self, index: int) -> tuple[int, int]:
        """Return (start, end) of a token's shown text, in characters."""
        most = len(self._text) if self._limit is None else self._limit
        start, end = self.spans[index]
        return min(start, most), min(end, most)

    def is_settled(self, index: int) -> bool:
        """True if no stop string can still cut the token."""
        return self._ended or self.met_stop or self.spans[index][1] <= len(self._text) - self._possible_stop()

    def allow(self, n_tokens: int) -> None:
        """Allow the first `n_tokens`."""
        self.n_allowed = max(self.n_allowed, n_tokens)

    def cut_at_token(self, index: int) -> None:
        """Show nothing from this token on."""
        self._cut(self.spans[index][0] if index < len(self.spans) else len(self._text))

    def end(self) -> None:
        """End the text: withheld characters become text."""
        if not self._ended:
            self._ended = True
            self._extend(self._pieces.finish())
            if self.spans:
                self.spans[-1] = self.spans[-1][0], len(self._text)

    def take(self) -> str:
        """Return new text that may be sent."""
        end = self._n_allowed_characters()
        if not self._ended and not self.met_stop:
            end = min(end, len(self._text) - self._possible_stop())
        taken = self._text[self._n_taken : end]
        self._n_taken = max(self._n_taken, end)
        return taken

    # -- inside ----------------------------------------------------------------------------------

    def _extend(self, piece: str) -> None:
        if not piece:
            return
        before = len(self._text)
        self._text += piece
        if self.met_stop:
            return
        positions = [at for stop in self._stops if (at := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if positions:
            self.met_stop = True
            self._cut(min(positions))

    def _cut(self, at: int) -> None:
        self._limit = at if self._limit is None else min(at, self._limit)

    def _n_allowed_characters(self) -> int:
        most = len(self._text) if self._limit is None else self._limit
        if not self._hold:
            return most
        return min(most, self.spans[self.n_allowed - 1][1] if self.n_allowed else 0)

    def _possible_stop(self) -> int:
        """Return how many last characters may begin a stop string."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
