"""BemConfig: the settings of an adapter, checked when made.

    config = BemConfig(rank=8, sites=("q", "v", "o", "down"), level="auto")
    BemConfig.from_dict({"rank": 8, "sights": ["o"]})          # UnknownSetting: did you mean 'sites'?

They are saved with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from probemon.errors import ConfigError
from probemon.util.checks import LARGEST, check_count, check_number, check_settings, is_int, is_number, plain, shown

LEVELS = ("prefix", "chunk", "token")
POLICIES = ("position", "auto", "energy", "learned", *LEVELS)
KINDS = ("q", "k", "v", "o", "down")
GATE_INPUTS = ("statistics", "retrieval")
STARTS = ("random", "svd")
FORMS = ("low_rank", "head_groups", "rank_mask", "kronecker", "film")
_OF_FORM = {
    "groups": "head_groups",
    "gate_inputs": "head_groups",
    "active": "rank_mask",
    "hadamard": "rank_mask",
    "terms": "kronecker",
}
MAX_NORM = 256.0  # the largest that statistics count
# Only chunk codes: cached keys and values are never recomputed.
CHUNK_KINDS = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True)
class BemConfig:
    """Settings of one adapter. Raises `ConfigError`.

    `form`: one of `FORMS` (`probemon.adapters.bem.forms`); "low_rank" is `alpha / rank * U diag(c) V^T` for code c.
    `rank`: of each group of "head_groups", all components of "rank_mask", the code of "film".
    `alpha`: the scale is alpha over the rank, or over the terms.
    `groups`: of heads, for "head_groups".
    `gate_inputs`: what gates of "head_groups" read beside codes, of `GATE_INPUTS` (`HeadGroups.attenuation`).
    `active`: components kept by "rank_mask"; `hadamard` rotates them.
    `terms`: of "kronecker".
    `bound`: of scale and shift, for "film".
    `sites`: kinds of linear layers; "q", "k" and "v" take chunk codes.
    `layers`: with updates; None: all from `read_layer` on.
    `read_layer`: whose input the controller reads.
    `width`: of the controller's features.
    `prefix_tokens`: a multiple of `chunk_tokens`.
    `ema`: weight of the previous chunk's code.
    `max_norm`: of a code without its confidence.
    `level`: of codes for "o" and "down": one of `LEVELS`, or chosen by "position", "auto", "energy" or "learned"
    (`probemon.adapters.bem.levels`).
    `token_limit`: "position" takes token codes before it, then chunk codes.
    `auto_limits`: "auto" takes prefix codes for prompts below the first, chunk codes below the second, else token
    codes.
    `energy_limits`: "energy" does so by the previous chunk's spread `1 - |mean z|^2 / mean |z|^2` of features z, 1 at
    first.
    `spectral_cap`: on singular values of updates.
    `trust_region`: on the Frobenius norm over all sites.
    `dropout`: of an update's input.
    `sparse_eps`: in forwards without gradients, updates of at most this Frobenius norm after the limits are skipped,
    for each token and site. Outputs then differ by at most `sparse_eps` times the norm of their input (for "film": of
    the output with a 1 appended). None: compute all.
    `start`: of first factors (`probemon.adapters.bem.first_factors`): "random", or "svd" from the model's weights, for
    "low_rank" and "kronecker".
    `seed`: of the initial parameters.
    """

    form: str = "low_rank"
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
    energy_limits: tuple[float, float] = (0.25, 0.5)
    spectral_cap: float | None = None
    trust_region: float | None = None
    dropout: float = 0.0
    sparse_eps: float | None = None
    groups: int | None = None
    gate_inputs: tuple[str, ...] = ()
    active: int | None = None
    hadamard: bool = False
    terms: int | None = None
    bound: float = 0.1
    start: str = "random"
    seed: int = 0

    @property
    def scale(self) -> float:
        """s of `s * ((x V) * c) U^T`, and in other forms."""
        return self.alpha / (self.terms or self.rank)

    @property
    def code_size(self) -> int:
        """Numbers in a code."""
        return self.groups or self.terms or self.rank

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels that some site may take, in order."""
        chunk_sites = any(kind in CHUNK_KINDS for kind in self.sites)
        others = any(kind not in CHUNK_KINDS for kind in self.sites)
        used = (
            {"position": ("chunk", "token"), **dict.fromkeys(("auto", "energy", "learned"), LEVELS)}.get(
                self.level, (self.level,)
            )
            if others
            else ()
        )
        return tuple(level for level in LEVELS if level in used or (level == "chunk" and chunk_sites))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> BemConfig:
        """Make a config from a dict with lists for tuples. Raises `UnknownSetting`, `ConfigError`."""
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
        # Bounds on memory.
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
        self._check_form()
        fine = _is_tuple_of_different(self.sites, lambda kind: kind in KINDS)
        self._check("sites", fine, f"give a tuple of some of {', '.join(KINDS)}, each once")
        self._check("level", self.level in POLICIES, f"give one of {', '.join(POLICIES)}")
        fine = _is_pair(self.auto_limits, is_int, LARGEST)
        self._check("auto_limits", fine, "give two numbers of tokens, the smaller first")
        fine = _is_pair(self.energy_limits, is_number, 1)
        self._check("energy_limits", fine, "give two numbers from 0 to 1, the smaller first")
        if self.layers is not None:
            fine = _is_tuple_of_different(self.layers, lambda layer: is_int(layer) and layer >= self.read_layer)
            self._check(
                "layers", fine, f"give a tuple of the model's layers from read_layer ({self.read_layer}) on, each once"
            )
        if self.prefix_tokens % self.chunk_tokens:
            raise ConfigError(
                f"prefix_tokens is {self.prefix_tokens}, chunk_tokens {self.chunk_tokens}: the prefix is read in whole"
                " chunks, so give a multiple"
            )
        if self.level == "learned" and self.trust_region is not None:
            raise ConfigError(
                f"trust_region is {self.trust_region} with level='learned', whose sites are limited one by one: use"
                " spectral_cap alone"
            )
        if self.level in ("prefix", "token", "energy", "learned") and all(kind in CHUNK_KINDS for kind in self.sites):
            raise ConfigError(
                f"level {self.level!r} with sites {', '.join(self.sites)} alone: these take chunk codes. Add 'o' or"
                " 'down', or use level='chunk'"
            )

    def _check_form(self) -> None:
        self._check("form", self.form in FORMS, f"give one of {', '.join(FORMS)}")
        for name, form in _OF_FORM.items():
            value = getattr(self, name)
            if self.form != form:
                self._check(name, not value, f"it is a setting of form={form!r}, and this is {self.form!r}")
            elif name == "gate_inputs":
                fine = value == () or _is_tuple_of_different(value, lambda kind: kind in GATE_INPUTS)
                self._check(name, fine, f"give a tuple of some of {', '.join(GATE_INPUTS)}")
            elif name != "hadamard":
                most = self.rank if name == "active" else 4096
                self._check(name, is_int(value) and 1 <= value <= most, f"give 1 to {most}")
        self._check("hadamard", isinstance(self.hadamard, bool), "give True or False")
        self._check("rank", not self.hadamard or not self.rank & (self.rank - 1), "hadamard needs a power of two")
        self._check("start", self.start in STARTS, f"give one of {', '.join(STARTS)}")
        fine = self.start == "random" or self.form in ("low_rank", "kronecker")
        self._check("start", fine, f"it is for the forms low_rank and kronecker, and this is {self.form!r}")
        remedy = "give a number over 0, at most 1"
        check_number("bound", self.bound, low=0, high=1, open_low=True, remedy=remedy)
        if self.form == "head_groups" and self.sites != ("o",):
            raise ConfigError(
                f"sites is {self.sites!r} of form='head_groups', which takes the input of an attention output by its"
                " heads: give ('o',)"
            )

    def _check(self, name: str, fine: bool, remedy: str) -> None:
        if not fine:
            raise ConfigError(f"{name} is {shown(getattr(self, name))}: {remedy}")


def _is_pair(value: Any, allowed: Callable[[Any], bool], most: float) -> bool:
    """Whether these are two numbers from 0 to `most`, the smaller first."""
    return (
        isinstance(value, tuple) and len(value) == 2 and all(map(allowed, value)) and 0 <= value[0] <= value[1] <= most
    )


def _is_tuple_of_different(value: object, allowed: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(map(allowed, value)) and len(set(value)) == len(value)
