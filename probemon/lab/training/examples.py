"""Reads what probes are trained on: labelled texts, pairs, character spans, chats, concepts with examples.

    examples = read_examples(["mails.jsonl", "concepts.yaml"])      # or an iterable of dicts
    examples.concepts["spam"].parents, examples.texts[0].labels     # {"spam": True}

A row is one of these; other fields of it are left alone:

- `{"text": "...", "labels": ["spam"], "not": ["sells"]}`: what the whole text is, and what it is not. A concept in
  neither is unknown, which is not the same as absent; with `exclusive` it is absent.
- `{"positive": "...", "negative": "...", "concept": "spam"}`: two texts that differ in the concept.
- `{"text": "...", "spans": [{"start": 4, "end": 9, "concept": "whale"}]}`: characters of the text. Its other tokens are
  without the concepts of its spans, or unknown where `"rest"` is `"unknown"`.
- `{"messages": [...], "labels": [...]}`: a chat of OpenAI's form (with `tools`, where it has some), in the host's own
  template; the labels are of the turns trained on.
- in YAML, a list of concepts: `id`, `name`, `definition`, `parents`, `examples`, `counterexamples`. Its examples are
  without the concepts beside it: those that share a parent, or without parents all others that have none.

A text with a concept is one with all above it, a text without one is without all below it.

`"group"` holds together what must not be trained on and tested on both: an author, a document, a template. JSON lines,
CSV (labels separated by ";"), parquet and YAML are read. A row that is wrong is an error that names it.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.errors import ChatRefused, TrainingError
from probemon.host.chat_forms import check_said, normalised
from probemon.lab.training.example_files import Source, read_rows
from probemon.packs.manifest import CONTROL
from probemon.util.counted import counted

RESTS = ("negative", "unknown")
ROLES = ("user", "assistant", "system", "developer", "tool")
_CONCEPT_KEYS = {"id", "name", "definition", "parents", "examples", "counterexamples"}
_ROW_KEYS = ("text", "label", "labels", "not", "group", "spans", "rest", "messages", "positive", "negative", "concept")
_INSTRUCT = ("system", "developer")  # roles of what many chats begin with
_NO_NAMES = {"0", "1", "true", "false", "yes", "no"}  # of concepts
_SPAN_KEYS = {"start", "end", "concept", "is"}
# Fields of one kind of row, and those that would say something else beside them and be left out.
_ALONE = {
    "positive": ("text", "messages", "spans", "rest", "label", "labels", "not"),
    "messages": ("text", "spans", "rest"),
}


@dataclass(frozen=True)
class Concept:
    """A concept by its id, with what people call it and the ids of those above it."""

    id: str
    name: str
    parents: tuple[str, ...] = ()
    definition: str = ""


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` of a text that are of a concept, or (`positive` False) are not."""

    start: int
    end: int
    concept: str
    positive: bool = True


@dataclass(frozen=True)
class Example:
    """A text, or a chat, and what is known of it.

    - `where`: its file and row, for messages.
    - `labels`: concepts of all of it that counts, True or False; what is not there is unknown.
    - `spans`, `rest`: of its characters, and what the others are: "negative" or "unknown".
    - `outside`: by concept, what is absent outside of all its spans: itself and what is below it.
    - `group`: what it belongs to; None where it says nothing.
    - `of_concept`: it is an example that a concept gives of itself.
    - `generated`: the model wrote it.
    - `tools`: of a chat, those that its template is told.
    """

    where: str
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, bool] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    rest: str = "negative"
    outside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    group: str | None = None
    of_concept: bool = False
    generated: bool = False
    tools: tuple[Any, ...] = ()

    @property
    def content(self) -> str:
        """What it says, by which copies are found: of a chat the turns, without what every chat begins with."""
        return self.text or "\n".join(turn["content"] for turn in self.messages if turn["role"] not in _INSTRUCT)

    @property
    def named(self) -> Iterator[str]:
        """The concepts that it names."""
        yield from self.labels
        for span in self.spans:
            yield span.concept


