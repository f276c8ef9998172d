"""LayerStates: the residual stream after some layers of a model inside vLLM, step by step.

    states = LayerStates.put_on(runner, ("resid_post.15",), eager=False, auxiliary=supports_eagle3)
    ...                                                 # the runner runs a step
    states.of_step(runner.execute_model_state)          # {"resid_post.15": [N, D]}, rows of the step, padding after

First choice are auxiliary hidden states, which vLLM's own speculators read: they are outputs of the compiled graph.
They have to be asked for before it is compiled; afterwards nothing would happen, and nobody would be told, so a canary
looks. A model that has none is read by forward hooks, where it runs eagerly: compiled code would run them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probemon.core.probes import parse_site
from probemon.errors import AlignmentError, NotSupportedHost

AUXILIARY, HOOKS = "auxiliary", "hooks"


class LayerStates:
    """`way`: "auxiliary" or "hooks". Made by `put_on`, after the model is loaded and before it is compiled."""

    def __init__(self, way: str, sites: Sequence[str], order: Sequence[int]) -> None:
        self.way, self._sites, self._order = way, tuple(sites), list(order)
        self._hooked: dict[str, Tensor] = {}

    @classmethod
    def put_on(cls, runner: Any, sites: Sequence[str], *, eager: bool, auxiliary: Callable[[Any], bool]) -> LayerStates:
        """Have a model runner's model hand out its states at `sites`.

        `eager`: whether the model is neither compiled nor captured. `auxiliary(model)`: whether it can hand out
        auxiliary states. Raises `NotSupportedHost`.
        """
        model, n_layers = runner.get_model(), int(runner.model_config.get_total_num_hidden_layers())
        layers = [parse_site(site)[1] for site in sites]
        for site, layer in zip(sites, layers, strict=True):
            if layer >= n_layers:
                raise NotSupportedHost(f"the packs read {site}, {type(model).__name__} has layers 0..{n_layers - 1}")
        if auxiliary(model):
            # vLLM counts what goes into a layer: the output of layer k goes into k + 1. It takes each once, ascending.
            ids = sorted({layer + 1 for layer in layers})
            model.set_aux_hidden_state_layers(tuple(ids))
            runner.use_aux_hidden_state_outputs = True
            return cls(AUXILIARY, sites, [ids.index(layer + 1) for layer in layers])
        if not eager:
            raise NotSupportedHost(
                f"{type(model).__name__} has no auxiliary hidden states in vLLM, and hooks do not run in compiled code:"
                " give --enforce-eager (enforce_eager=True)"
            )
        states = cls(HOOKS, sites, range(len(sites)))
        modules = _layers_of(model, n_layers)
        for site, layer in zip(sites, layers, strict=True):
            modules[layer].register_forward_hook(states._hook(site))
        return states

    def of_step(self, state: Any) -> dict[str, Tensor]:
        """Return the states of the step that `state`, of the runner, is of. Raises `AlignmentError`."""
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
                raise NotSupportedHost(f"the layer of {site} is compiled: hooks would not run. Give enforce_eager")
            # Layers hand on what they add and the stream before it; the norm of the next one adds them up.
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
        raise NotSupportedHost(
            f"expected one list of {n_layers} layers in {type(model).__name__}, found {len(shallowest)}: which of its"
            " modules are the layers is unknown"
        )
    return shallowest[0]
