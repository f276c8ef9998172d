"""Shows a stream in a notebook while the model generates, coloured by concept.

    result = show(manager.stream(model, tokenizer, "Tell me about whales.", max_new_tokens=40))

Interrupting the cell stops the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack

from probemon.errors import ConfigError
from probemon.monitor.result import Result
from probemon.monitor.stream import TokenEvent
from probemon.monitor.token_html import token_span
from probemon.util.checks import check_number
from probemon.util.extras import import_ipython
from probemon.util.static_html import Colours, fragment
from probemon.util.templates import macros

_NEWEST = 400  # tokens shown while streaming


def show(events: Iterable[TokenEvent], *, every_seconds: float = 0.1) -> Result:
    """Show the events below the cell; return the final result.

    `every_seconds`: between updates. Raises as the stream, `MissingExtra` without IPython, `ConfigError` outside a
    notebook or without a result.
    """
    every_seconds = check_number("every_seconds", every_seconds, low=0, remedy="give a number of seconds, 0 or more")
    with ExitStack() as stack:
        if hasattr(events, "close"):
            stack.callback(events.close)  # stops the model
        ipython = import_ipython("show")
        if not hasattr(ipython.get_ipython(), "kernel"):
            raise ConfigError("show is for notebooks: elsewhere read the stream in a loop and print its events")
        view, handle, next_time, result = LiveText(), None, 0.0, None
        for event in events:
            view.add(event)
            result = event.result or result
            if result is None and time.monotonic() < next_time:
                continue
            page = view.html() if result is None else result._repr_html_()
            shown = {"text/html": page, "text/plain": repr(view if result is None else result)}
            if handle is None:
                handle = ipython.display.display(shown, raw=True, display_id=True)
            else:
                handle.update(shown, raw=True)
            next_time = time.monotonic() + every_seconds
    if result is None:
        raise ConfigError("the events ended without a result: give show all that manager.stream(...) yields")
    return result


class LiveText:
    """The newest tokens of a stream as HTML.

    view.add(event); view.html()
    """

    def __init__(self) -> None:
        self._colours, self._spans, self._n_tokens, self._n_unseen = Colours(), list[str](), 0, 0

    def add(self, event: TokenEvent) -> None:
        """Add a token."""
        leading = event.leading(3)
        ranked = [] if leading else event.ranked(2)
        span = token_span(self._colours, event.token, leading, ranked, unseen=event.unseen)
        self._spans = [*self._spans[1 - _NEWEST :], span]
        self._n_tokens += 1
        self._n_unseen += bool(event.unseen)

    def html(self) -> str:
        """Return the text and the number of tokens."""
        page = macros("monitor/result.html.j2")
        parts = [page.text(self._spans), page.live(self._n_tokens, self._n_unseen, self._n_tokens - len(self._spans))]
        return fragment("Generating", [*parts, *([self._colours.legend()] if self._colours.hues else [])])

    def __repr__(self) -> str:
        return f"LiveText({self._n_tokens} tokens, {self._n_unseen} unseen)"
