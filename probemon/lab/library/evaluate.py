"""Judges a fitted pack by the library's tests, which second authors wrote and which train nothing.

    library = Library.open()
    rows = inside_ordinary(library.tests(library.chosen()))
    found = evaluate(ProbePack.open("my-concepts"), model, tokenizer, rows)
    found["threat"]["short"]["auroc"], found["threat"]["long"]["found"]

*Short*: tests as they are. *Long*: one or two sentences of a test inside other text, where each pair stands at the same
place of the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from probemon.core.aggregate import Aggregator, over
from probemon.core.hierarchy import Ints
from probemon.errors import ConfigError
from probemon.lab.training.evaluation import judge, share
from probemon.lab.training.examples import Examples, read_examples
from probemon.lab.training.labels import Known
from probemon.lab.training.ordinary import corpus
from probemon.lab.training.state_store import TextReader, shards_of
from probemon.lab.training.texts import render
from probemon.manager import DynamicProbeManager
from probemon.packs.group import trained_score
from probemon.packs.pack import ProbePack

INSERT = "insert"  # the genre of tests that stand inside other text
ROLES = ("user", "assistant")
_PROSE = ("en", "de", "fr", "es", "it", "pt")
_WORDS, _CODE_CHARS = (270, 420), 1_900  # of other text
_ORDINARY = ("news", "mail")
Row = Mapping[str, Any]


def inside(rows: Sequence[Row], prose: Sequence[str], code: Sequence[str], *, seed: int = 5) -> list[dict[str, Any]]:
    """Return rows by labels, those of the genre `insert` inside `prose`, or, if they are code, inside `code`."""
    generator, found = random.Random(seed), list[dict[str, Any]]()
    places: dict[str, tuple[list[str], int, str]] = {}
    for row in rows:
        plain = {key: value for key, value in row.items() if key != "spans"}
        if row.get("spans"):
            plain["present"] = list(row["spans"])
        if row["genre"] == INSERT:
            group = str(row["group"])
            if group not in places:
                is_code = row["lang"] not in _PROSE
                texts = code if is_code else prose
                parts, separator = parts_of(texts[len(places) % len(texts)], generator, is_code=is_code)
                places[group] = parts, max(1, int(len(parts) * generator.uniform(0.3, 0.75))), separator
            plain = in_text(plain, *places[group])
        found.append(plain)
    return found


def inside_ordinary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows as `inside` does, inside news, mails and code of the package's ordinary text."""
    by_kind = corpus()
    prose = [example.text for kind in _ORDINARY for example in by_kind[kind] if example.text]
    return inside(rows, prose, [example.text for example in by_kind["code"] if example.text])


