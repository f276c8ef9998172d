"""The page of a server says what its reader wants to know: names, causes, sources, differences."""

import json
import re

import pytest

from probemon.errors import RequestRefused
from probemon.ops.server.keys import Key
from running_server import Running
from served_page import (
    ENDED,
    READY,
    ask,
    concepts_of,
    leaders_of,
    open_file,
    record,
    server_with,
    shown,
    visit,
)

ANSWER = "new URLSearchParams(location.hash.slice(1)).get('answer')"


def set_field(page, name, value):
    page(
        f"{{ const f = document.getElementById({name!r}); f.value = {json.dumps(value)};"
        " for (const kind of ['input', 'change']) f.dispatchEvent(new Event(kind, { bubbles: true })); }"
    )
    page.until(page.browser.settled)


def text_of(page, name):
    return page(f"document.getElementById({name!r}).textContent")


def ask_here(page, text, before=None):
    """Type a question and wait for its answer; return its id."""
    before = page(ANSWER)
    page("document.getElementById('ask').focus()")
    page.type(text)
    page.press("Enter")
    return next_answer(page, before)


def next_answer(page, before):
    page.until(f"{ANSWER} !== null && {ANSWER} !== {json.dumps(before)}")
    page.until(ENDED)
    return page(ANSWER)


def test_an_answer_that_was_asked_for_with_another_key_says_so(page_browser, page_server):
    keys = [Key(page_server.token), Key("a secret of the bills", name="<b>bills</b>", roles=frozenset({"ask"}))]
    running = Running(page_server.served, page_server.limits, keys=keys)
    try:
        page = visit(page_browser, running, follow=True)
        body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Whose?"}]}
        asked = running.ask("POST", "/v1/chat/completions", body, Authorization="Bearer a secret of the bills")
        name = json.loads(asked.content)["id"]
        page.until(f"{ANSWER} === {name!r}")
        for _ in ("events", "the list"):
            page.until(ENDED)
            assert page("document.querySelector('#messages h3').textContent") == "Key <b>bills</b>"
            entry = f"document.querySelector('#runs [data-stop={json.dumps(name)}] .dim').textContent"
            page.until(f"{entry}.includes('asked with key <b>bills</b>')")
            page = visit(page_browser, running, f"#answer={name}")
        page_browser.close_pages()
    finally:
        running.close()


def test_history_says_how_answers_ended_before_they_are_opened(page_browser, page_server):
    rule = {"concept": "c0", "above": 0, "action": "stop"}
    named = page_server.get("/v1/probemon/pack")["concepts"][0]["name"]
    endings = {
        ask(page_server, "It is stopped.", rules=[rule]): f"stopped by {named}",
        ask(page_server, "It is recorded.", rules=[rule | {"action": "record"}]): "a rule was met",
        ask(page_server, "It has no rule."): "asked",  # by another program, and no more
    }
    page = visit(page_browser, page_server, f"#answer={list(endings)[-1]}")
    for name, said in endings.items():
        page.until(
            f"document.querySelector('#runs [data-stop={json.dumps(name)}] .dim')?.textContent.endsWith({said!r})"
        )


def test_a_token_shows_how_strongly_the_concepts_above_its_own_fire(page_browser, page_server, tmp_path):
    pack = page_server.get("/v1/probemon/pack")
    saved = long_answer(pack, 3, {1: 4})
    saved["run"]["choices"][0]["tokens"][1] |= {"fired": [0, 4], "strengths": [0.75, 3.0]}
    assert pack["concepts"][4]["parents"] == [2]  # which does not fire
    pack["concepts"][4]["parents"] = [0]
    (tmp_path / "run.json").write_text(json.dumps(saved))
    page = visit(page_browser, page_server)
    open_file(page, tmp_path / "run.json")
    page.until("document.querySelectorAll('#answer .tok').length === 3")
    page("[...document.querySelectorAll('#answer .tok')].find((n) => n.at.includes(1)).click()")
    page.until("document.getElementById('now-what').textContent.includes('pinned')")
    assert text_of(page, "now-what").endswith("token 2")
    above = page("document.querySelector('#now-rows .leader .more').textContent")
    assert above == f"{pack['concepts'][0]['name']} (clear, 0.8)"


