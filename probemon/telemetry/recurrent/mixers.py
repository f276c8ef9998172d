"""The selective state-space layers of a host: where their steps are read, and how what was read becomes decays.

    stacks = find_stacks(model, states=False)       # layers of one kind and size together
    for stack in stacks:
        stack.sites                                 # for the Watcher; states [n, K] of accepted tokens
        stack.steps(arrays)                         # Steps: dt and log decays [S, n, heads] of S layers
    stack.updates(arrays, tail)                     # with states=True: what is added to the states, too

Every kind projects its input once (`in_proj`) and convolves a part of that. Its `conv1d` and `dt_proj` are never called
as modules, so hooks on them see nothing; what they make is made here again, of the projection of accepted tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from probemon.errors import NotSupportedHost
from probemon.host.model import find_layers
from probemon.host.tap import Site

_MOST_CHANNELS = 64  # of a Mamba-1 layer, which has thousands, evenly spaced: of these the steps are told


@dataclass(frozen=True)
class Steps:
    """Of n tokens in S layers: `dt` `[S, n, H]`, `log_decay` `[S, n, H]`, or `[S, n, H, N]` of Mamba-1."""

    dt: Tensor
    log_decay: Tensor


@dataclass(frozen=True)
class Updates:
    """What n tokens of one row do to the states of S layers.

    `log_decay` broadcasts against `added` `[S, n, *state]`; `tail` is what the next tokens are convolved with.
    """

    steps: Steps
    log_decay: Tensor
    added: Tensor
    tail: Tensor


class Stack(Protocol):
    """Layers of one kind and size. `limit`: the least and the largest step that they take in a prompt."""

    names: list[str]
    sites: list[Site]
    limit: tuple[float, float]
    state_dims: tuple[int, ...]  # of `added`, over which a norm of a head's state is taken

    def steps(self, projected: Tensor) -> Steps:
        """Return the steps of what the sites gave, `[S, n, K]`."""
        ...

    def updates(self, projected: Tensor, tail: Tensor | None) -> Updates:
        """Return what n tokens of one row add, after the `tail` of those before; where the stack reads all of it."""
        ...


def find_stacks(model: Any, *, states: bool) -> list[Stack]:
    """Return every state-space layer of a host, by kind and size. Raises `NotSupportedHost` where there is none."""
    groups: dict[tuple[Any, ...], list[tuple[int, nn.Module]]] = {}
    for layer, mixer in _mixers(model):
        kind = Mamba1 if hasattr(mixer, "x_proj") else Mamba2
        groups.setdefault((kind, tuple(mixer.A_log.shape), tuple(mixer.conv1d.weight.shape)), []).append((layer, mixer))
    if not groups:
        raise NotSupportedHost(
            f"{type(model).__name__} has no selective state-space layer that is known (a module of its layers with"
            " A_log, conv1d and in_proj: mamba, mamba2, bamba, falcon_h1, jamba, zamba2, nemotron_h, granitemoehybrid):"
            " watch its residual stream with probes"
        )
    return [kind(mixers, states=states) for (kind, *_), mixers in groups.items()]


def _mixers(model: Any) -> Iterator[tuple[int, Any]]:
    for number, layer in enumerate(find_layers(model)[1]):
        for module in layer.modules():
            if all(hasattr(module, name) for name in ("A_log", "conv1d", "in_proj")) and (
                hasattr(module, "dt_bias") or hasattr(module, "x_proj")
            ):
                yield number, module


def _stacked(mixers: list[tuple[int, Any]], name: str) -> Tensor:
    parts = [mixer.get_parameter(name).detach().float().cpu() for _, mixer in mixers]
    return torch.stack(parts)


class _Convolution:
    """What the `conv1d` of S layers and the activation after it make of their part of the projection."""

    def __init__(self, mixers: list[tuple[int, Any]]) -> None:
        first = mixers[0][1]
        self._weight = _stacked(mixers, "conv1d.weight").squeeze(2)  # [S, C, K]
        self._bias = None if first.conv1d.bias is None else _stacked(mixers, "conv1d.bias")[:, None]
        self._act = first.act

    def __call__(self, new: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolved `[S, n, C]` of `new` after `tail` `[S, K - 1, C]`, and the next tail."""
        width = self._weight.shape[-1]
        tail = new.new_zeros(len(new), width - 1, new.shape[-1]) if tail is None else tail
        whole = torch.cat([tail, new], dim=1)
        convolved = torch.einsum("stck,sck->stc", whole.unfold(1, width, 1), self._weight)
        convolved = convolved if self._bias is None else convolved + self._bias
        return self._act(convolved), whole[:, 1 - width :] if width > 1 else whole[:, :0]


def _with_several(projected: Tensor) -> Tensor:
    """Add a column that says whether the forward had several tokens: only then are steps held to the limit."""
    return pad(projected, (0, 1), value=float(projected.shape[1] > 1))


