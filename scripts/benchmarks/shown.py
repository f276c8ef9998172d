#!/usr/bin/env python3
"""What the shipped packs fire at on texts that trained nothing, and how much of it is right.

    python scripts/benchmarks/shown.py --out docs/benchmarks/shown.json

A concept that fires at a noun is right where it is, or stands above, some noun sense of the word there. Held-out words
are those whose every token trained and calibrated nothing. Beside the packs, the same training on the input embedding
of the token: what the word alone says, without its context. Minutes, once the hidden states of
`scripts/build_wordnet_pack.py` are in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from probemon.core.familiarity import Familiar  # noqa: E402
from probemon.packs.pack import ProbePack  # noqa: E402
from probemon.util.files import write_text_atomically  # noqa: E402
from provenance import about  # noqa: E402
from wordnet_pack.build import LINEAR, N_FAMILIAR, Bank  # noqa: E402
from wordnet_pack.concepts import Concept, ancestors, parents_of  # noqa: E402
from wordnet_pack.dataset import Dataset, Source, prepare, rmsnorm  # noqa: E402
from wordnet_pack.evaluate import CHUNK, concepts_of, running_scores, seen_of  # noqa: E402
from wordnet_pack.passages import ANSWERS, DOMAINS  # noqa: E402
from wordnet_pack.path_loss import Weights, logits_of  # noqa: E402
from wordnet_pack.path_scores import exact_cascade, path_scores  # noqa: E402
from wordnet_pack.running import labels_by_distance  # noqa: E402
from wordnet_pack.shown import STRENGTHS, Seen, rate, share_right, strengths  # noqa: E402

PACKS = ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp")
PER_NOUN = (0.7, 1.5)
PROSE = (*(domain.name for domain in DOMAINS if domain.is_prose), ANSWERS)
CODE = ("library", "tables")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    packs = {name: ProbePack.open(ROOT / "probes" / name) for name in PACKS}
    made = packs[PACKS[0]].manifest["provenance"]["data"]
    data = prepare(Source(None, made["layer"], made["seed"]))
    results = {name: study(pack, data) for name, pack in packs.items()}
    first = results[PACKS[0]]
    first["unlike"] = {"pack": far_shares(packs[PACKS[0]].familiar[0], data), "without_code": far_without_code(data)}
    first["input_embedding"] = embedding_control(packs[PACKS[0]], data)
    news, answers = first["texts"]["news"], first["texts"][ANSWERS]
    claims = {
        "precision_news_0_7": news["right_at"]["0.7"]["right"],
        "precision_news_1_5": news["right_at"]["1.5"]["right"],
        "precision_unseen_source_0_7": answers["right_at"]["0.7"]["right"],
        "precision_recommended": first["together"]["right_held_out"],
        "fires_per_other_token": first["together"]["fires_per_other"],
        "fires_per_code_token": first["code"]["fires_per_token"],
    }
    document = {
        "claims": claims,
        "packs": results,
        **about(),
    }
    write_text_atomically(args.out, json.dumps(document, indent=1) + "\n")
    print(json.dumps(claims, indent=1))
    return 0


def study(pack: Any, data: Dataset) -> dict[str, Any]:
    """Everything of one pack: by kind of text, by strength, by level, by sentence, by sense."""
    concepts = concepts_of(pack)
    parents, level = parents_of(concepts), torch.tensor([concept.level for concept in concepts])
    by_rate = pack.with_alert_set("rate_0.01").alert_threshold
    texts, parts = {}, dict[str, Seen]()
    for name, rows, scores in running_scores(pack, data):
        seen = parts[name] = seen_of(data, concepts, scores, pack.alert_threshold, rows)
        loose = seen_of(data, concepts, scores, by_rate, rows)
        texts[name] = {
            "n_tokens": len(rows),
            "n_nouns": int(seen.noun.sum()),
            "n_held_out_nouns": int(seen.held_out.sum()),
            "by_strength": [seen.at(strength) for strength in STRENGTHS],
            "right_at": {str(n): seen.right_at(n) for n in PER_NOUN},
            "by_level": seen.by_level(level),
            "by_rate": loose.at(0.0),
            "sentences": of_sentences(pack, data, concepts, scores, rows),
            "share_evaluated": {
                key: round(float(exact_cascade(scores, thresholds, parents)[0].float().mean()), 4)
                for key, thresholds in ((pack.alert_set, pack.alert_threshold), ("rate_0.01", by_rate))
            },
        }
    deep = level >= 3
    return {
        "n_concepts": len(concepts),
        "texts": texts,
        "together": joined([parts[name] for name in PROSE if name in parts]).at(0.0),
        "code": joined([parts[name] for name in CODE]).at(0.0),
        "deep_levels": {
            name: {
                "fires_per_held_out_noun": rate((parts[name].strength > 0)[:, deep], parts[name].held_out),
                "right": share_right(
                    ((parts[name].strength > 0) & parts[name].any_sense)[:, deep],
                    (parts[name].strength > 0)[:, deep],
                    parts[name].held_out,
                ),
            }
            for name in ("news", "news_elsewhere", ANSWERS)
        },
        "sense_choice": sense_choice(data, concepts, lambda rows: probe_scores(pack, data.states[rows], parents)),
    }


def far_shares(familiar: Any, data: Dataset) -> dict[str, float]:
    """The share of the tokens of each kind of text that are unlike those of a calibration."""
    running, shares = data.running, {}
    for name in (*PROSE, *CODE):
        rows = running.where(split="test", domains=(name,)).nonzero().flatten()
        if len(rows):
            shares[name] = round(float(familiar.far(rmsnorm(running.states[rows])).double().mean()), 4)
    return shares


def far_without_code(data: Dataset) -> dict[str, float]:
    """`far_shares` of a calibration on prose alone; manuals quote code."""
    running = data.running
    prose = tuple(domain.name for domain in DOMAINS if domain.is_prose and domain.name != "manuals")
    rows = running.where(split="train", domains=prose).nonzero().flatten()
    some = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(data.source.seed))[:N_FAMILIAR]]
    held_out = running.where(split="validation", domains=prose)
    return far_shares(Familiar.of(rmsnorm(running.states[some]), rmsnorm(running.states[held_out])), data)


def joined(parts: list[Seen]) -> Seen:
    return Seen(*(torch.cat([getattr(part, name) for part in parts]) for name in Seen.__dataclass_fields__))


def probe_scores(pack: Any, states: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    weights: Weights = {name: tensor.float() for name, tensor in pack.weights.items()}
    return path_scores(torch.cat([logits_of(rmsnorm(part), weights) for part in states.split(CHUNK)]), parents)


def of_sentences(
    pack: Any, data: Dataset, concepts: list[Concept], scores: torch.Tensor, rows: torch.Tensor
) -> dict[str, Any]:
    """By the thresholds for a sentence: concepts listed in one and in a passage, and the share that some word means."""
    truth = labels_by_distance(data.wordnet, data.running.words, [concept.key for concept in concepts])
    result = {}
    fires = scores > pack.thresholds_for("max")
    right = truth.any_sense[data.running.word[rows]]
    for name, number in (("sentence", data.running.sentence[rows]), ("passage", data.running.passage[rows])):
        _, index = number.unique(return_inverse=True)
        where, n = index.unsqueeze(1).expand_as(fires), int(index.max()) + 1
        listed, named = (
            torch.zeros(n, fires.shape[1]).scatter_reduce_(0, where, values.float(), "amax") > 0
            for values in (fires, right)
        )
        result[name] = {
            "n": n,
            "listed": round(float(listed.sum()) / n, 3),
            "right": round(int((listed & named).sum()) / max(1, int(listed.sum())), 4),
        }
    return result


def sense_choice(data: Dataset, concepts: list[Concept], scores_of: Any) -> dict[str, Any]:
    """Of ambiguous words in WordNet's own examples, held-out ones: how often the concept of the sense meant scores more
    than those of the word's other senses; beside it, how often the commonest sense is the one meant.
    """
    up, index = ancestors(data.wordnet), {concept.key: i for i, concept in enumerate(concepts)}
    rows, candidates, meant, common = [], [], [], []
    for number, point in enumerate(data.points):
        if point.source != "example" or point.split != "test":
            continue
        lowest = {}
        for sense in data.wordnet.senses.get(point.lemma, ()):
            column = next((index[key] for key in up.get(sense.key, ()) if key in index), None)
            if column is not None:
                lowest[sense.key] = column, sense.count
        [key] = point.mass
        if key not in lowest or len({column for column, _ in lowest.values()}) < 2:
            continue
        rows.append(number)
        candidates.append(sorted({column for column, _ in lowest.values()}))
        meant.append(lowest[key][0])
        common.append(max(lowest.values(), key=lambda entry: entry[1])[0])
    scores = scores_of(torch.tensor(rows))
    chosen = [max(columns, key=lambda c: float(scores[i, c])) for i, columns in enumerate(candidates)]
    n = len(rows)
    return {
        "n": n,
        "right": round(sum(a == b for a, b in zip(chosen, meant, strict=True)) / n, 4),
        "commonest_sense": round(sum(a == b for a, b in zip(common, meant, strict=True)) / n, 4),
        "by_chance": round(sum(1 / len(columns) for columns in candidates) / n, 4),
    }


def embedding_control(pack: Any, data: Dataset) -> dict[str, Any]:
    """The same concepts trained the same way on the input embedding of the token."""
    concepts = concepts_of(pack)
    parents, bank = parents_of(concepts), Bank.of(data, embedding=True)
    weights = bank.fit(concepts, bank.labels(concepts), LINEAR)

    def scores_of(ids: torch.Tensor) -> torch.Tensor:
        x = bank.standard(rmsnorm(data.embedding[ids]))
        return path_scores(torch.cat([logits_of(part, weights) for part in x.split(CHUNK)]), parents)

    truth = labels_by_distance(data.wordnet, data.running.words, [concept.key for concept in concepts])
    flat, result = torch.full((len(concepts),), 0.5), {}
    for name in ("news", "news_elsewhere", ANSWERS):
        rows = data.running.where(split="test", domains=(name,)).nonzero().flatten()
        strength = strengths(scores_of(data.running.token_id[rows]), flat)
        seen = Seen.of(strength, data.running, truth, rows)
        result[name] = {str(n): seen.right_at(n) for n in PER_NOUN}
    return {
        "right_at": result,
        "sense_choice": sense_choice(data, concepts, lambda rows: scores_of(data.token_ids[rows])),
    }


if __name__ == "__main__":
    sys.exit(main())
