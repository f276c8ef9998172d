"""A judge behind an OpenAI-like endpoint.

judge = HttpJudge("https://judges.example/v1", "guard-model", key_env="JUDGE_KEY")
judge = HttpJudge("http://localhost:8000/v1", "meta-llama/Llama-Guard-3-8B", preset="llama-guard")

It sends the concept and the question's text to this address alone: no redirections, no proxies.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from probemon.errors import ConfigError, JudgeFailed, closest
from probemon.ops.judges.escalation import Question
from probemon.ops.judges.judge_desk import RULINGS
from probemon.ops.judges.judge_forms import FIELDS, PLACEHOLDER, PRESETS, Form
from probemon.util.checks import check_bool, check_choice, check_count, check_mapping, check_number, check_text, shown

_ASKED = re.compile(r"[!-~]*")  # a path of HTTP
_MOST_BYTES = 64 * 1024
_MOST_TOKENS = 65_536
_OWN = ("model", "messages", "max_tokens", "max_completion_tokens", "temperature", "stream", "n")
LIMITS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class HttpJudge:
    """Needs a run with a tokenizer. Raises `ConfigError`.

    - `url`: up to the version; `/chat/completions` is added
    - `prompt`: of the system; "" for none
    - `key_env`: environment variable with the key; over http:// to another machine only with `key_over_http`
    - `preset`: "llama-guard", "shieldgemma" or "qwen3guard"; the other options replace its parts
    - `question`: text with `{text}`, `{concept}`, `{path}`, `{not_known}`, `{tokens_missing_before}`; None: as JSON
    - `rulings`: "pass" or "stop" by the model's word, in any case; another word is a failure
    - `pattern`: regular expression whose group `ruling` (or the first) is the word, and group `reason` why. All matches
      have to agree
    - `json_field`, `reason_field`: instead, fields of an answer in JSON, as `result.flagged`
    - `max_tokens` or `max_completion_tokens`: the one given is sent
    - `temperature`: None sends none
    - `body`: further fields of the request; its texts may have placeholders

    Reasoning (`<think>...</think>`, `reasoning_content`) is skipped.
    """

    url: str
    model: str
    prompt: str | None = None
    key_env: str | None = None
    preset: str | None = None
    question: str | None = None
    rulings: Mapping[str, str] | None = field(default=None, hash=False)
    pattern: str | None = None
    json_field: str | None = None
    reason_field: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = 0
    body: Mapping[str, Any] | None = field(default=None, hash=False)
    key_over_http: bool = False
    form: Form = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text("model", self.model)
        parts = self._parts()
        if self.key_env is not None:
            check_text("key_env", self.key_env)
            self._check_key_is_safe(parts)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ConfigError("max_tokens and max_completion_tokens are given: give the one that the endpoint takes")
        for name in LIMITS:
            if getattr(self, name) is not None:
                remedy = f"it counts tokens, so give 1 to {_MOST_TOKENS:,}"
                check_count(name, getattr(self, name), least=1, most=_MOST_TOKENS, remedy=remedy)
        if self.temperature is not None:
            check_number("temperature", self.temperature, low=0, high=2, remedy="give 0 to 2, or None to send none")
        object.__setattr__(self, "form", self._form())

    def _parts(self) -> SplitResult:
        parts = urlsplit("")
        try:
            parts = urlsplit(self.url if isinstance(self.url, str) else "")
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            # these would be dropped, or are invalid
            complete = not parts.query and not parts.fragment and "@" not in parts.netloc
            valid = valid and complete and _ASKED.fullmatch(parts.path) is not None
            valid = valid and self.url == self.url.strip() and self.url.isprintable()
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(
                f"url is {shown(self.url)}: give the address of an endpoint, as http://localhost:8000/v1, up to the"
                " version, without a query"
            )
        return parts

    def _check_key_is_safe(self, parts: SplitResult) -> None:
        check_bool("key_over_http", self.key_over_http)
        if parts.scheme == "http" and not self.key_over_http and not _is_this_machine(parts.hostname or ""):
            raise ConfigError(
                f"url is {shown(self.url)} and key_env is given: the key would go to another machine in plain text."
                " Give an https:// address, or key_over_http if the network is your own"
            )

    def _form(self) -> Form:
        """Return the preset's form with the given parts. Raises `ConfigError`."""
        form = Form() if self.preset is None else PRESETS[check_choice("preset", self.preset, tuple(PRESETS))]
        parts: dict[str, Any] = {}
        for name in ("prompt", "question", "pattern", "json_field", "reason_field"):
            if getattr(self, name) is not None:
                parts[name] = check_text(name, getattr(self, name))
        if "question" in parts:
            self._check_question(parts["question"])
        if "pattern" in parts:
            if "json_field" in parts:
                raise ConfigError("pattern and json_field are given: the answer is a text or JSON, so give one of them")
            try:
                parts["pattern"] = re.compile(parts["pattern"])
            except (re.error, RecursionError, OverflowError) as error:
                raise ConfigError(f"pattern is {shown(self.pattern)}, not a regular expression: {error}") from None
        elif "json_field" in parts:
            parts["pattern"] = None
        elif "reason_field" in parts:
            raise ConfigError("reason_field is of an answer in JSON: give json_field, too")
        if self.rulings is not None:
            parts["rulings"] = self._checked_rulings(self.rulings)
        if self.body is not None:
            parts["body"] = check_mapping("body", self.body)
            if name := next((name for name in self.body if name in _OWN), ""):
                raise ConfigError(f"body has {name!r}, which the judge sets itself: leave it out")
            try:
                json.dumps(dict(self.body), allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                raise ConfigError(f"body is {shown(self.body)}: give what JSON can hold") from None
        given = next((getattr(self, name) for name in LIMITS if getattr(self, name) is not None), form.max_tokens)
        return replace(form, **parts, max_tokens=given)

    @staticmethod
    def _check_question(question: str) -> None:
        names = PLACEHOLDER.findall(question)
        if unknown := next((name for name in names if name not in FIELDS), ""):
            has = f": there are {', '.join(FIELDS)}"
            raise ConfigError(f"question has {{{unknown}}}, which is unknown{closest(unknown, FIELDS) or has}")
        if "text" not in names:
            raise ConfigError("question has no {text}, so the judge would read nothing of the text: put it in")

    @staticmethod
    def _checked_rulings(rulings: Mapping[str, str]) -> dict[str, str]:
        checked: dict[str, str] = {}
        for word, ruling in check_mapping("rulings", rulings).items():
            key = word.strip().casefold()
            if not key or checked.get(key, ruling) != ruling:
                raise ConfigError(f"rulings has the word {shown(word)} twice, or an empty one: give each once")
            checked[key] = check_choice(f"rulings[{shown(word)}]", ruling, RULINGS)
        if set(checked.values()) != set(RULINGS):
            raise ConfigError(f"rulings is {shown(dict(rulings))}: give at least one word for stop, and one for pass")
        return checked

    def check(self, tokenizer: Any) -> None:
        """Raise `ConfigError` if a run cannot ask it."""
        if tokenizer is None:
            raise ConfigError("an HttpJudge reads texts, and the run has no tokenizer: attach(model, tokenizer)")
        if self.key_env is not None and not os.environ.get(self.key_env):
            raise ConfigError(
                f"key_env is {self.key_env!r}, and the environment has no such variable: set it to the key"
            )

    def __call__(self, question: Question) -> str | tuple[str, str]:
        """Return "stop" or "pass", and what the model said. Raises `JudgeFailed`, OSError."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        body = {
            "model": self.model,
            "messages": self.form.messages(question),
            limit: self.form.max_tokens,
            **({} if self.temperature is None else {"temperature": self.temperature}),
            **self.form.more(question),
        }
        status, content = self._post(json.dumps(body).encode(), question.within)
        if status != 200:
            raise JudgeFailed(f"the judge answered with status {status}")
        return self.form.read(content)

    def _post(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self.key_env is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(self.key_env, '')}"
        deadline = time.monotonic() + seconds
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        assert parts.hostname is not None
        with closing(kind(parts.hostname, parts.port, timeout=seconds)) as connection:
            connection.connect()
            # The timeout is per piece: a server that sends single bytes would never end.
            cut = threading.Timer(max(0.0, deadline - time.monotonic()), _shut, [connection.sock])
            cut.daemon = True
            cut.start()
            try:
                connection.request("POST", f"{parts.path.rstrip('/')}/chat/completions", body, headers)
                answer = connection.getresponse()
                content = answer.read(_MOST_BYTES + 1)
            except HTTPException as error:
                raise JudgeFailed(f"the judge does not speak HTTP: {type(error).__name__}") from error
            finally:
                cut.cancel()
        if len(content) > _MOST_BYTES:
            raise JudgeFailed(f"the judge answered with more than {_MOST_BYTES:,} bytes")
        return answer.status, content


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
