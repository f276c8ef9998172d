"""Reads training examples.

    examples = read_examples(["mails.jsonl", "concepts.yaml"])      # or an iterable of dicts
    examples.concepts["spam"].parents, examples.texts[0].labels     # {"spam": True}

Kinds of rows; other fields are ignored:

- `{"text": "...", "labels": ["spam"], "not": ["sells"]}`: a text. Unlisted concepts are unknown; with `exclusive`,
  absent.
- `{"positive": "...", "negative": "...", "concept": "spam"}`: two texts, or two lists of messages, that differ in the
  concept.
- `{"text": "...", "spans": [{"start": 4, "end": 9, "concept": "whale"}]}`: characters of a text. Elsewhere the concepts
  are absent, or unknown if `"rest"` is `"unknown"`. Shorter: `"spans": {"whale": [[4, 9]]}`.
- `{"messages": [...], "labels": [...]}`: a chat in OpenAI's form (also `tools`), or in another of
  `probemon.host.chat_shapes`; the labels are of the trained turns. Its spans also have a `"turn"`: the number of the
  message, from 0.
- in YAML, concepts: `id`, `name`, `definition`, `parents`, `examples`, `counterexamples`. Examples are without the
  sibling concepts.

`present` and `absent` are other names of `labels` and `not`; a concept in `unsure` is unknown on purpose: it neither
trains nor tests.

A text with a concept also has its ancestors; one without it has none of its descendants. A `"group"` (author, document,
template) is not split. Other fields (`author`, `genre`) can be held out. Files: JSON lines, CSV (labels separated by
";"), parquet, YAML, and what `probemon.util.row_files` reads.
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
from probemon.host.chat_shapes import FIELDS, chats_as, check_shape, shape_of
from probemon.lab.training.example_files import Source, read_rows
from probemon.packs.manifest import CONTROL
from probemon.util.counted import counted

RESTS = ("negative", "unknown")
_CONCEPT_KEYS = {"id", "name", "definition", "parents", "examples", "counterexamples"}
_ROW_KEYS = (
    "text", "label", "labels", "present", "not", "absent", "unsure", "group", "spans", "rest", "messages", "positive",
    "negative", "concept", "tools",
)  # fmt: skip
_INSTRUCT = ("system", "developer")
_NO_NAMES = {"0", "1", "true", "false", "yes", "no"}  # not names of concepts
_SPAN_KEYS = {"start", "end", "concept", "is", "turn"}
# Fields that contradict each other.
_ALONE = {
    "positive": ("text", "messages", "spans", "rest", "label", "labels", "not", "present", "absent", "unsure"),
    "messages": ("text",),
    "label": ("labels", "present"),
    "labels": ("present",),
    "not": ("absent",),
}


@dataclass(frozen=True)
class Concept:
    """A concept: id, display name, ids of its parents."""

    id: str
    name: str
    parents: tuple[str, ...] = ()
    definition: str = ""


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` of a text, or of a chat's turn, with a concept, or (`positive` False) without."""

    start: int
    end: int
    concept: str
    positive: bool = True
    turn: int | None = None


