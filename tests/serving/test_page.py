"""The page of a server shows, in a real browser, what the server's records say, whatever connections and texts do."""

import json
import re
import subprocess
import sys
import threading
import time

import pytest

from browser import Browser, find
from conftest import make_pack
from cut_proxy import CutProxy
from probemon import DynamicProbeManager
from probemon.core.harmless_text import harmless
from probemon.serving.page_files import page_files

pytestmark = pytest.mark.skipif(
    find() is None,
    reason="NO BROWSER: the server's page is not tested. Install chromium, or name one in PROBEMON_CHROMIUM",
)
HOSTILE = [
    "</script><img src=x onerror=window.hit=1>", "<!--<script>window.hit=1</script>", "a\0b\x1b[31m\x7f\x85c",
    "\u202edesrever\u202c \u200f.", "\u0301\u0300 e\u0301", "x" * 3000, "🐋é鯨", "</title></style><svg onload=window.hit=1>",
    "__proto__", "constructor", "javascript:window.hit=1", "\u2028\u2029\ufeff",
]  # fmt: skip
READY = "document.documentElement?.dataset.ready === 'true'"
ENDED = "/complete|cut off|stopped|cancelled/.test(document.getElementById('answer-state').textContent)"
TEXT = "[...document.querySelectorAll('#answer .tok:not(.own)')].map((n) => n.parentElement.firstChild === n ? n.textContent : n.parentElement.firstChild.textContent + n.textContent).join('')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    settled = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
    with Browser(tmp_path_factory.mktemp("chromium"), settled=settled, timeout=40) as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_other_host_is_asked_and_nothing_is_complained_of(request):
    if "browser" not in request.fixturenames:
        yield
        return
    browser = request.getfixturevalue("browser")
    browser.requests.clear()
    browser.complaints.clear()
    yield
    browser.close_pages()
    strange = [url for url in browser.requests if not re.match(r"(blob:)?http://127\.0\.0\.1:\d+/|data:,$", url)]
    assert browser.requests and strange == [] and browser.complaints == []


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server on a tiny host, some of whose concepts bear names that would do harm as markup."""
    from running_server import Running, demo_tokenizer, tiny_host
    from probemon.serving.limits import Limits
    from probemon.serving.served import Served

    tokenizer = demo_tokenizer()
    host, limits = tiny_host(tokenizer), Limits(max_tokens=60, lag_events=24, kept_events=48, kept_requests=12)
    folder = tmp_path_factory.mktemp("packs") / "hostile"
    concepts = [
        {
            "id": f"c{i}",
            "name": harmless(HOSTILE[i % len(HOSTILE)])[:90] if i % 2 else f"concept {i}",
            "parents": [f"c{i // 2}"] if i >= 4 else [],
        }
        for i in range(40)
    ]
    pack = make_pack(folder, host, concepts=concepts)
    server = Running(Served("tiny", host, tokenizer, DynamicProbeManager(pack), limits), limits)
    server.host = host
    yield server
    server.close()


def slowly(running, seconds):
    """Let the host take at least so long for a token; `remove()` ends it."""
    return running.host.lm_head.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def ask(running, text, max_tokens=20, **watch):
    body = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": text}],
    }
    answer = running.ask("POST", "/v1/chat/completions", body | {"probemon": {"top_k": 8, **watch}})
    assert answer.status == 200, answer.content
    return json.loads(answer.content)["id"]


def record(running, name):
    return running.get(f"/v1/probemon/requests/{name}")


def visit(browser, running, place="", port=None, **window):
    """A page with its token, as `probemon serve` prints the address; then at a place of it."""
    page = browser.open(f"http://127.0.0.1:{port or running.port}/#token={running.token.replace(' ', '%20')}", **window)
    page.until(READY)
    page.until("document.getElementById('pack').textContent !== ''")
    if place:
        page.go(place)
    return page


def shown(page):
    """Each token of the answer: its indices, its kinds, the number it begins with."""
    return page(
        "[...document.querySelectorAll('#answer .tok')].map((n) => [n.at, n.className.split(' '), n.dataset.mark ?? ''])"
    )


def leaders_of(tokens, concepts):
    """The strongest concept that fires at each token, of those on one path the lowest: plain Python over the record."""

    def above(c):
        return {a for p in concepts[c]["parents"] for a in (p, *above(p))}

    leaders = []
    for token in tokens:
        fired = set(token["fired"])
        lowest = fired - {a for c in fired for a in above(c)}
        strength = {c: s for c, _, s in token["top"]}
        leaders.append(min(lowest, key=lambda c: (-strength.get(c, -1e9), c), default=None))
    return leaders


def assert_shows(page, running, name):
    """The page's answer is the record's: text, which tokens are marked, where each concept begins, what is unseen."""
    known = record(running, name)["choices"][0]
    concepts = running.get("/v1/probemon/pack")["concepts"]
    assert page(TEXT) == harmless(known["text"], "\n\t")
    leaders = leaders_of(known["tokens"], concepts)
    order = list(dict.fromkeys(c for c in all_leaders(known["tokens"], concepts) if c is not None))
    previous = None
    for at, kinds, mark in shown(page):
        if len(at) != 1:
            continue
        token, leader = known["tokens"][at[0]], leaders[at[0]]
        assert ("unseen" in kinds) == bool(token["unseen"]), (at, kinds)
        assert any(re.fullmatch(r"h\d", kind) for kind in kinds) == (leader is not None), (at, kinds)
        if mark:
            assert leader != previous and order[int(mark) - 1] == leader
        if token["text"].strip():
            previous = leader


def all_leaders(tokens, concepts):
    """The leading concepts in the order in which they get numbers: token by token, the strongest first."""

    def above(c):
        return {a for p in concepts[c]["parents"] for a in (p, *above(p))}

    for token in tokens:
        fired = set(token["fired"])
        strength = {c: s for c, _, s in token["top"]}
        yield from sorted(fired - {a for c in fired for a in above(c)}, key=lambda c: (-strength.get(c, -1e9), c))


# -- one command, and a coloured token ------------------------------------------------------------


def test_one_command_and_a_question_typed_give_a_coloured_token(browser):
    """The demo model with its own pack, as a user starts it; the token leaves the address at once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "probemon.cli", "serve", "demo", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        address = re.fullmatch(r"probemon serving at (http://127\.0\.0\.1:\d+/#token=\S+)\n", line)[1]
        page = browser.open(address)
        page.until(READY)
        assert page("location.hash") == "" and page("sessionStorage.getItem('probemon-token').length") > 30
        page.until("document.getElementById('pack').textContent.includes('479 concepts')")
        page("document.getElementById('max-tokens').value = '12'; document.getElementById('ask').focus()")
        page.type("Write about cats, dogs, horses and sharks, and what they eat.")
        page.press("Enter")
        page.until("document.querySelector('#answer .tok[data-mark]') !== null")
        page.until(ENDED)
        concepts = page("[...document.querySelectorAll('#now-rows .concept bdi')].map((n) => n.textContent)")
        assert "mammal" in concepts and page("document.querySelector('#now-rows .more').textContent").endswith("right")
        open_path = page("[...document.querySelectorAll('#tree .node .name')].map((n) => n.textContent)")
        assert open_path[:5] == ["whole", "living thing", "animal", "vertebrate", "mammal"]
        assert page("document.getElementById('answer-coverage').textContent").startswith("11 tokens seen, 1 unseen")
        assert browser.complaints == []
    finally:
        browser.close_pages()
        process.terminate()
        process.wait(20)
        process.stdout.close()


