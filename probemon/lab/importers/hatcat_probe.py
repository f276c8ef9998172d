"""A probe of a HatCat pack: its variant, and its tensors in a pack.

    kind = Kind.of(state)                              # or Unusable
    tensors = [embed(pole, kind, architecture, dtype, inputs) for pole in poles(state, kind)]

Variants are linear probes, perceptrons of two hidden layers, the same behind a LayerNorm, and three-way heads
("tripole"): linear, with a softmax over poles. A LayerNorm's affine part is folded in, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from probemon.core.probes import Architecture, InputSpec
from probemon.packs.widen import smallest_common, widen

NORM_EPS = 1e-5  # of probes that begin with a LayerNorm
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POLES = ("negative", "neutral", "positive")  # rows of a three-way head
# Places in the Sequential; True if the first is a LayerNorm.
_LAYERS = {(0, 3, 6): False, (0, 1, 4, 7): True}


class Unusable(Exception):
    """A state dict that is not a probe; `reason`: a kind of note."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Kind:
    """The variant of a state dict. `normed`: begins with a LayerNorm; `is_tripole`: three poles."""

    hidden_size: int
    hidden: tuple[int, ...]
    normed: bool
    dtype: torch.dtype
    is_tripole: bool = False

    @property
    def variant(self) -> str:
        """The variant in a word."""
        if self.is_tripole:
            return "three-way"
        return "linear" if not self.hidden else "LayerNorm" if self.normed else "plain"

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Kind:
        """Return the kind of a state dict. Raises `Unusable`."""
        normed, weights, biases = _parts(state)
        is_tripole = not normed and len(weights) == 1 and weights[0].dim() == 2 and len(weights[0]) == len(POLES)
        for tensor in state.values():
            if tensor.dtype not in _DTYPES:
                raise Unusable("dtype", f"{tensor.dtype}")
        layers = list(zip(weights[normed:], biases[normed:], strict=True))
        width: int | None = None
        for weight, bias in layers:
            if (
                weight.dim() != 2
                or not weight.numel()
                or tuple(bias.shape) != (len(weight),)
                or width not in (None, weight.shape[1])
            ):
                raise Unusable("unknown", f"shapes {_shapes(state)}")
            width = len(weight)
        d = int(layers[0][0].shape[1])
        margins = state.get("log_margins", state.get("net.log_margins"))
        if margins is not None and (not is_tripole or tuple(margins.shape) != (len(POLES),)):
            raise Unusable("unknown", f"shapes {_shapes(state)}")
        if width != (len(POLES) if is_tripole else 1) or (
            normed and not tuple(weights[0].shape) == tuple(biases[0].shape) == (d,)
        ):
            raise Unusable("unknown", f"shapes {_shapes(state)}")
        dtype = next(iter(state.values())).dtype
        for tensor in state.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
        return cls(d, tuple(len(weight) for weight, _ in layers[:-1]), normed, dtype, is_tripole)


def poles(state: Mapping[str, Tensor], kind: Kind) -> list[Mapping[str, Tensor]]:
    """Return a linear state dict for each pole of a three-way head, else the probe as it is."""
    if not kind.is_tripole:
        return [state]
    _, [weight], [bias] = _parts(state)
    return [{"linear.weight": weight[i : i + 1], "linear.bias": bias[i : i + 1]} for i in range(len(POLES))]


def check_finite(state: Mapping[str, Tensor]) -> None:
    """Raise `Unusable` naming the first tensor that is not finite."""
    for name, tensor in state.items():
        # A sum is finite if its terms are, unless they overflow.
        if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))) and not bool(torch.isfinite(tensor).all()):
            raise Unusable("not_finite", name)


