"""int8 copies of a pack, with the error in the manifest.

    small = quantize(ProbePack.open(path), "smaller/")
    small.manifest["quality"]["int8"]["max_score_error"]

A row of a matrix is int8 times its scale, the largest magnitude over 127. Biases and scales are fp32; inputs are
rounded to bf16, products exact in fp32.
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

_STATES = 64  # random states, without golden ones


def quantize_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with int8 matrices and scales `w1_scale [P, H1]`, ...; zero rows have scale 1."""
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

    Its manifest states under `quality.int8` how far scores moved and how many firing (state, probe) pairs changed, on
    the pack's golden states, or on random ones if it has none (`states`). Raises `ConfigError`, `PackError`.
    """
    pack = check_pack(pack)
    if pack.dtype == torch.int8:
        raise ConfigError(f"{pack.name} is int8 already")
    bounding = next((concept["id"] for concept in pack.concepts if concept.get("bounding")), None)
    if bounding is not None:
        raise ConfigError(
            f"{pack.name} has bounding probes ({bounding!r}), whose scores would no longer bound those of their"
            " members once the weights are rounded, so that fires would be missed. Quantise the flat pack that its"
            " hierarchy was proposed for"
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
    """Return the score errors on states `[G, S, D]`, by the reference kernel."""
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


def _note(error: Mapping[str, Any]) -> str:
    return (
        "\n## int8\n\nThe weights are int8 with a scale for each row. Against the weights they were made from, scores"
        f" move by at most {error['max_score_error']:.2g} (mean {error['mean_score_error']:.2g}) on"
        f" {error['n_states']} {error['states']} states; {error['n_fired_changed']} (state, probe) pairs fire in one"
        f" and not in the other, of {error['n_fired']} that fired before. All other figures of this card are those of"
        " the weights before.\n"
    )
