"""The command doctor.

probemon doctor demo
probemon doctor MODEL PACK --device cuda --json
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from probemon.cli.common import load_aloud, pack_for, use_threads
from probemon.cli.options import AlertSet, AsJson, Device, Dtype, Model, MorePacks, PackOfModel, Strict, Threads
from probemon.cli.terminal import answer, plain_table, say, terminal

if TYPE_CHECKING:
    from probemon.monitor.health import Health

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    model: Model,
    pack: PackOfModel = None,
    more_packs: MorePacks = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    alert_set: AlertSet = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Check that MODEL can be watched by PACK here: versions, device, pack, model, whether they fit, the kernel, and a
    short generation whose scores are compared with those of an unwatched one. Says what is wrong, and what to do.

    Exit status 0 where nothing failed (there may be warnings), 1 where something did.
    """
    packs = [pack_for(model, pack), *(more_packs or ())]
    use_threads(threads)
    from probemon.cli.examination import Examination
    from probemon.host.loading import check_dtype

    check_dtype(dtype)
    examination = Examination(model, packs, device=device, dtype=dtype, alert_set=alert_set, strict=strict)
    examination.run(load_aloud)
    health = examination.health
    if as_json:
        answer({"model": model, "packs": packs, **health.as_dict()})
    else:
        _show(health)
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
