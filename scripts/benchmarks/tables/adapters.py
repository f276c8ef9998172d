"""Tables of docs/bem-rows.md."""

from __future__ import annotations

from typing import Any


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


def forms(found: dict[str, Any]) -> list[str]:
    """Forms of an update on real texts: nats a token, what routing does, what each costs, and the gates that failed."""
    lines = [
        "| learns | nats a token | saved beside the LoRA (95 %) | frozen | shuffled | operations a token | forward,"
        " over the LoRA | not passed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    judged = {verdict["method"]: verdict for verdict in found["verdicts"]}
    for method, cost in found["costs"].items():
        rows = [row for row in found["rows"] if row["method"] == method]
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


BEM_WORDS = {
    "latency_over_lora_pct": ("a forward of the routed adapter, over an unmerged LoRA's", " %"),
    "memory_over_lora_pct": ("its highest memory, over the LoRA's", " %"),
    "telemetry_pct": ("the same with its routing recorded, over without", " %"),
    "cached_vs_full_max": ("logits in fp32 with a cache against one forward, largest difference", ""),
    "code_reuse_rate": ("chunk codes used again", ""),
}  # fmt: skip


def costs(found: dict[str, Any]) -> list[str]:
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


def grid(found: dict[str, Any]) -> list[str]:
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
