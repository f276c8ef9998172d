"""Chats are rendered in one place, in the form that the template takes; what it drops is refused by name."""

import ast
from datetime import date
from pathlib import Path

import pytest
from jinja2 import Environment

import probemon
from corpora import make_tokenizer
from probemon.adapters.bem.lessons import make_lesson
from probemon.cli.common import chat_messages
from probemon.errors import ChatRefused, ConfigError
from probemon.host.chat_template import left_out, render
from probemon.monitor.stream import encode

ALL = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls or '' }}\n{% endfor %}"
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise() }}{% endif %}" + ALL
THINKS = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}"


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (ALL, chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hi"), ("tool", "Hi")), None),
        (USERS, chat(("user", "Hi")), None),
        (USERS, chat(("developer", "Hi"), ("user", "Hi")), (0, "content")),  # its word stands there by chance
        (USERS, chat(("user", "Hi"), ("system", "Hi, be as brief as you possibly can, please.")), (1, "content")),
        (USERS, chat(("user", "Hi"), ("assistant", "")), None),
        (USERS, [*chat(("user", "Hi")), {"role": "assistant", "content": "", "tool_calls": [1]}], (1, "tool_calls")),
        (ALL, [*chat(("user", "Hi")), {"role": "assistant", "content": "", "tool_calls": [1]}], None),
        (THINKS, chat(("user", "Hi"), ("assistant", "<think>So.</think>Yes.")), None),
    ],
)
def test_message_parts_that_do_not_change_the_text_are_found(template, messages, lost):
    written = Environment().from_string(template)
    assert left_out(lambda chat: written.render(messages=list(chat)), messages) == lost


def test_template_that_raises_on_a_change_counts_as_reading_it():
    written = Environment().from_string(STRICT)
    assert left_out(lambda chat: written.render(messages=list(chat)), chat(("user", "Hi"))) is None


def test_command_stream_and_training_refuse_what_the_template_drops():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ALL
    assert chat_messages(tokenizer, "Hi", "Be brief.")[0]["content"] == "Be brief."
    tokenizer.chat_template = NO_SYSTEM
    with pytest.raises(
        ConfigError, match=r"takes no --system \(the chat template leaves out .*\): put it into --prompt"
    ):
        chat_messages(tokenizer, "Hi", "Be brief.")
    messages = chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes."))
    with pytest.raises(ConfigError, match=r"leaves out content of messages\[0\], with the role 'system'"):
        encode(tokenizer, messages)
    with pytest.raises(
        ConfigError, match=r"row 3: the chat template leaves out content of messages\[0\], with the role 'system'"
    ):
        make_lesson({"messages": messages}, "row 3", tokenizer)
    assert make_lesson({"messages": messages[1:]}, "row 3", tokenizer).n_labels


def test_only_one_module_applies_chat_templates():
    package = Path(probemon.__file__).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "apply_chat_template"
    }
    assert users == {"host/chat_template.py"}


# -- the forms that templates take -----------------------------------------------------------------

