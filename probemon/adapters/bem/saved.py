"""Saved adapters: `bem.json` and `bem.safetensors` in a folder, checked when read.

    write_saved(folder, config, model, sites, tensors)
    saved = read_saved(folder)                        # raises BemFileError
    check_fit(folder, saved.host, saved.config, model, strict=False)                # raises ModelMismatch

A Trainer's checkpoint of an `Objective` is read too. Nothing is unpickled. Weights are written first and the settings
hold their hash, so that a crash between the two is noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.sites import Site, find_sites
from probemon.core.state_settings import differing
from probemon.errors import BemError, BemFileError, ConfigError, ModelMismatch
from probemon.host.adapters import OWN_NAME
from probemon.host.fingerprint import active_adapters_fingerprint, fingerprint
from probemon.host.internals import tensor_parallel_size
from probemon.host.model import find_layers, hidden_size, model_state
from probemon.host.settings import model_settings
from probemon.util.files import replacing, save_tensors, sha256, write_text_atomically

FORMAT, FORMAT_VERSION = "probemon-bem", 1
SETTINGS, WEIGHTS = "bem.json", "bem.safetensors"
# A Trainer's file, the prefix of tensors in it, the tensor of settings.
CHECKPOINT, OF_OBJECTIVE, STATED = "model.safetensors", "bem.", "settings"
_UNUSED = "controller.default_code"  # in older adapters without a chunk router
_ADDED = ("start", "gate_inputs")  # later; older adapters had their defaults
_AGAIN = "copy the folder again"


@dataclass(frozen=True, eq=False)
class Saved:
    """A folder as read. `host`: the model it was made on; `weights`: the file of `tensors`."""

    folder: Path
    weights: Path
    config: BemConfig
    host: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def int8(self) -> bool:
        """Whether U and V are int8."""
        return any(name.startswith("updates.") and tensor.dtype == torch.int8 for name, tensor in self.tensors.items())

    def load(self, module: nn.Module) -> None:
        """Load the tensors into an adapter of `config`, in their saved dtypes. Raises `BemFileError`."""
        module_tensors = module.state_dict()
        tensors = {name: tensor for name, tensor in self.tensors.items() if name != _UNUSED or name in module_tensors}
        check_tensors(self.weights, module_tensors, tensors)
        with torch.inference_mode(False):  # inference tensors cannot learn
            copies = {name: tensor.to(module_tensors[name].device, copy=True) for name, tensor in tensors.items()}
            module.load_state_dict(copies, assign=True)


def check_tensors(where: object, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise `BemFileError` if names, shapes or dtypes differ from `own`; floating-point dtypes count as one."""
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (own, tensors)]
    wrong = [name for name in {*own, *tensors} if shapes[0].get(name) != shapes[1].get(name)]
    if wrong:
        raise BemFileError(
            f"{where}: tensor {min(wrong)!r} is missing, unknown or of another shape than its settings say: {_AGAIN}"
        )
    for name, tensor in tensors.items():
        if tensor.dtype != own[name].dtype and not (tensor.is_floating_point() and own[name].is_floating_point()):
            raise BemFileError(f"{where}: tensor {name!r} is {tensor.dtype}, expected {own[name].dtype}: {_AGAIN}")