# -- what is shown is what the record says ---------------------------------------------------------


def test_tokens_are_marked_as_the_record_says_and_panels_tell_of_the_pinned_one(browser, running):
    name = ask(running, "whales")
    known = record(running, name)["choices"][0]
    page = visit(browser, running, f"#answer={name}")
    page.until(ENDED)
    assert_shows(page, running, name)
    at = next(i for i, token in enumerate(known["tokens"]) if token["fired"] and len(token["text"].strip()) > 1)
    page.click(f"[...document.querySelectorAll('#answer .tok')].find((n) => n.at[0] === {at})")
    assert page("location.hash") == f"#answer={name}&token={known['tokens'][at]['position']}"
    concepts = running.get("/v1/probemon/pack")["concepts"]
    leader = leaders_of(known["tokens"], concepts)[at]
    _, score, strength = next(top for top in known["tokens"][at]["top"] if top[0] == leader)
    row = page("[...document.querySelectorAll('#now-rows .leader')][0].textContent")
    assert harmless(concepts[leader]["name"])[:80] in row and f"{strength:+.1f}".replace("-", "−") in row
    tip = page("document.querySelector('#now-rows .concept').title")
    assert f"score {score:.3f}" in tip or score < 0.01
    fires = page("[...document.querySelectorAll('#tree .node.fires')].map((n) => n.row.c)")
    first_parents = {c: concepts[c]["parents"][:1] for c in known["tokens"][at]["fired"]}
    assert set(fires) == set(first_parents)


