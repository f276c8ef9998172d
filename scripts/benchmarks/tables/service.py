"""Tables of the pages about a monitor in service: metrics, drift, the server, vLLM."""

from __future__ import annotations

from typing import Any

from probemon.util.counted import counted

_OPERATIONS = {
    "series_8000_concepts": "series of a run with a random pack of 8,000 concepts, none by name",
    "scrape_ms": "a scrape with 100 concepts by name, median, ms",
    "step_overhead_pct": "what metrics add to a token of the demo host, %",
    "ladder_down_tokens": "tokens to the last degradation of a budget of 3 ms, where hooks take 30 ms more",
    "ladder_up_tokens": "tokens until all is scored again, once they do not",
}


def operations(found: dict[str, Any]) -> list[str]:
    """What each claim found, beside its bar."""
    lines = ["| what | found | bar |", "|---|---|---|"]
    for name, words in _OPERATIONS.items():
        claim = found["claims"][name]
        value = claim["value"]
        shown = "not reached" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
        lines.append(f"| {words} | {shown} | {claim['bar']} |")
    return lines


def drift(found: dict[str, Any]) -> list[str]:
    """How soon a doubled base rate is found."""
    return [
        "| base rate | requests of the reference | found within 1,000 | median | 95 of 100 within |",
        "|---|---|---|---|---|",
    ] + [
        f"| {row['rate']:.0%} | {row['n_reference']:,} | {row['found_within_1000']:.1%} | {_until(row['median'])} |"
        f" {_until(row['p95'])} |"
        for row in found["doubled"]
    ]


def _until(n_requests: float) -> str:
    return "over 5,000" if n_requests >= 5000 else f"{n_requests:,.0f}"


def serving(found: dict[str, Any]) -> list[str]:
    """What the server adds, beside its bars."""
    bars = {name: bar["found"] for name, bar in found["bars"].items()}
    pages, never = found["pages"]["reading"] + found["pages"]["never_reading"], found["pages"]["never_reading"]
    return [
        "| what | measured | target |",
        "|---|---|---|",
        f"| from the end of a token's forward to its event at a page, median | {1000 * bars['first_event_seconds']:.0f}"
        " ms | 20 ms |",
        "| CPU time outside the watched `generate()`, as a share of the time inside it |"
        f" {100 * bars['added_share']:.1f} % | 2 % |",
        f"| the same, added by {pages} pages ({never} of them never read) |"
        f" {100 * bars['slowdown_share']:.1f} % | 3 % |",
        f"| memory that these pages take | {bars['growth_bytes'] / 2**20:.0f} MB | 20 MB |",
    ]


_VLLM = {
    "tokens_wrong": "rows whose token is another than the output's",
    "tokens_missing": "tokens without scores, but the last of each answer",
    "cached_counts_exact": "tokens from the prefix cache are as many as vLLM says, request by request",
    "cached_scores_exact": "they have scores, bit for bit those of the forward that ran them",
    "state_rel_l2_max": "states in fp32 apart from those of transformers, relative, the most of any token",
    "fired_agreement": "(token, probe) pairs in bf16 that fire, or do not, as on transformers' states",
    "outputs_identical": "tokens and reasons to finish are those of the same engine without probemon",
    "v2_stops": "rows that a rule stopped end with the token that met it and the end; others are as without",
    "ended_at_stop_strings": "answers that ended at a stop string, among those compared",
    "held_exact": "held answers show what was scored, and nothing from the token on that met the rule",
    "served_exact": "replies of this page's server, of each kind, have all their scores",
    "compiled_checked": "compiled, as vLLM is by default, on runner V1",
    "overhead_pct": "what scoring adds to a step of 8 rows, %",
    "canary_refused": "engines broken on purpose that did not start",
    "v2_drafts": "drafts by n-grams, some of them accepted: every token has the scores of its own forward",
    "v2": "every part ran on the model runner that it is listed for",
    "asynchronous": "of V2 all ran with asynchronous scheduling but the drafts, where vLLM has none",
    "schedule_exact": "the schedule below: 0 wrong, 0 missing, no firing apart, cached prompts seen, some preempted",
    "client_streams_exact": "OpenAI's client streams two answers of `vllm serve`, each token with its concepts",
    "ranks_stop_exact": "stops of two ranks of tensor parallelism, on runner V1, are as exact",
    "soak_grown_mb": "growth of a process over the soak's second half, beyond vLLM alone under the same load, MB",
}