@dataclass(frozen=True)
class Example:
    """A text or chat with its labels.

    - `where`: file and row.
    - `labels`: concepts of all counted tokens; others are unknown.
    - `spans`, `rest`: labels of characters; "negative" or "unknown".
    - `outside`: by concept, the ids absent outside of its spans.
    - `of_concept`: given by a concept.
    - `generated`: written by the model.
    - `tools`: for the chat template.
    - `unsure`: concepts that are unknown on purpose.
    - `fields`: other fields of its row.
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
    unsure: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)

    def value_of(self, name: str) -> str | None:
        """Return the value of a field, or of `group`."""
        return self.group if name == "group" else self.fields.get(name)

    def said_in(self, span: Span) -> str:
        """Return the characters of a span."""
        content: str = self.text if span.turn is None else self.messages[span.turn]["content"]
        return content[span.start : span.end]

    @property
    def content(self) -> str:
        """Its text for finding copies, without instructions of a chat."""
        return self.text or "\n".join(turn["content"] for turn in self.messages if turn["role"] not in _INSTRUCT)

    @property
    def named(self) -> Iterator[str]:
        """Its concepts."""
        yield from self.labels
        yield from self.unsure
        for span in self.spans:
            yield span.concept


@dataclass(frozen=True)
class Examples:
    """Concepts by id; `above`, the ids above each; and examples completed by the hierarchy."""

    concepts: Mapping[str, Concept]
    above: Mapping[str, frozenset[str]]
    texts: tuple[Example, ...]

    def known(self) -> npt.NDArray[np.int8]:
        """Return labels `[N, P]` of each text: 1 present, 0 absent, -1 unknown."""
        return self.known_of(self.texts)

    def known_of(self, texts: Sequence[Example]) -> npt.NDArray[np.int8]:
        """Return labels `[N, P]` of these texts."""
        known = np.full((len(texts), len(self.concepts)), -1, dtype=np.int8)
        place = {id: p for p, id in enumerate(self.concepts)}
        for row, example in zip(known, texts, strict=True):
            for span in example.spans:
                row[place[span.concept]] = max(row[place[span.concept]], int(span.positive))
            for id, present in example.labels.items():
                row[place[id]] = max(row[place[id]], int(present))
        return known

    def extended(self, more: Iterable[Example]) -> Examples:
        """Return these and more examples of the same concepts."""
        follows, siblings = _follows(self.above), _beside(self.concepts)
        closed = (_closed(example, self.concepts, follows, siblings, exclusive=False) for example in more)
        return replace(self, texts=(*self.texts, *closed))


def _of_shapes(row: dict[str, Any], where: str, shape: str) -> Iterator[dict[str, Any]]:
    """Yield a row whose chats are in another form (`shape`, or "" to recognise it) as rows of OpenAI's, or the row."""
    given, shape = shape, shape or ("" if {"text", "positive"} & set(row) else shape_of(row))
    if not shape or (shape == "OpenAI messages" and "messages" in row):
        yield row
        return
    try:
        chats = chats_as(shape, row)
    except ChatRefused as error:
        raise TrainingError(f"{where}, read as {shape}: {error}") from None
    other = FIELDS[shape] | ({"text"} if given else set())
    rest = {name: value for name, value in row.items() if name not in other}
    labelled = sorted({"label", "labels", "present", "not", "absent", "spans"} & set(rest))
    if len(chats) > 1 and labelled:
        raise TrainingError(
            f"{where}, read as {shape}, has {len(chats)} chats, and {labelled[0]!r} may be of one of them: give a row"
            " for each chat, with 'messages' and its labels"
        )
    for chat in chats:
        said = {"messages": chat.messages, **({"tools": chat.tools} if chat.tools else {})}
        if "spans" in rest:
            said["spans"] = [_renumbered(span, chat.numbers, where) for span in _spans(rest, where)]
        yield {**rest, **said, **({"part": chat.part} if chat.part else {})}


def _renumbered(span: Any, numbers: Sequence[int | None], where: str) -> Any:
    """Return a span whose turn is that of the converted chat."""
    if not isinstance(span, Mapping) or not isinstance(turn := span.get("turn"), int):
        return span
    places = [at for at, number in enumerate(numbers) if number == turn]
    if len(places) > 1:
        raise TrainingError(
            f"{where}: message {turn} is {len(places)} turns in OpenAI's form, and a span is of one of them: give the"
            " row in that form"
        )
    return {**span, "turn": places[0] if places else turn + len(numbers)}


def read_examples(
    sources: Source | Sequence[str | os.PathLike[str]],
    *,
    exclusive: bool = False,
    text_field: str = "text",
    labelled: bool = True,
    like: Examples | None = None,
    shape: str = "",
    encoding: str = "utf-8",
) -> Examples:
    """Read examples of files, or of an iterable of dicts. Raises `TrainingError`.

    - `exclusive`: a text has no other concepts than its labels
    - `text_field`: field of the text
    - `labelled`: require labels
    - `like`: use the concepts and hierarchy of these examples
    - `shape`: form of all chats, of `probemon.host.chat_shapes.SHAPES`; "" recognises it row by row
    - `encoding`: of texts without a byte order mark
    """
    check_shape(shape, TrainingError)
    declared: dict[str, Concept] = {}
    declared_here: set[str] = set()
    texts: list[Example] = []
    if like is not None:
        declared.update(like.concepts)
    for where, raw in read_rows(sources, encoding):
        row = {key: value for key, value in raw.items() if not _is_missing(value)}
        if text_field in row:
            row["text"] = row.pop(text_field)
        elif "text" in row:
            raise TrainingError(f"{where} has no {text_field!r}, the field of the text (--text-field)")
        if not {"text", "messages", "positive"} & set(row) and {"examples", "definition"} & set(row):
            concept, concept_examples = _concept(row, where)
            if concept.id in declared_here:
                raise TrainingError(f"{where}: the concept {concept.id!r} is there twice")
            declared_here.add(concept.id)
            if like is None:
                declared[concept.id] = concept
            texts += concept_examples
        else:
            for one in _of_shapes(row, where, shape):
                texts += _example(one, where)
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
    follows, siblings = _follows(above), _beside(concepts)
    closed = tuple(_closed(example, concepts, follows, siblings, exclusive) for example in texts)
    _check_of_concepts(closed)
    return Examples(concepts, above, closed)


