"""Every reader of chats gives the same token ids for the same chat, or refuses it by name.

A cell of the table is right or refused by name. Right is judged by an oracle that shares no code with the reader: the
chat is written in every way that OpenAI's form may be given to a template, by the tokenizer itself, and the ids have to
be those of one of these texts, the same way for all readers, with what was said in it once and unescaped.
"""

import copy
import itertools
import json
from datetime import datetime
from pathlib import Path

import pytest
import trl
from tokenizers import processors
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from probemon import DynamicProbeManager
from probemon.adapters.bem.lessons import make_lesson
from probemon.bundled import bundled_path
from probemon.cli.common import chat_messages
from probemon.errors import ChatRefused, ConfigError, RequestRefused, TrainingError
from probemon.host.chat_dates import CHAT_DATE
from probemon.lab.corpora.corpus import CorpusScorer
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.windows import Reading, shards
from probemon.lab.training.examples import read_examples
from probemon.lab.training.generated import _prompts as prompts_about
from probemon.lab.training.state_store import TextReader
from probemon.lab.training.texts import render as render_examples
from probemon.monitor.stream import encode
from probemon.ops.server.limits import Limits
from probemon.ops.server.requests import read_request

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(Path(trl.__file__).with_name("chat_templates").glob("*.jinja"))
    if not path.stem.endswith("_training")
}
TODAY, STATED = datetime(2031, 7, 9), datetime(2025, 1, 1)


def user(content):
    return {"role": "user", "content": content}


def assistant(content, *calls):
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def call(number, name, arguments):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answered(number, content):
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": content}


SUM = '{"a": 2, "note": "say \\"three\\" \\\\ twice"}'
CHATS = {
    "plain": [user("What lives in the sea?"), assistant("Whales do.")],
    "system": [
        {"role": "system", "content": "Be brief, please."},
        user("What lives in the sea?"),
        assistant("Whales do."),
    ],
    "developer": [
        {"role": "developer", "content": "Be brief, please."},
        user("What lives in the sea?"),
        assistant("Whales do."),
    ],
    "turns": [user("What lives in the sea?"), assistant("Whales do."), user("And on land?"), assistant("Cats do.")],
    "spaces": [
        user("  What lives in the sea?\n"),
        assistant("Whales do. \n\n"),
        user("And on land? "),
        assistant("\n Cats do.\n"),
    ],
    "null": [user("Add these up."), assistant(None, call(1, "add", SUM)), answered(1, "five"), assistant("It is 5.")],
    "empty": [user("Add these up."), assistant("", call(1, "add", SUM)), answered(1, "five"), assistant("It is 5.")],
    "two": [
        user("Add these up, then ask the clock."),
        assistant(None, call(1, "add", SUM), call(2, "clock", "")),
        answered(1, "five"),
        answered(2, "twelve"),
        assistant("It is 5, at noon."),
    ],
    "unicode": [user('Walé 🐋 "x" <b> {y} \u200b&amp; \\n'), assistant("鯨\u3000です"), user("   "), assistant("是的")],
}
READERS = ("server", "watch", "stream", "training", "calibration", "corpora")
FILES = ("training", "calibration", "corpora")  # whose texts must be the same on every day
TOOLS = ("null", "empty", "two")
# What templates cannot say, by the reason that every reader gives. A refusal that is not listed fails, and so does a
# listed cell that is read.
REFUSED = {
    r"the chat template leaves out tool_calls of messages\[1\]": dict.fromkeys(
        ("deepseek_r1_distill", "idefics3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"), TOOLS
    ),
    r"messages\[2\], with the role 'tool': Conversation roles must alternate": dict.fromkeys(
        ("cohere", "gemma", "gemma3"), TOOLS
    ),
    # It leaves the call out, and then takes no answer to it; a last message that is continued has its own order.
    r"leaves out tool_calls of messages\[1\]|messages\[[234]\].*: Conversation roles must alternate": {
        "cohere2": TOOLS
    },
    r"messages\[2\], with the role 'tool': Only user and assistant roles are supported": {"llava_next": TOOLS},
    r"messages\[0\], with the role '(system|developer)': System role not supported": {"gemma": ("system", "developer")},
    r"messages\[1\].*: This model only supports single tool-calls": {"llama3_1": ("two",), "llama3_2": ("two",)},
    r"messages\[1\]\.tool_calls\[1\]\.function\.arguments left out": {"gptoss": ("two",)},
}
REASONS = {
    (template, chat): reason for reason, of in REFUSED.items() for template, chats in of.items() for chat in chats
}


