"""Clients of OpenAI's API against a real `probemon serve`: texts, log probabilities and concepts that they read are
compared with `generate()` and full forwards of the same model. test_clients.sh runs it, in an environment with them.

    bash scripts/benchmarks/test_clients.sh --output docs/benchmarks/clients.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from probemon.bundled import bundled_path, load_bundled
from provenance import about

KEY, N = "a-key-of-this-check", 12
CHAT = [{"role": "user", "content": "Tell me about whales."}]
TEXT = "The capital of France is"
CONCEPTS = {"probemon": {"top_k": 3}}
QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "London", "a whale"], "label": 0},
    {"question": "Two and two make", "choices": ["five", "four"], "label": 1},
    {"question": "Whales live in the", "choices": ["desert", "sea", "sky"], "label": 1},
]
TASK = """task: probemon_check
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


class Plain:
    """The same model, alone."""

    def __init__(self) -> None:
        self.model, self.tokenizer = load_bundled()
        self.worst = 0.0  # difference of a log probability

    def generated(self, ids: Sequence[int], **options: Any) -> list[int]:
        """Tokens that `generate` adds; greedy unless `seed` is given."""
        if (seed := options.pop("seed", None)) is not None:
            torch.manual_seed(seed)
        options = {"do_sample": seed is not None, "max_new_tokens": N, "pad_token_id": 0, **options}
        return self.model.generate(torch.tensor([list(ids)]), **options)[0, len(ids) :].tolist()

    def chat_ids(self) -> list[int]:
        return self.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def logprobs(self, ids: Sequence[int]) -> list[float | None]:
        """Log probabilities of the tokens, by one forward; of the first none."""
        with torch.no_grad():
            rows = self.model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
        return [None, *(float(rows[at - 1][ids[at]]) for at in range(1, len(ids)))]

    def compare(self, values: Sequence[float | None], expected: Sequence[float | None]) -> None:
        """Compare log probabilities."""
        assert len(values) == len(expected), (len(values), len(expected))
        for value, other in zip(values, expected, strict=True):
            assert (value is None) == (other is None)
            if value is not None and other is not None:
                self.worst = max(self.worst, abs(value - other))
        assert self.worst < 1e-3, self.worst


def check_openai(plain: Plain, url: str) -> list[str]:
    import openai

    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    ids = plain.chat_ids()
    written = plain.generated(ids)
    asked: dict[str, Any] = {"model": "demo", "messages": CHAT, "max_tokens": N, "temperature": 0, "logprobs": True}
    answer = client.chat.completions.create(**asked, top_logprobs=2, extra_body=CONCEPTS)
    [choice] = answer.choices
    assert choice.message.content == plain.text(written)
    plain.compare([one.logprob for one in choice.logprobs.content], plain.logprobs(ids + written)[len(ids) :])
    assert [one["token_id"] for one in choice.message.probemon["tokens"]] == written
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == plain.text(written)
    told = [one.logprob for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    plain.compare(told, plain.logprobs(ids + written)[len(ids) :])
    drawn = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=N, temperature=0.8, n=2, seed=5)
    for at, one in enumerate(drawn.choices):
        expected = plain.generated(ids, seed=5 + at, temperature=0.8, top_k=0)
        assert one.message.content == plain.text(expected)
    echoed = client.completions.create(model="demo", prompt=TEXT, max_tokens=0, echo=True, logprobs=1)
    assert echoed.choices[0].text == TEXT
    plain.compare(echoed.choices[0].logprobs.token_logprobs, plain.logprobs(plain.ids(TEXT)))
    try:
        client.chat.completions.create(model="demo", messages=CHAT, response_format={"type": "json_object"})
    except openai.BadRequestError as error:
        assert error.param == "response_format"
    else:
        raise AssertionError("response_format was not refused")
    return ["chat", "stream", "logprobs", "seeds of choices", "echo of the prompt alone", "concepts", "refusals"]


