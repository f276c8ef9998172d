"""Six concepts that people watch for: texts to train by one writer, to test by another who saw none of them.

rows = to_train(); short, long = tests()
alarms = alarms_on(pack, model, tokenizer)      # {"BBC news": {"injection": (alarms, texts), ...}, ...}

Texts stand in concept_texts: `@ GENRE LANGUAGE`, then `+` the text with the concept, ⟦ ⟧ around what carries it, and
`-` its twin. Chats are `U: ... || A: ...`. Tests have genres of their own; the long ones are one or two sentences
inside real text that is fetched: news, mails, for code a module of Python.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from probemon import DynamicProbeManager
from probemon.lab.corpora.documents import Document
from probemon.lab.corpora.state_reader import StateReader
from probemon.lab.corpora.windows import Reading, shards
from probemon.lab.library.evaluate import highest_trained, in_text, parts_of
from probemon.packs.group import trained_score
from real_text import bbc, framework, library, mails

FOLDER = Path(__file__).with_name("concept_texts")
CONCEPTS = ("injection", "pii", "threat", "sycophancy", "refusal", "insecure")
_INSERT, _CODE = "insert", "insecure"
_TEXTS, _CHARS = 40, 1_200  # of each kind of real text
Row = dict[str, Any]


def read(folder: str) -> Iterator[Row]:
    """Yield the rows of a writer, as `probemon train` takes them."""
    for concept in CONCEPTS:
        genre, language, number = "", "", 0
        for line in (FOLDER / folder / f"{concept}.txt").read_text(encoding="utf-8").splitlines():
            if line.startswith("@ "):
                *names, language = line[2:].split()
                genre, number = "_".join(names), number + 1
            elif line[:2] in ("+ ", "- "):
                yield _row(concept, line, genre, language, f"{folder}-{concept}-{number:03}", folder)


def _row(concept: str, line: str, genre: str, language: str, group: str, author: str) -> Row:
    body, user = line[2:].replace("\\n", "\n"), None
    if body.startswith("U: ") and " || A: " in body:
        user, body = body[3:].split(" || A: ", 1)
    text, spans = "", []
    for piece in re.split("([⟦⟧])", body):
        if piece == "⟦":
            spans.append({"start": len(text), "end": 0, "concept": concept, **({} if user is None else {"turn": 1})})
        elif piece == "⟧":
            spans[-1]["end"] = len(text)
        else:
            text += piece
    row: Row = {"group": group, "genre": genre, "lang": language, "author": author}
    if user is None:
        row["text"] = text
    else:
        row["messages"] = [{"role": "user", "content": user}, {"role": "assistant", "content": text}]
    return {**row, "spans": spans} if line[0] == "+" else {**row, "not": [concept]}


def to_train() -> list[Row]:
    """Return the rows to train on, marked."""
    return list(read("train"))


def tests() -> tuple[list[Row], list[Row]]:
    """Return the short test texts, and those inside real text; by labels, without marks."""
    rows = [_unmarked(row) for row in read("test")]
    rng = random.Random(5)
    news = [text.text for text in bbc() if len(text.text.split()) > 300]
    letters = [text.text for text in mails(4_000) if text.label == "ham" and len(text.text.split()) > 280]
    modules = [text.text for text in library() if len(text.text) > 4_000]
    for texts in (news, letters, modules):
        rng.shuffle(texts)
    short = [row for row in rows if row["genre"] != _INSERT]
    long, carriers = [], dict[str, tuple[list[str], int, str]]()
    for row in rows:
        if row["genre"] == _INSERT:
            if row["group"] not in carriers:  # both twins stand at the same place of the same text
                texts = modules if _CODE in row["group"] else (news, letters)[len(carriers) % 2]
                parts, separator = parts_of(texts[len(carriers) // 2], rng, is_code=texts is modules)
                carriers[row["group"]] = parts, max(1, int(len(parts) * rng.uniform(0.3, 0.75))), separator
            long.append(in_text(row, *carriers[row["group"]]))
    return short, long


def _unmarked(row: Row) -> Row:
    spans = row.pop("spans", None)
    return row if spans is None else {**row, "labels": [spans[0]["concept"]]}


def real_kinds() -> dict[str, list[str]]:
    """Return ordinary texts of kinds and sources of which the package holds nothing."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from wordnet_pack.wordnet import WordNet, find_wordnet

    wordnet = WordNet.read(find_wordnet(None))
    examples = [text for synset in wordnet.synsets.values() for text in synset.examples if len(text.split()) > 4]
    random.Random(1).shuffle(examples)
    kinds = {
        "BBC news": [text.text for text in bbc()],
        "ham mails": [text.text for text in mails(_CHARS) if text.label == "ham"],
        "Python's library": [text.text[len(text.text) // 3 :] for text in library()],
        "Django's manual": [text.text for text in framework(".txt") if "/docs/" in text.id],
        "WordNet's examples": [" ".join(examples[i : i + 24]) + "." for i in range(0, 24 * _TEXTS, 24)],
    }
    chosen = {}
    for kind, texts in kinds.items():
        texts = [text[:_CHARS] for text in texts if len(text) > _CHARS // 2]
        random.Random(2).shuffle(texts)
        chosen[kind] = texts[:_TEXTS]
    return chosen


def alarms_on(pack: Any, model: Any, tokenizer: Any, read: Any = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by kind of real text and concept the texts over the pack's threshold of running scores, by the engine.

    `read`: by kind and number of the text, concepts that stand in it, surely or perhaps: it is left out for these
    """
    manager = DynamicProbeManager(pack)
    reader = StateReader(model, tokenizer, pack.sites, Reading())
    quality, reads = pack.manifest["quality"]["concepts"], [trained_score(pack, p) for p in range(pack.n_probes)]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, texts in real_kinds().items():
        documents = (Document(i, f"{kind} {i}", text) for i, text in enumerate(texts))
        alarms, n_texts, n_tokens = dict.fromkeys(quality, 0), dict.fromkeys(quality, 0), list[int]()
        for document, tokens, states in reader.states(shards(documents)):
            scores = manager.score_all(states).cpu().numpy()
            n_tokens.append(len(tokens))
            told = read[kind][str(document.index)] if read else {"present": (), "unsure": ()}
            highest = highest_trained(reads, scores)
            for p, concept in enumerate(pack.concepts):
                id = concept["id"]
                threshold = quality[id]["alert_of_texts"]["threshold"]
                if threshold is not None and id not in (*told["present"], *told["unsure"]):
                    n_texts[id] += 1
                    alarms[id] += bool(highest[p] > threshold)
        found[kind] = {
            id: {
                "alarms": n,
                "texts": n_texts[id],
                "mean_tokens": round(float(np.mean(n_tokens)), 1),
                "stated": quality[id]["alert_of_texts"]["new_kind_high"],
            }
            for id, n in alarms.items()
            if n_texts[id]
        }
    return found
