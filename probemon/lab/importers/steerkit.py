"""Imports steerkit's probes (safetensors files).

    pack = import_files("probes/", "my-pack", scale={"refusal": 3.2})
    pack = import_files({"refusal": "refusal_l15.safetensors"}, "my-pack", scale=1.0, bias=False)

A file holds directions of length 1, and the fit's bias. `scale`, the norm of the fitted `coef_`, restores the scores.
Without it, `scale=1.0, bias=False` ranks tokens as `score_tokens` does, and `probemon calibrate` sets thresholds.

States need no centring: directions fitted to centred states have no component along the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from probemon.errors import ImportRefused
from probemon.lab.importers.flat import Classifier, ImportOptions, check_options, linear, write_flat
from probemon.lab.importers.foreign_files import (
    field,
    hashes,
    named_files,
    parse_json,
    read_safetensors,
    site_of,
    tensor_of,
)
from probemon.packs.pack import ProbePack
from probemon.util.checks import check_number

_METHODS = ("logistic", "diff_of_means", "mass_mean")
_ABOUT = 1e-2  # above the error of rounding to bf16
_SCHEMAS = ("1", "2", "3")  # the name of the hook came with 3


def import_files(
    source: str | Path | Mapping[str, str | Path],
    target: str | Path,
    *,
    scale: float | Mapping[str, float],
    method: str | None = None,
    bias: bool = True,
    site: str | None = None,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write steerkit probes as a pack.

    - `source`: a file, a folder of `.safetensors`, or files by concept
    - `scale`: length of the fitted coefficients, of all or by concept
    - `method`: direction (default: the file's)
    - `bias`: whether to add the file's
    - `site`: only checked
    - `about`: `ImportOptions` of `probemon.lab.importers.flat`

    Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_files, about, without=("n_layers", "eps", "notes"))
    files = named_files(source, ".safetensors")
    if isinstance(scale, Mapping) and set(scale) != set(files):
        raise ImportRefused(f"scale is given for {list(scale)}, the concepts are {list(files)}: give it for each")
    if method is not None and method not in _METHODS:
        raise ImportRefused(f"method {method!r}: expected one of {', '.join(_METHODS)}")
    probes = {
        name: _read(name, path, scale[name] if isinstance(scale, Mapping) else scale, method, bias, site)
        for name, path in files.items()
    }
    models = {(record["model_id"], record["n_total_layers"]) for _, record in probes.values()}
    if len(models) > 1:
        raise ImportRefused(f"the probes are of different models, {sorted(models)}: make a pack for each")
    model, n_layers = models.pop()
    notes = [
        "Directions of length 1 were multiplied by a scale that was given by hand"
        + ("." if bias else ", and the biases of the fits were left out: scores rank, and are not probabilities.")
    ]
    model_options = {"model": model, "n_layers": n_layers, **about}
    settings = {
        "scale": {name: float(length) for name, length in scale.items()}
        if isinstance(scale, Mapping)
        else float(scale),
        "bias": bias,
        "probes": {name: record for name, (_, record) in probes.items()},
    }
    return write_flat(
        target,
        [probe for probe, _ in probes.values()],
        source="steerkit",
        normalize="none",
        notes=notes,
        stated=settings,
        files=hashes(files),
        **model_options,
    )


def _read(
    name: str, path: Path, scale: float, method: str | None, with_bias: bool, site: str | None
) -> tuple[Classifier, dict[str, Any]]:
    remedy = "give the length of the fitted coefficients, a positive number"
    scale = check_number(
        f"{name}: scale", scale, low=0, high=1e30, open_low=True, open_high=True, remedy=remedy, error=ImportRefused
    )
    tensors, metadata = read_safetensors(path)
    if metadata.get("kind") == "multinomial":
        raise ImportRefused(
            f"{path} is a softmax over several concepts, not a sigmoid of one logit for each: import the probe of each"
            " concept instead"
        )
    directions = [key.removeprefix("direction.") for key in tensors if key.startswith("direction.")]
    if not directions:
        raise ImportRefused(f"{path} holds no tensor direction.*: it is not a steerkit probe")
    unknown = [key for key in tensors if not key.startswith("direction.")]
    if unknown:
        raise ImportRefused(
            f"{path} has a tensor {unknown[0]!r}, which no steerkit that is known saves: what it does to a state is not"
            " known here. Save the probe again without it"
        )
    layer, n_layers = (_int(metadata, key, path) for key in ("layer", "n_total_layers"))
    record: dict[str, Any] = {
        key: metadata.get(key, "") for key in ("model_id", "hook_site", "hook_name", "schema_version")
    }
    record |= {
        "layer": layer,
        "n_total_layers": n_layers,
        "method": method or metadata.get("default_method", "logistic"),
    }
    if not 0 <= layer < n_layers:
        where = "the embedding" if layer < 0 else "the final norm"
        raise ImportRefused(
            f"{path} reads {where} (layer {layer} of {n_layers}), which is not a site of probemon: import one of a"
            f" layer from 0 to {n_layers - 1}"
        )
    if record["hook_site"] not in ("resid_post", "resid_pre") or (record["hook_site"] == "resid_pre" and not layer):
        raise ImportRefused(
            f"{path} reads {record['hook_site']!r} of layer {layer}: supported are resid_post, and resid_pre of layer 1"
            " or later"
        )
    hook = f"blocks.{layer}.hook_{record['hook_site']}"
    if record["schema_version"] not in ("", *_SCHEMAS) or record["hook_name"] not in ("", hook):
        labels = f"schema_version {record['schema_version']!r}, hook_name {record['hook_name']!r}"
        raise ImportRefused(
            f"{path} says {labels}: known are {', '.join(_SCHEMAS)}, and {hook} is the hook of its layer and hook_site."
            " Save the probe again with a steerkit that is known"
        )
    place = site_of(f"resid_post.{layer - (record['hook_site'] == 'resid_pre')}", site, path)
    if record["method"] not in directions:
        raise ImportRefused(
            f"{path} has no direction {record['method']!r}; it has {', '.join(directions)}: give method="
        )
    biases = parse_json(metadata.get("bias_json", "{}"), f"{path}: bias_json")
    direction = tensor_of(tensors, f"direction.{record['method']}", path).double()
    length = float(direction.norm())
    if not abs(length - 1) < _ABOUT:
        raise ImportRefused(
            f"{path}: direction.{record['method']} has length {length:.6g}, but steerkit saves length 1, which scale="
            " multiplies: divide it by its length, and give that as scale="
        )
    shift = field(biases, record["method"], float, f"{path}: bias_json") if with_bias else 0.0
    record["bias"] = shift
    return (
        linear(name, float(scale) * direction.reshape(1, -1), shift, site=place, fields={"method": record["method"]}),
        record,
    )


def _int(metadata: Mapping[str, str], key: str, path: Path) -> int:
    try:
        return int(metadata[key])
    except (KeyError, ValueError):
        raise ImportRefused(
            f"{path}: its metadata has {key} {metadata.get(key)!r}, expected a number: it is not a steerkit probe"
        ) from None
