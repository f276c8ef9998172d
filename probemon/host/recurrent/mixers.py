"""Selective state-space layers: steps, decays and updates.

    stacks = find_stacks(model, states=False)       # layers of one kind and size
    for stack in stacks:
        stack.sites                                 # values [n, K] of accepted tokens
        stack.steps(arrays)                         # dt and log decays [S, n, heads] of S layers
    stack.updates(arrays, tail)                     # with states=True

Hooks on `conv1d` and `dt_proj` never run, so these are recomputed from `in_proj`'s output. For a single layer, S may be
a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from probemon.errors import UnsupportedModel
from probemon.host.internals import wrapped_by_adapter
from probemon.host.model import find_layers, weights_in_memory
from probemon.host.site import Site

_MOST_CHANNELS = 64  # evenly spaced channels per Mamba-1 layer


@dataclass(frozen=True)
class Steps:
    """`dt` `[S, n, H]`; `log_decay` `[S, n, H]`, in Mamba-1 `[S, n, H, N]`."""

    dt: Tensor
    log_decay: Tensor


@dataclass(frozen=True)
class Updates:
    """Changes of the states of S layers by n tokens.

    `log_decay` broadcasts against `added` `[S, n, *state]`; `tail` is for the next tokens.
    """

    steps: Steps
    log_decay: Tensor
    added: Tensor
    tail: Tensor | None


class Stack(Protocol):
    """Layers of one kind and size. `limit`: bounds of steps in a prompt."""

    names: list[str]
    sites: list[Site]
    limit: tuple[float, float]
    state_dims: tuple[int, ...]  # dimensions of a head's state in `added`

    def steps(self, projected: Tensor) -> Steps:
        """Return the steps of the sites' values `[S, n, K]`."""
        ...

    def updates(self, projected: Tensor, tail: Tensor | None) -> Updates:
        """Return updates after `tail`; needs `states=True`."""
        ...


def find_stacks(model: Any, *, states: bool) -> list[Stack]:
    """Return the layers by kind and size. Raises `UnsupportedModel` if there are none."""
    groups: dict[tuple[Any, ...], list[tuple[int, nn.Module]]] = {}
    for layer, mixer in find_mixers(model):
        groups.setdefault((kind_of(mixer), tuple(mixer.A_log.shape), tuple(mixer.conv1d.weight.shape)), []).append(
            (layer, mixer)
        )
    if not groups:
        raise UnsupportedModel(
            f"{type(model).__name__} has no selective state-space layer that is known (a module of its layers with"
            " A_log, conv1d and in_proj: mamba, mamba2, bamba, falcon_h1, jamba, zamba2, nemotron_h, granitemoehybrid):"
            " watch its residual stream with probes"
        )
    return [kind(mixers, states=states) for (kind, *_), mixers in groups.items()]


def find_mixers(model: Any) -> Iterator[tuple[int, Any]]:
    """Yield state-space modules with layer numbers."""
    for number, layer in enumerate(find_layers(model)[1]):
        for module in layer.modules():
            if (
                "A_log" in module._parameters
                and all(hasattr(module, name) for name in ("conv1d", "in_proj"))
                and (hasattr(module, "dt_bias") or hasattr(module, "x_proj"))
            ):
                yield number, module


def kind_of(mixer: Any) -> type[Mamba1] | type[Mamba2]:
    """Return the kind of a state-space module."""
    return Mamba1 if hasattr(mixer, "x_proj") else Mamba2


def _stacked(mixers: list[tuple[int, Any]], name: str, device: torch.device | str) -> Tensor:
    parts = []
    for layer, mixer in mixers:
        owner, _, attribute = name.rpartition(".")
        module = mixer.get_submodule(owner)
        with weights_in_memory(module):
            weight = getattr(module, attribute)
            if weight.device.type == "meta":
                raise UnsupportedModel(
                    f"layer {layer} has no {name} in memory, and where it is kept is unknown: load the model with its"
                    " weights, or offload it by accelerate"
                )
            parts.append(weight.detach().to(device, torch.float32))
    return torch.stack(parts)


