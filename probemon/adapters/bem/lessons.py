"""Texts, answers to prompts, and chats, as tokens with labels.

    lesson = make_lesson({"prompt": "2 + 2?", "answer": "4"}, "sums.jsonl, line 1", tokenizer)
    parts = split(documents, {"train": 0.7, "choose": 0.1, "test": 0.2}, seed=0)      # whole documents
    for batch in make_batches(lessons, 8, pad): ...                 # input_ids, attention_mask, labels

A row is one of these; other fields are ignored:

- `{"text": "..."}`: every token counts.
- `{"prompt": "...", "answer": "..."}`: the answer counts. With a chat template, both become a chat.
- `{"messages": [...]}`: a chat of OpenAI's form (optionally `tools`), on a fixed date; the assistant's turns count.

A token of a chat counts if any of its characters does. Without a template the prompt is tokenised alone, as the model
will get it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probemon.adapters.bem.losses import Batch
from probemon.errors import ChatRefused, ConfigError
from probemon.host.chat_dates import CHAT_DATE
from probemon.host.chat_forms import check_said, normalised
from probemon.host.chat_template import render
from probemon.host.text_tokens import counted as counted_tokens
from probemon.host.text_tokens import ids_of
from probemon.util.counted import counted


@dataclass(frozen=True)
class Lesson:
    """Tokens of one row, and which count as labels."""

    where: str
    ids: tuple[int, ...]
    counted: tuple[bool, ...]

    @property
    def n_labels(self) -> int:
        """Number of labels; the first token is never one."""
        return sum(self.counted[1:])


def check_row(row: Mapping[str, Any], where: str) -> str:
    """Return the kind of a row: "text", "answer" or "chat". Raises `ConfigError`."""
    # A table's row has every column: ignore empty ones.
    kinds = [name for name in ("messages", "prompt", "text") if isinstance(row.get(name), (str, list)) and row[name]]
    if len(kinds) > 1:
        raise ConfigError(f"{where} has {kinds[0]!r} and {kinds[1]!r}: give one of them, the other would be left out")
    if "messages" in row:
        try:
            check_said(row["messages"], roles=None)
        except ChatRefused as error:
            raise ConfigError(f"{where}: {error}") from None
        if not any(turn["role"] == "assistant" for turn in row["messages"]):
            raise ConfigError(f"{where}: messages have no turn of the assistant, which would be learned: add one")
        return "chat"
    names = ("prompt", "answer") if "prompt" in row or "answer" in row else ("text",)
    for name in names:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ConfigError(f"{where} has no {name}: give 'text', or 'prompt' and 'answer', or 'messages'")
    return "answer" if len(names) == 2 else "text"


def content_of(row: Mapping[str, Any]) -> str:
    """Return a row's text, to find near-duplicates."""
    if "messages" in row:
        return "\n".join(turn["content"] for turn in normalised(row["messages"]))
    return "\n".join(row[name] for name in ("prompt", "answer", "text") if name in row)


def make_lesson(row: Mapping[str, Any], where: str, tokenizer: Any, most_tokens: int = 512) -> Lesson:
    """Return a row as tokens, cut at `most_tokens`. Raises `ConfigError` without labels."""
    kind = check_row(row, where)
    if kind == "text":
        ids = _ids(tokenizer, row["text"])
        counted = [True] * len(ids)
    elif kind == "chat" or getattr(tokenizer, "chat_template", None):
        turns = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        ids, counted = _chat(_parts_of_chat(turns, row.get("tools"), where, tokenizer), where, tokenizer)
    else:
        ids, counted = _answered(row["prompt"], row["answer"] + (tokenizer.eos_token or ""), tokenizer)
    lesson = Lesson(where, tuple(ids[:most_tokens]), tuple(counted[:most_tokens]))
    if not lesson.n_labels:
        raise ConfigError(
            f"{where} has {len(ids)} tokens, and none to predict among the first {most_tokens}: make it shorter, leave"
            " it out, or raise the limit on tokens"
        )
    return lesson


