"""The library of concepts on the demo model: what ships, by four figures, on texts of second authors, and its alarms.

    python scripts/benchmarks/library_case.py --keep /tmp/library --out docs/benchmarks/library.json

Fits by the command, whose time and memory are taken; then fits again from its states with the library's tests as texts
elsewhere, which must give the same probes. Tests are short texts of genres of their own, and one or two sentences
inside real text that is fetched: news, mails, for code a module of Python.
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

from probemon import ProbePack
from probemon.bundled import load_bundled
from probemon.lab.library.fit import fit, fit_settings
from probemon.lab.library.library import Library
from probemon.lab.training.dataset import ELSEWHERE
from probemon.lab.training.evaluation import difference, judge, share
from probemon.lab.training.measured import TrainingMeasurement
from probemon.util.files import sha256, write_text_atomically
from provenance import about
from real_text import bbc, mails
from real_text import library as modules_of_python
from safety_case import alarms_on, in_text, parts_of
from training_cases import as_stated

LAYERS = "12,15"
INSERT = "insert"
BARS = {"minutes": 30, "ships": 60, "over_words": 45, "alarms_as_stated": 0.9}


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
    library = Library.open()
    ids = library.chosen(concepts)
    tests = placed(library.tests(ids))
    model, tokenizer = load_bundled()
    seen: dict[str, Any] = {}

    def see(measurement: TrainingMeasurement) -> None:
        seen.update({one.id: on_tests(measurement, p) for p, one in enumerate(measurement.data.concepts)})

    fitted = fit(
        model,
        folder / "again",
        tokenizer=tokenizer,
        concepts=concepts,
        settings=fit_settings(layers=LAYERS, states=folder / "states", budget=12 << 30),
        model_id="demo",
        name="concepts",
        overwrite=True,
        outside=tests,
        see=see,
        say=lambda line: print(line, file=sys.stderr),
    )
    pack = folder / "pack"
    same = sha256(pack / "probes.safetensors") == sha256(folder / "again" / "probes.safetensors")
    alarms = alarms_on(ProbePack.open(pack), model, tokenizer)
    quality = fitted.quality["concepts"]
    by_concept = {
        id: {
            "path": library.concepts[id].path,
            "verdict": fitted.of[id].group,
            "misses": list(fitted.of[id].reasons),
            **{key: quality[id][key] for key in KEPT},
            **seen[id],
        }
        for id in ids
    }
    cells = [one for kind in alarms.values() for one in kind.values()]
    ships = [one for one in by_concept.values() if one["verdict"] != "missing"]
    over = [one for one in ships if _over(one["over_words"]) or _over(one["long"]["over_words"])]
    values = {
        "minutes": took["cpu_minutes"],
        "ships": len(ships),
        "over_words": len(over),
        "alarms_as_stated": round(sum(as_stated(**cell) for cell in cells) / len(cells), 3),
    }
    return {
        "took": took,
        "same_probes_again": same,
        "first_line": next(line for line in (pack / "README.md").read_text().splitlines() if line.startswith("Of ")),
        "examples": fitted.quality["examples"],
        "tried": fitted.quality["tried"],
        "concepts": by_concept,
        "real_text": alarms,
        "claims": {
            name: {
                "value": value,
                "bar": BARS[name],
                "holds": value <= BARS[name] if name == "minutes" else value >= BARS[name],
            }
            for name, value in values.items()
        },
        **about(),
    }


KEPT = (
    "site", "scale", "width", "reads", "n_positive", "n_negative", "auroc", "low", "high", "baselines", "over_words",
    "over_mean state", "pairs_in_order", "against_ordinary", "found", "near_over", "carried_against_ordinary",
    "found_in_text", "alert_of_texts",
)  # fmt: skip


def by_command(folder: Path, concepts: Sequence[str]) -> dict[str, Any]:
    """Fit in a process of its own; return its time and memory."""
    taken = folder / "taken.json"
    if not taken.is_file():
        command = [sys.executable, "-m", "probemon", "library", "fit", "demo", "--out", str(folder / "pack")]
        command += ["--name", "concepts", "--layers", LAYERS, "--states", str(folder / "states"), "--overwrite"]
        command += ["--concepts", ",".join(concepts)] if concepts else []
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        begin = time.perf_counter()
        with (folder / "fit.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit((folder / "fit.log").read_text())
        took = {
            "minutes": round((time.perf_counter() - begin) / 60, 2),
            "cpu_minutes": round((usage.ru_utime + usage.ru_stime) / 60, 2),
            "gigabytes": round(usage.ru_maxrss / 1e6, 2),
        }
        write_text_atomically(taken, json.dumps(took))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    found: dict[str, Any] = json.loads(taken.read_text())
    return found


def placed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows, those of the genre `insert` inside real text: both sides of a pair at the same place of the same."""
    rng = random.Random(5)
    news = [text.text for text in bbc() if len(text.text.split()) > 300]
    letters = [text.text for text in mails(4_000) if text.label == "ham" and len(text.text.split()) > 280]
    modules = [text.text for text in modules_of_python() if len(text.text) > 4_000]
    for texts in (news, letters, modules):
        rng.shuffle(texts)
    found, places = [], dict[str, tuple[list[str], int, str]]()
    for row in rows:
        plain = {key: value for key, value in row.items() if key != "spans"}
        if row.get("spans"):
            plain["present"] = list(row["spans"])
        if row["genre"] != INSERT:
            found.append(plain)
            continue
        group = str(row["group"])
        if group not in places:
            is_code = row["lang"] not in ("en", "de", "fr", "es", "it", "pt")
            texts = modules if is_code else (news, letters)[len(places) % 2]
            parts, separator = parts_of(texts[len(places) // 2 % len(texts)], rng, is_code=is_code)
            places[group] = parts, max(1, int(len(parts) * rng.uniform(0.3, 0.75))), separator
        found.append(in_text(plain, *places[group]))
    return found


def on_tests(measurement: TrainingMeasurement, p: int) -> dict[str, Any]:
    """Return a concept's figures on the tests, short and long, beside the words of a text."""
    data, scores = measurement.data, measurement.score(p)
    genre = np.asarray([example.fields.get("genre", "") for example in data.examples])
    known = data.judged[:, p]
    outside = data.is_of(ELSEWHERE) & (known >= 0) & ~np.isnan(scores)
    threshold = np.float32(measurement.text_rate(p).threshold)
    found = {}
    for name, use in (("short", outside & (genre != INSERT)), ("long", outside & (genre == INSERT))):
        labels = np.where(use, known, -1)
        value, low, high = difference(
            scores, measurement.baselines["words"][:, p], labels, data.group, seed=measurement.settings.seed
        )
        found[name] = {
            **judge(scores, labels, data.group).as_dict(),
            "found": share(scores[labels == 1] > threshold, data.group[labels == 1]),
            "near_over": share(scores[labels == 0] > threshold, data.group[labels == 0]),
            "baselines": {
                monitor: judge(values[:, p], labels, data.group).as_dict()
                for monitor, values in measurement.baselines.items()
            },
            "over_words": {"difference": None if np.isnan(value) else value, "low": low, "high": high},
        }
    return found


def _over(entry: Mapping[str, Any]) -> bool:
    return entry["low"] is not None and entry["low"] > 0


if __name__ == "__main__":
    main()
