"""From a dataset to a written pack: concepts, training, folding, calibration.

pack, report = build(data, shape=(), out=Path("probes/wordnet-smollm2-135m"), rate=0.01)
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from probemon.core.familiarity import Familiar
from probemon.util.cache_folders import cache_dir
from probemon.util.files import write_text_atomically

from .alerts import ENOUGH, Fires, precision_thresholds, precisions
from .card import card
from .concepts import Choice, Concept, Use, choose, label, parents_of, without, words_under
from .dataset import EPS, Dataset, rmsnorm
from .evaluate import MIN_POSITIVES, measure, quantile, ranked
from .mentions import LABELLED, split_of
from .path_loss import HIDDEN, LINEAR, Recipe, Weights, fit, initial, logits_of
from .path_scores import Standard, as_fp32, auroc, fold, path_scores, thresholds_at
from .running import Running, labels_by_distance

POOR, WEAK = 0.88, 0.90  # validation AUROC under which a concept is dropped, or flagged
PRECISION = 0.9  # of what fires on running text, by the recommended alert thresholds
FALSE_POSITIVES = 0.01  # of the tokens without the concept, by the other set
SETS = ("precision_0.9", "rate_0.01")
SCREENING = Recipe(epochs=1)
OTHERS_KEPT = 0.5  # of the tokens that end no noun, those that train (and count for the others)
# Of a word that stands in the texts more often than this, each use counts less, so that all of them together grow with
# the root of their number: a probe that knows the common words alone does not know the concept.
COMMON = 30
MENTION = 3.0  # tokens of running text as which a labelled mention counts: its sense is known
NOUN_SOURCES = ("example", "dominant", "gloss")
CHUNK = 1 << 16
N_GOLDEN = 16
N_FAMILIAR = 100_000  # tokens whose states' components are taken
LICENCE = "WordNet 3.1 licence (concept names and definitions; notice in README.md); host model: Apache-2.0"


def probe_seed(seed: int, concept: Concept) -> int:
    """A seed for one probe's initial weights that does not depend on the others."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{concept.id}".encode()).digest()[:6], "big")


@dataclass
class Bank:
    """What probes are trained on: tokens of running text as they come, and labelled mentions beside them."""

    data: Dataset
    standard: Standard
    rows: torch.Tensor  # [R] int64: tokens of running text, those of words that may train
    points: torch.Tensor  # [N] bool: mentions of the training split
    held_out: torch.Tensor  # [N] bool: labelled mentions of the validation split
    x: torch.Tensor  # [R + sum(points), D] bf16, standardised
    weight: torch.Tensor  # [R + sum(points)]: how much each counts

    @classmethod
    def of(cls, data: Dataset, *, embedding: bool = False) -> Bank:
        """From hidden states, or for a control from the input embeddings of the same tokens."""
        running, points = data.running, data.where(split="train")
        generator = torch.Generator().manual_seed(data.source.seed)
        kept = running.is_last | (torch.rand(len(running.word), generator=generator) < OTHERS_KEPT)
        words = running.words_of_split("train") | (running.word < 0)
        rows = (running.where(split="train") & words & kept).nonzero().flatten()
        states = torch.cat(
            [
                data.embedding[running.token_id[rows]] if embedding else running.states[rows],
                data.embedding[data.token_ids[points]] if embedding else data.states[points],
            ]
        )
        standard = Standard.of(rmsnorm(states[: len(rows)]))
        x = torch.cat([standard(rmsnorm(part)).bfloat16() for part in states.split(CHUNK)])
        weight = torch.full((len(x),), MENTION)
        weight[: len(rows)] = torch.where(running.is_last[rows], weight_of_words(running, rows), 1 / OTHERS_KEPT)
        held_out = data.where(split="validation", sources=LABELLED)
        return cls(data, standard, rows, points, held_out, x, weight)

    def labels(self, concepts: list[Concept]) -> torch.Tensor:
        """[R + sum(points), P] int8."""
        truth = labels_by_distance(self.data.wordnet, self.data.running.words, [c.key for c in concepts])
        points = [point for point, use in zip(self.data.points, self.points.tolist(), strict=True) if use]
        of_points = label(self.data.wordnet, points, concepts)
        return torch.cat([truth.labels(self.data.running, self.rows), of_points])

    def fit(
        self,
        concepts: list[Concept],
        labels: torch.Tensor,
        recipe: Recipe,
        shape: tuple[int, ...] = (),
        start: Weights | None = None,
    ) -> Weights:
        """Weights of the concepts' probes; with hidden layers, training goes on from the linear probes `start`."""
        seeds = [probe_seed(self.data.source.seed, concept) for concept in concepts]
        return fit(
            self.x,
            labels,
            parents_of(concepts),
            seeds,
            recipe,
            weight=self.weight,
            shape=shape,
            seed=self.data.source.seed,
            start=initial(shape, seeds, self.x.shape[1], start) if start is not None else None,
        )

    def validation_auroc(self, weights: Weights, concepts: list[Concept]) -> torch.Tensor:
        """[P]: how each probe ranks the labelled mentions of validation words."""
        points = [point for point, use in zip(self.data.points, self.held_out.tolist(), strict=True) if use]
        x = self.standard(rmsnorm(self.data.states[self.held_out]))
        scores = path_scores(logits_of(x, weights), parents_of(concepts))
        return auroc(scores, label(self.data.wordnet, points, concepts))