def test_a_link_to_a_token_and_a_concept_shows_that_and_the_concept_alone(browser, running):
    name = ask(running, "a link")
    known = record(running, name)["choices"][0]
    concepts = running.get("/v1/probemon/pack")["concepts"]
    at = next(i for i, token in enumerate(known["tokens"]) if token["fired"])
    c = known["tokens"][at]["fired"][0]
    page = visit(
        browser, running, f"#answer={name}&token={known['tokens'][at]['position']}&concept={concepts[c]['id']}"
    )
    page.until("document.querySelector('#answer .pinned') !== null")
    assert page("document.querySelector('#answer .pinned').at[0]") == at
    for indices, kinds, _ in shown(page):
        coloured = any(re.fullmatch(r"h\d", kind) for kind in kinds)
        assert coloured == any(c in known["tokens"][i]["fired"] for i in indices)
    page.go("#answer=gone")
    page.until("!document.getElementById('gone').hidden")
    assert "is not kept" in page("document.getElementById('gone').textContent")
    assert len(browser.complaints) == 1 and "404" in browser.complaints[0]  # the browser's own words
    browser.complaints.clear()


def test_without_the_token_a_page_asks_for_it_and_goes_on(browser, running):
    name = ask(running, "sign in")
    page = browser.open(f"http://127.0.0.1:{running.port}/#answer={name}&token=3")
    page.until(READY)
    page.until("!document.getElementById('sign-in').hidden")
    assert page("sessionStorage.length") == 0  # a link to a token's place is no secret
    page("document.getElementById('token').focus()")
    page.type(f"probemon serving at http://127.0.0.1:{running.port}/#token=wrong")
    page.press("Enter")
    page.until("document.getElementById('token').value === ''")
    page("document.getElementById('token').focus()")
    page.type(running.token)
    page.press("Enter")
    page.until(ENDED)
    assert page("document.getElementById('sign-in').hidden") and page("location.hash") == f"#answer={name}&token=3"
    refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
    assert set(browser.complaints) == {refused}  # the browser's own words
    browser.complaints.clear()


# -- while it is generated -------------------------------------------------------------------------


def test_two_pages_opened_while_it_is_answered_show_all_of_it(browser, running):
    handle = slowly(running, 0.04)
    try:
        asking = threading.Thread(target=ask, args=(running, "opened late", 50))
        asking.start()
        while not (listed := running.get("/v1/probemon/requests")["requests"]) or not listed[0]["running"]:
            time.sleep(0.01)
        name = listed[0]["request"]
        while len(record(running, name)["choices"][0]["tokens"]) < 8:
            time.sleep(0.01)
        pages = [visit(browser, running) for _ in range(2)]
        for page in pages:
            page.until(f"location.hash === '#answer={name}'")  # the newest is followed
        assert running.get("/v1/probemon/requests")["requests"][0]["running"]
        asking.join()
    finally:
        handle.remove()
    for page in pages:
        page.call("Page.bringToFront")  # nothing is drawn in a tab that nobody sees
        page.until(ENDED)
        assert len(shown(page)) > 30
        assert_shows(page, running, name)