# -- long answers and many concepts ----------------------------------------------------------------


def long_answer(pack, n, firing):
    """A saved answer of n tokens, at which concepts fire: {index of a token: concept}."""
    tokens = [
        {"choice": 0, "position": 10 + i, "token_id": 1, "text": f" w{i % 10}", "start": 3 * i, "end": 3 * i + 3}
        | {"phase": "generated", "n_active": 40, "n_dropped": 0, "n_excluded": 0, "n_shed": 0, "unseen": None}
        | {"fired": [firing[i]] if i in firing else [], "strengths": [3.0] if i in firing else []}
        | {"top": [[firing[i], 0.9, 3.0]] if i in firing else []}
        for i in range(n)
    ]
    choice = {"text": "".join(token["text"] for token in tokens), "finish_reason": "length", "tokens": tokens}
    choice |= {"events": [], "summary": None}
    run = {"request": "long", "created": 1, "kind": "chat", "prompt": None, "options": {}, "error": None}
    run |= {"messages": [{"role": "user", "content": "Long?"}], "choices": [choice]}
    return {"format": "probemon-run-2", "pack": pack, "run": run}


BARS = """[...document.querySelectorAll('#lanes .lane')].filter((lane) => lane.querySelector('bdi')?.textContent ===
  NAME).map((lane) => { const d = lane.querySelector('path.fired')?.getAttribute('d') ?? '';
  const svg = lane.querySelector('svg'), n = svg.viewBox.baseVal.width, { width } = svg.getBoundingClientRect();
  return [...d.matchAll(/M([\\d.]+)/g)].map(([, x]) => [Number(x) / n, width / n]); })[0]"""


def test_lanes_of_a_long_answer_show_every_firing_token_and_zoom(page_browser, page_server, tmp_path):
    firing = {0: 0, 777: 0, 778: 4, 1999: 0}
    pack = page_server.get("/v1/probemon/pack")
    (tmp_path / "long.json").write_text(json.dumps(long_answer(pack, 2000, firing)))
    page = visit(page_browser, page_server)
    open_file(page, tmp_path / "long.json")
    page.until("document.querySelectorAll('#answer .tok').length === 2000")
    page.until("document.querySelector('#lanes .fired') !== null")
    bars = BARS.replace("NAME", json.dumps(pack["concepts"][0]["name"]))
    found = page(bars)
    assert len(found) == 3 and all(width >= 2 for _, width in found)  # wide enough to be seen
    assert [x for x, _ in found] == pytest.approx([0, 777 / 2000, 1], abs=0.015)  # a column
    assert text_of(page, "zoom-what") == "all 2,000 tokens"
    page("document.getElementById('lanes-slider').focus()")
    for key in ("Home", "+", "+", "+", "+"):
        page.press(key)
    assert text_of(page, "zoom-what") == "tokens 1 to 125 of 2,000"
    assert len(page(bars)) == 1
    page.press("End")  # the window follows the token
    assert re.fullmatch(r"tokens 1,\d+ to 2,000 of 2,000", text_of(page, "zoom-what"))
    set_field(page, "zoom-range", "700")
    assert text_of(page, "zoom-what") == "tokens 701 to 825 of 2,000"
    left, top, width = page(
        "(({ left, top, width, height }) => [left, top + height / 2, width])"
        "(document.getElementById('lanes-slider').getBoundingClientRect())"
    )
    at = [left + width * share for share in (0.5, 0.75)]
    mouse = {"y": top, "button": "left", "clickCount": 1}
    page.call("Input.dispatchMouseEvent", type="mousePressed", x=at[0], **mouse)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[1], buttons=1, **mouse)
    page.call("Input.dispatchMouseEvent", type="mouseReleased", x=at[1], **mouse)
    page(page_browser.settled)
    first, last = map(int, re.fullmatch(r"tokens (\d+) to (\d+) of 2,000", text_of(page, "zoom-what")).groups())
    assert abs(first - 763) <= 2 and abs(last - 794) <= 2
    page.press("0")
    page.until("document.getElementById('zoom-what').textContent === 'all 2,000 tokens'")