def _check_concept(concept: Concept) -> None:
    for text in (concept.id, concept.name):
        if CONTROL.search(text):
            raise TrainingError(
                f"a concept is called {ascii(text)[:100]}: give a text without control characters, on which a terminal"
                " would act"
            )
    duplicates = [parent for parent, n in Counter(concept.parents).items() if n > 1]
    if duplicates:
        raise TrainingError(f"the concept {concept.id!r} has the parent {duplicates[0]!r} twice: give it once")


def _above(concepts: Mapping[str, Concept]) -> dict[str, frozenset[str]]:
    """Return the ids above each concept. Raises `TrainingError`."""
    for id, concept in concepts.items():
        for parent in concept.parents:
            if parent not in concepts:
                raise TrainingError(f"the concept {id!r} has the parent {parent!r}, which is not declared")
    above: dict[str, frozenset[str]] = {}
    try:
        for id in TopologicalSorter({id: concept.parents for id, concept in concepts.items()}).static_order():
            parents = concepts[id].parents
            above[id] = frozenset(parents).union(*(above[parent] for parent in parents))
    except CycleError as error:
        circle = error.args[1][:0:-1]  # from below to above
        first = circle.index(min(circle))
        shown = [*circle[first:], *circle[:first], circle[first]]
        raise TrainingError(f"parents go in a circle: {' < '.join(shown)}") from None
    return {id: above[id] for id in concepts}


def _closed(
    example: Example,
    concepts: Mapping[str, Concept],
    follows: Mapping[bool, Mapping[str, Sequence[str]]],
    siblings: Mapping[str, frozenset[str]],
    exclusive: bool,
) -> Example:
    """Return an example completed by the hierarchy."""
    spans = tuple(replace(span, concept=id) for span in example.spans for id in follows[span.positive][span.concept])
    # Ancestors stay unknown outside: a text of a whale may have other animals.
    span_concepts = dict.fromkeys(span.concept for span in example.spans if span.positive)
    outside = {id: follows[False][id] for id in span_concepts} if example.rest == "negative" else {}
    labels: dict[str, bool] = {}
    for id, is_present in example.labels.items():
        for other in follows[is_present][id]:
            if labels.setdefault(other, is_present) != is_present:
                raise TrainingError(
                    f"{example.where}: {other!r} is there and absent at once, by {id!r} and what is above or below it"
                )
    present = {id for id, is_present in labels.items() if is_present} | {
        span.concept for span in spans if span.positive
    }
    denied: Iterable[str] = ()
    if exclusive and not example.spans:
        denied = concepts
    elif example.of_concept:
        others = frozenset[str]().union(*(siblings[id] for id in present))
        denied = [id for id in concepts if id in others]
    for id in denied:
        if id not in present:
            for other in follows[False][id]:
                if other not in present:
                    labels.setdefault(other, False)
    unsure = tuple(dict.fromkeys(other for id in example.unsure for other in follows[False][id]))
    said = [id for id in unsure if id in example.labels or id in span_concepts]
    if said:
        below = "" if said[0] in example.unsure else f", which is below {example.unsure[0]!r},"
        raise TrainingError(f"{example.where}: {said[0]!r}{below} is in 'unsure' and is labelled: give one of them")
    labels = {id: is_present for id, is_present in labels.items() if id not in unsure}
    return replace(example, labels=labels, spans=spans, outside=outside, unsure=unsure)


def _beside(concepts: Mapping[str, Concept]) -> dict[str, frozenset[str]]:
    """Return each concept with its siblings; concepts without parents are siblings."""
    families: dict[str | None, set[str]] = {}
    for id, concept in concepts.items():
        for parent in concept.parents or (None,):
            families.setdefault(parent, set()).add(id)
    shared = {parent: frozenset(family) for parent, family in families.items()}
    siblings: dict[str, frozenset[str]] = {}
    for id, concept in concepts.items():
        first, *others = (shared[parent] for parent in concept.parents or (None,))
        siblings[id] = first.union(*others) if others else first  # avoids thousands of copies
    return siblings


def _follows(above: Mapping[str, frozenset[str]]) -> dict[bool, dict[str, list[str]]]:
    """Return the concepts present (True: ancestors) and absent (False: descendants) with each."""
    below: dict[str, list[str]] = {id: [] for id in above}
    for id, ancestors in above.items():
        for ancestor in ancestors:
            below[ancestor].append(id)
    return {
        True: {id: [id, *sorted(ancestors)] for id, ancestors in above.items()},
        False: {id: [id, *sorted(descendants)] for id, descendants in below.items()},
    }