@pytest.mark.parametrize("lost", [False, True], ids=["all is still kept", "some is not kept any more"])
def test_a_page_whose_connection_is_cut_comes_back_and_misses_nothing(browser, running, lost):
    with CutProxy(running.port) as proxy:
        page = visit(browser, running, port=proxy.port)
        handle = slowly(running, 0.05)
        try:
            asking = threading.Thread(target=ask, args=(running, f"cut {lost}", 55))
            asking.start()
            page.until("document.querySelectorAll('#answer .tok').length > 5")
            proxy.open = not lost
            n_before = len(proxy.heads)
            proxy.cut()
            page.until("document.getElementById('connection').textContent.startsWith('away')")
            asking.join()
        finally:
            handle.remove()
        if lost:
            ask(running, "many more events", 60)
        proxy.open = True
        page.until("document.getElementById('connection').textContent.startsWith('live')")
        page.until(ENDED)
        again = [head for head in proxy.heads[n_before:] if head.startswith("GET /v1/probemon/events")]
        assert again and all(re.search(r"(?mi)^last-event-id: [1-9]\d*\r$", head) for head in again)
        told = page("document.getElementById('complaint').textContent")
        assert ("came faster" in told) == lost, told
        requests = running.get("/v1/probemon/requests")["requests"]
        name = next(one["request"] for one in requests if one["beginning"] == f"cut {lost}")
        if lost:
            page.go(f"#answer={name}")
        assert_shows(page, running, name)
        browser.close_pages()
    assert all("ERR_" in line for line in browser.complaints)  # the browser's own words on a connection that was cut
    browser.complaints.clear()


def test_a_rule_of_the_form_stops_the_answer_at_its_token_and_its_event_is_listed(browser, running):
    name = ask(running, "a rule")
    tokens = record(running, name)["choices"][0]["tokens"]
    concepts = running.get("/v1/probemon/pack")["concepts"]
    first = {c: i for i, token in reversed(list(enumerate(tokens))) for c in token["fired"]}
    c, at = next((c, i) for c, i in first.items() if i >= 2)
    page = visit(browser, running)
    page("document.querySelector('#rules-panel summary').click(); document.getElementById('rule-concept').focus()")
    page.type(concepts[c]["id"])
    page("document.getElementById('max-tokens').value = '20'")
    page("document.getElementById('rule-action').value = 'stop'; document.getElementById('rule-form').requestSubmit()")
    page("document.getElementById('ask').focus()")
    page.type("a rule")
    page.press("Enter")
    page.until(ENDED)
    known = record(running, page("readHash = new URLSearchParams(location.hash.slice(1)).get('answer')"))["choices"][0]
    assert known["finish_reason"] == "content_filter" and known["events"][0]["position"] == tokens[at]["position"]
    stopped = page("document.querySelector('.halt').parentElement.querySelector('.tok').at")
    assert at in stopped and page("document.querySelectorAll('.halt').length") == 1
    assert page("document.querySelectorAll('#events button').length") == 1
    page.click("document.querySelector('#events button')")
    assert page("location.hash").endswith(f"&token={tokens[at]['position']}")
    page.click("document.querySelector('#rules button')")
    assert page("localStorage.getItem('probemon-rules')") == "[]"


def test_what_the_server_refuses_is_told_in_its_words_and_the_question_is_kept(browser, running):
    page = visit(browser, running)
    page(
        "localStorage.setItem('probemon-rules', JSON.stringify([{ concept: 'no such', above: null, for_tokens: 1, aggregate: null, action: 'tell' }]))"
    )
    page("document.documentElement.dataset.ready = 'no more'")
    page.call("Page.reload")
    page.until(READY)
    page("document.getElementById('max-tokens').value = '20'")
    page.until("document.getElementById('pack').textContent !== ''")
    page("document.getElementById('ask').focus()")
    page.type("refused")
    page.press("Enter")
    page.until("!document.getElementById('complaint').hidden")
    assert "no such" in page("document.getElementById('complaint').textContent")
    assert page("document.getElementById('ask').value") == "refused"
    page("localStorage.clear()")
    assert len(browser.complaints) == 1 and "400" in browser.complaints[0]
    browser.complaints.clear()


# -- keys, replay, files ---------------------------------------------------------------------------


