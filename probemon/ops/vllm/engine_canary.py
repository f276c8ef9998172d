"""Compares states of the engine's first forward with those of the layers asked for.

A graph compiled for other layers, or a lost hook, gives wrong states of the right shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.probes import parse_site
from probemon.errors import Blind, ConfigError
from probemon.host.model import find_layers
from probemon.manager import DynamicProbeManager

LENGTHS = (24, 9)  # of its two requests, which run in one step
_SCORES_APART = 0.01  # on average
_OF_FREE = 0.8  # of free memory, which a copy of the weights may take
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}  # mean relative distances


def canary_way(asked: str, n_bytes: int, free: int, quantization: str | None) -> tuple[str, str]:
    """Return the comparison, "weights", "layers" or "off", and why "auto" does not compare weights.

    `n_bytes`: of the weights; `free`: bytes of memory. Raises `ConfigError` for weights that do not fit.
    """
    why = ""
    if n_bytes > _OF_FREE * free:
        why = f"transformers' copy of the weights takes {n_bytes / 1e9:.1f} GB of {free / 1e9:.1f} free"
        if asked == "weights":
            raise ConfigError(f"{why}: compare the layers alone (canary='layers', --canary layers)")
    elif quantization:
        why = f"the weights are quantised ({quantization}), which transformers may not load"
    if asked == "auto":
        return ("layers", why) if why else ("weights", "")
    return asked, ""


def canary_prompts(n_vocabulary: int) -> dict[str, list[int]]:
    """Return the prompts of some requests, the same at every start."""
    random = np.random.default_rng(0)
    return {f"probemon-canary-{n}": random.integers(0, n_vocabulary, n).tolist() for n in LENGTHS}


def reference_states(model: Any, prompts: Iterable[list[int]]) -> Tensor:
    """Return transformers' states after each layer, fp32 `[L, T, D]`, of prompts run one by one."""
    decoder, layers = find_layers(model)
    taken: list[Tensor] = []

    def take(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        taken.append(hidden.detach().reshape(-1, hidden.shape[-1]).float().cpu())

    handles = [layer.register_forward_hook(take) for layer in layers]
    parts = []
    try:
        with torch.no_grad():
            for ids in prompts:
                taken.clear()
                decoder(torch.tensor([ids], device=next(model.parameters()).device))
                parts.append(torch.stack(taken))
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(parts, dim=1)


def judge_scores(manager: DynamicProbeManager, taken: Mapping[str, Tensor], reference: Tensor) -> dict[str, float]:
    """Compare the scores of an engine's states with those of transformers' states; return figures. Raises `Blind`.

    States apart by the last bits change scores a little. Of a wrong row, layer or weight they are of another token.
    """
    own = manager.score_all({site: states.float().cpu() for site, states in taken.items()})
    host = manager.score_all({site: reference[parse_site(site)[1]] for site in taken})
    apart = (own - host).abs()
    most, mean = float(apart.max()), float(apart.mean())
    if not mean <= _SCORES_APART:
        raise Blind(
            f"scores of the engine's first forward are {mean:.3f} apart from those of transformers on the same tokens,"
            f" on average; at most {_SCORES_APART} may be: this version of vLLM is not read right"
        )
    return {"score_difference_max": most, "score_difference_mean": mean}


def judge(taken: Mapping[str, Tensor], reference: Tensor, tolerance: float | None) -> dict[str, Any]:
    """Return figures by site. Raises `Blind` if the states are not those of the site.

    `tolerance` None: only no other layer may be nearer.
    """
    figures = judge_alone(taken)
    for site, states in taken.items():
        _, layer = parse_site(site)
        apart = _relative(states.float().cpu(), reference)
        nearest, gap = int(apart.argmin()), float(apart[layer])
        if nearest != layer:
            raise Blind(
                f"the states that vLLM hands out for {site} are those of layer {nearest} ({float(apart[nearest]):.1e}"
                f" apart from transformers' states of it, {gap:.1e} from those of layer {layer}): its graph was"
                " compiled for other layers. Remove its cache of compiled graphs (VLLM_DISABLE_COMPILE_CACHE=1)"
            )
        if tolerance is not None and gap > tolerance:
            raise Blind(
                f"the states that vLLM hands out for {site} are {gap:.1e} apart from those of transformers on the same"
                f" weights, at most {tolerance:.0e} may be: probes were trained on the latter. If the engine"
                " computes otherwise by intent, give canary='layers'"
            )
        figures[site] |= {"relative_l2": gap, "nearest_layer": nearest}
    return figures


def judge_alone(taken: Mapping[str, Tensor]) -> dict[str, Any]:
    """Check that states are finite, and differ by token and by site; return figures. Raises `Blind`."""
    figures: dict[str, Any] = {}
    for site, states in taken.items():
        values = states.float().cpu()
        if values.dim() != 2 or not bool(torch.isfinite(values).all()) or bool((values[0] == values[-1]).all()):
            raise Blind(f"the states that vLLM hands out for {site} are not numbers, or the same at every token")
        for other in figures:
            if torch.equal(values, taken[other].float().cpu()):
                raise Blind(f"vLLM hands out the same states for {other} and {site}: its graph is of other layers")
        figures[site] = {"norm": float(values.norm(dim=1).mean())}
    return figures


def _relative(states: Tensor, reference: Tensor) -> Tensor:
    """Return the mean relative distance of states `[T, D]` from each layer's, `[L]`."""
    return ((reference - states).norm(dim=2) / reference.norm(dim=2).clamp_min(1e-30)).mean(dim=1)