def _check_named(texts: Sequence[Example], concepts: Mapping[str, Concept]) -> None:
    if not concepts:
        raise TrainingError(
            f"no row names a concept ({counted(len(texts), 'row')}, the first is {texts[0].where}): give rows 'labels',"
            ' such as {"text": "...", "labels": ["spam"]}, or pairs, spans or concepts with examples'
        )


def _check_known(texts: Sequence[Example]) -> None:
    unlabelled = [example.where for example in texts if not example.labels and not example.spans]
    if unlabelled:
        others = f" (and of {len(unlabelled) - 1} more)" if unlabelled[1:] else ""
        raise TrainingError(
            f"{unlabelled[0]}: nothing is known of this text{others}: a concept that is not in"
            " 'labels' is unknown, not absent. List it in 'not', or say that labels are exclusive (--exclusive): then a"
            " text has what it lists and nothing else"
        )


def _check_of_concepts(texts: Sequence[Example]) -> None:
    """Raise `TrainingError` for a text that is both an example and a counterexample."""
    first: dict[str, Example] = {}
    for example in texts:
        other = first.setdefault(" ".join(example.text.split()), example) if example.of_concept else example
        for id in example.labels:
            if other.labels.get(id, example.labels[id]) != example.labels[id]:
                raise TrainingError(
                    f"{example.where} and {other.where} are one text, of {id!r} and not of it: an example of a concept"
                    " is without its siblings. Give it once, as a text with 'labels'"
                )


# Rows


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
    return value is None or (isinstance(value, float) and math.isnan(value))


def _check_keys(row: Mapping[str, Any], where: str) -> None:
    """Raise `TrainingError` for misspelt or conflicting fields."""
    for kind, others in _ALONE.items():
        conflicts = [key for key in others if row.get(key)]
        if kind in row and conflicts:
            raise TrainingError(
                f"{where} has {kind!r} and {conflicts[0]!r}, which say different things: give one of them"
            )
    if "concept" in row and "positive" not in row:
        raise TrainingError(f"{where} has 'concept', which is for pairs: write it into 'labels', or into 'not'")
    for key in set(row) - set(_ROW_KEYS):
        if key.strip().casefold() in _ROW_KEYS:
            raise TrainingError(f"{where} has {key!r}, which is not a field: write {key.strip().casefold()!r}")
        near = ["labels"] if key == "concepts" else difflib.get_close_matches(key, _ROW_KEYS, n=1, cutoff=0.85)
        if near and len(near[0]) > 4 and near[0] not in row:
            raise TrainingError(f"{where} has {key!r}, which is not a field: did you mean {near[0]!r}?")


def _example(row: Mapping[str, Any], where: str) -> list[Example]:
    _check_keys(row, where)
    group = group_of(row.get("group"))
    fields = {key: text for key, value in row.items() if key not in _ROW_KEYS and (text := group_of(value)) is not None}
    if "positive" in row and "negative" in row:
        return _pair(row, where, group, fields)
    labels, unsure = _labels(row, where), tuple(_ids(row.get("unsure") or [], "unsure", where))
    rest = row.get("rest", "negative")
    if rest not in RESTS:
        raise TrainingError(f"{where}: 'rest' is {rest!r}: give one of {', '.join(RESTS)}")
    if "messages" in row:
        messages, tools = _messages(row["messages"], where), tuple(_list(row.get("tools") or [], "tools", where))
        spans = tuple(_turn_span(span, messages, where) for span in _spans(row, where))
        chat = Example(where, messages=messages, labels=labels, spans=spans, rest=rest, group=group, unsure=unsure)
        return [replace(chat, tools=tools, fields=fields)]
    if "text" not in row:
        raise TrainingError(
            f"{where} has {', '.join(map(repr, list(row)[:5])) or 'no field'}: give 'text' with 'labels' or 'spans',"
            " 'positive' and 'negative' with 'concept', or 'messages' with 'labels'"
        )
    text = _text(row, "text", where)
    spans = tuple(_span(span, text, where) for span in _spans(row, where))
    return [Example(where, text, labels=labels, spans=spans, rest=rest, group=group, unsure=unsure, fields=fields)]