class _Convolution:
    def __init__(self, mixers: list[tuple[int, Any]], device: torch.device | str) -> None:
        first = mixers[0][1]
        self._weight = _stacked(mixers, "conv1d.weight", device).squeeze(2)  # [S, C, K]
        self._bias = None if first.conv1d.bias is None else _stacked(mixers, "conv1d.bias", device)[:, None]
        self._act = first.act

    def __call__(self, new: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolved `[S, n, C]` and the next tail; `tail` `[S, K - 1, C]`."""
        width = self._weight.shape[-1]
        tail = new.new_zeros(len(new), width - 1, new.shape[-1]) if tail is None else tail
        whole = torch.cat([tail, new], dim=1)
        convolved = torch.einsum("stck,sck->stc", whole.unfold(1, width, 1), self._weight)
        convolved = convolved if self._bias is None else convolved + self._bias
        return self._act(convolved), whole[:, 1 - width :] if width > 1 else whole[:, :0]


def with_limit(projected: Tensor, held: bool) -> Tensor:
    """Add a column: were the steps limited? Not for one token on a used cache."""
    return pad(projected, (0, 1), value=float(held))


class Mamba2:
    """Mamba-2 and hybrids: one decay per head, states `[H, P, N]`.

    Steps: softplus of the last H columns plus bias, limited for several tokens.
    """

    state_dims = (-2, -1)

    def __init__(self, mixers: list[tuple[int, Any]], *, states: bool, device: torch.device | str = "cpu") -> None:
        first = mixers[0][1]
        self.names = [f"ssm.{layer}" for layer, _ in mixers]
        self.limit = (float(first.time_step_limit[0]), float(first.time_step_limit[1]))
        self._n_heads, self._n_groups = int(first.num_heads), int(first.n_groups)
        self._head, self._n = int(first.head_dim), int(first.ssm_state_size)
        self._a = -_stacked(mixers, "A_log", device).exp()
        self._bias = _stacked(mixers, "dt_bias", device)
        self._states = states
        self._convolve = _Convolution(mixers, device) if states else None
        width = (first.in_proj.out_features if states else self._n_heads) + 1
        self.sites = [
            Site(name, mixer.in_proj, self._reader(mixer), width=width)
            for name, (_, mixer) in zip(self.names, mixers, strict=True)
        ]

    def _reader(self, mixer: Any) -> Any:
        return lambda output: with_limit(self.projected(mixer, output), output.shape[1] > 1)

    @staticmethod
    def hold_beginnings(projected: Tensor, beginnings: Tensor) -> None:
        """Mark tokens without an earlier state, which are always limited."""
        projected[:, beginnings, -1] = 1.0

    def projected(self, mixer: Any, output: Tensor) -> Tensor:
        """Return the part of `in_proj`'s output that is used, scaled for falcon_h1."""
        begin = 0 if self._states else output.shape[-1] - self._n_heads
        scale = getattr(mixer, "mup_vector", None)
        return output[..., begin:] if scale is None else output[..., begin:] * scale[..., begin:]

    def dt(self, projected: Tensor) -> Tensor:
        """Return the steps `[S, n, H]`."""
        raw, is_limited = projected[..., -1 - self._n_heads : -1], projected[..., -1:] > 0
        dt = softplus(raw + self._bias[:, None])
        return torch.where(is_limited, dt.clamp(*self.limit), dt)

    def steps(self, projected: Tensor) -> Steps:
        dt = self.dt(projected)
        return Steps(dt, dt * self._a[:, None])

    def updates(self, projected: Tensor, tail: Tensor | None, mask: Tensor | None = None) -> Updates:
        """`mask` `[S, n]`: 0 for padding, which adds nothing."""
        steps = self.steps(projected)
        inner, group = self._n_heads * self._head, self._n_groups * self._n
        assert self._convolve is not None
        convolved, tail = self._convolve(projected[..., inner : 2 * inner + 2 * group], tail)
        convolved = convolved if mask is None else convolved * mask[..., None]
        x, b, _ = convolved.split([inner, group, group], dim=-1)
        x = x.unflatten(-1, (self._n_heads, self._head))
        b = b.unflatten(-1, (self._n_groups, self._n)).repeat_interleave(self._n_heads // self._n_groups, dim=2)
        added = (steps.dt[..., None] * x)[..., None] * b[..., None, :]
        return Updates(steps, steps.log_decay[..., None, None], added, tail)


class Mamba1:
    """Mamba, falcon_mamba, jamba: a step per channel, a decay per channel and component, states `[D, N]`."""

    state_dims = (-1,)
    limit = (0.0, float("inf"))

    def __init__(self, mixers: list[tuple[int, Any]], *, states: bool, device: torch.device | str = "cpu") -> None:
        first = mixers[0][1]
        self.names = [f"ssm.{layer}" for layer, _ in mixers]
        self._d, self._n = first.A_log.shape
        self.rank = int(first.time_step_rank)
        self.channels = torch.arange(0, self._d, max(1, -(-self._d // _MOST_CHANNELS)))
        self._a = -_stacked(mixers, "A_log", device).exp()
        self._weight, self._bias = (_stacked(mixers, f"dt_proj.{name}", device) for name in ("weight", "bias"))
        self._states = states
        self._convolve = _Convolution(mixers, device) if states else None
        self._x_weight = self._plain_weights(mixers, device) if states else None
        self._norms: list[Mapping[str, Callable[[Tensor], Tensor]]] = [
            {
                name: _own_copy(module, device)
                for name in ("dt_layernorm", "b_layernorm", "c_layernorm")
                if (module := getattr(mixer, name, None)) is not None
            }
            for _, mixer in mixers
        ]
        width = (first.in_proj.out_features if states else self.rank) + 1
        self.sites = [
            Site(name, mixer.in_proj if states else mixer.x_proj, self._read, width=width)
            for name, (_, mixer) in zip(self.names, mixers, strict=True)
        ]

    @staticmethod
    def _plain_weights(mixers: list[tuple[int, Any]], device: torch.device | str) -> Tensor:
        for layer, mixer in mixers:
            if wrapped_by_adapter(mixer.x_proj) is not None:
                raise UnsupportedModel(
                    f"x_proj of layer {layer} has an adapter, which states that are computed again would leave out:"
                    " merge it, or watch the steps alone (states=False)"
                )
        return _stacked(mixers, "x_proj.weight", device)

    def _read(self, output: Tensor) -> Tensor:
        return with_limit(output if self._states else output[..., : self.rank], False)

    def _normed(self, name: str, states: Tensor) -> Tensor:
        if len(self._norms) == 1:
            norm = self._norms[0].get(name)
            return states if norm is None else norm(states)
        return torch.stack(
            [norms[name](part) if name in norms else part for norms, part in zip(self._norms, states, strict=True)]
        )

    def dt(self, low: Tensor, channels: Tensor | slice = slice(None)) -> Tensor:
        """Return the steps `[S, n, D]` from `x_proj`'s output."""
        weight, bias = self._weight[:, channels], self._bias[:, channels]
        return softplus(torch.einsum("snr,sdr->snd", self._normed("dt_layernorm", low), weight) + bias[:, None])

    def steps(self, projected: Tensor) -> Steps:
        dt = self.dt(projected[..., :-1], self.channels)
        return Steps(dt, dt[..., None] * self._a[:, None, self.channels])

    def updates(self, projected: Tensor, tail: Tensor | None) -> Updates:
        assert self._convolve is not None and self._x_weight is not None
        x, tail = self._convolve(projected[..., : self._d], tail)
        return self.added(x, torch.einsum("snd,skd->snk", x, self._x_weight), tail)

    def added(self, x: Tensor, low: Tensor, tail: Tensor | None = None) -> Updates:
        """Return updates; `x` `[S, n, D]` is convolved, `low` is its `x_proj`."""
        low, b, _ = low.split([self.rank, self._n, self._n], dim=-1)
        dt = self.dt(low)
        added = (dt * x)[..., None] * self._normed("b_layernorm", b)[..., None, :]
        log_decay = dt[..., None] * self._a[:, None]
        return Updates(Steps(dt[..., self.channels], log_decay[:, :, self.channels]), log_decay, added, tail)


def _own_copy(module: nn.Module, device: torch.device | str) -> Callable[[Tensor], Tensor]:
    """Return a module's forward with fp32 weights and without hooks."""
    clone: Any = copy.copy(module)
    for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate's, which move weights
        vars(clone).pop(name, None)
    with weights_in_memory(module):
        clone._parameters = {
            name: weight.detach().to(device, torch.float32) for name, weight in module.named_parameters()
        }
    return partial(type(module).forward, clone)
