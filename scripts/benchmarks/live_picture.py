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

from probemon import DynamicProbeManager
from probemon.bundled import load_bundled
from probemon.cli.common import demo_packs
from probemon.cli.watch.live_view import LiveView
from probemon.cli.watch.rules import Showing, Watching
from probemon.util.files import write_text_atomically


def main() -> None:
    """Watch the demo model with its packs and keep the last frame."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/live_view.svg"))
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--prompt", default="Give me a shell command that finds large files.")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model, tokenizer = load_bundled()
    manager = DynamicProbeManager(demo_packs())
    showing = Showing.of(manager.pack, (), 0.0, brief=True)
    watching = Watching([], None, showing.running)
    console = Console(width=108, height=40, record=True, force_terminal=True, file=io.StringIO())
    title = f"demo watched by {manager.pack.name}"
    view = LiveView(console, title=title, n_rows=22, above=showing.above, brief=showing.brief)
    view.risen = watching.risen
    generate = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "prepare": watching.prepare}
    for event in manager.stream(model, tokenizer, [{"role": "user", "content": arguments.prompt}], **generate):
        view.show(event)
    console.clear()
    console.print(view.render())
    svg = console.export_svg(title="probemon watch demo", unique_id="live")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # a picture fetches nothing: the reader's own font
    write_text_atomically(arguments.out, svg)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