def _pair(row: Mapping[str, Any], where: str, group: str | None, fields: Mapping[str, str]) -> list[Example]:
    concept = _id(_text(row, "concept", where), where)
    sides = {}
    for side in ("positive", "negative"):
        if isinstance(row[side], str):
            sides[side] = Example(where, _text(row, side, where))
        else:
            tools = tuple(_list(row.get("tools") or [], "tools", where))
            sides[side] = Example(where, messages=_messages(row[side], where), tools=tools)
    contents = [side.content for side in sides.values()]
    if contents[0].split() == contents[1].split():
        raise TrainingError(f"{where}: both texts of the pair are the same, so it shows nothing of {concept!r}")
    # By content, because file names may repeat.
    digest = hashlib.sha256("\0".join(contents).encode("utf-8", "surrogatepass")).hexdigest()
    return [
        replace(one, labels={concept: side == "positive"}, group=group or f"pair {digest}", fields=fields)
        for side, one in sides.items()
    ]


def _spans(row: Mapping[str, Any], where: str) -> list[Any]:
    """Return the spans of a row; those given by concept as a list."""
    spans = row.get("spans") or []
    if not isinstance(spans, Mapping):
        return _list(spans, "spans", where)
    found = []
    for concept, places in spans.items():
        for place in _list(places, "spans", where):
            if isinstance(place, Mapping):
                found.append({**place, "concept": concept})
            elif isinstance(place, (list, tuple)) and len(place) == 2:
                found.append({"start": place[0], "end": place[1], "concept": concept})
            else:
                raise TrainingError(f"{where}: a span of {concept!r} is {place!r}: give [start, end]")
    return found


def group_of(value: Any) -> str | None:
    """Return the group of a row, or None."""
    if _is_missing(value):
        return None
    # Tables turn 1 into 1.0 if a column of numbers has gaps.
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value).strip() or None


def _labels(row: Mapping[str, Any], where: str) -> dict[str, bool]:
    positive = row.get("labels", row.get("label", row.get("present", [])))
    if isinstance(positive, Mapping):
        if row.get("not") or row.get("absent"):
            raise TrainingError(f"{where}: 'labels' has false values already, so leave 'not' out")
        if not all(isinstance(value, bool) for value in positive.values()):
            raise TrainingError(f"{where}: 'labels' has a value that is neither true nor false")
        return {_id(str(id), where): bool(value) for id, value in positive.items()}
    sides = [_ids(positive, "labels", where), _ids(row.get("not", row.get("absent", [])), "not", where)]
    contradictory = sorted(set(sides[0]) & set(sides[1]))
    if contradictory:
        raise TrainingError(f"{where}: {contradictory[0]!r} is in 'labels' and in 'not'")
    return {**dict.fromkeys(sides[0], True), **dict.fromkeys(sides[1], False)}


def _ids(value: Any, name: str, where: str) -> list[str]:
    if isinstance(value, str) and ";" in value:
        raise TrainingError(f"{where}: {name!r} is {value!r:.80}: give a list, [...], of concepts")
    ids = _texts([str(value)] if isinstance(value, (str, int)) else value, name, where)
    return [_id(id, where) for id in ids]


def _id(text: str, where: str) -> str:
    id = text.strip()
    if id.casefold() in _NO_NAMES:
        raise TrainingError(
            f"{where}: {id!r} names no concept: write a concept's name into 'labels' if it is there, and into 'not'"
            " if it is not"
        )
    return id


def _messages(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    try:
        check_said(_list(value, "messages", where))
        return tuple(normalised(_list(value, "messages", where)))
    except ChatRefused as error:
        raise TrainingError(f"{where}: {error}") from None


def _turn_span(value: Any, messages: Sequence[Mapping[str, Any]], where: str) -> Span:
    turn = value.get("turn") if isinstance(value, Mapping) else None
    if isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn < len(messages):
        raise TrainingError(
            f"{where}: a span of a chat has a 'turn' from 0 to {len(messages) - 1}, the number of its message, and not"
            f" {turn!r}"
        )
    return replace(_span(value, messages[turn]["content"], where), turn=turn)


def _span(value: Any, text: str, where: str) -> Span:
    n_chars = len(text)
    if not isinstance(value, Mapping) or set(value) - _SPAN_KEYS:
        raise TrainingError(f"{where}: a span has 'start', 'end' and 'concept', and 'is': false if it is not of it")
    start, end, positive = value.get("start"), value.get("end"), value.get("is", True)
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start < end <= n_chars:
        raise TrainingError(f"{where}: a span is from {start!r} to {end!r} of {n_chars} characters")
    if not isinstance(positive, bool):
        raise TrainingError(f"{where}: 'is' of a span is {positive!r}: give true or false")
    if not text[start:end].strip():
        raise TrainingError(f"{where}: the span from {start} to {end} holds nothing but space")
    # A space at the end belongs to the next word's token.
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
