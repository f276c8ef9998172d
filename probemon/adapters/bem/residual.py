"""Residual: of which sites what is added to their output arrives in the hidden state that the layer hands on, and how
much of it.

    multipliers(bem)["o_3"]         # 1.0; of Granite its residual_multiplier; no entry where it is not known

A host may normalise, scale or mix what a block gives before it adds it, and that does not show in names. So a twin of
it (`probemon.host.twin`) is run with and without a change of one site's output. What is learned of its layers is first
moved away from where it begins: a scale that begins as 1 is none that is known.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from probemon.adapters.bem.config import CHUNK_KINDS, KINDS
from probemon.adapters.bem.sites import find_site
from probemon.errors import NotSupportedHost
from probemon.host.abilities import Abilities
from probemon.host.model import find_layers, hidden_size, site_module, text_config
from probemon.host.trials import ROWS

if TYPE_CHECKING:
    from probemon.adapters.bem.attached import Bem

_CLOSE = 1e-3  # of what is added: rounding in fp32 stays far below
Kind = tuple[str, type, type]  # of a site: its kind, and the classes of its layer and of its block


def multipliers(bem: Bem) -> dict[str, float]:
    """Return by site key how much of its update arrives in its layer's hidden state, for the sites of which a trial
    on a twin shows that nothing else becomes of it.
    """
    host = bem.host
    _, layers = find_layers(host)
    # Any other number may be of the twin's own size, such as of how many layers it has.
    stated = (1.0, float(getattr(text_config(host), "residual_multiplier", None) or 1.0))
    shares = Abilities(host).on_twin("residual", arriving) or {}
    found = {}
    for site in bem.sites:
        own = _kind(layers, site.kind, site.layer)
        kinds = [kind for kind in shares if kind[0] == own[0] and all(map(issubclass, own[1:], kind[1:]))]
        measured = [share for kind in kinds for share in shares[kind]]
        exact = [one for one in stated if all(abs(share / one - 1) < _CLOSE for share in measured)]
        if measured and exact:
            found[site.key] = exact[0]
    return found


def arriving(model: nn.Module) -> dict[Kind, list[float]]:
    """Return, of each kind of site of a twin and layer by layer, the share of what is added to its output that arrives
    in the output of its layer; NaN where something else arrives. Changes the twin's weights.

    What the feed-forward block makes of a change in attention is not part of it: there the block gives zeros.
    """
    _, layers = find_layers(model)
    _move_what_begins_alike(layers)
    shares: dict[Kind, list[float]] = {}
    for kind in KINDS:
        if kind in CHUNK_KINDS:
            continue
        without = _outputs(model, kind, None)
        for at in range(len(layers)):
            with suppress(NotSupportedHost):
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
    """The share of what is added to a module's output that arrives in the output `without [B, T, D]` of its layer."""
    if without is None:
        return math.nan
    added = without.std() * torch.randn_like(without)

    def add(given: Tensor) -> Tensor:
        return given + added.view(given.shape)

    try:
        with_it = _outputs(model, kind, (module, add))[at]
    except RuntimeError:  # it is run on other states than the layer's
        return math.nan
    if with_it is None or with_it.shape != without.shape:
        return math.nan
    arrived = (with_it - without).double()
    share = float((arrived * added).sum() / added.double().square().sum())
    apart = float(torch.linalg.vector_norm(arrived - share * added) / torch.linalg.vector_norm(added))
    return share if apart < _CLOSE * abs(share) else math.nan


def _outputs(model: nn.Module, kind: str, change: Any) -> list[Tensor | None]:
    """What each layer hands on, None where it did not run; `change`: a module, and what its output becomes."""
    decoder, layers = find_layers(model)
    given: list[Tensor | None] = [None] * len(layers)

    def note(at: int) -> Any:
        return lambda module, args, output: given.__setitem__(at, _first(output).clone())

    with ExitStack() as stack:
        for at, layer in enumerate(layers):
            stack.callback(layer.register_forward_hook(note(at)).remove)
            with suppress(NotSupportedHost):
                if kind != "down":
                    block = site_module(layers, f"mlp_out.{at}")
                    stack.callback(block.register_forward_hook(_changing(torch.zeros_like)).remove)
        if change is not None:
            module, add = change
            stack.callback(module.register_forward_hook(_changing(add)).remove)
        decoder(input_ids=torch.tensor(ROWS), use_cache=False)
    return given


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _changing(change: Any) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        changed = change(_first(output))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook
