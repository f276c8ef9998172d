"""Sites, inputs and architectures of probes."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probemon.errors import ConfigError, PackCorrupt, PackError
from probemon.util.checks import check_number

# The other sites are as wide as the model.
RECURRENT = ("ssm_state", "delta")
SITE = re.compile(r"(resid_post|attn_out|mlp_out|ssm_state|delta)\.(0|[1-9][0-9]{0,3})")


# How others call sites: hooks of TransformerLens, and modules of transformers.
_OTHER_NAMES = (
    (re.compile(r"blocks\.(\d{1,4})\.hook_(resid_post|attn_out|mlp_out)"), "{1}.{0}"),
    (re.compile(r"(?:[a-z_]+\.){0,3}(?:layers|h|blocks)\.(\d{1,4})(?:\.output)?"), "resid_post.{0}"),
    (re.compile(r"(?:[a-z_]+\.){0,3}(?:layers|h|blocks)\.(\d{1,4})\.(?:self_attn|attn|attention)"), "attn_out.{0}"),
    (re.compile(r"(?:[a-z_]+\.){0,3}(?:layers|h|blocks)\.(\d{1,4})\.(?:mlp|feed_forward)"), "mlp_out.{0}"),
)
_BEFORE = re.compile(r"blocks\.(\d{1,4})\.hook_resid_pre")  # what the block before left


def as_site(name: str) -> str:
    """`'blocks.15.hook_resid_post'`, `'model.layers.15'` -> `'resid_post.15'`; a site as it is, others unchanged.

    `blocks.15.hook_resid_pre` is `resid_post.14`.
    """
    if not isinstance(name, str) or SITE.fullmatch(name):
        return name
    if (before := _BEFORE.fullmatch(name)) and int(before[1]):
        return f"resid_post.{int(before[1]) - 1}"
    for pattern, site in _OTHER_NAMES:
        if match := pattern.fullmatch(name):
            layer, *rest = match.groups()
            return site.format(int(layer), *rest)
    return name


def parse_site(site: str) -> tuple[str, int]:
    """`'resid_post.15'` -> `('resid_post', 15)`. Raises `ConfigError`."""
    match = SITE.fullmatch(site) if isinstance(site, str) else None
    if match is None:
        other = as_site(site)
        raise ConfigError(
            f"site {site!r:.80} is not supported: "
            + (
                f"write {other!r}"
                if other != site
                else "expected resid_post.N, attn_out.N, mlp_out.N, ssm_state.N or delta.N, N a 0-based layer of the"
                " model (0 to 9999)"
            )
        )
    return match.group(1), int(match.group(2))


def check_sites_once(sites: Iterable[str]) -> None:
    """Raise `ConfigError` if a site is named twice."""
    seen = set[str]()
    for site in sites:
        if site in seen:
            raise ConfigError(f"the site {site!r} is named twice: name it once")
        seen.add(site)


def is_recurrent(site: str) -> bool:
    """True for `ssm_state.N` or `delta.N`. Raises `ConfigError`."""
    return parse_site(site)[0] in RECURRENT


NORMS = ("none", "layernorm", "rmsnorm")


@dataclass(frozen=True)
class InputSpec:
    """A probe's input: the hidden state at a site, normalised without affine part."""

    site: str
    norm: str = "none"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise PackError(f"norm {self.norm!r}: expected one of {', '.join(NORMS)}")
        if not isinstance(self.site, str):
            raise PackError(f"site {self.site!r}: expected a name such as 'resid_post.15'")
        eps = check_number(
            f"eps of {self.site}",
            self.eps,
            low=0,
            high=1e38,
            remedy="expected a small number, 0 or more",
            error=PackError,
        )
        object.__setattr__(self, "eps", eps)  # torch refuses ints past 64 bits

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Architecture:
    """Shape of a pack's probes: `hidden_size` D, then zero to two hidden ReLU layers."""

    hidden_size: int
    hidden: tuple[int, ...] = ()

    @staticmethod
    def parameters() -> tuple[str, ...]:
        """Names of the stacked tensors, in order of use."""
        return ("w1", "w1_scale", "b1", "w2", "w2_scale", "b2", "w3", "w3_scale", "b3")

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], where: str) -> Architecture:
        """Read the architecture off stacked weights. Raises `PackCorrupt`, naming `where`, for wrong shapes."""
        if "w1" not in weights or weights["w1"].dim() != 3:
            raise PackCorrupt(f"{where}: w1 must have shape [P, H1, D]")
        p, h1, d = weights["w1"].shape
        if not h1 or not d:
            raise PackCorrupt(f"{where}: w1 has shape {(p, h1, d)}: a probe reads 1 value or more")
        scales = {name for name in weights if name.endswith("_scale")}
        names = set(weights) - scales
        if names == {"w1", "b1"}:
            architecture, shapes = cls(d), {"w1": (p, 1, d), "b1": (p, 1)}
        elif names == {"w1", "b1", "w3", "b3"}:
            architecture, shapes = cls(d, (h1,)), {"b1": (p, h1), "w3": (p, h1), "b3": (p,)}
        elif names == {"w1", "b1", "w2", "b2", "w3", "b3"}:
            h2 = weights["w2"].shape[1] or -1 if weights["w2"].dim() == 3 else -1
            architecture = cls(d, (h1, h2))
            shapes = {"b1": (p, h1), "w2": (p, h2, h1), "b2": (p, h2), "w3": (p, h2), "b3": (p,)}
        else:
            raise PackCorrupt(
                f"{where}: tensors {sorted(names)}: expected w1, b1 (linear), with w3, b3 (one hidden layer), "
                "or all of w1, b1, w2, b2, w3, b3 (two)"
            )
        matrices = sorted(name for name in names if name.startswith("w"))
        needed = {f"{name}_scale" for name in matrices if weights["w1"].dtype == torch.int8}
        if scales != needed:
            raise PackCorrupt(
                f"{where}: scales {sorted(scales)}, expected {sorted(needed)}: every int8 matrix has its scales, and no"
                " other"
            )
        for name in matrices:
            if weights[name].dtype != weights["w1"].dtype:
                raise PackCorrupt(
                    f"{where}: {name} is {weights[name].dtype}, w1 {weights['w1'].dtype}: one dtype a pack"
                )
        shapes |= {name: tuple(weights[name.removesuffix("_scale")].shape[:-1]) for name in scales}
        for name, shape in shapes.items():
            if tuple(weights[name].shape) != shape:
                raise PackCorrupt(f"{where}: {name} has shape {tuple(weights[name].shape)}, expected {shape}")
        return architecture

    def parameters_per_probe(self) -> int:
        """Weights and biases of one probe."""
        widths = (self.hidden_size, *self.hidden, 1)
        return sum(a * b + b for a, b in itertools.pairwise(widths))

    def as_dict(self) -> dict[str, Any]:
        return {"kind": ("linear", "mlp1", "mlp2")[len(self.hidden)], "hidden": list(self.hidden), "activation": "relu"}

    def __str__(self) -> str:
        return "linear" if not self.hidden else "-".join(map(str, (*self.hidden, 1)))


def input_limits(architecture: Architecture, largest: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Return the largest absolute inputs `[n]` up to which no sum of n probes overflows fp32.

    `largest`: each weight tensor's largest absolute value per probe `[n]`. Beyond the limit, the order of a sum may
    change its score, so there is none. Bound per layer: `n_values * weight * input`, against half of fp32's range for
    rounding.
    """
    most = 2.0**127
    n = len(largest["w1"])
    # A layer's input is at most slope * input + offset.
    slope, offset, limit = np.ones(n), np.zeros(n), np.full(n, np.inf)
    layers = [i for i in (1, 2, 3) if f"w{i}" in largest]
    with np.errstate(divide="ignore"):
        for i, width in zip(layers, (architecture.hidden_size, *architecture.hidden), strict=True):
            products = width * largest[f"w{i}"]
            slope, offset = slope * products, offset * products
            limit = np.minimum(limit, (most - offset) / slope)
            scale = largest.get(f"w{i}_scale", np.ones(n))
            slope, offset = slope * scale, offset * scale + largest[f"b{i}"]
            limit = np.minimum(limit, (most - offset) / slope)
    return limit
