"""The page of a server shows the whole answer whatever happens to its connections."""

import http.client
import json
import random
import re
import threading
import time

import pytest

from cut_proxy import CutProxy
from running_server import Running
from served_page import ENDED, READY, ask, assert_shows, held, record, server_with, shown, visit


def test_page_without_token_asks_for_it_and_continues(page_browser, page_server):
    name = ask(page_server, "sign in")
    page = page_browser.open(f"http://127.0.0.1:{page_server.port}/#answer={name}&token=3")
    page.until(READY)
    page.until("!document.getElementById('sign-in').hidden")
    assert page("sessionStorage.length") == 0  # a link to a token's place is no secret
    page("document.getElementById('token').focus()")
    page.type(f"probemon serving at http://127.0.0.1:{page_server.port}/#token=wrong")
    page.press("Enter")
    page.until("document.getElementById('token').value === ''")
    page("document.getElementById('token').focus()")
    page.type(page_server.token)
    page.press("Enter")
    page.until(ENDED)
    assert page("document.getElementById('sign-in').hidden") and page("location.hash") == f"#answer={name}&token=3"
    refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
    assert set(page_browser.complaints) == {refused}  # the browser's own words
    page_browser.complaints.clear()


# -- while it is generated -------------------------------------------------------------------------


def test_pages_opened_during_an_answer_show_all_of_it(page_browser, page_server):
    with held(page_server, 12) as go_on:
        asking = threading.Thread(target=ask, args=(page_server, "opened late", 50))
        asking.start()
        while not (listed := page_server.get("/v1/probemon/requests")["requests"]) or not listed[0]["running"]:
            time.sleep(0.01)
        name = listed[0]["request"]
        while len(record(page_server, name)["choices"][0]["tokens"]) < 8:
            time.sleep(0.01)
        pages = [visit(page_browser, page_server) for _ in range(2)]
        for page in pages:
            page("document.getElementById('follow').click()")
            page.until(f"location.hash === '#answer={name}'")  # the newest is followed
        assert page_server.get("/v1/probemon/requests")["requests"][0]["running"]
        go_on()
        asking.join()
    for page in pages:
        page.call("Page.bringToFront")  # nothing is drawn in a tab that nobody sees
        page.until(ENDED)
        assert len(shown(page)) > 30
        assert_shows(page, page_server, name)


@pytest.mark.parametrize("lost", [False, True], ids=["all is still kept", "some is not kept any more"])
def test_page_reconnects_after_a_cut_and_misses_nothing(page_browser, page_server, lost):
    with CutProxy(page_server.port) as proxy:
        page = visit(page_browser, page_server, port=proxy.port, follow=True)
        with held(page_server, 12) as go_on:
            asking = threading.Thread(target=ask, args=(page_server, f"cut {lost}", 55))
            asking.start()
            page.until("document.querySelectorAll('#answer .tok').length > 5")
            proxy.open = False
            n_before = len(proxy.heads)
            proxy.cut()
            page.until("document.getElementById('connection').textContent.startsWith('disconnected')")
            proxy.open = not lost
            go_on()
            asking.join()
        if lost:
            ask(page_server, "many more events", 60)
        proxy.open = True
        page.until("document.getElementById('connection').textContent.startsWith('live')")
        page.until(ENDED)
        again = [head for head in proxy.heads[n_before:] if head.startswith("GET /v1/probemon/events")]
        assert again and all(re.search(r"(?mi)^last-event-id: [1-9]\d*\r$", head) for head in again)
        told = page("document.getElementById('complaint').textContent")
        assert ("did not reach" in told) == lost, told
        requests = page_server.get("/v1/probemon/requests")["requests"]
        name = next(one["request"] for one in requests if one["beginning"] == f"cut {lost}")
        if lost:
            page.go(f"#answer={name}")
        assert_shows(page, page_server, name)
        page_browser.close_pages()
    assert all("ERR_" in line for line in page_browser.complaints)  # the browser's own words on what was cut
    page_browser.complaints.clear()


NAMES_SHOWN = "[...document.querySelectorAll('#now-rows bdi, #lanes bdi, #tree bdi')].map((n) => n.textContent)"


def test_page_open_across_a_restart_names_concepts_by_each_servers_pack(page_browser, page_server, tmp_path):
    """The new server has more concepts, and the same ids for others; its events have the ids that the old one's had."""
    new = server_with(tmp_path / "new", [f"zebra {i}" for i in range(60)])
    try:
        with CutProxy(page_server.port) as proxy:
            page = visit(page_browser, page_server, port=proxy.port, follow=True)
            old = ask(page_server, "before", 30)
            page.until(f"location.hash === '#answer={old}'")
            page.until(ENDED)
            page("document.getElementById('rule-concept').value = 'zebra 7'")
            proxy.to = new.port
            proxy.cut()
            page.until("document.getElementById('pack').textContent.includes('60 concepts')")
            assert "started again" in page("document.getElementById('complaint').textContent")
            offered = page("[...document.querySelectorAll('#rule-concepts option')].map((n) => n.value)")
            assert "zebra 7" in offered
            assert_shows(page, page_server, old)
            assert "from before the restart" in page("document.getElementById('runs').textContent")
            assert "From before the restart" in page("document.getElementById('answer-coverage').textContent")
            names = page(NAMES_SHOWN)
            assert names and not any(name.startswith("zebra") for name in names)
            name = ask(new, "after", 30)
            page.until(f"location.hash === '#answer={name}'")  # the newest is followed
            page.until(ENDED)
            assert_shows(page, new, name)
            names = page(NAMES_SHOWN)
            assert names and all(name.startswith("zebra") for name in names)
            page.go(f"#answer={old}")
            assert_shows(page, page_server, old)
            page_browser.close_pages()
    finally:
        new.close()
    assert all("ERR_" in line for line in page_browser.complaints)  # the browser's own words on what was cut
    page_browser.complaints.clear()


