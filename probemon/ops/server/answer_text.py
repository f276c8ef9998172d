"""The texts of an answer as its tokens come, and how much of them may be sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from probemon.host.reasoning_marks import ReasoningMarks
from probemon.util.token_texts import TokenTexts


class Texts(NamedTuple):
    """Texts of both parts of an answer."""

    reply: str
    reasoning: str


class AnswerText:
    """The decoded texts: of the reply up to its first stop string, and of the reasoning that `marks` enclose.

    Text that may begin a stop string is withheld; with `hold`, all text until `allow`. Marks, newlines before a mark,
    and those after one at which its part begins are in neither text. `reasons`: the prompt has begun reasoning.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        *,
        hold: bool = False,
        marks: ReasoningMarks | None = None,
        reasons: bool = False,
    ) -> None:
        self._pieces, self._marks, self._reasons = TokenTexts(decode), marks, reasons
        self._reply = _Part(stops, hold=hold, is_marked=marks is not None, after_mark=reasons)
        self._reasoning = _Part((), hold=hold, is_marked=True, after_mark=True)
        self._places: list[tuple[_Part, int]] = []  # of tokens; marks stand in the reply, without text
        self.n_allowed, self._ended = 0, False  # tokens that may be shown

    @property
    def met_stop(self) -> bool:
        """True if the reply has a stop string."""
        return self._reply.met_stop

    @property
    def shown(self) -> Texts:
        """Return the texts that may be shown."""
        return Texts(self._reply.shown, self._reasoning.shown)

    def add(self, token_id: int) -> None:
        """Add the next token."""
        part = self._reasoning if self._reasons else self._reply
        piece = ""
        if self._marks is not None and token_id in self._marks:
            part.extend(self._pieces.finish())
            self._pieces.add(token_id)
            part, self._reasons = self._reply, token_id == self._marks.begin
            for one in (self._reply, self._reasoning):
                one.meet_mark()
        else:
            piece = self._pieces.add(token_id)
        self._places.append((part, len(part.spans)))
        part.add(piece)

    def is_reasoning(self, index: int) -> bool:
        """True if a token is reasoning."""
        return self._places[index][0] is self._reasoning

    def token_text(self, index: int) -> str:
        """Return a token's shown text."""
        part, at = self._places[index]
        start, end = part.span(at)
        return part.text[start:end]

    def span(self, index: int) -> tuple[int, int]:
        """Return (start, end) of a token's shown text in its part, in characters."""
        part, at = self._places[index]
        return part.span(at)

    def is_settled(self, index: int) -> bool:
        """True if nothing can still cut the token."""
        part, at = self._places[index]
        return self._ended or self.met_stop or part.spans[at][1] <= part.n_settled()

    def allow(self, n_tokens: int) -> None:
        """Allow the first `n_tokens`."""
        for part, at in self._places[self.n_allowed : n_tokens]:
            part.n_allowed = at + 1
        self.n_allowed = max(self.n_allowed, n_tokens)

    def cut_at_token(self, index: int) -> None:
        """Show nothing from this token on."""
        for part in (self._reply, self._reasoning):
            hidden = [at for of, at in self._places[index:] if of is part]
            part.cut(part.spans[hidden[0]][0] if hidden else len(part.text))

    def end(self) -> None:
        """End the texts: withheld characters become text."""
        if not self._ended:
            self._ended = True
            if self._places:
                self._places[-1][0].extend(self._pieces.finish())

    def take(self) -> Texts:
        """Return new text that may be sent."""
        ended = self._ended or self.met_stop
        return Texts(self._reply.take(ended), self._reasoning.take(ended))


# -- inside --------------------------------------------------------------------------------------


class _Part:
    """One text. Its newlines at a mark are dropped if it `is_marked`."""

    def __init__(self, stops: Sequence[str], *, hold: bool, is_marked: bool, after_mark: bool) -> None:
        self.text, self.spans, self.n_allowed = "", list[tuple[int, int]](), 0
        self.met_stop = False
        self._stops, self._hold = stops, hold
        self._is_marked, self._after_mark = is_marked, after_mark
        self._searched_from = 0  # no stop string spans a mark
        self._limit: int | None = None  # no text from here on
        self._n_taken = 0

    @property
    def shown(self) -> str:
        return self.text[: self._n_shown()]

    def add(self, piece: str) -> None:
        """Add a token."""
        begin = len(self.text)
        self.spans.append((begin, begin))
        self.extend(piece)

    def extend(self, piece: str) -> None:
        """Add to the last token."""
        if self._after_mark and not self.text:
            piece = piece.lstrip("\n")
        if not piece:
            return
        before = len(self.text)
        self.text += piece
        if self.spans:
            self.spans[-1] = self.spans[-1][0], len(self.text)
        if self.met_stop:
            return
        first = self._searched_from
        positions = [
            at for stop in self._stops if (at := self.text.find(stop, max(first, before - len(stop) + 1))) >= 0
        ]
        if positions:
            self.met_stop = True
            self.cut(min(positions))

    def meet_mark(self) -> None:
        """Drop the newlines at the end."""
        self._after_mark = True
        if self.met_stop:
            return
        self.text = self.text.rstrip("\n")
        end = self._searched_from = len(self.text)
        for at in range(len(self.spans) - 1, -1, -1):
            start, stop = self.spans[at]
            if stop <= end:
                break
            self.spans[at] = min(start, end), end

    def span(self, at: int) -> tuple[int, int]:
        start, end = self.spans[at]
        return min(start, self._most()), min(end, self._most())

    def cut(self, at: int) -> None:
        self._limit = at if self._limit is None else min(at, self._limit)

    def n_settled(self) -> int:
        """Return how many characters neither a stop string nor a mark can still cut."""
        n = len(self.text)
        return min(n - self._possible_stop(), len(self.text.rstrip("\n")) if self._is_marked else n)

    def take(self, ended: bool) -> str:
        end = self._n_shown() if ended else min(self._n_shown(), self.n_settled())
        taken = self.text[self._n_taken : end]
        self._n_taken = max(self._n_taken, end)
        return taken

    def _n_shown(self) -> int:
        if not self._hold:
            return self._most()
        return min(self._most(), self.spans[self.n_allowed - 1][1] if self.n_allowed else 0)

    def _most(self) -> int:
        return len(self.text) if self._limit is None else min(self._limit, len(self.text))

    def _possible_stop(self) -> int:
        """Return how many last characters may begin a stop string."""
        longest, n_searched = 0, len(self.text) - self._searched_from
        for stop in self._stops:
            for n in range(min(len(stop) - 1, n_searched), longest, -1):
                if self.text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