def test_tokens_lanes_and_tree_are_walked_by_keys(browser, running):
    name = ask(running, "keys")
    known = record(running, name)["choices"][0]
    page = visit(browser, running, f"#answer={name}")
    page.until(ENDED)
    page("document.querySelector('#answer .tok[tabindex=\"0\"]').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    at = page("document.activeElement.at[0]")
    assert page("!document.getElementById('tip').hidden") and page("document.getElementById('said').textContent") != ""
    page.press("Enter")
    assert page("location.hash").endswith(f"&token={known['tokens'][at]['position']}")
    page.press("Escape")
    assert page("location.hash") == f"#answer={name}"
    page("document.getElementById('lanes-slider').focus()")
    page.press("Home")
    page.press("ArrowRight")
    assert page("location.hash").endswith(f"&token={known['tokens'][1]['position']}")
    assert page("document.getElementById('lanes-slider').getAttribute('aria-valuenow')") == str(
        known["tokens"][1]["position"]
    )
    page("document.querySelector('#tree [aria-expanded=true]').focus()")
    rows = page("document.querySelectorAll('#tree .node').length")
    page.press("ArrowLeft")
    assert page("document.querySelectorAll('#tree .node').length") < rows
    page.press("ArrowRight")
    page.press("ArrowDown")
    page.press("Enter")
    assert "&concept=c" in page("location.hash") and page("document.activeElement.row.depth") >= 1


def test_a_run_is_saved_opened_again_and_replayed_to_any_token(browser, running, tmp_path):
    name = ask(running, "saved")
    page = visit(browser, running, f"#answer={name}")
    page.until(ENDED)
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("document.getElementById('replay-save')")
    end = time.monotonic() + 20
    while not (files := list(tmp_path.glob("*.json"))) and time.monotonic() < end:
        time.sleep(0.05)
    saved = json.loads(files[0].read_text())
    known = record(running, name)
    assert saved["run"]["choices"][0]["tokens"] == known["choices"][0]["tokens"] and saved["run"]["request"] == name
    open_file(page, files[0])
    page.until(f"location.hash === '#answer=saved%3A{name}'")
    assert_shows(page, running, name)
    page("{ const r = document.getElementById('replay-range'); r.value = '4'; r.dispatchEvent(new Event('input')); }")
    page.until("document.getElementById('replay-where').textContent.startsWith('5 of')")
    later = [at for at, kinds, _ in shown(page) if "later" in kinds]
    assert later == [at for at, _, _ in shown(page) if at and at[0] > 4] and later
    page("document.getElementById('replay-speed').value = '30'; document.getElementById('replay-play').click()")
    page.until("document.querySelectorAll('#answer .later').length === 0")
    assert page("document.getElementById('replay-play').textContent") == "Replay"
    for text, message in (
        ("{", "is not JSON"),
        ("{}", "not a saved run"),
        (json.dumps({**saved, "run": {}}), "damaged"),
    ):
        bad = tmp_path / "bad.txt"
        bad.write_text(text)
        open_file(page, bad)
        page.until(f"document.getElementById('complaint').textContent.includes({json.dumps(message)})")


def open_file(page, path):
    page.call("DOM.enable")
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#replay-file")["nodeId"]
    page.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)


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
            {**token, "end": len(text), "top": top, "fired": [c for c, _, _ in top], "n_active": 4, "unseen": unseen}
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
    return {"format": "probemon-run", "pack": {**pack, "concepts": names}, "run": run}


def test_hostile_tokens_names_and_messages_are_shown_and_nothing_of_them_runs(browser, running, tmp_path):
    """Messages come by the server, which refuses such names of concepts; these, tokens and reasons come from a file."""
    for text in HOSTILE[:5]:
        name = ask(running, text, 6)
    path = tmp_path / "hostile.json"
    saved = hostile_run(running.get("/v1/probemon/pack"))
    path.write_text(json.dumps(saved))
    page = visit(browser, running, f"#answer={name}")
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


def test_harmless_writes_the_same_characters_as_python_does(browser, running):
    page = visit(browser, running)
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    changed = page(
        "import('/page/harmless.js').then(({ harmless }) => { const found = {};"
        " for (let code = 0; code < 0x110000; code++) { if (code >= 0xd800 && code < 0xe000) continue;"
        " const text = String.fromCodePoint(code), made = harmless(text); if (made !== text) found[code] = made; } return found; })"
    )
    assert {int(code): text for code, text in changed.items()} == {
        code: harmless(chr(code)) for code in codes if harmless(chr(code)) != chr(code)
    }
    assert (
        page("import('/page/harmless.js').then(({ harmless }) => harmless('a\\ud800b\\ud83d\\udc0b'))") == "a\\ud800b🐋"
    )


