"""A result in a notebook shows its tokens in the colours of their concepts; no token can inject HTML."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import browser as chromium
from conftest import PAD, make_pack
from probemon import DynamicProbeManager, Result
from probemon.errors import ConfigError, MissingExtra
from probemon.monitor.notebook import LiveText, show
from probemon.monitor.result import without_thresholds
from probemon.monitor.summary import summarise
from probemon.tracking.recording import RecordedTokens
from probemon.util.harmless_text import harmless
from probemon.util.static_html import fragment
from static_page import HOSTILE, read

WORDS = ["the", " cat", " sat", ".", "\n", " It", " was", " warm", "!", ' "', "Yes", ".", '"', " And", " so", " on"]
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8]])


class Tokenizer:
    """Token i is a word of a list, the 61 of them by turns; token 6 adds no text and has a name."""

    def __init__(self, words=WORDS):
        self.words = words

    def decode(self, ids, skip_special_tokens=False, **options):
        own = "" if skip_special_tokens else "<special>"
        return "".join(own if i == 6 else self.words[int(i) % len(self.words)] for i in ids)

    def __call__(self, text, **options):
        return {"input_ids": [1, 5, 9]}


@pytest.fixture(scope="module")
def manager(model, tmp_path_factory):
    pack = make_pack(tmp_path_factory.mktemp("s") / "p", model, alert_threshold=torch.full((40,), 0.25))
    return DynamicProbeManager(pack, strategy="descent")


def generated(manager, model, words=WORDS, batch=BATCH, n=12):
    with manager.attach(model, Tokenizer(words)) as run:
        out = model.generate(
            batch, attention_mask=(batch != PAD).long(), max_new_tokens=n, do_sample=False, eos_token_id=None
        )
    return run.result(out)


def longer(result, times, tokenizer):
    """The same tokens again and again, in one row: positions go on."""
    at = np.tile(np.flatnonzero(result.row == 0), times)
    zeros, phase = np.zeros(len(at), np.int64), np.sort(result.phase[at])
    tokens = RecordedTokens(zeros, np.arange(len(at)), result.token_id[at], phase, result.scores.take(at))
    return Result(result.pack, tokenizer, tokens)


def test_every_token_is_shown_with_its_own_concepts(manager, model):
    result = generated(manager, model)
    shown, hues = read(result._repr_html_()).tokens(), {}
    assert len(shown) == len(result) == 3 + 5 + 2 * 12
    coloured = 0
    for i, (kinds, title, text) in enumerate(shown):
        own = result.token_id[i] == 6
        assert text == ("<special>" if own else WORDS[result.token_id[i] % len(WORDS)]) and own == ("own" in kinds)
        leading, unseen = result.leading(i, 3), result.coverage.unseen[i]
        assert ("unseen" in kinds) == bool(unseen)
        if unseen:
            assert title == f"unseen: {unseen}"
            continue
        lines = title.split("\n") if title else []
        for concept, line in zip(leading, lines, strict=True):
            assert line == f"{' > '.join(concept.path)}: score {concept.score:.2f}, strength {concept.strength:+.1f}"
        colours = [kind for kind in kinds if kind not in ("own", "unseen")]
        assert len(colours) == bool(leading)
        if leading:
            coloured += 1
            depth = 0 if leading[0].strength < 0.5 else 1 if leading[0].strength < 2 else 2
            assert (
                hues.setdefault(leading[0].path[0], colours[0][:2]) == colours[0][:2] and colours[0][2:] == f"s{depth}"
            )
    assert coloured > 5 and len(set(hues.values())) == len(hues) > 1
    assert sum("unseen" in kinds for kinds, _, _ in shown) == result.coverage.n_unseen == 2


def test_coverage_and_summary_are_those_of_the_result(manager, model):
    result = generated(manager, model)
    page = read(result._repr_html_())
    cover = result.coverage
    mean = cover.active.sum() / (len(result) - 2)
    assert f"of 40 probes {mean:,.1f} active" in page.text
    assert "Unseen tokens: 2 (2: the last generated token is never run by the host)" in page.text
    assert "Row 0" in page.text and "Row 1" in page.text
    cells = [text for _, _, text in page.of("td")]
    for row in (0, 1):
        summary = summarise(result, row, k=3)
        for sentence in summary.sentences:
            assert len(summary.sentences) == 1 or " ".join(sentence.text.split()) in cells
        for concept in summary.answer.concepts[:12]:
            assert " › ".join(concept.path) in cells and f"{concept.strength:+.1f}" in cells


def test_unfamiliar_text_is_reported_above_a_share(manager, model):
    result = generated(manager, model)
    for n_far, said in ((2, False), (3, True)):
        far = np.zeros(len(result), np.int64)
        far[:n_far] = 1
        scores = replace(result.scores, coverage=replace(result.coverage, far=far))
        tokens = RecordedTokens(result.row, result.position, result.token_id, result.phase, scores)
        text = read(Result(result.pack, Tokenizer(), tokens)._repr_html_()).text
        assert ("Caution: 3 of 30 tokens (10%) are unlike the text" in text) == said == ("Caution" in text)


def test_excluded_and_shed_probes_are_reported(manager, model):
    result = generated(manager, model)
    assert "excluded" not in read(result._repr_html_()).text and "budget" not in read(result._repr_html_()).text
    excluded, shed = np.full(len(result), 6), np.zeros(len(result), np.int64)
    excluded[~result.coverage.seen], shed[3:5] = 0, 11
    scores = replace(result.scores, coverage=replace(result.coverage, excluded=excluded, shed=shed))
    tokens = RecordedTokens(result.row, result.position, result.token_id, result.phase, scores)
    text = read(Result(result.pack, Tokenizer(), tokens)._repr_html_()).text
    assert ", 6.0 excluded a token (nothing is known about them); at 2 tokens the latency budget left out" in text


def test_precision_is_shown_if_the_pack_states_it(model, tmp_path):
    concepts = [{"id": "a", "name": "a", "parents": [], "precision": {"mine": 0.875}}]
    g = torch.Generator().manual_seed(3)
    pack = make_pack(
        tmp_path / "p", model, n=1, concepts=concepts, alert_set="mine", alert_threshold=torch.full((1,), 0.01),
        weights={"w1": torch.randn(1, 1, 16, generator=g) / 4, "b1": torch.zeros(1, 1)}, golden_hidden=None,
    )  # fmt: skip
    page = read(generated(DynamicProbeManager(pack), model)._repr_html_())
    titles = [title for _, title, _ in page.tokens() if title.startswith("a: ")]
    assert titles and all(title.endswith("88% right") for title in titles)
    assert "88%" in [text for _, _, text in page.of("td")]


def test_concepts_that_cannot_fire_are_ranked_and_not_coloured(model, tmp_path):
    pack = make_pack(tmp_path / "p", model, alert_threshold=torch.full((40,), float("nan")))
    result = generated(DynamicProbeManager(pack, load_threshold=0.2), model)
    assert without_thresholds(pack).all()
    page = read(result._repr_html_())
    assert all(set(kinds) <= {"own", "unseen"} for kinds, _, _ in page.tokens())
    best = result.scores.top(0, 1)[0]
    assert page.tokens()[0][1].startswith(f"ranked, not firing: {' > '.join(pack.path(best[0]))}: score {best[1]:.2f}")
    assert "ranked, not firing" in page.text and "No concept fired" not in page.text


def test_concepts_that_never_fire_are_listed(model, tmp_path):
    threshold = torch.full((40,), 0.25)
    threshold[[3, 9]], threshold[11] = 1.0, float("nan")
    pack = make_pack(tmp_path / "p", model, alert_threshold=threshold)
    result = generated(DynamicProbeManager(pack, strategy="descent"), model)
    text = read(result._repr_html_()).text
    assert "2 concepts never fire (alert threshold 1): 'concept 3', 'concept 9'." in text
    assert "1 concept has no alert threshold and cannot fire." in text


def test_firing_tokens_are_mentioned_if_no_sentence_lists_them(model, tmp_path):
    pack = make_pack(tmp_path / "p", model, alert_threshold=torch.full((40,), 0.2), aggregated={"max": torch.ones(40)})
    result = generated(DynamicProbeManager(pack), model)
    n_firing = sum(len(result.scores.fired(token)) > 0 for token in result.tokens_of(0, "generated"))
    assert n_firing > 1  # else the next line would say nothing
    text = read(result._repr_html_()).text
    assert f"Concepts fired at {n_firing} tokens of the answer, but none exceeds its" in text
    assert "No concept fired" not in text


def test_hostile_token_is_shown_as_text(manager, model, tmp_path):
    result = generated(manager, model, HOSTILE)
    html = result._repr_html_()
    shown = read(html).tokens()
    assert len(shown) == len(result)
    for i, (_, _, text) in enumerate(shown):
        if result.token_id[i] == 6:
            continue
        hostile = HOSTILE[result.token_id[i] % len(HOSTILE)]
        if len(hostile) <= 200:
            assert text == harmless(hostile, keep="\n\t")
        else:
            assert text == f"{hostile[:200]}… ({len(hostile):,} characters)"


@pytest.mark.skipif(chromium.find() is None, reason="no Chromium here")
def test_html_runs_nothing_and_requests_nothing_in_a_browser(manager, model, tmp_path):
    result = generated(manager, model, HOSTILE)
    (tmp_path / "page.html").write_text(f"<!doctype html><meta charset=utf-8><body>{result._repr_html_()}", "utf-8")
    with chromium.Browser(tmp_path) as opened:
        page = opened.open(tmp_path / "page.html", dark=True)
        assert page("document.querySelectorAll('script, img, svg, link, iframe, [onmouseover], [onerror]').length") == 0
        assert page("document.body.children.length") == 1  # nothing closed the block early
        assert page("document.querySelectorAll('.text span').length") == len(result)
        assert opened.requests == [(tmp_path / "page.html").as_uri()] and opened.complaints == []


@pytest.mark.parametrize("times", [1, 29, 4000])
def test_long_result_shows_the_answer_and_counts_omitted_tokens(manager, model, times):
    short = generated(manager, model)
    result = longer(short, times, Tokenizer())
    page = read(result._repr_html_())
    first, last = (
        sum(int(text.split()[2].replace(",", "")) for _, _, text in page.of("p") if text.startswith(f"The {end} "))
        for end in ("first", "last")
    )
    assert first + len(page.tokens()) + last == len(result)
    assert (first + last == 0) == (times < 1000)
    begin = int(np.argmax(result.phase == 1)) - first  # of the answer, among those shown
    words = [
        "<special>" if i == 6 else WORDS[i % len(WORDS)] for i in result.token_id[begin + first : begin + first + 5]
    ]
    assert [text for _, _, text in page.tokens()[begin : begin + 5]] == words


def test_many_sequences_show_only_the_first(manager, model):
    result = generated(manager, model, batch=BATCH[1:].repeat(11, 1), n=3)
    page = read(result._repr_html_())
    assert [text for _, _, text in page.of("b") if text.startswith("Row")] == [f"Row {row}" for row in range(8)]
    assert "3 more rows are left out" in page.text and len(page.tokens()) == 8 * 8


# -- while the model generates -------------------------------------------------------------------


def test_live_view_shows_the_tokens_of_the_stream(manager, model):
    view, events = LiveText(), []
    for event in manager.stream(model, Tokenizer(), "x", max_new_tokens=9, do_sample=False, eos_token_id=None):
        view.add(event)
        events.append(event)
        shown = read(view.html()).tokens()
        assert [text for _, _, text in shown] == [event.token for event in events]
        assert ["unseen" in kinds for kinds, _, _ in shown] == [bool(event.unseen) for event in events]
    assert f"{len(events)} tokens, 1 unseen" in read(view.html()).text and repr(view) == "LiveText(9 tokens, 1 unseen)"
    for _ in range(1000):
        view.add(events[0])
    page = read(view.html())
    assert len(page.tokens()) == 400 and "of which the first 609 are no longer shown" in page.text


def test_show_outside_a_notebook_raises_and_closes_the_stream(manager, model, monkeypatch):
    def stream():
        return manager.stream(model, Tokenizer(), "x", max_new_tokens=9, do_sample=False, eos_token_id=None)

    events = stream()
    with pytest.raises(ConfigError, match="show is for notebooks: elsewhere read the stream in a loop"):
        show(events)
    assert next(events, None) is None  # closed
    monkeypatch.setitem(sys.modules, "IPython", None)
    events = stream()
    with pytest.raises(MissingExtra, match="show needs IPython"):
        show(events)
    assert next(events, None) is None  # closed
    with pytest.raises(ConfigError, match="every_seconds is -1"):
        show(stream(), every_seconds=-1)


def test_empty_fragment_is_valid_html():
    assert read(fragment("t", [])).text == "t"
