"""Docstrings, comments and pages stay in plain words: idioms that readers had to read twice are counted."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
IDIOMS = {
    "where for if": r"\bwhere (?:it|they|there|that|one|a|the|none|nothing|something)\b",
    "begins with What": r"(?:^|[.;:] )What [a-z]+",
    "of which": r"\b(?:of|in|by|from|to) (?:which|whom)\b",
    "tell": r"\b(?:told|tells?)\b",
    "beside": r"\bbeside\b",
    "is no noun": r"\b(?:is|are|was|were) no (?!longer|more)[a-z]+",
    "fronted Of": r"(?:^|[.;:] )Of (?!course)[a-z]",
    "stands, lies": r"\b(?:stands?|lies?|lay)\b",
    "anew": r"\banew\b",
    "but for": r"\bbut for\b",
    "of its own": r"\bof (?:its|their|one's|your|our) own\b",
    "holds for": r"\bholds? (?:for|to|of)\b",
    "who": r"\b(?:[Ww]ho|[Ww]hoever) (?:reads|asks|follows|runs|hears|left|leaves|attaches|wants|is)\b",
}
MARKS = re.compile("|".join(IDIOMS.values()), re.MULTILINE)


def prose_of(file):
    """Docstrings and comments of a module; a page without its blocks of code."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, nodes)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docstrings, *(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)])


def marks_per_10000(files):
    prose = [prose_of(file) for file in files]
    return 1e4 * sum(len(MARKS.findall(text)) for text in prose) / sum(len(text.split()) for text in prose)


def test_idioms_are_counted():
    text = "It is no file, beside those of which a page tells.\nWhat holds for it lies there."
    assert len(MARKS.findall(text)) == 6


def test_package_and_pages_are_in_plain_words():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert marks_per_10000(pages) <= 15
    assert marks_per_10000([*pages, *(ROOT / "probemon").rglob("*.py")]) <= 20


def test_pages_are_few_and_short():
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) <= 30 and sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 60_000
