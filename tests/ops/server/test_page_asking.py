"""What the page asks, shows and asks next is whole, whatever happens to the answer or to the events."""

import json
import time
from dataclasses import replace

import pytest

from probemon.util.harmless_text import harmless
from running_server import Running
from served_page import ENDED, TEXT, ask, held, visit

ANSWER = "new URLSearchParams(location.hash.slice(1)).get('answer')"
# The stream of events is opened again, and hangs for so many milliseconds.
HANG = """{ const real = window.fetch; window.fetch = (path, options) => String(path).includes('/events')
  ? new Promise((go) => setTimeout(() => { window.fetch = real; go(real(path, options)); }, MS)) : real(path, options);
  document.dispatchEvent(new Event('visibilitychange')); }"""


def typed(page, text):
    page("document.getElementById('ask').focus()")
    page.type(text)
    page.press("Enter")


def text_of(page, name):
    return page(f"document.getElementById({name!r}).textContent")


def listed(running):
    return running.get("/v1/probemon/requests")["requests"]


def said(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


@pytest.fixture
def forgetful(page_server):
    """A server that keeps no record, with a list of the conversations that it was asked to go on with."""
    running = Running(page_server.served, replace(page_server.limits, kept_requests=0))
    running.host, running.asked = page_server.host, []
    prepare = running.served.prepare
    running.served.prepare = lambda request: (running.asked.append(list(request.said)), prepare(request))[1]
    yield running
    running.served.prepare = prepare
    running.close()


@pytest.mark.parametrize("n_before", [0, 4], ids=["never came", "break off in the middle"])
def test_answer_and_history_are_whole_though_events_are_lost(page_browser, forgetful, n_before):
    body = {"model": "tiny", "temperature": 0, "max_tokens": 12, "messages": said("Whales?")}
    whole = json.loads(forgetful.ask("POST", "/v1/chat/completions", body).content)["choices"][0]["message"]["content"]
    page = visit(page_browser, forgetful)
    page("document.getElementById('max-tokens').value = '12'")
    with held(forgetful, n_before) as go_on:
        typed(page, "Whales?")
        page.until(f"document.querySelectorAll('#answer .tok').length >= {n_before and n_before - 1}")
        page(HANG.replace("MS", "2000" if n_before else "600000"))
        go_on()
        page.until(ENDED)
    assert page(TEXT) == harmless(whole, "\n\t") and text_of(page, "answer-state") == "reached its token limit"
    page.until("document.getElementById('send').textContent === 'Send'")
    if n_before:
        assert "did not reach this page" in text_of(page, "answer-coverage")
    typed(page, "And sharks?")
    page.until("document.getElementById('messages').textContent.includes('sharks')")
    page.until(ENDED)
    assert forgetful.asked[-1] == said("Whales?", whole, "And sharks?")
    page("fetch('/healthz').then(() => true)")
    page_browser.close_pages()
    assert all("404" in line for line in page_browser.complaints)  # the browser's own words: no record is kept
    page_browser.complaints.clear()


def test_failed_turn_is_replaced_by_what_is_sent_next(page_browser, page_server):
    page = visit(page_browser, page_server)
    page("document.getElementById('max-tokens').value = '10'")
    typed(page, "First")
    page.until(ENDED)
    first = page(ANSWER)
    n_forwards = iter(range(99))

    def fail(*_):
        if next(n_forwards) > 3:
            raise RuntimeError("it broke")

    failing = page_server.host.lm_head.register_forward_pre_hook(fail)
    try:
        typed(page, "Second")
        page.until("document.getElementById('answer-state').textContent.startsWith('failed')")
    finally:
        failing.remove()
    page.until("document.getElementById('ask').value === 'Second'")
    page("document.getElementById('ask').focus()")
    page.press("Enter")
    page.until(ENDED)
    told = page_server.get(f"/v1/probemon/requests/{page(ANSWER)}")
    answer = page_server.get(f"/v1/probemon/requests/{first}")["choices"][0]["text"]
    assert told["messages"] == said("First", answer, "Second")


def test_question_stopped_before_its_first_token_stays_ones_own(page_browser, page_server):
    page = visit(page_browser, page_server)
    page("document.getElementById('max-tokens').value = '10'")
    with held(page_server, 0) as go_on:
        typed(page, "Stopped early")
        page.until(f"{ANSWER} !== null")  # the head of the response tells it
        name = page(ANSWER)
        page("document.getElementById('send').click()")
        page.until("document.getElementById('answer-state').textContent === 'cancelled'")
        go_on()
    end = time.monotonic() + 10
    while any(entry["running"] for entry in listed(page_server)) and time.monotonic() < end:
        time.sleep(0.02)
    page.until(page_browser.settled)
    assert page(ANSWER) == name and text_of(page, "answer-state") == "cancelled"
    assert page("[...document.querySelectorAll('#messages h3 span')].map((n) => n.textContent)") == ["You"]
    assert "Stopped early" in text_of(page, "messages") and "other programs" not in text_of(page, "follow")
    assert "asked here" in page(f"document.querySelector('#runs [data-stop={json.dumps(name)}]').textContent")
    typed(page, "Instead")
    page.until(f"{ANSWER} !== {json.dumps(name)}")
    page.until(ENDED)
    begun = page_server.get(f"/v1/probemon/requests/{name}")["choices"][0]["text"]  # of a forward that went on
    before = ("Stopped early", begun) if begun else ()
    assert page_server.get(f"/v1/probemon/requests/{page(ANSWER)}")["messages"] == said(*before, "Instead")


def test_answers_are_compared_only_if_all_that_was_asked_is_the_same(page_browser, page_server):
    """Also of answers that were there before the page; a system prompt is no part of the question."""
    alike = "Grade this essay on a scale from one to five, and explain your grade in a single sentence. " * 2

    def asked(*messages):
        body = {"model": "tiny", "temperature": 0, "max_tokens": 4, "messages": list(messages)}
        return json.loads(page_server.ask("POST", "/v1/chat/completions", body).content)["id"]

    question = said(alike + "Whales.")
    shown = asked(*question)
    same = asked({"role": "system", "content": "Be brief."}, *question)
    others = [same, ask(page_server, alike + "Taxes.", 4), asked(*said("Hello", "Hi"), *question)]
    page = visit(page_browser, page_server, f"#answer={shown}")
    page.until(ENDED)
    offered = "[...document.getElementById('compare-pick').options].map((option) => option.value)"
    fetched = "performance.getEntriesByType('resource').map(({ name }) => name.split('/').at(-1))"
    page.until(f"{json.dumps(others)}.every((id) => {fetched}.includes(id))")
    page.until(f"{offered}.length > 1")
    page.until(page_browser.settled)
    assert page(offered) == ["", f"0 {same}"]