def _parts(state: Mapping[str, Tensor]) -> tuple[bool, list[Tensor], list[Tensor]]:
    """Return whether a LayerNorm comes first, weights and biases. Raises `Unusable`."""
    bare = {name.removeprefix("net."): tensor for name, tensor in state.items()}
    if len(bare) < len(state):
        raise Unusable("unknown", "tensors with and without 'net.'")
    if set(bare) - {"log_margins"} == {"linear.weight", "linear.bias"}:
        return False, [bare["linear.weight"]], [bare["linear.bias"]]
    for places, normed in _LAYERS.items():
        if set(bare) == {f"{place}.{part}" for place in places for part in ("weight", "bias")}:
            return normed, [bare[f"{place}.weight"] for place in places], [bare[f"{place}.bias"] for place in places]
    raise Unusable("unknown", f"tensors {', '.join(sorted(state)[:8])}")


def _shapes(state: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in list(state.items())[:8])


@dataclass(frozen=True)
class HatcatInputs:
    """The input of probes: the state, or (`normalize`) its LayerNorm of `eps` without affine part."""

    site: str
    normalize: str
    eps: float = NORM_EPS

    def spec(self, normed: bool) -> InputSpec:
        """Return the pack's input for a probe, `normed` if it begins with a LayerNorm.

        A LayerNorm of eps e1 after one of e0 is one of e0 e1 / (1 + e1), times 1 / sqrt(1 + e1): with variance v, the
        first gives v / (v + e0).
        """
        if self.normalize == "none":
            return InputSpec(self.site, "layernorm", NORM_EPS) if normed else InputSpec(self.site)
        return InputSpec(self.site, "layernorm", self.eps * NORM_EPS / (1 + NORM_EPS) if normed else self.eps)

    @property
    def gain(self) -> float:
        """The factor of a probe's LayerNorm beyond `spec(True)`."""
        return 1.0 if self.normalize == "none" else 1 / math.sqrt(1 + NORM_EPS)


def embed(
    state: Mapping[str, Tensor], kind: Kind, architecture: Architecture, dtype: torch.dtype, inputs: HatcatInputs
) -> dict[str, Tensor]:
    """Return tensors in a pack: `w1 [H1, D]`, `b1 [H1]` and so on, biases fp32.

    In the pack's dtype, weights stay bit for bit, unless a LayerNorm is folded in.
    """
    _, weights, biases = _parts(state)
    biases = [bias.to(torch.float32) for bias in biases]
    if kind.normed:
        # only factors of the state are rounded
        shift = (weights[1].double() @ biases[0].double() + biases[1].double()).to(torch.float32)
        scale = weights[0].to(torch.float32) * inputs.gain
        weights, biases = [weights[1].to(torch.float32) * scale, *weights[2:]], [shift, *biases[2:]]
    tensors = {"w1": weights[0][None].to(dtype), "b1": biases[0][None]}
    if kind.hidden:
        tensors |= {
            "w2": weights[1][None].to(dtype),
            "b2": biases[1][None],
            "w3": weights[2].to(dtype),
            "b3": biases[2],
        }
    return {name: tensor[0] for name, tensor in widen(tensors, architecture).items()}


def widest(kinds: list[Kind]) -> tuple[Architecture, torch.dtype]:
    """Return the smallest architecture and dtype that hold all probes exactly."""
    dtype = kinds[0].dtype
    for kind in kinds:
        dtype = torch.promote_types(dtype, kind.dtype)
    return smallest_common([Architecture(kind.hidden_size, kind.hidden) for kind in kinds]), dtype


def evaluate(state: Mapping[str, Tensor], kind: Kind, hidden: Tensor, inputs: HatcatInputs) -> Tensor:
    """Score states `[G, D]` by the saved state dict, in fp32; return `[G, 1]`, or poles `[G, 3]`."""
    _, weights, biases = _parts(state)
    weights, biases = [weight.to(torch.float32) for weight in weights], [bias.to(torch.float32) for bias in biases]
    x = hidden.to(torch.float32)
    if inputs.normalize == "layernorm":
        x = layer_norm(x, x.shape[-1:], eps=inputs.eps)
    if kind.normed:
        x = layer_norm(x, x.shape[-1:], weights[0], biases[0], NORM_EPS)
    first = int(kind.normed)
    for i, (weight, bias) in enumerate(zip(weights[first:], biases[first:], strict=True)):
        x = (x.relu() if i else x) @ weight.T + bias
    return torch.softmax(x, dim=1) if kind.is_tripole else torch.sigmoid(x)
