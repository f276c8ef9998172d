"""What each way of descending finds of all that fires, and how much it evaluates: the figures of docs/quality.md.

    python scripts/benchmarks/quality_study.py --out docs/benchmarks/quality.json

The shipped packs on three real texts, each scored by every probe once, which is the truth: noun mentions of WordNet's
examples and glosses whose words the packs were not trained on; answers that the host model wrote with a seed of its
own; BBC news articles that trained nothing. Expand thresholds are calibrated on other news articles. An "independent"
pack is the same weights without the path rule, with alert thresholds at which every probe fires as often on the
calibration articles.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.core.intervals import mean_interval
from probemon.core.scores import Scores
from probemon.engine.audit import TOP, compare
from probemon.errors import CalibrationError
from probemon.host.fingerprint import fingerprint
from probemon.lab.calibration.calibrated_pack import write_calibrated
from probemon.lab.calibration.expansion import Reach, calibrate_expansion
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.state_reader import StateReader
from probemon.lab.corpora.windows import Reading, shards
from probemon.util.cache_folders import cache_dir
from probemon.util.files import write_text_atomically
from provenance import about
from real_text import bbc

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the pack builder
from wordnet_pack.dataset import Source, prepare
from wordnet_pack.generated import generate_texts
from wordnet_pack.mentions import LABELLED
from wordnet_pack.passages import DOMAINS, split_of_text

ROOT = Path(__file__).resolve().parents[2]
PACKS = ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp")
FIXED, RECALLS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7), (0.9, 0.95, 0.99)
KEEP, SEED = (0, 10, 30, 100), 1
States = list[tuple[torch.Tensor, int]]  # of each document [T, D], and how many of its tokens are prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--articles", type=int, default=300, help="to calibrate on; a third as many more to measure on")
    parser.add_argument("--mentions", type=int, default=4000)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    model, tokenizer = load_bundled(torch.bfloat16)
    calibrating, texts = read(model, tokenizer, arguments.articles, arguments.mentions)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in PACKS:
            pack = ProbePack.open(ROOT / "probes" / name)
            for variant in (pack, independent(pack, calibrating, Path(folder) / f"{name}-independent")):
                rows += study(variant, calibrating, texts, Path(folder))
    found = {
        "rows": rows,
        "texts": {
            name: {"documents": len(part), "tokens": sum(len(x) for x, _ in part)} for name, part in texts.items()
        },
        "calibration": {"documents": len(calibrating), "tokens": sum(len(x) for x, _ in calibrating)},
        "top": TOP,
        "minutes": round((time.perf_counter() - begin) / 60, 1),
        **about(),
    }
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


def read(model: Any, tokenizer: Any, n_articles: int, n_mentions: int) -> tuple[States, dict[str, States]]:
    """Hidden states of the calibration articles, and of the three texts that are measured."""
    sites = ProbePack.open(ROOT / "probes" / PACKS[0]).sites
    reader = StateReader(model, tokenizer, sites, Reading(parse_special=True, special_tokens="bos"))

    def states(texts: Sequence[str]) -> Iterator[tuple[torch.Tensor, list[int]]]:
        for _, tokens, hidden in reader.states(shards(read_documents(list(texts)))):
            yield next(iter(hidden.values())).float(), tokens.ids.tolist()

    news = {
        split: [(x, len(x)) for x, _ in states(articles(split, n))]
        for split, n in (("validation", n_articles), ("test", n_articles // 3))
    }
    written = generate_texts(model, tokenizer, seed=SEED, fingerprint=fingerprint(model), folder=cache_dir())
    start = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    generated = []
    for x, ids in states([text.removeprefix(tokenizer.bos_token) for text in written]):
        at = next(i for i in range(len(ids)) if ids[i : i + len(start)] == start) + len(start)
        generated.append((x, at))
    data = prepare(Source(None, 15, 0))
    chosen = torch.nonzero(data.where(split="test", sources=LABELLED))[:, 0]
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(SEED))[:n_mentions]]
    mentions = [(x[None].float(), 1) for x in data.states[chosen]]
    return news["validation"], {"mentions": mentions, "generated": generated, "news": news["test"]}


def articles(split: str, n: int) -> list[str]:
    """`n` BBC articles of a split of the packs' own, so that none has trained them."""
    [domain] = [domain for domain in DOMAINS if domain.name == "news"]
    texts = [text.text[:1200] for text in bbc() if split_of_text(domain, text.id) == split]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(SEED)).tolist()
    return [texts[i] for i in order[:n]]


def every(manager: DynamicProbeManager, documents: States) -> list[np.ndarray]:
    """Scores of every probe `[T, P]` of each document."""
    whole = manager.score_all(torch.cat([x for x, _ in documents])).numpy()
    return np.split(whole, np.cumsum([len(x) for x, _ in documents])[:-1])