def test_names_over_tokens_never_overlap_and_colours_are_those_of_branches(page_browser, page_server, tmp_path):
    pack = page_server.get("/v1/probemon/pack")
    firing = {i: i * 7 % 40 for i in range(0, 120, 2)}
    (tmp_path / "long.json").write_text(json.dumps(long_answer(pack, 120, firing)))
    page = visit(page_browser, page_server)
    open_file(page, tmp_path / "long.json")
    page.until("document.querySelectorAll('#answer .tok[data-mark]').length === 60")
    page(page_browser.settled)
    places = page(
        "[...document.querySelectorAll('#answer .tok[data-mark]')].map((n) => { const r = n.getClientRects()[0];"
        " return [r.top, r.left, parseFloat(n.style.getPropertyValue('--room'))]; })"
    )
    right = page("document.getElementById('answer').getBoundingClientRect().right")
    for (top, left, room), (next_top, next_left, _) in zip(places, [*places[1:], (1e9, 0, 0)], strict=True):
        assert left + room <= (next_left if abs(next_top - top) < 6 else right + 0.5)

    def root(c):
        return root(pack["concepts"][c]["parents"][0]) if pack["concepts"][c]["parents"] else c

    kinds = {}
    for at, classes, mark in shown(page):
        if mark and at[0] in firing:
            kinds.setdefault(root(firing[at[0]]), set()).add(next(k for k in classes if re.fullmatch(r"h\d", k)))
    branches = page(
        "Promise.all(['/page/branches.js', '/page/digest.js', '/page/hierarchy.js'].map((f) => import(f))).then("
        f"([b, d, h]) => {{ const p = d.readPack({json.dumps(pack)}, h.pathsOf);"
        " return p.concepts.map((_, c) => [b.branchesOf(p).of[c], b.colourOf(p, c)]); })"
    )
    for c, (branch, colour) in enumerate(branches):
        for parent in pack["concepts"][c]["parents"][:1]:
            assert branches[parent][0] in (branch, -1)  # a branch has all that is below its head
        assert colour.startswith("h8") == (branch == -1)
    assert kinds and max(branch for branch, _ in branches) > 3


# -- what a concept is -------------------------------------------------------------------------------


def test_card_of_a_concept_says_what_it_learned_and_how_far_to_trust_it(page_browser, tmp_path):
    lines = concepts_of([f"concept {i}" for i in range(40)])
    about = {"definition": "<b>a thing</b>", "words": ["stone"], "precision": {"mine": 0.9}, "n_train": 12}
    lines = [{**line, **about, **({"examples": ["A <i>stone</i>."]} if i % 2 else {})} for i, line in enumerate(lines)]
    running = server_with(tmp_path / "pack", lines=lines, alert_set="mine")
    try:
        name = ask(running, "whales")
        known = record(running, name)["choices"][0]
        page = visit(page_browser, running, f"#answer={name}")
        page.until(ENDED)
        page("document.querySelector('#now-rows .concept').click()")
        page.until("document.querySelector('.card .facts') !== null")
        said = page("document.querySelector('.card').innerText")
        c = next(i for i, line in enumerate(lines) if f"concept={line['id']}" in page("location.hash").split("&"))
        n = sum(c in token["fired"] for token in known["tokens"])
        for words in (
            "<b>a thing</b>",
            f"Fires at {n} token",
            "From 12 examples of the concept.",
            "Typical words: stone.",
            "When it fires, it is right 90 times in 100.",
            "False alarms on ordinary text were not measured",
            "over 0.300",
        ):
            assert words in said, words
        without = "This pack holds no example texts"
        assert ("A <i>stone</i>." in said) == (c % 2 == 1) and (without in said) == (c % 2 == 0)
        page("document.getElementById('unpin').click()")
        page.until("document.querySelector('.card') === null")
        assert "concept=" not in page("location.hash")
        page_browser.close_pages()
    finally:
        running.close()


