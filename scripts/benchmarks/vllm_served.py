"""The parts of the evidence on vLLM that serve: a soak, held answers and aborts, and the server over HTTP. Called by
vllm_parts.py. Need vLLM.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from probemon.bundled import bundled_path
from probemon.errors import AlignmentError
from probemon.ops.vllm.client import ABORT, VllmClient
from probemon.ops.vllm.held_answers import hold
from probemon.ops.vllm.remote import RemoteScores
from probemon.ops.vllm.rows import CACHED
from probemon.tracking.recording import LAST
from vllm_compare import against_plain
from vllm_data import ROOT, cut_host, deployment, prompts, random_pack

PACK = ROOT / "probes/wordnet-smollm2-135m"
N_SOAK, AT_ONCE = 1000, 24
SHOWN = ROOT / "examples/watch.yaml"  # the deployment file of docs/vllm.md
CHAT = [{"role": "user", "content": "Tell me about whales."}]
SAMPLED = {"temperature": 0.8, "seed": 1}
ASKED: dict[str, dict[str, Any]] = {  # by what is asked of the server
    "a chat": {"messages": CHAT, "temperature": 0},
    "a chat, three answers": {"messages": CHAT, "n": 3, **SAMPLED},
    "a completion": {"prompt": "Whales are", "temperature": 0},
    "two prompts": {"prompt": ["Whales are", "The ship"], **SAMPLED},
    "two prompts, two answers each, stop strings": {
        "prompt": ["Whales are", "The ship"],
        "n": 2,
        "stop": [" the", ","],
        **SAMPLED,
    },
}


def resident_mb(pid: int) -> float:
    """Return what a process holds in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def soak(folder: Path) -> Any:
    """1,000 requests of mixed lengths on a host of two layers with random probes, few blocks, and every ninth aborted:
    every token of every answer has its scores or its reason, and neither process grows.
    """
    return asyncio.run(_soak(folder))


def plain_soak(folder: Path) -> Any:
    """The same load on vLLM alone: what the memory of its processes does by itself."""
    return asyncio.run(_plain_soak(folder))


def _settings(folder: Path) -> dict[str, Any]:
    return {
        "model": str(cut_host(folder / "cut2", bundled_path(), 2)),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": AT_ONCE,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 24,
        "enforce_eager": True,
        "disable_log_stats": False,
    }


async def _plain_soak(folder: Path) -> Any:
    random = np.random.default_rng(0)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**_settings(folder)))
    core = next(one.pid for one in multiprocessing.active_children() if "EngineCore" in one.name) or 0
    shared = random.integers(10, 40_000, 200).tolist()
    memory: list[tuple[int, float, float]] = []

    async def one(i: int) -> None:
        await _ask(engine, random, shared, i)

    async def measure(i: int) -> None:
        memory.append((i, resident_mb(core), resident_mb(os.getpid())))

    await _all(one, measure)
    engine.shutdown()
    return _grown(memory)


async def _ask(engine: Any, random: Any, shared: list[int], i: int) -> tuple[Any, bool]:
    """Ask for one answer of a random length; every ninth is aborted. Return it, and whether it was."""
    n = int(random.integers(1, 180))
    ids = shared[:n] if i % 3 == 0 else random.integers(10, 40_000, n).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=int(random.integers(1, 60)), ignore_eos=True)
    abort_at, last = int(random.integers(1, 20)) if i % 9 == 0 else -1, None
    async for output in engine.generate({"prompt_token_ids": ids}, params, f"soak-{i}"):
        last = output
        if len(output.outputs[0].token_ids) == abort_at:
            await engine.abort(f"soak-{i}")
    return last, abort_at >= 0


