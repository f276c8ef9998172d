"""Imports the deception probes of the UK AI Security Institute (package lie-detectors 0.1.0).

    pack = import_lie_detectors("dyl-google-gemma-3-12b-it/", "my-pack", model="google/gemma-3-12b-it")

Supported are all three shapes: difference of means, logistic regression and one hidden ReLU layer, the last two over
standardised states. Scores are sigmoid(theirs - their threshold), and alert at 0.5, so that a probe fires where theirs
exceeds its threshold; theirs is logit(score) + `source_threshold` of concepts.jsonl.

A checkpoint names its shape by a member of an enum, which is read as a text; nothing in the file is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers.flat import (
    Classifier,
    ImportOptions,
    check_factor,
    check_options,
    check_total,
    linear,
    write_flat,
)
from probemon.lab.importers.foreign_files import MAX_BYTES, field, hashes, named_files, only_tensors, tensor_of
from probemon.lab.importers.weights import load_plain
from probemon.packs.pack import ProbePack

_STANDARD = ("dataset_mean", "dataset_std")
_TENSORS = {
    "dim": ("direction",),
    "lr": ("linear.weight", "linear.bias", *_STANDARD),
    "mlp": ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias", *_STANDARD),
}
_SWEEP, _BEST = "sweep.json", "probe.pt"


def import_lie_detectors(
    source: str | Path | Mapping[str, str | Path],
    target: str | Path,
    *,
    sharpness: float = 1.0,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write deception probes as a pack, each read at its file's layer: the output of that block, counted from 0.

    - `source`: a checkpoint, a folder of them, or files by concept; of a hub repository (with sweep.json) its probe.pt
    - `sharpness`: multiplies the logits, by 0.001 to 1,000: under 1 keeps strong scores apart
    - `about`: `ImportOptions` of `probemon.lab.importers.flat`

    Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_lie_detectors, about, without=("eps", "notes"))
    check_factor("sharpness", sharpness)
    files = named_files(_best_of_sweep(source), ".pt")
    probes: list[Classifier] = []
    stated: dict[str, Any] = {}
    for name, path in files.items():
        probe, stated[name] = _read(name, path, sharpness)
        probes.append(probe)
        check_total(probes)
    notes = [
        "Every alert threshold is 0.5: a probe fires where lie-detectors' score exceeds the file's threshold.",
        "The threshold was set for one score a text, of the token or the mean of tokens that the probe was trained on,"
        " not for a score at every token: see the probe's card, and calibrate.",
    ]
    return write_flat(
        target,
        probes,
        source="lie-detectors",
        normalize="none",
        notes=notes,
        stated={"sharpness": sharpness, "probes": stated},
        files=hashes(files),
        **about,
    )


def _best_of_sweep(source: Any) -> Any:
    """Return probe.pt of a repository, named by its folder, as lie-detectors' `get_probe` chooses; else `source`."""
    try:
        folder = Path(source).absolute()
        return {folder.name: folder / _BEST} if all((folder / name).is_file() for name in (_SWEEP, _BEST)) else source
    except (TypeError, OSError, ValueError):
        return source


def _read(name: str, path: Path, sharpness: float) -> tuple[Classifier, dict[str, Any]]:
    saved = load_plain(path, MAX_BYTES)
    if not isinstance(saved, dict) or not isinstance(saved.get("hyperparams"), dict):
        raise ImportRefused(
            f"{path} is not a checkpoint of lie-detectors, which holds 'state_dict' and 'hyperparams': probemon import"
            " probelab takes that project's, probemon import safetensors other tensors, with a mapping"
        )
    state, settings = field(saved, "state_dict", dict, path), saved["hyperparams"]
    kind = field(settings, "probe_architecture", str, path)
    if kind not in _TENSORS:
        raise ImportRefused(f"{path} is a probe {kind!r:.40}: known are {', '.join(_TENSORS)}, of lie-detectors 0.1.0")
    if settings.get("layer") is None:
        raise ImportRefused(
            f"{path} states no layer, as probes of log-probabilities do (Unrelated Questions): only probes of hidden"
            " states can be imported"
        )
    layer = field(settings, "layer", int, path)
    if layer < 0:
        raise ImportRefused(f"{path}: its layer is {layer}: a layer is counted from 0")
    only_tensors(state, (*_TENSORS[kind], "threshold"), path)

    def read(key: str) -> Tensor:
        return tensor_of(state, key, path).double()

    threshold = read("threshold").reshape(-1)
    if threshold.numel() != 1 or not bool(torch.isfinite(threshold).all()):
        raise ImportRefused(f"{path}: its threshold is {threshold.tolist()!r:.60}: expected one number")
    if kind == "dim":
        probe = linear(name, read("direction"), 0.0)
    elif kind == "lr":
        probe = linear(name, read("linear.weight"), read("linear.bias"))
    else:
        probe = Classifier(name, [(read(f"net.{i}.weight"), read(f"net.{i}.bias")) for i in (0, 2)])
    if kind != "dim":
        probe = probe.standardised(*(read(part) for part in _STANDARD))
    *hidden, (weight, bias) = probe.layers
    record = {"architecture": kind, "layer": layer, "threshold": float(threshold)}
    return (
        replace(
            probe,
            layers=[*hidden, (sharpness * weight, sharpness * (bias - threshold))],
            alert_threshold=0.5,
            site=f"resid_post.{layer}",
            fields={"source_threshold": float(threshold)},
        ),
        record,
    )