def _ids(tokenizer: Any, text: str, *, begins: bool = True) -> list[int]:
    return ids_of(tokenizer, text) if begins else list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answered(prompt: str, answer: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokens of prompt and answer, and which count."""
    prompt_ids, ids = _ids(tokenizer, prompt), _ids(tokenizer, prompt + answer)
    if ids[: len(prompt_ids)] != prompt_ids:  # a token crosses the border
        ids = prompt_ids + _ids(tokenizer, answer, begins=False)
    return ids, [place >= len(prompt_ids) for place in range(len(ids))]


def _chat(parts: Sequence[tuple[str, bool]], where: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokens of a chat, and which count."""
    text, ranges, at = "".join(part for part, _ in parts), list[tuple[int, int]](), 0
    for part, counts in parts:
        if counts:
            ranges.append((at, at + len(part)))
        at += len(part)
    ids = _ids(tokenizer, text, begins=False)  # the template writes special tokens
    try:
        return ids, counted_tokens(tokenizer, text, ids, ranges).tolist()
    except ConfigError as error:
        raise ConfigError(f"{where}: which tokens are the assistant's is unknown: {error}") from None


def _parts_of_chat(
    turns: Sequence[Mapping[str, Any]], tools: Any, where: str, tokenizer: Any
) -> list[tuple[str, bool]]:
    """A chat as the template writes it, in parts that count or not."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{where} is a chat, and the model has no chat template: give 'prompt' and 'answer', or 'text'"
        )
    last = max(i for i, turn in enumerate(turns) if turn["role"] == "assistant")
    try:
        chat = render(tokenizer, turns[: last + 1], tools=tools, date=CHAT_DATE)
    except ChatRefused as error:
        raise ConfigError(f"{where}: {error}") from error
    parts, done = list[tuple[str, bool]](), ""
    for i, turn in enumerate(chat.said):
        if turn["role"] != "assistant":
            continue
        for n, prompting, counts in ((i, True, False), (i + 1, False, True)):
            try:
                text = chat.written(chat.said[:n], add_generation_prompt=prompting)
            except Exception as error:  # a template is a program
                raise ConfigError(f"{where}: the model's chat template does not take these turns ({error})") from error
            if not text.startswith(done):
                raise ConfigError(
                    f"{where}: the model's chat template writes turn {i + 1} in another way than in a longer chat, so"
                    " which tokens are the assistant's is unknown: give one answer a row"
                )
            parts.append((text[len(done) :], counts))
            done = text
    return parts


def split(documents: Sequence[int], shares: Mapping[str, float], *, seed: int) -> dict[str, list[int]]:
    """Split rows by whole documents; `documents [N]` is each row's. Return the rows of every part. Raises
    `ConfigError` for an empty part.
    """
    different = sorted(set(documents))
    wanted = [name for name, share in shares.items() if share > 0]
    if len(different) < len(wanted):
        raise ConfigError(
            f"there {'is' if len(different) == 1 else 'are'} {counted(len(different), 'document')}"
            f" (texts that are nearly the same are one), and {len(wanted)} parts,"
            f" {', '.join(wanted)}, need one each: give more texts"
        )
    order = np.random.default_rng(seed).permutation(len(different)).tolist()
    total, begin, part_of = sum(shares.values()), 0, dict[int, str]()
    least = len(wanted)
    for name in wanted:
        least -= 1  # parts that follow
        n = max(1, round(shares[name] / total * len(different))) if least else len(different) - begin
        for place in order[begin : min(begin + n, len(different) - least)]:
            part_of[different[place]] = name
        begin = min(begin + n, len(different) - least)
    return {name: [i for i, document in enumerate(documents) if part_of[document] == name] for name in shares}


def make_batches(lessons: Sequence[Lesson], n_rows: int, pad: int) -> Iterator[Batch]:
    """Yield batches of lessons, padded on the right."""
    for begin in range(0, len(lessons), n_rows):
        rows = lessons[begin : begin + n_rows]
        shape = len(rows), max(len(lesson.ids) for lesson in rows)
        ids = torch.full(shape, pad, dtype=torch.int64)
        mask, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100, dtype=torch.int64)
        for row, lesson in enumerate(rows):
            n = len(lesson.ids)
            ids[row, :n], mask[row, :n] = torch.tensor(lesson.ids), 1
            labels[row, :n] = torch.tensor(lesson.ids).where(torch.tensor(lesson.counted), -100)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}
