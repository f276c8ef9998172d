"""A server whose page is opened in a real browser, and what the page should show, in plain Python."""

import itertools
import json
import re
import threading
from contextlib import contextmanager

from conftest import make_pack
from probemon import DynamicProbeManager
from probemon.ops.server.limits import Limits
from probemon.ops.server.served import Served
from probemon.util.harmless_text import harmless
from running_server import Running, demo_tokenizer, tiny_host

HOSTILE = [
    "</script><img src=x onerror=window.hit=1>", "<!--<script>window.hit=1</script>", "a\0b\x1b[31m\x7f\x85c",
    "\u202edesrever\u202c \u200f.", "\u0301\u0300 e\u0301", "x" * 3000, "🐋é鯨",
    "</title></style><svg onload=window.hit=1>",
    "__proto__", "constructor", "javascript:window.hit=1", "\u2028\u2029\ufeff",
]  # fmt: skip
READY = "document.documentElement?.dataset.ready === 'true'"
ENDED = "/complete|token limit|stopped|cancelled/.test(document.getElementById('answer-state').textContent)"
TEXT = """[...document.querySelectorAll('#answer .tok:not(.own)')].map((n) => {
  const before = n.parentElement.firstChild;  // the space before a word stands before its mark
  return before === n ? n.textContent : before.textContent + n.textContent;
}).join('')"""


def hostile_server(folder):
    """A server some of whose concepts bear names that would do harm as markup. Close it."""
    names = [harmless(HOSTILE[i % len(HOSTILE)])[:90] if i % 2 else f"concept {i}" for i in range(40)]
    return server_with(folder, names)


def server_with(folder, names=(), lines=None, **changes):
    """A server on a tiny host, with concepts of these names, called c0, c1 and so on, or of these lines. Close it."""
    tokenizer = demo_tokenizer()
    host = tiny_host(tokenizer)
    limits = Limits(max_tokens=60, kept_events=48, kept_requests=12)
    lines = concepts_of(names) if lines is None else lines
    pack = make_pack(folder, host, concepts=lines, n=len(lines), **changes)
    server = Running(Served("tiny", host, tokenizer, DynamicProbeManager(pack), limits), limits)
    server.host = host
    return server


def concepts_of(names):
    return [{"id": f"c{i}", "name": name, "parents": [f"c{i // 2}"] * (i >= 4)} for i, name in enumerate(names)]


@contextmanager
def held(running, after):
    """Let the host wait before its next token once it has made so many, until `go_on` is called, or the block ends."""
    forwards, may_go_on = itertools.count(), threading.Event()

    def wait(*_):
        if next(forwards) >= after:
            may_go_on.wait(60)

    handle = running.host.lm_head.register_forward_pre_hook(wait)
    try:
        yield may_go_on.set
    finally:
        may_go_on.set()
        handle.remove()


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


def visit(browser, running, place="", port=None, follow=False, **window):
    """A page with its token, as `probemon serve` prints the address; then at a place of it, or going to new answers."""
    page = browser.open(f"http://127.0.0.1:{port or running.port}/#token={running.token.replace(' ', '%20')}", **window)
    page.until(READY)
    page.until("document.getElementById('pack').textContent !== ''")
    if follow:
        page("sessionStorage.setItem('probemon-follow', 'yes')")  # unlike its button, without the newest of before
    if place:
        page.go(place)
    return page


def shown(page):
    """Each token of the answer: its indices, its kinds, the name over it."""
    return page(
        "[...document.querySelectorAll('#answer .tok')]"
        ".map((n) => [n.at, n.className.split(' '), n.dataset.mark ?? ''])"
    )


def leaders_of(tokens, concepts):
    """The strongest concept that fires at each token, of those on one path the lowest: plain Python over the record."""

    def above(c):
        return {a for p in concepts[c]["parents"] for a in (p, *above(p))}

    leaders = []
    for token in tokens:
        fired = set(token["fired"])
        lowest = fired - {a for c in fired for a in above(c)}
        strength = dict(zip(token["fired"], token["strengths"], strict=True))
        leaders.append(min(lowest, key=lambda c: (-strength.get(c, -1e9), c), default=None))
    return leaders


def name_over(concept):
    """A concept's name as it stands over a token."""
    name = harmless(concept["name"])
    return name if len(concept["name"]) <= 40 else harmless(concept["name"][:40]) + "…"


def assert_shows(page, running, name):
    """The page's answer is the record's: text, which tokens are marked, where a name stands, what is unseen."""
    known = record(running, name)["choices"][0]
    concepts = running.get("/v1/probemon/pack")["concepts"]
    assert page(TEXT) == harmless(known.get("reasoning", "") + known["text"], "\n\t")
    leaders = leaders_of(known["tokens"], concepts)
    previous, n_names = None, 0
    for at, kinds, mark in shown(page):
        if len(at) != 1:
            previous = ...  # of several
            continue
        token, leader = known["tokens"][at[0]], leaders[at[0]]
        assert ("unseen" in kinds) == bool(token["unseen"]), (at, kinds)
        if any(event["position"] == token["position"] for event in known["events"]):
            assert mark[:2] in ("▲ ", "■ ")
            previous = ...
            continue
        assert any(re.fullmatch(r"h\d", kind) for kind in kinds) == (leader is not None), (at, kinds)
        if previous is not ...:
            assert mark == ("" if leader in (None, previous) else name_over(concepts[leader])), (at, mark)
            n_names += bool(mark)
        if token["text"].strip():
            previous = leader
    assert n_names or not any(token["fired"] for token in known["tokens"])


def open_file(page, path):
    page.call("DOM.enable")
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#replay-file")["nodeId"]
    page.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)
