"""From a dataset to a written pack: concepts, training, folding, calibration.

pack, report = build(data, shape=(), out=Path("probes/wordnet-smollm2-135m"), rate=0.01)
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .card import card
from .concepts import Choice, Concept, choose, label, parents_of, without
from .dataset import EPS, Dataset, rmsnorm
from .evaluate import MIN_POSITIVES, measure, quantile, ranked
from .mentions import LABELLED
from .metrics import auroc, exact_cascade, path_scores, thresholds_at
from .train import HIDDEN, LINEAR, Weights, fit, initial, logits_of

POOR, WEAK = 0.85, 0.90  # validation AUROC under which a concept is dropped, or flagged
FALSE_POSITIVES = 0.01
# How much of the tree the exact cascade may evaluate on the validation mentions, and the steps towards it.
SHARE_GOAL = 0.20
SHIFTS = tuple(0.25 * step for step in range(17))
N_GOLDEN = 16
LICENCE = "WordNet 3.1 licence (concept names and definitions; notice in README.md); host model: Apache-2.0"


@dataclass(frozen=True)
class Standard:
    """What standardises normalised states: (x - mean) / scale, [D] each."""

    mean: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Standard:
        return cls(x.mean(0), x.std(0).clamp(min=1e-6))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.scale


def fold(weights: Weights, standard: Standard, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """The same probes for states that are not standardised: scale into w1 before rounding, mean into b1 after.

    Because b1 uses the rounded w1, a probe's output at the mean state is exact however coarse the dtype.
    """
    folded = {name: value.clone() if name[0] == "b" else value.to(dtype) for name, value in weights.items()}
    folded["w1"] = (weights["w1"] / standard.scale).to(dtype)
    folded["b1"] = (weights["b1"].double() - folded["w1"].double() @ standard.mean.double()).float()
    return folded


def as_fp32(weights: Weights) -> Weights:
    return {name: value.float() for name, value in weights.items()}


def shifted(weights: Weights, parents: torch.Tensor, shift: float) -> Weights:
    """The logit of every probe that has a parent raised by `shift`, in its last bias."""
    last = "b3" if "b3" in weights else "b1"
    raised = weights[last].clone()
    raised[parents >= 0] += shift
    return {**weights, last: raised}


def choose_shift(
    logits: torch.Tensor, parents: torch.Tensor, negative: torch.Tensor, mentions: torch.Tensor
) -> tuple[float, float]:
    """(shift, share evaluated): the smallest shift with which the exact cascade evaluates at most SHARE_GOAL.

    Under the path rule a child's logit may be raised by any constant: its threshold rises along with it, so that its
    parent needs to be expanded less often, and its rank among its siblings stays. Too much of it flattens the child's
    part in the path score, so the smallest that will do is taken, and none where none will do (a flat hierarchy). All
    rows are of the validation split.
    """
    shares = []
    for shift in SHIFTS:
        scores = path_scores(logits + shift * (parents >= 0), parents)
        evaluated, _ = exact_cascade(scores[mentions], thresholds_at(scores, negative, FALSE_POSITIVES), parents)
        shares.append(float(evaluated.float().mean()))
        if shares[-1] <= SHARE_GOAL:
            return shift, shares[-1]
    return SHIFTS[0], shares[0]


def probe_seed(seed: int, concept: Concept) -> int:
    """A seed for one probe's initial weights that does not depend on the others."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{concept.id}".encode()).digest()[:6], "big")


