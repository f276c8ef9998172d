"""What a chat template leaves out of a chat. Templates are programs of the model's own: some skip roles in silence.

lost = left_out(writer(tokenizer), messages)     # (0, "content") where nothing of the first message is in the prompt
lost = left_out(render, messages)                # render(messages): the text of a chat, by any other way
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

_LONG = 40  # characters of a message: fewer may stand in a prompt by chance


def writer(tokenizer: Any) -> Callable[[Messages], str]:
    """Return what writes a chat as the tokenizer's template does."""
    return lambda messages: str(tokenizer.apply_chat_template(list(messages), tokenize=False))


def left_out(render: Callable[[Messages], str], messages: Messages) -> tuple[int, str] | None:
    """Return which message of a chat, and what of it ("content", "tool_calls"), changes nothing in its text; the first,
    None where all that is said is there.

    A message whose words stand in the text is taken to be read: they are looked for before anything is tried. An error
    of `render` at a chat that was changed counts as having looked; at the chat itself it is raised.
    """
    text = render(messages)
    for at, message in enumerate(messages):
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else ""
        sure = message.get("role") in ("user", "assistant") or len(said) >= _LONG
        if said and not (sure and said in text):
            other = {**message, "content": f"{said} {at}"}
            if not _changes(render, [*messages[:at], other, *messages[at + 1 :]], text):
                return at, "content"
        if message.get("tool_calls"):
            without = {name: value for name, value in message.items() if name != "tool_calls"}
            if not _changes(render, [*messages[:at], without, *messages[at + 1 :]], text):
                return at, "tool_calls"
    return None


def _changes(render: Callable[[Messages], str], messages: Messages, text: str) -> bool:
    try:
        return render(messages) != text
    except Exception:  # whatever a template raises: it looked
        return True