@dataclass(frozen=True)
class Examples:
    """Concepts by id in the order of their first mention, those of YAML first; `above`, the ids above each; and the
    examples of them, with all that follows from the hierarchy.
    """

    concepts: Mapping[str, Concept]
    above: Mapping[str, frozenset[str]]
    texts: tuple[Example, ...]

    def known(self) -> npt.NDArray[np.int8]:
        """Return what is known of each text `[N, P]`: 1 where a concept is in it, 0 where it is not, -1 unknown."""
        known = np.full((len(self.texts), len(self.concepts)), -1, dtype=np.int8)
        place = {id: p for p, id in enumerate(self.concepts)}
        for row, example in zip(known, self.texts, strict=True):
            for span in example.spans:
                row[place[span.concept]] = max(row[place[span.concept]], int(span.positive))
            for id, there in example.labels.items():
                row[place[id]] = max(row[place[id]], int(there))
        return known

    def extended(self, more: Iterable[Example]) -> Examples:
        """Return these and more examples of the same concepts, with all that follows from the hierarchy."""
        follows, beside = _follows(self.above), _beside(self.concepts)
        closed = (_closed(example, self.concepts, follows, beside, exclusive=False) for example in more)
        return replace(self, texts=(*self.texts, *closed))


def read_examples(
    sources: Source | Sequence[str | os.PathLike[str]],
    *,
    exclusive: bool = False,
    text_field: str = "text",
    labelled: bool = True,
    like: Examples | None = None,
) -> Examples:
    """Read the examples of files, or of an iterable of dicts.

    - `exclusive`: a text has its labels and no other concept
    - `text_field`: the name of the text in rows, whatever else they have
    - `labelled`: whether something has to be known of each text
    - `like`: examples whose concepts and hierarchy these have, whatever they say themselves

    Raises `TrainingError`.
    """
    declared: dict[str, Concept] = {}
    here: set[str] = set()
    texts: list[Example] = []
    if like is not None:
        declared.update(like.concepts)
    for where, given in read_rows(sources):
        row = {key: value for key, value in given.items() if not _is_missing(value)}
        if text_field in row:
            row["text"] = row.pop(text_field)
        elif "text" in row:
            raise TrainingError(f"{where} has no {text_field!r}, from which texts are to be read (--text-field)")
        if not {"text", "messages", "positive"} & set(row) and {"examples", "definition"} & set(row):
            concept, of_concept = _concept(row, where)
            if concept.id in here:
                raise TrainingError(f"{where}: the concept {concept.id!r} is there twice")
            here.add(concept.id)
            if like is None:
                declared[concept.id] = concept
            texts += of_concept
        else:
            texts += _example(row, where)
    concepts = dict(declared)
    for example in texts:
        for id in example.named:
            concepts.setdefault(id, Concept(id, id))
    for concept in concepts.values():
        _check_concept(concept)
    above = _above(concepts)
    if not texts:
        raise TrainingError(
            "there is no example: give texts with labels, pairs, spans, chats or concepts with examples"
        )
    if labelled:
        _check_named(texts, concepts)
        if not exclusive:
            _check_known(texts)
    follows, beside = _follows(above), _beside(concepts)
    closed = tuple(_closed(example, concepts, follows, beside, exclusive) for example in texts)
    _check_of_concepts(closed)
    return Examples(concepts, above, closed)


def _check_concept(concept: Concept) -> None:
    """Raise `TrainingError`, before any work is done, for what no pack can hold."""
    for text in (concept.id, concept.name):
        if CONTROL.search(text):
            raise TrainingError(
                f"a concept is called {ascii(text)[:100]}: give a text without control characters, on which a terminal"
                " would act"
            )
    twice = [parent for parent, n in Counter(concept.parents).items() if n > 1]
    if twice:
        raise TrainingError(f"the concept {concept.id!r} has the parent {twice[0]!r} twice: give it once")