def parts_of(text: str, generator: random.Random, *, is_code: bool) -> tuple[list[str], str]:
    """Return the pieces of a text, between which an example may stand, and what joins them."""
    if is_code:
        begin = text.find("\n", len(text) // 3) + 1 if len(text) > 2 * _CODE_CHARS else 0
        return text[begin : begin + _CODE_CHARS].split("\n"), "\n"
    words = text.split(" ")[: generator.randint(*_WORDS)]
    return " ".join(words).replace(". ", ".\n").split("\n"), " "


def in_text(row: Row, parts: list[str], at: int, separator: str) -> dict[str, Any]:
    """Return a row whose text, or last turn, stands between the pieces of an ordinary text."""

    def whole(said: str) -> str:
        return separator.join([*parts[:at], said, *parts[at:]])

    if "text" in row:
        return {**row, "text": whole(row["text"])}
    *before, last = row["messages"]  # the turn with the concept, or its near case
    return {**row, "messages": [*before, {**last, "content": whole(last["content"])}]}


def evaluate(
    pack: ProbePack,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    *,
    roles: Sequence[str] = ROLES,
    see: Callable[[Examples, np.ndarray], object] = lambda examples, scores: None,
    progress: Callable[[int, int], object] = lambda n, total: None,
) -> dict[str, dict[str, Any]]:
    """Return by concept of the pack and by "short" and "long" its AUROC, with an interval, its share found at the
    pack's threshold, and the share of near cases over it.

    - `rows`: tests with labels of these concepts; other concepts are left out
    - `roles`: turns of a chat that count
    - `see`: gets the examples and the highest running score of each text and concept `[N, P]`

    Raises `ConfigError` for a pack that names no running scores, `TrainingError`.
    """
    reads = [trained_score(pack, probe) for probe in range(pack.n_probes)]
    if not any(reads):
        raise ConfigError(f"the pack {pack.name} names no running scores: give one of `probemon library fit`")
    ids = [concept["id"] for concept in pack.concepts]
    declared = [{"id": id, "name": id, "examples": []} for id in ids]
    examples = read_examples([*declared, *filter(None, (_of(row, ids) for row in rows))])
    texts = render(examples.texts, tokenizer, roles=roles)
    scores = np.full((len(texts), pack.n_probes), np.nan)
    manager, reader = DynamicProbeManager(pack), TextReader(model, tokenizer, pack.sites)
    sizes, done = [len(text.text) for text in texts], 0
    for states_of, places in reader.kinds(texts):
        for document, tokens, states in states_of.states(shards_of(texts, places)):
            i = places[document.index]
            values = manager.score_all(states).cpu().numpy()[texts[i].counts(tokens)]
            done += sizes[i]
            progress(done, sum(sizes))
            if len(values):
                scores[i] = highest_trained(reads, values)
    see(examples, scores)
    return _figures(pack, examples, scores)


def highest_trained(reads: Sequence[Aggregator | None], scores: np.ndarray) -> np.ndarray:
    """Return the highest running score `[P]` of token scores `[T, P]`; NaN for concepts not trained for one."""
    highest = np.full(len(reads), np.nan)
    for aggregator in {one for one in reads if one is not None}:
        columns = [p for p, one in enumerate(reads) if one == aggregator]
        highest[columns] = over(aggregator, scores[:, columns]).max(axis=0)
    return highest


def _of(row: Row, ids: Sequence[str]) -> dict[str, Any] | None:
    """Return a row with its labels of these concepts; None without any."""
    labels = {key: [id for id in row.get(key, ()) if id in ids] for key in ("present", "absent", "unsure")}
    return {**row, **labels} if labels["present"] or labels["absent"] else None


def _figures(pack: ProbePack, examples: Examples, scores: np.ndarray) -> dict[str, dict[str, Any]]:
    group, labels = groups_of(examples), test_labels(examples)
    found: dict[str, dict[str, Any]] = {}
    for p, concept in enumerate(pack.concepts):
        aggregator, own = trained_score(pack, p), scores[:, p]
        threshold = np.nan if aggregator is None else float(pack.thresholds_for(aggregator)[p])
        found[concept["id"]] = {}
        for name, known in labels.items():
            present, absent = (known[:, p] == 1) & ~np.isnan(own), (known[:, p] == 0) & ~np.isnan(own)
            found[concept["id"]][name] = {
                **judge(own, known[:, p], group).as_dict(),
                "found": share(own[present] > threshold, group[present]),
                "near_over": share(own[absent] > threshold, group[absent]),
            }
    return found


def test_labels(examples: Examples) -> dict[str, Known]:
    """Return labels `[N, P]` of "short" and "long" tests: 1 present, 0 a near case of the concept's own file, or -1."""
    known = examples.known()
    is_long = np.asarray([example.fields.get("genre") == INSERT for example in examples.texts])
    groups = [str(example.group) for example in examples.texts]
    near = np.stack([[group.startswith(f"{id}-") for group in groups] for id in examples.concepts], axis=1)
    judged = np.where((known == 1) | ((known == 0) & near), known, np.int8(-1))
    return {name: np.where(use[:, None], judged, np.int8(-1)) for name, use in (("short", ~is_long), ("long", is_long))}


def groups_of(examples: Examples) -> Ints:
    """Return a number for each pair `[N]`; a text without a group is one of its own."""
    names = [example.group or example.where for example in examples.texts]
    return np.unique(names, return_inverse=True)[1]
