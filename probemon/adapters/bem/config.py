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

from probemon.errors import ConfigError
from probemon.util.checks import LARGEST, check_count, check_number, check_settings, is_int, is_number, plain, shown

LEVELS = ("prefix", "chunk", "token")
POLICIES = ("position", "auto", "energy", "learned", *LEVELS)
KINDS = ("q", "k", "v", "o", "down")
FORMS = ("low_rank", "head_groups", "rank_mask", "kronecker", "film")
_OF_FORM = {"groups": "head_groups", "active": "rank_mask", "hadamard": "rank_mask", "terms": "kronecker"}
MAX_NORM = 256.0  # of any code: the largest that its statistics can count
# Keys and values are never computed again, and queries meet them at every later token: these sites take chunk codes
# alone.
CHUNK_KINDS = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True)
class BemConfig:
    """Settings of one adapter; every default is that of the source where it states one. Raises `ConfigError`.

    `form`: what a code c makes of a site, one of `FORMS` (`probemon.adapters.bem.forms`): "low_rank" is
    `alpha / rank * U diag(c) V^T`.
    `rank` r: of "low_rank", of each group of "head_groups", of all components of "rank_mask"; of "film" the length of
    the code.
    `alpha`: the scale of an update is alpha over its rank, or over the number of its terms.
    `groups`: of heads, of "head_groups".
    `active`: how many of r components "rank_mask" keeps; `hadamard`: it rotates them.
    `terms`: of "kronecker".
    `bound`: of what "film" may stretch an output by, and move it.
    `sites`: kinds of linear layers. Queries, keys and values always take chunk codes.
    `layers`: host layers whose sites are updated; None: all from `read_layer` on.
    `read_layer`: the layer whose input the controller reads.
    `width`: of the controller.
    `prefix_tokens` P, `chunk_tokens` N: P is a multiple of N.
    `ema`: what a chunk's code keeps of the one before.
    `max_norm`: of a code, before its confidence multiplies it.
    `level`: which codes attention outputs and MLPs take: those of one of `LEVELS`, by "position", "auto" or "energy",
    or those that training has chosen for each site ("learned", `probemon.adapters.bem.levels`).
    `token_limit`: by "position", a row takes token codes for so many tokens, and chunk codes beyond.
    `auto_limits`: by "auto", a row takes prefix codes if its prompt has fewer tokens than the first, chunk codes if it
    has fewer than the second, else token codes.
    `energy_limits`: by "energy", a chunk's tokens take prefix codes where those of the chunk before spread by less than
    the first, chunk codes where by less than the second, else token codes; in a row's first chunk token codes. The
    spread is `1 - |mean z|^2 / mean |z|^2` of the controller's features z: 0 where all are alike, 1 around a mean of 0.
    `spectral_cap`: on the largest singular value of every update; None for none.
    `trust_region`: on the Frobenius norm over all sites together; None for none.
    `dropout`: of an update's input, in training.
    `sparse_eps`: updates of at most this Frobenius norm, after the limits, are left out, token by token and site by
    site, in forwards that make no gradients: no output differs by more than `sparse_eps` times the norm of its input
    (a film's, times the norm of the output itself and a 1). None computes all.
    `seed`: of the parameters at the start.
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
    spectral_cap: float | None = 1.0
    trust_region: float | None = None
    dropout: float = 0.0
    sparse_eps: float | None = None
    groups: int | None = None
    active: int | None = None
    hadamard: bool = False
    terms: int | None = None
    bound: float = 0.1
    seed: int = 0

    @property
    def scale(self) -> float:
        """s of `s * ((x V) * c) U^T`, and of the like in other forms."""
        return self.alpha / (self.terms or self.rank)

    @property
    def code_size(self) -> int:
        """How many numbers a code has."""
        return self.groups or self.terms or self.rank

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of which some site may take a code, in the order of `LEVELS`."""
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
        self._check_form()
        fine = _is_tuple_of_different(self.sites, lambda kind: kind in KINDS)
        self._check("sites", fine, f"give a tuple of some of {', '.join(KINDS)}, each once")
        self._check("level", self.level in POLICIES, f"give one of {', '.join(POLICIES)}")
        limits = self.auto_limits
        fine = isinstance(limits, tuple) and len(limits) == 2 and all(map(is_int, limits))
        fine = fine and 0 <= limits[0] <= limits[1]
        self._check("auto_limits", fine, "give two numbers of tokens, the smaller first")
        spreads = self.energy_limits
        fine = isinstance(spreads, tuple) and len(spreads) == 2 and all(map(is_number, spreads))
        fine = fine and 0 <= spreads[0] <= spreads[1] <= 1
        self._check("energy_limits", fine, "give two numbers from 0 to 1, the smaller first")
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
            elif name != "hadamard":
                most = self.rank if name == "active" else 4096
                self._check(name, is_int(value) and 1 <= value <= most, f"give 1 to {most}")
        self._check("hadamard", isinstance(self.hadamard, bool), "give True or False")
        self._check("rank", not self.hadamard or not self.rank & (self.rank - 1), "hadamard needs a power of two")
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


def _is_tuple_of_different(value: object, allowed: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(map(allowed, value)) and len(set(value)) == len(value)