async def _all(one: Callable[[int], Any], measure: Callable[[int], Any]) -> float:
    """Ask all, some at once, and measure twenty times; return the seconds."""
    waiting: set[asyncio.Task[None]] = set()
    begin = time.perf_counter()
    for i in range(N_SOAK):
        if len(waiting) >= AT_ONCE:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        waiting.add(asyncio.create_task(one(i)))
        if i % (N_SOAK // 20) == 0:
            await measure(i)
    for task in waiting:
        await task
    await measure(N_SOAK)
    return time.perf_counter() - begin


async def _soak(folder: Path) -> Any:
    pack = random_pack(folder / "random2", 576, 64, "resid_post.1")
    random = np.random.default_rng(0)
    counts = dict.fromkeys(("requests", "aborted", "tokens", "seen", "last", "cached", "missing", "wrong", "empty"), 0)
    memory: list[tuple[int, float, float]] = []
    with VllmClient(packs=[str(pack)], keep_requests=128) as client:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**client.engine_arguments(**_settings(folder))))
        shared = random.integers(10, 40_000, 200).tolist()

        async def one(i: int) -> None:
            last, aborted = await _ask(engine, random, shared, i)
            counts["requests"] += 1
            counts["aborted"] += aborted
            if last is None:
                counts["empty"] += 1
                return
            try:
                _count(counts, await asyncio.to_thread(client.result, last))
            except AlignmentError as error:
                counts["wrong"] += 1
                print(error, flush=True)

        async def measure(i: int) -> None:
            assert client.hello is not None
            memory.append((i, resident_mb(client.hello.pid), resident_mb(os.getpid())))

        assert await asyncio.to_thread(client.wait, lambda: client.hello is not None, 60)
        seconds = await _all(one, measure)
        stats = (await engine.collective_rpc("probemon_stats"))[0]
        preempted = _preempted()
        engine.shutdown()
        n_lost = client.receiver.n_lost
    worker = {name: stats[name] for name in ("steps", "seconds", "ended", "dropped", "gaps", "failures")}
    rate = round(N_SOAK / seconds, 2)
    found = {"counts": counts, "preemptions": preempted, "requests_a_second": rate, "n_lost": n_lost, "worker": worker}
    return found | _grown(memory)


def _count(counts: dict[str, int], result: Any) -> None:
    reasons = list(result.coverage.unseen)
    known = {"seen": reasons.count(""), "last": reasons.count(LAST), "cached": reasons.count(CACHED)}
    for name, n in {"tokens": len(result), "missing": len(reasons) - sum(known.values()), **known}.items():
        counts[name] += n


def _preempted() -> float:
    from prometheus_client import REGISTRY

    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


