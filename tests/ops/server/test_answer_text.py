"""Text decoded token by token equals the text decoded at once, up to the first stop string."""

import re
from itertools import pairwise

import numpy as np
import pytest

from probemon.host.reasoning_marks import marks_of
from probemon.ops.server.answer_text import AnswerText
from probemon.util.token_texts import TokenTexts
from running_server import demo_tokenizer

TEXTS = [
    "Whales sing 🐋🐳 in the 海, naïvely.\n\nThe end.",
    "  two  spaces\tand tabs \u202e reversed \x00 nul",
    "👩‍👩‍👧‍👦 family",
]


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


@pytest.fixture(scope="module")
def decode(tokenizer):
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def sequences(tokenizer):
    """Texts, with special tokens between, and random bytes of which few are characters."""
    rng = np.random.default_rng(0)
    end = tokenizer.eos_token_id
    single = [i for i in range(len(tokenizer)) if len(tokenizer.convert_ids_to_tokens(i)) == 1]
    yield from (tokenizer(text)["input_ids"] for text in TEXTS)
    yield [end] * 6 + tokenizer("🐋")["input_ids"] + [end]
    yield tokenizer("🐋")["input_ids"][:-1]  # ends in the middle of a character
    partial = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
    for _ in range(100):
        yield [partial[i] for i in rng.integers(0, len(partial), 12)]  # bytes that are hardly ever characters
    for _ in range(20):
        yield rng.integers(0, len(tokenizer), 30).tolist()
        yield [single[i] for i in rng.integers(0, len(single), 20)]


def test_incremental_pieces_join_to_the_whole_decoded_text(tokenizer, decode):
    for ids in sequences(tokenizer):
        pieces = TokenTexts(decode)
        texts = [pieces.add(token_id) for token_id in ids]
        assert "".join(texts) + pieces.finish() == decode(ids)


def taken(text, ids):
    """What is sent after each token, and at the end."""
    parts = []
    for i, token_id in enumerate(ids):
        text.add(token_id)
        text.allow(i)  # the scores of those before it are known
        parts.append(text.take().reply)
        if text.met_stop:
            break
    text.allow(len(ids))
    text.end()
    return [*parts, text.take().reply]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("stops", [(), ("in the",), ("a", "the", "\n\n"), ("sing 🐋🐳 in the 海, n", "🐳"), ("zzz",)])
def test_sent_text_ends_before_the_first_stop_string(tokenizer, decode, stops, hold):
    for ids in sequences(tokenizer):
        text, whole = AnswerText(decode, stops, hold=hold), decode(ids)
        parts = taken(text, ids)
        ends = [whole.index(stop) for stop in stops if stop in whole]
        sent = "".join(parts)
        assert sent == text.shown.reply
        assert not any(stop in sent for stop in stops)
        if not ends:
            assert sent == whole and not text.met_stop
        else:  # which of several that overlap comes first is known only as they come
            assert (
                text.met_stop and whole.startswith(sent) and len(sent) in [whole.index(s) for s in stops if s in whole]
            )
        spans = [text.span(i) for i in range(len(parts) - 1)]
        assert "".join(text.token_text(i) for i in range(len(spans))) == sent
        assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]


def test_held_text_has_only_allowed_tokens_and_ends_at_the_cut(tokenizer, decode):
    ids = tokenizer("Whales and ships and ports")["input_ids"]
    text = AnswerText(decode, hold=True)
    for i, token_id in enumerate(ids):
        text.add(token_id)
        assert text.take().reply == ""
        text.allow(i)
        assert text.shown == (decode(ids[:i]), "")
        assert text.take().reply == decode(ids[:i])[len(decode(ids[: max(0, i - 1)])) :]
    text.cut_at_token(3)
    text.allow(len(ids))
    text.end()
    assert text.shown.reply == decode(ids[:3]) and text.take() == ("", "")


# -- reasoning -----------------------------------------------------------------------------------


def split(raw, reasons):
    """The reply and the reasoning of a whole raw text, and where marks cut the reply."""
    texts, cuts, marks = ["", ""], [0], re.split("(</?think>)", raw)
    for at in range(0, len(marks), 2):
        segment, part = marks[at], int(marks[at - 1] == "<think>" if at else reasons)
        if (at or reasons) and not texts[part]:
            segment = segment.lstrip("\n")
        if at < len(marks) - 1:
            segment = segment.rstrip("\n")
        texts[part] += segment
        cuts.append(len(texts[0]))
    return tuple(texts), cuts


def thought_sequences(tokenizer):
    """Chains of words, newlines, parts of characters and marks."""
    words = tokenizer(" whales sing naïvely\n\nso\n 🐋\n")["input_ids"]
    begin, end = (tokenizer.convert_tokens_to_ids(name) for name in ("<think>", "</think>"))
    for text in ("<think>\nA\n\nb\n</think>\n\nC 🐋\n", "\n<think>\n</think>\n\n", "\nNo thought.\n", "<think>\nCut\n"):
        yield tokenizer(text)["input_ids"]
    rng = np.random.default_rng(1)
    for _ in range(300):
        yield rng.choice([*words, begin, end, *tokenizer("\n\n\n")["input_ids"]], 14).tolist()


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("stops", [(), (" sing", "so\n")])
def test_reasoning_is_split_as_from_the_whole_text(stops, hold, reasons):
    tokenizer = demo_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    marks, n_stopped = marks_of(tokenizer), 0

    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    for ids in thought_sequences(tokenizer):
        text, sent, settled = AnswerText(decode, stops, hold=hold, marks=marks, reasons=reasons), [], {}
        for i, token_id in enumerate(ids):
            text.add(token_id)
            text.allow(i)
            sent.append(text.take())
            settled |= {at: (text.span(at), text.token_text(at)) for at in range(i) if text.is_settled(at)}
            if text.met_stop:
                break
        n = i + 1
        text.allow(n)
        text.end()
        sent.append(text.take())
        expected, cuts = split(decode(ids[:n]), reasons)
        pairs = list(pairwise(cuts))  # no stop string spans a mark
        found = [at for begin, end in pairs for stop in stops if (at := expected[0].find(stop, begin, end)) >= 0]
        assert text.met_stop == bool(found)
        if found:
            n_stopped += 1
            expected = (expected[0][: min(found)], expected[1])
        assert text.shown == expected
        assert tuple(map("".join, zip(*sent, strict=True))) == expected
        for at in range(n):
            start, end = span = text.span(at)
            assert settled.get(at, (span, text.token_text(at))) == (span, text.token_text(at))
            assert expected[text.is_reasoning(at)][start:end] == text.token_text(at)
        is_reasoning, is_open = [], reasons
        for token_id in ids[:n]:
            is_reasoning.append(is_open and token_id not in marks)
            is_open = token_id == marks.begin if token_id in marks else is_open
        assert [text.is_reasoning(at) for at in range(n)] == is_reasoning
        for part in (False, True):
            joined = "".join(text.token_text(at) for at in range(n) if is_reasoning[at] == part)
            assert joined == expected[part]
    assert bool(n_stopped) == bool(stops)