def independent(pack: ProbePack, calibrating: States, path: Path) -> ProbePack:
    """The same probes without the path rule, each firing at as many calibration tokens."""
    fires = (np.concatenate(every(DynamicProbeManager(pack), calibrating)) > pack.alert_threshold.numpy()).sum(axis=0)

    def write(alert: torch.Tensor, to: Path) -> ProbePack:
        return ProbePack.write(
            to,
            name=f"{pack.name}-independent",
            concepts=pack.concepts,
            weights=pack.weights,
            score_rule="independent",
            host=pack.manifest["host"],
            inputs=[spec.as_dict() for spec in pack.inputs],
            licence=pack.manifest["licence"],
            card="",
            input_index=pack.input_index,
            alert_threshold=alert,
            recommended={"load_threshold": 0.3},
        )

    draft = write(torch.full((pack.n_probes,), 0.5), path.with_name("draft-" + path.name))
    own = -np.sort(-np.concatenate(every(DynamicProbeManager(draft), calibrating)), axis=0)
    return write(torch.from_numpy(own[fires, np.arange(pack.n_probes)]), path)


def study(pack: ProbePack, calibrating: States, texts: dict[str, States], folder: Path) -> list[dict[str, Any]]:
    """Rows of one pack: every rule on every text, and retained sets and rounds on what was generated."""
    rows = []
    truth = {name: every(DynamicProbeManager(pack), part) for name, part in texts.items()}
    scored = every(DynamicProbeManager(pack), calibrating)
    reach = Reach(pack.tree, pack.score_rule, pack.alert_threshold.numpy())
    packs: dict[str, tuple[ProbePack, float | str]] = {"exact": (pack, "exact")} if pack.score_rule == "path" else {}
    packs |= {f"fixed {value}": (pack, value) for value in FIXED}
    for recall in RECALLS:
        try:
            expansion = calibrate_expansion(reach, scored, recall=recall)
        except CalibrationError as error:
            print(f"{pack.name}, recall {recall}: {error}")
            continue
        packs[f"calibrated {recall}"] = (
            write_calibrated(pack, folder / f"{pack.name}-{recall}", expansion=expansion),
            "calibrated",
        )
    for rule, (used, threshold) in packs.items():
        for name, part in texts.items():
            rows.append(
                row(
                    used,
                    part,
                    truth[name],
                    {"rule": rule, "text": name},
                    load_threshold=threshold,
                    max_loaded_probes=pack.n_probes,
                )
            )
    for rule in [rule for rule in ("exact", "calibrated 0.95", "fixed 0.3") if rule in packs]:
        used, threshold = packs[rule]
        for keep in KEEP:
            for rounds in (None, 1):
                where = {"rule": rule, "text": "generated, step by step", "keep_top_k": keep, "max_rounds": rounds}
                rows.append(
                    row(
                        used,
                        texts["generated"],
                        truth["generated"],
                        where,
                        load_threshold=threshold,
                        max_loaded_probes=pack.n_probes,
                        keep_top_k=keep,
                        max_rounds=rounds,
                    )
                )
    return rows


def row(
    pack: ProbePack, documents: States, truth: list[np.ndarray], where: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """What a setting finds of the truth: shares of each token's firing probes and of its best ten, means over tokens;
    of each document's firing probes, mean over documents; and the share of the probes active.

    Documents are one state after another where retained sets are studied, else memoryless. Of a generated document its
    generated tokens count.
    """
    manager = DynamicProbeManager(pack, strategy="descent", **settings)
    alert, parts = pack.alert_threshold.numpy(), []
    if "keep_top_k" in where:
        active = [actives(manager.score_tokens(hidden, n_prompt), pack.n_probes) for hidden, n_prompt in documents]
    else:
        active = np.split(
            actives(manager.score_tokens(torch.cat([x for x, _ in documents])), pack.n_probes),
            np.cumsum([len(x) for x, _ in documents])[:-1],
        )
    for (hidden, n_prompt), everything, mine in zip(documents, truth, active, strict=True):
        first = 0 if n_prompt == len(hidden) else n_prompt
        parts.append({"active": mine[first:].sum(axis=1), **compare(everything[first:], alert, mine[first:])})
    counts = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    fires = counts["firing"] > 0
    found = 1 - counts["firing_missed"][fires] / counts["firing"][fires]
    low, high = mean_interval(float(found.mean()), len(found))
    by_document = np.asarray(
        [1 - part["firing_missed"].sum() / part["firing"].sum() for part in parts if part["firing"].any()]
    )
    document_low, document_high = mean_interval(float(by_document.mean()), len(by_document))
    made = {
        "pack": pack.name.removesuffix("-calibrated").removesuffix("-independent"),
        "score_rule": pack.score_rule,
        **where,
        "n_tokens": len(fires),
        "n_firing": int(counts["firing"].sum()),
        "firing_recall": round(float(found.mean()), 5),
        "low": round(float(low), 5),
        "high": round(float(high), 5),
        "document_recall": round(float(by_document.mean()), 5),
        "document_low": round(float(document_low), 5),
        "document_high": round(float(document_high), 5),
        "n_documents": len(by_document),
        "top_recall": round(float(1 - counts["top_missed"].mean() / TOP), 5),
        "share_active": round(float(counts["active"].mean() / pack.n_probes), 5),
    }
    print(json.dumps(made), flush=True)
    return made


def actives(scores: Scores, n_probes: int) -> np.ndarray:
    """Active sets `[T, P]`."""
    found = np.zeros((len(scores), n_probes), dtype=bool)
    found[scores.state_of, scores.probes] = True
    return found


if __name__ == "__main__":
    main()
