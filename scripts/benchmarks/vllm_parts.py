"""The parts of the evidence on vLLM, each with an engine of its own, which vllm_check.py runs. Needs vLLM.

python scripts/benchmarks/vllm_parts.py FOLDER eager stop            # writes FOLDER/eager.json, FOLDER/stop.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# One thread that no core is bound to: on a machine that others use, several would wait for one another.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# One process for front end, core and worker, so that one import serves many engines; parts that serve have three.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from probemon import DynamicProbeManager
from probemon.bundled import bundled_path
from probemon.errors import AlignmentError, Blind, ProbemonError
from probemon.ops.vllm.client import VllmClient
from probemon.util.files import write_text_atomically
from provenance import commit
from vllm_compare import RanBefore, against_transformers, attribution, kept_states, spoken
from vllm_data import LENGTHS, ROOT, SHORTER, cut_host, deployment, prompts, random_host, random_pack

PACK = ROOT / "probes/wordnet-smollm2-135m"
KEEPING = "vllm_workers.KeepingWorker"
CHUNK, N_NEW = 64, 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_NEW, ignore_eos=True)
STOP_STRINGS = [" the", ",", ".", " and"]
RECORD = [{"concepts": ["animal"], "above": 0.5, "action": "record", "on_blind": "pass"}]


class Watched(NamedTuple):
    """A host and what watches it."""

    host: Path
    pack: Path
    site: str
    rules: list[dict[str, Any]]


def engine(model: Path, client: VllmClient | None, **arguments: Any) -> LLM:
    """Return an engine, watched where there is a client."""
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": CHUNK,
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
        "distributed_executor_backend": "uni",
        **arguments,
    }
    if client is not None:
        settings = {**client.engine_arguments(**settings), "worker_cls": KEEPING}
    return made(settings)


def made(settings: dict[str, Any]) -> LLM:
    """Return an engine by its settings."""
    # vLLM looks through all modules for kernels, and stumbles over this one's library where it is loaded before.
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        return LLM(**settings)
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden


def ask(llm: LLM, asked: list[list[int]], params: Any = GREEDY) -> list[Any]:
    """Return the outputs of some prompts, asked at the same time."""
    return llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)


def ended(llm: LLM) -> None:
    """End an engine, and what it has of the process."""
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def transformers_host(model: Path, dtype: str = "float32") -> Any:
    """Return the same weights as transformers runs them."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()


