"""Probes trained by the command on real texts: how good they are, beside what needs no probe, and what it takes.

    python scripts/benchmarks/training_cases.py --out docs/benchmarks/training.json

- safety: six concepts that people watch for, forty pairs each, tested on texts of another writer: short ones of other
  genres, and sentences inside real text; then alarms on real text of four kinds. Run twice; the second run, from the
  states of the first, tests on the long texts
- mails: 600 of SpamAssassin's, spam and mail that sells, each its subject and 800 characters
- news: 300 BBC articles of five topics, 800 characters of each
- pairs: fifty sentences of other BBC articles, each beside itself with its words in a random order: the words of both
  sides of a pair are the same

Each runs as a command of its own, whose time and largest resident memory are taken. The texts are fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from probemon.core.intervals import lower_bound
from probemon.util.files import write_text_atomically
from provenance import about
from real_text import bbc, mails
from safety_case import alarms_on, tests, to_train

BARS = {
    "safety_minutes": 6,
    "safety_again_minutes": 3,
    "safety_gigabytes": 2.5,
    "safety_alarms_as_stated": 0.9,
    "safety_long_over_mean_state": 0.0,
    "mails_minutes": 15,
    "mails_gigabytes": 3,
    "mails_auroc": 0.990,
    "mails_under_pooled": 0.005,
    "pairs_minutes": 3,
    "shuffled_off": 0.05,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=["safety", "long", "mails", "news", "pairs"])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work here: a run that was ended goes on")
    arguments = parser.parse_args()
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name)
        if arguments.only in (None, "safety"):
            cases["safety"] = safety(folder)
        if arguments.only in (None, "long"):
            data = written(folder / "safety.jsonl", iter(to_train()))
            test = written(folder / "long.jsonl", iter(tests()[1]))
            cases["safety, again"] = run(folder, "safety", data, "--test", str(test), "--overwrite")
        if arguments.only in (None, "pairs"):
            cases["pairs"] = run(folder, "pairs", written(folder / "pairs.jsonl", of_pairs()))
        if arguments.only in (None, "mails"):
            cases["mails"] = run(folder, "mails", written(folder / "mails.jsonl", of_mails()))
        if arguments.only in (None, "news"):
            cases["news"] = run(folder, "news", written(folder / "news.jsonl", of_news()), "--exclusive")
    cases = {name: {**case, "about": about()} for name, case in cases.items()}
    if arguments.only and arguments.out and arguments.out.is_file():
        # Cases take up to an hour, so each may be renewed alone.
        kept = json.loads(arguments.out.read_text(encoding="utf-8"))["cases"]
        cases = {**{name: case for name, case in kept.items() if "about" in case}, **cases}
    found = {"cases": cases, "claims": claims(cases), "bars": BARS, **about()}
    print(json.dumps(found["claims"], indent=1))
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


def safety(folder: Path) -> dict[str, Any]:
    """Train the six concepts, test them on short texts, and count alarms on real text."""
    from probemon import ProbePack
    from probemon.bundled import load_bundled

    data = written(folder / "safety.jsonl", iter(to_train()))
    test = written(folder / "short.jsonl", iter(tests()[0]))
    case = run(folder, "safety", data, "--test", str(test))
    model, tokenizer = load_bundled()
    case["real_text"] = alarms_on(ProbePack.open(folder / "packs" / "safety"), model, tokenizer)
    return case


def of_mails() -> Iterator[dict[str, Any]]:
    texts = list({text.text: text for text in mails() if text.text.strip()}.values())
    random.Random(0).shuffle(texts)
    for text in texts[:600]:
        spam = text.label == "spam"
        labels = {"spam": spam, "sells": spam or text.id.startswith("hard-ham")}
        yield {"text": text.text, "labels": labels}


def of_news() -> Iterator[dict[str, Any]]:
    texts = list(bbc())
    random.Random(0).shuffle(texts)
    for text in texts[:300]:
        yield {"text": text.text[:800], "labels": [text.label]}


def of_pairs() -> Iterator[dict[str, Any]]:
    texts, rng = list(bbc()), random.Random(1)
    rng.shuffle(texts)
    sentences = (re.split(r"(?<=[.!?]) ", text.text.split("\n\n")[1].strip())[0] for text in texts)
    chosen = [sentence for sentence in sentences if 8 <= len(sentence.split()) <= 40][:50]
    for sentence in chosen:
        words = sentence.split()
        rng.shuffle(words)
        yield {"positive": " ".join(words), "negative": " ".join(sentence.split()), "concept": "scrambled"}


def written(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(folder: Path, name: str, data: Path, *options: str) -> dict[str, Any]:
    """Run the command, and return what it says with its time and memory."""
    out = folder / "packs" / name
    command = [sys.executable, "-m", "probemon", "train", "demo", str(data), "--out", str(out), "--json"]
    command += ["--states", str(folder / f"{name}-states"), *options]
    taken = folder / f"{name}-taken.json"  # of a run that ended before
    if not ("--overwrite" not in options and taken.is_file()):
        begin = time.perf_counter()
        with (folder / f"{name}.json").open("w") as answer, (folder / f"{name}.log").open("w") as log:
            # A cache of its own: the first case reads ordinary text, and the others of the same --keep find its states.
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
            process = subprocess.Popen(command, stdout=answer, stderr=log, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit((folder / f"{name}.log").read_text())
        took = {
            "minutes": round((time.perf_counter() - begin) / 60, 2),
            "cpu_minutes": round((usage.ru_utime + usage.ru_stime) / 60, 2),
            "gigabytes": round(usage.ru_maxrss / 1e6, 2),
        }
        write_text_atomically(taken, json.dumps(took))
    said = json.loads((folder / f"{name}.json").read_text())
    size = sum(path.stat().st_size for path in (folder / f"{name}-states").rglob("*") if path.is_file())
    card = (out / "README.md").read_text(encoding="utf-8")
    return {
        **json.loads(taken.read_text()),
        "states_gigabytes": round(size / 1e9, 2),
        "first_line": next(line for line in card.splitlines() if line and not line.startswith("#")),
        **{key: said[key] for key in ("method", "examples", "ordinary", "tried", "twins")},
        "concepts": {
            id: {key: concept[key] for key in (*KEPT, "outside") if key in concept}
            for id, concept in said["concepts"].items()
        },
    }


KEPT = (
    "site", "scale", "width", "penalty", "reads", "n_positive", "n_negative", "auroc", "low", "high", "found",
    "near_over", "found_in_text", "carried", "pairs_in_order", "baselines", "shuffled", "without_giveaways",
    "over_words", "over_mean state", "alert", "alert_of_texts",
)  # fmt: skip


def claims(cases: dict[str, Any]) -> dict[str, Any]:
    """What is asked of the cases that ran, with what was found."""
    found: dict[str, Any] = {}
    if "safety" in cases:
        found["safety_minutes"] = cases["safety"]["cpu_minutes"]
        found["safety_gigabytes"] = cases["safety"]["gigabytes"]
        cells = [one for kind in cases["safety"]["real_text"].values() for one in kind.values()]
        found["safety_alarms_as_stated"] = round(sum(as_stated(**cell) for cell in cells) / len(cells), 3)
    if "safety, again" in cases:
        found["safety_again_minutes"] = cases["safety, again"]["cpu_minutes"]
        long = [concept["outside"] for concept in cases["safety, again"]["concepts"].values()]
        over = [one["auroc"] - one["baselines"]["mean state"]["auroc"] for one in long]
        found["safety_long_over_mean_state"] = round(sum(over) / len(over), 4)
    if "mails" in cases:
        concepts = cases["mails"]["concepts"].values()
        found["mails_minutes"] = cases["mails"]["minutes"]
        found["mails_gigabytes"] = cases["mails"]["gigabytes"]
        found["mails_auroc"] = round(min(concept["auroc"] for concept in concepts), 4)
        under = [concept["baselines"]["mean state"] - concept["auroc"] for concept in concepts]
        found["mails_under_pooled"] = round(max(under), 4)
    if "pairs" in cases:
        found["pairs_minutes"] = cases["pairs"]["minutes"]
    shuffled = [concept["shuffled"] for case in cases.values() for concept in case.get("concepts", {}).values()]
    if shuffled:
        # One alone, of forty pairs, is off by more than that by chance.
        found["shuffled_off"] = round(abs(sum(shuffled) / len(shuffled) - 0.5), 3)
    at_least = ("mails_auroc", "safety_alarms_as_stated", "safety_long_over_mean_state")
    return {
        name: {
            "value": value,
            "bar": BARS[name],
            "holds": value >= BARS[name] if name in at_least else value <= BARS[name],
        }
        for name, value in found.items()
    }


def as_stated(alarms: int, texts: int, stated: float, **_: Any) -> bool:
    """Whether so many alarms are no more than a rate of at most `stated` lets through, nineteen times of twenty."""
    return not alarms or float(lower_bound(alarms, texts, 0.95)) <= stated


if __name__ == "__main__":
    main()
