"""The corpus of ordinary text is what its manifest says, and is rendered whole."""

import json
from collections import Counter
from pathlib import Path

import pytest

from corpora import make_tokenizer
from probemon.bundled import load_bundled
from probemon.errors import TrainingError
from probemon.lab.training import ordinary as ordinary_module
from probemon.lab.training.dataset import _ordinary
from probemon.lab.training.examples import Example
from probemon.lab.training.ordinary import LONGEST, corpus, ordinary, render_whole, sources
from probemon.lab.training.words import words_in
from probemon.util.files import sha256


def test_corpus_is_what_its_manifest_says():
    manifest, folder = sources(), Path(ordinary_module.__file__).parent / "ordinary"
    assert manifest["texts"] >= 3_000 and manifest["words"] >= 400_000 and len(manifest["kinds"]) >= 14
    assert len({language for kind in manifest["kinds"].values() for language in kind["languages"]}) >= 5
    for name, kind in manifest["kinds"].items():
        assert sha256(folder / f"{name}.jsonl") == kind["sha256"] and len(corpus()[name]) == kind["texts"], name
        assert kind["licence"].startswith(("CC0", "public domain")), name
        assert kind["licence"].startswith("CC0") or kind["source"], name


def test_no_ordinary_text_repeats_another():
    seen = Counter(" ".join(words_in(example.content)) for own in corpus().values() for example in own)
    assert seen.most_common(1)[0][1] == 1


def test_texts_are_drawn_equally_of_all_kinds_and_carriers_are_others():
    chosen = ordinary(make_tokenizer(), texts=104, seed=3)
    assert set(Counter(kind for kind, _ in chosen.measured).values()) == {4} and not chosen.template
    assert not {"answer", "draft"} & set(chosen.kinds)  # nobody read them for these concepts
    texts = {example.text for _, example in chosen.measured}
    assert not texts & set(chosen.carriers) and len(chosen.carriers) > 2_000
    again, other = (ordinary(make_tokenizer(), texts=104, seed=seed) for seed in (3, 4))
    assert again == chosen and other != chosen


def test_a_kind_that_may_have_a_concept_neither_trains_nor_sets_its_threshold():
    chosen = ordinary(make_tokenizer(), texts=104).unknown({"promotion": ["advert", "review"]}, ["promotion", "joy"])
    for kind, example in chosen.measured:
        assert example.unsure == (("promotion",) if kind in ("advert", "review") else ())
    labelled = _ordinary(Example("here", "a text", unsure=("promotion",)), {"joy": 0, "promotion": 1})
    assert labelled.labels == {"joy": False}
    for wrong, named in (({"fun": ["advert"]}, "the concept 'fun'"), ({"joy": ["poem"]}, "the kind 'poem'")):
        with pytest.raises(TrainingError, match=named):
            ordinary(make_tokenizer(), texts=104).unknown(wrong, ["joy"])


def test_texts_that_were_read_are_drawn_with_what_stands_in_them():
    read = {f"ordinary {kind} {n}": {"joy": True, "fear": None} for kind in sources()["kinds"] for n in (1, 2)}
    chosen = ordinary(make_tokenizer(), texts=104, read=read)
    assert {example.group for _, example in chosen.measured} == set(read) and "answer" in chosen.kinds
    few = {group: told for group, told in read.items() if "novel" not in group}
    assert set(chosen.kinds) - set(ordinary(make_tokenizer(), texts=104, read=few).kinds) == {"novel"}
    labelled = _ordinary(chosen.measured[0][1], {"anger": 0, "fear": 1, "joy": 2})
    assert labelled.labels == {"anger": False, "joy": True}


@pytest.fixture(scope="module")
def tokenizer():
    return load_bundled()[1]


def test_chats_are_rendered_whole_with_the_models_own_system_prompt(tokenizer):
    chosen = ordinary(tokenizer, texts=52)
    assert len(chosen.template) == 40
    for example in chosen.template:
        text = render_whole(example, tokenizer)
        assert text.is_chat and text.counted is None and len(text.text) <= LONGEST
        assert "You are a helpful AI assistant named SmolLM" in text.text
        assert example.messages[0]["content"][:60] in text.text
    chats = [example for _, example in chosen.measured if example.messages]
    assert chats and all(render_whole(example, tokenizer).text for example in chats)


def test_tools_and_prompts_that_a_template_refuses_are_said_by_the_user():
    tokenizer = make_tokenizer()
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": json.dumps({"a": "b"})}}
    messages = (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "find it"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_call_id": "1"},
        {"role": "assistant", "content": "done"},
    )
    example = Example("here", messages=messages)
    assert render_whole(example, tokenizer).text.startswith("System: be brief\n\nUser: find it")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    text = render_whole(example, tokenizer).text
    assert text.startswith("<user>be brief\n\nfind it<assistant>") and text.endswith("<user>found<assistant>done")
    assert '"name": "find"' in text