@pytest.fixture(scope="module")
def tokenizer():
    """The demo's, with a beginning of its own that it puts before every text."""
    made = AutoTokenizer.from_pretrained(bundled_path())
    made.add_special_tokens({"bos_token": "<bos>"})
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", made.bos_token_id)]
    )
    return made


class Doors:
    """Every reader's own door, up to its ids: `read[reader](chat)` gives the chat that it read and the ids."""

    def __init__(self, served, model, pack, tokenizer, folder):
        self.tokenizer, self._folder = tokenizer, folder
        self._served = copy.copy(served)
        self._served.tokenizer, self._served.n_columns = tokenizer, None
        self._states = TextReader(model, tokenizer, ["resid_post.1"])
        self._scorer = CorpusScorer(DynamicProbeManager(pack), model, tokenizer, Reading())
        self.read = {name: getattr(self, f"_{name}") for name in READERS}

    def _server(self, chat):
        body = json.dumps({"model": self._served.name, "messages": chat[:-1]}).encode()
        return chat[:-1], self._served.prepare(read_request("chat", body, Limits())).prompts[0]

    def _stream(self, chat):
        return chat[:-1], encode(self.tokenizer, chat[:-1])["input_ids"][0].tolist()

    def _watch(self, chat):
        """What it can be told: --prompt, and --system before it."""
        first = next(at for at, message in enumerate(chat) if message["role"] == "user")
        system = chat[0]["content"] if chat[0]["role"] == "system" else None
        messages = chat_messages(self.tokenizer, chat[first]["content"], system)
        return chat[first - (system is not None) : first + 1], encode(self.tokenizer, messages)["input_ids"][0].tolist()

    def _training(self, chat):
        examples = read_examples([{"messages": chat, "labels": ["x"]}])
        [text] = render_examples(examples.texts, self.tokenizer, roles=("assistant",))
        [tokens] = self._states.tokens([text])
        said = [turn["content"].strip() for turn in chat if turn["role"] == "assistant" and turn["content"]]
        assert [text.text[a:b].strip() for a, b in text.counted] == said
        assert sum(text.counts(tokens)) >= len(said) and not tokens.prefix
        return chat, tokens.ids.tolist()

    def _calibration(self, chat):
        file = self._folder / "chats.jsonl"
        file.write_text(json.dumps({"messages": chat, "id": "a"}) + "\n")
        return self._documents(chat, str(file))

    def _corpora(self, chat):
        return self._documents(chat, [{"messages": chat}])

    def _documents(self, chat, source):
        [shard] = shards(read_documents(source))
        planned = self._scorer.reader.plan(shard)
        [document], [tokens] = planned.documents, planned.tokens
        if document.reason:
            raise ChatRefused(document.reason)
        assert not tokens.prefix and document.text == self.tokenizer.decode(tokens.ids)
        return chat, tokens.ids.tolist()


def ways(tokenizer, chat, prompting, continued=False):
    """The texts of a chat in every way of giving it, by the way; the clock is as it is."""
    has_calls, empty, developer = (
        any(map(has, chat))
        for has in (lambda m: "tool_calls" in m, lambda m: not m["content"], lambda m: m["role"] == "developer")
    )
    both = (True, False)
    for way in itertools.product(*(both if has else (False,) for has in (has_calls, empty, developer, True))):
        as_object, as_null, as_system, parts = way
        given = copy.deepcopy(chat)
        for message in given:
            for one in message.get("tool_calls", ()):
                arguments = one["function"]["arguments"] or "{}"
                one["function"]["arguments"] = json.loads(arguments) if as_object else arguments
            if not message["content"]:
                message["content"] = None if as_null else ""
            elif parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
            if as_system and message["role"] == "developer":
                message["role"] = "system"
        try:
            text = tokenizer.apply_chat_template(
                given, tokenize=False, add_generation_prompt=prompting, continue_final_message=continued
            )
        except Exception:  # a template does not take every way
            continue
        yield way, text, tokenizer(text, add_special_tokens=False).input_ids


