"""The quality of a written pack, measured on the test split with the pack's own files.

    quality = measure(pack, data)                 # what the manifest's `quality` holds
    quality["auroc_median"], quality["per_level"]["0"]["auroc_median"]

Headline figures rank *mentions* of the test split: nouns of known sense against each other and against verbs,
adjectives, adverbs and function words. A concept is ranked where it has at least MIN_POSITIVES positives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from probemon.lab.training.metrics import auroc_of

from .concepts import Concept, label, parents_of
from .dataset import Dataset, rmsnorm
from .mentions import LABELLED
from .passages import ANSWERS
from .path_loss import Weights, logits_of
from .path_scores import auroc, exact_cascade, path_scores
from .running import labels_by_distance
from .shown import Seen, strengths

MIN_POSITIVES = 5
MIN_POSITIVES_SMALL = 3  # for the smaller sets: example sentences alone, siblings
TOLERANCE = 0.005
EXAMPLES = ("example", "other_part")
CHUNK = 1 << 16


def concepts_of(pack: Any) -> list[Concept]:
    """The pack's concepts in its own order, each with its (only) parent."""
    return [
        Concept(
            id=line["id"],
            name=line["name"],
            key=line["synset"],
            parent=(line["parents"] or [None])[0],
            level=line["level"],
            definition=line["definition"],
            lemmas=tuple(line["lemmas"]),
            n_train=line["n_train"],
            n_heads=line["n_heads"],
        )
        for line in pack.concepts
    ]


def ranked(scores: torch.Tensor, labels: torch.Tensor, at_least: int) -> torch.Tensor:
    """AUROC [P], NaN where a column has fewer positives than `at_least`."""
    areas = auroc(scores, labels)
    areas[(labels == 1).sum(0) < at_least] = float("nan")
    return areas