def tokenizer_of(model: Path) -> Any:
    """Return the tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def whole_host(folder: Path) -> Watched:
    """The demo model, watched by the pack that comes with it."""
    return Watched(bundled_path(), PACK, "resid_post.15", RECORD)


def cut_to_two(folder: Path) -> Watched:
    """Its first two layers, watched by random probes: the whole one takes many minutes to compile."""
    host = cut_host(folder / "cut2", bundled_path(), 2)
    return Watched(host, random_pack(folder / "random2", 576, 64, "resid_post.1"), "resid_post.1", [])


def eight_heads(folder: Path) -> Watched:
    """A random host of two layers whose heads can be shared by two ranks; the demo model has nine."""
    host = random_host(folder / "heads8", bundled_path(), hidden_size=512, heads=8)
    return Watched(host, random_pack(folder / "random8", 512, 64, "resid_post.1"), "resid_post.1", [])


def watched_run(
    folder: Path,
    watched: Watched | None = None,
    *,
    rounds: Mapping[str, Any] = MappingProxyType({"": GREEDY}),
    lengths: tuple[int, ...] = SHORTER,
    dtype: str = "float32",
    **arguments: Any,
) -> Any:
    """Run the prompts, watched, and compare; once for each of `rounds`, which name how they are asked."""
    watched = watched or whole_host(folder)
    asked = prompts(tokenizer_of(watched.host), lengths)
    begin = time.perf_counter()
    with VllmClient(deployment(folder / "record.json", watched.pack, watched.rules)) as client:
        llm = engine(watched.host, client, dtype=dtype, **arguments)
        started = time.perf_counter() - begin
        outcomes = []
        for turn, params in enumerate(rounds.values()):
            llm.collective_rpc("keep_states", args=(True,))
            outputs = ask(llm, asked, params)
            result = client.result(outputs)
            states = folder / f"states-{os.getpid()}-{turn}.npz"
            n_rows = llm.collective_rpc("write_states", args=(str(states),))
            outcomes.append((outputs, result, states, n_rows[0]))
        stats, hello, health = llm.collective_rpc("probemon_stats")[0], client.hello, client.health().as_dict()
        metrics = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        ended(llm)
        n_lost = client.receiver.n_lost
    host, manager = transformers_host(watched.host, dtype), DynamicProbeManager(str(watched.pack))
    layer = int(watched.site.rpartition(".")[2])
    turns, before = [], RanBefore()
    for words, (outputs, result, states, n_rows) in zip(rounds, outcomes, strict=True):
        kept = kept_states(states, watched.site)
        compared = against_transformers(host, manager, outputs, result, kept, layer, before)
        counts = attribution(result, outputs)
        turns.append({"asked": words, **counts, "rows": n_rows, **compared, "spoken": spoken(outputs)})
        states.unlink()
    return {
        "n_requests": len(asked),
        "prompt_lengths": [len(ids) for ids in asked],
        "started_seconds": round(started, 1),
        "hello": None if hello is None else {"runner": hello.runner, "way": hello.way, "compiled": hello.compiled},
        "n_ahead": None if hello is None else hello.n_ahead,
        "canary": None if hello is None else dict(hello.canary),
        "preemptions": metrics.get("vllm:num_preemptions"),
        "n_accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
        "n_lost": n_lost,
        "worker": {name: stats[name] for name in ("steps", "seconds", "dropped", "gaps", "failures")},
        "healthy": health["ok"],
        "turns": turns,
    }


def plain_run(host: Path, lengths: tuple[int, ...] = SHORTER, **arguments: Any) -> Any:
    """Run the same prompts by vLLM alone."""
    asked = prompts(tokenizer_of(host), lengths)
    llm = engine(host, None, **arguments)
    outputs = ask(llm, asked)
    ended(llm)
    return {"spoken": spoken(outputs)}


def decode_seconds(llm: LLM, asked: list[list[int]], n: int = 5) -> list[float]:
    """Return how long eight rows take to generate a token, run after run."""
    short = [ids[:8] for ids in asked[-8:]]
    times = []
    for _ in range(n):
        begin = time.perf_counter()
        ask(llm, short, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        times.append((time.perf_counter() - begin) / 16)
    return times


# -- the parts ---------------------------------------------------------------------------------------


def eager(folder: Path) -> Any:
    """Ten requests at once, prompts in chunks, twice: the second time most of them come from the prefix cache."""
    return watched_run(folder, rounds={"": GREEDY, "again": GREEDY}, lengths=LENGTHS)


def plain_eager(folder: Path) -> Any:
    """The same without us."""
    return plain_run(bundled_path(), LENGTHS)


def speculation(folder: Path) -> Any:
    """The same, with drafts of the n-gram speculator."""
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return watched_run(folder, speculative_config=drafts)


def preemption(folder: Path) -> Any:
    """The same with so few blocks that requests are preempted."""
    long = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
    return watched_run(folder, num_gpu_blocks_override=10, max_num_batched_tokens=256, rounds={"": long})


def sampled(folder: Path) -> Any:
    """Sampled answers, several to a request, and answers that end at a stop string, of one engine."""
    few, n_new = (3, 17, 40), {"max_tokens": N_NEW, "ignore_eos": True}
    seeded = [SamplingParams(temperature=0.8, seed=seed, **n_new) for seed in range(len(few))]
    several = [SamplingParams(temperature=0.8, seed=seed, n=2 + seed % 2, **n_new) for seed in range(len(few))]
    stopped = [SamplingParams(temperature=0.8, seed=seed, stop=STOP_STRINGS, **n_new) for seed in range(len(few))]
    rounds = {"": seeded, "n of 2 and 3": several, "stop strings": stopped}
    # Prompts in one piece: vLLM cannot take back what a seeded generator drew for a part of one on a CPU.
    run = watched_run(folder, rounds=rounds, lengths=few, max_num_batched_tokens=256)
    finished = run["turns"][2]["spoken"]
    return {**run, "n_at_stop_strings": sum(one["stop"] in STOP_STRINGS for one in finished)}


def bf16(folder: Path) -> Any:
    """The same in bf16, as the files have the weights."""
    return watched_run(folder, dtype="bfloat16")


def compiled(folder: Path) -> Any:
    """Compiled, as vLLM is by default: the first two layers alone."""
    return watched_run(folder, cut_to_two(folder), enforce_eager=False)


def plain_compiled(folder: Path) -> Any:
    """The same compiled, without us."""
    return plain_run(cut_to_two(folder).host, enforce_eager=False)


def stop(folder: Path) -> Any:
    """A rule that stops ends its rows with the token that met it and the end of the sequence; others are as without."""
    rule = {"concepts": ["animal.n.01"], "above": 0.5, "on_blind": "pass"}
    return _stopped(folder, Watched(bundled_path(), PACK, "resid_post.15", []), rule)


def _stopped(folder: Path, watched: Watched, rule: dict[str, Any], **arguments: Any) -> Any:
    whole = watched.host
    tokenizer = tokenizer_of(whole)
    texts = [
        "Whales are",
        "The ship",
        "A dog and a cat",
        "The price of",
        "My favourite animal is",
        "In 1905",
        "Tax",
        "A",
    ]
    asked, eos = [tokenizer(text)["input_ids"] for text in texts], tokenizer.eos_token_id
    params = SamplingParams(temperature=0.0, max_tokens=24)
    told = {}
    for action in ("record", "stop"):
        file = deployment(folder / f"rule_{action}.json", watched.pack, [{**rule, "action": action}])
        with VllmClient(file) as client:
            llm = engine(whole, client, **arguments)
            outputs = ask(llm, asked, params)
            result = client.result(outputs)
            first: dict[str, int] = {}
            for event in client.events:
                first.setdefault(event.request.rpartition("-")[0], event.column)
            refused = ""
            if action == "stop":
                try:
                    ask(llm, asked[:1], GREEDY)
                except Exception as error:
                    refused = f"{type(error).__name__}: {error}"
            ended(llm)
        told[action] = {
            "first": [first.get(output.request_id) for output in outputs],
            "spoken": spoken(outputs),
            "n_prompt": [len(output.prompt_token_ids) for output in outputs],
            "missing": attribution(result, outputs)["missing"],
            "refused": refused,
        }
    exact, n_stopped = True, 0
    for i in range(len(asked)):
        free, held = told["record"], told["stop"]
        column, n_prompt = free["first"][i], free["n_prompt"][i]
        expected = free["spoken"][i]["ids"]
        if column is not None:
            n_stopped += 1
            expected = [*expected[: column - n_prompt + 1], eos]
            exact &= held["spoken"][i]["finish"] == "stop" and held["first"][i] == column
        exact &= held["spoken"][i]["ids"] == expected
    return {"exact": exact, "n_stopped": n_stopped, "n_rows": len(asked), **told}


def canary(folder: Path) -> Any:
    """Engines that are broken in ways that only a comparison can tell do not start, and one that is not does."""
    watched, outcomes = cut_to_two(folder), {}
    for worker in ("KeepingWorker", "WithoutStates", "OtherLayer", "OtherWeights"):
        with VllmClient(packs=[str(watched.pack)]) as client:
            arguments = client.engine_arguments(model=str(watched.host), dtype="float32", max_model_len=256)
            more = {"worker_cls": f"vllm_workers.{worker}", "distributed_executor_backend": "uni"}
            try:
                llm = made({**arguments, **more, "enforce_eager": True})
            except (AlignmentError, Blind) as error:
                outcomes[worker] = f"refused: {type(error).__name__}: {error}"
                cleanup_dist_env_and_memory()
            else:
                outcomes[worker] = "started"
                ended(llm)
            outcomes[worker] += "" if client.hello is None else ", and said that it begins"
    whole = outcomes.pop("KeepingWorker")
    refused = all(told.startswith("refused: ") and "said" not in told for told in outcomes.values())
    return {"whole": whole, "outcomes": outcomes, "all_refused": refused and whole.startswith("started")}


def overhead(folder: Path) -> Any:
    """What scoring adds to a step of eight rows, the engine run with and without it in turns."""
    whole = bundled_path()
    asked = prompts(tokenizer_of(whole), SHORTER)
    with VllmClient(deployment(folder / "record.json", PACK, RECORD)) as client:
        llm = engine(whole, client)
        decode_seconds(llm, asked, 1)
        on, off, inside = [], [], []
        for _ in range(9):
            before = client.in_worker_seconds, client.n_steps
            on += decode_seconds(llm, asked, 1)
            inside.append((client.in_worker_seconds - before[0]) / max(1, client.n_steps - before[1]))
            llm.collective_rpc("pause", args=(True,))
            off += decode_seconds(llm, asked, 1)
            llm.collective_rpc("pause", args=(False,))
        ended(llm)
    on_ms, off_ms = 1e3 * statistics.median(on), 1e3 * statistics.median(off)
    return {
        "overhead_pct": round(100 * (on_ms - off_ms) / off_ms, 2),
        "step_ms": round(off_ms, 2),
        "watched_ms": round(on_ms, 2),
        "in_worker_ms": round(1e3 * statistics.median(inside), 3),
        "n_rows": 8,
        "n_pairs": len(on),
    }


def tensor_parallel(folder: Path) -> Any:
    """Two ranks on this CPU, or why there are none."""
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    try:
        host = eight_heads(folder)
        rule = {"concepts": ["random3"], "above": 0.9, "on_blind": "pass"}
        return {"ran": True, "stop": _stopped(folder, host, rule, **ranks), **watched_run(folder, host, **ranks)}
    except ProbemonError:
        raise
    except Exception as error:
        return {"ran": False, "why": f"{type(error).__name__}: {str(error)[:300]}"}


PARTS: dict[str, Callable[[Path], Any]] = {
    one.__name__: one
    for one in (
        eager,
        plain_eager,
        speculation,
        preemption,
        bf16,
        sampled,
        stop,
        canary,
        overhead,
        compiled,
        plain_compiled,
        tensor_parallel,
    )
}


def main() -> None:
    """Run some parts, one after another; one that fails says so in its own file of errors, and others go on."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:
        begin = time.perf_counter()
        print(f"== {name}", flush=True)
        try:
            if name in PARTS:
                found = PARTS[name](folder)
            else:
                from vllm_served import SERVED_PARTS

                found = SERVED_PARTS[name](folder)
        except Exception:
            traceback.print_exc()
            continue
        found["commit"] = commit()
        found["seconds"] = round(time.perf_counter() - begin, 1)
        write_text_atomically(folder / f"{name}.json", json.dumps(found, indent=1) + "\n")
        print(f"   {found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