def check_langchain(plain: Plain, url: str) -> list[str]:
    from langchain_openai import ChatOpenAI, OpenAI

    options: dict[str, Any] = {"model": "demo", "base_url": url, "api_key": KEY, "temperature": 0, "max_retries": 0}
    ids = plain.chat_ids()
    written = plain.generated(ids)
    model = ChatOpenAI(**options, max_tokens=N, logprobs=True, extra_body=CONCEPTS)
    message = model.invoke(CHAT)
    assert message.content == plain.text(written)
    told = [one["logprob"] for one in message.response_metadata["logprobs"]["content"]]
    plain.compare(told, plain.logprobs(ids + written)[len(ids) :])
    assert "".join(str(part.content) for part in model.stream(CHAT)) == plain.text(written)
    text = plain.text(written)
    stop = text[len(text) // 2 :][:4]
    assert model.invoke(CHAT, stop=[stop]).content == text[: text.index(stop)]
    completed = OpenAI(**options, max_tokens=N).invoke(TEXT)
    assert completed == plain.text(plain.generated(plain.ids(TEXT)))
    return ["chat", "stream", "logprobs", "stop", "completion"]


def check_litellm(plain: Plain, url: str) -> list[str]:
    import litellm

    ids = plain.chat_ids()
    written = plain.generated(ids)
    options: dict[str, Any] = {"api_base": url, "api_key": KEY, "max_tokens": N, "temperature": 0, "num_retries": 0}
    asked = {"model": "openai/demo", "messages": CHAT, **options}
    answer = litellm.completion(**asked, logprobs=True, top_logprobs=1, extra_body=CONCEPTS)
    assert answer.choices[0].message.content == plain.text(written)
    told = [one["logprob"] for one in answer.choices[0].logprobs["content"]]
    plain.compare(told, plain.logprobs(ids + written)[len(ids) :])
    fields = answer.choices[0].message.provider_specific_fields["probemon"]
    assert [one["token_id"] for one in fields["tokens"]] == written
    parts = litellm.completion(**asked, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == plain.text(written)
    text = litellm.text_completion(model="text-completion-openai/demo", prompt=TEXT, **options).choices[0].text
    assert text == plain.text(plain.generated(plain.ids(TEXT)))
    return ["chat", "stream", "logprobs", "completion", "concepts"]


def check_lm_eval(plain: Plain, url: str) -> list[str]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    os.environ["OPENAI_API_KEY"] = KEY
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "questions.jsonl")
        data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
        Path(folder, "task.yaml").write_text(TASK.format(data=data), encoding="utf-8")
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "demo",
                "base_url": f"{url}/completions",
                "tokenizer": str(bundled_path()),
                "tokenizer_backend": "huggingface",
                "batch_size": 2,
            },
            tasks=["probemon_check"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            bootstrap_iters=0,
        )
    n_right = 0
    for sample in found["samples"]["probemon_check"]:
        question, likeliest = sample["doc"], []
        for choice, [(value, is_greedy)] in zip(question["choices"], sample["resps"], strict=True):
            before, ids = plain.ids(question["question"]), plain.ids(f"{question['question']} {choice}")
            expected = [one for one in plain.logprobs(ids)[len(before) :] if one is not None]
            plain.compare([value], [sum(expected)])
            assert is_greedy == (plain.generated(before, max_new_tokens=len(expected)) == ids[len(before) :])
            likeliest.append(sum(expected))
        n_right += likeliest.index(max(likeliest)) == question["label"]
    assert found["results"]["probemon_check"]["acc,none"] == n_right / len(QUESTIONS)
    return ["log likelihoods of choices by echo and logprobs", "which are greedy", "accuracy"]


CHECKS: dict[str, Callable[[Plain, str], list[str]]] = {
    "openai": check_openai,
    "langchain-openai": check_langchain,
    "litellm": check_litellm,
    "lm_eval": check_lm_eval,
}


@contextmanager
def served() -> Iterator[str]:
    """Yield the address of a server's API."""
    command = [sys.executable, "-m", "probemon", "serve", "demo", "--port", "0", "--dtype", "float32"]
    environment = {**os.environ, "PROBEMON_API_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            line = next(line for line in server.stdout if "serving at" in line)
            yield line.partition(" at ")[2].split()[0].rstrip("/") + "/v1"
        finally:
            server.terminate()


def main() -> None:
    """Run every client, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", default=[*CHECKS])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain, clients = Plain(), {}
    with served() as url:
        for name in arguments.clients:
            plain.worst = 0.0
            read = CHECKS[name](plain, url)
            version = importlib.metadata.version(name)
            clients[name] = {"version": version, "read": read, "worst_difference_of_a_logprob": plain.worst}
            print(f"{name} {version}: {', '.join(read)}; log probabilities differ by {plain.worst:.1e} at most")
    if arguments.output:
        content = json.dumps({"clients": clients, **about()}, indent=1)
        arguments.output.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