def _above(concepts: Mapping[str, Concept]) -> dict[str, frozenset[str]]:
    """Return the ids above each concept. Raises `TrainingError` for parents that are not there, and for a circle."""
    for id, concept in concepts.items():
        for parent in concept.parents:
            if parent not in concepts:
                raise TrainingError(f"the concept {id!r} has the parent {parent!r}, of which nothing is said")
    above: dict[str, frozenset[str]] = {}
    try:
        for id in TopologicalSorter({id: concept.parents for id, concept in concepts.items()}).static_order():
            parents = concepts[id].parents
            above[id] = frozenset(parents).union(*(above[parent] for parent in parents))
    except CycleError as error:
        circle = error.args[1][:0:-1]  # without the first, which is the last, too; from below to above
        first = circle.index(min(circle))
        shown = [*circle[first:], *circle[:first], circle[first]]
        raise TrainingError(f"parents go in a circle: {' < '.join(shown)}") from None
    return {id: above[id] for id in concepts}


def _closed(
    example: Example,
    concepts: Mapping[str, Concept],
    follows: Mapping[bool, Mapping[str, Sequence[str]]],
    beside: Mapping[str, frozenset[str]],
    exclusive: bool,
) -> Example:
    """Return an example with all that follows from what it says: what is above a concept is there with it, what is
    below one is absent with it, and where it is of one concept alone, so are those beside that.
    """
    spans = tuple(
        Span(span.start, span.end, id, span.positive)
        for span in example.spans
        for id in follows[span.positive][span.concept]
    )
    # Of what is above a span's concept nothing is said outside: a text of a whale may have other animals.
    of_spans = dict.fromkeys(span.concept for span in example.spans if span.positive)
    outside = {id: follows[False][id] for id in of_spans} if example.rest == "negative" else {}
    labels: dict[str, bool] = {}
    for id, known in example.labels.items():
        for other in follows[known][id]:
            if labels.setdefault(other, known) != known:
                raise TrainingError(
                    f"{example.where}: {other!r} is there and absent at once, by {id!r} and what is above or below it"
                )
    there = {id for id, known in labels.items() if known} | {span.concept for span in spans if span.positive}
    denied: Iterable[str] = ()
    if exclusive and not example.spans:
        denied = concepts
    elif example.of_concept:
        others = frozenset[str]().union(*(beside[id] for id in there))
        denied = [id for id in concepts if id in others]
    for id in denied:
        if id not in there:
            for other in follows[False][id]:
                if other not in there:
                    labels.setdefault(other, False)
    return replace(example, labels=labels, spans=spans, outside=outside)


def _beside(concepts: Mapping[str, Concept]) -> dict[str, frozenset[str]]:
    """Return those that share a parent with each concept, itself among them; of one without parents all such."""
    families: dict[str | None, set[str]] = {}
    for id, concept in concepts.items():
        for parent in concept.parents or (None,):
            families.setdefault(parent, set()).add(id)
    shared = {parent: frozenset(family) for parent, family in families.items()}
    found: dict[str, frozenset[str]] = {}
    for id, concept in concepts.items():
        first, *others = (shared[parent] for parent in concept.parents or (None,))
        found[id] = first.union(*others) if others else first  # of thousands side by side not a copy each
    return found


def _follows(above: Mapping[str, frozenset[str]]) -> dict[bool, dict[str, list[str]]]:
    """Return what is there with each concept (True: it and what is above it), and what is absent with it (False)."""
    below: dict[str, list[str]] = {id: [] for id in above}
    for id, ancestors in above.items():
        for ancestor in ancestors:
            below[ancestor].append(id)
    return {
        True: {id: [id, *sorted(ancestors)] for id, ancestors in above.items()},
        False: {id: [id, *sorted(descendants)] for id, descendants in below.items()},
    }


def _check_named(texts: Sequence[Example], concepts: Mapping[str, Concept]) -> None:
    """Raise `TrainingError` for examples without a concept: there is nothing to train, whatever is exclusive."""
    if not concepts:
        raise TrainingError(
            f"no row names a concept ({counted(len(texts), 'row')}, the first is {texts[0].where}): give rows 'labels',"
            ' such as {"text": "...", "labels": ["spam"]}, or pairs, spans or concepts with examples'
        )


def _check_known(texts: Sequence[Example]) -> None:
    """A text of which nothing is known would be left out in silence."""
    silent = [example.where for example in texts if not example.labels and not example.spans]
    if silent:
        more = f" (and of {len(silent) - 1} more)" if silent[1:] else ""
        raise TrainingError(
            f"{silent[0]}: nothing is known of this text{more}: a concept that is not in"
            " 'labels' is unknown, not absent. List it in 'not', or say that labels are exclusive (--exclusive): then a"
            " text has what it lists and nothing else"
        )


