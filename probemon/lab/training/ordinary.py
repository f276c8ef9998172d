"""Ordinary text, on which probes must be quiet: the corpus that comes with the package, by kind.

    chosen = ordinary(tokenizer, texts=720, seed=0)
    chosen.measured      # [(kind, Example)]: whole texts, the same number of each kind
    chosen.template      # chats with the model's own system prompt and template, which always teach
    chosen.carriers      # other texts, to put examples into

Every text is ours or in the public domain (`ordinary/sources.json`). Chats are rendered whole: the template, system
prompts, users and tools are ordinary text, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from probemon.errors import ChatRefused, TrainingError
from probemon.host.chat_dates import CHAT_DATE
from probemon.host.chat_template import render as render_chat
from probemon.lab.training.examples import Example
from probemon.lab.training.texts import Text

TEXTS = 520
LONGEST = 800  # characters; longer texts are cut
_N_TEMPLATE = 40
_MEASURED = 0.8  # of a kind, at most; the others are carriers, and teach the template
_CHATS = ("chat", "agent")
_ANSWERS = ("answer", "draft")  # of the demo model; they refuse and apologise, so they are drawn only if read
_SOURCES = "sources.json"


@dataclass(frozen=True)
class Ordinary:
    """Texts by their use; `kinds` are those measured, in order."""

    measured: Sequence[tuple[str, Example]] = ()
    template: Sequence[Example] = ()
    carriers: Sequence[str] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kind for kind, _ in self.measured))

    def unknown(self, kinds_of: Mapping[str, Sequence[str]], concepts: Collection[str]) -> Ordinary:
        """Return these, of which kinds are unknown for some concepts. Raises `TrainingError` for unknown names."""
        for id, kinds in kinds_of.items():
            if id not in concepts:
                raise TrainingError(f"unknown_in names the concept {id!r}, which no example has")
            for kind in kinds:
                if kind not in self.kinds:
                    raise TrainingError(f"unknown_in names the kind {kind!r}: give one of {', '.join(self.kinds)}")
        may_have = {kind: [id for id, kinds in kinds_of.items() if kind in kinds] for kind in self.kinds}
        measured = [
            (kind, replace(example, unsure=(*example.unsure, *may_have[kind]))) for kind, example in self.measured
        ]
        return replace(self, measured=measured)


def sources() -> dict[str, Any]:
    """Return the corpus's manifest: by kind its texts, words, authors and licence."""
    manifest: dict[str, Any] = json.loads(_folder().joinpath(_SOURCES).read_text(encoding="utf-8"))
    return manifest


@cache
def corpus() -> Mapping[str, tuple[Example, ...]]:
    """Return all texts by kind."""
    by_kind = {}
    for kind in sources()["kinds"]:
        lines = _folder().joinpath(f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        by_kind[kind] = tuple(_example(kind, i + 1, json.loads(line)) for i, line in enumerate(lines))
    return by_kind


def _folder() -> Any:
    return files("probemon.lab.training").joinpath("ordinary")


def _example(kind: str, number: int, row: Mapping[str, Any]) -> Example:
    where = f"ordinary text, {kind} {number}"
    messages = tuple(row.get("messages", ()))
    return Example(where, row.get("text", ""), messages=messages, group=f"ordinary {kind} {number}")


def ordinary(
    tokenizer: Any, *, texts: int = TEXTS, seed: int = 0, read: Mapping[str, Mapping[str, bool | None]] | None = None
) -> Ordinary:
    """Draw about `texts` texts, equally of all kinds, and what else training takes from the corpus.

    `read`: of texts that were read, by group, concepts that they have, or (None) may have. Then only these are drawn,
    and answers of a model beside them.
    """
    generator = np.random.default_rng([seed, 2])
    by_kind = {kind: [own[i] for i in generator.permutation(len(own))] for kind, own in corpus().items()}
    if read is None:
        by_kind = {kind: own for kind, own in by_kind.items() if kind not in _ANSWERS}
    else:
        by_kind = {kind: own for kind, own in by_kind.items() if any(one.group in read for one in own)}
        # Those that were read first, so that the others are carriers.
        by_kind = {kind: sorted(own, key=lambda example: example.group not in read) for kind, own in by_kind.items()}
        texts = min(texts, len(by_kind) * min(sum(one.group in read for one in own) for own in by_kind.values()))
    each = max(1, round(texts / len(by_kind)))
    each = min(each, int(_MEASURED * min(map(len, by_kind.values()))))
    measured = [(kind, example) for kind, own in by_kind.items() for example in own[:each]]
    if read is not None:
        measured = [(kind, _labelled(example, read[example.group or ""])) for kind, example in measured]
    rest = {kind: own[each:] for kind, own in by_kind.items()}
    template: list[Example] = []
    if getattr(tokenizer, "chat_template", None):
        # Without a system prompt the template writes the model's own.
        chats = [example for kind in _CHATS for example in rest.get(kind, ())][:_N_TEMPLATE]
        template = [
            replace(example, messages=tuple(turn for turn in example.messages if turn["role"] != "system"))
            for example in chats
        ]
    carriers = [example.text for own in rest.values() for example in own if example.text]
    return Ordinary(measured, template, carriers)


def _labelled(example: Example, concepts: Mapping[str, bool | None]) -> Example:
    present = {id: True for id, there in concepts.items() if there}
    return replace(example, labels=present, unsure=tuple(id for id in concepts if id not in present))


def render_whole(example: Example, tokenizer: Any, chat_date: str = CHAT_DATE) -> Text:
    """Return an ordinary text or chat as the model reads it, up to `LONGEST` characters; all of it counts.

    A template that takes no tools or system prompts gets what they say as turns of the user; without a template a chat
    is a text with names of roles.
    """
    text = _whole(example, tokenizer, chat_date)
    if len(text.text) <= LONGEST:
        return text
    cut = text.text[:LONGEST]
    return replace(text, text=cut[: cut.rfind(" ")] if " " in cut else cut)


def _whole(example: Example, tokenizer: Any, chat_date: str) -> Text:
    if not example.messages:
        return Text(example.where, example.text)
    if getattr(tokenizer, "chat_template", None):
        for messages in (example.messages, _as_two(example.messages)):
            try:
                chat = render_chat(tokenizer, messages, date=chat_date)
            except ChatRefused:
                continue
            return Text(example.where, chat.text, is_chat=True, reads_date=chat.reads_date)
    turns = (f"{turn['role'].capitalize()}: {_said(turn)}" for turn in example.messages)
    return Text(example.where, "\n\n".join(turns))


def _as_two(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns of a user and an assistant, who alternate."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{_said(message)}"
        else:
            turns.append({"role": role, "content": _said(message)})
    return turns if turns[0]["role"] == "user" else [{"role": "user", "content": "Go on."}, *turns]


def _said(message: Mapping[str, Any]) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (message.get("content") or "", *calls) if part)