def test_answer_of_another_server_is_not_mixed_into_the_old_stream(page_browser, page_server, tmp_path):
    """The stream stays with the old server, while what the page fetches comes from the new one already."""
    new = server_with(tmp_path / "new", [f"zebra {i}" for i in range(60)])
    try:
        name = ask(new, "of the new one", 30)
        with CutProxy(page_server.port) as proxy:
            page = visit(page_browser, page_server, port=proxy.port)
            page.until("document.getElementById('connection').textContent === 'live'")
            proxy.to = new.port
            proxy.cut(but="GET /v1/probemon/events")
            page.go(f"#answer={name}")
            page.until(ENDED)
            assert_shows(page, new, name)
            names = page(NAMES_SHOWN)
            assert names and all(name.startswith("zebra") for name in names)
            page_browser.close_pages()
    finally:
        new.close()
    assert all("ERR_" in line for line in page_browser.complaints)
    page_browser.complaints.clear()


def test_only_the_visible_one_of_seven_tabs_holds_a_connection(page_browser, page_server):
    """Browsers open six connections to a server, for all tabs together."""
    tabs = [visit(page_browser, page_server, follow=True) for _ in range(7)]
    name = ask(page_server, "seven tabs", 20)
    tabs[6].until(f"location.hash === '#answer={name}'")
    tabs[6].until(ENDED)
    assert_shows(tabs[6], page_server, name)
    assert tabs[0]("document.visibilityState") == "hidden" and tabs[0]("location.hash") == ""
    n_readers = re.search(rb"(?m)^probemon_subscribers (\S+)$", page_server.ask("GET", "/metrics").content)
    assert float(n_readers[1]) == 1
    tabs[0].call("Page.bringToFront")
    tabs[0].until(f"location.hash === '#answer={name}'")
    tabs[0].until(ENDED)
    assert_shows(tabs[0], page_server, name)


def test_page_without_a_reply_says_so_within_seconds_and_then_recovers(page_browser, page_server):
    """Windows side by side are all in sight, and each holds a connection: the sixth gets its stream, and no more."""
    windows = [visit(page_browser, page_server, window=True) for _ in range(5)]
    address = f"http://127.0.0.1:{page_server.port}/#token={page_server.token.replace(' ', '%20')}"
    last = page_browser.open(address, window=True)
    last.until(READY)
    begun = time.monotonic()
    last.until("!document.getElementById('late').hidden")
    assert time.monotonic() - begun < 8 and last("document.getElementById('pack').textContent") == ""
    windows[0].call("Page.navigate", url="about:blank")
    last.until("document.getElementById('pack').textContent !== ''")
    last.until("document.getElementById('late').hidden")


ORDERS = """import("/page/state.js").then(({ newState, apply, merge, recordOf }) => {
  const record = RECORD, orders = GIVEN, { request } = record, events = [["begin", record]];
  record.choices.forEach((choice, i) => {
    for (const token of choice.tokens) events.push(["token", { request, ...token }]);
    for (const event of choice.events) events.push(["rule", { request, ...event }]);
    events.push(["end", { request, choice: i, ...choice }]);
  });
  const answers = orders.map((order) => {
    const state = newState();
    for (const at of order) {
      if (at < 0) merge(state, structuredClone(record));
      else apply(state, ...structuredClone(events[at]));
    }
    return recordOf(state.runs.get(request)).choices;
  });
  return [events.length, answers];
})"""


def test_events_in_any_order_and_repeated_build_the_same_answer(page_browser, page_server):
    """Each order has every event; some have the whole record (-1) among them, all have some events twice."""
    name = ask(page_server, "orders", 25, rules=[{"concept": "c0", "above": 0, "action": "record"}])
    known = record(page_server, name)
    page, rng = visit(page_browser, page_server), random.Random(5)
    n = 2 + len(known["choices"][0]["tokens"]) + len(known["choices"][0]["events"])
    orders = [list(range(n))]
    for _ in range(40):
        order = [*range(n), *rng.choices(range(n), k=9), *[-1] * rng.randrange(2)]
        rng.shuffle(order)
        orders.append(order)
    found, answers = page(ORDERS.replace("RECORD", json.dumps(known)).replace("GIVEN", json.dumps(orders)))
    assert found == n and len(known["choices"][0]["events"]) > 0
    for (answer,) in answers:
        for told in (*answer["tokens"], *answer["events"]):
            told.pop("request", None)
        assert [answer] == known["choices"]


def test_open_page_does_not_delay_the_servers_shutdown(served):
    """Uvicorn waits five seconds for answers that go on, and then cuts them off with a traceback."""
    server = Running(served)
    reader = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    reader.request("GET", "/v1/probemon/events", headers={"Authorization": f"Bearer {server.token}"})
    with reader.getresponse() as stream:
        assert stream.readline().startswith(b"retry:")
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 4 and stream.read().startswith(b"event: hello")  # and then the end
    reader.close()
