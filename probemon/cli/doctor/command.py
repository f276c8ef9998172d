"""The command doctor.

probemon doctor demo
probemon doctor MODEL PACK --device cuda --json
probemon doctor MODEL PACK --measure --text mails.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probemon.cli import options as opt
from probemon.cli.common import load_aloud, pack_for, use_threads
from probemon.cli.terminal import answer, plain_table, say, terminal

if TYPE_CHECKING:
    from probemon.monitor.health import Health

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    model: opt.Model,
    pack: opt.PackOfModel = None,
    more_packs: opt.MorePacks = None,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "auto",
    threads: opt.Threads = 0,
    alert_set: opt.AlertSet = None,
    strict: opt.Strict = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure what settings cost and find, and what watching adds.")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="With --measure: documents, the first of which is read."),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Check that MODEL can be watched by PACK here: versions, device, pack, model, whether they fit, the kernel, and a
    short generation whose scores are compared with those of an unwatched one. Says what is wrong, and what to do.

    With --measure, also tries settings on a text: probes evaluated, time, and the share of firing probes found.

    Exit status 1 if something failed, else 0 (there may be warnings).
    """
    packs = [pack_for(model, pack), *(more_packs or ())]
    use_threads(threads)
    from probemon.cli.doctor.examination import Examination
    from probemon.errors import ConfigError
    from probemon.host.loading import check_dtype

    check_dtype(dtype)
    if text is not None and not measure:
        raise ConfigError("--text is for --measure: add it")
    if text is not None:
        from probemon.cli.doctor.measured_settings import check_text_file

        check_text_file(text)
    examination = Examination(model, packs, device=device, dtype=dtype, alert_set=alert_set, strict=strict)
    examination.run(load_aloud)
    health, measured = examination.health, None
    if not as_json:
        _show(health)
    if measure and health.ok and examination.pack is not None:
        from probemon.cli.doctor.measured_settings import MeasuredSettings

        measured = MeasuredSettings.on(examination.host, examination.tokenizer, examination.pack, device, text)
        if not as_json:
            measured.show()
    elif measure and not as_json:
        say("settings were not measured: fix what failed, and run it again")
    if as_json:
        settings = {} if measured is None else {"settings": measured.as_dict()}
        answer({"model": model, "packs": packs, **health.as_dict(), **settings})
    if not health.ok:
        raise typer.Exit(1)


def _show(health: Health) -> None:
    from rich.text import Text

    table = plain_table(show_header=False)
    table.add_column("state", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("what", overflow="fold")
    for check in health.checks:
        table.add_row(Text(check.state, style=_STYLES[check.state]), check.name, check.what)
        if check.remedy:
            table.add_row("", "", Text(check.remedy, style="italic"))
    terminal(soft_wrap=False).print(table)
    n_failed = sum(check.state == "failed" for check in health.checks)
    n_warnings = len(health.wrong) - n_failed
    say(f"{len(health.checks)} checks, {n_failed} failed, {n_warnings} {'warning' if n_warnings == 1 else 'warnings'}")
