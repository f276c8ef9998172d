"""Imports probelab's probes, as `save` writes them.

    pack = import_files("probes/", "my-pack", site="resid_post.15", normalize="none")

Supported are Logistic, MassMean, MLP with ReLU, and EEMLP with one or two layers (its last exit). Scores are those of
`predict`, in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers.flat import Classifier, ImportOptions, check_options, linear, write_flat
from probemon.lab.importers.foreign_files import MAX_BYTES, field, hashes, named_files, only_tensors, tensor_of
from probemon.lab.importers.weights import load_plain
from probemon.packs.pack import ProbePack

_SUPPORTED = ("Logistic", "MassMean", "MLP", "EEMLP")
_SCALER = ("scaler_mean", "scaler_std")


def import_files(
    source: str | Path | Mapping[str, str | Path],
    target: str | Path,
    *,
    site: str,
    normalize: str | None = None,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write probelab probes as a pack.

    - `source`: a file, a folder of `.pt`, or files by concept
    - `site`: where the states were read
    - `normalize`: of states before probelab (`none`, `layernorm`, `rmsnorm`); required
    - `about`: `ImportOptions` of `probemon.lab.importers.flat`

    Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_files, about, normalize=normalize)
    files = named_files(source, ".pt")
    probes = {name: _read(name, path) for name, path in files.items()}
    stated = {"probes": {name: record for name, (_, record) in probes.items()}}
    return write_flat(
        target,
        [probe for probe, _ in probes.values()],
        source="probelab",
        site=site,
        normalize=normalize,
        stated=stated,
        files=hashes(files),
        **about,
    )


def _read(name: str, path: Path) -> tuple[Classifier, dict[str, Any]]:
    saved = load_plain(path, MAX_BYTES)
    if not isinstance(saved, dict) or "class" not in saved:
        raise ImportRefused(
            f"{path} is not a file of probelab, whose save writes 'class' and 'state_dict': probemon import"
            " lie-detectors takes that project's, probemon import safetensors other tensors, with a mapping"
        )
    kind = field(saved, "class", str, path)
    if kind not in _SUPPORTED:
        raise ImportRefused(
            f"{path} is a probelab {kind}, which is not a linear map or ReLU network of one state: supported are"
            f" {', '.join(_SUPPORTED)}"
        )
    state, arguments = field(saved, "state_dict", dict, path), field(saved, "init_kwargs", dict, path)
    record = {"class": kind, "training_dtype": field(saved, "training_dtype", str, path, "")}

    def read(key: str) -> Tensor:
        return tensor_of(state, key, path).double()

    if kind == "MassMean":
        only_tensors(state, ("direction", "bias", "global_mean"), path)
        direction, mean = read("direction"), read("global_mean")
        return linear(name, direction, read("bias")).standardised(mean, torch.ones_like(mean)), record
    if kind == "Logistic":
        only_tensors(state, (*_of_linear("linear"), *_SCALER), path)
        return (
            linear(name, read("linear.weight"), read("linear.bias")).standardised(
                read("scaler_mean"), read("scaler_std")
            ),
            record,
        )
    if kind == "MLP":
        if arguments.get("activation") != "relu":
            raise ImportRefused(
                f"{path} is an MLP with activation {arguments.get('activation')!r}; a pack's hidden layers are ReLU"
            )
        only_tensors(state, _of_linear("fc1", "fc2"), path)
        return Classifier(
            name, [(read("fc1.weight"), read("fc1.bias")), (read("fc2.weight"), read("fc2.bias"))]
        ), record
    n = field(arguments, "n_layers", int, path)
    if n not in (1, 2):
        raise ImportRefused(f"{path} is an EEMLP of {n} layers; a pack's probes have none, one or two hidden layers")
    only_tensors(
        state,
        (*_of_linear(*(f"layers.{i}.0" for i in range(n)), *(f"heads.{i}" for i in range(n + 1))), *_SCALER),
        path,
    )
    layers = [(read(f"layers.{i}.0.weight"), read(f"layers.{i}.0.bias")) for i in range(n)]
    probe = Classifier(name, [*layers, (read(f"heads.{n}.weight"), read(f"heads.{n}.bias"))])
    return probe.standardised(read("scaler_mean"), read("scaler_std")), record


def _of_linear(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}.{part}" for module in modules for part in ("weight", "bias"))