def weight_of_words(running: Running, rows: torch.Tensor) -> torch.Tensor:
    """[R]: how much each of some tokens counts, by how often the head word of its word ends among them; 1 for none."""
    heads = {head: i for i, head in enumerate(dict.fromkeys(word.head for word in running.words))}
    head = torch.tensor([heads[word.head] for word in running.words] + [len(heads)])[running.word[rows]]
    n = torch.bincount(head[running.is_last[rows]], minlength=len(heads) + 1).double()
    n[-1] = 0
    return (n / COMMON).clamp(min=1).pow(-0.5)[head].float()


def uses_of(data: Dataset) -> list[Use]:
    """Every word of the training texts that is not of the test split, with its counts."""
    running = data.running
    rows = running.where(split="train") & running.is_last
    counts = torch.bincount(running.word[rows], minlength=len(running.words)).tolist()
    uses = [
        Use(word.head, word.mass, n_running=n)
        for word, n in zip(running.words, counts, strict=True)
        if n and split_of(word.head) != "test"
    ]
    mentions = [p for p in data.points if p.source in NOUN_SOURCES and p.split != "test"]
    return uses + [Use(point.head, point.mass, n_mentions=1) for point in mentions]


def all_uses(running: Running) -> list[Use]:
    """Every word of the training texts, those of every split, with its counts: for what trains nothing."""
    counts = torch.bincount(running.word[running.where(split="train") & running.is_last], minlength=len(running.words))
    return [Use(word.head, word.mass, n_running=n) for word, n in zip(running.words, counts.tolist(), strict=True) if n]


def select(bank: Bank, choice: Choice) -> tuple[list[Concept], list[tuple[str, float]]]:
    """(concepts that a short training does not leave poor on the validation split, those dropped with their AUROC)."""
    concepts = choose(bank.data.wordnet, uses_of(bank.data), choice)
    dropped: list[tuple[str, float]] = []
    while True:
        weights = bank.fit(concepts, bank.labels(concepts), SCREENING)
        areas = bank.validation_auroc(weights, concepts)
        poor = [(c.id, round(float(a), 4)) for c, a in zip(concepts, areas, strict=True) if a < POOR]
        if not poor:
            return concepts, dropped
        dropped += poor
        concepts = without(concepts, {id for id, _ in poor})


def kept_controls(data: Dataset, concepts: list[Concept]) -> dict[str, Any]:
    """`controls`, kept in a file: they are the same for every shape of the probes."""
    about = json.dumps([data.recipe(), [concept.id for concept in concepts], asdict(LINEAR), torch.__version__])
    digest = hashlib.sha256(about.encode())
    digest.update(data.states[:CHUNK].view(torch.int16).numpy().tobytes())
    file = cache_dir() / "wordnet-pack" / f"controls-{digest.hexdigest()[:24]}.json"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps(controls(data, concepts)))
    return dict(json.loads(file.read_text(encoding="utf-8")))


def controls(data: Dataset, concepts: list[Concept]) -> dict[str, Any]:
    """The same training of linear probes on what should not work: labels shuffled, and the token's input embedding."""
    parents = parents_of(concepts)
    test = data.where(split="test", sources=LABELLED)
    truth = label(data.wordnet, [p for p, use in zip(data.points, test.tolist(), strict=True) if use], concepts)
    generator = torch.Generator().manual_seed(data.source.seed)
    result = {}
    for name, embedding in (("shuffled_labels", False), ("input_embedding", True)):
        bank = Bank.of(data, embedding=embedding)
        labels = bank.labels(concepts)
        if not embedding:
            labels = labels[torch.randperm(len(labels), generator=generator)]
        weights = bank.fit(concepts, labels, LINEAR)
        states = data.embedding[data.token_ids[test]] if embedding else data.states[test]
        scores = path_scores(logits_of(bank.standard(rmsnorm(states)), weights), parents)
        areas = ranked(scores, truth, MIN_POSITIVES)
        result[name] = {"auroc_median": quantile(areas, 0.5), "auroc_p10": quantile(areas, 0.1)}
    return result


