"""BemConfig: the settings of a routed adapter, checked when made.

    config = BemConfig(rank=8, sites=("q", "v", "o", "down"), level="auto")
    BemConfig.from_dict({"rank": 8, "sights": ["o"]})          # UnknownSetting: did you mean 'sites'?

What is here is saved with the adapter. How it is computed (`impl`) is chosen when it is attached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from probemon.core.checks import LARGEST, check_count, check_number, check_settings, is_int, plain, shown
from probemon.errors import ConfigError

LEVELS = ("prefix", "chunk", "token")
POLICIES = ("position", "auto", *LEVELS)
KINDS = ("q", "k", "v", "o", "down")
MAX_NORM = 256.0  # of any code: the largest that its statistics can count
# Keys and values are never computed again, and queries meet them at every later token: these sites take chunk codes
# alone.
CHUNK_KINDS = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True)
class BemConfig:
    """Settings of one adapter; every default is that of the source where it states one. Raises `ConfigError`.

    `rank` r, `alpha`: an update is `alpha / rank * U diag(c) V^T`.
    `sites`: kinds of linear layers. Queries, keys and values always take chunk codes.
    `layers`: host layers whose sites are updated; None: all from `read_layer` on.
    `read_layer`: the layer whose input the controller reads.
    `width`: of the controller.
    `prefix_tokens` P, `chunk_tokens` N: P is a multiple of N.
    `ema`: what a chunk's code keeps of the one before.
    `max_norm`: of a code, before its confidence multiplies it.
    `level`: which codes attention outputs and MLPs take: those of one of `LEVELS`, or by "position" or "auto".
    `token_limit`: by "position", a row takes token codes for so many tokens, and chunk codes beyond.
    `auto_limits`: by "auto", a row takes prefix codes if its prompt has fewer tokens than the first, chunk codes if it
    has fewer than the second, else token codes.
    `spectral_cap`: on the largest singular value of every update; None for none.
    `trust_region`: on the Frobenius norm over all sites together; None for none.
    `dropout`: of an update's input, in training.
    `sparse_eps`: updates of at most this Frobenius norm, after the limits, are left out, token by token and site by
    site, in forwards that make no gradients: no output differs by more than `sparse_eps` times the norm of its input.
    None computes all.
    `seed`: of the parameters at the start.
    """

    rank: int = 8
    alpha: float = 16.0
    sites: tuple[str, ...] = ("o", "down")
    layers: tuple[int, ...] | None = None
    read_layer: int = 0
    width: int = 64
    prefix_tokens: int = 128
    chunk_tokens: int = 32
    ema: float = 0.5
    max_norm: float = 3.0
    level: str = "position"
    token_limit: int = 512
    auto_limits: tuple[int, int] = (64, 256)
    spectral_cap: float | None = 1.0
    trust_region: float | None = None
    dropout: float = 0.0
    sparse_eps: float | None = None
    seed: int = 0

    @property
    def scale(self) -> float:
        """s of `s * ((x V) * c) U^T`."""
        return self.alpha / self.rank

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of which some site may take a code, in the order of `LEVELS`."""
        chunk_sites = any(kind in CHUNK_KINDS for kind in self.sites)
        others = any(kind not in CHUNK_KINDS for kind in self.sites)
        used = {"position": ("chunk", "token"), "auto": LEVELS}.get(self.level, (self.level,)) if others else ()
        return tuple(level for level in LEVELS if level in used or (level == "chunk" and chunk_sites))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> BemConfig:
        """Make a config of a dict, with lists in place of tuples. Raises `UnknownSetting`, `ConfigError`."""
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"settings are {type(settings).__name__}: give them by name, as dataclasses.asdict(config) has them"
            )
        check_settings(cls, settings)
        tuples: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
        }
        return cls(**tuples)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        # What is sized by these stays within memory.
        for name, most in (("rank", 4096), ("width", 8192), ("prefix_tokens", 1 << 20), ("chunk_tokens", 1 << 20)):
            self._check(name, is_int(getattr(self, name)) and 1 <= getattr(self, name) <= most, f"give 1 to {most}")
        for name in ("read_layer", "token_limit", "seed"):
            check_count(name, getattr(self, name), remedy="give 0 or more, within 63 bits")
        check_number("alpha", self.alpha, low=0, high=LARGEST, open_low=True, remedy="give a number over 0")
        remedy = f"give a number over 0, at most {MAX_NORM:g}"
        check_number("max_norm", self.max_norm, low=0, high=MAX_NORM, open_low=True, remedy=remedy)
        for name in ("ema", "dropout"):
            remedy = "give a number from 0, under 1"
            check_number(name, getattr(self, name), low=0, high=1, open_high=True, remedy=remedy)
        for name in ("spectral_cap", "trust_region"):
            if (limit := getattr(self, name)) is not None:
                remedy = "give a number over 0, or None for no limit"
                check_number(name, limit, low=0, high=LARGEST, open_low=True, remedy=remedy)
        if self.sparse_eps is not None:
            remedy = "give 0 or more, or None to compute all"
            check_number("sparse_eps", self.sparse_eps, low=0, high=LARGEST, remedy=remedy)
        fine = _is_tuple_of_different(self.sites, lambda kind: kind in KINDS)
        self._check("sites", fine, f"give a tuple of some of {', '.join(KINDS)}, each once")
        self._check("level", self.level in POLICIES, f"give one of {', '.join(POLICIES)}")
        limits = self.auto_limits
        fine = isinstance(limits, tuple) and len(limits) == 2 and all(map(is_int, limits))
        fine = fine and 0 <= limits[0] <= limits[1]
        self._check("auto_limits", fine, "give two numbers of tokens, the smaller first")
        if self.layers is not None:
            fine = _is_tuple_of_different(self.layers, lambda layer: is_int(layer) and layer >= self.read_layer)
            self._check(
                "layers", fine, f"give a tuple of host layers from read_layer ({self.read_layer}) on, each once"
            )
        if self.prefix_tokens % self.chunk_tokens:
            raise ConfigError(
                f"prefix_tokens is {self.prefix_tokens}, chunk_tokens {self.chunk_tokens}: the prefix is read in whole"
                " chunks, so give a multiple"
            )
        if self.level in ("prefix", "token") and all(kind in CHUNK_KINDS for kind in self.sites):
            raise ConfigError(
                f"level {self.level!r} with sites {', '.join(self.sites)} alone: these take chunk codes. Add 'o' or"
                " 'down', or use level='chunk'"
            )

    def _check(self, name: str, fine: bool, remedy: str) -> None:
        if not fine:
            raise ConfigError(f"{name} is {shown(getattr(self, name))}: {remedy}")


def _is_tuple_of_different(value: object, allowed: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(map(allowed, value)) and len(set(value)) == len(value)
