"""int8 copies of a pack: half the bytes of bf16, and the error this costs, stated in the copy.

    small = quantize(ProbePack.open(path), "smaller/")
    small.manifest["quality"]["int8"]["max_score_error"]

A row of a matrix is whole numbers from -127 to 127 times a scale of its own: the largest magnitude of the row over 127.
Biases and scales stay fp32. An input is rounded to bf16. A product of the two is exact in fp32, and the scale is
applied to the row's sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.reference import exhaustive_reference
from probemon.errors import ConfigError, PackCorrupt
from probemon.packs.copies import quality_of, spec_of
from probemon.packs.manifest import PROBES
from probemon.packs.pack import ProbePack, check_pack
from probemon.packs.tensors import MATRICES
from probemon.packs.writer import PackWriter

_STATES = 64  # random ones, for a pack without golden states


def quantize_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return stacked weights with int8 matrices and their scales, `w1_scale [P, H1]` and so on. A row of zeros has
    scale 1.
    """
    quantized = {}
    for name, tensor in weights.items():
        if name not in MATRICES:
            quantized[name] = tensor
            continue
        largest = tensor.to(torch.float32).abs().amax(dim=-1)
        scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
        quantized[name] = (tensor.to(torch.float32) / scale[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        quantized[f"{name}_scale"] = scale
    return quantized


def quantize(pack: ProbePack, path: str | Path, *, overwrite: bool = False) -> ProbePack:
    """Write the int8 copy of a pack and open it.

    Its manifest says under `quality.int8` how far scores moved, on the golden states of the pack (on random ones where
    it has none: `states` says which), and how many of the firing (state, probe) pairs changed. Raises `ConfigError`,
    `PackError`.
    """
    pack = check_pack(pack)
    if pack.dtype == torch.int8:
        raise ConfigError(f"{pack.name} is int8 already")
    bounding = next((concept["id"] for concept in pack.concepts if concept.get("bounding")), None)
    if bounding is not None:
        raise ConfigError(
            f"{pack.name} has bounding probes ({bounding!r}), whose scores would no longer be over those of all their"
            " members once the weights are rounded: what fires would be missed. Quantise the pack that its hierarchy"
            " was proposed for, which is flat"
        )
    pack.check_finite()
    weights = quantize_weights({name: tensor.clone() for name, tensor in pack.weights.items()})
    pack.check_unchanged()
    hidden, kind = pack.golden_hidden, "golden"
    if hidden is None or not len(hidden):
        size = (_STATES, len(pack.sites), pack.architecture.hidden_size)
        generator = torch.Generator().manual_seed(0)
        hidden, kind = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu"), "random"
    error, source = _error(pack, weights, hidden, kind), pack.manifest
    spec = spec_of(pack) | {
        "name": f"{pack.name}-int8",
        "dtype": torch.int8,
        "card": pack.card_text() + _note(error),
        "provenance": {
            **(source.get("provenance") or {}),
            "quantized_from": {"name": pack.name, **source["files"][PROBES]},
        },
        "quality": {**quality_of(pack), "int8": error},
    }
    with PackWriter(path, **spec, overwrite=overwrite) as writer:
        writer.put_slice(0, weights)
    return ProbePack.of(writer.opened)


def _error(pack: ProbePack, weights: Mapping[str, Tensor], hidden: Tensor, kind: str) -> dict[str, Any]:
    """Return how far the scores of some states `[G, S, D]` move, by the reference kernel."""
    states = {site: hidden[:, i] for i, site in enumerate(pack.sites)}
    before = exhaustive_reference(states, pack).numpy()
    after = exhaustive_reference(states, pack, weights).numpy()
    error = np.abs(after - before)
    if not np.isfinite(error).all():
        probe = int(np.flatnonzero(~np.isfinite(error).all(axis=0))[0])
        raise PackCorrupt(
            f"{pack.concepts[probe]['id']} does not score a number on {kind} states, before or after: its weights are"
            " too large. Train it again, or leave it out"
        )
    alert = pack.alert_threshold.numpy()
    fired, fires = before > alert, after > alert
    return {
        "states": kind,
        "n_states": len(hidden),
        "max_score_error": float(error.max()),
        "mean_score_error": float(error.mean()),
        "p99_score_error": float(np.quantile(error, 0.99)),
        "n_fired": int(fired.sum()),
        "n_fired_changed": int((fired != fires).sum()),
    }


def _note(stated: Mapping[str, Any]) -> str:
    return (
        "\n## int8\n\nThe weights are int8 with a scale for each row. Against the weights they were made from, scores"
        f" move by at most {stated['max_score_error']:.2g} (mean {stated['mean_score_error']:.2g}) on"
        f" {stated['n_states']} {stated['states']} states; {stated['n_fired_changed']} (state, probe) pairs fire in one"
        f" and not in the other, of {stated['n_fired']} that fired before. All other figures of this card are those of"
        " the weights before.\n"
    )