def _grown(memory: list[tuple[int, float, float]]) -> dict[str, Any]:
    half = memory[len(memory) // 2]
    return {
        "memory_mb": [(i, round(worker, 1), round(own, 1)) for i, worker, own in memory],
        "grown_mb": {"worker": round(memory[-1][1] - half[1], 1), "client": round(memory[-1][2] - half[2], 1)},
    }


def schedule(folder: Path) -> Any:
    """Requests of 5 to 600 tokens, half behind shared prefixes, some repeated, n of 1 and 3, stop strings, every fifth
    aborted, so few blocks that some are preempted: every token compared with a plain forward of transformers.
    """
    return asyncio.run(_schedule(folder))


async def _schedule(folder: Path) -> Any:
    whole = bundled_path()
    tokenizer = AutoTokenizer.from_pretrained(whole)
    random = np.random.default_rng(1)
    asked = _prompts_of_schedule(tokenizer, random)
    answers: list[tuple[int, list[int], Any, int]] = []  # length of the prompt, ids, result, its row
    counts = dict.fromkeys(("requests", "aborted", "several", "at_stop_strings"), 0)
    with VllmClient(packs=[str(PACK)]) as client:
        arguments = {**_settings(folder), "model": str(whole), "max_model_len": 1024, "max_num_batched_tokens": 128}
        arguments |= {"num_gpu_blocks_override": 10, "max_num_seqs": 8}
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**client.engine_arguments(**arguments)))
        at_once = asyncio.Semaphore(8)

        async def one(i: int) -> None:
            n, name = (3 if i % 6 == 1 else 1), f"schedule-{i}"
            kind = RequestOutputKind.FINAL_ONLY if n == 3 else RequestOutputKind.CUMULATIVE
            params = SamplingParams(
                n=n,
                temperature=0.8 if n == 3 else 0.0,  # the interpreter takes a second to sample
                max_tokens=4 + i % 13,
                stop=[" the", ","] if i % 4 == 2 else None,
                include_stop_str_in_output=i % 8 == 2,
                output_kind=kind,
            )
            abort_at, last = 1 + i % 7 if i % 5 == 3 and n == 1 else -1, None
            async with at_once:
                async for output in engine.generate({"prompt_token_ids": asked[i]}, params, name):
                    last = output
                    if len(output.outputs[0].token_ids) == abort_at:
                        await engine.abort(name)
                        break
            counts["requests"] += 1
            counts["several"] += n > 1
            if abort_at > 0 and last is not None:  # its client has left, and asks for what ran
                counts["aborted"] += 1
                await asyncio.sleep(1)
                result = client.result_of(name)
                answers.append((len(asked[i]), result.token_id.tolist(), result, 0))
                spoken = [*asked[i], *last.outputs[0].token_ids][: len(result.token_id)]
                assert spoken == result.token_id.tolist()[: len(spoken)]
                return
            result = await asyncio.to_thread(client.result, last)
            for row, answer in enumerate(last.outputs):
                counts["at_stop_strings"] += isinstance(answer.stop_reason, str)
                answers.append((len(asked[i]), [*asked[i], *answer.token_ids], result, row))

        await asyncio.gather(*(one(i) for i in range(len(asked))))
        preempted, hello = _preempted(), client.hello
        engine.shutdown()
    return {
        "hello": None if hello is None else {"runner": hello.runner, "ahead": hello.n_ahead},
        "counts": counts,
        "preemptions": preempted,
        **against_plain(whole, PACK, 15, answers),
    }