def test_lanes_tree_and_panel_count_the_same_tokens(page_browser, page_server):
    name = ask(page_server, "whales")
    tokens = record(page_server, name)["choices"][0]["tokens"]
    concepts = page_server.get("/v1/probemon/pack")["concepts"]
    page = visit(page_browser, page_server, f"#answer={name}")
    page.until(ENDED)
    counts = {c: sum(c in token["fired"] for token in tokens) for c in range(len(concepts))}
    leaders = {c for c in leaders_of(tokens, concepts) if c is not None}
    tree = page(
        "[...document.querySelectorAll('#tree .node')].filter((n) => n.querySelector('.when').textContent)"
        ".map((n) => [n.row.c, n.querySelector('.when').textContent])"
    )
    assert {c: int(re.search(r"(\d+) tokens?$", said)[1]) for c, said in tree} == {c: n for c, n in counts.items() if n}
    lanes = page(
        "[...document.querySelectorAll('#lanes .lane:not(.quiet) .concept[data-stop]')].map((n) =>"
        " [Number(n.dataset.stop.split(' ')[1]), n.parentElement.querySelector('.number').textContent])"
    )
    assert leaders and {c: int(said.split()[0]) for c, said in lanes}.items() <= counts.items()
    rows = page("[...document.querySelectorAll('#now-rows .leader')].map((n) => n.innerText)")
    assert all(re.search(r"fires at (\d+ tokens:|[“\"])", row) for row in rows)


# -- asking -----------------------------------------------------------------------------------------


def test_unknown_concept_of_a_rule_is_refused_beside_its_field(page_browser, page_server):
    page = visit(page_browser, page_server)
    page("document.getElementById('rule-add').click(); document.getElementById('rule-concept').focus()")
    page.type("nonsuch")
    page.until("!document.getElementById('rule-error').hidden")  # at once
    assert "no concept “nonsuch”" in text_of(page, "rule-error")
    assert page("document.getElementById('rule-concept').getAttribute('aria-invalid')") == "true"
    page("document.getElementById('rule-form').requestSubmit()")
    assert page("localStorage.getItem('probemon-rules') ?? '[]'") == "[]"
    set_field(page, "rule-concept", "concept 3")  # of c30, c32 and so on the beginning, and no name
    assert "Did you mean concept 30" in text_of(page, "rule-error")
    set_field(page, "rule-concept", "concept 30")
    assert page("document.getElementById('rule-error').hidden")
    offered = page("[...document.querySelectorAll('#rule-concepts option')].map((n) => n.value)")
    assert "concept 30" in offered and len(offered) < 40
    page("document.getElementById('rule-form').requestSubmit()")
    page.until(page_browser.settled)
    assert json.loads(page("localStorage.getItem('probemon-rules')"))[0]["concept"] == "c30"
    assert "Record when concept 30 is over" in text_of(page, "rules")
    page("localStorage.clear()")


