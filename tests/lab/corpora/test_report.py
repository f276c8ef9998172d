"""A report shows the tables of its analysis in a real browser and never executes its texts."""

import json
import math
import random
import re
import time
from itertools import pairwise

import pytest
import torch
import typer
from typer.testing import CliRunner

from browser import Browser, asks_only, find
from conftest import make_pack
from corpora import make_tokenizer, random_texts
from probemon import DynamicProbeManager
from probemon.errors import ConfigError
from probemon.lab.cli.report import report
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.analyze import analyze
from probemon.lab.corpora.compare import compare
from probemon.lab.corpora.report import embed, write_report
from reports import write_analysis

in_browser = pytest.mark.skipif(
    find() is None,
    reason="NO BROWSER: the report's page is not tested. Install chromium, or name one in PROBEMON_CHROMIUM",
)
VIEWS = ("", "#view=hierarchy", "#view=concepts", "#view=documents")
SHARE, STRENGTH, COUNT = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1), (0.5, 1, 1.5, 2, 3, 4), (1, 2, 4, 8, 16, 32)
HOSTILE = [
    "</script><img src=x onerror=window.hit=1>", "<!--<script>window.hit=1</script>",
    "\"'`&amp;&lt;&#60;", "a\0b\x1b[31m\x7f\x85c", "\u202edesrever\u202c \u200f\u200e.",
    "\u0301\u0300 lone marks e\u0301", "x" * 10_000, "🐋é鯨\r\nnext\n\n\ttab  two", "{{script}} {{data}}",
    "javascript:window.hit=1", "\u2028\u2029\ufeff\ufffe", "</title></style><svg onload=window.hit=1>",
    "__proto__", "constructor", "#doc=1&concept=2", " ",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    # The address changes at once, and what is drawn a little later.
    with Browser(
        tmp_path_factory.mktemp("chromium"), settled="JSON.stringify(place) === JSON.stringify(readPlace())"
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_asked_for_and_no_complaint(request):
    """Of every test that opens a page."""
    if "browser" not in request.fixturenames:
        yield
        return
    with asks_only(request.getfixturevalue("browser"), r"file://[^?#]+\.html"):
        yield


@pytest.fixture(scope="module")
def analysis(model, pack, tmp_path_factory):
    """Random texts, a bad one among them, with a DAG of 40 random probes."""
    texts = [{"id": f"d{i}", "text": text} for i, text in enumerate(random_texts(30))]
    manager = DynamicProbeManager(pack, keep_top_k=5, max_loaded_probes=25, impl="cpu", strategy="descent")
    return analyze(
        manager,
        model,
        make_tokenizer(),
        [*texts[:3], {"id": "empty", "text": ""}, *texts[3:]],
        tmp_path_factory.mktemp("analysis") / "out",
        floor=0.5,
    )


@pytest.fixture(scope="module")
def tables(analysis):
    return {name: getattr(analysis, name)().to_pylist() for name in ("scores", "documents", "summary", "concepts")}


@pytest.fixture(scope="module")
def made(analysis):
    return write_report(analysis)


def shade(value, breaks):
    return f"s{1 + sum(value > least for least in breaks)}"


def strength(score, threshold):
    return math.log(score / (1 - score)) - math.log(threshold / (1 - threshold))


def texts_of(page, selector):
    return page(f"[...document.querySelectorAll({json.dumps(selector)})].map((n) => n.textContent)")


def rows_of(page, body):
    return page(f"[...document.getElementById('{body}').rows].map((r) => [...r.cells].map((c) => c.textContent))")


def first_parents(concepts):
    number = {row["concept"]: i for i, row in enumerate(concepts)}
    return [min((number[parent] for parent in row["parents"]), default=None) for row in concepts]


def weights(concepts):
    """Tokens over the floor of a concept and of all below it, each concept below its first parent, by walking up from
    each.
    """
    parents, found = first_parents(concepts), [0] * len(concepts)
    for at, row in enumerate(concepts):
        c = at
        while c is not None:
            found[c] += row["n_tokens"]
            c = parents[c]
    return found


def above_on_path(concepts, concept):
    """The ids above one by first parents, which the path shown is made of."""
    parents, order = {row["concept"]: row["parents"] for row in concepts}, [row["concept"] for row in concepts]
    first = min(parents[concept], key=order.index, default=None)
    return set() if first is None else {first, *above_on_path(concepts, first)}


# -- what it says --------------------------------------------------------------------------------


@in_browser
def test_overview_has_the_numbers_of_the_tables(browser, made, analysis, tables):
    page, totals = browser.open(made), analysis.manifest["totals"]
    fired = sum(row["n_documents"] > 0 for row in tables["concepts"])
    assert texts_of(page, "#figures b") == [f"{n:,}" for n in (31, totals["tokens"], fired, totals["rows"])]
    seen = totals["tokens"] - totals["unseen"]
    assert texts_of(page, "#coverage td.number") == [
        f"{totals[name] / seen:.1f} a token" for name in ("active", "dropped", "not_reached", "evaluated")
    ]
    assert totals["dropped"] > 0 and sum(totals[name] for name in ("active", "dropped", "not_reached")) == 40 * seen
    assert texts_of(page, "#bad td") == ["empty", "empty"]

    def lead(row):
        score, threshold = (min(max(row[name], 2**-24), 1 - 2**-24) for name in ("max_score", "alert_threshold"))
        strength = math.log(score / (1 - score)) - math.log(threshold / (1 - threshold))
        return -row["n_documents"], -row["n_tokens"], -strength

    most = sorted((row for row in tables["concepts"] if row["n_documents"]), key=lead)[:24]
    above = {concept for row in most for concept in above_on_path(tables["concepts"], row["concept"])}
    lowest = [row["name"] for row in most if row["concept"] not in above]
    assert texts_of(page, "#leading .name") == lowest[:8] != [row["name"] for row in most[:8]]
    said = page("document.body.textContent")
    assert (
        "The floor is a score of 0.5" in said
        and "The card of the pack random says how many, for its own thresholds only" in said
    )
    assert "detected" not in made.read_text()


@in_browser
def test_excluded_concepts_are_reported_separately_from_never_over_the_floor(browser, model, pack, tmp_path):
    manager = DynamicProbeManager(pack, exclude=["c0"])
    n_excluded = manager.plan.n_excluded
    assert 0 < n_excluded < 40
    found = analyze(manager, model, make_tokenizer(), random_texts(8), tmp_path / "out", floor=0.5)
    page, totals = browser.open(write_report(found)), found.manifest["totals"]
    seen = totals["tokens"]
    assert totals["unseen"] == 0 and totals["excluded"] == n_excluded * seen
    assert texts_of(page, "#coverage td.number") == [
        f"{n / seen:.1f} a token"
        for n in (
            totals["active"],
            totals["dropped"],
            totals["not_reached"] - totals["excluded"],
            totals["excluded"],
            totals["evaluated"],
        )
    ]
    assert f"of 40 in the pack, {n_excluded} of them excluded" in page("document.querySelector('#figures').textContent")
    page.go("#view=concepts")
    excluded = {row["name"] for row in found.concepts().to_pylist() if not row["watched"]}
    listed = set(texts_of(page, "#concept-rows .name"))
    assert len(listed) == 40 - n_excluded and not listed & excluded
    assert page("document.getElementById('concept-count').textContent") == (
        f"{40 - n_excluded} of 40 concepts; {n_excluded} are excluded and not listed"
    )
    page.go("#view=hierarchy")
    assert f"{n_excluded} more are excluded" in page("document.getElementById('undrawn').textContent")
    page.go("#view=documents&concept=c0")
    assert "excluded: nothing is known about it" in page("document.getElementById('restriction').textContent")
    page.go("#doc=0")
    assert f"({n_excluded}.0 of them excluded)" in page("document.body.textContent")


@in_browser
def test_concept_of_chats_states_its_tokens_by_part(browser, model, pack, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": "where do whales live"}, {"role": "assistant", "content": "in the sea."}]
    manager = DynamicProbeManager(pack, impl="cpu")
    analysis = analyze(manager, model, tokenizer, [{"messages": chat}, {"text": "whales"}], tmp_path / "out", floor=0.0)
    page, rows = browser.open(write_report(analysis).as_uri()), analysis.scores().to_pylist()
    parts = [row["part"] for row in rows if row["concept"] == rows[0]["concept"]]
    counts = f"{parts.count('user')} user, {parts.count('assistant')} assistant"
    assert f"%): {counts}" in page(f"facts(concepts.id.indexOf({json.dumps(rows[0]['concept'])})).join()")
    assert parts.count("user") and parts.count(None)


@in_browser
def test_unreachable_thresholds_and_unseen_tokens_are_reported(browser, model, tmp_path):
    threshold = torch.full((40,), 0.3)
    threshold[[4, 5]], threshold[6] = math.nan, 1.0
    manager = DynamicProbeManager(make_pack(tmp_path / "p", model, alert_threshold=threshold), impl="cpu")
    texts = [{"id": f"d{i}", "text": text} for i, text in enumerate(random_texts(4))]
    analysis = analyze(manager, model, make_tokenizer(), texts, tmp_path / "out")
    page = browser.open(write_report(analysis).as_uri())
    assert "of 40 in the pack, 3 of them cannot be: alert threshold 1 or not set" in page("document.body.innerText")
    thresholds = page("concepts.threshold")
    told = [page(f"facts({thresholds.index(value)}).join()") for value in (None, 1, 0.3)]
    assert "never over the floor, whatever it scores: its alert threshold is not set" in told[0]
    assert "its alert threshold is 1" in told[1] and "never over the floor" not in told[2]
    assert page("unseenOf(0)") == "" and page("[documents.unseen[0] = 2, unseenOf(0)][1]") == "2 unseen"
    page("documents.unseen[0] = documents.tokens[0], seen[0] = 0")
    assert page("unseenOf(0)") == "no token seen"
    page("(current = { d: 0, present: new Map() }, drawPresent(9))")
    assert "No token of it was seen, so nothing is known about it." in page(
        "document.getElementById('present').textContent"
    )
    both = compare(analysis, analysis)
    assert both.n_mute == 3 and both.stated()["n_mute"] == 3
    assert "(3 of them cannot be: alert threshold 1 or not set)" in both._repr_html_()
    assert "(3 of them cannot be: alert threshold 1 or not set)" in analysis._repr_html_()


@in_browser
def test_concept_rows_equal_the_tables(browser, made, tables):
    page = browser.open(made, "#view=concepts")
    seen = sum(row["n_tokens"] - row["n_unseen"] for row in tables["documents"])
    wanted = sorted(tables["concepts"], key=lambda row: (-row["n_documents"], -row["n_tokens"], row["name"]))
    expected = [
        [
            row["name"] + (" › ".join(row["path"][:-1]) or row["concept"]),
            f"{row['n_documents']:,}",
            f"{row['n_tokens']:,}",
            f"{row['max_score']:.3f}" if row["n_documents"] else "–",
            f"{row['score_sum'] / seen:.4f}",
        ]
        for row in wanted
    ]
    found = rows_of(page, "concept-rows")
    assert [row[:3] for row in found] == [row[:3] for row in expected]
    for row, told in zip(found, expected, strict=True):
        assert all(
            a == b or abs(float(a) - float(b)) < 1.1 * 10 ** -len(b.split(".")[1])
            for a, b in zip(row[3:5], told[3:], strict=True)
        )
    # As many documents as there are columns at most: a cell each, the bad one hatched.
    count = {(row["document"], row["concept"]): row["n_tokens"] for row in tables["summary"]}
    cells = page("[...document.querySelectorAll('.cells')].map((s) => [...s.children].map((c) => c.className))")
    told = [row for row in wanted if row["n_documents"]]
    assert len(cells) == len(told)
    for row, classes in zip(told, cells, strict=True):
        n = [(count.get((d["document"], row["concept"]), 0), d["n_tokens"]) for d in tables["documents"]]
        assert classes == ["blind" if not of else shade(k / of, SHARE) if k else "" for k, of in n]


@in_browser
def test_concepts_can_be_sorted_filtered_and_opened(browser, made, tables):
    page = browser.open(made, "#view=concepts")
    page.click("document.querySelectorAll('#concept-head button')[3]")
    assert texts_of(page, "#concept-rows .name") == [
        row["name"]
        for row in sorted(
            tables["concepts"], key=lambda row: (-round(row["max_score"], 4), -row["n_tokens"], row["name"])
        )
    ]
    page.click("document.querySelectorAll('#concept-head button')[0]")
    assert texts_of(page, "#concept-rows .name") == sorted(row["name"] for row in tables["concepts"])
    page.go("#view=concepts&sort=toString")
    assert texts_of(page, "#concept-head [aria-sort]") == ["documents ▾"]
    page.go("#view=concepts")
    page.click("document.getElementById('concept-query')")
    page.type("CONCEPT 3")
    matching = [row for row in tables["concepts"] if any("concept 3" in name for name in row["path"])]
    assert set(texts_of(page, "#concept-rows .name")) == {row["name"] for row in matching} and 0 < len(matching) < 40
    assert (
        texts_of(page, "#concept-count") == [f"{len(matching)} of 40 concepts"]
        and page("document.getElementById('concept-query').value") == "CONCEPT 3"
    )
    best = max(tables["summary"], key=lambda row: row["n_tokens"])
    page.go("#view=concepts")
    name = next(row["name"] for row in tables["concepts"] if row["concept"] == best["concept"])
    cell = (
        "[...document.querySelectorAll('.cells')].find((s) => s.closest('tr').querySelector('.name').textContent ==="
        f" {json.dumps(name)}).children[{best['document']}]"
    )
    page.point(cell)
    of = tables["documents"][best["document"]]["n_tokens"]
    assert texts_of(page, "#tip div")[:2] == [
        best["doc_id"],
        (
            f"{name}: over the floor at {best['n_tokens']} of {of} tokens"
            f" ({100 * best['n_tokens'] / of:.{1 if best['n_tokens'] / of < 0.1 else 0}f} %)"
        ),
    ]
    page.click(cell)
    assert (
        rows_of(page, "document-rows")[0][:3] == [best["doc_id"], f"{best['max_score']:.3f}", str(best["n_tokens"])]
        and len(rows_of(page, "document-rows")) == 1
    )


@in_browser
def test_documents_of_a_concept_are_listed_best_first(browser, made, tables):
    page = browser.open(made, "#view=documents")
    listed = rows_of(page, "document-rows")
    assert [(row[0], row[1], row[2]) for row in listed] == [
        (row["doc_id"], str(row["n_tokens"]), f"{row['n_rows']:,}") for row in tables["documents"]
    ]
    assert listed[3][3] == "not scored: empty"
    often = sorted((row for row in tables["concepts"] if row["n_documents"]), key=lambda row: row["n_documents"])
    for concept in (often[0]["concept"], often[-1]["concept"]):
        page.go(f"#concept={concept}")
        mine = sorted(
            (row for row in tables["summary"] if row["concept"] == concept),
            key=lambda row: (-row["max_score"], row["document"]),
        )
        assert [row[:3] for row in rows_of(page, "document-rows")] == [
            [row["doc_id"], f"{row['max_score']:.3f}", str(row["n_tokens"])] for row in mine
        ]
    page.click("document.querySelector('#document-rows a')")
    assert page("location.hash") == f"#concept={concept}&doc={mine[0]['document']}" and texts_of(
        page, "#document-id"
    ) == [mine[0]["doc_id"]]
    page.click("[...document.querySelectorAll('#turn a')].find((a) => a.textContent === 'next')")
    assert texts_of(page, "#document-id") == [mine[1]["doc_id"]]


@in_browser
def test_strongest_concepts_of_a_document_are_of_different_branches(browser, made, tables):
    page, concepts = browser.open(made), tables["concepts"]
    number = {row["concept"]: i for i, row in enumerate(concepts)}

    def above(c):
        return {a for parent in concepts[c]["parents"] for a in above(number[parent]) | {number[parent]}}

    for d, found in enumerate(page("documents.best")):
        chosen = []
        mine = [row for row in tables["summary"] if row["document"] == d]
        for row in sorted(
            mine,
            key=lambda row: (
                -strength(row["max_score"], concepts[number[row["concept"]]]["alert_threshold"]),
                number[row["concept"]],
            ),
        ):
            c = number[row["concept"]]
            if len(chosen) < 3 and not any(c in above(other) or other in above(c) for other in chosen):
                chosen.append(c)
        assert found == chosen


# -- the hierarchy -------------------------------------------------------------------------------


@in_browser
def test_edges_within_or_up_a_level_lose_no_width(browser, tmp_path):
    """As in packs imported with levels of their own: A:0 > B:1 > D:1 and C:0; E:0 > F:0. All fire but E."""
    concepts = [("A", "A", [], 0.5), ("B", "B", ["A"], 0.5), ("E", "E", [], 0.5)]
    concepts += [("C", "C", ["B"], 0.5), ("D", "D", ["B"], 0.5), ("F", "F", ["E"], 0.5)]
    tokens = [(i, i + 1, {c: 0.9 for c in (0, 1, 3, 4, 5)}) for i in range(8)]
    found = write_analysis(tmp_path / "a", [("d", "abcdefgh", tokens, "")], concepts, levels=[0, 1, 0, 0, 1, 0])
    page = browser.open(write_report(found), "#view=hierarchy")
    cells = page("[...document.querySelectorAll('#icicle button')].map((n) => n.cell)")
    width = {concepts[cell["c"]][0]: cell["width"] for cell in cells[1:]}
    assert width == pytest.approx({"A": 32 / 40, "B": 24 / 40, "C": 8 / 40, "D": 8 / 40, "E": 8 / 40, "F": 8 / 40})


@in_browser
def test_width_is_the_tokens_of_a_concept_and_its_descendants(browser, made, tables):
    page, concepts = browser.open(made, "#view=hierarchy", width=1000), tables["concepts"]
    weight, parents = weights(concepts), first_parents(concepts)
    cells = page("[...document.querySelectorAll('#icicle button')].map((n) => n.cell)")
    total = sum(row["n_tokens"] for row in concepts)
    assert cells[0] == {"c": None, "rest": None, "depth": 0, "left": 0, "width": 1}
    place = {cell["c"]: cell for cell in cells if cell["rest"] is None}
    for cell in cells[1:]:
        members = cell["rest"] or [cell["c"]]
        assert math.isclose(cell["width"] * total, sum(weight[c] for c in members))
        parent = place[parents[members[0]]]
        assert (
            parent["depth"] == cell["depth"] - 1
            and cell["left"] >= parent["left"] - 1e-9
            and cell["left"] + cell["width"] <= parent["left"] + parent["width"] + 1e-9
        )
    bundles = [c for cell in cells if cell["rest"] for c in cell["rest"]]
    inside = {c for c in range(40) if weight[c] and not any(a in bundles for a in line(parents, c))}
    assert set(place) - {None} == inside and bundles and len(inside) > 10
    pixels = page("[...document.querySelectorAll('#icicle button')].map((n) => n.getBoundingClientRect().width)")
    assert all(abs(px - cell["width"] * pixels[0]) < 1 for px, cell in zip(pixels, cells, strict=True))


def line(parents, c):
    """A concept and those above it, by first parents."""
    return [] if c is None else [c, *line(parents, parents[c])]


@in_browser
def test_the_hierarchy_is_zoomed_by_pointer_and_by_keys(browser, made, tables):
    page, concepts = browser.open(made, "#view=hierarchy"), tables["concepts"]
    weight, parents = weights(concepts), first_parents(concepts)
    top = max((c for c in range(40) if parents[c] is None), key=lambda c: weight[c])
    child = max((c for c in range(40) if parents[c] == top), key=lambda c: weight[c])
    page.click(f"[...document.querySelectorAll('#icicle button')].find((n) => n.cell.c === {top})")
    assert page("location.hash") == f"#view=hierarchy&root={concepts[top]['concept']}" and texts_of(
        page, "#crumbs > *"
    ) == ["All concepts", concepts[top]["name"]]
    assert page("document.querySelector('#icicle button').cell") == {
        "c": top,
        "rest": None,
        "depth": 0,
        "left": 0,
        "width": 1,
    }
    page.press("ArrowDown")
    assert page("document.activeElement.cell.c") == child
    page.press("ArrowRight")
    assert page("document.activeElement.cell.depth") == 1 and page("document.activeElement.cell.c") != child
    page.press("ArrowLeft")
    page.press("Enter")
    assert (
        texts_of(page, "#crumbs > *") == ["All concepts", concepts[top]["name"], concepts[child]["name"]]
        and page("document.activeElement.cell.c") == child
    )
    row = concepts[child]
    assert f"over the floor in {row['n_documents']:,} documents, at {row['n_tokens']:,} tokens" in " ".join(
        texts_of(page, "#node p")
    )
    page.press("Escape")
    page.press("ArrowUp")
    page.press("Escape")
    assert texts_of(page, "#crumbs > *") == ["All concepts"] and page("location.hash") == "#view=hierarchy"


@in_browser
def test_tooltip_of_a_concept_with_two_parents_names_both(browser, made, tables):
    page, concepts = browser.open(made, "#view=hierarchy", width=3000), tables["concepts"]
    shown = page("[...document.querySelectorAll('#icicle button')].filter((n) => !n.cell.rest).map((n) => n.cell.c)")
    c = next(c for c in shown if c is not None and len(concepts[c]["parents"]) > 1 and concepts[c]["n_documents"] > 1)
    page.point(f"[...document.querySelectorAll('#icicle button')].find((n) => n.cell.c === {c} && !n.cell.rest)")
    row, lines = concepts[c], texts_of(page, "#tip div")
    assert lines[0] == " › ".join(row["path"])
    assert (
        f"in {row['n_documents']:,} documents, at {row['n_tokens']:,} tokens" in lines[2]
        and f"highest {row['max_score']:.3f} (threshold {row['alert_threshold']:.3f})" in lines[3]
    )
    others = [other["name"] for other in concepts if other["concept"] in row["parents"]][1:]
    assert lines[5] == f"placed under its first parent; also below {', '.join(others)}"


# -- documents -----------------------------------------------------------------------------------


def tokens_of(tables, document):
    found = {}
    for row in tables["scores"]:
        if row["document"] == document:
            found.setdefault(row["position"], []).append(row)
    return found


def longest(tables, n):
    return sorted(range(31), key=lambda d: -tables["documents"][d]["n_tokens"])[:n]


@in_browser
def test_tokens_are_shaded_by_their_strongest_concept(browser, made, tables):
    page = browser.open(made)
    threshold = {row["concept"]: row["alert_threshold"] for row in tables["concepts"]}
    for document in longest(tables, 3):
        page.go(f"#doc={document}")
        text, tokens = tables["documents"][document]["text"], tokens_of(tables, document)
        assert page("document.getElementById('text').textContent") == text
        spans = page(
            "[...document.querySelectorAll('#text span')].map((n) => [n.textContent, n.className,"
            " n.tokens[0].position])"
        )
        assert [tuple(span[::2]) for span in spans] == [(text[at], at) for at in sorted(tokens)]
        by = {
            at: max(strength(round(row["score"], 3), threshold[row["concept"]]) for row in rows)
            for at, rows in tokens.items()
        }
        assert [span[1] for span in spans] == [shade(by[at], STRENGTH) for at in sorted(tokens)] and len(
            {span[1] for span in spans}
        ) > 1
        page(
            "document.getElementById('colour').value = 'count', document.getElementById('colour').dispatchEvent(new"
            " Event('change'))"
        )
        assert page("[...document.querySelectorAll('#text span')].map((n) => n.className)") == [
            shade(len(tokens[at]), COUNT) for at in sorted(tokens)
        ]
        page(
            "document.getElementById('colour').value = 'strength', document.getElementById('colour').dispatchEvent(new"
            " Event('change'))"
        )


@in_browser
def test_selecting_a_token_lists_its_concepts_and_a_concept_colours_alone(browser, made, tables):
    (d,) = longest(tables, 1)
    page, tokens = browser.open(made, f"#doc={d}"), tokens_of(tables, d)
    threshold = {row["concept"]: row["alert_threshold"] for row in tables["concepts"]}
    names = {row["concept"]: row["name"] for row in tables["concepts"]}
    number = {row["concept"]: i for i, row in enumerate(tables["concepts"])}

    def told(at):
        rows = sorted(
            tokens[at],
            key=lambda row: (-strength(round(row["score"], 3), threshold[row["concept"]]), number[row["concept"]]),
        )
        return [(names[row["concept"]], f"{row['score']:.3f} over {threshold[row['concept']]:.3f}") for row in rows]

    def shown():
        return list(zip(texts_of(page, "#token .name"), texts_of(page, "#token .number"), strict=True))

    order = sorted(tokens)
    page.point("document.querySelectorAll('#text span')[4]")
    assert shown() == told(order[4])
    page.click("document.querySelectorAll('#text span')[2]")  # keeps it, whatever the pointer passes
    page.point("document.querySelectorAll('#text span')[5]")
    assert shown() == told(order[2])
    page.press("ArrowRight")
    page.press("Enter")
    assert shown() == told(order[3]) and page("document.querySelectorAll('.pinned').length") == 1
    n_tokens = {
        name: sum(any(names[row["concept"]] == name for row in rows) for rows in tokens.values())
        for name in names.values()
    }
    name = min((name for name, _ in told(order[3])), key=lambda name: n_tokens[name])
    choose = (
        "[...document.querySelectorAll('#token .concept')].find((b) => b.querySelector('.name').textContent ==="
        f" {json.dumps(name)})"
    )
    page.click(choose)
    chosen = next(concept for concept in names if names[concept] == name)
    assert page("location.hash") == f"#concept={chosen}&doc={d}"
    coloured = [at for at in order if any(row["concept"] == chosen for row in tokens[at])]
    for place in (page, browser.open(made, f"#concept={chosen}&doc={d}")):  # the address says it all
        assert (
            place(
                "[...document.querySelectorAll('#text span')].filter((n) => !n.classList.contains('s0')).map((n) =>"
                " n.tokens[0].position)"
            )
            == coloured
        )
        assert texts_of(place, "aside [aria-pressed=true] .name")[0] == names[chosen]
    page.call("Page.bringToFront")
    assert 0 < len(coloured) < len(order)
    page.press("Escape")
    page.click(choose)
    assert page("location.hash") == f"#doc={d}" and page("document.querySelectorAll('#text .s0').length") == 0


CONCEPTS = [("a", "animal", [], 0.3), ("w", "whale", ["a"], 0.2), ("n", "number", [], float("nan"))]


@in_browser
def test_tokens_that_share_characters_keep_the_text_intact(browser, tmp_path):
    text = "a🐋b c\u0301d🐋 \n end"
    spans = [(0, 1), (1, 2), (1, 2), (1, 2), (2, 4), (3, 3), (4, 6), (5, 7), (7, 8), (8, 8), (8, 14)]
    documents = [
        ("d", text, [(start, end, {i % 2: 0.5 + i / 100, 2: 0.9}) for i, (start, end) in enumerate(spans)], "")
    ]
    page = browser.open(write_report(write_analysis(tmp_path / "a", documents, CONCEPTS)), "#doc=0")
    assert page("document.getElementById('text').textContent") == text
    found = page(
        "[...document.querySelectorAll('#text span')].map((n) => [n.textContent, n.tokens.map((t) => t.position)])"
    )
    assert found == [
        ["a", [0]],
        ["🐋", [1, 2, 3]],
        ["b", [4]],
        [" ", [4, 5]],
        ["c", [6]],
        ["\u0301", [6, 7]],
        ["d", [7]],
        ["🐋", [8]],
        ["end", [9, 10]],
    ]  # what is blank before a word is not marked
    page.point("document.querySelectorAll('#text span')[1]")
    # By strength: those with a threshold by what they exceed it by, one without by its score.
    assert texts_of(page, "#token .name") == ["whale", "number", "animal", "number", "whale", "number"]
    assert texts_of(page, "#token .number") == [
        "0.510 over 0.200",
        "0.900",
        "0.520 over 0.300",
        "0.900",
        "0.530 over 0.200",
        "0.900",
    ]


@in_browser
def test_strengths_near_0_and_1_are_distinguishable(browser, tmp_path):
    """Thresholds as a calibration sets them for rare and for certain concepts, with scores just over them and far."""
    thresholds = [1e-9, 3e-5, 0.999998, 0.5, 1e-12]
    concepts = [(f"c{i}", f"concept {i}", [], threshold) for i, threshold in enumerate(thresholds)]
    scores = {0: 1.107e-6, 1: 4e-5, 2: 0.9999994, 3: 0.9999, 4: 1.3e-9}
    low = {0: 1.2e-9, 1: 0.2, 2: 0.9999982, 3: 0.500001, 4: 1.5e-12}
    documents = [("d", "far near", [(0, 3, scores), (4, 8, low)], "")]
    analysis = write_analysis(tmp_path / "a", documents, concepts)
    path = write_report(analysis)
    rows = analysis.scores().to_pylist()
    bars = {row["concept"]: row["alert_threshold"] for row in analysis.concepts().to_pylist()}
    by = {0: {}, 1: {}}
    for row in rows:
        by[row["position"]][row["concept"]] = row["score"], bars[row["concept"]]
    page = browser.open(path)
    best = {f"concept {c[1]}": max(strength(*by[at][c]) for at in by) for c in bars}
    told = zip(texts_of(page, "#leading .name"), texts_of(page, "#leading td:nth-child(4)"), strict=True)
    assert {name: float(said.removeprefix("strength ")) for name, said in told} == pytest.approx(best, abs=0.051)
    page = browser.open(path, "#doc=0")
    assert page("[...document.querySelectorAll('#text span')].map((n) => n.className)") == [
        shade(max(strength(*pair) for pair in by[at].values()), STRENGTH) for at in by
    ]
    for at, of_token in by.items():
        page.point(f"document.querySelectorAll('#text span')[{at}]")
        order = sorted(of_token, key=lambda c: -strength(*of_token[c]))
        assert texts_of(page, "#token .name") == [f"concept {c[1]}" for c in order]
        told = zip(order, (pair.split(" over ") for pair in texts_of(page, "#token .number")), strict=True)
        assert all(float(score) > float(bar) for c, (score, bar) in told if bars[c] != 0.5)


@in_browser
def test_tokens_without_offsets_and_documents_without_texts_are_listed(browser, tmp_path, model, pack, tables):
    documents = [("d", "two words", [(-1, -1, {0: 0.5}), (-1, -1, {}), (-1, -1, {1: 0.6})], "")]
    page = browser.open(write_report(write_analysis(tmp_path / "a", documents, CONCEPTS)), "#doc=0")
    assert texts_of(page, "#text .whole") == ["two words"] and texts_of(page, "#text span") == ["0token 0", "2token 2"]
    assert "does not give the places" in page("document.getElementById('missing').textContent")
    page.click("document.querySelectorAll('#text span')[1]")
    assert texts_of(page, "#token .name") == ["whale"]
    texts = [{"id": f"d{i}", "text": text} for i, text in enumerate(random_texts(30))]
    manager = DynamicProbeManager(pack, keep_top_k=5, max_loaded_probes=25, impl="cpu", strategy="descent")
    bare = analyze(
        manager,
        model,
        make_tokenizer(),
        [*texts[:3], {"id": "empty", "text": ""}, *texts[3:]],
        tmp_path / "b",
        floor=0.5,
        keep_text=False,
    )
    page, tokens = browser.open(write_report(bare), "#doc=7"), tokens_of(tables, 7)
    assert texts_of(page, "#text span") == [f"{at}·" for at in sorted(tokens)] and "--no-text" in page(
        "document.getElementById('missing').textContent"
    )


@in_browser
def test_long_document_is_paged_without_losing_text(browser, tmp_path):
    rng = random.Random(0)
    text = "".join(rng.choice(["🐋", "word", " ", "\n", "é"]) for _ in range(40_000)) + "🐋" * 9_000 + "-" * 20_001
    tokens = [(at, at + 1, {at % 2: 0.7}) for at in range(0, 9000, 2)] + [(len(text) - 20_001, len(text), {0: 0.5})]
    page = browser.open(write_report(write_analysis(tmp_path / "a", [("long", text, tokens, "")], CONCEPTS)), "#doc=0")
    parts = []
    while True:
        parts.append(page("document.getElementById('text').textContent"))
        if not page("document.querySelector('#parts button:last-child:enabled') !== null"):
            break
        page.click("document.querySelector('#parts button:last-child')")
    assert "".join(parts) == text and len(parts) > 5 and max(map(len, parts)) <= 20_000


# -- whatever is in it ---------------------------------------------------------------------------


def hostile(folder):
    concepts = [(text or "x", text, [], 0.3) for text in HOSTILE]
    documents = [
        (text, text, [(at, at + 1, {(at + d) % len(concepts): 0.5}) for at in range(0, min(len(text), 60), 2)], "")
        for d, text in enumerate(HOSTILE)
    ]
    return write_analysis(
        folder,
        [*documents, (HOSTILE[0], None, [], HOSTILE[1])],
        concepts,
        identity={
            "pack": {"name": HOSTILE[0]},
            "host": {"model": HOSTILE[1], "dtype": HOSTILE[2], "device": HOSTILE[4]},
        },
    )


@in_browser
def test_hostile_ids_texts_and_names_are_shown_and_not_executed(browser, tmp_path):
    made = write_report(hostile(tmp_path / "a"))
    page = browser.open(made)

    def told(d):  # nobody could point at a blank one
        return HOSTILE[d] if HOSTILE[d].strip() else f"{HOSTILE[d]}(document {d})"

    assert HOSTILE[0] in page("document.title") and HOSTILE[1] in texts_of(page, "#bad td")
    for d, text in enumerate(HOSTILE):
        page.go(f"#doc={d}")
        assert page("document.getElementById('text').textContent") == text and texts_of(page, "#document-id") == [
            told(d)
        ]
    page.go("#view=documents")
    assert [row[0] for row in rows_of(page, "document-rows")] == [*map(told, range(len(HOSTILE))), HOSTILE[0]]
    page.go("#view=concepts")
    assert sorted(texts_of(page, "#concept-rows .name")) == sorted(HOSTILE)
    for view in VIEWS[1:]:
        page.go(view)
        page(
            "document.querySelectorAll('#icicle button, .cells span').forEach((n) => n.dispatchEvent(new"
            " PointerEvent('pointerover', { bubbles: true })))"
        )
    page.go("#view=concepts")
    for c, name in enumerate(HOSTILE):  # through the address and back
        page(f"go({{ view: 'documents', concept: {c} }})")
        page.until(browser.settled)
        assert texts_of(page, "#restriction .name")[0] == name
    assert page("window.hit") is None
    assert page("document.querySelectorAll('img, svg, iframe, object, link, [onerror], [onload]').length") == 0
    assert (
        page("document.scripts.length") == 2 + len(HOSTILE)
        and page("document.querySelectorAll('script:not([type])').length") == 1
    )


@in_browser
def test_page_blocks_other_scripts_and_all_requests(browser, made):
    page = browser.open(made)
    listen = "addEventListener('securitypolicyviolation', (e) => told(e.effectiveDirective), {{ once: true }})"
    blocked = f"new Promise((told) => {{{{ {listen}; {{}} }}}})"
    add = "const n = document.createElement('{}'); {}; document.body.append(n);"
    assert (
        page(blocked.format(add.format("script", "n.textContent = 'window.hit = 1'"))) == "script-src-elem"
        and page("window.hit") is None
    )
    assert (
        page(blocked.format(add.format("div", "n.setAttribute('onclick', 'window.hit = 1'); n.click()")))
        == "script-src-attr"
        and page("window.hit") is None
    )
    assert page(blocked.format(add.format("img", "n.src = 'http://127.0.0.1:1/x.png'"))) == "img-src"
    assert (
        page(
            blocked.format(add.format("form", "n.action = 'http://127.0.0.1:1/'; document.body.append(n); n.submit()"))
        )
        == "form-action"
    )
    assert page(blocked.format("fetch('http://127.0.0.1:1/').catch(() => 0);")) == "connect-src"
    browser.complaints.clear()  # that is what was asked for
    del browser.requests[1:]


def test_embedded_json_cannot_end_its_script_element():
    value = {text: [text, {"n": i}] for i, text in enumerate(HOSTILE)}
    text = embed(value)
    assert json.loads(text) == value and not set("<>&\u2028\u2029") & set(text)


@in_browser
@pytest.mark.parametrize(
    "place",
    [
        "#doc=99",
        "#doc=-1",
        "#doc=1e3",
        "#doc=0x1",
        "#concept=nobody&root=__proto__",
        "#view=nowhere",
        "#bin=4000&page=77&sort=constructor&q=%",
        "#part=5&doc=3",
        "#%%%",
        "#view=concepts&sort=toString&page=999",
    ],
)
def test_invalid_address_still_shows_a_page(browser, made, place):
    page = browser.open(made, place)
    assert page("[...document.querySelectorAll('main > section:not([hidden])')].length") == 1
    assert page("document.querySelector('main > section:not([hidden])').textContent.trim().length") > 20


# -- looks ---------------------------------------------------------------------------------------


CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const linear = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = rgb(c).map((x) => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const look = (selector) => getComputedStyle(document.querySelector(selector));
  const page = getComputedStyle(document.body);
  const of = (selector, on) => ratio(look(selector).color, on ?? page.backgroundColor);
  const steps = [1, 2, 3, 4, 5, 6, 7].map((i) => {
    const n = document.createElement('i');
    n.className = `s${i}`;
    document.body.append(n);
    const s = getComputedStyle(n), r = [ratio(s.color, s.backgroundColor), light(s.backgroundColor)];
    n.remove();
    return r;
  });
  const words = [ratio(page.color, page.backgroundColor), of('.dim'), of('nav a'), of('#leading a')];
  return { words: [...words, of('.caution', look('.caution').backgroundColor)], steps };
})()"""


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable_and_shades_are_ordered(browser, made, dark):
    found = browser.open(made, dark=dark)(CONTRAST)
    assert min(found["words"]) >= 4.5 and min(ratio for ratio, _ in found["steps"]) >= 4.5, found
    light = [value for _, value in found["steps"]]
    assert light == sorted(light, reverse=not dark) and all(abs(a - b) > 0.005 for a, b in pairwise(light))


@in_browser
def test_no_view_is_wider_than_a_narrow_window(browser, tmp_path):
    page = browser.open(write_report(hostile(tmp_path / "a")), width=400, height=800)
    for view in (
        *VIEWS[1:],
        "#doc=6",
        "#doc=0",
        "#concept=constructor",
        "#view=hierarchy&root=constructor",
        "#view=overview",
    ):
        page.go(view)
        assert page("document.documentElement.scrollWidth") <= 400, view


# -- size ----------------------------------------------------------------------------------------


def many(n, n_concepts, seed=0):
    rng = random.Random(seed)
    concepts = [(f"c{i}", f"concept {i}", [f"c{rng.randrange(i)}"] if i > 9 else [], 0.3) for i in range(n_concepts)]
    documents = []
    for d in range(n):
        words = ["word"] * rng.randrange(10, 40)
        tokens = [
            (
                5 * at,
                5 * at + 4,
                {int(rng.random() ** 2 * n_concepts): 0.3 + 0.7 * rng.random() for _ in range(rng.randrange(3))},
            )
            for at in range(len(words))
        ]
        documents.append((f"mails/{d}", " ".join(words), tokens, ""))
    return documents, concepts


@in_browser
def test_five_thousand_documents_open_quickly(browser, tmp_path):
    documents, concepts = many(5000, 300)
    analysis = write_analysis(tmp_path / "a", documents, concepts, shard=1000)
    made = write_report(analysis, text_megabytes=1)
    assert made.stat().st_size < 30e6
    begin = time.monotonic()
    page = browser.open(made)
    page("document.body.clientHeight")
    assert time.monotonic() - begin < 10
    for place in (*VIEWS[1:], "#concept=c3", "#view=concepts&page=3"):
        begin = time.monotonic()
        page.go(place)
        page("document.body.clientHeight")
        assert time.monotonic() - begin < 5, place
    page.go("#view=documents&page=99")
    assert [row[0].removesuffix("text not in this file") for row in rows_of(page, "document-rows")] == [
        f"mails/{d}" for d in range(4950, 5000)
    ]
    # The best documents of each concept are those that can be read.
    table = analysis.summary().to_pylist()
    for concept in ("c0", "c150", "c299"):
        best = max(
            (row for row in table if row["concept"] == concept), key=lambda row: (row["max_score"], -row["document"])
        )
        page.go(f"#doc={best['document']}")
        assert page("document.getElementById('text').textContent") == documents[best["document"]][1]
    left = page("documents.id.findIndex((_, d) => !embedded.has(d))")
    page.go(f"#doc={left}")
    assert f"holds {len(blocks_of(made)):,} of 5,000 texts within its budget of 1 MB" in texts_of(page, "#missing")[
        0
    ] and page("document.getElementById('text').hidden")
    mine = {row["concept"] for row in table if row["document"] == left}
    page("[...document.querySelectorAll('#present .plain')].forEach((b) => b.click())")
    assert {name.replace("concept ", "c") for name in texts_of(page, "#present .name")} == mine
    # A hundred cells, fifty documents each.
    page.go("#view=concepts&q=concept+17")
    cells = page("heat.tokens[17]")
    expected = [0] * 100
    for row in table:
        if row["concept"] == "c17":
            expected[row["document"] // 50] += row["n_tokens"]
    assert cells == expected and sum(cells) > 0


def blocks_of(path):
    return {
        int(d): text
        for d, text in re.findall(
            r'<script type="application/json" id="document-(\d+)">(.*?)</script>',
            path.read_text(encoding="utf-8"),
            re.S,
        )
    }


def test_text_budget_goes_to_the_best_documents_of_every_concept(tmp_path):
    analysis = write_analysis(tmp_path / "a", *many(60, 12))
    whole = blocks_of(write_report(analysis))
    assert len(whole) == 60
    best = {}
    by = {}
    for row in analysis.summary().to_pylist():
        by.setdefault(row["concept"], []).append((-row["max_score"], row["document"]))
    for found in by.values():
        for rank, (_, document) in enumerate(sorted(found)):
            best[document] = min(best.get(document, rank), rank)
    order = sorted(range(60), key=lambda d: (best.get(d, 10**9), d))
    for room in (0, 900, 5000, 20_000):
        held = blocks_of(write_report(analysis, tmp_path / f"{room}.html", text_megabytes=room / 1e6))
        sizes = [len(whole[d].encode()) for d in order]
        first = [d for i, d in enumerate(order) if sum(sizes[: i + 1]) <= room]
        assert held == {d: whole[d] for d in held} and set(first) <= set(held)
        assert 0.6 * min(room, sum(sizes)) <= sum(len(text.encode()) for text in held.values()) <= room or room == 900


@in_browser
def test_pairs_are_the_best_of_every_concept_and_omissions_are_reported(browser, tmp_path):
    analysis = write_analysis(tmp_path / "a", *many(60, 12))
    by = {}
    for row in analysis.summary().to_pylist():
        by.setdefault(row["concept"], []).append((-row["max_score"], row["document"]))
    exact = sum(min(5, len(rows)) for rows in by.values())
    for at_most in (exact - 1, exact, 100):
        page = browser.open(write_report(analysis, max_pairs=at_most, text_megabytes=0, overwrite=True))
        k = page("made.per_concept")
        assert (
            sum(min(k, len(rows)) for rows in by.values())
            <= at_most
            < sum(min(k + 1, len(rows)) for rows in by.values())
        )
    for concept, rows in by.items():
        page.go(f"#concept={concept}")
        assert [row[0].removesuffix("text not in this file") for row in rows_of(page, "document-rows")] == [
            f"mails/{d}" for _, d in sorted(rows)[:k]
        ]
        assert ("larger --max-pairs" in page("document.getElementById('restriction').textContent")) == (len(rows) > k)
    page.go("#view=documents")
    assert [len(row) for row in page("documents.best")] == [
        len(row) for row in browser.open(write_report(analysis, tmp_path / "whole.html"))("documents.best")
    ]


# -- the file ------------------------------------------------------------------------------------


@in_browser
def test_empty_analysis_gives_an_empty_report(browser, tmp_path, model, pack):
    manager = DynamicProbeManager(pack, impl="cpu")
    for name, documents in (("none", []), ("bad", ["", 5])):
        page = browser.open(write_report(analyze(manager, model, make_tokenizer(), documents, tmp_path / name)))
        assert texts_of(page, "#figures b") == [str(len(documents)), "0", "0", "0"]
        for view in VIEWS[1:]:
            page.go(view)
        page.go("#view=hierarchy")
        assert "nothing to draw" in page("document.getElementById('undrawn').textContent")


def test_existing_file_is_kept(tmp_path):
    analysis = write_analysis(tmp_path / "a", [("d", "text", [(0, 4, {0: 0.5})], "")], CONCEPTS)
    out = tmp_path / "report.html"
    assert write_report(analysis, out) == out
    first = out.read_bytes()
    with pytest.raises(ConfigError, match=r"report\.html exists: pass overwrite"):
        write_report(analysis, out, text_megabytes=0)
    assert out.read_bytes() == first
    write_report(analysis, out, text_megabytes=0, overwrite=True)
    assert len(out.read_bytes()) < len(first) and sorted(path.name for path in tmp_path.iterdir()) == [
        "a",
        "report.html",
    ]
    assert write_report(analysis) == tmp_path / "a" / "report.html"
    assert Analysis.open(tmp_path / "a").complete  # a report in its folder does not disturb it


def test_unwritable_output_and_unreadable_analyses_are_refused(tmp_path):
    documents = [("d", "text", [(0, 4, {0: 0.5})], "")]
    analysis = write_analysis(tmp_path / "a", documents, CONCEPTS)
    for out, message in ((tmp_path / "no" / "r.html", "cannot be written"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=message):
            write_report(analysis, out, overwrite=True)
    for settings in (
        {"text_megabytes": -1},
        {"text_megabytes": float("nan")},
        {"text_megabytes": "1"},
        {"max_pairs": -1},
        {"max_pairs": 1.5},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} is"):
            write_report(analysis, tmp_path / "r.html", **settings)
    write_analysis(tmp_path / "half", documents, CONCEPTS, finish=False)
    (tmp_path / "empty").mkdir()
    app = typer.Typer()
    app.command()(report)
    for folder, message in ((tmp_path / "half", "not finished"), (tmp_path / "empty", "has no analysis")):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, [str(folder)], catch_exceptions=False)
    assert not (tmp_path / "r.html").exists() and not any(tmp_path.glob("*/*.html"))
    (tmp_path / "a" / "shards" / "00000.scores.parquet").write_bytes(b"gone")
    with pytest.raises(ConfigError, match="missing or damaged"):
        write_report(analysis)


def test_command_names_the_written_file(tmp_path):
    write_analysis(tmp_path / "a", [("d", "text", [(0, 4, {0: 0.5})], "")], CONCEPTS)
    app = typer.Typer()
    app.command()(report)
    told = CliRunner().invoke(app, [str(tmp_path / "a"), "--json"], catch_exceptions=False).stdout
    path = tmp_path / "a" / "report.html"
    assert json.loads(told) == {"file": str(path), "bytes": path.stat().st_size}
    told = (
        CliRunner()
        .invoke(app, [str(tmp_path / "a"), "--overwrite", "--text-megabytes", "0"], catch_exceptions=False)
        .stdout
    )
    assert told.startswith(f"{path}: 0.") and blocks_of(path) == {}


def test_precision_is_shown_only_if_the_floor_keeps_the_threshold(model, tmp_path):
    concepts = [{"id": f"c{i}", "name": "c", "parents": [], "precision": {"a": 0.9}} for i in range(4)]
    alert = torch.tensor([0.1, 0.3, 0.3, 0.5])
    pack = make_pack(tmp_path / "p", model, n=4, concepts=concepts, alert_set="a", alert_threshold=alert)
    for floor, right in (("fired", [0.9] * 4), (0.2, [0.9, None, None, None]), (0.4, [0.9, 0.9, 0.9, None])):
        manager, folder = DynamicProbeManager(pack), tmp_path / f"a{floor}"
        found = analyze(manager, model, make_tokenizer(), [{"id": "d", "text": "one two three"}], folder, floor=floor)
        block = re.search(r'id="data">(.*?)</script>', write_report(found).read_text(), re.DOTALL)
        assert json.loads(block[1])["concepts"]["precision"] == right