def _prompts_of_schedule(tokenizer: Any, random: Any) -> list[list[int]]:
    [text] = prompts(tokenizer, (6000,))
    shared, asked = [text[:48], text[100:260]], list[list[int]]()
    for i in range(24):
        if i % 7 == 6:
            asked.append(asked[i // 2])
            continue
        n = int(random.integers(5, 601))
        begin = int(random.integers(0, len(text) - n))
        asked.append([*(shared[i // 2 % 2] if i % 2 else []), *text[begin : begin + n]][:600])
    return asked


def held(folder: Path) -> Any:
    """A held answer shows no token at which a rule stopped, inside the step and by an abort from outside."""
    return {stops: asyncio.run(_held(folder, stops)) for stops in ("in_step", "abort")}


async def _held(folder: Path, stops: str) -> Any:
    whole = bundled_path()
    tokenizer = AutoTokenizer.from_pretrained(whole)
    rule = {"concepts": ["animal.n.01"], "above": 0.5, "action": "stop", "on_blind": "pass"}
    with VllmClient(deployment(folder / "held.json", PACK, [rule]), tokenizer=tokenizer, stops=stops) as client:
        arguments = client.engine_arguments(model=str(whole), dtype="float32", max_model_len=512, enforce_eager=True)
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        if stops == ABORT:
            client.abort_with(engine)
        params, told = SamplingParams(temperature=0.0, max_tokens=40), []

        async def one(i: int, text: str) -> None:
            pieces = [piece async for piece in hold(client, engine.generate(text, params, f"held-{i}"))]
            log = client.log_of(f"held-{i}")
            assert log is not None
            shown = sum(len(piece.ids) for piece in pieces)
            told.append(
                {
                    "n_prompt": log.n_prompt,
                    "shown": shown,
                    "stopped_at": log.stop_column,
                    "withheld": pieces[-1].n_withheld,
                    "text": "".join(piece.text for piece in pieces),
                }
            )

        await asyncio.gather(
            *(one(i, text) for i, text in enumerate(("Whales are", "A dog and a cat", "The price of")))
        )
        several = await _several(client, engine)
        engine.shutdown()
    stopped = [one for one in told if one["stopped_at"] is not None]
    exact = bool(stopped) and all(one["shown"] == one["stopped_at"] - one["n_prompt"] for one in stopped)
    return {"answers": told, "several": several, "exact": exact and several["exact"]}


async def _several(client: VllmClient, engine: Any) -> Any:
    """Ask for three answers to one request: those that a rule stopped end, others do not, and all have their scores."""
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=24, output_kind=RequestOutputKind.FINAL_ONLY)
    [output] = [one async for one in engine.generate("My pets are a", params, "several")]
    reasons = list((await asyncio.to_thread(client.result, output)).coverage.unseen)
    logs = [client.log_of(f"{answer.index}_several") for answer in output.outputs]
    stopped = [log is not None and log.stop_column is not None for log in logs]
    finished = [answer.finish_reason for answer in output.outputs]
    by_rule = "abort" if client.stops == ABORT else "stop"
    missing = len(reasons) - sum(reasons.count(one) for one in ("", LAST, CACHED))
    as_ruled = all((finish == by_rule) == stop for finish, stop in zip(finished, stopped, strict=True))
    n_errors = client.failures.n_errors
    told = {"stopped": stopped, "finished": finished, "missing": missing, "failures": n_errors}
    return {**told, "exact": any(stopped) and as_ruled and not missing and not n_errors}


def server(folder: Path) -> Any:
    """The command of docs/vllm.md as a program: replies over HTTP of each kind, their scores as results, health and
    metrics, its end.
    """
    port = 8917
    command = [sys.executable, "-m", "probemon", "vllm", "serve", "demo", "--deployment", str(SHOWN), "--port"]
    command += [str(port), "--no-token", "--", "--max-model-len", "4096", "--enforce-eager"]
    address = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("w") as log:
        own = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=own, cwd=ROOT)
        try:
            ready = _wait_for(f"{address}/probemon/readyz", process, 800)
            model = _json(f"{address}/v1/models")["data"][0]["id"]
            remote = RemoteScores(address, SHOWN)
            replies = {words: _reply(address, remote, model, asked) for words, asked in ASKED.items()}
            told = _told(address, remote, model)
            metrics = urllib.request.urlopen(f"{address}/probemon/metrics").read().decode()
            vllms = urllib.request.urlopen(f"{address}/metrics").read().decode()
            refused = ""
            try:
                _json(f"{address}/v1/completions", {"model": model, "prompt": "A", "ignore_eos": True})
            except urllib.error.HTTPError as error:
                refused = f"{error.code}: {error.read().decode()[:200]}"
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
    return {
        "ready": ready["status"],
        "replies": replies,
        "in_replies": told,
        "exact": told["exact"] and all(one["tokens"] > 0 and not one["missing"] for one in replies.values()),
        "metrics": "probemon_tokens_total" in metrics and "vllm:" in vllms,
        "refused_ignore_eos": refused,
        "exit_status": status,
    }


def plugin(folder: Path) -> Any:
    """`vllm serve` with a variable, read by OpenAI's own client: streams of two answers, a rule that stops, and a stop
    string; each token's concepts are those of `/probemon/requests/ID`.
    """
    import openai

    port, key = 8918, "a key of the check"
    own = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    own |= {"PROBEMON_DEPLOYMENT": str(SHOWN), "VLLM_PLUGINS": "probemon"}
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(bundled_path()), "--served-model-name", "demo"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--api-key", key, "--max-model-len", "2048"]
    address = f"http://127.0.0.1:{port}"
    with (folder / "plugin.log").open("w") as log:
        process = subprocess.Popen([*command, "--enforce-eager"], stdout=log, stderr=log, env=own, cwd=ROOT)
        try:
            _wait_for(f"{address}/probemon/readyz", process, 800)
            client = openai.OpenAI(base_url=f"{address}/v1", api_key=key)
            streams = {
                words: _stream(client, address, key, **more)
                for words, more in (
                    ("two answers", {"n": 2, "temperature": 0.8, "seed": 2}),
                    ("two answers, a stop string", {"n": 2, "temperature": 0.8, "seed": 3, "stop": [" and", ","]}),
                )
            }
            try:
                _json(f"{address}/probemon/requests")
                open_to_all = True
            except urllib.error.HTTPError as error:
                open_to_all = error.code != 401
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
    exact = all(one["exact"] for one in streams.values()) and not open_to_all
    return {"streams": streams, "exact": exact, "open_without_key": open_to_all, "exit_status": status}


def _stream(client: Any, address: str, key: str, **more: Any) -> Any:
    chunks = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=24, stream=True, extra_body={"probemon": {}}, **more
    )
    tokens: dict[int, list[Any]] = {}
    texts: dict[int, str] = {}
    finished: dict[int, str] = {}
    stopped, name = 0, ""
    for chunk in chunks:
        name = chunk.id
        for choice in chunk.choices:
            told = getattr(choice.delta, "probemon", None) or {}
            tokens.setdefault(choice.index, []).extend(told.get("tokens", []))
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason is not None:
                finished[choice.index] = choice.finish_reason
                stopped += choice.delta.probemon_summary["stopped_by"] is not None
    request = urllib.request.Request(f"{address}/probemon/requests/{name}", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as answer:
        kept = json.loads(answer.read())["choices"]
    exact = len(kept) == len(tokens) == 2
    for choice in kept:
        by_column = {token["position"]: token for token in choice["tokens"]}
        told = tokens[choice["index"]]
        columns = [token["position"] for token in told]
        exact &= columns == list(range(choice["n_prompt"], choice["n_prompt"] + len(columns)))
        exact &= [bool(token["unseen"]) for token in told] == [False] * (len(told) - 1) + [True]
        exact &= all(token["fired"] == by_column[token["position"]]["fired"] for token in told[:-1])
    n_tokens = [len(tokens[i]) for i in sorted(tokens)]
    return {
        "tokens": n_tokens,
        "finished": finished,
        "stopped_by_a_rule": stopped,
        "texts": texts,
        "exact": bool(exact),
    }


def _reply(address: str, remote: RemoteScores, model: str, asked: dict[str, Any]) -> Any:
    """Ask the server, and for the scores of its reply."""
    path = "chat/completions" if "messages" in asked else "completions"
    reply = _json(f"{address}/v1/{path}", {"model": model, "max_tokens": 16, "return_token_ids": True, **asked})
    reasons = list(remote.result(reply).coverage.unseen)
    return {
        "tokens": len(reasons),
        "missing": len(reasons) - sum(reasons.count(one) for one in ("", LAST, CACHED)),
        "finished": [choice["finish_reason"] for choice in reply["choices"]],
        "at_stop_strings": [choice["stop_reason"] for choice in reply["choices"]],
    }


def _told(address: str, remote: RemoteScores, model: str) -> Any:
    """Ask for concepts in a reply of three answers; they are those of its scores."""
    body = {"model": model, "messages": CHAT, "n": 3, "max_tokens": 16, "return_token_ids": True, **SAMPLED}
    reply = _json(f"{address}/v1/chat/completions", {**body, "probemon": {"prompt": True}})
    result = remote.result(reply)
    exact, n = True, 0
    for choice in reply["choices"]:
        begin = len(reply["prompt_token_ids"]) if choice["index"] else 0  # the first one tells of the prompt
        at = np.flatnonzero(result.row == choice["index"])[begin:]
        for token, i in zip(choice["message"]["probemon"]["tokens"], at.tolist(), strict=True):
            exact &= token["fired"] == result.scores.fired(i).tolist()
            exact &= token["token_id"] == int(result.token_id[i])
            n += 1
    return {"tokens": n, "exact": bool(exact)}


def _wait_for(url: str, process: Any, seconds: float) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            return _json(url)
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server did not answer at {url}: see server.log")


def _json(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return json.loads(answer.read())


SERVED_PARTS: dict[str, Callable[[Path], Any]] = {
    one.__name__: one for one in (soak, plain_soak, schedule, held, server, plugin)
}