@dataclass(frozen=True)
class Alerts:
    """Alert thresholds [P] from the tokens of the validation texts, as they come, and what they rest on."""

    precise: torch.Tensor  # for PRECISION
    own: torch.Tensor  # [P] bool: not its level's
    precision: torch.Tensor  # [P]: of what fires over `precise`
    sentence: torch.Tensor  # for PRECISION of the highest score in a sentence; none is lower than `precise`
    at_rate: torch.Tensor  # for FALSE_POSITIVES
    n_tokens: int

    @classmethod
    def of(cls, data: Dataset, concepts: list[Concept], folded: Weights) -> Alerts:
        running, parents, weights = data.running, parents_of(concepts), as_fp32(folded)
        rows = running.where(split="validation").nonzero().flatten()
        truth = labels_by_distance(data.wordnet, running.words, [concept.key for concept in concepts])
        scores = torch.cat(
            [path_scores(logits_of(rmsnorm(running.states[part]), weights), parents) for part in rows.split(CHUNK)]
        )
        word, level = running.word[rows], torch.tensor([concept.level for concept in concepts])
        fires = Fires.of(scores, truth.any_sense, word)
        precise, own = precision_thresholds(fires, level, PRECISION)
        of_sentences = Fires.of_sentences(scores, truth.any_sense, word, running.sentence[rows])
        # Not lower than a token's own: what no token fires may never be evaluated.
        sentence = torch.maximum(precision_thresholds(of_sentences, level, PRECISION)[0], precise)
        at_rate = thresholds_at(scores, truth.strict[word] == 0, FALSE_POSITIVES)
        return cls(precise, own, precisions(fires, precise, level, own), sentence, at_rate, len(rows))


def familiar_of(running: Running, seed: int) -> Familiar:
    """What the pack knows of running text as it comes: components from texts that train, the limit from others."""
    rows, generator = running.where(split="train").nonzero().flatten(), torch.Generator().manual_seed(seed)
    some = rows[torch.randperm(len(rows), generator=generator)[:N_FAMILIAR]]
    states, held_out = (rmsnorm(running.states[part]) for part in (some, running.where(split="validation")))
    return Familiar.of(states, held_out)


def golden_rows(data: Dataset) -> torch.Tensor:
    """Indices of test mentions spread evenly over the dataset."""
    rows = data.where(split="test", sources=("example", "dominant")).nonzero().flatten()
    return rows[torch.linspace(0, len(rows) - 1, N_GOLDEN).long()]


def build(data: Dataset, *, shape: tuple[int, ...], out: Path, choice: Choice, versions: dict[str, str]) -> Any:
    """The pack as `ProbePack` opens it: trained, calibrated, written, measured as written, written with its quality."""
    from probemon.packs.pack import ProbePack

    bank = Bank.of(data)
    concepts, dropped = select(bank, choice)
    labels = bank.labels(concepts)
    weights = bank.fit(concepts, labels, LINEAR)
    if shape:
        weights = bank.fit(concepts, labels, HIDDEN, shape, weights)
    areas = bank.validation_auroc(weights, concepts)
    folded = fold(weights, bank.standard)
    alerts = Alerts.of(data, concepts, folded)

    words = words_under(data.wordnet, concepts, all_uses(data.running))
    lines: list[dict[str, Any]] = [
        {
            "id": concept.id,
            "name": concept.name,
            "parents": [concept.parent] if concept.parent else [],
            "definition": concept.definition,
            "lemmas": list(concept.lemmas),
            "words": words[concept.id],
            "synset": concept.key,
            "n_train": concept.n_train,
            "n_heads": concept.n_heads,
            "auroc_validation": None if area != area else round(area, 4),
            "weak": bool(area < WEAK),
            "precision": {SETS[0]: None if precision != precision else round(precision, 3)},
            "alert_threshold_of": "its own fires" if own else "its level",
        }
        for concept, area, own, precision in zip(
            concepts, areas.tolist(), alerts.own.tolist(), alerts.precision.tolist(), strict=True
        )
    ]
    name = out.name
    provenance = {
        "data": data.recipe(),
        "shape": "-".join(map(str, (*shape, 1))) if shape else "linear",
        "recipe": {"linear": asdict(LINEAR), **({"hidden": asdict(HIDDEN)} if shape else {})},
        "choice": {**asdict(choice), "everyday": sorted(choice.everyday)},
        "alert_sets": {
            SETS[0]: {"precision": PRECISION, "n_own": int(alerts.own.sum()), "enough_fires": ENOUGH},
            SETS[1]: {"false_positive_rate": FALSE_POSITIVES},
            "n_tokens": alerts.n_tokens,
            "tokens": "validation texts: running text of every domain, a fifth of it in the chat template",
        },
        "poor": POOR,
        "dropped": [{"id": id, "auroc_validation": area} for id, area in dropped],
        "n_weak": sum(line["weak"] for line in lines),
        "versions": versions,
    }
    golden, familiar = data.states[golden_rows(data)].float().unsqueeze(1), familiar_of(data.running, data.source.seed)

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
            alert_threshold=alerts.precise,
            alert_set=SETS[0],
            alert_sets={SETS[1]: alerts.at_rate},
            aggregated={"max": alerts.sentence},
            familiar=[familiar],
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
    quality["controls"] = kept_controls(data, concepts)
    return write(out, quality)
