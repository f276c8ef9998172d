"""The page of a server shows, in a real browser, what the server's records contain."""

import json
import re
import subprocess
import sys
import time

from probemon.util.harmless_text import harmless
from running_server import Running, thinking_served
from served_page import (
    ENDED,
    READY,
    ask,
    assert_shows,
    concepts_of,
    leaders_of,
    name_over,
    open_file,
    record,
    shown,
    visit,
)

ANSWER = "new URLSearchParams(location.hash.slice(1)).get('answer')"

# -- one command, and a coloured token ------------------------------------------------------------


def test_demo_command_and_a_typed_question_show_coloured_tokens(page_browser):
    """The demo model with its own pack, as a user starts it; the token leaves the address at once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "probemon.cli", "serve", "demo", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        address = re.fullmatch(r"probemon serving at (http://127\.0\.0\.1:\d+/#token=\S+)\n", line)[1]
        page = page_browser.open(address)
        page.until(READY)
        assert page("location.hash") == "" and page("sessionStorage.getItem('probemon-token').length") > 30
        page.until("document.getElementById('pack').textContent.includes('479 concepts')")
        page("document.getElementById('max-tokens').value = '12'; document.getElementById('ask').focus()")
        page.type("Write about cats, dogs, horses and sharks, and what they eat.")
        page.press("Enter")
        page.until("document.querySelector('#answer .tok[data-mark]') !== null")
        page.until(ENDED)
        concepts = page("[...document.querySelectorAll('#now-rows .concept bdi')].map((n) => n.textContent)")
        assert "mammal" in concepts
        assert page("document.querySelector('#now-rows .where').textContent").endswith("times in 100")
        open_path = page("[...document.querySelectorAll('#tree .node .name')].map((n) => n.textContent)")
        assert open_path[:5] == ["whole", "living thing", "animal", "vertebrate", "mammal"]
        assert "11 of 12 tokens checked" in page("document.getElementById('answer-coverage').textContent")
        assert page_browser.complaints == []
    finally:
        page_browser.close_pages()
        process.terminate()
        process.wait(20)
        process.stdout.close()


# -- what is shown is what the record says ---------------------------------------------------------


def test_tokens_are_marked_as_recorded_and_panels_describe_the_pinned_one(page_browser, page_server):
    name = ask(page_server, "whales")
    known = record(page_server, name)["choices"][0]
    page = visit(page_browser, page_server, f"#answer={name}")
    page.until(ENDED)
    assert_shows(page, page_server, name)
    at = next(i for i, token in enumerate(known["tokens"]) if token["fired"] and len(token["text"].strip()) > 1)
    page.click(f"[...document.querySelectorAll('#answer .tok')].find((n) => n.at[0] === {at})")
    assert page("location.hash") == f"#answer={name}&token={known['tokens'][at]['position']}"
    concepts = page_server.get("/v1/probemon/pack")["concepts"]
    leader = leaders_of(known["tokens"], concepts)[at]
    _, score, strength = next(top for top in known["tokens"][at]["top"] if top[0] == leader)
    row = page("[...document.querySelectorAll('#now-rows .leader')][0].textContent")
    assert harmless(concepts[leader]["name"])[:80] in row and f", {strength:.1f}" in row
    tip = page("document.querySelector('#now-rows .concept').title")
    assert f"score {score:.3f}" in tip or score < 0.01
    fires = page("[...document.querySelectorAll('#tree .node.fires')].map((n) => n.row.c)")
    first_parents = {c: concepts[c]["parents"][:1] for c in known["tokens"][at]["fired"]}
    assert set(fires) == set(first_parents)


def test_page_stays_with_its_own_conversation_and_says_whose_another_is(page_browser, page_server):
    def typed(text):
        known = {entry["request"] for entry in page_server.get("/v1/probemon/requests")["requests"]}
        page("document.getElementById('max-tokens').value = '8'; document.getElementById('ask').focus()")
        page.type(text)
        page.press("Enter")
        page.until(f"![...{json.dumps(sorted(known))}, null].includes({ANSWER})")
        page.until(ENDED)
        return page(ANSWER)

    heads = "[...document.querySelectorAll('#messages .message h3 span')].map((n) => n.textContent)"
    shown = "document.getElementById('messages').textContent"
    page = visit(page_browser, page_server)
    early = ask(page_server, "SECRET before this page has asked")
    page.until("document.getElementById('follow').textContent === 'Follow new answers (1 by other programs)'")
    assert page(ANSWER) is None and page("document.getElementById('follow').checkVisibility()")  # read on demand
    first = typed("Sing of whales")
    assert page(heads) == ["You"]
    other = ask(page_server, "SECRET of another program")
    page.until("document.getElementById('follow').textContent.includes('(2 by other programs)')")
    assert page(ANSWER) == first and "SECRET" not in page(shown)
    second = typed("And sharks?")  # goes on with its own
    asked = [message["content"] for message in page_server.get(f"/v1/probemon/requests/{second}")["messages"]]
    assert asked[0] == "Sing of whales" and asked[2:] == ["And sharks?"]
    page("document.getElementById('follow').click()")
    other = ask(page_server, "another SECRET")
    page.until(f"{ANSWER} === {other!r}")  # new answers are followed again
    page.until(ENDED)
    assert page(heads) == ["Another program"] and "SECRET" in page(shown)
    page("document.documentElement.dataset.ready = 'no more'")
    page.call("Page.reload")
    page.until(READY)
    page.until("document.getElementById('follow').textContent === 'Stop following'")
    page.until("document.getElementById('connection').textContent === 'live'")
    other = ask(page_server, "SECRET after a reload")
    page.until(f"{ANSWER} === {other!r}")
    page(f"document.querySelector('#runs [data-stop={json.dumps(early)}]').click()")  # what its reader opens stays
    page.until("document.getElementById('follow').textContent === 'Follow new answers'")
    third = typed("Hello")  # begins a conversation
    messages = page_server.get(f"/v1/probemon/requests/{third}")["messages"]
    assert [message["content"] for message in messages] == ["Hello"]


def test_reasoning_is_shown_dimmed_above_the_reply(page_browser, tmp_path):
    """As its tokens come, and from the record; a saved answer keeps it."""
    concepts = concepts_of([f"concept {i}" for i in range(40)])
    served = thinking_served(tmp_path / "pack", [{"role": "user", "content": "Whales?"}], concepts=concepts, n=40)
    running = Running(served)
    parts = """['thought', ''].map((kind) => [...document.querySelectorAll('#answer .tok:not(.own)')].filter((n) =>
      n.classList.contains('thought') === !!kind).map((n) => n.at.map((i) => document.getElementById('answer')
      .choice.tokens[i].position)).flat())"""
    try:
        following = visit(page_browser, running, follow=True)
        name = ask(running, "Whales?")
        known = record(running, name)["choices"][0]
        assert known["reasoning"] and known["text"]
        spoken = [token for token in known["tokens"] if token["token_id"] not in served.marks]
        for arrives in (lambda: following, lambda: visit(page_browser, running, f"#answer={name}")):
            page = arrives()  # the first follows new answers
            page.until(f"{ANSWER} === {name!r}")
            page.until(ENDED)
            assert_shows(page, running, name)
            labels = "[...document.querySelectorAll('#answer .label')].map((n) => n.textContent)"
            assert page(labels) == ["Reasoning", "Reply"]
            assert page(parts) == [
                [token["position"] for token in spoken if token.get("part") == part and token["start"] < len(text)]
                for part, text in (("reasoning", known["reasoning"]), (None, known["text"]))
            ]
            colours = page(
                "['.tok.thought:not(.own)', '.tok:not(.thought)'].map((one) =>"
                " getComputedStyle(document.querySelector('#answer ' + one)).color)"
            )
            assert colours[0] != colours[1]
        saved = page("import('/page/state.js').then(({ recordOf }) => recordOf(document.getElementById('answer').run))")
        assert saved["choices"][0]["reasoning"] == known["reasoning"]
    finally:
        page_browser.close_pages()
        running.close()


def test_page_does_not_depend_on_the_clients_top_k(page_browser, page_server):
    """A client that asks for one concept a token, or for none, is looked at as one that asks for all."""
    said = {}
    for top_k in (40, 1, 0):
        page = visit(page_browser, page_server, f"#answer={ask(page_server, 'whales', top_k=top_k)}")
        page.until(ENDED)
        said[top_k] = page("document.getElementById('now-rows').innerText + document.getElementById('lanes').innerText")
    assert "strongest" in said[40] and said[1] == said[40]
    numbers = {top_k: re.findall(r", \d+\.\d|\d+ tokens", text) for top_k, text in said.items()}
    assert numbers[0] == numbers[40] != []


def test_unrequested_concepts_are_not_shown_as_silent(page_browser, page_server):
    fired = {
        c for token in record(page_server, ask(page_server, "whales"))["choices"][0]["tokens"] for c in token["fired"]
    }
    silent = f"c{next(c for c in range(39, 19, -1) if c not in fired)}"  # nothing is below it
    quiet = ask(page_server, "whales", concepts=[silent])
    page = visit(page_browser, page_server, f"#answer={quiet}")
    page.until(ENDED)
    told = f"the client asked only for {silent}"
    nothing = f"No requested concept fired ({told})."
    assert nothing in page("document.getElementById('now-rows').innerText")
    assert page("document.getElementById('answer-coverage').innerText").endswith(told)
    assert "that did not fire (only requested ones are reported)" in page("document.getElementById('tree').innerText")
    page.point("document.querySelector('#answer .tok')")
    page.until("document.getElementById('now-rows').innerText.includes('No requested concept fires at this token')")


def test_missing_tokens_are_reported_and_a_forgotten_request_is_shown_as_over(page_browser, page_server):
    """A hole between tokens, or an end that counts more of them; every answer of the server has neither."""
    names = [
        ask(page_server, "whales"),
        ask(page_server, "whales", max_tokens=1),
        ask(page_server, "a held", hold=True),
    ]
    text = record(page_server, names[0])["choices"][0]["text"]
    for stop in (text[4:7], text[7:12]):  # a text that is cut within a token, or behind some
        messages = [{"role": "user", "content": "whales"}]
        body = {"model": "tiny", "temperature": 0, "max_tokens": 20, "messages": messages, "stop": [stop]}
        for hold in (False, True):
            answer = page_server.ask("POST", "/v1/chat/completions", body | {"probemon": {"hold": hold}})
            names.append(json.loads(answer.content)["id"])
    page = visit(page_browser, page_server)
    missing = "import('/page/state.js').then(({{ nMissing }}) => nMissing({}))"
    for name in names:
        for choice in record(page_server, name)["choices"]:
            assert choice["summary"]["coverage"]["tokens"] > 0 and page(missing.format(json.dumps(choice))) == 0
    choice = record(page_server, names[0])["choices"][0]
    holed = choice | {"tokens": choice["tokens"][:4] + choice["tokens"][7:], "events": []}
    cut = choice | {"tokens": choice["tokens"][:-2]}
    open_ended = holed | {"summary": None}
    assert [page(missing.format(json.dumps(one))) for one in (holed, cut, open_ended)] == [3, 2, 3]
    view = {"choice": holed, "pack": {"concepts": []}, "upto": len(holed["tokens"]) - 1, "run": {}}
    said = page(f"import('/page/coverage.js').then(({{ coverageOf }}) => coverageOf({json.dumps(view)}))")
    assert said.startswith("3 tokens did not reach this page: nothing is known about them here · ")
    over = page(
        """import('/page/state.js').then(({ apply, isRunning, mergeList, newState }) => {
          const state = newState();
          for (const request of ["old", "new", "listed"]) apply(state, "begin", { request, created: 1, kind: "chat" });
          mergeList(state, [{ request: "listed", created: 1, kind: "chat", running: true }], ["old", "listed"]);
          return ["old", "new", "listed"].map((id) => isRunning(state.runs.get(id)));
        })"""
    )
    assert over == [False, True, True]


def test_answer_without_scored_tokens_is_not_shown_as_quiet(page_browser, page_server):
    name = ask(page_server, "whales", max_tokens=1)  # the last token is never run by the host
    page = visit(page_browser, page_server, f"#answer={name}")
    page.until(ENDED)
    assert "No token of the answer was checked" in page("document.getElementById('now-rows').innerText")


def test_each_choice_of_a_request_shows_its_own_ending(page_browser, page_server):
    page = visit(page_browser, page_server)
    ended = page(
        """import('/page/runs.js').then(({ endingOf }) => {
          const run = (error, ...finishes) => ({ error, choices: finishes.map((finish) => ({ finish })) });
          return [endingOf(run(null, "length", null), 1), endingOf(run(null, "length", "cancelled"), 2),
            endingOf(run("Boom", "stop", null), 0), endingOf(run("Boom", "stop", null), 1)];
        })"""
    )
    assert ended == ["", "cancelled", "complete", "failed: Boom"]


def test_concept_without_threshold_has_a_score_and_no_strength(page_browser, page_server):
    page = visit(page_browser, page_server)
    told = page(
        """Promise.all([import('/page/digest.js'), import('/page/said.js')]).then(([{ digest, nearest }]) => {
          const token = { position: 3, top: [[0, 0.8, null], [1, 0.4, null]], fired: [], strengths: [], unseen: null };
          const pack = { concepts: [{ threshold: null }, { threshold: 0.5 }], path: (c) => [c] };
          const found = digest({ tokens: [token], version: 0 }, pack);
          return [found.near[0].map(({ strength }) => strength), nearest(found, 9).map(({ c }) => c)];
        })"""
    )
    assert told[0][0] is None and told[0][1] < 0 and told[1] == [1]


def test_dropped_shed_and_excluded_counts_are_shown_up_to_the_token(page_browser, page_server):
    """Whether the answer has ended or not: each token has its counts."""
    counts = [(7, 3, 2, 0), (9, 0, 2, 11), (5, 4, 2, 0)]
    names = ("n_active", "n_dropped", "n_excluded", "n_shed")
    tokens = [dict(zip(names, of_token, strict=True)) | {"unseen": None} for of_token in counts]
    page = visit(page_browser, page_server)
    concepts = [{"threshold": 0.5}] * 40
    view = {"choice": {"tokens": tokens}, "pack": {"concepts": concepts}, "run": {}}
    scored = "7 of 40 concepts scored per token, narrow ones only as needed"
    for upto, expected in (
        (0, f"1 of 1 token checked · {scored} · 3 scores missing: late, or over a limit"),
        (2, f"3 of 3 tokens checked · {scored} · 7 scores missing: late, or over a limit"),
    ):
        told = json.dumps(view | {"upto": upto})
        said = page(f"import('/page/coverage.js').then(({{ coverageOf }}) => coverageOf({told}))")
        shed = " · concepts left out at 1 token to save time" if upto else ""
        assert said == f"{expected}{shed} · 2 left out per token by the server's settings"


def test_link_to_token_and_concept_shows_only_these(page_browser, page_server):
    name = ask(page_server, "a link")
    known = record(page_server, name)["choices"][0]
    concepts = page_server.get("/v1/probemon/pack")["concepts"]
    at = next(i for i, token in enumerate(known["tokens"]) if token["fired"])
    c = known["tokens"][at]["fired"][0]
    page = visit(
        page_browser, page_server, f"#answer={name}&token={known['tokens'][at]['position']}&concept={concepts[c]['id']}"
    )
    page.until("document.querySelector('#answer .pinned') !== null")
    assert page("document.querySelector('#answer .pinned').at[0]") == at
    for indices, kinds, _ in shown(page):
        coloured = any(re.fullmatch(r"h\d", kind) for kind in kinds)
        assert coloured == any(c in known["tokens"][i]["fired"] for i in indices)
    for place, words in (
        (f"#answer={name}&choice=9", "leads to answer 10 of a request that has 1 answer."),
        (f"#answer={name}&token=9999", "leads to token 9999, which is not in this answer."),
        (f"#answer={name}&concept=no%20such", "leads to the concept no such, which is not in the pack"),
        ("#answer=gone", "is not kept"),
    ):
        page.go(place)
        page.until("!document.getElementById('gone').hidden")
        page.until(f"document.getElementById('gone').textContent.includes({json.dumps(words)})")
        there = "token" in place or "concept" in place
        assert page("document.getElementById('answer-panel').hidden") != there
    page.go(f"#answer={name}")
    page.until("document.getElementById('gone').hidden && !document.getElementById('answer-panel').hidden")
    assert len(page_browser.complaints) == 1 and "404" in page_browser.complaints[0]  # the browser's own words
    page_browser.complaints.clear()


# -- keys, replay, files ---------------------------------------------------------------------------


def test_tokens_lanes_and_tree_are_navigated_by_keyboard_and_pointer(page_browser, page_server):
    name = ask(page_server, "keys")
    known = record(page_server, name)["choices"][0]
    page = visit(page_browser, page_server, f"#answer={name}")
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
    assert page("document.getElementById('lanes-slider').getAttribute('aria-valuenow')") == "2"
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        left, top, width = page(  # asked each time: what is told of the token under the pointer may move the lanes
            "(({ left, top, width, height }) => [left, top + height / 2, width])"
            "(document.getElementById('lanes-slider').getBoundingClientRect())"
        )
        x = left + width * 5.5 / max(48, len(known["tokens"]))  # the middle of the column of the sixth token
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=top, button="left", clickCount=1)
    page.until(f"location.hash.endsWith('&token={known['tokens'][5]['position']}')")
    page("document.querySelector('#tree [aria-expanded=true]').focus()")
    rows = page("document.querySelectorAll('#tree .node').length")
    page.press("ArrowLeft")
    assert page("document.querySelectorAll('#tree .node').length") < rows
    page.press("ArrowRight")
    page.press("ArrowDown")
    page.press("Enter")
    assert "&concept=c" in page("location.hash") and page("document.activeElement.row.depth") >= 1


def test_keyboard_focus_survives_redrawn_lists(page_browser, page_server):
    names = [ask(page_server, text) for text in ("one", "two")]
    page = visit(page_browser, page_server, f"#answer={names[0]}")
    link = f"document.querySelector('#runs a[href=\"#answer={names[1]}\"]')"
    page.until(f"{ENDED} && {link} !== null")  # the list may come after the record of the answer that is shown
    page(f"{link}.focus()")
    page.press("Enter")
    page.until(
        f"location.hash === '#answer={names[1]}' && document.activeElement.getAttribute('aria-current') === 'true'"
    )
    ask(page_server, "three")
    page.until("document.getElementById('runs').textContent.includes('three')")
    assert page("document.activeElement.getAttribute('href')") == f"#answer={names[1]}"
    page.until(ENDED)  # else rows of what is there so far are drawn anew, and the one in focus may go
    page("document.querySelector('#now-rows .since').focus()")
    page.press("Enter")
    page.until("location.hash.includes('&token=') && document.activeElement.className === 'since'")


def test_run_can_be_saved_reopened_and_replayed_to_any_token(page_browser, page_server, tmp_path):
    name = ask(page_server, "saved")
    page = visit(page_browser, page_server, f"#answer={name}")
    page.until(ENDED)
    page_browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("document.getElementById('replay-save')")
    end = time.monotonic() + 20
    while not (files := list(tmp_path.glob("*.json"))) and time.monotonic() < end:
        time.sleep(0.05)
    saved = json.loads(files[0].read_text())
    known = record(page_server, name)
    assert saved["run"]["choices"][0]["tokens"] == known["choices"][0]["tokens"] and saved["run"]["request"] == name
    open_file(page, files[0])
    page.until(f"location.hash === '#answer=saved%3A{name}'")
    assert_shows(page, page_server, name)
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


# -- rules ------------------------------------------------------------------------------------------


def test_form_rule_stops_the_answer_and_lists_its_event(page_browser, page_server):
    name = ask(page_server, "a rule")
    tokens = record(page_server, name)["choices"][0]["tokens"]
    concepts = page_server.get("/v1/probemon/pack")["concepts"]
    first = {c: i for i, token in reversed(list(enumerate(tokens))) for c in token["fired"]}
    c, at = next((c, i) for c, i in first.items() if i >= 2)
    page = visit(page_browser, page_server)
    page("document.querySelector('#rules-panel summary').click(); document.getElementById('rule-concept').focus()")
    page.type(concepts[c]["id"])
    page("document.getElementById('max-tokens').value = '20'")
    page("document.getElementById('rule-action').value = 'stop'; document.getElementById('rule-form').requestSubmit()")
    page("document.getElementById('ask').focus()")
    page.type("a rule")
    page.press("Enter")
    page.until(ENDED)
    known = record(page_server, page(ANSWER))["choices"][0]
    assert known["finish_reason"] == "content_filter" and known["events"][0]["position"] == tokens[at]["position"]
    stopped = page("document.querySelector('.halt').parentElement.querySelector('.tok').at")
    assert at in stopped and page("document.querySelectorAll('.halt').length") == 1
    assert page("document.querySelectorAll('#events button').length") == 1
    page.click("document.querySelector('#events button')")
    assert page("location.hash").endswith(f"&token={tokens[at]['position']}")
    leads = "[...document.querySelectorAll('#now-rows .concept bdi')].map((n) => n.textContent)"
    page("document.getElementById('unpin').click()")
    page.until("document.getElementById('now-what').textContent === 'in the whole answer'")
    # One story: over the token, in the panel, in the lanes and among the rules stands the rule's own concept.
    name = harmless(concepts[c]["name"])
    assert page("document.querySelector('.tok.stops').dataset.mark") == f"■ {name_over(concepts[c])}"
    assert page(leads)[0] == name[:80] and "■ rule stopped" in page("document.getElementById('now-rows').textContent")
    assert name[:80] in page("[...document.querySelectorAll('#lanes .concept bdi')].map((n) => n.textContent)")
    assert page("document.getElementById('rules-asked').textContent").startswith(
        "It was asked with this rule: Stop when"
    )
    page.click("document.querySelector('#rules button')")
    assert page("localStorage.getItem('probemon-rules')") == "[]"


def test_blind_event_is_shown_as_unknown_wherever_it_is_listed(page_browser, page_server, tmp_path):
    run = record(page_server, ask(page_server, "saved"))
    choice, why = run["choices"][0], "hidden state is not finite"
    met = {"choice": 0, "concept": "c2", "name": "concept 2", "position": choice["tokens"][3]["position"]}
    met |= {"score": 0.5, "threshold": 0.25, "action": "stop", "for_tokens": 2, "aggregate": None}
    blind = {**met, "name": "concept 4", "concept": "c4", "score": 0.0, "blind": why}
    told = {**blind, "name": "concept 6", "concept": "c6", "action": "record"}
    choice["events"], choice["summary"]["stopped_by"] = [blind, told, met], blind
    saved = {"format": "probemon-run-2", "pack": page_server.get("/v1/probemon/pack"), "run": run}
    (tmp_path / "run.json").write_text(json.dumps(saved))
    page = visit(page_browser, page_server)
    open_file(page, tmp_path / "run.json")
    page.until("document.querySelector('.halt') !== null")
    ending = f"stopped: concept 4 could not be evaluated: {why}"
    assert page("document.querySelector('.halt').textContent") == ending
    assert ending in page("document.getElementById('answer-state').textContent")
    blindly = "could not be evaluated"
    said = [f"concept 4 {blindly}, which stopped the answer: {why}", f"concept 6 {blindly}: {why}"]
    flag = page("document.querySelector('#lanes .flag').title")
    assert flag == f"token 4: {', '.join(said)}, concept 2 stopped the answer"
    listed = page("[...document.querySelectorAll('#events li > span:nth-child(2)')].map((n) => n.textContent)")
    assert listed == [*said, "concept 2 stopped the answer: score 0.500, over 0.250 for 2 tokens"]


def test_saved_rules_are_restored_and_invalid_ones_dropped(page_browser, page_server):
    page = visit(page_browser, page_server)
    kept = [{"concept": "c1"}, {"concept": "c2", "above": 0.5, "for_tokens": 2, "action": "stop"}]
    kept += [None, {"concept": "c3", "above": "x"}, {"concept": "c4", "action": "shout"}, {"above": 0.5}]
    page(f"localStorage.setItem('probemon-rules', {json.dumps(json.dumps(kept))})")
    page("document.documentElement.dataset.ready = 'no more'")
    page.call("Page.reload")
    page.until(READY)
    page.until("document.getElementById('pack').textContent !== '' && document.querySelector('#rules bdi') !== null")
    page("localStorage.clear()")
    told = page("[...document.querySelectorAll('#rules bdi')].map((n) => n.textContent)")
    concepts = page_server.get("/v1/probemon/pack")["concepts"]
    named = lambda c: concepts[c]["name"]  # noqa: E731
    assert told == [f"Record when {named(1)} is over its threshold", "Stop when concept 2 is over 0.5 for 2 tokens"]


def test_server_refusal_is_shown_and_the_question_is_kept(page_browser, page_server):
    page = visit(page_browser, page_server)
    page(
        "const rule = { concept: 'no such', above: null, for_tokens: 1, aggregate: null, action: 'record' };"
        " localStorage.setItem('probemon-rules', JSON.stringify([rule]))"
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
    assert len(page_browser.complaints) == 1 and "400" in page_browser.complaints[0]
    page_browser.complaints.clear()
