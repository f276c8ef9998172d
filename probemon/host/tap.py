"""Tap: passes hidden states of layers to a callback. Reads only; always removed.

    with Tap(model, ["resid_post.15"], callback):       # callback(site, hidden [B, T, D])
        model.generate(**inputs)

A bad site leaves no hook behind. Compiled code writes to `tap.buffers` if there is room, else its graph breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from probemon.core.probes import is_recurrent, parse_site
from probemon.errors import UnsupportedModel
from probemon.host.compiled import Buffers
from probemon.host.internals import uncompiled
from probemon.host.model import find_layers, site_module
from probemon.host.placed_hooks import PlacedHook
from probemon.host.recurrent.state_sites import recurrent_site
from probemon.host.site import Site

Callback = Callable[[str, Tensor], None]


class Tap:
    """A `with` block around forward hooks, listed in `placed`.

    - `resid_post.N`: output of layer N (0-based)
    - `attn_out.N`, `mlp_out.N`: its blocks' outputs, before they are added
    - `ssm_state.N`, `delta.N`: see `probemon.host.recurrent.state_sites`
    """

    def __init__(self, model: Any, sites: Sequence[str | Site], callback: Callback) -> None:
        decoder, layers = find_layers(model)
        places = [
            recurrent_site(model, site) if isinstance(site, str) and is_recurrent(site) else site for site in sites
        ]
        self.own = {place.name: place for place in places if isinstance(place, Site)}
        self._targets: list[tuple[str, nn.Module]] = [
            (str(place), place.module if isinstance(place, Site) else _of_one_layer(layers, place)) for place in places
        ]
        self._callback = callback
        self._layers = layers
        self._holders = [
            (part, name) for part in decoder.modules() for name, child in part.named_children() if child is layers
        ]
        in_layer = [site.layer if isinstance(site, Site) else parse_site(site)[1] for site in sites]
        self._standing = {
            name: _Standing.of(layers, number, module)
            for number, (name, module) in zip(in_layer, self._targets, strict=True)
            if number is not None
        }
        self.placed: list[PlacedHook] = []
        self.buffers = Buffers(dict(self._targets), {name: (site.width, site.flat) for name, site in self.own.items()})
        self._stack = ExitStack()

    def __enter__(self) -> Tap:
        with ExitStack() as stack:
            for place in self.own.values():
                if place.attach is not None:
                    place.attach(stack)
            self.placed = []
            for site, module in self._targets:
                handle = module.register_forward_hook(self._hook(site))
                stack.callback(handle.remove)
                self.placed.append(PlacedHook.of(site, module, handle, reads=True))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def stands(self, site: str) -> bool:
        """True if the site still names the same module: layers may be removed, wrapped or moved."""
        standing = self._standing.get(site)
        if standing is None:  # outside of the layers
            return True
        layers = self._layers
        return standing.holds(layers) and all(part._modules.get(name) is layers for part, name in self._holders)

    def _hook(self, site: str) -> Callable[[nn.Module, Any, Any], None]:
        # Not always disabled: that wrapper is slower than the hook.
        leave_graph, buffers = torch.compiler.disable(self._callback), self.buffers
        read = self.own[site].read if site in self.own else _first

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = read(output)
            if not torch.compiler.is_dynamo_compiling():  # is_compiling is also true while another thread compiles
                if not isinstance(hidden, Tensor):
                    raise UnsupportedModel(
                        f"{site} gives a {type(hidden).__name__}, expected a tensor [rows, tokens, hidden size] or a"
                        " tuple that begins with one"
                    )
                self._callback(site, hidden.detach())
            elif buffers.holds(site, hidden):
                buffers.keep(site, hidden)
            else:
                leave_graph(site, hidden.detach())

        return hook


@dataclass(frozen=True)
class _Standing:
    """A module's original layer and path; empty for the layer itself."""

    number: str  # name in the list
    layer: nn.Module
    names: tuple[str, ...]
    module: nn.Module

    @staticmethod
    def of(layers: nn.ModuleList, number: int, module: nn.Module) -> _Standing:
        layer, module = uncompiled(layers[number]), uncompiled(module)
        path = next((name for name, part in layer.named_modules() if part is module), "")
        return _Standing(
            str(number), layer, tuple(name for name in path.split(".") if name and name != "_orig_mod"), module
        )

    def holds(self, layers: nn.ModuleList) -> bool:
        """True if the module is still there, perhaps compiled."""
        part = layers._modules.get(self.number)
        if part is None or _inner(part) is not self.layer:
            return False
        part = self.layer
        for name in self.names:
            part = _inner(part._modules.get(name))
            if part is None:
                return False
        return not self.names or part is self.module


def _inner(part: nn.Module | None) -> nn.Module | None:
    """`uncompiled`, but fast for every token."""
    return uncompiled(part) if part is not None and "_orig_mod" in part._modules else part


def check_states(site: str, hidden: Tensor, shape: Sequence[int], width: int | None, *, floats: bool = True) -> None:
    """Raise `UnsupportedModel` unless `hidden` is `[rows, tokens, width]` for a forward of `shape` (rows, tokens)."""
    n_rows, n_tokens = shape
    if hidden.dim() != 3 or tuple(hidden.shape[:2]) != (n_rows, n_tokens):
        raise UnsupportedModel(
            f"{site} gives {tuple(hidden.shape)} for a forward of {n_rows} rows and {n_tokens} tokens, expected "
            "[rows, tokens, hidden size]: which token each state belongs to is unknown"
        )
    if width is not None and hidden.shape[2] != width:
        raise UnsupportedModel(
            f"{site} gives {hidden.shape[2]} values a token, the pack reads {width}: use a pack that was made for what"
            " this module gives"
        )
    if floats and not hidden.is_floating_point():
        raise UnsupportedModel(f"{site} gives {hidden.dtype}, expected floating point: this is not a hidden state")


def ran_again(site: str) -> str:
    """Error text for a module that ran twice in one forward."""
    return (
        f"{site} was run twice in one forward of the model (a shared layer, or a stack that loops): which of its"
        " states are the tokens' is unknown. Read a site that runs once"
    )


def _of_one_layer(layers: nn.ModuleList, site: str) -> nn.Module:
    module = site_module(layers, site)
    holders = [number for number, layer in enumerate(layers) if any(part is module for part in layer.modules())]
    if len(holders) > 1:
        raise UnsupportedModel(
            f"site {site!r}: layers {', '.join(map(str, holders))} share one module, which therefore runs more than"
            " once in a forward: which of its states are the tokens' is unknown. Read a site that runs once"
        )
    return module


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) and output else output