BEGIN = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}[add "
BEGIN += "{% set a = c.function.arguments %}"
END = "]{% endfor %}{% endfor %}"
AS_JSON = BEGIN + "{{ a | tojson }}" + END
AS_IT_IS = BEGIN + "{{ a }}" + END  # of an object: Python's repr
JOINED = BEGIN + "{{ 'x' + a }}" + END  # of an object: an error
EITHER = BEGIN + "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}" + END
ITEMS = BEGIN + "{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}" + END
WITHOUT = BEGIN + END


def called(*arguments, content=None):
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": one}} for one in arguments]
    return [{"role": "user", "content": "Add."}, {"role": "assistant", "content": content, "tool_calls": calls}]


def rendered(template, messages, **options):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return render(tokenizer, messages, **options)


@pytest.mark.parametrize(
    ("template", "arguments", "written"),
    [
        (AS_JSON, '{"a":2,"b":"é"}', '[add {"a": 2, "b": "é"}]'),
        (AS_JSON, {"a": 2, "b": "é"}, '[add {"a": 2, "b": "é"}]'),
        (AS_JSON, "", "[add {}]"),
        (EITHER, '{"a":2}', '[add {"a": 2}]'),
        (EITHER, "null", "[add null]"),
        (EITHER, "[]", "[add []]"),
        (EITHER, '{"a":', '[add {"a":]'),
        (EITHER, '{"a": 1, "a": 2}', '[add {"a": 1, "a": 2}]'),  # one of them would be lost
        (AS_IT_IS, '{"a":2}', '[add {"a":2}]'),
        (AS_IT_IS, {"a": 2, "b": "é"}, '[add {"a": 2, "b": "é"}]'),
        (JOINED, '{"a":2}', '[add x{"a":2}]'),
        (JOINED, "", "[add x{}]"),
        (ITEMS, '{"a": 2, "b": "c"}', "[add a=2;b=c;]"),
        (ITEMS, "", "[add ]"),
    ],
)
def test_tool_call_arguments_are_written_once(template, arguments, written):
    assert written in rendered(template, called(arguments)).text
    both = called({"z": 1}, arguments)
    if isinstance(arguments, str) and template in (AS_JSON, EITHER):  # beside a call of another form
        assert '[add {"z": 1}]' + written in rendered(template, both).text


@pytest.mark.parametrize(
    ("template", "arguments", "reason"),
    [
        (AS_JSON, "null", r"messages\[1\]\.tool_calls\[0\]\.function\.arguments escaped once more"),
        (AS_JSON, '{"a":', r"messages\[1\]\.tool_calls\[0\]\.function\.arguments escaped once more"),
        (ITEMS, "[]", r"only objects, and messages\[1\]\.tool_calls\[0\]\.function\.arguments is not a JSON object"),
        (WITHOUT, '{"a":2}', r"messages\[1\]\.tool_calls\[0\]\.function\.arguments left out"),
        (USERS, '{"a":2}', r"leaves out tool_calls of messages\[1\], with the role 'assistant'"),
    ],
)
def test_arguments_that_a_template_cannot_write_are_refused_by_name(template, arguments, reason):
    with pytest.raises(ChatRefused, match=reason) as refused:
        rendered(template, called(arguments))
    assert refused.value.at == 1 and refused.value.part.startswith("tool_calls")


@pytest.mark.parametrize("content", [None, "", ...])
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}",  # "" alone
        "{% for m in messages %}{% if m.content is defined %}{{ m.content | length > 0 or 'None' }}{% endif %}"
        "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}",  # absent alone
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.tool_calls | tojson }}"
        "{% endif %}{% endfor %}",  # all but "", which leaves the calls out
    ],
)
def test_empty_content_is_given_in_the_form_the_template_takes(template, content):
    messages = called('{"a": 2}', content=content)
    if content is ...:
        del messages[1]["content"]
    text = rendered(template, messages).text
    assert '"arguments": {"a": 2}' in text and "None" not in text


@pytest.mark.parametrize(
    ("template", "role"),
    [(ALL, "system"), ("{# developer #}" + ALL, "developer"), (NO_SYSTEM.replace("system", "developer"), "system")],
)
def test_developer_role_becomes_system_if_the_template_needs_it(template, role):
    text = rendered(template, chat(("developer", "Be brief."), ("user", "Hi"))).text
    assert text.startswith(f"{role}: Be brief.")


def test_text_is_given_as_parts_if_the_template_needs_them():
    parts = "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}\n{% endfor %}"
    said = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}]}]
    for template, form in ((parts, [{"type": "text", "text": "Hi you"}]), (ALL, "Hi you")):
        found = rendered(template, said)
        assert found.text.strip() == "user: Hi you" and found.messages[0]["content"] == form


def test_refusal_names_the_message_at_which_the_template_stops():
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no  tools\nhere') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ChatRefused, match=r"not take messages\[2\], with the role 'tool': no tools here$") as refused:
        rendered(template, chat(("user", "a"), ("assistant", "b"), ("tool", "c"), ("user", "d")))
    assert refused.value.param == "messages[2]"
    with pytest.raises(ChatRefused, match="leaves out tools") as refused:
        rendered(ALL, chat(("user", "a")), tools=[{"type": "function", "function": {"name": "add"}}])
    assert refused.value.param == "tools"


# -- options -------------------------------------------------------------------------------------

DEFAULTED = "{% set aloud = aloud if aloud is defined else true %}{{ aloud }}"
IN_A_MACRO = "{% macro how() %}{% generation %}{{ aloud }}{% endgeneration %}{% endmacro %}{{ how() }}"


@pytest.mark.parametrize("template", ["{{ aloud }}", DEFAULTED, IN_A_MACRO])
@pytest.mark.parametrize("date", [None, "2025-01-01"])
def test_options_reach_the_template_whose_variables_they_are(template, date):
    template = (
        "{{ messages[0].content }}{{ bos_token }}{% for m in messages %}{{ loop.index }}{% break %}{% endfor %}"
        + template
    )
    template += "{{ strftime_now('%Y') if strftime_now is defined }}"
    found = rendered(template, chat(("user", "Hi")), options={"aloud": "so"}, date=date)
    plain = rendered(template, chat(("user", "Hi")), date=date)
    assert "so" in found.text and "so" not in plain.text
    assert found.ids == make_tokenizer()(found.text, add_special_tokens=False)["input_ids"]
    for name in ("m", "loop", "namespace", "how", "spoken"):
        with pytest.raises(
            ChatRefused, match=rf"never reads chat_template_kwargs.{name}: leave it out \(it reads aloud"
        ):
            rendered(template, chat(("user", "Hi")), options={"aloud": 1, name: 1}, date=date)
    for name in ("messages", "bos_token", "strftime_now", "chat_template", "tokenize"):
        with pytest.raises(ChatRefused, match=f"chat_template_kwargs.{name} is set by the server itself"):
            rendered(template, chat(("user", "Hi")), options={name: 1}, date=date)
    with pytest.raises(ChatRefused, match="the chat template is not valid"):
        rendered("{% if %}", chat(("user", "Hi")), options={"aloud": 1})