def test_question_is_edited_asked_again_and_its_answers_are_compared(page_browser, page_server):
    page = visit(page_browser, page_server)
    most = page_server.limits.max_tokens
    assert page("document.getElementById('max-tokens').max") == str(most)
    assert f"at most {most}" in page("document.getElementById('settings').textContent")
    set_field(page, "max-tokens", "5000")
    assert page("document.getElementById('max-tokens').value") == str(most)
    set_field(page, "max-tokens", "16")
    set_field(page, "system", "Answer in verse.")
    first = ask_here(page, "Whales?")
    asked = page_server.get(f"/v1/probemon/requests/{first}")
    system = {"role": "system", "content": "Answer in verse."}
    assert asked["messages"] == [system, {"role": "user", "content": "Whales?"}]
    page("document.getElementById('again-answer').click()")
    second = next_answer(page, first)
    again = page_server.get(f"/v1/probemon/requests/{second}")
    assert again["messages"] == asked["messages"] and again["options"]["temperature"] == 0.7
    assert isinstance(again["options"]["seed"], int) and f"seed {again['options']['seed']}" in text_of(
        page, "answer-coverage"
    )
    page("document.querySelector('.message.user button').click()")
    page.until("document.getElementById('ask').value === 'Whales?' && !document.getElementById('editing').hidden")
    page("document.getElementById('ask').value = ''")
    third = ask_here(page, "Sharks?")
    messages = page_server.get(f"/v1/probemon/requests/{third}")["messages"]
    assert messages == [system, {"role": "user", "content": "Sharks?"}]
    page.go(f"#answer={first}")
    page.until(f"[...document.getElementById('compare-pick').options].some((o) => o.value === '0 {second}')")
    assert not page(f"[...document.getElementById('compare-pick').options].some((o) => o.value === '0 {third}')")
    set_field(page, "compare-pick", f"0 {second}")
    page.until("document.querySelectorAll('#other .tok').length > 3")
    boxes = page(
        "['answer', 'other'].map((id) => (({ left, right, top }) => [left, right, top])"
        "(document.getElementById(id).getBoundingClientRect()))"
    )
    assert boxes[0][1] <= boxes[1][0] and boxes[0][2] == boxes[1][2]
    known = {id: record(page_server, id)["choices"][0]["tokens"] for id in (first, second)}
    assert page("document.querySelectorAll('#other .tok[data-mark]').length > 0")
    concepts = page_server.get("/v1/probemon/pack")["concepts"]
    rows = page(
        "[...document.querySelectorAll('#now-rows .difference')].map((n) => [n.querySelector('.concept').dataset.stop,"
        " ...[...n.querySelectorAll('.number')].map((m) => m.textContent)])"
    )
    assert rows
    for stop, left, right in rows:
        c = int(stop.split()[1])
        for said, side, id in ((left, "this", first), (right, "other", second)):
            n = sum(c in token["fired"] for token in known[id])
            assert said == f"{side}: {n} token{'s' * (n != 1)}", concepts[c]
    page("document.getElementById('compare-end').click()")
    page.until("document.getElementById('other-panel').hidden")
    page("sessionStorage.removeItem('probemon-system')")


def test_answer_is_copied_as_it_is(page_browser, page_server):
    name = ask(page_server, "copied")
    page = visit(page_browser, page_server, f"#answer={name}")
    page.until(ENDED)
    page_browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.call("Page.bringToFront")
    page.click("document.getElementById('copy')")
    page.until("document.getElementById('copy').textContent === 'Copied'")
    assert page("navigator.clipboard.readText()") == record(page_server, name)["choices"][0]["text"]


def test_pointer_that_did_not_move_points_at_nothing(page_browser, page_server):
    """After a click on an example the answer comes to lie under the pointer."""
    page = visit(page_browser, page_server)
    set_field(page, "max-tokens", "60")
    page.click("document.querySelector('#examples button')")
    page.until(ENDED)
    x, y = page(
        "(({ left, top }) => [left + 4, top + 4])"
        "([...document.querySelectorAll('#answer .tok')][3].getClientRects()[0])"
    )
    page("document.getElementById('new').click()")
    page.until("!document.getElementById('empty').hidden")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.go("#answer=" + page_server.get("/v1/probemon/requests")["requests"][0]["request"])
    page.until(ENDED)
    for _ in range(20):
        page(page_browser.settled)
    assert page("document.getElementById('tip').hidden")
    assert text_of(page, "now-what") == "in the whole answer"
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 1, y=y)
    page.until("!document.getElementById('tip').hidden")


# -- keys, access, marks ------------------------------------------------------------------------------


