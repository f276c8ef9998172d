"""Sites of a recurrent layer: `ssm_state.L`, what it keeps after a token, and `delta.L`, the step that it took there.

    site = recurrent_site(model, "ssm_state.3")     # a Site for a Tap; its values at a token are fp32
    recurrent_width(model, "ssm_state.3")           # how many they are

A state is computed again beside the host, in fp32, from what the layer projected and from the state in its cache before
the forward, which the host itself keeps with the right row: of beams, of a second turn, of chunks of a prompt. It is
flattened, `[H, P, N]` of Mamba-2 and `[D, N]` of Mamba-1. Steps have a value for each head, or channel.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from probemon.core.probes import is_recurrent, parse_site
from probemon.errors import ConfigError, NotSupportedHost
from probemon.host.model import find_layers, hidden_size
from probemon.host.recurrent.mixers import Mamba1, Mamba2, find_mixers, kind_of, with_limit
from probemon.host.recurrent.scan import scan_loop
from probemon.host.site import Site

STATE = "ssm_state"


def site_width(model: Any, site: str) -> int:
    """Return how many values a token has at a site. Raises `ConfigError`, `NotSupportedHost`."""
    if not is_recurrent(site):
        return hidden_size(model)
    kind, mixer = parse_site(site)[0], _mixer_of(model, site)
    if kind_of(mixer) is Mamba1:
        return math.prod(mixer.A_log.shape[: 2 if kind == STATE else 1])
    return int(mixer.num_heads) * (int(mixer.head_dim) * int(mixer.ssm_state_size) if kind == STATE else 1)


def recurrent_site(model: Any, site: str) -> Site:
    """Return the site of a host, with what it needs to be read. Raises `ConfigError`, `NotSupportedHost`."""
    mixer = _mixer_of(model, site)
    reader, width = _Reader(site, mixer), site_width(model, site)
    module = mixer.x_proj if kind_of(mixer) is Mamba1 else mixer.in_proj
    # Outside of graphs: how far a forward goes back is in its cache, and a scan takes as many rounds as there are
    # tokens.
    read = torch.compiler.disable(partial(reader.read, width))
    return Site(site, module, read, width=width, attach=reader.attach)


def _mixer_of(model: Any, site: str) -> Any:
    kind, at = parse_site(site)
    n_layers, mixers = len(find_layers(model)[1]), list(find_mixers(model))
    if at >= n_layers:
        raise ConfigError(f"site {site!r}: the host has layers 0..{n_layers - 1}")
    own = [mixer for layer, mixer in mixers if layer == at]
    if not own:
        having = ", ".join(str(layer) for layer, _ in mixers) or "none"
        raise NotSupportedHost(
            f"site {site!r}: layer {at} of {type(model).__name__} has no selective state-space layer that is known"
            f" (mamba, mamba2, bamba, falcon_h1, jamba, zamba2, nemotron_h, granitemoehybrid); those that have one:"
            f" {having}. Use a pack that reads the residual stream, or one of these layers"
        )
    if len(own) > 1 or sum(mixer is own[0] for _, mixer in mixers) > 1:
        raise NotSupportedHost(
            f"site {site!r}: its state-space layer is one of several, or shared with another layer: whose {kind} is"
            " meant is unknown. Read a site that runs once"
        )
    return own[0]


class _Forward(threading.local):
    """What a thread's open forward of a layer was given: its mask; `kept`, its part of a cache that was used before;
    `convolved`, what `x_proj` of Mamba-1 was given.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.mask: Tensor | None = None
        self.kept: Any = None
        self.convolved: Tensor | None = None


class _Reader:
    """Reads one layer: `read` is called with the output of the module whose site it is."""

    def __init__(self, site: str, mixer: Any) -> None:
        self._mixer, self._n_convolved = mixer, mixer.conv1d.kernel_size[0]
        self._kind, layer = parse_site(site)
        self._device = next((p.device for p in mixer.parameters() if p.device.type != "meta"), torch.device("cpu"))
        self._parameters = list(inspect.signature(mixer.forward).parameters)
        self._forward = _Forward()
        # Of Mamba-1 what was convolved is seen, so that it need not be made again.
        states = self._kind == STATE and kind_of(mixer) is Mamba2
        self._stack = kind_of(mixer)([(layer, mixer)], states=states, device=self._device)

    def attach(self, stack: ExitStack) -> None:
        """Put on what tells the mask and the cache before the layer runs."""
        hooks: dict[str, Callable[..., None]] = {
            "enter": torch.compiler.disable(self._enter),
            "keep": torch.compiler.disable(self._keep_convolved),
        }
        stack.callback(self._mixer.register_forward_pre_hook(hooks["enter"], with_kwargs=True).remove)
        if isinstance(self._stack, Mamba1):
            stack.callback(self._mixer.x_proj.register_forward_pre_hook(hooks["keep"]).remove)

    def read(self, width: int, output: Tensor) -> Tensor:
        """Return the values of every token of a forward, `[B, T, width]`; NaN of what ran without its layer."""
        forward = self._forward
        if not forward.is_open:
            return output.new_full((*output.shape[:2], width), math.nan, dtype=torch.float32)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            values = self._values(self._moved(output), forward)
        forward.is_open, forward.mask, forward.kept, forward.convolved = False, None, None, None
        return values.to(output.device)

    def _values(self, output: Tensor, forward: _Forward) -> Tensor:
        stack, kept = self._stack, forward.kept
        if isinstance(stack, Mamba2):
            projected = with_limit(stack.projected(self._mixer, output), output.shape[1] > 1 or kept is None)
            if self._kind != STATE:
                return stack.dt(projected)
            mask = None if forward.mask is None else forward.mask.to(self._device)
            # What was projected of the tokens before, which the first of these are convolved with.
            tail = None if kept is None else kept.conv_states[0].transpose(1, 2)
            tail = None if tail is None else self._moved(tail[:, tail.shape[1] - self._n_convolved + 1 :])
            updates = stack.updates(projected, tail, mask)
        elif self._kind != STATE:
            return stack.dt(output[..., : stack.rank])
        else:
            assert forward.convolved is not None
            updates = stack.added(forward.convolved, output)
        start = None if kept is None else self._moved(kept.recurrent_states[0])
        states = scan_loop(updates.log_decay.transpose(0, 1), updates.added.transpose(0, 1), start)
        return states.transpose(0, 1).flatten(2)

    def _enter(self, mixer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        cache = given.get("cache_params")
        kept = None if cache is None else cache.layers[mixer.layer_idx]
        # Asked before the layer runs, which says of itself that it has a state before it has one.
        self._forward.kept = kept if kept is not None and kept.has_previous_state[0] else None
        self._forward.mask, self._forward.is_open = given.get("attention_mask"), True

    def _keep_convolved(self, module: Any, args: tuple[Any, ...]) -> None:
        self._forward.convolved = self._moved(args[0])

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, torch.float32)
