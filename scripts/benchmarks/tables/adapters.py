"""Tables of docs/bem-rows.md."""

from __future__ import annotations

from typing import Any


def commands(found: dict[str, Any]) -> list[str]:
    """What the documented commands made at each seed, beside their LoRA."""
    lines = [
        "| seed | held out, adapter | LoRA | adapter minus LoRA (95 %) | other rows, adapter | LoRA | right style,"
        " adapter | LoRA |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found["seeds"]:
        trained, other, answers = one["train"], one["eval"], one["answers"]
        over = trained["lora"]["adapter_minus_lora"]
        styles = (f"{answers[who]['right_style']} of {answers[who]['prompts']}" for who in ("adapter", "lora"))
        losses = [f"{run[who]['loss']:.4f}" for run in (trained, other) for who in ("held_out", "lora")]
        between = f"{over['difference']:+.4f} ({over['low']:+.4f} to {over['high']:+.4f})"
        cells = (str(one["seed"]), *losses[:2], between, *losses[2:], *styles)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


PAYS_WORDS = {
    "routed": "a routed adapter for all clients",
    "routed, distilled": "the static LoRA of its rank that is nearest",
    "routed, codes of others": "the adapter with another client's codes",
    "lora": "one LoRA for all",
    "each": "one LoRA for each client",
    "routed, upper layers": "a routed adapter for all, last six layers",
    "routed, upper layers, distilled": "the static LoRA of its rank that is nearest",
    "routed, upper layers, codes of others": "the adapter with another client's codes",
    "lora, upper layers": "one LoRA for all, last six layers",
}


def pays(found: dict[str, Any]) -> list[str]:
    """Of each method the chosen setting, its numbers, nats a token and by how much it is over the routed adapter."""
    lines = [
        "| learns | setting that validation chose | settings tried | trainable numbers | nats a token | over the routed"
        " (95 %) |",
        "|---|---|---|---|---|---|",
    ]
    for name, words in PAYS_WORDS.items():
        cells = ["", "", ""]
        if name in found["chosen"]:
            numbers = found["tested"][name][0]["trainable"]
            cells = [_setting(found["chosen"][name]), str(len(found["swept"][name])), f"{numbers:,}"]
        over = [
            f"{difference['mean']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f})"
            for pair, difference in found["over_routed"].items()
            if pair.split(" over ")[0] == name
        ]
        lines.append(f"| {words} | {' | '.join(cells)} | {found['nats'][name]:.3f} | {'; '.join(over[:1])} |")
    return lines


def _setting(arm: dict[str, Any]) -> str:
    layers = f"layers {arm['layers'][0]}-{arm['layers'][-1]}"
    if arm["method"] == "routed":
        return f"{layers}, {', '.join(arm['sites'])}, {arm['level']} codes, rate {arm['lr']:g}"
    return f"{layers}, {len(arm['modules'])} modules, rank {arm['rank']}, rate {arm['lr']:g}"


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