def set_clock(monkeypatch, now):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return now

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def arguments_stand(text, arguments):
    """Whether arguments stand in a text: as JSON, or value by value, bare or as an argument of Python."""
    values = json.loads(arguments or "{}")
    if arguments in text or json.dumps(values, ensure_ascii=False) in text:
        return True
    return all(name in text and (str(value) in text or repr(value) in text) for name, value in values.items())


def check_said(text, chat):
    for message in chat:
        if said := (message["content"] or "").strip():
            assert text.count(said) == 1, (said, text)
        for one in message.get("tool_calls", ()):
            assert arguments_stand(text, one["function"]["arguments"]), text
    assert "None" not in text and '\\"a\\"' not in text and "{'a'" not in text, text


@pytest.fixture(scope="module")
def doors(served, model, pack, tokenizer, tmp_path_factory):
    return Doors(served, model, pack, tokenizer, tmp_path_factory.mktemp("chats"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_reader_reads_a_chat_alike_or_refuses_it_by_name(template, doors, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[template])
    for name, chat in CHATS.items():
        of_all, oracle = None, {}
        for reader in READERS:
            set_clock(monkeypatch, TODAY)
            reason = REASONS.get((template, name))
            if reader == "watch" and (name in TOOLS or chat[0]["role"] == "developer"):
                reason = None  # no option says it
            if reason:
                with pytest.raises((RequestRefused, ConfigError, TrainingError, ChatRefused), match=reason):
                    doors.read[reader](chat)
                continue
            read, ids = doors.read[reader](chat)
            key = len(read), reader in FILES
            if key not in oracle:
                set_clock(monkeypatch, STATED if reader in FILES else TODAY)
                oracle[key] = list(ways(tokenizer, read, reader not in FILES))
            fitting = {way: text for way, text, own in oracle[key] if own == list(ids)}
            assert fitting, (reader, name, tokenizer.decode(ids))
            if reader != "watch":  # it reads the beginning alone, which has fewer ways
                of_all = set(fitting) if of_all is None else of_all & set(fitting)
                assert of_all, (reader, name)
            text = next(iter(fitting.values()))
            check_said(text, read)
            assert list(ids).count(tokenizer.bos_token_id) <= 1
            assert reader not in FILES or "2031" not in text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["plain", "system", "turns", "two", "unicode"])
def test_server_continues_the_last_message_of_every_template(template, name, doors, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[template])
    set_clock(monkeypatch, TODAY)
    served, chat = doors.read["server"].__self__._served, CHATS[name]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    request = read_request("chat", json.dumps({"model": served.name, "messages": chat, **more}).encode(), Limits())
    if reason := REASONS.get((template, name)):
        with pytest.raises(RequestRefused, match=reason):
            served.prepare(request)
        return
    ids = list(served.prepare(request).prompts[0])
    texts = [text for _, text, own in ways(tokenizer, chat, False, continued=True) if own == ids]
    assert texts and texts[0].endswith(chat[-1]["content"])
    check_said(texts[0], chat)


@pytest.mark.parametrize("text", ["<bos>What lives in the sea?", "What lives in the sea?"])
def test_prompt_that_contains_bos_gets_no_second_bos(doors, tokenizer, text):
    ids = tokenizer("<bos>What lives in the sea?", add_special_tokens=False).input_ids
    assert encode(tokenizer, text)["input_ids"].tolist() == [ids]
    served = doors.read["server"].__self__._served
    body = json.dumps({"model": served.name, "prompt": text}).encode()
    assert list(served.prepare(read_request("completion", body, Limits())).prompts[0]) == ids


def test_trainer_renders_chats_with_the_stated_date(tokenizer, monkeypatch):
    set_clock(monkeypatch, TODAY)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["llama3_2"])
    lesson = tokenizer.decode(make_lesson({"messages": CHATS["null"]}, "row", tokenizer).ids)
    check_said(lesson, CHATS["null"])
    [asked] = prompts_about(tokenizer, "whales", 1, CHAT_DATE)
    assert all("01 Jan 2025" in text and "2031" not in text for text in (lesson, asked))
