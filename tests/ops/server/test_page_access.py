"""The page of a server is usable by keys alone, by a screen reader, and says what a key may not do."""

from contextlib import suppress
from importlib.resources import files

import pytest

from probemon.ops.server.keys import Key
from running_server import Running
from served_page import ENDED, READY, ask, visit

OPEN = {
    "an answer": "",
    "a stopped answer": "",
    "a card": "document.querySelector('#now-rows .concept').click()",
    "the rule form": "document.getElementById('rule-add').click(); const f = document.getElementById('rule-concept');"
    " f.value = 'nonsuchconcept'; f.dispatchEvent(new Event('input'))",
    "two answers": "",
    "the settings": "document.querySelector('#settings summary').click()",
    "the help": "document.getElementById('help-open').click()",
    "a zoomed lane": "document.getElementById('zoom-in').click()",
}


@pytest.fixture(scope="module")
def axe():
    """The source of axe-core, which checks a page for those who read it by a screen reader."""
    return (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


def violations(page, axe):
    """The rules that the page breaks, with the elements."""
    page(axe)
    found = page(
        "axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) =>"
        " violations.map(({ id, nodes }) => [id, nodes.slice(0, 4).map((n) => n.html.slice(0, 160))]))"
    )
    return {rule: nodes for rule, nodes in found}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_screen_readers_and_keys_reach_everything_in_each_state(page_browser, page_server, axe, width, dark):
    """axe-core finds nothing to complain of."""
    first = ask(page_server, "whales and more", rules=[{"concept": "c0", "above": 0, "action": "record"}])
    second = ask(page_server, "whales and more", max_tokens=12)
    stopped = ask(page_server, "stop", rules=[{"concept": "c0", "above": 0, "for_tokens": 3, "action": "stop"}])
    page = visit(page_browser, page_server, dark=dark, width=width, height=844)
    assert violations(page, axe) == {}
    for state, act in OPEN.items():
        place = {"two answers": f"{first}&with={second}", "a stopped answer": stopped}.get(state, first)
        page.go(f"#answer={place}")
        page.until(ENDED)
        if width == 390:
            tab = {"the rule form": "rules", "a zoomed lane": "concepts"}.get(state, "chat")
            page(f"document.querySelector('#tabs [value={tab}]').click()")
        page(f"{{ {act} }}")
        if state == "a card":
            page.until("document.querySelector('.card .facts') !== null")
        page(page_browser.settled)
        assert violations(page, axe) == {}, state
        page("document.getElementById('help').close()")
    page("sessionStorage.clear(); document.documentElement.dataset.ready = 'no more'; location.hash = ''")
    page.call("Page.reload")
    page.until(f"{READY} && document.body?.dataset.access === 'none'")
    assert violations(page, axe) == {}
    page_browser.complaints.clear()  # the browser's own words on 401


def live_again(page):
    """Wait until a page that loads itself again is live."""
    while True:
        with suppress(RuntimeError):  # it went in the middle of a question
            page.until(f"{READY} && document.getElementById('connection').textContent === 'live'")
            return


def test_link_with_another_key_is_asked_about_before_it_replaces_the_tabs(page_browser, page_server, axe):
    keys = [Key(page_server.token), Key("another key of the same server", name="other")]
    running = Running(page_server.served, page_server.limits, keys=keys)
    kept = "sessionStorage.getItem('probemon-token')"
    asked = "!document.getElementById('other-key').hidden"
    link = "#token=another%20key%20of%20the%20same%20server"
    try:
        page = visit(page_browser, running)
        page.go(link)
        page.until(asked)
        assert page(kept) == page_server.token and page("location.hash") == "" and violations(page, axe) == {}
        page("document.getElementById('key-leave').click()")
        page.until(f"!({asked})")
        assert page(kept) == page_server.token
        page.go(link)
        page.until(asked)
        page("document.documentElement.dataset.ready = 'no more'; document.getElementById('key-take').click()")
        live_again(page)
        assert page(kept) == "another key of the same server" and not page(asked)
        # A key that the server does not accept gives way: so it is after a restart with a new one.
        page("sessionStorage.setItem('probemon-token', 'outdated'); document.documentElement.dataset.ready = 'no more'")
        page.call("Page.navigate", url=f"http://127.0.0.1:{running.port}/?{link}")
        live_again(page)
        assert page(kept) == "another key of the same server" and not page(asked)
        page_browser.close_pages()
    finally:
        running.close()
    page_browser.complaints.clear()  # the browser's own words on 401
