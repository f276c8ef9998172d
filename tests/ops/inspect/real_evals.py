"""Real evals of inspect-ai: their logs have the answers and concepts of a server, and `analyze` reads them.

Not in the gate, whose pins inspect-ai does not accept: scripts/benchmarks/test_inspect.sh.
"""

import json
import threading
from functools import partial

import anyio
import pytest
import torch
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.log._recorders.chunked import convert_eval_logs_to_chunked
from inspect_ai.model import (
    ChatMessageSystem,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.scorer import match
from inspect_ai.solver import generate, solver, use_tools
from inspect_ai.tool import ToolError, tool

from conftest import make_pack
from probemon.errors import ChatRefused, ConfigError, RequestRefused
from probemon.lab.corpora.documents import read_documents
from probemon.ops.inspect import concept_fired
from running_server import Running, demo_tokenizer, eventually, tiny_host

QUESTIONS = ["Whales?", "What lives in the sea?", "And on land?"]
NO_TOKENS = {"usage": ModelUsage()}
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny random model that speaks the demo model's tokens, and two packs of random probes for it."""
    folder, tokenizer = tmp_path_factory.mktemp("evaluated"), demo_tokenizer()
    host = tiny_host(tokenizer)
    host.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return (
        folder / "tiny",
        make_pack(folder / "pack", host).directory,
        make_pack(folder / "other", host, seed=1).directory,
    )


@pytest.fixture
def model(folders):
    return get_model(f"probemon/{folders[0]}", pack=str(folders[1]))


def user(content):
    return {"role": "user", "content": content}


def generated(api, messages, seed=None, concept=None, **arguments):
    """Ids of a chat, and the result of a watched generate of it by hand."""
    served = api._served
    ids = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if seed is not None:
        torch.manual_seed(seed)
    with served.manager.attach(served.model, served.tokenizer) as run:
        out = served.model.generate(torch.tensor([ids]), pad_token_id=0, **{"do_sample": False, **arguments})
    return ids, out[0, len(ids) :].tolist(), run.result(out)


def assert_told(api, message, messages, **arguments):
    """The message has the text and the fires of a plain watched generate."""
    ids, answer, result = generated(api, messages, **arguments)
    assert message.text == api._served.tokenizer.decode(answer, skip_special_tokens=True)
    told, pack = message.metadata["probemon"], api._served.manager.pack
    tokens = told["tokens"]
    assert [token["position"] for token in tokens] == list(range(len(ids), len(ids) + len(answer)))
    named = set()
    for token in tokens:
        i = result.at(0, token["position"])
        active = zip(result.scores.active(i).tolist(), result.scores.active_scores(i).tolist(), strict=True)
        scores = dict(active)
        fired = [p for p, score in scores.items() if score > float(pack.alert_threshold[p])]
        assert token["token_id"] == result.token_id[i] and token["fired"] == fired
        named |= {*fired, *(p for p, _, _ in token["top"])}
        for p, strength in zip(fired, token["strengths"], strict=True):
            odds = torch.tensor([scores[p], float(pack.alert_threshold[p])], dtype=torch.float64).logit()
            assert strength == pytest.approx(float(odds[0] - odds[1]), abs=1e-4)
    assert any(token["fired"] for token in tokens)
    assert {int(p) for p in told["concepts"]} == named
    for p, about in told["concepts"].items():
        concept = pack.concepts[int(p)]
        assert (about["concept"], about["name"], about["path"][-1]) == (concept["id"], concept["name"], concept["name"])
    assert told["pack"] == pack.name and told["only"] is None
    return told


@solver
def asked_again():
    async def solve(state, generate):
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Why?"))
        return await generate(state)

    return solve


@pytest.mark.parametrize("format", ["eval", "json"])
def test_log_has_the_concepts_of_every_answer_and_is_read_as_chats(model, tmp_path, format):
    system = "Be brief, please: " + "a system prompt of more than a hundred characters, which logs may keep apart. " * 3
    task = Task(
        dataset=[Sample(input=[ChatMessageSystem(content=system), ChatMessageUser(content=q)]) for q in QUESTIONS],
        solver=asked_again(),
        scorer=[match(), concept_fired("c0"), concept_fired("concept 7")],
        epochs=2,
    )
    (log,) = eval(
        task, model=model, log_dir=str(tmp_path), log_format=format, display="none", temperature=0.0, max_tokens=6
    )
    assert log.status == "success", log.error
    log, chats = read_eval_log(log.location), []
    assert len(log.samples) == 6
    for sample in log.samples:
        question = QUESTIONS[sample.id - 1]
        messages, fired = [{"role": "system", "content": system}, user(question)], {"c0": [], "c7": []}
        for answer in (sample.messages[2], sample.messages[4]):
            told = assert_told(model.api, answer, messages, max_new_tokens=6)
            pack = model.api._served.manager.pack
            for concept, found in fired.items():
                below = {p for level in pack.tree.levels_below(pack.find_all(concept)) for p in level}
                found += [bool(below & set(token["fired"])) for token in told["tokens"]]
            messages += [{"role": "assistant", "content": answer.text}, user("Why?")]
        chats.append(messages[:-1])
        for concept, score in zip(fired, list(sample.scores.values())[1:], strict=True):
            assert score.value == any(fired[concept]) and score.metadata["n_fired"] == sum(fired[concept])
            assert (score.metadata["n_tokens"], score.metadata["n_unseen"]) == (12, 2)
    assert sorted(chats_in(log.location), key=json.dumps) == sorted(chats, key=json.dumps)


def chats_in(location):
    """The chats that `analyze` reads in a log: of each sample, its messages."""
    documents = list(read_documents(location))
    assert all(document.shape == "inspect-ai sample" and not document.reason for document in documents)
    return [json.loads(document.chat)["messages"] for document in documents]


def saying(*said):
    """A model of inspect-ai's own that gives these answers, without counting their tokens."""
    made = [one if isinstance(one, ModelOutput) else ModelOutput.from_content("mockllm/model", one) for one in said]
    return get_model("mockllm/model", memoize=False, custom_outputs=[one.model_copy(update=NO_TOKENS) for one in made])


def outputs(model, **config):
    """The output of one generation, outside of an eval."""
    question = [ChatMessageUser(content="Whales?")]
    return anyio.run(lambda: model.generate(question, config=GenerateConfig(**{**GREEDY, **config})))


@pytest.mark.parametrize(
    "config",
    [
        {"num_choices": 3, "temperature": 1.0, "top_p": 0.9, "seed": 5},
        {"extra_body": {"probemon": {"prompt": True, "top_k": 5, "concepts": ["c0"]}}},
        {"extra_body": {"probemon": {"rules": [{"concept": "c0", "above": 0.01, "action": "stop"}], "hold": True}}},
    ],
)
def test_answers_are_those_of_a_server(model, config):
    served = model.api._served
    server = Running(served)
    try:
        options = {"n" if name == "num_choices" else name: value for name, value in config.items()}
        options = {"extra_body": {"probemon": {}}, **GREEDY, **options}
        answer = server.client.chat.completions.create(model=served.name, messages=[user("Whales?")], **options)
    finally:
        server.close()
    output = outputs(model, **config)
    assert len(output.choices) == len(answer.choices) == config.get("num_choices", 1)
    reasons = {"stop": "stop", "length": "max_tokens", "content_filter": "content_filter"}
    for choice, other in zip(output.choices, answer.choices, strict=True):
        told = choice.message.metadata["probemon"]
        assert choice.message.text == other.message.content and choice.stop_reason == reasons[other.finish_reason]
        assert {name: told[name] for name in ("tokens", "events", "summary")} == other.message.model_extra["probemon"]
    assert output.usage.input_tokens == answer.usage.prompt_tokens
    assert output.usage.output_tokens == answer.usage.completion_tokens


def test_stop_sequence_seed_and_length_are_those_of_generate(model):
    text = outputs(model, max_tokens=12).completion
    assert outputs(model, stop_seqs=[text[5:8]]).completion == text[: text.index(text[5:8])]
    arguments = {"do_sample": True, "temperature": 0.9, "top_k": 0, "max_new_tokens": 12}
    output = outputs(model, temperature=0.9, seed=0)
    assert_told(model.api, output.message, [user("Whales?")], seed=0, **arguments)
    cut = outputs(model, max_tokens=None)  # a context of 128 tokens
    assert cut.stop_reason == "model_length" and cut.usage.total_tokens == 128
    assert outputs(model, max_tokens=200).stop_reason == "model_length"


# The largest first: inspect-ai's own limit of a model stays as it was first asked for in this process.
@pytest.mark.parametrize(("max_connections", "most"), [(3, 3), (None, 2), (1, 1)])
def test_answers_at_the_same_time_are_those_alone(model, monkeypatch, max_connections, most):
    served, made, peaks = model.api._served, {}, [0]

    def count(placed, scores):
        if max(peaks) < most:
            eventually(lambda: len(served.holding._answers) >= most)
        peaks.append(len(served.holding._answers))

    async def one(question):
        config = GenerateConfig(**GREEDY, max_connections=max_connections)
        made[question] = await model.generate([ChatMessageUser(content=question)], config=config)

    async def together():
        async with anyio.create_task_group() as group:
            for question in QUESTIONS:
                group.start_soon(one, question)

    with monkeypatch.context() as patched:
        patched.setattr(served, "followers", (count,))
        anyio.run(together)
    assert max(peaks) == most
    for question, output in made.items():
        assert_told(model.api, output.message, [user(question)], max_new_tokens=12)


def test_answer_that_nobody_waits_for_ends(model, monkeypatch):
    served, seen, abandoned = model.api._served, [], threading.Event()
    monkeypatch.setattr(served, "followers", (lambda placed, scores: (seen.append(placed.phase), abandoned.wait(30)),))

    async def abandon():
        with anyio.move_on_after(1) as scope:
            config = GenerateConfig(temperature=0, max_tokens=50, num_choices=3)
            await model.generate([ChatMessageUser(content="Whales?")], config=config)
        assert scope.cancelled_caught
        abandoned.set()

    anyio.run(abandon)
    eventually(lambda: not served.holding._answers)
    assert 1 <= len(seen) <= 3


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"top_k": 5}, "top_k has no effect on probemon/.*: leave it out"),
        ({"logprobs": True}, "logprobs has no effect"),
        ({"reasoning_effort": "low"}, "reasoning_effort has no effect"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"extra_body": {"guided": 1}}, "extra_body has 'guided': only 'probemon' is known"),
        ({"extra_body": {"probemon": {"concept": []}}}, "did you mean 'concepts'"),
        ({"extra_body": {"probemon": {"concepts": ["c99"]}}}, "c99"),
    ],
)
def test_options_without_effect_are_refused(model, config, said):
    with pytest.raises(RequestRefused, match=said):
        outputs(model, **config)