def _check_of_concepts(texts: Sequence[Example]) -> None:
    """Raise `TrainingError` for a text that concepts give twice, once of a concept and once not of it."""
    first: dict[str, Example] = {}
    for example in texts:
        other = first.setdefault(" ".join(example.text.split()), example) if example.of_concept else example
        for id in example.labels:
            if other.labels.get(id, example.labels[id]) != example.labels[id]:
                raise TrainingError(
                    f"{example.where} and {other.where} are one text, of {id!r} and not of it: an example of a concept"
                    " is without those beside it. Give it once, as a text with 'labels'"
                )


# -- what a row says -----------------------------------------------------------------------------


def _concept(row: Mapping[str, Any], where: str) -> tuple[Concept, list[Example]]:
    unknown = sorted(set(row) - _CONCEPT_KEYS)
    if unknown:
        raise TrainingError(f"{where} has {unknown[0]!r}: a concept has {', '.join(sorted(_CONCEPT_KEYS))}")
    id = _text(row, "id", where)
    name = _text(row, "name", where) if "name" in row else id
    parents = row.get("parents") or []
    parents = [parents] if isinstance(parents, str) else parents
    definition = row.get("definition") or ""
    if not isinstance(definition, str):
        raise TrainingError(f"{where}: 'definition' is {type(definition).__name__}: give a text")
    concept = Concept(id, name, tuple(_texts(parents, "parents", where)), " ".join(definition.split()))
    examples = [
        Example(f"{where}, {key} {i + 1}", text, labels={id: positive}, of_concept=True)
        for key, positive in (("examples", True), ("counterexamples", False))
        for i, text in enumerate(_texts(row.get(key) or [], key, where))
    ]
    return concept, examples


