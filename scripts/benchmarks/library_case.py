"""The library of concepts on the demo model: what ships, by four figures, on texts of second authors, and its alarms.

    python scripts/benchmarks/library_case.py --keep /tmp/library --out docs/benchmarks/library.json

Fits by the command, whose time and memory are taken (where states of an earlier run are in the folder, the time to read
them is estimated from a sample), then judges the pack by the library's tests: short texts of genres
of their own, and one or two sentences inside real text that is fetched: news, mails, for code a module of Python.
Beside it a regression on words (TF-IDF) learns from the same texts. Alarms are counted on real texts that a reader read
for all concepts: where one stands, or may, the text does not count for it (concept_texts/real_read.json).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probemon import ProbePack
from probemon.bundled import load_bundled
from probemon.lab.library.evaluate import ROLES, evaluate, groups_of, inside, test_labels
from probemon.lab.library.fit import examples_of
from probemon.lab.library.library import Library
from probemon.lab.training.evaluation import difference
from probemon.lab.training.examples import Example, Examples
from probemon.lab.training.logistic import Targets, fit_logistic, logits
from probemon.lab.training.metrics import auroc_labelled
from probemon.lab.training.state_store import TextReader, shards_of
from probemon.lab.training.texts import render
from probemon.lab.training.words import Vocabulary
from probemon.util.files import sha256, write_text_atomically
from provenance import about
from real_text import bbc, mails
from real_text import library as modules_of_python
from safety_case import FOLDER, alarms_on
from training_cases import as_stated

LAYERS, NAME = "12,15", "concepts-smollm2-135m"
N_SAMPLE = 400  # texts
PAIRS = 40  # of each author and concept, as the command takes them
NEAR = 0.6
BARS = {"cpu_minutes": 30, "ships": 60, "near_on_tests": 60, "over_words": 45, "alarms_as_stated": 0.9}
PENALTIES = (0.1, 0.01, 1e-3, 1e-4)  # of the regression on words, the best in hindsight
KEPT = (
    "site", "scale", "width", "reads", "near", "pairs_in_order", "against_ordinary", "found", "near_over",
    "carried_against_ordinary", "found_in_text",
)  # fmt: skip
OF_ALERT = ("threshold", "rate", "high", "new_kind_high", "worst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work here: a run that was ended goes on")
    parser.add_argument("--concepts", default="", help="as of `probemon library fit`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = case(arguments.keep or Path(name), [one for one in arguments.concepts.split(",") if one])
    print(json.dumps(found["claims"], indent=1))
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


def case(folder: Path, concepts: Sequence[str]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    took = by_command(folder, concepts)
    library, pack = Library.open(), ProbePack.open(folder / "pack")
    ids = library.chosen(concepts)
    quality = json.loads((folder / "fit.json").read_text())
    if took["states_kept"]:
        took |= reading(library, ids, sum(one["tokens"] for one in quality["examples"].values()))
    told = judgement(folder, pack, library)
    judged, elsewhere, alarms = told["tests"], told["words"], told["real_text"]
    by_concept = {}
    for id in ids:
        found, verdict = quality["concepts"][id], quality["verdicts"][id]
        by_concept[id] = {
            "path": library.concepts[id].path,
            "verdict": verdict["group"],
            "misses": verdict["reasons"],
            **{key: found[key] for key in KEPT},
            "alert_of_texts": {key: found["alert_of_texts"][key] for key in OF_ALERT},
            "tests": {name: {**one, **elsewhere[id][name]} for name, one in judged.get(id, {}).items()},
        }
    cells = [one for kind in alarms.values() for one in kind.values()]
    ships = [one for one in by_concept.values() if one["verdict"] != "missing"]
    over = [one for one in ships if _over(one["near"]["over_words"]) or _over(one["tests"]["long"]["over_words"])]
    over_on_tests = [one for one in ships if any(_over(part["over_words"]) for part in one["tests"].values())]
    near = [one for one in ships if (one["tests"]["short"]["auroc"] or 0) >= NEAR]
    values = {
        "cpu_minutes": round(took["cpu_minutes"] + took.get("reading_cpu_minutes", 0), 1),
        "ships": len(ships),
        "near_on_tests": len(near),
        "over_words": len(over),
        "alarms_as_stated": round(sum(as_stated(**cell) for cell in cells) / len(cells), 3),
    }
    return {
        "took": took,
        "sha256": sha256(folder / "pack" / "probes.safetensors"),
        "examples": quality["examples"],
        "tried": quality["tried"],
        "concepts": by_concept,
        "real_text": alarms,
        "over_words_on_tests": len(over_on_tests),
        "claims": {
            name: {
                "value": value,
                "bar": BARS[name],
                "holds": value <= BARS[name] if name == "cpu_minutes" else value >= BARS[name],
            }
            for name, value in values.items()
        },
        **about(),
    }


def reading(library: Library, ids: Sequence[str], n_tokens: int) -> dict[str, Any]:
    """Return the CPU minutes that reading so many tokens takes, by a sample: the fit took states that were kept."""
    model, tokenizer = load_bundled()
    torch.set_num_threads(1)
    examples = examples_of(library, ids, pairs=PAIRS).texts
    texts = render(random.Random(1).sample(examples, N_SAMPLE), tokenizer, roles=ROLES)
    reader = TextReader(model, tokenizer, [f"resid_post.{layer}" for layer in LAYERS.split(",")])
    read, begin = 0, time.process_time()
    for states_of, places in reader.kinds(texts):
        for document, tokens, _ in states_of.states(shards_of(texts, places)):
            read += int(texts[places[document.index]].counts(tokens).sum())
    rate = read / (time.process_time() - begin)
    return {
        "tokens": n_tokens,
        "sample_tokens": read,
        "tokens_per_cpu_second": round(rate, 1),
        "reading_cpu_minutes": round(n_tokens / rate / 60, 1),
    }


def judgement(folder: Path, pack: ProbePack, library: Library) -> dict[str, Any]:
    """Return what the tests and real texts say of a pack; kept in the folder for these probes."""
    kept, digest = folder / "judged.json", sha256(pack.directory / "probes.safetensors")
    if kept.is_file():
        told: dict[str, Any] = json.loads(kept.read_text())
        if told["sha256"] == digest:
            return told
    model, tokenizer = load_bundled()
    words: dict[str, dict[str, Any]] = {}

    def beside_words(examples: Examples, scores: np.ndarray) -> None:
        ours = {one["id"]: scores[:, p] for p, one in enumerate(pack.concepts)}
        words.update(over_words(examples_of(library, list(ours), pairs=PAIRS), examples, ours))

    tests = evaluate(pack, model, tokenizer, placed(library, library.chosen()), see=beside_words)
    read = json.loads((FOLDER / "real_read.json").read_text())
    told = {"sha256": digest, "tests": tests, "words": words}
    told["real_text"] = alarms_on(pack, model, tokenizer, read)
    write_text_atomically(kept, json.dumps(told))
    return told


def by_command(folder: Path, concepts: Sequence[str]) -> dict[str, Any]:
    """Fit in a process of its own; return its time and memory."""
    taken = folder / "taken.json"
    if not taken.is_file():
        command = [sys.executable, "-m", "probemon", "library", "fit", "demo", "--out", str(folder / "pack")]
        command += ["--name", NAME, "--layers", LAYERS, "--states", str(folder / "states"), "--overwrite", "--json"]
        command += ["--concepts", ",".join(concepts)] if concepts else []
        kept = (folder / "states" / "states.json").is_file()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        begin = time.perf_counter()
        with (folder / "fit.log").open("w") as log, (folder / "fit.json").open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=log, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit((folder / "fit.log").read_text())
        took = {
            "minutes": round((time.perf_counter() - begin) / 60, 2),
            "cpu_minutes": round((usage.ru_utime + usage.ru_stime) / 60, 2),
            "gigabytes": round(usage.ru_maxrss / 1e6, 2),
            "states_kept": kept,
        }
        write_text_atomically(taken, json.dumps(took))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    found: dict[str, Any] = json.loads(taken.read_text())
    return found


def placed(library: Library, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tests, some of them inside real text: both sides of a pair at the same place of the same."""
    rng = random.Random(5)
    news = [text.text for text in bbc() if len(text.text.split()) > 300]
    letters = [text.text for text in mails(4_000) if text.label == "ham" and len(text.text.split()) > 280]
    modules = [text.text for text in modules_of_python() if len(text.text) > 4_000]
    for texts in (news, letters, modules):
        rng.shuffle(texts)
    return inside(library.tests(ids), [text for two in zip(news, letters, strict=False) for text in two], modules)


