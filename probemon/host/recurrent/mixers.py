"""The selective state-space layers of a host: where their steps are read, and how what was read becomes decays.

    stacks = find_stacks(model, states=False)       # layers of one kind and size together
    for stack in stacks:
        stack.sites                                 # for the Watcher; states [n, K] of accepted tokens
        stack.steps(arrays)                         # Steps: dt and log decays [S, n, heads] of S layers
    stack.updates(arrays, tail)                     # with states=True: what is added to the states, too

Every kind projects its input once (`in_proj`) and convolves a part of that. Its `conv1d` and `dt_proj` are never called
as modules, so hooks on them see nothing; what they make is made here again, of the projection of accepted tokens. Of
one layer alone the S rows of an array may also be rows of a batch.
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

from probemon.errors import NotSupportedHost
from probemon.host.internals import wrapped_by_adapter
from probemon.host.model import find_layers, weights_in_memory
from probemon.host.site import Site

_MOST_CHANNELS = 64  # of a Mamba-1 layer, which has thousands, evenly spaced: of these the steps are told


@dataclass(frozen=True)
class Steps:
    """Of n tokens in S layers: `dt` `[S, n, H]`, `log_decay` `[S, n, H]`, or `[S, n, H, N]` of Mamba-1."""

    dt: Tensor
    log_decay: Tensor


@dataclass(frozen=True)
class Updates:
    """What n tokens of one row do to the states of S layers.

    `log_decay` broadcasts against `added` `[S, n, *state]`; `tail` is what the next tokens are convolved with, None
    where these were convolved by somebody else.
    """

    steps: Steps
    log_decay: Tensor
    added: Tensor
    tail: Tensor | None


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
    for layer, mixer in find_mixers(model):
        groups.setdefault((kind_of(mixer), tuple(mixer.A_log.shape), tuple(mixer.conv1d.weight.shape)), []).append(
            (layer, mixer)
        )
    if not groups:
        raise NotSupportedHost(
            f"{type(model).__name__} has no selective state-space layer that is known (a module of its layers with"
            " A_log, conv1d and in_proj: mamba, mamba2, bamba, falcon_h1, jamba, zamba2, nemotron_h, granitemoehybrid):"
            " watch its residual stream with probes"
        )
    return [kind(mixers, states=states) for (kind, *_), mixers in groups.items()]


def find_mixers(model: Any) -> Iterator[tuple[int, Any]]:
    """Yield the state-space modules of a host, each with the number of its layer."""
    for number, layer in enumerate(find_layers(model)[1]):
        for module in layer.modules():
            if (
                "A_log" in module._parameters
                and all(hasattr(module, name) for name in ("conv1d", "in_proj"))
                and (hasattr(module, "dt_bias") or hasattr(module, "x_proj"))
            ):
                yield number, module


def kind_of(mixer: Any) -> type[Mamba1] | type[Mamba2]:
    """Return the kind of a module that `find_mixers` gave."""
    return Mamba1 if hasattr(mixer, "x_proj") else Mamba2


def _stacked(mixers: list[tuple[int, Any]], name: str, device: torch.device | str) -> Tensor:
    parts = []
    for layer, mixer in mixers:
        owner, _, own_name = name.rpartition(".")
        module = mixer.get_submodule(owner)
        with weights_in_memory(module):
            weight = getattr(module, own_name)
            if weight.device.type == "meta":
                raise NotSupportedHost(
                    f"layer {layer} has no {name} in memory, and nothing says where it is kept: load the host with its"
                    " weights, or offload it by accelerate"
                )
            parts.append(weight.detach().to(device, torch.float32))
    return torch.stack(parts)


class _Convolution:
    """What the `conv1d` of S layers and the activation after it make of their part of the projection."""

    def __init__(self, mixers: list[tuple[int, Any]], device: torch.device | str) -> None:
        first = mixers[0][1]
        self._weight = _stacked(mixers, "conv1d.weight", device).squeeze(2)  # [S, C, K]
        self._bias = None if first.conv1d.bias is None else _stacked(mixers, "conv1d.bias", device)[:, None]
        self._act = first.act

    def __call__(self, new: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolved `[S, n, C]` of `new` after `tail` `[S, K - 1, C]`, and the next tail."""
        width = self._weight.shape[-1]
        tail = new.new_zeros(len(new), width - 1, new.shape[-1]) if tail is None else tail
        whole = torch.cat([tail, new], dim=1)
        convolved = torch.einsum("stck,sck->stc", whole.unfold(1, width, 1), self._weight)
        convolved = convolved if self._bias is None else convolved + self._bias
        return self._act(convolved), whole[:, 1 - width :] if width > 1 else whole[:, :0]