class Mamba2:
    """Mamba-2 and the hybrids with its layers: one decay a head, states `[H, P, N]`.

    Steps are the last H columns of the projection, with their bias, through softplus, and in forwards of several tokens
    held to the limit. falcon_h1 multiplies the projection by a vector of its own after it.
    """

    state_dims = (-2, -1)

    def __init__(self, mixers: list[tuple[int, Any]], *, states: bool) -> None:
        first = mixers[0][1]
        self.names = [f"ssm.{layer}" for layer, _ in mixers]
        self.limit = (float(first.time_step_limit[0]), float(first.time_step_limit[1]))
        self._n_heads, self._n_groups = int(first.num_heads), int(first.n_groups)
        self._head, self._n = int(first.head_dim), int(first.ssm_state_size)
        self._a = -_stacked(mixers, "A_log").exp()
        self._bias = _stacked(mixers, "dt_bias")
        self._states = states
        self._convolve = _Convolution(mixers) if states else None
        width = (first.in_proj.out_features if states else self._n_heads) + 1
        self.sites = [
            Site(name, mixer.in_proj, self._reader(mixer), width=width)
            for name, (_, mixer) in zip(self.names, mixers, strict=True)
        ]

    def _reader(self, mixer: Any) -> Any:
        begin = 0 if self._states else mixer.in_proj.out_features - self._n_heads

        def read(output: Tensor) -> Tensor:
            scale = getattr(mixer, "mup_vector", None)
            output = output[..., begin:] if scale is None else output[..., begin:] * scale[..., begin:]
            return _with_several(output)

        return read

    def steps(self, projected: Tensor) -> Steps:
        raw, several = projected[..., -1 - self._n_heads : -1], projected[..., -1:] > 0
        dt = softplus(raw + self._bias[:, None])
        dt = torch.where(several, dt.clamp(*self.limit), dt)
        return Steps(dt, dt * self._a[:, None])

    def updates(self, projected: Tensor, tail: Tensor | None) -> Updates:
        steps = self.steps(projected)
        inner, group = self._n_heads * self._head, self._n_groups * self._n
        assert self._convolve is not None
        convolved, tail = self._convolve(projected[..., inner : 2 * inner + 2 * group], tail)
        x, b, _ = convolved.split([inner, group, group], dim=-1)
        x = x.unflatten(-1, (self._n_heads, self._head))
        b = b.unflatten(-1, (self._n_groups, self._n)).repeat_interleave(self._n_heads // self._n_groups, dim=2)
        added = (steps.dt[..., None] * x)[..., None] * b[..., None, :]
        return Updates(steps, steps.log_decay[..., None, None], added, tail)


class Mamba1:
    """Mamba, falcon_mamba, jamba: a step a channel, a decay a channel and component, states `[D, N]`.

    Steps are told of `_MOST_CHANNELS` channels, evenly spaced. The last two norm what `x_proj` gives before it is used.
    """

    state_dims = (-1,)
    limit = (0.0, float("inf"))

    def __init__(self, mixers: list[tuple[int, Any]], *, states: bool) -> None:
        first = mixers[0][1]
        self.names = [f"ssm.{layer}" for layer, _ in mixers]
        self._d, self._n = first.A_log.shape
        self._rank = int(first.time_step_rank)
        self.channels = torch.arange(0, self._d, max(1, -(-self._d // _MOST_CHANNELS)))
        self._a = -_stacked(mixers, "A_log").exp()
        self._weight, self._bias = _stacked(mixers, "dt_proj.weight"), _stacked(mixers, "dt_proj.bias")
        self._states = states
        self._convolve = _Convolution(mixers) if states else None
        self._x_weight = _stacked(mixers, "x_proj.weight") if states else None
        self._norms: list[Mapping[str, Any]] = [
            {
                name: copy.deepcopy(module).float().cpu()
                for name in ("dt_layernorm", "b_layernorm", "c_layernorm")
                if (module := getattr(mixer, name, None)) is not None
            }
            for _, mixer in mixers
        ]
        width = (first.in_proj.out_features if states else self._rank) + 1
        self.sites = [
            Site(name, mixer.in_proj if states else mixer.x_proj, self._read, width=width)
            for name, (_, mixer) in zip(self.names, mixers, strict=True)
        ]

    def _read(self, output: Tensor) -> Tensor:
        return _with_several(output if self._states else output[..., : self._rank])

    def _normed(self, name: str, states: Tensor) -> Tensor:
        return torch.stack(
            [norms[name](part) if name in norms else part for norms, part in zip(self._norms, states, strict=True)]
        )

    def _dt(self, low: Tensor, channels: Tensor | slice) -> Tensor:
        weight, bias = self._weight[:, channels], self._bias[:, channels]
        return softplus(torch.einsum("snr,sdr->snd", self._normed("dt_layernorm", low), weight) + bias[:, None])

    def steps(self, projected: Tensor) -> Steps:
        dt = self._dt(projected[..., :-1], self.channels)
        return Steps(dt, dt[..., None] * self._a[:, None, self.channels])

    def updates(self, projected: Tensor, tail: Tensor | None) -> Updates:
        assert self._convolve is not None and self._x_weight is not None
        x, tail = self._convolve(projected[..., : self._d], tail)
        low = torch.einsum("snd,skd->snk", x, self._x_weight)
        low, b, _ = low.split([self._rank, self._n, self._n], dim=-1)
        dt = self._dt(low, slice(None))
        added = (dt * x)[..., None] * self._normed("b_layernorm", b)[..., None, :]
        log_decay = dt[..., None] * self._a[:, None]
        return Updates(Steps(dt[..., self.channels], log_decay[:, :, self.channels]), log_decay, added, tail)
