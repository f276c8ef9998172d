"""What a chat template leaves out is found, and whoever would have asked the model another thing is refused."""

import pytest
from jinja2 import Environment

from corpora import make_tokenizer
from probemon.bem.lessons import make_lesson
from probemon.cli.common import chat_messages
from probemon.errors import ConfigError
from probemon.host.chat_template import left_out
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
def test_what_changes_nothing_in_the_text_is_found(template, messages, lost):
    written = Environment().from_string(template)
    assert left_out(lambda chat: written.render(messages=list(chat)), messages) == lost


def test_a_template_that_raises_has_looked():
    written = Environment().from_string(STRICT)
    assert left_out(lambda chat: written.render(messages=list(chat)), chat(("user", "Hi"))) is None


def test_commands_streams_and_rows_of_adapters_are_refused_what_the_model_would_not_read():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ALL
    assert chat_messages(tokenizer, "Hi", "Be brief.")[0]["content"] == "Be brief."
    tokenizer.chat_template = NO_SYSTEM
    with pytest.raises(ConfigError, match="leaves --system out: put it into --prompt"):
        chat_messages(tokenizer, "Hi", "Be brief.")
    messages = chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes."))
    with pytest.raises(ConfigError, match=r"leaves out content of messages\[0\], with the role 'system'"):
        encode(tokenizer, messages)
    with pytest.raises(ConfigError, match="row 3: the host's chat template leaves out turn 1, with the role 'system'"):
        make_lesson({"messages": messages}, "row 3", tokenizer)
    assert make_lesson({"messages": messages[1:]}, "row 3", tokenizer).n_labels
