"""The command line.

    probemon watch demo probes/wordnet-smollm2-135m --prompt "Tell me about whales."
    probemon watch demo probes/wordnet-smollm2-135m --pack probes/wordnet-smollm2-135m-mlp
    probemon analyze demo probes/wordnet-smollm2-135m mails.jsonl --out scores/
    probemon inspect probes/wordnet-smollm2-135m

Bad input ends with one line on standard error and exit status 2.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from probemon.cli import signals
from probemon.cli.analyze import analyze
from probemon.cli.calibrate import calibrate
from probemon.cli.common import MORE_PACKS, load_aloud, use_threads
from probemon.cli.diff import diff
from probemon.cli.importing import importing
from probemon.cli.packs import hierarchy
from probemon.cli.packs import pack as packs
from probemon.cli.report import report
from probemon.cli.routing import routing
from probemon.cli.terminal import answer, border, say, terminal
from probemon.errors import ConfigError, ProbemonError

if TYPE_CHECKING:
    from probemon.packs.pack import ProbePack

PROMPT = "Tell me about whales and the ships that hunted them."

# What `inspect` shows of a pack's quality; `--json` has all of it.
_PER_LEVEL = ("auroc_median", "auroc_p10", "auroc_siblings_median", "auroc_examples_median")
_OVERALL = ("n_test", "firing_recall_exact", "share_evaluated_exact", "false_positive_rate", "precision_at_threshold")

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (analyze, report, diff, calibrate, routing, hierarchy):
    app.command()(command)
app.add_typer(importing, name="import")
app.add_typer(packs, name="pack")


@app.callback()
def callback() -> None:
    """Watch a language model from the inside: concept probes, in a hierarchy, at every token."""


@app.command()
def watch(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model folder, a hub name, or 'demo' for the bundled SmolLM2-135M-Instruct."
        ),
    ],
    pack: Annotated[str, typer.Argument(metavar="PACK", help="A probe pack: a folder, or a hub name.")],
    more_packs: Annotated[list[str] | None, typer.Option("--pack", metavar="PACK", help=MORE_PACKS)] = None,
    prompt: Annotated[str, typer.Option(help="What to say to the model.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 48,
    plain: Annotated[
        bool, typer.Option("--plain", help="One line a token, for pipes (the default where there is no terminal).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
    audit_rate: Annotated[
        float,
        typer.Option(
            help="Share of the tokens on which every probe is evaluated too, to count what the descent missed."
        ),
    ] = 0.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure the overhead: bare and watched, alternating.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where model and probes run: cpu, cuda, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads for the model; 0: what torch chooses.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a model that is not the one the pack was made for.")
    ] = False,
) -> None:
    """Generate from MODEL and show the concepts of PACK token by token; with --pack those of several packs at once."""
    if not prompt.strip():
        raise ConfigError("the prompt is empty: say something with --prompt")
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {max_new_tokens}: give 1 or more")
    from probemon.engine.kernels import check_device
    from probemon.packs.group import open_packs

    check_device(device)
    use_threads(threads)
    opened = open_packs([pack, *(more_packs or ())])  # first: it takes milliseconds, the model seconds
    aside = terminal(error=True)
    host, tokenizer = load_aloud(model, device)
    from probemon.cli.live_view import LiveView, PlainView, View, summary
    from probemon.manager import DynamicProbeManager
    from probemon.monitor.overhead import overhead
    from probemon.monitor.result import without_thresholds
    from probemon.monitor.stream import encode

    manager = DynamicProbeManager(opened, device=device, audit_rate=audit_rate)
    console = terminal(soft_wrap=False)
    messages: Any = [{"role": "user", "content": prompt}] if getattr(tokenizer, "chat_template", None) else prompt
    view: View
    if plain or not console.is_terminal:
        view = PlainView(console)
        console.print(f"{model} watched by {opened.name}: {opened.n_probes} probes; prompt: {prompt}")
    else:
        view = LiveView(console, title=f"{model} watched by {opened.name}")
    result = None
    with view:
        for event in manager.stream(
            host, tokenizer, messages, strict=strict, max_new_tokens=max_new_tokens, do_sample=False
        ):
            view.show(event)
            result = event.result or result
    assert result is not None
    cost = None
    if measure:
        inputs = {name: value.to(host.device) for name, value in encode(tokenizer, messages).items()}
        with aside.status("measuring the overhead") if aside.is_terminal else nullcontext() as status:
            cost = overhead(manager, host, inputs, progress=lambda line: status.update(line) if status else None)
    generated = result.phase == 1
    cover = result.coverage
    seen = cover.seen
    per_token = float(cover.evaluated[seen].mean()), float(cover.active[seen].mean())
    lines = [
        (
            f"{len(result)} tokens ({int(generated.sum())} generated), {cover.n_unseen} unseen (the last one generated"
            " is never run by the host)"
        ),
        (
            f"{opened.n_probes} probes, {per_token[1]:.0f} active and {per_token[0]:.0f} evaluated a token,"
            f" {int(cover.dropped.sum())} dropped"
        ),
        f"kernel: {manager.impl} ({manager.impl_why})",
        f"strategy: {manager.strategy.step} for a token, {manager.strategy.batch} for a prompt: {manager.strategy.why}",
    ]
    if audit_rate:
        lines.append(f"audit: {result.audit}")
    if cost is not None:
        lines.append(
            f"host {cost.host_ms:.1f} ms a token bare, {cost.watched_ms:.1f} watched ({cost.overhead_pct:+.1f} %;"
            f" {cost.monitor_ms:.2f} ms inside our hooks; medians of {cost.n_steps} steps each, alternating)"
        )
    n_mute = int(opened.alert_threshold.isnan().sum())
    if n_mute < opened.n_probes:
        lines.append(
            "A concept shown with an alert threshold is over it; false alarms are expected, at the rate the pack's card"
            " states."
        )
    ranks = without_thresholds(opened)
    if ranks.any():
        lines.append(
            f"{int(ranks.sum())} of {opened.n_probes} probes are of packs without any alert threshold: their concepts"
            " are shown by rank, which does not say that they are there. probemon calibrate sets thresholds"
        )
    n_mute -= int(ranks.sum())
    if n_mute:  # their silence says nothing
        lines.append(
            f"{n_mute} of {opened.n_probes} probes have no alert threshold, so that they are never shown, whatever they"
            " score: probemon calibrate sets one"
        )
    summary(console, result, lines)
    if as_json:
        answer(
            {
                "tokens": len(result),
                "generated_tokens": int(generated.sum()),
                "host_ms_per_token": cost and round(cost.host_ms, 3),
                "monitor_ms_per_token": cost and round(cost.monitor_ms, 3),
                "watched_ms_per_token": cost and round(cost.watched_ms, 3),
                "overhead_pct": cost and round(cost.overhead_pct, 2),
                "probes_total": opened.n_probes,
                "probes_evaluated_per_token": round(per_token[0], 2),
                "probes_active_per_token": round(per_token[1], 2),
                "dropped": int(cover.dropped.sum()),
                "unseen_tokens": cover.n_unseen,
                "audit": result.audit.as_dict() if audit_rate else None,
                "probes_without_threshold": int(opened.alert_threshold.isnan().sum()),
                "probes_ranked": int(ranks.sum()),
                "strategy": {"token": manager.strategy.step, "prompt": manager.strategy.batch},
            }
        )


@app.command()
def inspect(
    pack: Annotated[str, typer.Argument(metavar="PACK", help="A probe pack: a folder, or a hub name.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what is in PACK, how good it is, and whether it is whole (every hash, every weight, the golden scores)."""
    from probemon.packs.pack import ProbePack

    if Path(pack).is_file():
        raise ConfigError(f"{pack} is a file: give the folder of the pack, {Path(pack).parent}")
    opened = ProbePack.from_pretrained(pack, verify=True)
    worst = opened.golden_error
    manifest = opened.manifest
    about = {
        "name": opened.name,
        "directory": str(opened.directory),
        "licence": manifest["licence"],
        "host": manifest["host"],
        "n_probes": opened.n_probes,
        "architecture": str(opened.architecture),
        "dtype": manifest.get("dtype"),
        "weight_bytes": opened.weight_bytes(),
        "score_rule": opened.score_rule,
        "inputs": manifest["inputs"],
        "counts_per_level": manifest.get("counts_per_level"),
        "recommended": opened.recommended,
        "aggregated_thresholds": {
            name: int((~opened.thresholds_for(name).isnan()).sum()) for name in opened.aggregated
        },
        "calibrations": (manifest.get("provenance") or {}).get("calibrations") or [],
        "n_alert_thresholds": int((~opened.alert_threshold.isnan()).sum()),
        "quality": manifest.get("quality") or None,
        "whole": True,
        "golden_states": 0 if opened.golden_hidden is None else len(opened.golden_hidden),
        "golden_error": worst,
    }
    if as_json:
        answer(about)
        return
    host = manifest["host"]
    say(
        f"{opened.name}  {opened.n_probes} probes, {opened.architecture}, {about['dtype']},"
        f" {opened.weight_bytes() / 1e6:.2f} MB, {opened.score_rule} scores"
    )
    size = (
        f"{host['n_layers']} layers, " if host.get("n_layers") is not None else ""
    ) + f"hidden size {opened.architecture.hidden_size}"
    say(
        f"for {host.get('model_id') or 'a host that is not stated'} ({size}), read at {', '.join(opened.sites)};"
        f" {manifest['licence']}"
    )
    _levels(opened)
    stated = manifest.get("quality") or {}
    overall = {k: stated[k] for k in (*_PER_LEVEL, *_OVERALL) if isinstance(stated.get(k), (int, float))}
    say(
        "quality: "
        + (
            ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in overall.items())
            or "not stated"
        )
    )
    for entry in about["calibrations"]:
        what = (
            f"alerts on {entry['aggregator']} of {entry['n_watched']} concepts to {entry['fpr']:g} by {entry['unit']}"
            if "aggregator" in entry
            else "no alerts"
        )
        reach = f"; expansion to a recall of {entry['expansion']['recall']:g}" if entry.get("expansion") else ""
        say(f"calibrated from {entry['source']['name']}: {what}{reach}")
    golden = "it has no golden states" if worst is None else f"golden scores replayed within {worst:.1g}"
    say(f"whole: every file has its hash, every weight is finite, {golden}")


