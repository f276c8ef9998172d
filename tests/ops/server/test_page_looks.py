"""The page of a server executes nothing that it shows, and is readable at every size."""

import json
import re
from importlib.resources import files

import pytest

from probemon.ops.server.page_files import page_files
from probemon.util.harmless_text import harmless
from served_page import ENDED, HOSTILE, TEXT, ask, open_file, record, visit

# -- hostile texts ---------------------------------------------------------------------------------


def hostile_run(pack):
    """A saved run in which every text is somebody's attempt."""
    names = [{**concept, "name": HOSTILE[c // 2 % len(HOSTILE)]} for c, concept in enumerate(pack["concepts"])]
    tokens, text = [], ""
    for i, piece in enumerate(HOSTILE):
        token = {
            "choice": 0,
            "position": 10 + i,
            "token_id": i,
            "text": piece,
            "start": len(text),
            "phase": "generated",
        }
        text += piece
        unseen = HOSTILE[0] if i == 4 else None
        top = [] if unseen else [[2 * i + 1, 0.9, 1.5]]
        tokens.append(
            {
                **token,
                "end": len(text),
                "top": top,
                "fired": [c for c, _, _ in top],
                "strengths": [1.5] * len(top),
                "n_active": 4,
                "n_dropped": 0,
                "n_excluded": 0,
                "n_shed": 0,
                "unseen": unseen,
            }
        )
    event = {
        "choice": 0,
        "concept": HOSTILE[1],
        "name": HOSTILE[0],
        "position": 12,
        "score": 0.9,
        "threshold": 0.5,
        "action": "stop",
        "for_tokens": 1,
        "aggregate": None,
    }
    messages = [{"role": role, "content": HOSTILE[i]} for i, role in enumerate(("system", "user", HOSTILE[7]))]
    choice = {
        "text": text,
        "finish_reason": HOSTILE[0],
        "tokens": tokens,
        "events": [event],
        "summary": {"coverage": {}, "leading": [], "stopped_by": event, "unlike": HOSTILE[0]},
    }
    run = {
        "request": "a&token=7#<b>",
        "created": 1,
        "kind": "chat",
        "messages": messages,
        "prompt": None,
        "options": {},
        "error": None,
        "choices": [choice],
    }
    return {"format": "probemon-run-2", "pack": {**pack, "concepts": names}, "run": run}


def test_hostile_text_is_shown_and_never_executed(page_browser, page_server, tmp_path):
    """Messages come by the server, which refuses such names of concepts; these, tokens and reasons come from a file."""
    for text in HOSTILE[:5]:
        name = ask(page_server, text, 6)
    path = tmp_path / "hostile.json"
    saved = hostile_run(page_server.get("/v1/probemon/pack"))
    path.write_text(json.dumps(saved))
    page = visit(page_browser, page_server, f"#answer={name}")
    page.until(ENDED)
    assert page("document.querySelector('.message.user .text').textContent") == harmless(HOSTILE[4], "\n\t")
    open_file(page, path)
    page.until("location.hash.includes('saved')")
    page.until("document.querySelector('.halt') !== null")
    assert page(TEXT) == harmless("".join(HOSTILE), "\n\t")
    assert page("document.querySelectorAll('#answer .unseen').length") == 1
    messages = page("[...document.querySelectorAll('#messages .text')].map((n) => n.textContent)")
    assert messages == [harmless(text, "\n\t") for text in HOSTILE[:3]]
    for i in range(len(HOSTILE)):
        page.point(f"[...document.querySelectorAll('#answer .tok')].find((n) => n.at[0] === {i})")
    page("document.querySelectorAll('#tree .others').forEach((n) => n.click())")
    page.until("document.getElementById('runs').textContent.includes('onerror')")
    written = page("document.body.textContent")
    assert "\\x00" in written and "\\u202e" in written and not re.search("[\x00\x1b\u202e\u2028\ufeff]", written)
    assert page("window.hit") is None
    assert page("document.querySelectorAll('#messages *, #answer *, #side *').length") > 100
    assert (
        page("document.querySelectorAll('img, iframe, object, [onerror], [onload], svg[onload], main script').length")
        == 0
    )
    assert page("document.scripts.length") == 1


def test_harmless_in_javascript_equals_harmless_in_python(page_browser, page_server):
    page = visit(page_browser, page_server)
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    changed = page(
        "import('/page/harmless.js').then(({ harmless }) => { const found = {};"
        " for (let code = 0; code < 0x110000; code++) { if (code >= 0xd800 && code < 0xe000) continue;"
        " const text = String.fromCodePoint(code), made = harmless(text);"
        " if (made !== text) found[code] = made; } return found; })"
    )
    assert {int(code): text for code, text in changed.items()} == {
        code: harmless(chr(code)) for code in codes if harmless(chr(code)) != chr(code)
    }
    assert (
        page("import('/page/harmless.js').then(({ harmless }) => harmless('a\\ud800b\\ud83d\\udc0b'))") == "a\\ud800b🐋"
    )


# -- sizes and colours -----------------------------------------------------------------------------

CONTRASTS = """(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number), style = (n) => getComputedStyle(n);
  const paper = numbers(style(document.body).backgroundColor);
  const over = ([r, g, b, a = 1], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a)];
  const linear = (x) => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = (n) => n === null ? paper : over(numbers(style(n).backgroundColor), ground(n.parentElement));
  const found = {}, box = document.getElementById("answer").appendChild(document.createElement("div"));
  const look = (n) => {
    found[`${n.tagName} ${n.id} ${n.className}`] = [ratio(numbers(style(n).color), ground(n)), 4.5];
  };
  const made = (kind) => {
    const n = box.appendChild(document.createElement("span"));
    n.className = kind;
    look(n);
    return n;
  };
  for (let h = 0; h < 9; h++) {
    for (let t = 0; t < 3; t++) {
      const n = made(`tok h${h} l0 t${t}`), line = numbers(style(n).textDecorationColor);
      found[`line of ${n.className}`] = [ratio(line, ground(n.parentElement)), 3];
    }
  }
  box.remove();
  const words = "p, h1, h2, h3, a, button, label, li, span, bdi, small, summary, input, textarea, select";
  for (const n of document.querySelectorAll(words)) {
    if (n.checkVisibility() && n.textContent.trim() + (n.value ?? "")) look(n);
  }
  return found;
})()"""
WIDE = """[...document.querySelectorAll("main section, main section *, header")]
  .filter((n) => n.clientWidth && n.scrollWidth > n.clientWidth + 1)
  .filter((n) => !/hidden|auto|clip/.test(getComputedStyle(n).overflowX))
  .map((n) => `${n.id} ${n.className}: ${n.scrollWidth} in ${n.clientWidth}, ${n.textContent.slice(0, 40)}`)"""
REACHED = """(() => {
  const n = document.getElementById("PART");
  n.scrollIntoView({ block: "center" });
  const r = n.getBoundingClientRect();
  return r.width > 20 && r.left >= 0 && r.right <= innerWidth + 1 && r.top < innerHeight && r.bottom > 0;
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_enough_contrast(page_browser, page_server, dark):
    name = ask(page_server, "contrast", rules=[{"concept": "c0", "above": 0, "action": "record"}])
    page = visit(page_browser, page_server, f"#answer={name}", dark=dark, width=1600, height=1000)
    page.until(ENDED)
    found = page(CONTRASTS)
    assert len(found) > 80
    assert {what: pair for what, pair in found.items() if pair[0] < pair[1]} == {}


@pytest.mark.parametrize("width", [320, 768, 1280, 1920])
def test_page_fits_the_window_and_every_part_is_reachable(page_browser, page_server, width):
    name = ask(page_server, "sizes")
    page = visit(page_browser, page_server, f"#answer={name}", width=width, height=700)
    page.until(ENDED)
    for tab in ("concepts", "rules", "runs", "chat") if width == 320 else ("chat",):
        page(f"document.querySelector('#tabs [value={tab}]').click()")
        assert page("document.documentElement.scrollWidth") == width
        assert page(WIDE) == [], tab
        parts = {"concepts": ("replay-play", "zoom-in", "tree"), "rules": ("rules",), "runs": ("runs",)}.get(
            tab, ("ask", "now-title", "settings", "help-open")
        )
        if width > 720:
            parts = (*parts, "replay-play", "tree", "rules", "runs")
        for part in parts:
            assert page(REACHED.replace("PART", part)), (tab, part)
    # On every window the text stands with its concepts.
    assert page("document.getElementById('answer').getBoundingClientRect().top < innerHeight - 100")
    assert page("document.getElementById('now-rows').getBoundingClientRect().top < innerHeight - 40")
    cut = "filter((n) => n.clientWidth && n.scrollWidth > n.clientWidth + 1).map((n) => n.textContent)"
    assert page(f"[...document.querySelectorAll('.node, .node *')].{cut}") == []


def test_page_files_have_unique_names():
    folders = files("probemon.util") / "page_code", files("probemon.ops.server") / "page"
    names = [entry.name for folder in folders for entry in folder.iterdir()]
    assert len(names) == len(set(names)) == len(page_files()) and {"index.html", "colours.css"} < set(names)


@pytest.mark.parametrize("breaks", [["\n\n"], [".\n\n"], ["\n", "\n"], ["\n", " \n", "\n\n"]], ids=repr)
def test_blank_lines_between_paragraphs_are_narrow(page_browser, page_server, tmp_path, breaks):
    """Lines are far apart for the names over tokens; a blank one has none."""
    run = record(page_server, ask(page_server, "paragraphs", 12))
    choice = run["choices"][0]
    texts = ["One", *breaks, "Two", "\n", "Three"]
    choice["tokens"], choice["text"] = choice["tokens"][: len(texts)], "".join(texts)
    for i, (token, text) in enumerate(zip(choice["tokens"], texts, strict=True)):
        begin = len("".join(texts[:i]))
        token |= {"text": text, "start": begin, "end": begin + len(text)}
    saved = {"format": "probemon-run-2", "pack": page_server.get("/v1/probemon/pack"), "run": run}
    (tmp_path / "run.json").write_text(json.dumps(saved))
    page = visit(page_browser, page_server)
    open_file(page, tmp_path / "run.json")
    page.until("document.getElementById('answer').textContent.includes('Three')")
    page.until(page_browser.settled)
    assert page(TEXT) == choice["text"]
    tops = page(
        "['One', 'Two', 'Three'].map((text) => [...document.querySelectorAll('#answer .tok')]"
        ".find((n) => n.textContent.startsWith(text)).getClientRects()[0].top)"
    )
    line = tops[2] - tops[1]
    assert line > 30 and line + 4 < tops[1] - tops[0] < 1.7 * line
