"""A server on a tiny random host that speaks the demo model's tokens, and clients of it."""

import http.client
import json
import threading
import time
from types import SimpleNamespace

import openai
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from conftest import make_pack
from probemon import DynamicProbeManager
from probemon.bundled import FOLDER, load_bundled
from probemon.ops.server.app import make_app
from probemon.ops.server.keys import Key
from probemon.ops.server.limits import Limits
from probemon.ops.server.served import Served
from probemon.ops.server.server import all_names, make_server, open_socket
from probemon.util.cache_folders import cache_dir

TOKEN = "a token of the tests"
LIMITS = Limits(max_tokens=48, at_once=2, queue=3, kept_events=64, kept_requests=8, stalled_seconds=2)


def eventually(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def tiny_host(tokenizer):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


class Running:
    """A server in a thread, on a port of its own. It is asked at 127.0.0.1."""

    def __init__(self, served, limits=LIMITS, token=TOKEN, host="127.0.0.1", keys=None, **options):
        keys = keys if keys is not None else [Key(token)] if token else []
        self.served, self.limits, self.token = served, limits, token
        self.sock = open_socket(host, 0)
        self.port = self.sock.getsockname()[1]
        self.app = make_app(served, limits, keys=keys, hosts=all_names(host, []))
        ready = threading.Event()
        self.server = make_server(self.app, ready.set, **options)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.sock]})
        self.thread.start()
        assert ready.wait(30)
        url = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key=token or "none", max_retries=0)

    def close(self):
        self.client.close()
        self.server.should_exit = True
        self.thread.join(30)
        self.sock.close()
        assert not self.thread.is_alive()

    def ask(self, method, path, body=None, **headers):
        """One request with headers of our own; None takes one of the usual ones away. Status, headers, body."""
        usual = {"Host": f"127.0.0.1:{self.port}", "Authorization": f"Bearer {self.token}"}
        if body is not None:
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            usual |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        given = usual | {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        try:
            content = answer.read()
        except ConnectionResetError:  # refused by its head, and closed before its body was read
            content = b""
        connection.close()
        return SimpleNamespace(status=answer.status, headers=answer.headers, content=content)

    def get(self, path):
        answer = self.ask("GET", path)
        assert answer.status == 200, answer.content
        return json.loads(answer.content)


def demo_tokenizer():
    if not (cache_dir() / FOLDER / "tokenizer.json").exists():
        load_bundled()
    return AutoTokenizer.from_pretrained(cache_dir() / FOLDER)


def tiny_served(folder):
    tokenizer = demo_tokenizer()
    host = tiny_host(tokenizer)
    return Served("tiny", host, tokenizer, DynamicProbeManager(make_pack(folder, host)), LIMITS)


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content %} (thought: {{ m.reasoning_content }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if begun %}<think>\n{% endif %}{% endif %}"
)


def thinking_served(folder, messages, **pack):
    """Its model answers these messages with reasoning between <think> and </think>, and newlines around them.

    Rows of the random weights are swapped, so that what it wrote there anyway are the marks.
    """
    tokenizer = demo_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = THINKS
    host = tiny_host(tokenizer)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    written = host.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    for at, name in {0: "<think>", 1: "ĊĊ", 8: "ĊĊĊ", 9: "</think>", 10: "ĊĊĊĊ"}.items():
        pair = [written[at], tokenizer.convert_tokens_to_ids(name)]
        assert written.count(written[at]) == 1 and not set(pair) & set(ids)
        for weight in (host.lm_head.weight, host.get_input_embeddings().weight):
            weight.data[pair] = weight.data[pair[::-1]]
    return Served("tiny", host, tokenizer, DynamicProbeManager(make_pack(folder, host, **pack)), LIMITS)