_RUNS = {
    "eager": "eager, prompts in chunks of 64",
    "speculation": "the same with drafts by n-grams",
    "preemption": "the same with few blocks",
    "bf16": "eager, bf16",
    "sampled": "eager, sampled at temperature 0.8 with seeds",
    "compiled": "compiled, runner V1",
    "tensor_parallel": "eager, two ranks, runner V1",
}


def vllm(found: dict[str, Any]) -> list[str]:
    """What is claimed, the figure, the bar."""
    lines = ["| what | found | bar |", "|---|---|---|"]
    for name, claim in found["claims"].items():
        if name.startswith(("v1_", "newer_")):
            continue
        value = claim["value"]
        shown = f"{value:.1e}" if isinstance(value, float) and 0 < abs(value) < 1e-3 else f"{value:g}"
        if claim["bar"] == "1":
            shown = "yes" if value == 1 else "no"
        bar = {"0": "0", "1": "yes"}.get(claim["bar"], claim["bar"])
        lines.append(f"| {_VLLM[name]} | {shown} | {bar} |")
    for prefix, where in (("v1_", "on runner V1"), ("newer_", f"with vLLM {found['newer']}")):
        others = [claim for name, claim in found["claims"].items() if name.startswith(prefix)]
        if not others:
            continue
        held = sum(claim["holds"] for claim in others)
        lines.append(f"| of these, those that were tried {where}, and hold there | {held} | {len(others)} |")
    return lines


def vllm_runs(found: dict[str, Any]) -> list[str]:
    """The runs, turn by turn: tokens, those from the cache, states and scores apart."""
    lines = [
        "| run | tokens | from the cache | missing | wrong | states apart (most, mean) | scores apart | firing |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, words in _RUNS.items():
        part = found["parts"]["v2"].get(name) or found["parts"]["v1"].get(name, {})
        for i, turn in enumerate(part.get("turns", ())):
            asked = turn.get("asked", "again" * i)
            lines.append(
                f"| {words}{f', {asked}' * bool(asked)} | {turn['tokens']:,} | {turn['cached']:,} | {turn['missing']} |"
                f" {turn['wrong']} | {turn['state_rel_l2_max']:.1e}, {turn['state_rel_l2_mean']:.1e} |"
                f" {turn['score_max_difference_same_states']:.1e} | {turn['fired_flips_other_engine']} of"
                f" {turn['fired_in_either']:,} |"
            )
    return lines


def vllm_schedule(found: dict[str, Any]) -> list[str]:
    """What the schedule did, in a sentence."""
    part = found["parts"]["v2"]["schedule"]
    counts = part["counts"]
    return [
        f"{counts['requests']} requests, {counts['aborted']} of them aborted, {counts['several']} with three answers,"
        f" {counted(int(part['preemptions']), 'preemption')}: of {part['tokens']:,} tokens {part['seen']:,} have"
        f" scores, {part['cached_shown']:,} of these from the prefix cache, {part['last']} were the last of their"
        " answers,"
        f" {part['wrong']} are wrong and {part['missing']} missing. {part['flips']} of {part['fired']:,} (token, probe)"
        f" pairs that fire do so in one alone; scores are at most {part['score_max_difference']:.1e} apart."
    ]


def vllm_soak(found: dict[str, Any]) -> list[str]:
    """What the soak did, in a sentence."""
    parts = found["parts"]["v1"]
    part = parts["soak"]
    counts, grown, alone = part["counts"], part["grown_mb"], parts.get("plain_soak")
    beside = ""
    if alone is not None:
        worker, client = (alone["grown_mb"][name] for name in ("worker", "client"))
        beside = f"; vLLM alone, asked the same, grew by {worker:.1f} and {client:.1f}"
    return [
        f"{counts['requests']:,} requests, {counts['aborted']} of them aborted, {part['preemptions']:.0f} preemptions:"
        f" of {counts['tokens']:,} tokens {counts['seen']:,} have scores, {counts['cached']:,} came from the prefix"
        f" cache without any, {counts['last']:,} were the last of their answers, and {counts['missing']} are missing."
        f" Over its second half the worker grew by {grown['worker']:.1f} MB, the client by"
        f" {grown['client']:.1f}{beside}."
    ]