def sibling_auroc(logits: torch.Tensor, labels: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """AUROC [P] of each probe's own logit among the mentions of its parent's children; NaN for roots and only children.

    A mention enters where at least one child of the parent applies to it and the probe's own label is known.
    """
    areas = torch.full((len(parents),), float("nan"), dtype=torch.float64)
    values, marks = logits.numpy(), labels.numpy()
    for parent in sorted(set(parents.tolist()) - {-1}):
        children = (parents == parent).nonzero().flatten().tolist()
        if len(children) < 2:
            continue
        of_family = (marks[:, children] == 1).any(1)
        for child in children:
            use = of_family & (marks[:, child] >= 0)
            positive = marks[use, child] == 1
            if positive.sum() >= MIN_POSITIVES_SMALL:
                areas[child] = auroc_of(values[use, child], positive)
    return areas


def quantile(values: torch.Tensor, q: float) -> float | None:
    """Of those that are not NaN, rounded to 4 decimals; None where all are."""
    known = values[~values.isnan()].double()
    return round(float(torch.quantile(known, q)), 4) if len(known) else None


def share(part: torch.Tensor, whole: torch.Tensor) -> float | None:
    """Sum of `part` over sum of `whole` (both bool), rounded to 4 decimals; None where the whole is empty."""
    n = int(whole.sum())
    return round(int((part & whole).sum()) / n, 4) if n else None


def measure(pack: Any, data: Dataset) -> tuple[dict[str, Any], torch.Tensor]:
    """(quality, AUROC of each probe of the pack [P]) on the test split."""
    concepts = concepts_of(pack)
    parents = parents_of(concepts)
    labels = label(data.wordnet, data.points, concepts)
    weights: Weights = {name: tensor.float() for name, tensor in pack.weights.items()}
    test = data.where(split="test")
    mentions = data.where(split="test", sources=LABELLED)
    logits = torch.full(labels.shape, float("nan"))
    logits[test] = logits_of(rmsnorm(data.states[test]), weights)
    thresholds = pack.alert_threshold

    scores = path_scores(logits[mentions], parents)
    truth = labels[mentions]
    examples = torch.tensor([point.source in EXAMPLES for point in data.points])[mentions]
    areas = {
        "auroc": ranked(scores, truth, MIN_POSITIVES),
        "auroc_siblings": sibling_auroc(logits[mentions], truth, parents),
        "auroc_examples": ranked(scores[examples], truth[examples], MIN_POSITIVES_SMALL),
        "auroc_siblings_examples": sibling_auroc(logits[mentions][examples], truth[examples], parents),
    }
    evaluated, found = exact_cascade(scores, thresholds, parents)
    fires = scores > thresholds
    level = torch.tensor([concept.level for concept in concepts])

    def summary(columns: torch.Tensor) -> dict[str, Any]:
        right, wrong = truth[:, columns] == 1, truth[:, columns] == 0
        fired = fires[:, columns]
        return {
            "auroc_median": quantile(areas["auroc"][columns], 0.5),
            "auroc_p10": quantile(areas["auroc"][columns], 0.1),
            "auroc_siblings_median": quantile(areas["auroc_siblings"][columns], 0.5),
            "auroc_siblings_p10": quantile(areas["auroc_siblings"][columns], 0.1),
            "auroc_siblings_examples_median": quantile(areas["auroc_siblings_examples"][columns], 0.5),
            "auroc_examples_median": quantile(areas["auroc_examples"][columns], 0.5),
            "auroc_examples_p10": quantile(areas["auroc_examples"][columns], 0.1),
            "n_probes": int(columns.sum()),
            "n_ranked": int((~areas["auroc"][columns].isnan()).sum()),
            "n_ranked_examples": int((~areas["auroc_examples"][columns].isnan()).sum()),
            "n_ranked_siblings": int((~areas["auroc_siblings"][columns].isnan()).sum()),
            "firing_recall_exact": share(found[:, columns], fired),
            "share_evaluated_exact": share(evaluated[:, columns], torch.ones_like(fired)),
            "false_positive_rate": share(fired, wrong),
            "recall_at_threshold": share(fired, right),
            "precision_at_threshold": share(right, fired & (right | wrong)),
        }

    every = torch.ones(len(concepts), dtype=torch.bool)
    quality = {
        **summary(every),
        "n_test": int(mentions.sum()),
        "n_test_examples": int(examples.sum()),
        "false_positive_rate_all_tokens": share(path_scores(logits[test], parents) > thresholds, labels[test] == 0),
        "fired_per_token": round(float(fires.float().sum(1).mean()), 3),
        "true_per_token": round(float((truth == 1).float().sum(1).mean()), 3),
        "per_source": _per_source(data, mentions, scores, truth),
        "unseen_last_token": _unseen(data, mentions, scores, truth),
        "running_text": {},
        "per_level": {str(number): summary(level == number) for number in level.unique().tolist()},
    }
    for name, rows, scores in running_scores(pack, data):
        seen = seen_of(data, concepts, scores, thresholds, rows)
        evaluated, found = exact_cascade(scores, thresholds, parents)
        quality["running_text"][name] = {
            "n_tokens": len(rows),
            "n_held_out_nouns": int(seen.held_out.sum()),
            **seen.at(0.0),
            "share_evaluated_exact": round(float(evaluated.float().mean()), 4),
            "firing_recall_exact": share(found, scores > thresholds),
        }
    return quality, areas["auroc"]


def running_scores(pack: Any, data: Dataset) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each domain of the test texts, its tokens and their path scores [n, P]."""
    parents = parents_of(concepts_of(pack))
    weights: Weights = {name: tensor.float() for name, tensor in pack.weights.items()}
    running = data.running
    for name in dict.fromkeys(passage.domain for passage in running.passages if passage.split == "test"):
        rows = running.where(split="test", domains=(name,)).nonzero().flatten()
        logits = [logits_of(rmsnorm(running.states[part]), weights) for part in rows.split(CHUNK)]
        yield name, rows, path_scores(torch.cat(logits), parents)


def seen_of(
    data: Dataset, concepts: list[Concept], scores: torch.Tensor, thresholds: torch.Tensor, rows: torch.Tensor
) -> Seen:
    """What the scores [n, P] of tokens of running text show over thresholds [P]."""
    truth = labels_by_distance(data.wordnet, data.running.words, [concept.key for concept in concepts])
    return Seen.of(strengths(scores, thresholds), data.running, truth, rows)


def _per_source(data: Dataset, mentions: torch.Tensor, scores: torch.Tensor, truth: torch.Tensor) -> dict[str, Any]:
    """Median and tenth percentile with the positives of one source, against all mentions that are no positives."""
    rows = mentions.nonzero().flatten().tolist()
    table = {}
    for source in ("example", "dominant", "gloss"):
        of_source = torch.tensor([data.points[row].source == source for row in rows])
        kept = torch.where((truth == 1) & ~of_source.unsqueeze(1), torch.tensor(-1, dtype=torch.int8), truth)
        areas = ranked(scores, kept, MIN_POSITIVES_SMALL)
        table[source] = {
            "auroc_median": quantile(areas, 0.5),
            "auroc_p10": quantile(areas, 0.1),
            "n_points": int(of_source.sum()),
        }
    return table


def _unseen(data: Dataset, mentions: torch.Tensor, scores: torch.Tensor, truth: torch.Tensor) -> dict[str, Any]:
    """The test mentions read at a token that no training point was read at: words that share no ending either."""
    seen = data.token_ids[data.where(split="train")].unique()
    rows = ~torch.isin(data.token_ids[mentions], seen)
    areas = ranked(scores[rows], truth[rows], MIN_POSITIVES_SMALL)
    return {"auroc_median": quantile(areas, 0.5), "n_points": int(rows.sum()), "n_ranked": int((~areas.isnan()).sum())}


def differences(stated: Any, measured: Any, path: str = "") -> list[str]:
    """Where two quality tables disagree: "auroc_median: stated 0.97, measured 0.95".

    Floats may differ by TOLERANCE: bf16 states round differently on another processor. Text sampled from the host
    is another text there, so what was measured on it is not compared.
    """
    if path == f"running_text.{ANSWERS}":
        return []
    if isinstance(stated, dict) and isinstance(measured, dict):
        keys = sorted(set(stated) | set(measured))
        return [
            line for key in keys for line in differences(stated.get(key), measured.get(key), f"{path}.{key}".strip("."))
        ]
    close = isinstance(stated, float) and isinstance(measured, float) and abs(stated - measured) <= TOLERANCE
    return [] if close or stated == measured else [f"{path}: stated {stated}, measured {measured}"]
