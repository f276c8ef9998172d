"""Comparisons for the evidence on vLLM: of tokens, states and scores with those of transformers and of this package.

answers(outputs)                                          # name, ids, length of the prompt: a row of a result each
counts = attribution(results, outputs)                    # tokens, missing, cached
states = kept_states("states.npz", outputs)               # by answer: columns and states, the last of each
figures = against_transformers(model, manager, outputs, results, states, "resid_post.15")
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probemon.ops.vllm.rows import CACHED
from probemon.tracking.recording import LAST

CLOSE = 1e-3  # of a score to a threshold, where another engine's last bits may decide


def answers(outputs: list[Any]) -> list[tuple[str, list[int], int]]:
    """Return the answers of outputs, in the order of a result's rows: the name that the worker knows each by, its ids,
    and how many of them are the prompt's.
    """
    return [
        (
            f"{answer.index}_{output.request_id}" if len(output.outputs) > 1 else output.request_id,
            [*output.prompt_token_ids, *answer.token_ids],
            len(output.prompt_token_ids),
        )
        for output in outputs
        for answer in output.outputs
    ]


def attribution(result: Any, outputs: list[Any]) -> dict[str, Any]:
    """Count what a result says of the tokens of some outputs."""
    reasons = list(result.coverage.unseen)
    last, unknown = reasons.count(LAST), reasons.count(CACHED)
    is_cached = (result.coverage.from_cache != 0) | np.array([reason == CACHED for reason in reasons], dtype=bool)
    rows = [i for i, output in enumerate(outputs) for _ in output.outputs]
    by_row = [int(is_cached[result.row == row].sum()) for row in range(len(rows))]
    # Of several answers to one request vLLM tells the number of one of them.
    told = [
        by_row[row] if len(outputs[i].outputs) > 1 else int(outputs[i].num_cached_tokens or 0)
        for row, i in enumerate(rows)
    ]
    return {
        "tokens": len(result),
        "seen": int(result.coverage.seen.sum()),
        "last": last,
        "cached": int(is_cached.sum()),
        "cached_shown": int(is_cached.sum()) - unknown,
        "cached_exact": by_row == told,
        "missing": len(result) - int(result.coverage.seen.sum()) - last - unknown,
    }


def kept_states(path: Path, site: str) -> dict[str, dict[int, tuple[int, np.ndarray]]]:
    """Return what a worker wrote: by request, its column to the id and the states, what came last of each."""
    with np.load(path, allow_pickle=False) as kept:
        requests, positions, ids, states = (
            kept["requests"],
            kept["positions"],
            kept["ids"],
            kept[f"states {site}"],
        )
    by_request: dict[str, dict[int, tuple[int, np.ndarray]]] = {}
    for i, request in enumerate(requests.tolist()):
        name = re.sub(r"-[0-9a-f]{8}\Z", "", request)
        by_request.setdefault(name, {})[int(positions[i])] = (int(ids[i]), states[i])
    return by_request


def reference(model: Any, ids: list[int], layer: int) -> torch.Tensor:
    """Return the states of transformers after a layer `[T, D]` fp32, of one plain forward."""
    taken: list[torch.Tensor] = []

    def take(module: Any, arguments: Any, output: Any) -> None:
        taken.append(output[0] if isinstance(output, tuple) else output)

    handle = model.model.layers[layer].register_forward_hook(take)  # `hidden_states` has the last one after its norm
    try:
        with torch.no_grad():
            model(torch.tensor([ids]))
    finally:
        handle.remove()
    return taken[0].reshape(len(ids), -1).float()


class RanBefore:
    """The states that a worker scored, by all tokens up to theirs: what a cached token was scored by."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, ...], list[np.ndarray]] = {}

    def add(self, ids: list[int], own: dict[int, tuple[int, np.ndarray]]) -> None:
        """Take the states of an answer."""
        for column, (_, state) in own.items():
            self._states.setdefault(tuple(ids[: column + 1]), []).append(state)

    def nearest(self, manager: Any, ids: list[int], column: int, active: Any, values: Any) -> tuple[np.ndarray, float]:
        """Return the state of a forward of this token whose scores are nearest to `values`, and how far they are."""
        found = []
        for state in self._states[tuple(ids[: column + 1])]:
            scores = manager.score_all(torch.from_numpy(state[None])).numpy()[0, active]
            found.append((float(np.abs(scores - values).max(initial=0.0)), state))
        apart, state = min(found, key=lambda one: one[0])
        return state, apart


