#!/usr/bin/env python3
# ruff: noqa: E402
"""Profile the cascade as the first implementation's write-up did, that implementation beside this one, in one run.

    python scripts/profile_cascade.py                   # tables; about two minutes on one core
    python scripts/profile_cascade.py --json            # the tables, then one JSON object as the last line
    python scripts/profile_cascade.py --out docs/benchmarks/profile_cascade.json

Two managers get the same random weights and the same hidden states. `SlowTwin` works as the first implementation
did: a file and a module a probe, loaded when a parent passes the load threshold, scored one at a time with `.item()`,
deleted when pruned. Ours is `DynamicProbeManager` with the same settings. Before anything is timed, both must have
evaluated the same probes, given the same scores and kept the same probes at every token of every configuration.

Times are milliseconds of wall clock on one CPU thread, token by token in turn (twin, then ours), the page cache warm,
scores on the host at the end. The twin's base probes are loaded before the first token, as are our pack's weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from cascade_profile.report import show
from cascade_profile.world import (
    H1,
    H2,
    LOAD_THRESHOLD,
    World,
    WorldError,
    make_world,
    name_of,
    write_files,
    write_pack,
)
from probemon import DynamicProbeManager, ProbePack
from probemon.core.scores import RowState
from provenance import about

PARTS = ("scoring_loaded", "child_lookup", "loading", "scoring_children", "sorting")
LOAD_PARTS = ("file_read", "model_and_weights", "transfer")
# Two right implementations differ in summation order alone: by less than this.
SCORE_TOLERANCE = 1e-5
MIN_PROBES = 40


@dataclass(frozen=True)
class Setting:
    """One configuration: `keep_top_k` None is no pruning."""

    name: str
    base_layers: tuple[int, ...]
    keep_top_k: int | None


COMPARED = (Setting("no_pruning", (0,), None), Setting("top_50", (0,), 50), Setting("top_30", (0,), 30))
OFFLINE = Setting("offline", (0, 1), 100)


class Disagreement(Exception):
    """The two managers did different work, so their times cannot be compared."""


@dataclass(frozen=True)
class TwinStep:
    """One token of the twin: scores by probe, best first; seconds of the five parts; what came and went."""

    scores: dict[int, float]
    seconds: dict[str, float]
    n_children: int
    n_loaded: int
    n_unloaded: int


class SlowTwin:
    """The first implementation's manager: one module a probe, one file a probe, one `.item()` a score.

    Nothing in it is slower than it was. `load_seconds` holds one entry a probe loaded, for each part of a load.
    """

    def __init__(
        self, files: Sequence[Path], children: Sequence[Sequence[int]], level: np.ndarray, setting: Setting
    ) -> None:
        self.files, self.children, self.setting = files, children, setting
        self.base = np.flatnonzero(np.isin(level, setting.base_layers)).tolist()
        self.load_seconds: dict[str, list[float]] = {part: [] for part in LOAD_PARTS}
        self.begin()

    def begin(self) -> None:
        """Only the base probes loaded, as before a first token."""
        self.loaded: dict[int, nn.Module] = {}
        self.n_unloaded = 0
        for probe in self.base:
            self.loaded[probe] = self.load(probe)
        for seconds in self.load_seconds.values():
            seconds.clear()

    def load(self, probe: int) -> nn.Module:
        t0 = time.perf_counter()
        state = torch.load(self.files[probe], map_location="cpu", weights_only=True)
        t1 = time.perf_counter()
        model = nn.Sequential(
            nn.Linear(state["0.weight"].shape[1], H1),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(H1, H2),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(H2, 1),
            nn.Sigmoid(),
        )
        model.load_state_dict(state)
        model.eval()
        t2 = time.perf_counter()
        model = model.to("cpu")
        t3 = time.perf_counter()
        for part, seconds in zip(LOAD_PARTS, (t1 - t0, t2 - t1, t3 - t2), strict=True):
            self.load_seconds[part].append(seconds)
        return model

    def step(self, hidden: Tensor) -> TwinStep:
        """Score one token, hidden [1, D]: what is loaded, then one level of children, then prune."""
        with torch.no_grad():
            t0 = time.perf_counter()
            scores = self.score_loaded(hidden)
            t1 = time.perf_counter()
            wanted = [
                child
                for probe, score in scores.items()
                if score > LOAD_THRESHOLD
                for child in self.children[probe]
                if child not in self.loaded
            ]
            t2 = time.perf_counter()
            for child in wanted:
                self.loaded[child] = self.load(child)
            t3 = time.perf_counter()
            for child in wanted:
                scores[child] = self.loaded[child](hidden).item()
            t4 = time.perf_counter()
            ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
            if self.setting.keep_top_k is not None:
                self.prune([probe for probe, _ in ranked], self.setting.keep_top_k)
            t5 = time.perf_counter()
        seconds = dict(zip(PARTS, (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4), strict=True))
        return TwinStep(dict(ranked), seconds, len(wanted), len(self.loaded), self.n_unloaded)

    def score_loaded(self, hidden: Tensor) -> dict[int, float]:
        """What is loaded, one by one."""
        return {probe: model(hidden).item() for probe, model in self.loaded.items()}

    def prune(self, ranked: list[int], keep: int) -> None:
        """Unload all but the base probes and the best `keep` of the others."""
        base = set(self.base)
        for probe in [probe for probe in ranked if probe not in base][keep:]:
            del self.loaded[probe]
            self.n_unloaded += 1


class SuccessorTwin(SlowTwin):
    """What came after it, by its description: what is loaded is scored in one product of stacked weights, stacked anew
    when other probes are loaded, one `.item()` a score; children are loaded and scored one by one, as before.
    """

    def begin(self) -> None:
        super().begin()
        self._members: list[int] = []

    def score_loaded(self, hidden: Tensor) -> dict[int, float]:
        if self._members != list(self.loaded):
            self._members = list(self.loaded)
            layers = [[one for one in model if isinstance(one, nn.Linear)] for model in self.loaded.values()]
            self._stacked = [
                (torch.stack([one.weight for one in alike]).mT.contiguous(), torch.stack([one.bias for one in alike]))
                for alike in zip(*layers, strict=True)
            ]
        h = hidden.expand(len(self._members), 1, -1)
        for i, (weight, bias) in enumerate(self._stacked):
            h = torch.baddbmm(bias[:, None], h.relu() if i else h, weight)
        scores = h.flatten().sigmoid()
        return {probe: scores[i].item() for i, probe in enumerate(self._members)}


@dataclass
class Pair:
    """Both managers in one configuration, brought to the same beginning."""

    setting: Setting
    twin: SlowTwin
    ours: DynamicProbeManager
    states: Tensor

    @classmethod
    def of(cls, setting: Setting, world: World, files: Sequence[Path], pack: ProbePack) -> Pair:
        return cls(
            setting, SlowTwin(files, world.children(), world.level, setting), manager_of(pack, setting), world.states
        )

    def n_kept(self, state: RowState) -> int:
        """Probes that our next step starts from: base and retained, which is what the twin keeps loaded."""
        return int((state.retained[0] | self.ours.plan.always).sum())


def manager_of(pack: ProbePack, setting: Setting) -> DynamicProbeManager:
    pruning: dict[str, Any] = {} if setting.keep_top_k is None else {"keep_top_k": setting.keep_top_k}
    return DynamicProbeManager(
        pack,
        base_layers=setting.base_layers,
        load_threshold=LOAD_THRESHOLD,
        max_rounds=1,
        aggressive_pruning=setting.keep_top_k is not None,
        **pruning,
        # A limit that nothing reaches, at any --probes: the twin has none.
        max_loaded_probes=max(1000, pack.n_probes),
    )


def check_agreement(pair: Pair, bar: tqdm[Any]) -> float:
    """The largest score difference over the stream. Raises `Disagreement` at the first token where the sets differ."""
    pair.twin.begin()
    state: RowState | None = None
    worst = 0.0
    for t, hidden in enumerate(pair.states.split(1)):
        slow = pair.twin.step(hidden)
        state, fast = pair.ours.step(state, hidden)
        where = f"{pair.setting.name}, token {t + 1}"
        probes, values = fast.active(0).tolist(), fast.active_scores(0).tolist()
        _same(where, "evaluated", set(slow.scores), set(probes), _margin_of_expansion(pair, slow))
        for probe, value in zip(probes, values, strict=True):
            error = abs(slow.scores[probe] - value)
            worst = max(worst, error)
            if not error < SCORE_TOLERANCE:
                raise Disagreement(
                    f"{where}: {name_of(probe)} scores {slow.scores[probe]:.7f} in the twin, {value:.7f} in ours"
                )
        kept = set(np.flatnonzero(state.retained[0] | pair.ours.plan.always).tolist())
        _same(where, "kept", set(pair.twin.loaded), kept, _margin_of_pruning(pair, slow))
        bar.update()
    return worst


def _same(where: str, verb: str, slow: set[int], fast: set[int], margin: float) -> None:
    if slow == fast:
        return
    only = f"only the twin {verb} {sorted(map(name_of, slow - fast))}, only ours {sorted(map(name_of, fast - slow))}"
    if margin < SCORE_TOLERANCE:
        raise Disagreement(
            f"{where}: {only}: a score lies {margin:.1e} from what decided, within rounding: use another --seed"
        )
    raise Disagreement(
        f"{where}: {only}, and no score is within {SCORE_TOLERANCE:g} of what decided: one of the two is wrong"
    )


def _margin_of_expansion(pair: Pair, slow: TwinStep) -> float:
    return min(abs(score - LOAD_THRESHOLD) for probe, score in slow.scores.items() if pair.twin.children[probe])


def _margin_of_pruning(pair: Pair, slow: TwinStep) -> float:
    base, k = set(pair.twin.base), pair.setting.keep_top_k
    others = [score for probe, score in slow.scores.items() if probe not in base]
    return others[k - 1] - others[k] if k is not None and k < len(others) else float("inf")


def time_both(pair: Pair, bar: tqdm[Any]) -> dict[str, Any]:
    """Both over the stream, token by token in turn; milliseconds."""
    pair.twin.begin()
    state: RowState | None = None
    slow_ms, fast_ms, tokens, evaluated = [], [], [], []
    parts: Counter[str] = Counter()
    n_parents = n_expanded = 0
    for t, hidden in enumerate(pair.states.split(1)):
        t0 = time.perf_counter()
        slow = pair.twin.step(hidden)
        t1 = time.perf_counter()
        state, fast = pair.ours.step(state, hidden)
        t2 = time.perf_counter()
        slow_ms.append((t1 - t0) * 1e3)
        fast_ms.append((t2 - t1) * 1e3)
        parts.update(slow.seconds)
        evaluated.append(int(fast.coverage.evaluated[0]))
        parents = [score for probe, score in slow.scores.items() if pair.twin.children[probe]]
        n_parents += len(parents)
        n_expanded += sum(score > LOAD_THRESHOLD for score in parents)
        tokens.append(
            {
                "token": t + 1,
                "children": slow.n_children,
                "loaded": slow.n_loaded,
                "unloaded": slow.n_unloaded,
                "twin_ms": round(slow_ms[-1], 3),
                "ours_ms": round(fast_ms[-1], 3),
            }
        )
        bar.update()
    assert state is not None
    total = sum(parts.values())
    return {
        "twin": summary(slow_ms, len(pair.twin.loaded)),
        "ours": {**summary(fast_ms, pair.n_kept(state)), "evaluated_mean": round(float(np.mean(evaluated)), 1)},
        "steps": {
            part: {"mean_ms": round(parts[part] / len(tokens) * 1e3, 4), "share": round(parts[part] / total, 4)}
            for part in PARTS
        },
        "tokens": tokens,
        "parents_over_threshold": round(n_expanded / n_parents, 4),
        "hundred_tokens_ms": [round(sum(ms[:100]), 2) for ms in (slow_ms, fast_ms)] if len(tokens) >= 100 else None,
        "load_seconds": {part: list(seconds) for part, seconds in pair.twin.load_seconds.items()},
    }


def summary(ms: Sequence[float], final_loaded: int) -> dict[str, Any]:
    return {
        "mean_ms": round(float(np.mean(ms)), 4),
        "median_ms": round(float(np.median(ms)), 4),
        "max_ms": round(max(ms), 4),
        "final_loaded": final_loaded,
    }


def load_split(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean milliseconds of one of the twin's loads, over every load of every timed run."""
    if not any(run["load_seconds"]["transfer"] for run in runs):
        raise WorldError(
            "no parent passed the load threshold, so nothing was ever loaded: give more --tokens or another --seed"
        )
    mean = {part: float(np.mean([s for run in runs for s in run["load_seconds"][part]])) for part in LOAD_PARTS}
    total = sum(mean.values())
    split: dict[str, Any] = {part: {"ms": round(s * 1e3, 4), "share": round(s / total, 4)} for part, s in mean.items()}
    return split | {
        "total_ms": round(total * 1e3, 4),
        "n_loads": sum(len(run["load_seconds"]["transfer"]) for run in runs),
    }


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Everything the script measures, as one object."""
    world = make_world(n_probes=args.probes, n_tokens=args.tokens, hidden_size=args.hidden, seed=args.seed)
    with tempfile.TemporaryDirectory(prefix="profile-cascade-") as scratch:
        files = write_files(world, Path(scratch) / "files")
        pack = write_pack(world, Path(scratch) / "pack")
        settings = (*COMPARED, OFFLINE)
        runs, worst = {}, 0.0
        with tqdm(total=2 * len(settings) * args.tokens, desc="tokens", unit="", file=sys.stderr, disable=None) as bar:
            pairs = {setting.name: Pair.of(setting, world, files, pack) for setting in settings}
            for pair in pairs.values():
                worst = max(worst, check_agreement(pair, bar))
            # Without the freeze a collection that walks the host model's libraries, 0.2 s, falls into a token of the
            # twin.
            gc.collect()
            gc.freeze()
            for name, pair in pairs.items():
                runs[name] = time_both(pair, bar)
                pair.twin.loaded.clear()
            gc.unfreeze()
        impl = pairs["top_30"].ours.impl
    compared = [setting.name for setting in COMPARED]
    twin, ours = ({name: runs[name][side] for name in compared} for side in ("twin", "ours"))
    hundred = [runs[name]["hundred_tokens_ms"] for name in compared]
    return {
        "twin": twin,
        "ours": ours,
        "speedup_top_30": speedup(runs["top_30"]),
        "speedups": {name: speedup(runs[name]) for name in compared},
        "load_split": load_split(list(runs.values())),
        "step_breakdown": {name: runs[name]["steps"] for name in compared},
        "per_token_no_pruning": runs["no_pruning"]["tokens"],
        "per_token_top_30": runs["top_30"]["tokens"],
        "parents_over_threshold": {name: runs[name]["parents_over_threshold"] for name in compared},
        "hundred_tokens_ms": (
            None
            if None in hundred
            else {
                side: {name: ms[i] for name, ms in zip(compared, hundred, strict=True)}
                for i, side in enumerate(("twin", "ours"))
            }
        ),
        "offline_configuration": {
            "base_layers": list(OFFLINE.base_layers),
            "keep_top_k": OFFLINE.keep_top_k,
            "max_loaded_probes": max(1000, args.probes),
            "twin": runs["offline"]["twin"],
            "ours": runs["offline"]["ours"],
            "speedup": speedup(runs["offline"]),
        },
        "agreement": {
            "tokens_compared": len(settings) * args.tokens,
            "largest_score_difference": worst,
            "sets_agree": True,
        },
        "settings": {
            "load_threshold": LOAD_THRESHOLD,
            "max_rounds": 1,
            "impl": impl,
            "dtype": "float32",
            "architecture": f"{H1}-{H2}-1",
        },
        "n_probes": args.probes,
        "n_tokens": args.tokens,
        "hidden": args.hidden,
        "seed": args.seed,
        "probes_per_level": np.bincount(world.level).tolist(),
        "random_weights": True,
        "states": world.states_are,
        **about(),
    }


def speedup(run: dict[str, Any]) -> float:
    return round(run["twin"]["mean_ms"] / run["ours"]["mean_ms"], 2)


def write_whole(file: Path, result: dict[str, Any]) -> None:
    """`file` holds the whole object or what it held before."""
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, prefix=f".{file.name}-", delete=False, encoding="utf-8"
    ) as half:
        half.write(json.dumps(result, indent=1) + "\n")
    os.chmod(half.name, 0o644)  # a named temporary file is private
    os.replace(half.name, file)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"profile_cascade: {message}\n")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the same object to FILE")
    parser.add_argument("--probes", type=int, default=1000, help="default 1000")
    parser.add_argument("--tokens", type=int, default=100, help="default 100")
    parser.add_argument(
        "--hidden", type=int, default=576, help="width of a hidden state (default 576: the demo model's)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name, least in (("probes", MIN_PROBES), ("tokens", 2), ("hidden", 2), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}: give {least} or more")
    if args.out is not None and (args.out.is_dir() or not args.out.absolute().parent.is_dir()):
        parser.error(f"--out {args.out}: give a file in a folder that exists")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    torch.set_num_threads(1)
    try:
        result = profile(args)
    except WorldError as error:
        print(f"profile_cascade: {error}", file=sys.stderr)
        return 2
    except Disagreement as error:
        print(f"profile_cascade: nothing was timed, the two managers disagree: {error}", file=sys.stderr)
        return 1
    show(result)
    if args.out is not None:
        write_whole(args.out, result)
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
