"""Write the tables of the pages from the result files, each between its two marks.

    python scripts/benchmarks/figures.py             # renews every table
    python scripts/benchmarks/figures.py --check     # changes nothing; status 1 where a page and its file differ

A table stands on a page as

    <!-- table: cpu.json claims -->

    | | measured | bar |
    ...

    <!-- end of table -->

and is made by the function of that name in `TABLES` from docs/benchmarks/cpu.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import adapters, hosts, library, performance, quality, service

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- table: (\S+) (\w+) -->\n)((?:(?!<!-- table).)*?)(<!-- end of table -->)", re.DOTALL)
PACKS = ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp")

TABLES: dict[str, tuple[Callable[[dict[str, Any]], list[str]], ...]] = {
    "architectures.json": (hosts.architectures,),
    "bem.json": (adapters.costs, adapters.grid),
    "bem_commands.json": (adapters.commands,),
    "bem_forms.json": (adapters.forms,),
    "corpus.json": (performance.corpus,),
    "cpu.json": (
        performance.claims,
        performance.host,
        performance.grid,
        performance.scale,
        performance.scale_memory,
        performance.scale_rules,
        performance.twins,
        performance.first_use,
    ),
    "drift.json": (service.drift,),
    "host_recipes.json": (hosts.recipes, hosts.recipe_traps, hosts.recipe_refusals),
    "first_sight.json": (library.first_sight_claims,),
    "library.json": (library.library_claims, library.library_domains, library.library_safety, library.library_real),
    "ltm_recall.json": (hosts.recall_study,),
    "mails.json": (quality.mails,),
    "manifests": (quality.packs,),  # of the packs that come with the project
    "memory_overhead.json": (hosts.memory_overhead,),
    "nvidia-h100-80gb-hbm3.json": (performance.gpu, performance.gpu_claims),
    "operations.json": (service.operations,),
    "paging.json": (performance.paging,),
    "profile_cascade.json": (performance.profile,),
    "quality.json": (quality.rules,),
    "routing_pays.json": (adapters.pays,),
    "serving_load.json": (service.serving,),
    "settings.json": (performance.settings,),
    "shown.json": (quality.shown, quality.shown_claims),
    "training.json": (
        quality.training,
        quality.training_elsewhere,
        quality.training_alarms,
        quality.training_costs,
    ),
    "vllm.json": (service.vllm, service.vllm_runs, service.vllm_schedule, service.vllm_soak),
}


@functools.cache
def result(name: str) -> dict[str, Any]:
    """Return what a result file holds; of "manifests" those of the shipped packs, by name."""
    if name == "manifests":
        return {pack: _read(ROOT / "probes" / pack / "manifest.json") for pack in PACKS}
    return _read(ROOT / "docs/benchmarks" / name)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def table(file: str, name: str) -> str:
    """Return a table as it stands on its page, between its marks."""
    made = {one.__name__: one for one in TABLES.get(file, ())}
    if name not in made:
        raise SystemExit(f"figures: no table {name} is made from {file}: there are {', '.join(made) or 'none'}")
    return f"\n{wrapped(made[name](result(file)))}\n\n"


def block(file: str, name: str) -> list[str]:
    """Return the lines of a table with its marks."""
    return [
        f"<!-- table: {file} {name} -->",
        *table(file, name).removesuffix("\n").split("\n"),
        "<!-- end of table -->",
    ]


def renewed(text: str) -> str:
    """Return a page with each of its tables made anew."""
    return BLOCK.sub(lambda found: found[1] + table(found[2], found[3]) + found[5], text)


def wrapped(lines: list[str]) -> str:
    """Markdown of these lines, each a paragraph, an item or a row of a table: all but rows within 120 columns."""
    broken: list[str] = []
    for line in lines:
        item = re.match(r"(- |\d+\. )?", line)[0]  # type: ignore[index]
        kept = line.startswith(("|", "<!--"))
        broken += [line] if kept else textwrap.wrap(line, 120, subsequent_indent=" " * len(item)) or [""]
    return "\n".join(broken)


def main() -> int:
    """Renew the pages, or say which would change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a page would change")
    check = parser.parse_args().check
    shown, changed = set[tuple[str, str]](), []
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        text = page.read_text(encoding="utf-8")
        shown |= {(file, name) for _, file, name, _, _ in BLOCK.findall(text)}
        new = renewed(text)
        if new != text:
            changed.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new, encoding="utf-8")
    unused = {(file, one.__name__) for file, made in TABLES.items() for one in made} - shown
    for file, name in sorted(unused):
        print(f"figures: {name} of {file} stands on no page", file=sys.stderr)
    for name in changed:
        print(f"{name} {'is not what its result files say' if check else 'renewed'}")
    return int(bool(unused or (check and changed)))


if __name__ == "__main__":
    sys.exit(main())
