"""Sites of recurrent layers: `ssm_state.L`, the state after a token, and `delta.L`, the step taken there.

    site = recurrent_site(model, "ssm_state.3")     # a Site for a Tap, fp32
    site_width(model, "ssm_state.3")

States are recomputed in fp32 from the layer's projection and its cached state. They are flattened: `[H, P, N]` for
Mamba-2, `[D, N]` for Mamba-1. A step has one value per head or channel.
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
from probemon.errors import ConfigError, UnsupportedDecoding, UnsupportedModel
from probemon.host.internals import cache_among
from probemon.host.model import find_layers, hidden_size
from probemon.host.recurrent.mixers import Mamba1, Mamba2, find_mixers, kind_of, with_limit
from probemon.host.recurrent.scan import scan_loop
from probemon.host.site import Site

STATE = "ssm_state"


def site_width(model: Any, site: str) -> int:
    """Return the number of values per token. Raises `ConfigError`, `UnsupportedModel`."""
    if not is_recurrent(site):
        return hidden_size(model)
    kind, mixer = parse_site(site)[0], _mixer_of(model, site)
    if kind_of(mixer) is Mamba1:
        return math.prod(mixer.A_log.shape[: 2 if kind == STATE else 1])
    return int(mixer.num_heads) * (int(mixer.head_dim) * int(mixer.ssm_state_size) if kind == STATE else 1)


def recurrent_site(model: Any, site: str) -> Site:
    """Return the `Site` to tap. Raises `ConfigError`, `UnsupportedModel`."""
    mixer = _mixer_of(model, site)
    reader, width = _Reader(site, mixer), site_width(model, site)
    module = mixer.x_proj if kind_of(mixer) is Mamba1 else mixer.in_proj
    # Outside of graphs: the scan takes one round per token.
    read = torch.compiler.disable(partial(reader.read, width))
    return Site(site, module, read, width=width, attach=reader.attach)


def _mixer_of(model: Any, site: str) -> Any:
    kind, at = parse_site(site)
    n_layers, mixers = len(find_layers(model)[1]), list(find_mixers(model))
    if at >= n_layers:
        raise ConfigError(f"site {site!r}: the model has layers 0..{n_layers - 1}")
    candidates = [mixer for layer, mixer in mixers if layer == at]
    if not candidates:
        available = ", ".join(str(layer) for layer, _ in mixers) or "none"
        raise UnsupportedModel(
            f"site {site!r}: layer {at} of {type(model).__name__} has no selective state-space layer that is known"
            f" (mamba, mamba2, bamba, falcon_h1, jamba, zamba2, nemotron_h, granitemoehybrid); those that have one:"
            f" {available}. Use a pack that reads the residual stream, or one of these layers"
        )
    if len(candidates) > 1 or sum(mixer is candidates[0] for _, mixer in mixers) > 1:
        raise UnsupportedModel(
            f"site {site!r}: its state-space layer is one of several, or shared with another layer: whose {kind} is"
            " meant is unknown. Read a site that runs once"
        )
    return candidates[0]


class _Forward(threading.local):
    """A thread's open forward of a layer: its mask, its used cache, the input of Mamba-1's `x_proj`."""

    def __init__(self) -> None:
        self.is_open = False
        self.mask: Tensor | None = None
        self.kept: Any = None
        self.convolved: Tensor | None = None


class _Reader:
    """Reads one layer from the output of the site's module."""

    def __init__(self, site: str, mixer: Any) -> None:
        self._mixer, self._n_convolved = mixer, mixer.conv1d.kernel_size[0]
        self._kind, layer = parse_site(site)
        self._device = next((p.device for p in mixer.parameters() if p.device.type != "meta"), torch.device("cpu"))
        self._parameters = list(inspect.signature(mixer.forward).parameters)
        self._forward = _Forward()
        # Mamba-1's convolved input is observed, not recomputed.
        states = self._kind == STATE and kind_of(mixer) is Mamba2
        self._stack = kind_of(mixer)([(layer, mixer)], states=states, device=self._device)

    def attach(self, stack: ExitStack) -> None:
        """Install hooks that record mask and cache before the layer runs."""
        hooks: dict[str, Callable[..., None]] = {
            "enter": torch.compiler.disable(self._enter),
            "keep": torch.compiler.disable(self._keep_convolved),
        }
        stack.callback(self._mixer.register_forward_pre_hook(hooks["enter"], with_kwargs=True).remove)
        if isinstance(self._stack, Mamba1):
            stack.callback(self._mixer.x_proj.register_forward_pre_hook(hooks["keep"]).remove)

    def read(self, width: int, output: Tensor) -> Tensor:
        """Return `[B, T, width]`; NaN if the module ran without its layer."""
        forward = self._forward
        if not forward.is_open:
            return output.new_full((*output.shape[:2], width), math.nan, dtype=torch.float32)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            values = self._values(self._moved(output), forward)
        forward.is_open, forward.mask, forward.kept, forward.convolved = False, None, None, None
        return values.to(output.device)

    def _values(self, output: Tensor, forward: _Forward) -> Tensor:
        stack, layer_cache = self._stack, forward.kept
        if isinstance(stack, Mamba2):
            projected = with_limit(stack.projected(self._mixer, output), output.shape[1] > 1 or layer_cache is None)
            if self._kind != STATE:
                return stack.dt(projected)
            mask = None if forward.mask is None else forward.mask.to(self._device)
            # Projections of earlier tokens, for the convolution.
            tail = None if layer_cache is None else layer_cache.conv_states[0].transpose(1, 2)
            tail = None if tail is None else self._moved(tail[:, tail.shape[1] - self._n_convolved + 1 :])
            updates = stack.updates(projected, tail, mask)
        elif self._kind != STATE:
            return stack.dt(output[..., : stack.rank])
        else:
            assert forward.convolved is not None
            updates = stack.added(forward.convolved, output)
        start = None if layer_cache is None else self._moved(layer_cache.recurrent_states[0])
        states = scan_loop(updates.log_decay.transpose(0, 1), updates.added.transpose(0, 1), start)
        return states.transpose(0, 1).flatten(2)

    def _enter(self, mixer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        arguments = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        cache = cache_among(arguments)
        if cache is not None and not hasattr(cache, "layers"):
            raise UnsupportedDecoding(
                f"a {type(cache).__name__} of this version of transformers does not show the state of each layer:"
                " upgrade transformers, or use_cache=False"
            )
        layer_cache = None if cache is None else cache.layers[mixer.layer_idx]
        # Before the layer runs: it sets this flag early.
        self._forward.kept = layer_cache if layer_cache is not None and layer_cache.has_previous_state[0] else None
        self._forward.mask, self._forward.is_open = arguments.get("attention_mask"), True

    def _keep_convolved(self, module: Any, args: tuple[Any, ...]) -> None:
        self._forward.convolved = self._moved(args[0])

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, torch.float32)
