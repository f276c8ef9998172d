"""Training rows are tokenized as the whole text is, and only answer tokens count."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from probemon.adapters.bem.lessons import make_lesson
from probemon.errors import ConfigError

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT = [
    {"role": "user", "content": "What is a probe?"},
    {"role": "assistant", "content": "A small classifier, naïve."},
    {"role": "user", "content": "And two  spaces\n\n?"},
    {"role": "assistant", "content": " A probe is small. "},
]
TEXTS = [f"{turn['role']}:{turn['content']}" for turn in CHAT] * 3


def make_tokenizer(kind, template=TEMPLATE):
    inner = Tokenizer(models.BPE(byte_fallback=kind == "metaspace", unk_token="<unk>"))
    special = SPECIAL
    if kind == "metaspace":
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
        special = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        if kind == "trimmed":
            inner.post_processor = processors.ByteLevel(trim_offsets=True)
    inner.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=special,
            initial_alphabet=[] if kind == "metaspace" else pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


KINDS = ["metaspace", "bytes", "trimmed"]


def counted(lesson):
    return [i for i, counts in zip(lesson.ids, lesson.counted, strict=True) if counts]


@pytest.mark.parametrize("kind", KINDS)
def test_chat_lesson_has_template_tokens_and_counts_only_answers(kind):
    tokenizer = make_tokenizer(kind)
    lesson = make_lesson({"messages": CHAT}, "row", tokenizer)
    assert list(lesson.ids) == tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    said = "".join(f"{CHAT[i]['content']}</s>\n" for i in (1, 3))
    assert tokenizer.decode(counted(lesson)).strip() == said.strip()
    row = {"prompt": CHAT[0]["content"], "answer": CHAT[1]["content"]}
    assert list(make_lesson(row, "row", tokenizer).ids) == tokenizer.apply_chat_template(
        CHAT[:2], tokenize=True, return_dict=False
    )


@pytest.mark.parametrize("kind", ["bytes", "trimmed"])
def test_chat_tokens_equal_concatenated_parts_for_byte_tokenizers(kind):
    tokenizer = make_tokenizer(kind)
    ids, counts = [], []
    for i, turn in enumerate(CHAT):
        parts = [(f"<|{turn['role']}|>\n", False), (f"{turn['content']}</s>\n", i % 2 == 1)]
        for text, is_answer in parts:
            own = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids, counts = ids + own, counts + [is_answer] * len(own)
    lesson = make_lesson({"messages": CHAT}, "row", tokenizer)
    assert list(lesson.ids) == ids and list(lesson.counted) == counts


@pytest.mark.parametrize("kind", KINDS)
def test_token_across_a_turn_border_counts_as_the_answers(kind):
    tokenizer = make_tokenizer(kind, PLAIN)
    tokenizer.add_tokens([":Yes"])
    lesson = make_lesson({"prompt": "Hm?", "answer": "Yes."}, "row", tokenizer)
    chat = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Yes."}]
    assert list(lesson.ids) == tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(counted(lesson))[0] == ":Yes"


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_is_tokenized_plainly_without_a_chat_template(kind):
    tokenizer = make_tokenizer(kind, None)
    asked = tokenizer("What is a probe?")["input_ids"]
    lesson = make_lesson({"prompt": "What is a probe?", "answer": "A probe."}, "row", tokenizer)
    assert list(lesson.ids) == tokenizer("What is a probe?A probe.</s>")["input_ids"]
    assert list(lesson.counted) == [i >= len(asked) for i in range(len(lesson.ids))]
    tokenizer.add_tokens(["?Yes"])
    lesson = make_lesson({"prompt": "What is a probe?", "answer": "Yes"}, "row", tokenizer)
    assert list(lesson.ids) == asked + tokenizer("Yes</s>", add_special_tokens=False)["input_ids"]


def test_tokenizer_without_offsets_counts_the_same_tokens_or_is_refused(monkeypatch):
    expected = [make_lesson({"messages": CHAT}, "row", make_tokenizer(kind)) for kind in KINDS]
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", property(lambda self: False))
    assert [make_lesson({"messages": CHAT}, "row", make_tokenizer(kind)) for kind in KINDS] == expected
    # A token of the answer and of the space behind it, which a shorter chat has not.
    with pytest.raises(ConfigError, match=r"row: which tokens are the assistant's is unknown: .* one across character"):
        make_lesson({"messages": CHAT}, "row", make_tokenizer("metaspace", PLAIN))
