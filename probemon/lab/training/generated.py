"""Lets the model write texts about concepts with few examples.

Prompts have only name and definition, because variants of an example would leak into the test. For a single concept the
model also writes about other subjects, so that its style is not a mark.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from probemon.errors import ChatRefused, TrainingError
from probemon.host.chat_dates import CHAT_DATE
from probemon.host.chat_template import render
from probemon.host.fingerprint import (
    adapters_fingerprint,
    config_fingerprint,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from probemon.host.model import unwrap
from probemon.lab.training.examples import Concept, Example, Examples
from probemon.util.files import write_text_atomically

ASKED = (
    "Write one sentence about {}.",
    "Write two sentences that somebody might say about {}.",
    "Write the beginning of a short story in which {} matters.",
    "Write a line of a news report about {}.",
    "Give an example of a text about {}, without a title.",
)
BEGUN = ("This is about {}. ", "Here is what was written of {}: ", "A story about {} begins so: ", "News of {}: ")
OTHER = (
    "a bridge over a river", "the first day at a new school", "an old clock", "a walk in the fog", "a lost umbrella",
    "a letter that arrived late", "the neighbours' cat", "a broken lift", "the last bus of the night", "a choir",
    "a map of the coast", "a game of chess", "a queue at the post office", "the moon", "a garden in winter",
    "a painted door", "an empty theatre", "moving house", "a power cut", "the smell of rain",
)  # fmt: skip
_NEW_TOKENS, _BATCH, _ROUNDS = 64, 20, 4
_FEWEST_WORDS = 4
_SENTENCES = re.compile(r".*[.!?][\"'”’)]*", re.DOTALL)


def with_generated(
    examples: Examples,
    model: Any,
    tokenizer: Any,
    *,
    n: int,
    seed: int,
    file: Path,
    chat_date: str = CHAT_DATE,
    say: Callable[[str], None] = lambda line: None,
) -> Examples:
    """Return the examples, completed to n texts for each concept by the model.

    Texts are cached in `file`. `chat_date`: for its template. Raises `TrainingError` if it writes nothing usable.
    """
    lacking = {concept.id: n - count for concept, count in _counted(examples) if count < n}
    if not lacking:
        return examples
    subjects: list[tuple[str, str, int]] = [
        (id, _subject(examples.concepts[id]), count) for id, count in lacking.items()
    ]
    if len(lacking) == 1:
        subjects += _others(examples.concepts[next(iter(lacking))], next(iter(lacking.values())))
    key = _key(model, tokenizer, subjects, seed, chat_date)
    written = _kept(file, key)
    if written is None:
        say(f"the model writes {sum(count for *_, count in subjects)} texts of {len(subjects)} subjects")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            written = [_written(model, tokenizer, subject, count, chat_date) for _, subject, count in subjects]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps({"key": key, "texts": written}, ensure_ascii=False))
    return examples.extended(
        Example(
            f"text {i + 1} that the model wrote of {subject}",
            text,
            labels={id: True} if id else dict.fromkeys(lacking, False),
            of_concept=bool(id),
            generated=True,
        )
        for (id, subject, _), texts in zip(subjects, written, strict=True)
        for i, text in enumerate(texts)
    )


def _counted(examples: Examples) -> list[tuple[Concept, int]]:
    counts = (examples.known() == 1).sum(axis=0).tolist()
    return list(zip(examples.concepts.values(), counts, strict=True))


def _subject(concept: Concept) -> str:
    return f"{concept.name} ({concept.definition})" if concept.definition else concept.name


def _others(concept: Concept, count: int) -> list[tuple[str, str, int]]:
    """Subjects without words of the concept, and numbers of texts."""
    words = set(re.findall(r"\w{3,}", _subject(concept).casefold()))
    subjects = [other for other in OTHER if not words & set(re.findall(r"\w{3,}", other))]
    shares = [len(range(i, count, len(subjects))) for i in range(len(subjects))]
    return [("", subject, share) for subject, share in zip(subjects, shares, strict=True) if share]


def _key(model: Any, tokenizer: Any, subjects: Sequence[tuple[str, str, int]], seed: int, chat_date: str) -> str:
    decoder = unwrap(model)
    sampling = getattr(decoder, "generation_config", None)
    versions = [torch.__version__, transformers.__version__]
    inputs = [
        weights_fingerprint(decoder),
        config_fingerprint(decoder),
        adapters_fingerprint(model, decoder),
        None if sampling is None else sampling.to_json_string(),
        tokenizer_fingerprint(tokenizer),
        [prompt for _, subject, _ in subjects for prompt in _prompts(tokenizer, subject, len(ASKED), chat_date)],
        str(decoder.dtype),
        subjects,
        seed,
        versions,
        ASKED,
        BEGUN,
    ]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _kept(file: Path, key: str) -> list[list[str]] | None:
    try:
        cached = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return list(cached["texts"]) if isinstance(cached, dict) and cached.get("key") == key else None


def _written(model: Any, tokenizer: Any, subject: str, count: int, chat_date: str) -> list[str]:
    distinct: dict[str, None] = {}
    for _ in range(_ROUNDS * -(-count // _BATCH)):
        prompts = _prompts(tokenizer, subject, min(_BATCH, count), chat_date)
        for text in _answers(model, tokenizer, prompts):
            if len(text.split()) >= _FEWEST_WORDS:
                distinct.setdefault(text)
        if len(distinct) >= count:
            break
    if not distinct:
        raise TrainingError(f"the model writes nothing usable about {subject}: give examples of it")
    return list(distinct)[:count]


def _prompts(tokenizer: Any, subject: str, n: int, chat_date: str) -> list[str]:
    if not getattr(tokenizer, "chat_template", None):
        return [BEGUN[i % len(BEGUN)].format(subject) for i in range(n)]
    chats = [[{"role": "user", "content": ASKED[i % len(ASKED)].format(subject)}] for i in range(n)]
    try:
        return [render(tokenizer, chat, add_generation_prompt=True, date=chat_date).text for chat in chats]
    except ChatRefused as error:
        raise TrainingError(f"the model is asked for examples in a chat, and {error}: give more examples") from error


@torch.no_grad()
def _answers(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    """Return the model's answers, cut after the last whole sentence."""
    if not hasattr(model, "generate"):
        raise TrainingError("this model does not generate, so it writes no examples: give more of them")
    chats = bool(getattr(tokenizer, "chat_template", None))
    rows = [tokenizer(prompt, add_special_tokens=not chats)["input_ids"] for prompt in prompts]
    width, pad = max(map(len, rows)), tokenizer.pad_token_id
    pad = pad if pad is not None else tokenizer.eos_token_id or 0
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=_NEW_TOKENS,
        do_sample=True,
        temperature=0.9,
        top_p=0.95,
        pad_token_id=pad,
    )
    texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    matches = [_SENTENCES.match(text) for text in texts]
    return [" ".join(match[0].split()) if match else "" for match in matches]
