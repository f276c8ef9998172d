"""Passages of running text: which texts train, which calibrate, which measure, and how much of each.

    for passage in passages(answers): passage.domain, passage.split, passage.text

A text belongs to one split as a whole. Domains without a training share train nothing, nor calibrate. A fifth of the
passages that train or calibrate stand in the host's chat template, since that is where a monitored host writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import real_text
from real_text import Text

LONGEST = 1100  # characters of a passage: some 250 tokens of prose
SHORTEST = 40
MOST_OF_A_FILE = 6  # passages of one file of code, so that there are many files
CHAT_SHARE = 0.2
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@dataclass(frozen=True)
class Domain:
    """A kind of text, and how many characters of it each split takes."""

    name: str
    read: Callable[[], Iterable[Text]]
    train: int = 0
    validation: int = 0
    test: int = 0
    is_prose: bool = True


@dataclass(frozen=True)
class Passage:
    domain: str
    split: str
    text: str


DOMAINS = (
    Domain("news", real_text.bbc, 800_000, 250_000, 250_000),
    Domain("encyclopedia", real_text.encyclopedia, 1_300_000, 230_000, 150_000),
    Domain("addresses", real_text.addresses, 400_000, 50_000),
    Domain("novel", real_text.novel, 350_000, 50_000),
    Domain("mails", lambda: real_text.mails(1500), 500_000, 100_000, 100_000),
    Domain("tweets", real_text.tweets, 250_000, 40_000),
    Domain("code", lambda: real_text.framework(".py"), 200_000, 50_000, is_prose=False),
    Domain("manuals", lambda: real_text.framework(".txt"), 200_000, 40_000),
    Domain(
        "markup",
        lambda: real_text.framework(".html", ".js", ".css", ".json", ".po", ".xml"),
        200_000,
        50_000,
        is_prose=False,
    ),
    Domain("records", real_text.countries, 100_000, 30_000, is_prose=False),
    Domain("news_elsewhere", real_text.australian, test=200_000),
    Domain("library", real_text.library, test=100_000, is_prose=False),
    Domain("tables", real_text.tables, test=80_000, is_prose=False),
)
ANSWERS = "answers"  # what the host wrote itself, which trains nothing either


def passages(answers: Iterable[str]) -> list[Passage]:
    """Return the passages of every domain, in an order that depends on the texts alone, then the host's `answers`."""
    chosen = [passage for domain in DOMAINS for passage in _of_domain(domain)]
    return chosen + [Passage(ANSWERS, "test", text) for text in answers]


def _of_domain(domain: Domain) -> Iterator[Passage]:
    room = {"train": domain.train, "validation": domain.validation, "test": domain.test}
    for text in sorted(domain.read(), key=lambda text: _share(f"{domain.name} {text.id}")):
        split = split_of_text(domain, text.id)
        parts = list(parts_of(text.text))[: None if domain.is_prose else MOST_OF_A_FILE]
        for number, part in enumerate(parts):
            if room[split] <= 0:
                break
            room[split] -= len(part)
            if split != "test" and _share(f"chat {domain.name} {text.id} {number}") < CHAT_SHARE:
                part = _in_chat(part, parts[(number + 1) % len(parts)])
            yield Passage(domain.name, split, part)
        if all(left <= 0 for left in room.values()):
            break


def split_of_text(domain: Domain, text_id: str) -> str:
    """Return the split of a text, a function of its id alone."""
    if not domain.train:
        return "test"
    at = _share(f"split {domain.name} {text_id}")
    return "train" if at < 0.65 else "validation" if at < 0.85 or not domain.test else "test"


def parts_of(text: str) -> Iterator[str]:
    """Yield pieces of a text of at most `LONGEST` characters, cut at line ends, then at sentences, then at spaces."""
    part = ""
    for line in text.split("\n"):
        while len(line) > LONGEST:
            at = line.rfind(". ", 0, LONGEST) + 1 or line.rfind(" ", 1, LONGEST)
            at = at if at > 0 else LONGEST
            yield from _long_enough(part)
            yield from _long_enough(line[:at])
            part, line = "", line[at:].lstrip()
        if len(part) + len(line) + 1 > LONGEST:
            yield from _long_enough(part)
            part = ""
        part = f"{part}\n{line}" if part else line
    yield from _long_enough(part)


def _long_enough(part: str) -> Iterator[str]:
    if len(part.strip()) > SHORTEST:
        yield part.strip("\n")


def _in_chat(answer: str, question: str) -> str:
    asked = question[:200].split("\n")[0]
    return f"{SYSTEM}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}"


def _share(key: str) -> float:
    """Return a number from 0 to 1 that depends on the key alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