def _is_missing(value: Any) -> bool:
    """What files have where nothing is: null, or no number."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _check_keys(row: Mapping[str, Any], where: str) -> None:
    """Raise `TrainingError` for a field that is nearly one of ours, or has no place beside another: it would be left
    out in silence.
    """
    for kind, others in _ALONE.items():
        beside = [key for key in others if row.get(key)]
        if kind in row and beside:
            raise TrainingError(f"{where} has {kind!r} and {beside[0]!r}, which say different things: give one of them")
    if row.get("label") and row.get("labels"):
        raise TrainingError(f"{where} has 'label' and 'labels': give one of them")
    if "concept" in row and "positive" not in row:
        raise TrainingError(f"{where} has 'concept', which is for pairs: write it into 'labels', or into 'not'")
    for key in set(row) - set(_ROW_KEYS):
        if key.strip().casefold() in _ROW_KEYS:
            raise TrainingError(f"{where} has {key!r}, which says nothing here: write {key.strip().casefold()!r}")
        near = ["labels"] if key == "concepts" else difflib.get_close_matches(key, _ROW_KEYS, n=1, cutoff=0.85)
        if near and len(near[0]) > 4 and near[0] not in row:
            raise TrainingError(f"{where} has {key!r}, which says nothing here: did you mean {near[0]!r}?")


def _example(row: Mapping[str, Any], where: str) -> list[Example]:
    _check_keys(row, where)
    group = group_of(row.get("group"))
    if "positive" in row and "negative" in row:
        concept = _id(_text(row, "concept", where), where)
        sides = {side: _text(row, side, where) for side in ("positive", "negative")}
        if sides["positive"].split() == sides["negative"].split():
            raise TrainingError(f"{where}: both texts of the pair are the same, so it shows nothing of {concept!r}")
        # By what it says: rows of two files may be called the same.
        own = hashlib.sha256("\0".join(sides.values()).encode("utf-8", "surrogatepass")).hexdigest()
        return [
            Example(where, text, labels={concept: side == "positive"}, group=group or f"pair {own}")
            for side, text in sides.items()
        ]
    labels = _labels(row, where)
    if "messages" in row:
        messages, tools = _messages(row["messages"], where), tuple(_list(row.get("tools") or [], "tools", where))
        return [Example(where, messages=messages, labels=labels, group=group, tools=tools)]
    if "text" not in row:
        raise TrainingError(
            f"{where} has {', '.join(map(repr, list(row)[:5])) or 'no field'}: give 'text' with 'labels' or 'spans',"
            " 'positive' and 'negative' with 'concept', or 'messages' with 'labels'"
        )
    text = _text(row, "text", where)
    rest = row.get("rest", "negative")
    if rest not in RESTS:
        raise TrainingError(f"{where}: 'rest' is {rest!r}: give one of {', '.join(RESTS)}")
    spans = tuple(_span(span, text, where) for span in _list(row.get("spans") or [], "spans", where))
    return [Example(where, text, labels=labels, spans=spans, rest=rest, group=group)]


def group_of(value: Any) -> str | None:
    """Return the group that a row names, None where it names none."""
    if _is_missing(value):
        return None
    # Where a column of numbers has gaps, tables make 1.0 of the 1 that another file has.
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value).strip() or None


def _labels(row: Mapping[str, Any], where: str) -> dict[str, bool]:
    positive = row.get("labels", row.get("label", []))
    if isinstance(positive, Mapping):
        if row.get("not"):
            raise TrainingError(f"{where}: 'labels' says itself what is false, so 'not' has no place beside it")
        if not all(isinstance(value, bool) for value in positive.values()):
            raise TrainingError(f"{where}: 'labels' has a value that is neither true nor false")
        return {_id(str(id), where): bool(value) for id, value in positive.items()}
    sides = []
    for side, name in ((positive, "labels"), (row.get("not", []), "not")):
        if isinstance(side, str) and ";" in side:  # what takes apart the cells of a table would be one concept here
            raise TrainingError(f"{where}: {name!r} is {side!r:.80}: give a list, [...], of concepts")
        given = _texts([str(side)] if isinstance(side, (str, int)) else side, name, where)
        sides.append([_id(id, where) for id in given])
    both = sorted(set(sides[0]) & set(sides[1]))
    if both:
        raise TrainingError(f"{where}: {both[0]!r} is in 'labels' and in 'not'")
    return {**dict.fromkeys(sides[0], True), **dict.fromkeys(sides[1], False)}


def _id(text: str, where: str) -> str:
    id = text.strip()
    if id.casefold() in _NO_NAMES:
        raise TrainingError(
            f"{where}: {id!r} names no concept: write a concept's name into 'labels' where it is there, and into 'not'"
            " where it is not"
        )
    return id


def _messages(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    try:
        check_said(_list(value, "messages", where), ROLES)
        return tuple(normalised(_list(value, "messages", where)))
    except ChatRefused as error:
        raise TrainingError(f"{where}: {error}") from None


def _span(value: Any, text: str, where: str) -> Span:
    n_chars = len(text)
    if not isinstance(value, Mapping) or set(value) - _SPAN_KEYS:
        raise TrainingError(f"{where}: a span has 'start', 'end' and 'concept', and 'is': false where it is not of it")
    start, end, positive = value.get("start"), value.get("end"), value.get("is", True)
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start < end <= n_chars:
        raise TrainingError(f"{where}: a span is from {start!r} to {end!r} of {n_chars} characters")
    if not isinstance(positive, bool):
        raise TrainingError(f"{where}: 'is' of a span is {positive!r}: give true or false")
    if not text[start:end].strip():
        raise TrainingError(f"{where}: the span from {start} to {end} holds nothing but space")
    # A space at its end is of the next word's token.
    start, end = end - len(text[start:end].lstrip()), start + len(text[start:end].rstrip())
    return Span(start, end, _id(_text(value, "concept", where), where), positive)


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise TrainingError(f"{where}: {key!r} is {'missing' if value is None else repr(value)[:60]}: give a text")
    return value


def _list(value: Any, key: str, where: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        kind = "a text" if isinstance(value, str) else type(value).__name__
        raise TrainingError(f"{where}: {key!r} is {kind}: give a list")
    return list(value)


def _texts(value: Any, key: str, where: str) -> list[str]:
    values = _list(value, key, where)
    for item in values:
        if not isinstance(item, str) or not item.strip():
            raise TrainingError(f"{where}: {key!r} holds {item!r}: give texts")
    return values
