"""How much of a change of a site's output reaches the hidden state after its layer.

    multipliers(bem)["o_3"]         # 1.0; for Granite its residual_multiplier; no entry if unknown

A model may normalise, scale or mix a block's output. So a twin (`probemon.host.twin`) runs with and without a change,
after its scales are moved from their start, which is often 1.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from probemon.adapters.bem.config import CHUNK_KINDS, KINDS
from probemon.adapters.bem.sites import find_site
from probemon.errors import UnsupportedModel
from probemon.host.abilities import Abilities
from probemon.host.model import find_layers, hidden_size, site_module, text_config
from probemon.host.trials import ROWS

if TYPE_CHECKING:
    from probemon.adapters.bem.attached import Bem

_CLOSE = 1e-3  # relative; fp32 rounding is far below
Kind = tuple[str, type, type]  # a site's kind, the classes of its layer and block


def multipliers(bem: Bem) -> dict[str, float]:
    """Return how much of an update reaches the hidden state, by site key, if a trial shows it."""
    model = bem.host
    _, layers = find_layers(model)
    # Others may come from the twin's size.
    expected = (1.0, float(getattr(text_config(model), "residual_multiplier", None) or 1.0))
    shares = Abilities(model).on_twin("residual", arriving) or {}
    by_site = {}
    for site in bem.sites:
        site_kind = _kind(layers, site.kind, site.layer)
        kinds = [kind for kind in shares if kind[0] == site_kind[0] and all(map(issubclass, site_kind[1:], kind[1:]))]
        measured = [share for kind in kinds for share in shares[kind]]
        exact = [one for one in expected if all(abs(share / one - 1) < _CLOSE for share in measured)]
        if measured and exact:
            by_site[site.key] = exact[0]
    return by_site


def arriving(model: nn.Module) -> dict[Kind, list[float]]:
    """Return by kind of site the share of a change that reaches each layer's output; NaN if anything else does.
    Changes the twin. For attention, feed-forward blocks give zeros.
    """
    _, layers = find_layers(model)
    _move_what_begins_alike(layers)
    shares: dict[Kind, list[float]] = {}
    for kind in KINDS:
        if kind in CHUNK_KINDS:
            continue
        without = _outputs(model, kind, None)
        for at in range(len(layers)):
            with suppress(UnsupportedModel):
                site = find_site(layers, kind, at, hidden_size(model))
                share = _arrives(model, kind, site.module, at, without[at])
                shares.setdefault(_kind(layers, kind, at), []).append(share)
    return shares


def _kind(layers: nn.ModuleList, kind: str, at: int) -> Kind:
    block = site_module(layers, f"{'mlp_out' if kind == 'down' else 'attn_out'}.{at}")
    return kind, type(layers[at]), type(block)


def _move_what_begins_alike(layers: nn.ModuleList) -> None:
    for tensor in [*layers.parameters(), *layers.buffers()]:
        if tensor.is_floating_point() and tensor.dim() < 2:
            tensor.mul_(1.2 + 0.4 * torch.rand_like(tensor)).add_(0.1 * torch.rand_like(tensor))


def _arrives(model: nn.Module, kind: str, module: nn.Module, at: int, without: Tensor | None) -> float:
    if without is None:
        return math.nan
    added = without.std() * torch.randn_like(without)

    def add(output: Tensor) -> Tensor:
        return output + added.view(output.shape)

    try:
        with_it = _outputs(model, kind, (module, add))[at]
    except RuntimeError:  # the module runs on other states
        return math.nan
    if with_it is None or with_it.shape != without.shape:
        return math.nan
    arrived = (with_it - without).double()
    share = float((arrived * added).sum() / added.double().square().sum())
    apart = float(torch.linalg.vector_norm(arrived - share * added) / torch.linalg.vector_norm(added))
    return share if apart < _CLOSE * abs(share) else math.nan


def _outputs(model: nn.Module, kind: str, change: Any) -> list[Tensor | None]:
    """Each layer's output. `change`: a module, and a function of its output."""
    decoder, layers = find_layers(model)
    outputs: list[Tensor | None] = [None] * len(layers)

    def note(at: int) -> Any:
        return lambda module, args, output: outputs.__setitem__(at, _first(output).clone())

    with ExitStack() as stack:
        for at, layer in enumerate(layers):
            stack.callback(layer.register_forward_hook(note(at)).remove)
            with suppress(UnsupportedModel):
                if kind != "down":
                    block = site_module(layers, f"mlp_out.{at}")
                    stack.callback(block.register_forward_hook(_changing(torch.zeros_like)).remove)
        if change is not None:
            module, add = change
            stack.callback(module.register_forward_hook(_changing(add)).remove)
        decoder(input_ids=torch.tensor(ROWS), use_cache=False)
    return outputs


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _changing(change: Any) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        changed = change(_first(output))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook
