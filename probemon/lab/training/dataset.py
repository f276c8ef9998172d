"""Training data: parts of texts, their labels, and splits for training, calibration and test.

    data = Dataset.of_examples(examples, reader, background=passages(tokenizer), seed=0)
    data.of("train") & ~data.background         # [S] bool

Groups, pairs and near duplicates stay together. "outside": held-out groups and second files, only tested on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.errors import TrainingError
from probemon.host.chat_dates import CHAT_DATE
from probemon.lab.corpora.windows import WindowTokens
from probemon.lab.training.examples import Concept, Example, Examples
from probemon.lab.training.groups import group_examples, split_groups
from probemon.lab.training.labels import Known, parts_of
from probemon.lab.training.state_store import TextReader
from probemon.lab.training.texts import Text, render
from probemon.util.counted import counted

SHARES = {"train": 0.5, "calibrate": 0.2, "test": 0.3}
OUTSIDE = "outside"
FEWEST_GROUPS = 8  # four to train, one or two each to calibrate and to test
FEWEST_OWN = 4  # if the model writes more


@dataclass(frozen=True)
class Dataset:
    """S parts of N texts.

    - `document [S]`, `positions`: text and tokens of a part; `known [S, P]`.
    - `group`, `split`, `background`, `generated` `[S]`.
    - `of_span [S]`: whether it comes from spans.
    """

    concepts: tuple[Concept, ...]
    parents: tuple[tuple[int, ...], ...]
    texts: list[Text]
    tokens: list[WindowTokens]
    document: Ints
    positions: list[Ints]
    known: Known
    group: Ints
    split: np.ndarray
    background: Mask
    generated: Mask
    of_span: Mask
    whole: Mask = field(repr=False)

    def of(self, *names: str) -> Mask:
        """Return which parts are in these splits `[S]`."""
        return np.isin(self.split, names)

    @cached_property
    def beside_background(self) -> Mask:
        """Concepts with too few negatives, except background, to train and test `[P]`."""
        absent = (self.known == 0) & ~self.background[:, None]
        lacking: Mask = ~np.stack([absent[self.of(name)].any(axis=0) for name in ("train", "test")])
        return np.asarray(lacking.any(axis=0))

    @cached_property
    def compared(self) -> Known:
        """Labels `[S, P]` for comparisons: background, which is easy, only for `beside_background`."""
        known = self.known.copy()
        known[np.ix_(self.background, ~self.beside_background)] = -1
        return known

    @cached_property
    def is_tree(self) -> bool:
        """Whether any concept has parents."""
        return any(self.parents)

    @cached_property
    def wanted(self) -> list[Ints]:
        """Labelled tokens of each text, in order."""
        by_text: list[list[Ints]] = [[] for _ in self.texts]
        for document, positions in zip(self.document.tolist(), self.positions, strict=True):
            by_text[document].append(positions)
        return [np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *parts])) for parts in by_text]

    def part_of(self, document: Ints, position: Ints) -> Ints:
        """Return the part of each of these wanted tokens."""
        width = max((len(tokens) for tokens in self.tokens), default=0) + 1
        places = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [document * width + positions for document, positions in zip(self.document, self.positions, strict=True)]
        )
        parts = np.repeat(np.arange(len(self.positions)), [len(positions) for positions in self.positions])
        order = np.argsort(places)
        matches: Ints = parts[order][np.searchsorted(places[order], document * width + position)]
        return matches

    def text_of(self, part: int) -> str:
        """Return the text of a part."""
        document = int(self.document[part])
        text, tokens, positions = self.texts[document], self.tokens[document], self.positions[part]
        if len(positions) == len(tokens) and text.counted is None:
            return text.text
        if tokens.start.min() < 0:
            return " ".join(text.text[a:b] for a, b in text.counted or ((0, len(text.text)),))
        breaks = np.flatnonzero(np.diff(positions) > 1) + 1
        return " ".join(
            text.text[int(tokens.start[run[0]]) : int(tokens.end[run[-1]])] for run in np.split(positions, breaks)
        )

    @classmethod
    def of_examples(
        cls,
        examples: Examples,
        reader: TextReader,
        *,
        background: Sequence[Example] = (),
        outside: Examples | None = None,
        held_out: Sequence[str] = (),
        roles: Sequence[str] = ("assistant",),
        chat_date: str = CHAT_DATE,
        seed: int = 0,
    ) -> Dataset:
        """Render, tokenise and split examples. Raises `TrainingError`, for example if a concept has too few."""
        concepts = tuple(examples.concepts.values())
        place = {concept.id: p for p, concept in enumerate(concepts)}
        tested_only = () if outside is None else outside.texts
        for example in tested_only:
            for id in example.named:
                if id not in place:
                    raise TrainingError(f"{example.where} is of {id!r}, which is not in the training examples")
        missing = sorted(set(held_out) - {example.group for example in examples.texts})
        if missing:
            raise TrainingError(f"no example is of the held-out group {missing[0]!r}")
        everything = [*examples.texts, *tested_only, *background]
        texts = render([*examples.texts, *tested_only], reader.plain.tokenizer, roles=roles, chat_date=chat_date)
        texts += _of_background(background, reader, roles, chat_date)
        tokens = reader.tokens(texts)
        document, positions, known, origin = [], [], [], []
        for i, (example, text, own) in enumerate(zip(everything, texts, tokens, strict=True)):
            if i >= len(everything) - len(background):
                example = Example(example.where, example.text, labels=dict.fromkeys(place, False))
            for part in parts_of(example, text, own, place):
                document.append(i)
                positions.append(part.tokens)
                known.append(part.known)
                origin.append(0 if i < len(examples.texts) else 1 if i < len(everything) - len(background) else 2)
        where, labels = np.asarray(document, dtype=np.int64), np.asarray(known, dtype=np.int8).reshape(-1, len(place))
        by_text = group_examples(everything, texts)
        group, kind = by_text[where], np.asarray(origin)
        is_held_out = np.asarray([example.group in held_out for example in everything])[where] & (kind == 0)
        # A whole group is outside if any of its texts is.
        is_outside = np.isin(group, group[(kind == 1) | is_held_out])
        # Groups with generated texts only train.
        generated = np.asarray([example.generated for example in everything])[where]
        only_trains = np.isin(group, group[generated]) & ~is_outside
        split = np.full(len(where), OUTSIDE, dtype=object)
        split[only_trains] = "train"
        splittable = ~is_outside & ~only_trains
        masks = split_groups(*_renumbered(group, labels, splittable), SHARES, seed=seed)
        for name, mask in masks.items():
            split[np.flatnonzero(splittable)[mask]] = name
        data = cls(
            concepts,
            tuple(tuple(place[parent] for parent in concept.parents) for concept in concepts),
            texts,
            tokens,
            where,
            positions,
            labels,
            group,
            split,
            kind == 2,
            generated,
            np.asarray([bool(example.spans) for example in everything])[where],
            np.isin(np.arange(len(texts)), where[split != "train"]),
        )
        try:
            data._check_enough()
        except TrainingError as error:
            own = group[kind == 0]
            if n := len(np.intersect1d(own, group[kind == 1])):
                raise TrainingError(
                    f"the texts of --test are the training's, too: {n} of {counted(len(np.unique(own)), 'group')} of"
                    f" the training only test, and too few are left: give other texts to test on ({error})"
                ) from error
            raise
        return data

    def _check_enough(self) -> None:
        for p, concept in enumerate(self.concepts):
            present = (self.known[:, p] == 1) & (self.split != OUTSIDE)
            has_generated = bool((present & self.generated).any())
            present &= ~np.isin(self.group, self.group[self.generated])
            n = len(np.unique(self.group[present]))
            if n < (FEWEST_OWN if has_generated else FEWEST_GROUPS):
                raise TrainingError(
                    f"the concept {concept.id!r} has examples in {n} group{'' if n == 1 else 's'} (pairs, documents and"
                    " near duplicates count once): "
                    + (
                        f"give {FEWEST_OWN} or more, since what the model wrote does not test it"
                        if has_generated
                        else f"give {FEWEST_GROUPS} or more, or {FEWEST_OWN} and let the model write more (generate=N)"
                    )
                )
            self._check_absent(p)

    def _check_absent(self, p: int) -> None:
        id, parents = self.concepts[p].id, self.concepts[p].parents
        absent = self.known[:, p] == 0
        if not (absent & (self.split != OUTSIDE)).any():
            raise TrainingError(
                f"nothing is without the concept {id!r}: give texts with it in 'not', counterexamples, or background"
                " text"
            )
        if not all((absent & self.of(name)).any() for name in SHARES):
            n = len(np.unique(self.group[absent & (self.split != OUTSIDE)]))
            raise TrainingError(
                f"what is without the concept {id!r} is in {n} group{'' if n == 1 else 's'} (pairs, documents and near"
                " duplicates count once), which is too few to train, calibrate and test on: give more of them, or"
                " background text"
            )
        if parents and not (absent & self._may_be(p) & self.of("train")).any():
            raise TrainingError(
                f"nothing of {' or '.join(map(repr, parents))} is known to be without {id!r}, so they cannot"
                f" be separated: give counterexamples of {id!r}, a sibling concept, or texts with it in 'not'"
            )

    def _may_be(self, p: int) -> Mask:
        """Parts that may have a parent `[S]`."""
        return ~(self.known[:, list(self.parents[p])] == 0).all(axis=1)

    @cached_property
    def learnt(self) -> Known:
        """Labels for training each concept `[S, P]`: `known`, without parts that have none of its parents."""
        return self._inside(self.known)

    @cached_property
    def compared_inside(self) -> Known:
        """`compared`, restricted like `learnt`."""
        return self._inside(self.compared)

    def _inside(self, known: Known) -> Known:
        labels = known.copy()
        for p, above in enumerate(self.parents):
            if above:
                labels[~self._may_be(p), p] = -1
        return labels


def _of_background(background: Sequence[Example], reader: TextReader, roles: Sequence[str], date: str) -> list[Text]:
    try:
        return render(background, reader.plain.tokenizer, roles=roles, chat_date=date)
    except TrainingError as error:
        raise TrainingError(
            "part of the background text is chats of a user and an assistant, which this model's chat template does"
            f" not accept, or which have no turn of {' or '.join(roles)}: leave it out (background=False)"
        ) from error


def _renumbered(group: Ints, labels: Known, use: Mask) -> tuple[Ints, Known]:
    _, numbers = np.unique(group[use], return_inverse=True)
    return numbers.astype(np.int64), labels[use]