def with_limit(projected: Tensor, held: bool) -> Tensor:
    """Add a column that says whether steps were held to the limit: those of one token on a used cache are not."""
    return pad(projected, (0, 1), value=float(held))


class Mamba2:
    """Mamba-2 and the hybrids with its layers: one decay a head, states `[H, P, N]`.

    Steps are the last H columns of the projection, with their bias, through softplus, and in forwards of several tokens
    held to the limit. falcon_h1 multiplies the projection by a vector of its own after it.
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
        """Say of tokens (mask `beginnings [n]`) that nothing was kept before them: alone they are held, too."""
        projected[:, beginnings, -1] = 1.0

    def projected(self, mixer: Any, output: Tensor) -> Tensor:
        """Return what a layer goes on with, of the output of its `in_proj`; without states, the steps' part alone."""
        begin = 0 if self._states else output.shape[-1] - self._n_heads
        scale = getattr(mixer, "mup_vector", None)
        return output[..., begin:] if scale is None else output[..., begin:] * scale[..., begin:]

    def dt(self, projected: Tensor) -> Tensor:
        """Return the steps of all heads, `[S, n, H]`."""
        raw, held = projected[..., -1 - self._n_heads : -1], projected[..., -1:] > 0
        dt = softplus(raw + self._bias[:, None])
        return torch.where(held, dt.clamp(*self.limit), dt)

    def steps(self, projected: Tensor) -> Steps:
        dt = self.dt(projected)
        return Steps(dt, dt * self._a[:, None])

    def updates(self, projected: Tensor, tail: Tensor | None, mask: Tensor | None = None) -> Updates:
        """See `Stack`. `mask` `[S, n]`: 0 where there is padding, of which nothing is added."""
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
    """Mamba, falcon_mamba, jamba: a step a channel, a decay a channel and component, states `[D, N]`.

    Steps are told of `_MOST_CHANNELS` channels, evenly spaced. The last two norm what `x_proj` gives before it is used.
    """

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
                raise NotSupportedHost(
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
        """Return the steps `[S, n, D]`, of all channels or some, of what `x_proj` gives for them."""
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
        """Return what tokens add: `x` `[S, n, D]` is what was convolved, `low` what `x_proj` makes of it."""
        low, b, _ = low.split([self.rank, self._n, self._n], dim=-1)
        dt = self.dt(low)
        added = (dt * x)[..., None] * self._normed("b_layernorm", b)[..., None, :]
        log_decay = dt[..., None] * self._a[:, None]
        return Updates(Steps(dt[..., self.channels], log_decay[:, :, self.channels]), log_decay, added, tail)


def _own_copy(module: nn.Module, device: torch.device | str) -> Callable[[Tensor], Tensor]:
    """Return the forward of a module with fp32 weights of its own, without the hooks that are on it."""
    own: Any = copy.copy(module)
    for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate's, which brings weights and takes them away
        vars(own).pop(name, None)
    with weights_in_memory(module):
        own._parameters = {
            name: weight.detach().to(device, torch.float32) for name, weight in module.named_parameters()
        }
    return partial(type(module).forward, own)