@dataclass
class Bank:
    """Probes in training, and what they are trained on."""

    data: Dataset
    x: torch.Tensor  # [N, D] fp32, standardised
    standard: Standard
    train: torch.Tensor  # [N] bool
    validation: torch.Tensor
    mentions: torch.Tensor  # [N] bool: validation points of the labelled sources

    @classmethod
    def of(cls, data: Dataset, states: torch.Tensor) -> Bank:
        train = data.where(split="train")
        x = rmsnorm(states)
        standard = Standard.of(x[train])
        return cls(
            data,
            standard(x),
            standard,
            train,
            data.where(split="validation"),
            data.where(split="validation", sources=LABELLED),
        )

    def fit(
        self, concepts: list[Concept], labels: torch.Tensor, shape: tuple[int, ...] = (), start: Weights | None = None
    ) -> Weights:
        """Weights of the concepts' probes; with hidden layers, training goes on from the linear probes `start`."""
        seeds = [probe_seed(self.data.source.seed, concept) for concept in concepts]
        held_out = (self.x[self.validation], labels[self.validation])
        return fit(
            self.x[self.train],
            labels[self.train],
            parents_of(concepts),
            seeds,
            held_out,
            HIDDEN if shape else LINEAR,
            shape=shape,
            seed=self.data.source.seed,
            start=initial(shape, seeds, self.x.shape[1], start),
        )

    def validation_auroc(self, weights: Weights, labels: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        scores = path_scores(logits_of(self.x[self.mentions], weights), parents)
        return auroc(scores, labels[self.mentions])


def select(bank: Bank, choice: Choice) -> tuple[list[Concept], Weights, torch.Tensor, list[tuple[str, float]]]:
    """(concepts that are not poor on the validation split, their linear probes, validation AUROC [P], the dropped)."""
    data = bank.data
    concepts = choose(data.wordnet, data.points, choice)
    dropped: list[tuple[str, float]] = []
    while True:
        labels = label(data.wordnet, data.points, concepts)
        linear = bank.fit(concepts, labels)
        areas = bank.validation_auroc(linear, labels, parents_of(concepts))
        poor = [(c.id, round(float(a), 4)) for c, a in zip(concepts, areas, strict=True) if not a >= POOR]
        if not poor:
            return concepts, linear, areas, dropped
        dropped += poor
        concepts = without(concepts, {id for id, _ in poor})


def controls(data: Dataset, concepts: list[Concept], labels: torch.Tensor) -> dict[str, Any]:
    """The same training of linear probes on what should not work: labels shuffled, and the token's input embedding."""
    parents = parents_of(concepts)
    test = data.where(split="test", sources=LABELLED)
    fitted = data.where(split="train") | data.where(split="validation")
    generator = torch.Generator().manual_seed(data.source.seed)
    rows = fitted.nonzero().flatten()
    shuffled = labels.clone()
    shuffled[rows] = labels[rows[torch.randperm(len(rows), generator=generator)]]
    result = {}
    for name, states, marks in (
        ("shuffled_labels", data.states, shuffled),
        ("input_embedding", data.embeddings, labels),
    ):
        bank = Bank.of(data, states)
        weights = bank.fit(concepts, marks)
        areas = ranked(path_scores(logits_of(bank.x[test], weights), parents), labels[test], MIN_POSITIVES)
        result[name] = {"auroc_median": quantile(areas, 0.5), "auroc_p10": quantile(areas, 0.1)}
    return result


def golden_rows(data: Dataset) -> torch.Tensor:
    """Indices of test mentions spread evenly over the dataset."""
    rows = data.where(split="test", sources=("example", "dominant")).nonzero().flatten()
    return rows[torch.linspace(0, len(rows) - 1, N_GOLDEN).long()]


def build(data: Dataset, *, shape: tuple[int, ...], out: Path, choice: Choice, versions: dict[str, str]) -> Any:
    """The pack as `ProbePack` opens it: trained, calibrated, written, measured as written, written with its quality."""
    from probemon.packs.pack import ProbePack

    bank = Bank.of(data, data.states)
    concepts, weights, areas, dropped = select(bank, choice)
    labels, parents = label(data.wordnet, data.points, concepts), parents_of(concepts)
    if shape:
        weights = bank.fit(concepts, labels, shape, weights)
        areas = bank.validation_auroc(weights, labels, parents)
    folded = fold(weights, bank.standard)

    held_out = bank.validation
    negative = labels[held_out] == 0
    x = rmsnorm(data.states[held_out])
    shift, share = choose_shift(logits_of(x, as_fp32(folded)), parents, negative, bank.mentions[held_out])
    folded = shifted(folded, parents, shift)
    thresholds = thresholds_at(path_scores(logits_of(x, as_fp32(folded)), parents), negative, FALSE_POSITIVES)

    lines: list[dict[str, Any]] = [
        {
            "id": concept.id,
            "name": concept.name,
            "parents": [concept.parent] if concept.parent else [],
            "definition": concept.definition,
            "lemmas": list(concept.lemmas),
            "synset": concept.key,
            "n_train": concept.n_train,
            "n_heads": concept.n_heads,
            "auroc_validation": round(float(area), 4),
            "weak": bool(area < WEAK),
        }
        for concept, area in zip(concepts, areas, strict=True)
    ]
    name = out.name
    provenance = {
        "data": data.recipe(),
        "shape": "-".join(map(str, (*shape, 1))) if shape else "linear",
        "recipe": {"linear": asdict(LINEAR), **({"hidden": asdict(HIDDEN)} if shape else {})},
        "choice": asdict(choice),
        "thresholds": {
            "false_positive_rate": FALSE_POSITIVES,
            "n_tokens": int(held_out.sum()),
            "tokens": "validation split: labelled mentions, ordinary running text, text by the host model",
        },
        "child_logit_shift": {"shift": shift, "share_evaluated_validation": round(share, 4), "goal": SHARE_GOAL},
        "dropped": [{"id": id, "auroc_validation": area} for id, area in dropped],
        "n_weak": sum(line["weak"] for line in lines),
        "versions": versions,
    }
    golden = data.states[golden_rows(data)].float().unsqueeze(1)

    def write(to: Path, quality: dict[str, Any]) -> Any:
        return ProbePack.write(
            to,
            name=name,
            concepts=lines,
            weights=folded,
            score_rule="path",
            inputs=[{"site": f"resid_post.{data.source.layer}", "norm": "rmsnorm", "eps": EPS}],
            host=data.host,
            licence=LICENCE,
            card=card(name, lines, data, provenance, quality),
            alert_threshold=thresholds,
            golden_hidden=golden,
            recommended={"load_threshold": "exact", "keep_top_k": 0},
            provenance=provenance,
            quality=quality,
            overwrite=True,
        )

    with TemporaryDirectory() as folder:
        # What is measured are files as they will be shipped, and only a measured pack takes the place of another.
        draft = write(Path(folder) / name, {})
        quality, tested = measure(draft, data)
        by_id = {concept["id"]: float(area) for concept, area in zip(draft.concepts, tested, strict=True)}
    for line in lines:
        area = by_id[line["id"]]
        line["auroc_test"] = None if area != area else round(area, 4)
    quality["controls"] = controls(data, concepts, labels)
    return write(out, quality)
