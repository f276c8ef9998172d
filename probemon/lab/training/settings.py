"""Settings of training.

settings = TrainingSettings(layers="auto", fpr=0.01)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probemon.core.aggregate import Aggregator, named
from probemon.core.baselines import refuse_baseline
from probemon.core.probes import as_site, check_sites_once, is_recurrent, parse_site
from probemon.errors import ConfigError
from probemon.host.chat_dates import CHAT_DATE, parse_date
from probemon.host.chat_forms import PARTS
from probemon.lab.training.carriers import MOST
from probemon.lab.training.ordinary import TEXTS
from probemon.lab.training.state_store import BUDGET
from probemon.util.checks import check_choice, check_count, check_share, shown

DEPTHS = (0.4, 0.5, 0.6, 0.75)  # of the layers to try
METHODS = ("auto", "plain")


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of `train`.

    - `layers`: "auto" (four between two and three quarters of the depth), numbers, or sites
    - `method`: "auto", or "plain": windows of 16 tokens, standardised, and only the layer is chosen
    - `watch`: aggregator of the running score; "auto": a mean of the logits of as many tokens as suits the concept
    - `roles`: turns of a chat that count, or "reasoning"
    - `chat_date`: YYYY-MM-DD, for templates that write today's date
    - `exclusive`: texts have no other concepts than their labels
    - `held_out`: by field of a row ("group", "author"), the values that are only tested on
    - `generate`: least texts of a concept; the model writes more, for training only
    - `ordinary`: about how many ordinary texts; 0 for none
    - `unknown_in`: by concept, kinds of ordinary text that may have it
    - `carried`: at most so many texts also train after the beginning of an ordinary text
    - `fpr`: rate of false alarms of alert thresholds on ordinary text, by token and by text
    - `precision`: of a second set, recommended if all concepts reach it
    - `states`: folder for hidden states, reused; `budget`: its size in bytes
    """

    layers: str | int | Sequence[int | str] = "auto"
    method: str = "auto"
    watch: Aggregator | str = "auto"
    roles: Sequence[str] = ("assistant",)
    exclusive: bool = False
    text_field: str = "text"
    held_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    generate: int = 0
    ordinary: int = TEXTS
    unknown_in: Mapping[str, Sequence[str]] = field(default_factory=dict)
    carried: int = MOST
    fpr: float = 0.01
    precision: float | None = None
    states: str | os.PathLike[str] | None = None
    budget: int = BUDGET
    seed: int = 0
    chat_date: str = CHAT_DATE

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_share("fpr", self.fpr, "give more than 0 and less than 1, such as 0.01")
        if self.precision is not None:
            check_share("precision", self.precision, "give more than 0 and less than 1, such as 0.9")
        for role in self.roles:
            check_choice("roles", role, PARTS)
        if not self.roles:
            raise ConfigError(f"roles is empty: give one or more of {', '.join(PARTS)}")
        for name, least in (("budget", 1 << 20), ("seed", 0), ("generate", 0), ("ordinary", 0), ("carried", 0)):
            check_count(name, getattr(self, name), least=least, remedy=f"give {least} or more")
        if self.aggregator is not None:
            refuse_baseline(self.aggregator, "watch is")
        for id, kinds in self.unknown_in.items():
            if isinstance(kinds, str):
                raise ConfigError(f"unknown_in of {id!r} is {kinds!r}: give a list of kinds, [{kinds!r}]")
        if self.unknown_in and not self.ordinary:
            raise ConfigError("unknown_in is given without ordinary text (ordinary=0): leave it out")
        parse_date(self.chat_date)

    @property
    def aggregator(self) -> Aggregator | None:
        """The watched aggregator; None for "auto"."""
        return None if self.watch == "auto" else named(self.watch)

    def folder(self, out: Path) -> Path:
        """Return the folder of the states."""
        from hashlib import sha256

        from probemon.util.cache_folders import cache_dir

        if self.states is not None:
            return Path(self.states)
        return cache_dir() / "states" / sha256(os.fsencode(out.resolve())).hexdigest()[:16]

    def sites(self, n_layers: int) -> list[str]:
        """Return the sites to try for `n_layers`, earliest first. Raises `ConfigError`."""
        if isinstance(self.layers, bool) or not isinstance(self.layers, (str, int, Sequence)):
            raise ConfigError(f'layers is {shown(self.layers)}: give "auto", or numbers of layers')
        if self.layers == "auto":
            return [f"resid_post.{layer}" for layer in sorted({int(depth * n_layers) for depth in DEPTHS})]
        entries: list[Any] = [self.layers] if isinstance(self.layers, int) else list(self.layers)
        if isinstance(self.layers, str):
            entries = [part.strip() for part in self.layers.split(",") if part.strip()]
        sites = [as_site(str(entry)) if "." in str(entry) else f"resid_post.{entry}" for entry in entries]
        for site in sites:
            if is_recurrent(site):
                raise ConfigError(
                    f"layers holds {site}: training reads the residual stream. Collect the states (probemon states),"
                    " train on them yourself, and import the weights"
                )
            if parse_site(site)[1] >= n_layers:
                raise ConfigError(f"layers holds {site}: the model's are 0 to {n_layers - 1}")
        if not sites:
            raise ConfigError('layers is empty: give "auto", or numbers of layers')
        check_sites_once(sites)
        return sorted(sites, key=lambda site: (parse_site(site)[1], site))

    def as_dict(self) -> dict[str, Any]:
        """Return the settings that affect probes, as JSON."""
        return {
            "layers": self.layers if isinstance(self.layers, (str, int)) else list(self.layers),
            "method": self.method,
            "watch": str(self.aggregator or "auto"),
            "roles": list(self.roles),
            "exclusive": self.exclusive,
            "held_out": {name: list(values) for name, values in self.held_out.items()},
            "generate": self.generate,
            "ordinary": self.ordinary,
            "unknown_in": {id: list(kinds) for id, kinds in self.unknown_in.items()},
            "carried": self.carried,
            "fpr": self.fpr,
            "precision": self.precision,
            "budget": self.budget,
            "seed": self.seed,
        }