def against_transformers(
    model: Any,
    manager: Any,
    outputs: list[Any],
    result: Any,
    kept: dict[str, dict[int, Any]],
    layer: int,
    before: RanBefore,
) -> dict[str, Any]:
    """Compare states that the worker scored with those of a plain forward, and scores with those of `score_tokens` on
    either: the most that two differ, and of how many (token, probe) pairs the firing does. `wrong`: rows whose token is
    not that of the output at their position. `before`: what ran so far, this run included afterwards.
    """
    for name, ids, _ in answers(outputs):
        before.add(ids, kept[name])
    cached_apart = 0.0
    worst = total = n = 0.0
    own_worst = own_flips = host_worst = host_flips = far_flips = pairs = fired_either = 0
    agree = n_rows = 0
    alert = manager.pack.alert_threshold.numpy()
    for row, (name, ids, n_prompt) in enumerate(answers(outputs)):
        own = kept[name]
        host = reference(model, ids, layer)
        tokens = np.flatnonzero((result.row == row) & result.coverage.seen)
        columns = result.position[tokens]
        states_of = []
        for token, column in zip(tokens.tolist(), columns.tolist(), strict=True):
            if result.coverage.from_cache[token]:
                active, values = result.scores.active(token), result.scores.active_scores(token)
                state, apart_by = before.nearest(manager, ids, column, active, values)
                cached_apart = max(cached_apart, apart_by)
                own[column] = (ids[column], state)
            states_of.append(own[column][1])
        mine = torch.from_numpy(np.stack(states_of))
        theirs = host[torch.from_numpy(columns)]
        apart = ((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).numpy()
        worst, total, n = max(worst, float(apart.max())), total + float(apart.sum()), n + len(apart)
        n_rows += sum(own[int(column)][0] == ids[int(column)] for column in columns)
        if len(columns) == len(ids) - 1:  # all but the last was run: what each began with is known
            for states, of_host in (
                (torch.cat([mine, mine[-1:]])[: len(ids) - 1], False),
                (host[: len(ids) - 1], True),
            ):
                scores = manager.score_tokens(states, prompt_len=n_prompt)
                most, flips, far, same, n_pairs, either = _differ(scores, result.scores.take(tokens), alert)
                if of_host:
                    host_worst, host_flips, far_flips = max(host_worst, most), host_flips + flips, far_flips + far
                    agree, pairs, fired_either = agree + same, pairs + n_pairs, fired_either + either
                else:
                    own_worst, own_flips = max(own_worst, most), own_flips + flips
    return {
        "state_rel_l2_max": worst,
        "state_rel_l2_mean": total / max(n, 1),
        "states_compared": int(n),
        "cached_score_max_difference": cached_apart,
        "wrong": int(n) - n_rows,
        "score_max_difference_same_states": own_worst,
        "fired_flips_same_states": own_flips,
        "score_max_difference_other_engine": host_worst,
        "fired_flips_other_engine": host_flips,
        "fired_flips_far_from_a_threshold": far_flips,
        "fired_pairs": pairs,
        "fired_agreement": agree / max(pairs, 1),
        "fired_in_either": fired_either,
    }


def against_plain(host: Path, pack: Path, layer: int, answers: list[tuple[int, list[int], Any, int]]) -> dict[str, Any]:
    """Compare scores with those of one plain forward of transformers over each finished text.

    `answers`: length of the prompt, ids, a result and its row.
    """
    from transformers import AutoModelForCausalLM

    from probemon import DynamicProbeManager

    model = AutoModelForCausalLM.from_pretrained(host, dtype=torch.float32).eval()
    manager = DynamicProbeManager(str(pack))
    alert = manager.pack.alert_threshold.numpy()
    most = 0.0
    counts = dict.fromkeys(
        ("answers", "tokens", "seen", "last", "cached", "cached_shown", "missing", "wrong", "flips", "far", "fired"), 0
    )
    for n_prompt, ids, result, row in answers:
        at = np.flatnonzero(result.row == row)
        scores = result.scores.take(at)
        reasons = list(scores.coverage.unseen)
        last, unknown = reasons.count(LAST), reasons.count(CACHED)
        shown = int(scores.coverage.from_cache.sum())
        plain = manager.score_tokens(reference(model, ids, layer), prompt_len=n_prompt)
        seen = np.flatnonzero(scores.coverage.seen)
        apart, flips, far, _, _, either = _differ(plain.take(seen), scores.take(seen), alert)
        most = max(most, apart)
        found = {
            "answers": 1,
            "tokens": len(at),
            "seen": len(seen),
            "last": last,
            "cached": shown + unknown,
            "cached_shown": shown,
            "missing": len(at) - len(seen) - last - unknown,
            "wrong": int((result.token_id[at] != np.array(ids)).sum()),
            "flips": flips,
            "far": far,
            "fired": either,
        }
        for name, n in found.items():
            counts[name] += n
    return {**counts, "score_max_difference": most}


def _differ(one: Any, other: Any, alert: np.ndarray) -> tuple[float, int, int, int, int, int]:
    """Return the largest difference of scores that both have; (token, probe) pairs that fire in one alone, and how many
    of these are not close to their threshold; pairs that agree, pairs, and those that fire in either.
    """
    most, flips, far, either = 0.0, 0, 0, 0
    for t in range(len(one)):
        mine = dict(zip(one.active(t).tolist(), one.active_scores(t).tolist(), strict=True))
        theirs = dict(zip(other.active(t).tolist(), other.active_scores(t).tolist(), strict=True))
        for probe in mine.keys() & theirs.keys():
            most = max(most, abs(mine[probe] - theirs[probe]))
        fired, fired_there = set(one.fired(t).tolist()), set(other.fired(t).tolist())
        for probe in fired ^ fired_there:
            flips += 1
            score = mine.get(probe, theirs.get(probe, 0.0))
            far += abs(score - float(alert[probe])) > CLOSE
        either += len(fired | fired_there)
    n_pairs = len(one) * one.coverage.n_probes
    return most, flips, far, n_pairs - flips, n_pairs, either


def spoken(outputs: list[Any]) -> list[dict[str, Any]]:
    """Return what outputs say, to compare them with those of another run."""
    return [
        {
            "ids": list(answer.token_ids),
            "finish": answer.finish_reason,
            "stop": None if answer.stop_reason is None else str(answer.stop_reason),
        }
        for output in outputs
        for answer in output.outputs
    ]