# -- sizes and colours -----------------------------------------------------------------------------

CONTRASTS = """(() => {
  const paper = getComputedStyle(document.body).backgroundColor, rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a)];
  const linear = (x) => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const ground = (n) => n === null ? rgb(paper) : over(rgb(getComputedStyle(n).backgroundColor), ground(n.parentElement));
  const found = {}, look = (name, n, least) => { found[name] = [ratio(rgb(getComputedStyle(n).color), ground(n)), least]; };
  const box = document.createElement("div");
  document.getElementById("answer").append(box);
  for (let h = 0; h < 8; h++) for (let t = 0; t < 3; t++) {
    const n = document.createElement("span");
    n.className = `tok h${h} t${t}`;
    box.append(n);
    look(n.className, n, 4.5);
    found[`line ${n.className}`] = [ratio(rgb(getComputedStyle(n).textDecorationColor), ground(n.parentElement)), 3];
    const b = document.createElement("span");
    b.className = `badge h${h}`;
    box.append(b);
    look(b.className, b, 4.5);
  }
  box.remove();
  for (const n of document.querySelectorAll("p, h1, h2, h3, a, button, label, li, span, bdi, small, summary, input, textarea, select")) {
    if (n.checkVisibility() && n.textContent.trim() + (n.value ?? "")) look(`${n.tagName} ${n.id} ${n.className}`, n, 4.5);
  }
  return found;
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_word_can_be_read_on_what_is_behind_it(browser, running, dark):
    name = ask(running, "contrast", rules=[{"concept": "c0", "above": 0, "action": "tell"}])
    page = visit(browser, running, f"#answer={name}", dark=dark, width=1600, height=1000)
    page.until(ENDED)
    found = page(CONTRASTS)
    assert len(found) > 80
    assert {what: pair for what, pair in found.items() if pair[0] < pair[1]} == {}


@pytest.mark.parametrize("width", [320, 768, 1280, 1920])
def test_nothing_is_wider_than_the_window_and_every_part_can_be_reached(browser, running, width):
    name = ask(running, "sizes")
    page = visit(browser, running, f"#answer={name}", width=width, height=700)
    page.until(ENDED)
    for tab in ("concepts", "hierarchy", "runs", "chat") if width == 320 else ("chat",):
        page(f"document.querySelector('#tabs [value={tab}]').click()")
        assert page("document.documentElement.scrollWidth") == width
        wide = "[...document.querySelectorAll('main section, main section *, header')].filter((n) => n.scrollWidth > n.clientWidth + 1 && n.clientWidth && !/hidden|auto|clip/.test(getComputedStyle(n).overflowX)).map((n) => `${n.id} ${n.className} ${n.scrollWidth} ${n.clientWidth} ${n.textContent.slice(0, 40)}`)"
        assert page(wide) == [], tab
    parts = ("ask", "replay-play") if width == 320 else ("ask", "replay-play", "now-title", "tree", "rules", "runs")
    for part in parts:
        inside = page(
            f"(() => {{ const n = document.getElementById('{part}'); n.scrollIntoView({{ block: 'center' }});"
            " const r = n.getBoundingClientRect(), m = document.elementFromPoint(r.left + Math.min(r.width / 2, 20), Math.min(r.top + r.height / 2, innerHeight - 70));"
            " return r.width > 20 && r.left >= 0 && r.right <= innerWidth + 1 && m !== null; })()"
        )
        assert inside, part


def test_files_of_the_page_have_names_of_their_own():
    files = page_files()
    from importlib.resources import files as folder

    names = [
        entry.name
        for room in ("probemon.core", "probemon.serving")
        for entry in (folder(room) / {"probemon.core": "page_code"}.get(room, "page")).iterdir()
    ]
    assert len(names) == len(set(names)) == len(files)