def over_words(train: Examples, tests: Examples, ours: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Return by concept, for short and long tests, the AUROC of words and by how much that of the probe is over it."""
    texts = [said(example) for example in train.texts]
    vocabulary, known = Vocabulary.of(texts), torch.from_numpy(train.known())
    features, judged = vocabulary.features(texts), vocabulary.features([said(example) for example in tests.texts])
    targets, n = Targets(torch.arange(len(texts)), known), known.shape[1]
    scores = []
    for penalty in PENALTIES:
        w, b = fit_logistic(features, targets, torch.full((n,), penalty), tolerance=1e-4, most_steps=60)
        scores.append(logits(judged, w, b).double().numpy())
    place, group = {id: p for p, id in enumerate(train.concepts)}, groups_of(tests)
    found: dict[str, dict[str, Any]] = {}
    for q, id in enumerate(tests.concepts):
        found[id] = {}
        for name, labels in test_labels(tests).items():
            areas = [float(np.nan_to_num(auroc_labelled(own[:, place[id]], labels[:, q]))) for own in scores]
            best = scores[int(np.argmax(areas))][:, place[id]]
            value, low, high = difference(ours[id], best, labels[:, q], group, seed=0)
            found[id][name] = {"words": max(areas), "over_words": {"value": value, "low": low, "high": high}}
    return found


def said(example: Example) -> str:
    """Return the text, or what both sides of a chat say."""
    return example.text or "\n".join(str(message["content"]) for message in example.messages)


def _over(entry: Mapping[str, Any]) -> bool:
    return entry["low"] is not None and entry["low"] > 0


if __name__ == "__main__":
    main()
