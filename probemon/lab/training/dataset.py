"""What is trained on, taken apart: parts of texts, what is known of each, and which of them train, calibrate and test.

    data = Dataset.of(examples, reader, background=passages(tokenizer), outside=None, roles=("assistant",), seed=0)
    data.known                                  # [S, P] int8 of S parts and P concepts
    data.of("train") & ~data.background         # [S] bool

Groups, pairs and near duplicates stay together, in the background too. What is held out by group, or comes from a
second file, is "outside": it trains nothing and calibrates nothing.
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
FEWEST_GROUPS = 8  # with a concept, that there be four to train on, and one or two each to calibrate and to test
FEWEST_OWN = 4  # of them, where the model writes more to train on


@dataclass(frozen=True)
class Dataset:
    """S parts of N texts.

    - `document [S]`, `positions`: of which text a part is, and which of its tokens; `known [S, P]`.
    - `group`, `split`, `background` and `generated` (by the model) `[S]`.
    - `of_span [S]`: whether it is tokens of a text with spans, not a text.
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
        """Return which parts are of these splits `[S]`."""
        return np.isin(self.split, names)

    @cached_property
    def beside_background(self) -> Mask:
        """Which concepts have nothing else without them, or not enough of it to train and to test on `[P]`."""
        absent = (self.known == 0) & ~self.background[:, None]
        lacking: Mask = ~np.stack([absent[self.of(name)].any(axis=0) for name in ("train", "test")])
        return np.asarray(lacking.any(axis=0))

    @cached_property
    def compared(self) -> Known:
        """What baselines and layers are compared on `[S, P]`: as `known`, with the background, which is easy to tell,
        for those concepts alone that are `beside_background`.
        """
        known = self.known.copy()
        known[np.ix_(self.background, ~self.beside_background)] = -1
        return known

    @cached_property
    def is_tree(self) -> bool:
        """Whether a concept has parents."""
        return any(self.parents)

    @cached_property
    def wanted(self) -> list[Ints]:
        """The tokens of each text of which something is known, in order."""
        found: list[list[Ints]] = [[] for _ in self.texts]
        for document, positions in zip(self.document.tolist(), self.positions, strict=True):
            found[document].append(positions)
        return [np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *parts])) for parts in found]

    def part_of(self, document: Ints, position: Ints) -> Ints:
        """Return the part of each token of these, which are wanted ones."""
        width = max((len(tokens) for tokens in self.tokens), default=0) + 1
        places = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [document * width + positions for document, positions in zip(self.document, self.positions, strict=True)]
        )
        parts = np.repeat(np.arange(len(self.positions)), [len(positions) for positions in self.positions])
        order = np.argsort(places)
        found: Ints = parts[order][np.searchsorted(places[order], document * width + position)]
        return found

    def text_of(self, part: int) -> str:
        """Return what a part says: its text, or of one with spans the stretches of its tokens."""
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
        """Render, tokenise and part examples. Raises `TrainingError` where a concept has too few, and for what the
        other modules refuse.
        """
        concepts = tuple(examples.concepts.values())
        place = {concept.id: p for p, concept in enumerate(concepts)}
        more = () if outside is None else outside.texts
        for example in more:
            for id in example.named:
                if id not in place:
                    raise TrainingError(f"{example.where} is of {id!r}, of which the training examples say nothing")
        missing = sorted(set(held_out) - {example.group for example in examples.texts})
        if missing:
            raise TrainingError(f"no example is of the group {missing[0]!r}, which is to be held out")
        everything = [*examples.texts, *more, *background]
        texts = render([*examples.texts, *more], reader.plain.tokenizer, roles=roles, chat_date=chat_date)
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
        kept_out = np.asarray([example.group in held_out for example in everything])[where] & (kind == 0)
        # A whole group is outside where any text of it is: the same text in both files tests nothing.
        is_outside = np.isin(group, group[(kind == 1) | kept_out])
        # What the model wrote trains, with all that is like it: it would be tested on its own words.
        generated = np.asarray([example.generated for example in everything])[where]
        only_trains = np.isin(group, group[generated]) & ~is_outside
        split = np.full(len(where), OUTSIDE, dtype=object)
        split[only_trains] = "train"
        open_to_all = ~is_outside & ~only_trains
        masks = split_groups(*_renumbered(group, labels, open_to_all), SHARES, seed=seed)
        for name, mask in masks.items():
            split[np.flatnonzero(open_to_all)[mask]] = name
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
        """Raise `TrainingError` where a concept has too few groups to train, calibrate and test on."""
        for p, concept in enumerate(self.concepts):
            own = (self.known[:, p] == 1) & (self.split != OUTSIDE)
            helped = bool((own & self.generated).any())
            own &= ~np.isin(self.group, self.group[self.generated])
            n = len(np.unique(self.group[own]))
            if n < (FEWEST_OWN if helped else FEWEST_GROUPS):
                raise TrainingError(
                    f"the concept {concept.id!r} has examples in {n} group{'' if n == 1 else 's'} (pairs, documents and"
                    " near duplicates count once): "
                    + (
                        f"give {FEWEST_OWN} or more, since what the model wrote does not test it"
                        if helped
                        else f"give {FEWEST_GROUPS} or more, or {FEWEST_OWN} and let the model write more (generate=N)"
                    )
                )
            self._check_absent(p)

    def _check_absent(self, p: int) -> None:
        """Raise `TrainingError` where what is without a concept is too little to train, calibrate and test on, or says
        nothing of it where its parents are.
        """
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
                f"nothing of {' or '.join(map(repr, parents))} is known to be without {id!r}, so nothing tells them"
                f" apart: give counterexamples of {id!r}, a concept beside it, or texts with it in 'not'"
            )

    def _may_be(self, p: int) -> Mask:
        """Which parts may have a parent of a concept `[S]`: of which a child learns."""
        return ~(self.known[:, list(self.parents[p])] == 0).all(axis=1)

    @cached_property
    def learnt(self) -> Known:
        """What each concept learns from `[S, P]`: as `known`, below parents without the parts that have none of them.

        So its siblings are its negatives, and what is said not to be of it, where nothing is said of its parents.
        """
        return self._inside(self.known)

    @cached_property
    def compared_inside(self) -> Known:
        """`compared`, of what each concept learns from."""
        return self._inside(self.compared)

    def _inside(self, known: Known) -> Known:
        found = known.copy()
        for p, above in enumerate(self.parents):
            if above:
                found[~self._may_be(p), p] = -1
        return found


def _of_background(background: Sequence[Example], reader: TextReader, roles: Sequence[str], date: str) -> list[Text]:
    """Render text that nobody gave, so that nobody is told to mend it."""
    try:
        return render(background, reader.plain.tokenizer, roles=roles, chat_date=date)
    except TrainingError as error:
        raise TrainingError(
            "the background text stands in part as chats of a user and an assistant, which this model's chat template"
            f" does not take, or of which no turn is of {' or '.join(roles)}: leave it out (background=False)"
        ) from error


def _renumbered(group: Ints, labels: Known, use: Mask) -> tuple[Ints, Known]:
    """Return groups numbered without gaps, and labels by part, of the parts in use."""
    _, numbers = np.unique(group[use], return_inverse=True)
    return numbers.astype(np.int64), labels[use]