def test_tools_and_media_are_refused(model):
    task = Task(dataset=[Sample(input="Whales?")], solver=[use_tools(add()), generate()])
    (log,) = eval(task, model=model, display="none", log_format="json", log_dir="memory://logs")
    assert "calls of tools are not read from its answers" in log.error.message
    picture = ChatMessageUser(content=[ContentImage(image="data:image/png;base64,iVBORw0KGgo=")])
    with pytest.raises(ChatRefused, match="an image; texts only"):
        anyio.run(model.generate, [picture])


def test_model_arguments_are_checked(folders, tmp_path):
    tiny, pack, _ = map(str, folders)
    for arguments, said in [
        ({}, "PACK is missing"),
        ({"pack": pack, "packs": pack}, "no model argument 'packs', did you mean 'pack'"),
        ({"pack": pack, "base_url": "http://localhost"}, "runs here, so leave it out"),
    ]:
        with pytest.raises(ConfigError, match=said):
            get_model(f"probemon/{tiny}", **arguments)


def test_cache_of_one_pack_is_not_used_for_another(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path))
    tiny, *packs = map(str, folders)
    made = []
    for pack in (*packs, packs[0]):
        model = get_model(f"probemon/{tiny}", pack=pack, memoize=False)
        again = get_model(f"probemon/{tiny}", pack=pack, memoize=False, base_url=model.api.base_url)  # as in a log
        made.append([outputs(one, cache=True) for one in (model, again)])
    (first, cached), (other, _), (third, _) = made
    told = [output.message.metadata["probemon"]["tokens"] for output in (first, cached, other, third)]
    assert told[0] == told[1] == told[3] != told[2]
    assert first.completion == other.completion and cached.time == third.time == first.time


