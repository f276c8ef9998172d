"""The tables of the pages in docs/, from the result files; the tests compare them.

python scripts/benchmarks/figures.py docs/benchmarks/cpu.json          # prints them
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from figure_words import JUDGED, reason_of
from kernel_figures import kernel_resources, kernel_summary
from memory_figures import memory_overhead, recall_study, recipe_refusals, recipe_traps, recipes
from operations_figures import operations

WORDS = {
    "score_vs_floor": "scoring 64 probes in one call, over reading the same bytes",
    "worst_cell_vs_best_other": "the same over the fastest other way, in the worst cell of the appendix",
    "step_vs_slow_twin": "a step of a 5,000-probe cascade, the first implementation's way over ours",
    "step_vs_scoring": "the same step over the scoring alone",
    "decode_overhead_pct_high": "added to a decode step of SmolLM2-135M at most: the upper end of the interval",
    "decode_overhead_pct_width": "the width of that interval",
    "prefill_overhead_pct": "added to its prefill, every prompt token scored",
    "step_100k_vs_1k": "a step among 100,000 probes over one among 1,000 that evaluates as many",
    "open_100k_ms": "opening a pack of 100,000 probes",
    "cold_vs_slow_twin": "a step with nothing read before, the first implementation's way over ours",
}
STEPS = {
    "ours: a step": "ours, one level a token, bf16",
    "ours: a step, as many rounds as it takes": "ours, as many levels as it takes, bf16",
    "ours: a step, fp32 weights": "ours, one level a token, fp32",
    "slow twin: a step": "the first implementation's way, fp32",
    "successor: a step": "its successor's way, fp32",
}
UNITS = {
    "decode_overhead_pct_high": " %",
    "decode_overhead_pct_width": " %",
    "prefill_overhead_pct": " %",
    "open_100k_ms": " ms",
}


def claims(found: dict[str, Any]) -> list[str]:
    """What is measured, the figure, the bar."""
    lines = ["| | measured | bar |", "|---|---|---|"]
    for name, claim in found["claims"].items():
        unit = UNITS.get(name, "x")
        bar = f"at {claim['kind']} {claim['bar']:g}{unit}"
        judged = JUDGED[claim["holds"]]
        between = f" ({claim['low']:.2f} to {claim['high']:.2f})" if "low" in claim else ""
        lines.append(f"| {WORDS[name]} | {claim['value']:.2f}{unit}{between} | {bar}{judged} |")
    return lines


def host(found: dict[str, Any]) -> list[str]:
    """Bare against watched, by pack."""
    lines = ["| pack | what | bare | watching adds | 95 % interval | inside our hooks |", "|---|---|---|---|---|---|"]
    for row in found["rows"]:
        if "overhead_pct" in row:
            what = "a decode step" if row["part"] == "decode" else f"prefill of {row['n_tokens']} tokens"
            low, high = row["interval_pct"]
            lines.append(
                f"| `{row['pack']}` | {what} | {row['host_ms']:.1f} ms | {row['overhead_pct']:+.1f} % |"
                f" {low:+.1f} to {high:+.1f} % | {row['hooks_ms']:.2f} ms |"
            )
    return lines


def scale(found: dict[str, Any]) -> list[str]:
    """What the number of probes costs."""
    parts: dict[int, dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["part"].endswith(" at scale"):
            parts.setdefault(row["n_probes"], {})[row["part"].removesuffix(" at scale")] = row
    more = [name for name in ("step of 64 rows", "step of 8 sites") if any(name in rows for rows in parts.values())]
    head = ["probes", "opened in", "a manager made in", "a step", "evaluated in it", *(f"a {name}" for name in more)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for n, rows in parts.items():
        opened, made = (rows[name]["median_us"] / 1e3 for name in ("open", "manager"))
        step = rows["step"]
        cells = [
            f"{n:,}",
            f"{opened:.0f} ms",
            f"{made:.0f} ms",
            f"{step['median_us']:.0f} µs",
            f"{step['evaluated']:.0f}",
        ]
        cells += [f"{rows[name]['median_us']:,.0f} µs" if name in rows else "" for name in more]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def scale_memory(found: dict[str, Any]) -> list[str]:
    """What a step keeps and takes of memory, by the number of probes."""
    lines = ["| probes | a row keeps | a token's scores | a step takes at most |", "|---|---|---|---|"]
    for row in found["rows"]:
        if row["part"] == "step at scale":
            kept, scores, most = (f"{row[f'{name}_bytes']:,} bytes" for name in ("row", "token", "peak"))
            lines.append(f"| {row['n_probes']:,} | {kept} | {scores} | {most} |")
    return lines


def scale_rules(found: dict[str, Any]) -> list[str]:
    """What rules cost, by their number."""
    rows = [row for row in found["rows"] if row["part"] == "rules at scale"]
    head = " | ".join(f"{row['n_rules']:,}" for row in rows)
    cells = " | ".join(f"{row['median_us']:,.0f} µs" for row in rows)
    return [f"| rules | {head} |", "|---" * (len(rows) + 1) + "|", f"| asked of a token | {cells} |"]


def twins(found: dict[str, Any]) -> list[str]:
    """A step of ours beside those of the first implementation and its successor."""
    lines = ["| a step | evaluated | takes | over ours | 95 % interval |", "|---|---|---|---|---|"]
    for row in found["rows"]:
        if row["part"] == "step" and row["method"] in STEPS:
            low, high = row["ratio_to_ours_interval"]
            lines.append(
                f"| {STEPS[row['method']]} | {row['evaluated']:.0f} | {row['median_us'] / 1e3:.2f} ms |"
                f" {row['ratio_to_ours']:.2f}x | {low:.2f} to {high:.2f} |"
            )
    return lines


def paging(found: dict[str, Any]) -> list[str]:
    """A pack larger than the memory of its process: each way of watching."""
    lines = [
        "| | a token, median | 95th percentile | read from the disk a token | evaluated | late |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['way']} | {row['step_ms']:.1f} ms | {row['step_p95_ms']:.1f} ms |"
            f" {row['read_mb_per_step']:.2f} MB | {row['evaluated_per_token']:.0f} | {row['late_per_token']:.1f} |"
        )
    return lines


def first_use(found: dict[str, Any]) -> list[str]:
    """What a process waits for before its first scores."""
    lines = ["| | imports | a manager | its first step |", "|---|---|---|---|"]
    for row in found["rows"]:
        if row["part"] == "first use":
            lines.append(
                f"| {row['method']} | {row['import_s']:.1f} s | {row['manager_s']:.1f} s |"
                f" {1e3 * row['first_step_s']:.1f} ms |"
            )
    return lines


def settings(found: dict[str, Any]) -> list[str]:
    """What settings cost and find, by pack."""
    lines = ["| pack | settings | evaluated a token | dropped | µs a step | found |", "|---|---|---|---|---|---|"]
    for pack, said in found["packs"].items():
        for trial in said["trials"]:
            changes = ", ".join(f"`{name}={value}`" for name, value in trial["changes"].items())
            lines.append(
                f"| `{pack}` | {changes or 'as the pack recommends'} | {trial['n_evaluated']:.1f} |"
                f" {trial['n_dropped']:.1f} | {trial['step_us']:,.0f} | {100 * trial['found']:.1f} % |"
            )
    return lines


def grid(found: dict[str, Any]) -> list[str]:
    """Each cell: the floor, ours, the fastest other way, and the loop."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["part"] == "scoring":
            cells.setdefault((row["hidden"], row["dtype"], row["batch"], row["n_probes"]), {})[row["method"]] = row
    lines = [
        "| D | dtype | states | probes | read the bytes | ours | fastest other way | module loop |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (hidden, dtype, batch, n), rows in cells.items():
        others = {name: row["median_us"] for name, row in rows.items() if not name.startswith(("ours", "floor"))}
        best = min(others, key=lambda name: others[name])
        floor, ours, loop = (
            rows[name]["median_us"]
            for name in ("floor: read the same bytes", "ours (numba)", "module loop, .item() each")
        )
        lines.append(
            f"| {hidden} | {dtype} | {batch} | {n} | {floor:,.0f} | {ours:,.0f} | {others[best]:,.0f} ({best}) |"
            f" {loop:,.0f} |"
        )
    return lines


def forms(found: dict[str, Any]) -> list[str]:
    """Each form of an update on its own task, beside the others that were tried there: means over seeds."""
    lines = [
        "| planted | learns | removed | with codes frozen | shuffled | trainable numbers | operations a token |",
        "|---|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        cells.setdefault((row["task"], row["method"]), []).append(row)
    for (task, method), rows in cells.items():
        told = [
            f"{sum(row[key] for row in rows) / len(rows):.3f}" if key in rows[0] else ""
            for key in ("removed", "removed_frozen", "removed_shuffled")
        ]
        lines.append(
            f"| {task} | {method} | {' | '.join(told)} | {rows[0]['n_trainable']:,} | {rows[0]['flops_per_token']:,} |"
        )
    return lines


def reason(found: dict[str, Any]) -> list[str]:
    """Nats a token of each adapter on texts of domains that conflict: means over seeds, and by how much each is over
    the routed one.
    """
    lines = [
        "| the line before says it by | learns | definition | kinds | classes | all | over the routed (95 %) | p |"
        " trainable numbers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["summary"]:
        nats, over = row["nats"], row.get("over_routed")
        shown = " | ".join(f"{nats[domain]:.3f}" for domain in ("definition", "kinds", "above", "all"))
        between = "" if over is None else f"{over['mean']:+.3f} ({over['low']:+.3f} to {over['high']:+.3f})"
        p = "" if over is None else f"{over['p']:.3f}"
        headers = {"marks": "a mark", "words": "words"}[row["headers"]]
        lines.append(f"| {headers} | {row['method']} | {shown} | {between} | {p} | {row['n_trainable']:,} |")
    return lines


def demo_forms(found: dict[str, Any]) -> list[str]:
    """Forms of an update on real texts: nats a token, what routing does, what each costs, and the gates that failed."""
    lines = [
        "| learns | nats a token | saved beside the LoRA (95 %) | frozen | shuffled | operations a token | forward,"
        " over the LoRA | not passed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    judged = {verdict["method"]: verdict for verdict in found["demo"]["verdicts"]}
    for method, cost in found["demo"]["costs"].items():
        rows = [row for row in found["demo"]["rows"] if row["method"] == method]
        means = [
            f"{sum(row[key]['all'] for row in rows) / len(rows):.3f}" if key in rows[0] else ""
            for key in ("held_out", "held_out_frozen", "held_out_shuffled")
        ]
        one = judged.get(method)
        saved = "" if one is None else f"{one['saved_nats']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f})"
        gates = {} if one is None else one["gates"]
        not_passed = ", ".join(f"{name} ({verdict})" for name, (verdict, _) in gates.items() if verdict != "passed")
        ratio = f"{cost['prefill']['ratio'][0]:.2f}"
        lines.append(
            f"| {method} | {means[0]} | {saved} | {means[1]} | {means[2]} | {cost['operations']:,} | {ratio} |"
            f" {not_passed} |"
        )
    return lines


def launches(found: dict[str, Any]) -> list[str]:
    """Of each form: what a GPU would launch in a step for updates and for limits, what torch.compile makes of an
    update, and the bytes that an update of a prompt moves, beside those of one fused kernel.
    """
    lines = [
        "| form | launches of a step, updates | limits | waits | an update, eager | by torch.compile | MB of a prompt |"
        " in one kernel |",
        "|---|---|---|---|---|---|---|---|",
    ]
    steps, prompts = ([row for row in found["rows"] if (row["rows"] > 1) == many] for many in (False, True))
    for step, prompt in zip(steps, prompts, strict=True):
        compiled = sum(prompt["compiled"].values())
        lines.append(
            f"| {step['form']} | {step['update_launches']:,} | {step['limit_launches']:,} | {step['limit_waits']} |"
            f" {prompt['eager_at_a_site']} | {compiled} | {prompt['update_bytes'] / 1e6:,.0f} |"
            f" {prompt['fused_bytes'] / 1e6:,.0f} |"
        )
    return lines


def rules(found: dict[str, Any]) -> list[str]:
    """Of each pack, score rule and way of expanding: mean recall of a document's firing probes with its interval, and
    share of the probes active, on each text.
    """
    texts = list(found["texts"])
    lines = ["| pack | scores | expand threshold | " + " | ".join(texts) + " |", "|---|---|---|" + "---|" * len(texts)]
    cells: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["text"] in texts:
            cells.setdefault((row["pack"], row["score_rule"], row["rule"]), {})[row["text"]] = row
    for (pack, rule, how), by_text in cells.items():
        told = [
            f"{row['document_recall']:.3f} ({row['document_low']:.3f} to {row['document_high']:.3f}) at"
            f" {row['share_active']:.1%}"
            for row in (by_text[text] for text in texts)
        ]
        lines.append(f"| `{pack}` | {rule} | {how} | " + " | ".join(told) + " |")
    return lines


def retained(found: dict[str, Any]) -> list[str]:
    """Step by step over generated text: what `keep_top_k` and `max_rounds` do to the recall and the share active."""
    rows = [row for row in found["rows"] if "keep_top_k" in row]
    keeps = sorted({row["keep_top_k"] for row in rows})
    lines = [
        "| pack | scores | expand threshold | rounds | " + " | ".join(f"keep_top_k {k}" for k in keeps) + " |",
        "|---|---|---|---|" + "---|" * len(keeps),
    ]
    cells: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(
            (row["pack"], row["score_rule"], row["rule"], "to the fixed point" if row["max_rounds"] is None else "one"),
            {},
        )[row["keep_top_k"]] = row
    for (pack, rule, how, rounds), by_keep in cells.items():
        lines.append(
            f"| `{pack}` | {rule} | {how} | {rounds} | "
            + " | ".join(f"{by_keep[k]['document_recall']:.3f} at {by_keep[k]['share_active']:.1%}" for k in keeps)
            + " |"
        )
    return lines


def mails(found: dict[str, Any]) -> list[str]:
    """Each aggregator and baseline: by token and by document, AUROC and rates at thresholds calibrated to 1 %."""
    lines = [
        "| method | by token: AUROC | caught | false alarms | by mail: AUROC | caught | false alarms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        told = []
        for unit in ("token", "document"):
            part = row[unit]
            told += (
                ["", "", ""]
                if part is None
                else [
                    f"{part['auroc']:.3f}",
                    *(f"{part[k]['rate']:.1%} ({part[k]['low']:.1%} to {part[k]['high']:.1%})" for k in ("tpr", "fpr")),
                ]
            )
        lines.append(f"| {row['method']} | " + " | ".join(told) + " |")
    return lines


def corpus(found: dict[str, Any]) -> list[str]:
    """What an analysis costs over the bare host."""
    lines = [
        "| pack | bare prefill | analysis | added | analysis of a host that is not stopped early | added |",
        "|---|---|---|---|---|---|",
    ]
    for name, pack in found["packs"].items():
        rate, cells = pack["tokens_per_second"], [f"`{name}`"]
        cells.append(f"{rate['bare']:,} tokens/s")
        for way, cost in (("analysis", "overhead"), ("whole_host", "overhead_whole_host")):
            low, high = pack[f"{cost}_interval"]
            cells += [f"{rate[way]:,} tokens/s", f"{pack[f'{cost}_pct']:+.1f} % ({low:+.1f} to {high:+.1f})"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def bem_distilled(found: dict[str, Any]) -> list[str]:
    """What LoRAs distilled from routed adapters keep: mean held-out loss by method and rank, and by how much it is over
    that of LoRAs trained anew, seed by seed.
    """
    lines = ["| | rank | held-out nats | over a LoRA trained anew (95 % interval) |", "|---|---|---|---|"]
    for row in found["distilled"]["summary"]:
        over = row["over_lora"]
        told = "" if over is None else f"{over['mean']:+.3f} ({over['low']:+.3f} to {over['high']:+.3f})"
        lines.append(f"| {row['method']} | {row['rank']} | {row['mean_held_out']:.3f} | {told} |")
    return lines


BEM_WORDS = {
    "latency_over_lora_pct": ("a forward of the routed adapter, over an unmerged LoRA's", " %"),
    "memory_over_lora_pct": ("its highest memory, over the LoRA's", " %"),
    "telemetry_pct": ("the same with its routing recorded, over without", " %"),
    "cached_vs_full_max": ("logits in fp32 with a cache against one forward, largest difference", ""),
    "code_reuse_rate": ("chunk codes used again", ""),
}  # fmt: skip


def bem_claims(found: dict[str, Any]) -> list[str]:
    """What is measured of routed adapters, the worst of the grid, the bar."""
    lines = ["| | worst of the grid | bar |", "|---|---|---|"]
    for name, claim in found["claims"].items():
        words, unit = BEM_WORDS[name]
        bar = f"at {claim['kind']} {claim['bar']:g}{unit}{'' if claim['holds'] else ', **missed**'}"
        if name == "cached_vs_full_max" and claim["bar"] > 1e-5:
            bar = (
                f"at most 1e-05, **missed** by the bare host too; at {claim['kind']} 1.5 times as much as it,"
                f" {claim['bar']:.3g}{'' if claim['holds'] else ', **missed**'}"
            )
        lines.append(f"| {words} | {claim['value']:.3g}{unit} | {bar} |")
    return lines


def bem_grid(found: dict[str, Any]) -> list[str]:
    """Each cell: how far predictions are moved, milliseconds and tokens a second, and highest memory, by method."""
    lines = [
        "| rows x tokens | what | bare | LoRA | routed adapter | over the LoRA | with telemetry | over without |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        cells.setdefault((row["batch"], row["length"], row["part"]), {})[row["method"]] = row
    bem, beside = "bem, eager", "bem, eager, telemetry"
    for (batch, length, part), rows in cells.items():
        if part == "memory":
            told = [f"{rows[name]['peak_bytes'] / 1e9:.2f} GB" for name in ("bare", "lora", bem)]
            lines.append(
                f"| {batch} x {length} | highest memory | "
                + " | ".join(told)
                + f" | {rows[bem]['over_lora_pct']:+.1f} % | | |"
            )
        elif part == "difference":
            told = [f"{rows[name]['kl_to_bare']:.4f} nats, {rows[name]['same_top']:.1%}" for name in ("lora", bem)]
            lines.append(
                f"| {batch} x {length} | KL to the bare host, same likeliest token | | " + " | ".join(told) + " | | | |"
            )
        else:
            told = [
                f"{rows[name]['median_ms']:,.0f} ms ({rows[name]['tokens_per_second']:,}/s)"
                for name in ("bare", "lora", bem)
            ]
            watched = f"{rows[beside]['median_ms']:,.0f} ms | {rows[beside][f'over_{bem}_pct']:+.1f} %"
            lines.append(
                f"| {batch} x {length} | {'prefill' if part == 'prefill' else 'a step'} | "
                + " | ".join(told)
                + f" | {rows[bem]['over_lora_pct']:+.1f} % | {watched} |"
            )
    return lines


def shown(found: dict[str, Any]) -> list[str]:
    """What the linear pack fires at by its recommended thresholds, by kind of text, and by those of the other set."""
    lines = [
        "| text | fires a noun | right | fires a new noun | right | recall | fires another token | evaluated |"
        " by rate: fires a new noun | right |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, text in next(iter(found["packs"].values()))["texts"].items():
        at, loose = text["by_strength"][0], text["by_rate"]
        lines.append(
            f"| {name} | {at['fires_per_noun']:.2f} | {at['right']:.3f} | {at['fires_per_held_out_noun']:.2f} |"
            f" {at['right_held_out']:.3f} | {at['recall_held_out']:.2f} | {at['fires_per_other']:.4f} |"
            f" {text['share_evaluated']['precision_0.9']:.1%} | {loose['fires_per_held_out_noun']:.2f} |"
            f" {loose['right_held_out']:.3f} |"
        )
    return lines


def shown_claims(found: dict[str, Any]) -> list[str]:
    """The claims of what is shown, with their aims."""
    aims = {
        "precision_news_0_7": ("news, .7 fires a new noun: right", "at least .95", 0.95, 1),
        "precision_news_1_5": ("news, 1.5 fires a new noun: right", "at least .90", 0.9, 1),
        "precision_unseen_source_0_7": ("the host's answers, .7 fires a new noun: right", "at least .90", 0.9, 1),
        "precision_recommended": ("by the recommended set, new nouns of all prose: right", "at least .90", 0.9, 1),
        "fires_per_other_token": ("by the same, fires a token of no noun, prose", "at most .02", 0.02, -1),
        "fires_per_code_token": ("by the same, fires a token of code, JSON and tables", "at most .02", 0.02, -1),
    }
    lines = ["| | measured | aim |", "|---|---|---|"]
    for key, (words, aim, bar, sign) in aims.items():
        value = found["claims"][key]
        missed = "" if sign * (value - bar) >= 0 else ", **missed**"
        lines.append(f"| {words} | {value:.3f} | {aim}{missed} |")
    return lines


def wrapped(lines: list[str]) -> str:
    """Markdown of these lines, each a paragraph, an item or a row of a table: all but rows within 120 columns."""
    broken: list[str] = []
    for line in lines:
        item = re.match(r"(- |\d+\. )?", line)[0]  # type: ignore[index]
        rows = [line] if line.startswith("|") else textwrap.wrap(line, 120, subsequent_indent=" " * len(item))
        broken += rows or [""]
    return "\n".join(broken)


def architectures(found: dict[str, Any]) -> list[str]:
    """By architecture: in which modes it is exact, scored as it runs, refused, or fails by itself."""
    modes, rows = found["modes"], found["architectures"]
    built = {name: row["modes"] for name, row in rows.items() if "modes" in row}
    refused = {name: row["refused"] for name, row in rows.items() if "refused" in row}
    missing = {
        name: row.get("not built", row.get("error", ""))
        for name, row in rows.items()
        if name not in built and name not in refused
    }
    count = Counter(entry["outcome"] for row in built.values() for entry in row.values())
    lines = [
        (
            f"{len(rows)} architectures: {len(built)} hosts run in {len(modes)} modes each ({', '.join(modes)}),"
            f" {len(refused)} refused when attached, {len(missing)} not built. Of {sum(count.values()):,} pairs"
            f" {count['exact']:,} are exact, {count['as run']} are scored as the host ran, {count['refused']} are"
            f" refused, in {count['host fails']} the bare host fails by itself, {count['wrong']} are wrong."
        ),
        "",
        "| architecture | exact | as run | refused | the host fails |",
        "|---|---|---|---|---|",
    ]
    for name, row in built.items():
        cells = []
        for outcome in ("exact", "as run", "refused", "host fails"):
            those = [mode for mode in modes if row.get(mode, {}).get("outcome") == outcome]
            cells.append("all" if those == modes else "; ".join(those))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        (
            "Refused when attached, since what these layers give is not one hidden state a token, or the layers are not"
            " found:"
        ),
        "",
    ]
    lines += [f"- {name}: {reason_of(reason)}" for name, reason in refused.items()]
    lines += ["", "Not built from a small configuration, by transformers' own error:", ""]
    lines += [f"- {name}: {reason_of(reason)}" for name, reason in missing.items()]
    return lines


def training(found: dict[str, Any]) -> list[str]:
    """What the trained probes of each case are, beside what needs no probe, and what they took."""
    lines = [
        "| case | concept | probe | words | input embedding | mean state | masked | shuffled | TPR at 1 % |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, case in found["cases"].items():
        if name.endswith("again"):
            continue
        for id, concept in case["concepts"].items():
            rate = concept["tpr_at_fpr"]["0.01"]
            cells = [concept["auroc"], *(concept["baselines"][key] for key in ("words", "embedding", "pooled"))]
            cells += [concept["without_giveaways"], concept["shuffled"]]
            areas = " | ".join("–" if area is None else f"{area:.3f}" for area in cells)
            lines.append(f"| {name} | {id} | {areas} | {'too few' if rate is None else format(rate['rate'], '.2f')} |")
    return lines


def training_costs(found: dict[str, Any]) -> list[str]:
    """What each case took, and what was taken."""
    lines = [
        "| case | texts | kind | site | minutes | GB of memory | GB of states |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for name, case in found["cases"].items():
        n_texts = sum(part["texts"] for key, part in case["examples"].items() if "background" not in key)
        sites = ", ".join(sorted({concept["site"] for concept in case["concepts"].values()}))
        lines.append(
            f"| {name} | {n_texts:,} | {case['method']} | {sites} | {case['minutes']:.1f} | {case['gigabytes']:.1f} |"
            f" {case['states_gigabytes']:.1f} |"
        )
    return lines


def drift_doubled(found: dict[str, Any]) -> list[str]:
    """Return the rows of how soon a doubled base rate is found."""
    return [
        f"| {row['rate']:.0%} | {row['n_reference']:,} | {row['found_within_1000']:.1%} | {_until(row['median'])} |"
        f" {_until(row['p95'])} |"
        for row in found["doubled"]
    ]


def _until(n_requests: float) -> str:
    return "over 5,000" if n_requests >= 5000 else f"{n_requests:,.0f}"


TABLES = {
    "drift.json": (drift_doubled,),
    "host_recipes.json": (recipes, recipe_traps, recipe_refusals),
    "memory_overhead.json": (memory_overhead,),
    "operations.json": (operations,),
    "ltm_recall.json": (recall_study,),
    "training.json": (training, training_costs),
    "bem.json": (bem_claims, bem_grid),
    "cpu.json": (claims, host, grid, scale, scale_memory, scale_rules, twins, first_use),
    "paging.json": (paging,),
    "quality.json": (rules, retained),
    "settings.json": (settings,),
    "mails.json": (mails,),
    "corpus.json": (corpus,),
    "architectures.json": (architectures,),
    "bem_learns.json": (bem_distilled,),
    "perf_track_planted.json": (forms,),
    "perf_track.json": (demo_forms,),
    "bem_reason.json": (reason,),
    "form_launches.json": (launches,),
    "kernel_resources.json": (kernel_resources, kernel_summary),
    "shown.json": [shown, shown_claims],
}


def main() -> None:
    """Print every table of a result file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("path", nargs="?", type=Path, metavar="FILE", help="such as docs/benchmarks/cpu.json")
    arguments = parser.parse_args()
    path = arguments.path
    if path is None or path.name not in TABLES:
        parser.error(f"no table is made from {path}; there are some of {', '.join(sorted(TABLES))}")
    found = json.loads(path.read_text(encoding="utf-8"))
    with suppress(BrokenPipeError):  # a reader such as `head` that has seen enough
        for table in TABLES[path.name]:
            print("\n".join(table(found)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
