"""Completes the corpus of ordinary text: adds the texts in the public domain, and counts.

    python scripts/ordinary_texts.py            # writes address.jsonl, novel.jsonl and sources.json
    python scripts/ordinary_texts.py --check    # whether they are as the files say

The other kinds were written for this project, and stand in probemon/lab/training/ordinary as they are; those of the
demo model come from `ordinary_answers.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

from probemon.util.files import sha256, write_text_atomically
from real_text import ADDRESSES, NOVEL, addresses, novel

FOLDER = Path(__file__).resolve().parents[1] / "probemon/lab/training/ordinary"
OURS = {
    "author": "language models, on subjects drawn at random, for this project",
    "licence": "CC0-1.0",
    "source": None,
}
PUBLIC = {
    "address": {
        "author": "presidents of the United States",
        "licence": "public domain (work of the United States government)",
        "source": f"State of the Union addresses, npm {ADDRESSES}",
    },
    "novel": {
        "author": "Herman Melville",
        "licence": "public domain (1851)",
        "source": f"Moby-Dick, npm {NOVEL}",
    },
}
ANSWERS = ("answer", "draft")
OF_MODEL = {**OURS, "author": "SmolLM2-135M-Instruct, to prompts that a language model wrote for this project"}
EACH, LONGEST = 130, 1_100  # texts of a kind in the public domain, and characters of one


def passages(texts: Iterator[Any]) -> list[dict[str, str]]:
    """Return one passage of each of `EACH` texts, or more of each if there are fewer."""
    wholes = [text.text.strip() for text in texts if len(text.text) > 3 * LONGEST]
    rows = []
    for i in range(EACH):
        whole = wholes[i * len(wholes) // EACH]
        at = len(whole) * (1 + i % 3) // 4
        start = whole.find(". ", at) + 2
        cut = whole[start : start + LONGEST]
        rows.append({"text": cut[: cut.rfind(". ") + 1 or cut.rfind(" ")].strip()})
    return rows


def manifest() -> dict[str, Any]:
    """Count the files; answers stand last, so that they change nothing that is drawn of the others."""
    kinds = {}
    for path in sorted(FOLDER.glob("*.jsonl"), key=lambda path: (path.stem in ANSWERS, path.stem)):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        kinds[path.stem] = {
            "texts": len(rows),
            "words": sum(len(said.split()) for row in rows for said in said_in(row)),
            "languages": sorted({row.get("lang", "en") for row in rows}),
            "sha256": sha256(path),
            **(OF_MODEL if path.stem in ANSWERS else PUBLIC.get(path.stem, OURS)),
        }
    total = {name: sum(kind[name] for kind in kinds.values()) for name in ("texts", "words")}
    return {**total, "kinds": kinds}


def said_in(row: dict[str, Any]) -> list[str]:
    """Return the texts of a row."""
    return [row["text"]] if "text" in row else [turn["content"] for turn in row["messages"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.check:
        for kind, texts in (("address", addresses()), ("novel", novel())):
            lines = (json.dumps(row, ensure_ascii=False) for row in passages(texts))
            write_text_atomically(FOLDER / f"{kind}.jsonl", "\n".join(lines) + "\n")
        write_text_atomically(FOLDER / "sources.json", json.dumps(manifest(), indent=1) + "\n")
    found = json.loads((FOLDER / "sources.json").read_text(encoding="utf-8"))
    if found != manifest():
        raise SystemExit(f"{FOLDER / 'sources.json'} does not say what the files hold: run {Path(__file__).name}")
    print(f"{found['texts']:,} texts of {found['words']:,} words in {len(found['kinds'])} kinds")


if __name__ == "__main__":
    main()