def check_kept(tensors: Mapping[str, Tensor]) -> None:
    """Raise `BemError` for a tensor that is not finite, or of 8 bits and not int8."""
    for name, tensor in tensors.items():
        if tensor.dtype.itemsize == 1 and tensor.dtype != torch.int8:
            raise BemError(
                f"{name} is {tensor.dtype}, which adapters are not kept in, so nothing is saved: save it after "
                "bem.float(), or quantize(bem), whose U and V are int8"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BemError(
                f"{name} is not finite, so nothing is saved: its training diverged. Go back to parameters from before"
            )


def write_saved(
    folder: Path, config: BemConfig, model: Any, sites: Sequence[Site], tensors: Mapping[str, Tensor]
) -> None:
    """Write both files. If the model is spread over ranks, all call this and one writes."""
    described, spread = describe(config, model, sites), tensor_parallel_size(model) > 1
    if spread and torch.distributed.get_rank():
        torch.distributed.barrier()
        return
    make_folder(folder)
    file_info = write_tensors(folder / WEIGHTS, tensors)
    hashed: dict[str, Any] = {**described, "files": {WEIGHTS: file_info}}
    settings = {"format": FORMAT, "format_version": FORMAT_VERSION, **hashed, "sha256": settings_hash(hashed)}
    write_text_atomically(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")
    if spread:
        torch.distributed.barrier()


def make_folder(folder: Path) -> None:
    """Make a folder if there is none. Raises `BemFileError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BemFileError(f"{folder} cannot be made ({error.strerror}): give another folder") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors atomically; return the file's `sha256` and `size` in bytes."""
    with replacing(path) as temporary:
        save_tensors(temporary, {key: x.detach().cpu().contiguous() for key, x in tensors.items()})
        return {"sha256": sha256(temporary), "size": temporary.stat().st_size}


def describe(config: BemConfig, model: Any, sites: Sequence[Site]) -> dict[str, Any]:
    """Return `config`, and `host`: the model of the weights."""
    _, layers = find_layers(model)
    host = {
        "model": type(model).__name__,
        "hidden_size": hidden_size(model),
        "n_layers": len(layers),
        "fingerprint": fingerprint(model),
        "settings": model_settings(model),
        **_other_adapters(model),
        "sites": {site.name: [site.n_in, site.n_out] for site in sites},
    }
    return {"config": dataclasses.asdict(config), "host": host}


def _other_adapters(model: Any) -> dict[str, Any]:
    """Other adapters that steer the model: hidden states depend on them."""
    others = sorted(set(model_state(model).adapters) - {OWN_NAME})
    return {"adapters": others, "adapter_weights": active_adapters_fingerprint(model, others)}


def settings_tensor(config: BemConfig, model: Any, sites: Sequence[Site]) -> Tensor:
    """Return settings as JSON in bytes `[n]` uint8."""
    settings = {"format": FORMAT, "format_version": FORMAT_VERSION, **describe(config, model, sites)}
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def read_saved(folder: Path) -> Saved:
    """Read and check an adapter's folder. Raises `BemFileError`."""
    path, weights = folder / SETTINGS, folder / WEIGHTS
    if (folder / CHECKPOINT).is_file():
        if not path.exists():
            return _read_checkpoint(folder)
        if _is_checkpoint(folder / CHECKPOINT):
            raise BemFileError(
                f"{folder} holds two adapters: that of {SETTINGS}, which save_pretrained wrote, and that of"
                f" {CHECKPOINT}, which a Trainer wrote. Move the one that you do not mean to another folder"
            )
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise BemFileError(
            f"{folder} has no {SETTINGS}: it is not a saved adapter, which bem.save_pretrained(folder) writes, nor a "
            "Trainer's checkpoint of one"
        ) from None
    except OSError as error:
        raise BemFileError(f"{path} cannot be read ({error}): {_AGAIN}") from None
    settings = read_settings(path, text)
    files = settings.get("files")
    file_info = files.get(WEIGHTS) if isinstance(files, dict) else None
    if not isinstance(file_info, dict):
        raise BemFileError(f"{path}: the hash of {WEIGHTS} is missing: {_AGAIN}")
    if settings.get("sha256") != settings_hash({name: settings[name] for name in ("config", "host", "files")}):
        raise BemFileError(
            f"{path} is not as save_pretrained wrote it (its hash differs): {_AGAIN}; to change a setting, make a"
            " BemConfig with it and save that adapter"
        )
    config = _read_config(path, settings["config"])
    if not weights.is_file():
        raise BemFileError(f"{weights} is missing: {_AGAIN}")
    if weights.stat().st_size != file_info.get("size") or sha256(weights) != file_info.get("sha256"):
        raise BemFileError(
            f"{weights} is not the file that {SETTINGS} was written with (its size or hash differs): {_AGAIN}"
        )
    return Saved(folder, weights, config, settings["host"], _read_tensors(weights))


def _is_checkpoint(weights: Path) -> bool:
    """Whether a file holds an `Objective`, not a model."""
    try:
        with safe_open(weights, "pt") as opened:
            return any(name.startswith(f"{OF_OBJECTIVE}controller.") for name in opened.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def _read_checkpoint(folder: Path) -> Saved:
    weights = folder / CHECKPOINT
    tensors = _read_tensors(weights)
    stored_settings = tensors.pop(STATED, None)
    if stored_settings is None or stored_settings.dtype != torch.uint8:
        if f"{OF_OBJECTIVE}controller.query" in tensors:
            remedy = (
                "it is of an older probemon: train on from it and save again, or make the adapter with its BemConfig"
                " and load these tensors into it"
            )
        else:
            remedy = f"give a folder with {SETTINGS}, or a checkpoint of Trainer(model=Objective(bem))"
        raise BemFileError(
            f"{folder} has no {SETTINGS}, and its {CHECKPOINT} does not state the settings of an adapter: {remedy}"
        )
    settings = read_settings(weights, bytes(stored_settings.flatten().tolist()))
    config = _read_config(weights, settings["config"])
    tensors = {name.removeprefix(OF_OBJECTIVE): tensor for name, tensor in tensors.items()}
    return Saved(folder, weights, config, settings["host"], tensors)


def read_settings(where: object, text: bytes) -> dict[str, Any]:
    """Parse the settings of an adapter. Raises `BemFileError`."""
    try:
        settings = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise BemFileError(f"{where} cannot be read as JSON ({error}): {_AGAIN}") from None
    _check_format(where, settings)
    if not _has_config_and_sites(settings):
        raise BemFileError(f"{where}: config, or host with its sites, is missing: {_AGAIN}")
    checked: dict[str, Any] = settings
    return checked


def _has_config_and_sites(settings: Mapping[str, Any]) -> bool:
    config, host = settings.get("config"), settings.get("host")
    if not isinstance(config, dict) or not isinstance(host, dict):
        return False
    return isinstance(host.get("sites"), dict) and isinstance(host.get("settings", {}), dict)


def _check_format(path: object, settings: Any) -> None:
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        format_name = settings.get("format") if isinstance(settings, dict) else type(settings).__name__
        raise BemFileError(f"{path}: format is {format_name!r}, expected {FORMAT!r}")
    if settings.get("format_version") != FORMAT_VERSION:
        raise BemFileError(
            f"{path}: format_version is {settings.get('format_version')!r}, this probemon reads {FORMAT_VERSION}: "
            "upgrade probemon"
        )


def _read_config(path: Path, config: Mapping[str, Any]) -> BemConfig:
    check_complete(path, config)
    try:
        return BemConfig.from_dict(config)
    except ConfigError as error:
        raise BemFileError(f"{path}: {error}") from None


def check_complete(where: object, settings: Collection[str]) -> None:
    """Raise `BemFileError` if a setting of `BemConfig` is missing."""
    missing = [field.name for field in dataclasses.fields(BemConfig) if field.name not in (*settings, *_ADDED)]
    if missing:
        raise BemFileError(
            f"{where}: config lacks {', '.join(missing)}, and a default may be another value than it was trained with: "
            f"{_AGAIN}"
        )


def _read_tensors(weights: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise BemFileError(f"{weights} cannot be read as safetensors ({error}): {_AGAIN}") from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BemFileError(f"{weights}: tensor {name!r} is not finite: train it again")
    return tensors


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of config, host and files."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_fit(
    where: object, manifest_host: Mapping[str, Any], config: BemConfig, model: Any, *, strict: bool, stacklevel: int = 3
) -> None:
    """Raise `ModelMismatch` if an adapter does not fit; for another checkpoint warn, or raise if `strict`."""
    _, layers = find_layers(model)
    for key, value in (("hidden_size", hidden_size(model)), ("n_layers", len(layers))):
        if manifest_host.get(key) != value:
            raise ModelMismatch(
                f"{where} was made for {manifest_host.get('model')} with {key} {manifest_host.get(key)}, this"
                f" {type(model).__name__} has {value}"
            )
    for site in find_sites(model, config):
        recorded = manifest_host["sites"].get(site.name)
        if recorded != [site.n_in, site.n_out]:
            raise ModelMismatch(
                f"{where} has site {site.name} of {recorded} values in and out, this"
                f" {type(model).__name__} of {[site.n_in, site.n_out]}"
            )
    differences = differing(manifest_host.get("settings", {}), model_settings(model))
    changed_part = "weights" if manifest_host.get("fingerprint") != fingerprint(model) else ""
    others = _other_adapters(model)
    if not changed_part and any(manifest_host.get(key, value) != value for key, value in others.items()):
        recorded, now = (", ".join(one["adapters"]) or "none" for one in (manifest_host, others))
        changed_part = f"adapters ({recorded}, and here {now})"
    if changed_part or differences:
        changed_part = changed_part or f"settings ({', '.join(differences)})"
        problem = (
            f"{where} was made for a {manifest_host.get('model')} of other {changed_part}: it may steer towards"
            " something else"
        )
        if strict:
            raise ModelMismatch(f"{problem}. Load the model it was made for, or attach without strict=True")
        warnings.warn(problem, UserWarning, stacklevel=stacklevel)