@app.command()
def quantize(
    pack: Annotated[str, typer.Argument(metavar="PACK", help="A probe pack: a folder, or a hub name.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Where the int8 copy is written: a folder that is not there yet.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Write an int8 copy of PACK (a scale for each row) and say how far its scores move."""
    from probemon.packs.pack import ProbePack
    from probemon.packs.quantize import quantize as write

    before = ProbePack.from_pretrained(pack)
    after = write(before, out)
    error = after.manifest["quality"]["int8"]
    if as_json:
        answer(
            {
                "directory": str(out),
                "weight_bytes": after.weight_bytes(),
                "source_weight_bytes": before.weight_bytes(),
                **error,
            }
        )
        return
    say(f"{out}: {after.weight_bytes() / 1e6:.2f} MB of weights, {before.weight_bytes() / 1e6:.2f} before")
    say(
        f"on {error['n_states']} {error['states']} states scores move by at most {error['max_score_error']:.2g},"
        f" {error['mean_score_error']:.2g} on average; of {error['n_fired']} that fired, {error['n_fired_changed']}"
        " changed",
    )


def _levels(pack: ProbePack) -> None:
    quality = (pack.manifest.get("quality") or {}).get("per_level") or {}
    names = [key for key in _PER_LEVEL if any(key in level for level in quality.values())]
    table = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title="AUROC on held-out words" if names else None,
        title_justify="left",
    )
    for name in ("level", "probes", *names):
        label = "median" if name == "auroc_median" else name.removeprefix("auroc_").removesuffix("_median")
        table.add_column(label, justify="right", min_width=max(5, len(label)))
    table.add_column("for example", no_wrap=True, overflow="ellipsis", ratio=1)
    for level in np.unique(pack.tree.level).tolist():
        probes = np.flatnonzero(pack.tree.level == level).tolist()
        values = [quality.get(str(level), {}).get(name) for name in names]
        example = ", ".join(pack.concepts[probe]["name"] for probe in probes[:3])
        table.add_row(str(level), str(len(probes)), *("-" if v is None else f"{v:.3f}" for v in values), example)
    terminal().print(table)


def main() -> None:
    """Entry point: errors of ours are one line and exit status 2. What is written passes the border to the terminal
    (`probemon.cli.terminal`).
    """
    signals.install()
    try:
        with border():
            code = _run()
    finally:
        signals.settle()
    sys.exit(signals.received() or code)


def _run() -> int:
    """Run the command that was asked for; its exit status."""
    try:
        code = app(prog_name="probemon", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except ProbemonError as error:
        say(f"probemon: {' '.join(str(error).split())}", error=True)
        return 2
    except BrokenPipeError:  # a closed pipe (`| head`) ends the program, not with a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not hasattr(
            error, "format_message"
        ):  # not typer's own kind: a defect, shown whole, unless it came of a signal
            if not signals.received():
                traceback.print_exc()
            return 1
        context = getattr(error, "ctx", None)  # the command that was used wrongly
        if type(error).__name__ == "NoArgsIsHelpError":  # nothing was asked: the help itself is the message
            say(*error.format_message().split("\n"), error=True)
        else:
            say(
                f"probemon: {' '.join(error.format_message().split())} (see"
                f" {context.command_path if context else 'probemon'} --help)",
                error=True,
            )
        return 2


if __name__ == "__main__":
    main()
