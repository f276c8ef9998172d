"""README and pages: length and order, working links, navigation, and current example output."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_check import loaded_from_elsewhere
from page_output import PAGES as EXAMPLE_PAGES
from probemon.core.scores import COUNTS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONG = {f"docs/{name}.md" for name in ("tutorial", "training", "corpora", "deployment", "drift", "bem")}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def prose_of(page):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page):
    """The names by which links reach a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("length", ["short", "long"])
def test_examples_print_what_the_pages_show(length):
    pages = [page for page in EXAMPLE_PAGES if (page in LONG) == (length == "long")]
    command = [sys.executable, "scripts/benchmarks/page_output.py", "--check", *pages]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr[-3000:]}\nscripts/benchmarks/page_output.py renews the output"


def test_readme_is_short_and_in_the_expected_order():
    assert len(README) <= 7500
    headings = re.findall(r"^## (.+)$", README, flags=re.MULTILINE)
    assert headings[:5] == ["Is it for me?", "Install", "A first result", "My model", "My probes"]
    assert headings.index("What is promised, and what it costs") > headings.index("My probes")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_resolves(page):
    for address in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"https?:", address):
            continue
        path, _, anchor = address.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), address
        assert not anchor or anchor in anchors_of(target), address


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_by_a_page_exist(page):
    for path in re.findall(r"`((?:tests|scripts|docs|probemon)/[\w./-]+)`", prose_of(page)):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_is_wider_than_120_columns(page):
    """But for tables, whose rows cannot be broken, and for what a program prints."""
    text = re.sub(r"^```text\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    wide = [line for line in text.split("\n") if len(line) > 120 and line[0] != "|"]
    assert not wide, wide


def test_every_page_of_the_site_is_in_its_navigation():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(
        page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")
    )


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = (address.partition("#")[0] for address in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)))
        waiting += [(page.parent / path).resolve() for path in links if path and not path.startswith("http")]
    site_only = {ROOT / "docs/index.md", ROOT / "docs/reference.md"}
    assert {page for page in PAGES if page not in reached} <= site_only


def test_glossary_has_every_coverage_and_concept_term():
    terms = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), flags=re.MULTILINE)
    words = {word.strip(' "`') for term in terms for word in term.split(",")}
    views = {"score", "strength", "precision", "right", "level", "path", "alert threshold", "unseen", "path rule"}
    assert {name.replace("_", " ") for name in COUNTS} | views | {"alert set", "site", "ranked"} <= words


def test_external_resources_of_a_page_are_found(tmp_path):
    (tmp_path / "page.html").write_text(
        '<link rel="canonical" href="https://here.org/"><link rel="stylesheet" href="//fonts.org/a.css">'
        '<a href="https://elsewhere.org/">a link</a><script src="js/own.js"></script><img src="http://pictures.org/b.png">'
    )
    (tmp_path / "style.css").write_text('@import "https://fonts.org/c.css"; a { background: url(own.png) }')
    (tmp_path / "picture.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg"><style>@font-face {src: url("https://f.org/d")}</style></svg>'
    )
    assert loaded_from_elsewhere(tmp_path) == [
        "page.html: //fonts.org/a.css",
        "page.html: http://pictures.org/b.png",
        "picture.svg: https://f.org/d",
        "style.css: https://fonts.org/c.css",
    ]
