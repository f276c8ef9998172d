"""int8 copies of the packs that come with the project: their size, and how far their scores move on their golden
states.

python scripts/benchmarks/int8_error.py                # writes docs/benchmarks/int8.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from probemon import ProbePack
from probemon.packs.quantize import quantize
from probemon.util.files import write_text_atomically
from provenance import about

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Copy, read what each copy states, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/int8.json")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for manifest in sorted((ROOT / "probes").glob("*/manifest.json")):
        pack = ProbePack.open(manifest.parent)
        with tempfile.TemporaryDirectory() as scratch:
            copy = quantize(pack, Path(scratch) / "copy")
            found[pack.name] = {
                "weight_bytes": pack.weight_bytes(),
                "int8_bytes": copy.weight_bytes(),
                **copy.manifest["quality"]["int8"],
            }
        print(pack.name, json.dumps(found[pack.name]))
    write_text_atomically(arguments.out, json.dumps({"packs": found, **about()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