def test_scorer_refuses_what_it_could_not_see(model):
    def error(scorer, model=model, **config):
        task = Task(dataset=[Sample(input="Whales?")], scorer=scorer)
        (log,) = eval(task, model=model, display="none", log_dir="memory://logs", **{**GREEDY, **config})
        assert log.status == "error"
        return log.error.message

    assert "c99" in error(concept_fired("c99"))
    assert "evaluate with that provider" in error(concept_fired("c0"), saying("Yes."))
    only = {"probemon": {"concepts": ["c39"]}}
    assert "not among the concepts that the generation reports" in error(concept_fired("c0"), extra_body=only)


def test_answer_without_a_scored_token_has_no_score(model):
    task = Task(dataset=[Sample(input="Whales?")], scorer=concept_fired("c0"))
    (log,) = eval(task, model=model, display="none", log_dir="memory://logs", temperature=0, max_tokens=1)
    assert log.status == "success" and not log.samples[0].scores


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: One.
            y: Another.
        """
        if x > 5:
            raise ToolError("too large")
        return str(x + y)

    return execute


def test_logs_of_other_models_are_read_with_calls_thoughts_and_errors(tmp_path):
    call = partial(ModelOutput.for_tool_call, "mockllm/model", "add")
    thought = [ContentReasoning(reasoning="Add again."), ContentText(text="One moment.")]
    said = [
        call({"x": 1, "y": 2}, tool_call_id="one", content=""),
        call({"x": 6, "y": 2}, tool_call_id="two", content=""),
        [*thought, ContentText(text=" It is 3.")],
    ]
    model = saying(*said)
    task = Task(dataset=[Sample(input="1 + 2?", id="a sum/1")], solver=[use_tools(add()), generate()])
    (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error

    def called(x, name):
        function = {"name": "add", "arguments": {"x": x, "y": 2}}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": name, "type": "function", "function": function}],
        }

    result = {"role": "tool", "name": "add"}
    assert chats_in(log.location) == [
        [
            user("1 + 2?"),
            called(1, "one"),
            {**result, "tool_call_id": "one", "content": "3"},
            called(6, "two"),
            {**result, "tool_call_id": "two", "content": "Error: too large"},
            {"role": "assistant", "content": "One moment. It is 3.", "reasoning_content": "Add again."},
        ]
    ]


def test_log_in_chunks_is_refused_by_name(tmp_path):
    task = Task(dataset=[Sample(input="Whales?")])
    (log,) = eval(task, model=saying("Whales do."), display="none", log_dir=str(tmp_path))
    convert_eval_logs_to_chunked(log.location, str(tmp_path / "chunks"))
    (path,) = (tmp_path / "chunks").glob("*.eval")
    with pytest.raises(ConfigError, match="samples in chunks: give the log that it was converted from"):
        list(read_documents(path))