def test_each_list_is_one_tab_stop_and_arrows_move_in_it(page_browser, page_server):
    name = ask(page_server, "stops")
    for i in range(4):
        ask(page_server, f"more {i}", 4)
    page = visit(page_browser, page_server, f"#answer={name}")
    page.until(f"{ENDED} && document.querySelectorAll('#runs a').length >= 5")
    page("document.activeElement.blur()")
    page.press("Tab")
    assert page("document.activeElement.id") == "skip"
    page.press("Enter")
    assert page("document.activeElement.id") == "ask" and page("location.hash") == f"#answer={name}"
    for box in ("now-rows", "lanes", "runs", "tree", "answer"):
        assert page(f"document.querySelectorAll('#{box} [tabindex=\"0\"]').length") == 1, box
        assert (
            page(f"[...document.querySelectorAll('#{box} :is(a, button)')].filter((n) => n.tabIndex === 0).length") <= 1
        )
    page("document.querySelector('#runs [tabindex=\"0\"]').focus()")
    for key, to in (("End", "at(-1)"), ("Home", "at(0)"), ("ArrowDown", "at(1)"), ("ArrowUp", "at(0)")):
        page.press(key)
        assert page(f"document.activeElement === [...document.querySelectorAll('#runs a')].{to}"), key
        assert page("document.querySelectorAll('#runs [tabindex=\"0\"]').length") == 1


def test_signed_out_page_offers_the_sign_in_alone(page_browser, page_server):
    page = page_browser.open(f"http://127.0.0.1:{page_server.port}/")
    page.until(f"{READY} && document.body?.dataset.access === 'none'")
    seen = "document.getElementById({}).checkVisibility()"
    assert not any(page(seen.format(repr(part))) for part in ("send", "examples", "rules", "replay-open", "skip"))
    assert page(seen.format("'token'")) and page("document.activeElement.id") == "token"
    page("document.getElementById('token').value = 'wrong'; document.getElementById('sign-in').requestSubmit()")
    page.until("document.getElementById('sign-in-why').textContent.includes('does not accept')")
    page(f"document.getElementById('token').value = {page_server.token!r}")
    page("document.getElementById('sign-in').requestSubmit()")
    page.until("document.getElementById('connection').textContent === 'live'")
    assert page(seen.format("'send'")) and not page(seen.format("'token'"))
    page_browser.complaints.clear()  # the browser's own words on 401


def test_key_that_may_not_read_the_events_is_told_so(page_browser, tmp_path, monkeypatch):
    async def refuse(self, http):
        raise RequestRefused("this key may only ask", status=403, code="role")

    monkeypatch.setattr("probemon.ops.server.app._Routes._events", refuse)
    running = server_with(tmp_path / "pack", [f"concept {i}" for i in range(40)])
    try:
        page = page_browser.open(f"http://127.0.0.1:{running.port}/#token={running.token.replace(' ', '%20')}")
        page.until(f"{READY} && document.body?.dataset.access === 'none'")
        said = 'This key may not read the page\'s data: ask for a key with the role "read".'
        assert text_of(page, "sign-in-why") == said
        page_browser.close_pages()
    finally:
        running.close()
    page_browser.complaints.clear()  # the browser's own words on 403


@pytest.mark.parametrize("part", ["answer", "messages"])
def test_stacked_marks_do_not_cover_other_lines(page_browser, page_server, tmp_path, part):
    marked = "a" + "\u0301" * 40 + "b"
    saved = long_answer(page_server.get("/v1/probemon/pack"), 3, {})
    choice = saved["run"]["choices"][0]
    choice["tokens"][1] |= {"text": marked, "start": 3, "end": 45}
    choice["tokens"][2] |= {"start": 45, "end": 48}
    choice["text"] = " w0" + marked + " w2"
    saved["run"]["messages"][0]["content"] = marked
    (tmp_path / "marks.json").write_text(json.dumps(saved))
    page = visit(page_browser, page_server)
    open_file(page, tmp_path / "marks.json")
    page.until("document.querySelector('#answer .stacked') !== null")
    found = page(
        f"[...document.querySelectorAll('#{part} .stacked')].map((n) => [getComputedStyle(n).overflowY, n.offsetHeight,"
        " n.textContent.length])"
    )
    assert found and all(overflow == "hidden" and height < 30 for overflow, height, _ in found)
    assert max(length for *_, length in found) >= 41
