"""`probemon doctor --measure`: cost and recall of settings on a text.

measured = MeasuredSettings.on(host, tokenizer, pack, device, documents)       # None: a built-in text
measured.show()
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probemon.cli.common import told_if_long
from probemon.cli.terminal import plain_table, say, terminal
from probemon.engine.setting_trials import SettingTrial, try_settings
from probemon.errors import ConfigError
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.state_reader import StateReader
from probemon.lab.corpora.windows import Reading, shards
from probemon.manager import DynamicProbeManager
from probemon.monitor.overhead import Overhead, overhead
from probemon.packs.group import AnyPack
from probemon.packs.manifest import SO_FAR
from probemon.util.counted import counted

MOST_TOKENS = 512
_PROMPT_TOKENS = 32
_SECONDS = 30.0
TEXT = (
    "The harbour master kept two ledgers. In one he wrote the ships: their tonnage, their cargo of grain or timber or"
    " whale oil, the duty each captain owed to the town. In the other he wrote the weather, because his father had, and"
    " because a storm that nobody foresaw had once cost forty families a son. When the doctor asked which of the two"
    " mattered more, he laughed, bought her a cup of coffee, and said that money could be counted again next morning."
)


def check_text_file(text: Path) -> None:
    """Raise `ConfigError` without a readable document."""
    next(iter(read_documents(text)), None)


@dataclass(frozen=True)
class MeasuredSettings:
    """Trials on a text, and what watching adds to a step."""

    trials: list[SettingTrial]
    n_tokens: int
    text: str
    cost: Overhead

    @classmethod
    def on(cls, host: Any, tokenizer: Any, pack: AnyPack, device: str, documents: Path | None) -> MeasuredSettings:
        """Measure on the first readable document. Raises `ConfigError`."""
        source = [{"text": TEXT}] if documents is None else documents
        reader = StateReader(host, tokenizer, list(pack.sites), Reading(), so_far=pack.scope == SO_FAR)
        first_reading = next((one for shard in shards(read_documents(source)) for one in reader.states([shard])), None)
        if first_reading is None:
            raise ConfigError(f"no document of {documents} has a token: give --text a file with texts")
        document, tokens, states = first_reading
        first_states = {site: hidden[:MOST_TOKENS] for site, hidden in states.items()}
        trials = try_settings(pack, first_states, device=device)
        ids = torch.as_tensor(tokens.ids[:_PROMPT_TOKENS], device=host.device)[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with told_if_long("measuring: up to a minute"):
            cost = overhead(DynamicProbeManager(pack, device=device), host, inputs, most_seconds=_SECONDS)
        text = "a built-in text, which says little of yours: give --text" if documents is None else document.id
        return cls(trials, min(MOST_TOKENS, len(tokens)), text, cost)

    def show(self) -> None:
        """Print a line per trial, and what watching adds."""
        say("", f"settings, on {counted(self.n_tokens, 'token')} of {self.text}")
        table = plain_table()
        table.add_column("settings", no_wrap=True)
        for head in ("evaluated a token", "dropped", "µs a step", "found"):
            table.add_column(head, justify="right")
        for trial in self.trials:
            share = "nothing fires" if math.isnan(trial.found) else f"{100 * trial.found:.1f}%"
            numbers = f"{trial.n_evaluated:.1f}", f"{trial.n_dropped:.1f}", f"{trial.step_us:,.0f}", share
            table.add_row(_named(trial), *numbers)
        terminal(soft_wrap=False).print(table)
        low, high = self.cost.interval_pct
        say(
            f"watching adds {self.cost.overhead_pct:+.1f} % ({low:+.1f} to {high:+.1f}) to a step of"
            f" {self.cost.host_ms:.1f} ms; {self.cost.monitor_ms:.2f} ms of it inside our hooks"
        )

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "n_tokens": self.n_tokens,
            "text": self.text,
            "trials": [
                {
                    "changes": dict(trial.changes),
                    "evaluated": trial.n_evaluated,
                    "dropped": trial.n_dropped,
                    "step_us": trial.step_us,
                    "found": trial.found,
                }
                for trial in self.trials
            ],
            "host_ms": self.cost.host_ms,
            "overhead_pct": self.cost.overhead_pct,
            "interval_pct": list(self.cost.interval_pct),
            "hooks_ms": self.cost.monitor_ms,
        }


def _named(trial: SettingTrial) -> str:
    return ", ".join(f"{name}={value}" for name, value in trial.changes.items()) or "as the pack recommends"
