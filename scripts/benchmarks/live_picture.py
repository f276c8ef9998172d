"""The picture of the live view in README and on the site: the real view of a real run, as SVG.

python scripts/benchmarks/live_picture.py --out docs/live_view.svg
"""

from __future__ import annotations

import argparse
import io
import os
import re
from pathlib import Path

from rich.console import Console

from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.cli.options import PROMPT
from probemon.cli.watch.live_view import LiveView
from probemon.util.files import write_text_atomically


def main() -> None:
    """Watch the demo model with the shipped pack and keep the last frame."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/live_view.svg"))
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model, tokenizer = load_bundled()
    manager = DynamicProbeManager(ProbePack.open("probes/wordnet-smollm2-135m"))
    console = Console(width=108, height=40, record=True, force_terminal=True, file=io.StringIO())
    view = LiveView(console, title="demo watched by wordnet-smollm2-135m", n_rows=22)
    messages = [{"role": "user", "content": PROMPT}]
    for event in manager.stream(model, tokenizer, messages, max_new_tokens=arguments.max_new_tokens, do_sample=False):
        view.show(event)
    console.clear()
    console.print(view.render())
    svg = console.export_svg(title="probemon watch demo", unique_id="live")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # a picture fetches nothing: the reader's own font
    write_text_atomically(arguments.out, svg)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
