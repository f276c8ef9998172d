"""The residual stream after some layers of a model inside vLLM.

Auxiliary hidden states are outputs of the compiled graph, so they are set before compilation. Other models are read by
hooks, which only run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probemon.core.probes import parse_site
from probemon.errors import AlignmentError, UnsupportedModel

AUXILIARY, HOOKS = "auxiliary", "hooks"


class LayerStates:
    """`way`: "auxiliary" or "hooks". Made by `put_on`, between loading and compilation."""

    def __init__(self, way: str, sites: Sequence[str], order: Sequence[int]) -> None:
        self.way, self._sites, self._order = way, tuple(sites), list(order)
        self._hooked: dict[str, Tensor] = {}

    @classmethod
    def put_on(cls, runner: Any, sites: Sequence[str], *, eager: bool, auxiliary: Callable[[Any], bool]) -> LayerStates:
        """Make a runner's model hand out states at `sites`. Raises `UnsupportedModel`.

        - `eager`: the model is neither compiled nor captured
        - `auxiliary(model)`: True if it has auxiliary states
        """
        model, n_layers = runner.get_model(), int(runner.model_config.get_total_num_hidden_layers())
        layers = [parse_site(site)[1] for site in sites]
        for site, layer in zip(sites, layers, strict=True):
            if layer >= n_layers:
                raise UnsupportedModel(f"the packs read {site}, {type(model).__name__} has layers 0..{n_layers - 1}")
        if auxiliary(model):
            # vLLM counts inputs: the output of layer k goes into k + 1. It takes each once, ascending.
            ids = sorted({layer + 1 for layer in layers})
            model.set_aux_hidden_state_layers(tuple(ids))
            runner.use_aux_hidden_state_outputs = True
            return cls(AUXILIARY, sites, [ids.index(layer + 1) for layer in layers])
        if not eager:
            raise UnsupportedModel(
                f"{type(model).__name__} has no auxiliary hidden states in vLLM, and hooks do not run in compiled code:"
                " give --enforce-eager (enforce_eager=True)"
            )
        states = cls(HOOKS, sites, range(len(sites)))
        modules = _layers_of(model, n_layers)
        for site, layer in zip(sites, layers, strict=True):
            modules[layer].register_forward_hook(states._hook(site))
        return states

    def of_step(self, state: Any) -> dict[str, Tensor]:
        """Return a step's states by site. Raises `AlignmentError`."""
        if self.way == HOOKS:
            taken, self._hooked = self._hooked, {}
            missing = [site for site in self._sites if site not in taken]
            if missing:
                raise AlignmentError(f"vLLM ran a step without reaching {', '.join(missing)}: a hook was removed")
            return taken
        tensors = getattr(state, "aux_hidden_states", None)
        if tensors is None or len(tensors) != len(set(self._order)):
            n = 0 if tensors is None else len(tensors)
            raise AlignmentError(
                f"vLLM handed out {n} auxiliary states of a step, {len(set(self._order))} layers were asked for: its"
                " graph is of other layers"
            )
        return {site: tensors[at] for site, at in zip(self._sites, self._order, strict=True)}

    def _hook(self, site: str) -> Callable[..., None]:
        def take(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                raise UnsupportedModel(f"the layer of {site} is compiled: hooks would not run. Give enforce_eager")
            # Layers return what they add, and the stream before it.
            parts = [part for part in (output if isinstance(output, tuple) else (output,)) if part is not None]
            self._hooked[site] = parts[0] + parts[1] if len(parts) == 2 else parts[0]

        return take


def _layers_of(model: nn.Module, n_layers: int) -> nn.ModuleList:
    lists = [
        (name.count("."), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_layers
    ]
    shallowest = [module for depth, module in lists if depth == min(depth for depth, _ in lists)]
    if len(shallowest) != 1:
        raise UnsupportedModel(
            f"expected one list of {n_layers} layers in {type(model).__name__}, found {len(shallowest)}: which of its"
            " modules are the layers is unknown"
        )
    return shallowest[0]
