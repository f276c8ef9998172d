"""Training data: texts, their labelled parts, and folds.

    data = Dataset.of_examples(examples, reader, ordinary=ordinary(tokenizer), seed=0)
    data.fold                 # [N]: the fold that a text is left out of; NEVER, OUTSIDE

Groups, pairs, twins and near duplicates share a fold, and so do all ordinary texts of a kind: a text is only judged by
probes that saw nothing of its group or kind. In the end probes learn from everything but `OUTSIDE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.errors import TrainingError
from probemon.host.chat_dates import CHAT_DATE
from probemon.lab.corpora.windows import WindowTokens
from probemon.lab.training.carriers import MOST, in_carriers
from probemon.lab.training.examples import Concept, Example, Examples
from probemon.lab.training.groups import group_examples, split_groups
from probemon.lab.training.labels import Known, parts_of
from probemon.lab.training.ordinary import Ordinary, render_whole
from probemon.lab.training.state_store import TextReader
from probemon.lab.training.texts import Text, after, render
from probemon.util.counted import counted

OWN, CARRIED, ELSEWHERE, ORDINARY, TEMPLATE = range(5)
N_FOLDS = 5
NEVER, OUTSIDE = -1, -2  # trains always and is never judged; never trains
FEWEST_GROUPS = 8
FEWEST_OWN = 4  # if the model writes more


@dataclass(frozen=True)
class Dataset:
    """N texts and their S parts.

    - `texts`, `tokens`, `examples`: of each text
    - `origin [N]`: OWN, CARRIED (own, in ordinary text), ELSEWHERE (second files), ORDINARY or TEMPLATE
    - `kind [N]`: of an ordinary text, in `kinds`; else -1
    - `group`, `fold` `[N]`; `generated [N]`
    - `document [S]`, `positions`: text and tokens of a part; `known [S, P]`: its labels
    - `n_twins`: pairs across labels that were put into one group
    """

    concepts: tuple[Concept, ...]
    parents: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]
    texts: Sequence[Text]
    tokens: Sequence[WindowTokens]
    origin: Ints
    kind: Ints
    group: Ints
    fold: Ints
    generated: Mask
    document: Ints
    positions: Sequence[Ints]
    known: Known
    n_twins: int = 0
    examples: Sequence[Example] = field(default=(), repr=False)

    @cached_property
    def is_tree(self) -> bool:
        """Whether any concept has parents."""
        return any(self.parents)

    @cached_property
    def text_known(self) -> Known:
        """Labels of texts `[N, P]`: 1 if a part has the concept, 0 if all that counts is known to be without it."""
        shape = (len(self.texts), len(self.concepts))
        highest, lowest = np.full(shape, -1, dtype=np.int8), np.full(shape, 1, dtype=np.int8)
        np.maximum.at(highest, self.document, self.known)
        np.minimum.at(lowest, self.document, self.known)
        known: Known = np.where(highest == 1, 1, np.where((highest == 0) & (lowest == 0), 0, -1)).astype(np.int8)
        return known

    @cached_property
    def learnt(self) -> Known:
        """Labels that a concept learns from `[S, P]`: `known`, without parts that have none of its parents."""
        return self._inside(self.known)

    @cached_property
    def judged(self) -> Known:
        """Labels that a concept is judged by `[N, P]`: `text_known`, restricted like `learnt`."""
        return self._inside(self.text_known)

    def _inside(self, known: Known) -> Known:
        labels = known.copy()
        for p, above in enumerate(self.parents):
            if above:
                labels[(known[:, list(above)] == 0).all(axis=1), p] = -1
        return labels

    @cached_property
    def marked(self) -> Mask:
        """Texts that have a concept in part of their counted tokens only `[N, P]`."""
        present = self.known == 1
        mixed = np.zeros((len(self.texts), len(self.concepts)), dtype=bool)
        np.logical_or.at(mixed, self.document, ~present)
        found: Mask = mixed & (self.text_known == 1)
        return found

    @cached_property
    def has_spans(self) -> Mask:
        """Concepts with a marked text `[P]`."""
        found: Mask = np.logical_or.reduce(self.marked, axis=0)
        return found

    def is_of(self, *origins: int) -> Mask:
        """Return which texts are of these origins `[N]`."""
        return np.isin(self.origin, origins)

    @cached_property
    def wanted(self) -> list[Ints]:
        """Labelled tokens of each text, in order."""
        by_text: list[list[Ints]] = [[] for _ in self.texts]
        for document, positions in zip(self.document.tolist(), self.positions, strict=True):
            by_text[document].append(positions)
        return [np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *parts])) for parts in by_text]

    @cached_property
    def _parts_by_place(self) -> tuple[int, Ints, Ints]:
        """Tokens of the longest text, places of all labelled tokens in order, and their parts."""
        width = max((len(tokens) for tokens in self.tokens), default=0) + 1
        places = np.concatenate([i * width + own for i, own in zip(self.document, self.positions, strict=True)])
        parts = np.repeat(np.arange(len(self.positions)), [len(own) for own in self.positions])
        order = np.argsort(places)
        return width, places[order], parts[order]

    def part_of(self, document: Ints, position: Ints) -> Ints:
        """Return the part of each of these labelled tokens."""
        width, places, parts = self._parts_by_place
        found: Ints = parts[np.searchsorted(places, document * width + position)]
        return found

    def text_of(self, document: int) -> str:
        """Return what counts of a text."""
        text = self.texts[document]
        return " ".join(text.text[a:b] for a, b in text.counted or ((0, len(text.text)),))

    @classmethod
    def of_examples(
        cls,
        examples: Examples,
        reader: TextReader,
        *,
        ordinary: Ordinary | None = None,
        outside: Examples | None = None,
        held_out: Mapping[str, Sequence[str]] | None = None,
        roles: Sequence[str] = ("assistant",),
        chat_date: str = CHAT_DATE,
        seed: int = 0,
        most_carried: int = MOST,
    ) -> Dataset:
        """Render, tokenise, group and deal examples. Raises `TrainingError`, for example if a concept has too few."""
        concepts = tuple(examples.concepts.values())
        place = {concept.id: p for p, concept in enumerate(concepts)}
        ordinary = ordinary or Ordinary()
        tokenizer = reader.plain.tokenizer
        tested_only = () if outside is None else outside.texts
        for example in tested_only:
            for id in example.named:
                if id not in place:
                    raise TrainingError(f"{example.where} is of {id!r}, which is not in the training examples")
        own = [*examples.texts, *tested_only]
        rendered = render(own, tokenizer, roles=roles, chat_date=chat_date)
        groups = group_examples(own, rendered, examples.known_of(own))
        is_outside = _held_out(own, held_out or {}) | (np.arange(len(own)) >= len(examples.texts))
        # A whole group is outside if any of its texts is.
        is_outside = np.isin(groups.number, groups.number[is_outside])
        _not_all(is_outside[: len(examples.texts)], held_out or {})
        trains = [i for i in range(len(examples.texts)) if not is_outside[i]]
        # Without character offsets a carrier's end cannot be found among the tokens.
        carriers = ordinary.carriers if getattr(tokenizer, "is_fast", False) else ()
        carried = in_carriers(
            [own[i] for i in trains], groups.number[trains], carriers, roles, seed=seed, most=most_carried
        )
        carried_texts = render([one.example for one in carried], tokenizer, roles=roles, chat_date=chat_date)
        carried_texts = [after(text, one.n_before, one.turn) for one, text in zip(carried, carried_texts, strict=True)]
        plain = [*(example for _, example in ordinary.measured), *ordinary.template]
        everything = [*own, *(one.example for one in carried), *plain]
        texts = [*rendered, *carried_texts, *(render_whole(example, tokenizer, chat_date) for example in plain)]
        origin = np.repeat(
            [OWN, ELSEWHERE, CARRIED, ORDINARY, TEMPLATE],
            [len(examples.texts), len(tested_only), len(carried), len(ordinary.measured), len(ordinary.template)],
        )
        tokens = reader.tokens(texts)
        document, positions, known = list[int](), list[Ints](), list[Known]()
        for i, (example, text, ids) in enumerate(zip(everything, texts, tokens, strict=True)):
            labelled = example if origin[i] < ORDINARY else _ordinary(example, place)
            for part in parts_of(labelled, text, ids, place):
                document.append(i)
                positions.append(part.tokens)
                known.append(part.known)
        kinds = ordinary.kinds
        kind = np.full(len(texts), -1, dtype=np.int64)
        kind[origin == ORDINARY] = [kinds.index(name) for name, _ in ordinary.measured]
        source = np.asarray([trains[one.of] for one in carried], dtype=np.int64)
        group = np.concatenate(
            [
                groups.number,
                groups.number[source],
                groups.number.max(initial=-1) + 1 + np.arange(np.sum(origin >= ORDINARY)),
            ]
        )
        generated = np.asarray([example.generated for example in everything])
        labels = np.asarray(known, dtype=np.int8).reshape(-1, len(place))
        data = cls(
            concepts,
            tuple(tuple(place[parent] for parent in concept.parents) for concept in concepts),
            kinds,
            texts,
            tokens,
            origin,
            kind,
            group,
            np.full(len(texts), NEVER, dtype=np.int64),
            generated,
            np.asarray(document, dtype=np.int64),
            positions,
            labels,
            groups.n_twins,
            everything,
        )
        fold = data._dealt(np.isin(group, group[: len(own)][is_outside]), seed)
        data.fold[:] = fold
        try:
            data._check_enough()
        except TrainingError as error:
            if n := len(np.intersect1d(groups.number[: len(examples.texts)], groups.number[len(examples.texts) :])):
                raise TrainingError(
                    f"the texts of --test are the training's, too: {n} of"
                    f" {counted(len(np.unique(groups.number[: len(examples.texts)])), 'group')} of the training only"
                    f" test, and too few are left: give other texts to test on ({error})"
                ) from error
            raise
        return data

    def _dealt(self, outside: Mask, seed: int) -> Ints:
        """Return the fold of each text `[N]`."""
        fold = np.full(len(self.texts), NEVER, dtype=np.int64)
        own = self.is_of(OWN, CARRIED, ELSEWHERE)
        # Groups with generated texts only train.
        dealt = own & ~outside & ~np.isin(self.group, self.group[self.generated])
        if dealt.any():
            numbers = np.unique(self.group[dealt], return_inverse=True)[1].astype(np.int64)
            shares = {str(k): 1.0 for k in range(N_FOLDS)}
            for k, mask in enumerate(split_groups(numbers, self.text_known[dealt], shares, seed=seed).values()):
                fold[np.flatnonzero(dealt)[mask]] = k
        order = np.random.default_rng([seed, 1]).permutation(len(self.kinds))
        fold_of_kind = np.empty(len(self.kinds), dtype=np.int64)
        fold_of_kind[order] = np.arange(len(self.kinds)) % N_FOLDS
        measured = self.is_of(ORDINARY)
        fold[measured] = fold_of_kind[self.kind[measured]]
        fold[own & outside] = OUTSIDE
        return fold

    def _check_enough(self) -> None:
        for p, concept in enumerate(self.concepts):
            trains = self.is_of(OWN) & (self.fold != OUTSIDE)
            present = (self.text_known[:, p] == 1) & trains
            has_generated = bool((present & self.generated).any())
            n = len(np.unique(self.group[present & (self.fold >= 0)]))
            if n < (FEWEST_OWN if has_generated else FEWEST_GROUPS):
                raise TrainingError(
                    f"the concept {concept.id!r} has examples in {n} group{'' if n == 1 else 's'} (pairs, documents,"
                    " twins and near duplicates count once): "
                    + (
                        f"give {FEWEST_OWN} or more, since what the model wrote does not test it"
                        if has_generated
                        else f"give {FEWEST_GROUPS} or more, or {FEWEST_OWN} and let the model write more (generate=N)"
                    )
                )
        for p in range(len(self.concepts)):
            self._check_absent(p)
            self._check_benign(p)

    def _check_benign(self, p: int) -> None:
        """Thresholds come from ordinary texts, or, if there are none, from own ones, that are without the concept."""
        from_ordinary = bool(self.is_of(ORDINARY).any())
        origin = self.is_of(ORDINARY) if from_ordinary else self.is_of(OWN) & (self.fold >= 0)
        if not (origin & (self.text_known[:, p] == 0)).any():
            raise TrainingError(
                f"no {'ordinary text' if from_ordinary else 'text'} is known to be without {self.concepts[p].id!r} as a"
                " whole, so its threshold cannot be set: "
                + ("leave a kind to it (unknown_in)" if from_ordinary else "give texts in 'not', or ordinary text")
            )

    def _check_absent(self, p: int) -> None:
        id, parents = self.concepts[p].id, self.concepts[p].parents
        absent = (self.learnt[:, p] == 0) & (self.fold[self.document] != OUTSIDE)
        if parents and not absent.any():
            raise TrainingError(
                f"nothing of {' or '.join(map(repr, parents))} is known to be without {id!r}, so they cannot"
                f" be separated: give counterexamples of {id!r}, a sibling concept, or texts with it in 'not'"
            )
        n = len(np.unique(self.group[self.document[absent]]))
        if n < N_FOLDS:
            raise TrainingError(
                f"what is without the concept {id!r} is in {n} group{'' if n == 1 else 's'} (pairs, documents, twins"
                " and near duplicates count once), which is too few to learn from and to judge on: give more in 'not',"
                " counterexamples, or ordinary text"
            )


def _not_all(is_outside: Mask, held_out: Mapping[str, Sequence[str]]) -> None:
    if held_out and is_outside.all():
        names = ", ".join(f"{name}={value}" for name, values in held_out.items() for value in values)
        raise TrainingError(f"{names} holds out every text, with its group: nothing is left to train on")


def _ordinary(example: Example, place: Mapping[str, int]) -> Example:
    """Return an ordinary text labelled: without the concepts that nobody has found in it."""
    labels = {id: example.labels.get(id, False) for id in place if id not in example.unsure}
    return Example(example.where, example.text, labels=labels)


def _held_out(own: Sequence[Example], held_out: Mapping[str, Sequence[str]]) -> Mask:
    """Return which examples have one of these values of a field `[N]`. Raises `TrainingError` for one that none has."""
    out = np.zeros(len(own), dtype=bool)
    for field_name, values in held_out.items():
        for value in values:
            mask = np.asarray([example.value_of(field_name) == value for example in own], dtype=bool)
            if not mask.any():
                raise TrainingError(f"no example has {field_name} {value!r}, which is to be held out")
            out |= mask
    return out
