"""Commands for routed adapters: bem train, bem eval, bem distil and bem inspect."""

from __future__ import annotations

import typer

from probemon.adapters.cli.bem_distil import distil
from probemon.adapters.cli.bem_eval import evaluate
from probemon.adapters.cli.bem_inspect import inspect
from probemon.adapters.cli.bem_train import train

bem = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train, measure, distil and inspect BEM adapters.")
bem.command(name="train")(train)
bem.command(name="eval")(evaluate)
bem.command(name="distil")(distil)
bem.command(name="inspect")(inspect)