# -- the date --------------------------------------------------------------------------------------


@pytest.mark.parametrize("day", [date(2025, 1, 1), date(2024, 2, 29), date(2031, 12, 9)])
def test_template_sees_the_stated_date(day):
    formats = ["%d %b %Y", "%Y-%m-%d", "%A, %B %-d, %y", "100%% of %j", "%H:%M", "%x"]
    template = "  {% if strftime_now is defined %}" + "|".join("{{ strftime_now('" + one + "') }}" for one in formats)
    found = rendered(template + "{% endif %}\n{{ messages[0].content }}", chat(("user", "Hi")), date=day.isoformat())
    assert found.text == "|".join(map(day.strftime, formats)) + "Hi" and found.reads_date
    in_macros = "{% macro now() %}{{ strftime_now('%Y') }}{% endmacro %}{{ now() }}{{ messages[0].content }}"
    assert rendered(in_macros, chat(("user", "Hi")), date=day.isoformat()).text == f"{day.year}Hi"


def test_stated_date_changes_nothing_else_in_the_text():
    unread = "\n  {% if false %}{{ strftime_now('%Y') }}{% endif %}\n x {{ messages[0].content }}\n"
    now, stated = (rendered(unread, chat(("user", "Hi")), date=day) for day in (None, "2025-01-01"))
    assert now.text == stated.text and not stated.reads_date
    with pytest.raises(ConfigError, match="chat_date is 'yesterday': give a day as YYYY-MM-DD"):
        rendered(unread, chat(("user", "Hi")), date="yesterday")


@pytest.mark.parametrize(
    "message, part",
    [
        ({"role": "user", "content": "a\udcff"}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": "\ud800"}]}, "content"),
        ({"role": "tool", "content": "1", "tool_call_id": "\udcff"}, "tool_call_id"),
    ],
)
def test_invalid_unicode_is_refused_by_name(message, part):
    """As of bytes on a command line that the locale does not decode."""
    with pytest.raises(ChatRefused, match=rf"messages\[1\] has a {part} that is not valid Unicode"):
        rendered(ALL, [{"role": "user", "content": "a"}, message])
    with pytest.raises(ConfigError, match="not valid Unicode"):
        encode(make_tokenizer(), "a\udcff")


@pytest.mark.parametrize(
    "said", [{"content": None, "refusal": "I cannot."}, {"content": "I cannot.", "refusal": "No."}]
)
def test_refusal_is_rendered_as_the_assistants_content(said):
    chat = rendered(ALL, [{"role": "user", "content": "Go"}, {"role": "assistant", **said}])
    assert chat.text == "user: Go\nassistant: I cannot.\n"


def test_function_call_is_rendered_as_a_tool_call():
    call = {"name": "add", "arguments": '{"a": 2}'}
    template = (
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "{{ m.content }}\n{% endfor %}"
    )
    turns = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": None, "function_call": call}]
    assert rendered(template, turns).text == ('userGo\nassistant{"name": "add", "arguments": {"a": 2}}\n')


LONG = "Answer in one short sentence, whatever you are asked for."


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content[:12] }}{% endfor %}", "leaves out content of messages"),
        (
            "{% for m in messages %}{% if m.content is string %}{{ raise_exception('too long') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            r"does not take messages\[0\].*too long",
        ),
    ],
)
def test_text_in_a_code_like_part_does_not_hide_dropped_content(template, reason):
    with pytest.raises(ChatRefused, match=reason):
        rendered(template, chat(("system", LONG), ("user", "Hi there, how do you do today, my dear?")))


def test_repeated_message_does_not_hide_a_dropped_one():
    once = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    template = once + "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ChatRefused, match=r"leaves out content of messages\[2\], with the role 'system'"):
        rendered(template, chat(("system", LONG), ("user", "Hi"), ("system", LONG), ("user", "Go on")))
    assert rendered(ALL, chat(("user", LONG), ("user", LONG))).text.count(LONG) == 2


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "'messages' is empty"),
        ([{"role": "user", "content": 5}], r"messages\[0\] has a content that is no text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"messages\[0\] has a content"),
    ],
)
def test_stream_refuses_messages_that_are_not_text(messages, reason):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ALL
    with pytest.raises(ConfigError, match=reason):
        encode(tokenizer, messages)


def test_several_templates_without_a_default_are_named():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"rag": ALL, "tool_use": ALL}
    with pytest.raises(
        ChatRefused, match=r"several chat templates \(rag, tool_use\) and none of them is called default"
    ):
        render(tokenizer, chat(("user", "Hi")))
    tokenizer.chat_template["default"] = USERS
    assert render(tokenizer, chat(("user", "Hi"))).text == "Hi\n"
