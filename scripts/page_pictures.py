"""Pictures of the page of `probemon serve`: the real page of a real server, in Chromium.

python scripts/page_pictures.py                  # renews the pictures of docs/serving.md
python scripts/page_pictures.py --all /tmp/out   # every window and state, to look at after a change of the page
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from browser import Browser

DOCS = Path(__file__).resolve().parents[1] / "docs"
# The pictures of the page of docs: name, answer, width, height, dark, how much of the address follows the answer.
SHOWN = (
    ("page_light", "whales", 1280, 860, False, ""),
    ("page_dark", "stopped", 1280, 860, True, ""),
    ("page_phone", "whales", 390, 760, False, ""),
)
WHALES = "Tell me how whales sing and where they live."
STOP = {"concept": "animal.n.01", "action": "stop"}
# What is asked for the answers: the question, the number of tokens, and further keys.
QUESTIONS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "whales": (WHALES, 160, {}),
    "other": (WHALES, 160, {"temperature": 0.8, "seed": 5}),
    "stopped": ("What do cats, horses and sharks eat?", 160, {"rules": [STOP]}),
    "story": ("Write a long story about a king, his army and the sea.", 600, {}),
}
SIZES = ((320, 700), (390, 844), (800, 900), (1280, 900), (1920, 1080))
QUALITY = 82  # of WebP
_SETTLED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
_ENDED = "/complete|token limit|stopped/.test(document.getElementById('answer-state').textContent)"


def main() -> None:
    """Start the demo server, ask it, and take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="take every window and state instead, into FOLDER")
    arguments = parser.parse_args()
    out: Path = arguments.all or DOCS
    out.mkdir(parents=True, exist_ok=True)
    with _server() as address, tempfile.TemporaryDirectory() as folder:
        wanted = QUESTIONS if arguments.all else {answer for _, answer, *_ in SHOWN}
        answers = {name: _ask(address, *QUESTIONS[name]) for name in wanted}
        with Browser(Path(folder), settled=_SETTLED) as browser:
            for name, answer, width, height, dark, more in _all(answers) if arguments.all else SHOWN:
                place = "" if answer is None else f"#answer={answers[answer]}{more}"
                page = browser.open(address, place, width=width, height=height, dark=dark)
                page.until("document.getElementById('pack').textContent !== ''")
                if place:
                    page.until(_ENDED)
                if "&concept=" in more:
                    page.until("document.querySelector('.card .facts') !== null")
                page.until(_SETTLED)
                picture = page.call("Page.captureScreenshot", format="webp", quality=QUALITY)["data"]
                (out / f"{name}.webp").write_bytes(base64.b64decode(picture))
                browser.close_pages()


def _all(answers: dict[str, str]) -> Iterator[tuple[str, str | None, int, int, bool, str]]:
    states = {
        "empty": (None, ""),
        "answer": ("whales", ""),
        "long": ("story", ""),
        "stopped": ("stopped", ""),
        "card": ("whales", "&concept=whale.n.02"),
        "compared": ("whales", f"&with={answers['other']}"),
    }
    for state, (answer, more) in states.items():
        for width, height in SIZES:
            for dark in (False, True):
                yield f"{state}_{width}{'_dark' if dark else ''}", answer, width, height, dark, more


@contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, "-m", "probemon", "serve", "demo", "--port", "0", "--no-token"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line!r}")
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def _ask(address: str, text: str, n: int, keys: dict[str, Any]) -> str:
    """Return the id of an answer."""
    watch = {"top_k": 12, "rules": keys.get("rules", [])}
    body = {"model": "demo", "temperature": 0, **keys, "max_tokens": n, "probemon": watch}
    body = {key: value for key, value in body.items() if key != "rules"}
    body["messages"] = [{"role": "user", "content": text}]
    asked = urllib.request.Request(
        f"{address.rstrip('/')}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked) as answer:
        return str(json.load(answer)["id"])


if __name__ == "__main__":
    main()
