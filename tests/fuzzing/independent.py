"""Scores of probes in files of each format, by other means than the importers': torch's own restricted loader, numpy
and fp64, as the formats mean them.

    candidates = probelab(folder)                   # {concept: [Net, ...]}
    logit, margin = candidates["deception"][0].logit(states, torch.float32)

`margin` is how far fp32 (or the pack's dtype) may be from it: units in the last place of what the magnitudes add up to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]
_UNIT = {
    torch.float32: 64 * 2.0**-23,
    torch.float16: 2 * 2.0**-10,
    torch.bfloat16: 2 * 2.0**-7,
    torch.int8: 2 * 2.0**-7,
}


class Unreadable(Exception):
    """torch or numpy does not read what an importer took: nothing to compare with."""


@dataclass
class Net:
    """Linear maps with ReLU between, after a normalisation of the state and an affine map of each value; `site`: where
    the file says that it is.
    """

    layers: list[tuple[Array, Array]]
    norm: str = "none"
    eps: float = 1e-6
    affine: tuple[Array, Array] | None = None  # times, plus
    own_norm: bool = False  # a LayerNorm of the probe's own, before the affine map
    site: str | None = None
    shift: Array | None = None  # taken from the state before all
    factor: float = 1.0
    extra: list[tuple[Array, Array]] = field(default_factory=list)  # others whose least logit counts too

    def logit(self, hidden: Array, dtype: torch.dtype) -> tuple[Array, Array]:
        """Logits `[N]` and margins of raw states `[N, D]`; infinite where fp32 may overflow."""
        with np.errstate(all="ignore"):
            x = normalised(hidden, self.norm, self.eps)
            x = rounded(x, dtype)
            if self.own_norm:
                x = normalised(x, "layernorm", 1e-5)
            size = np.abs(x)
            if self.shift is not None:
                x, size = x - self.shift, size + np.abs(self.shift)
            if self.affine is not None:
                times, plus = self.affine
                x, size = x * times + plus, size * np.abs(times) + np.abs(plus)
            value, most = self._through(x, size, self.layers)
            for weight, bias in self.extra:
                other, more = self._through(x, size, [(weight, bias)])
                value, most = np.minimum(value, other), np.maximum(most, more)
            value, most = value * self.factor, most * abs(self.factor)
            margin = _UNIT[dtype] * (1 + len(self.layers)) * most
            return value, np.where(np.isfinite(margin) & (most < 1e30), margin, np.inf)

    def _through(self, x: Array, size: Array, layers: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        for i, (weight, bias) in enumerate(layers):
            x = (np.maximum(x, 0) if i else x) @ weight.T + bias
            size = size @ np.abs(weight).T + np.abs(bias)
        return x[:, 0], size[:, 0]


@dataclass
class Share(Net):
    """One of a softmax group: the logit of its share, whose sigmoid is that of the softmax over it and `others`."""

    others: list[Net] = field(default_factory=list)

    def logit(self, hidden: Array, dtype: torch.dtype) -> tuple[Array, Array]:
        value, margin = super().logit(hidden, dtype)
        beside = [net.logit(hidden, dtype) for net in self.others]
        with np.errstate(all="ignore"):
            total = np.logaddexp.reduce([z for z, _ in beside], axis=0)
            return value - total, margin + np.max([error for _, error in beside], axis=0)


def shares(nets: list[Net]) -> list[Net]:
    """Return the nets of one softmax group, each with the others."""
    return [Share(**vars(net), others=[other for j, other in enumerate(nets) if j != i]) for i, net in enumerate(nets)]


def normalised(x: Array, norm: str, eps: float) -> Array:
    """As the pack's format has it."""
    if norm == "layernorm":
        x = x - x.mean(axis=1, keepdims=True)
    return x if norm == "none" else x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps)


def rounded(x: Array, dtype: torch.dtype) -> Array:
    kept = torch.bfloat16 if dtype == torch.int8 else dtype
    return torch.from_numpy(x).to(torch.float32).to(kept).double().numpy()


def safetensors(data: bytes) -> tuple[dict[str, Array], dict[str, Any]]:
    """Tensors of a file in fp64, and its metadata."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {}) or {}
    kinds = {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U8": "u1",
        "BOOL": "u1",
    }
    found = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] in kinds:
            values = np.frombuffer(raw, kinds[entry["dtype"]])
        else:
            continue
        with np.errstate(all="ignore"):
            found[name] = values.reshape(entry["shape"]).astype(np.float64)
    return found, metadata


def torch_file(path: Path) -> Any:
    """What torch's own restricted loader makes of a file."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _array(tensor: Any) -> Array:
    found: Array = tensor.detach().double().numpy()
    return found


def pack_file(folder: Path) -> dict[str, list[Net]]:
    """Own logits of a pack's probes, by id: what the format says of its tensors."""
    tensors, _ = safetensors((folder / "probes.safetensors").read_bytes())
    manifest = json.loads((folder / "manifest.json").read_bytes())
    lines = (folder / "concepts.jsonl").read_bytes().decode().removesuffix("\n").split("\n")
    for name in ("w1", "w2", "w3"):
        if f"{name}_scale" in tensors:
            tensors[name] = tensors[name] * tensors[f"{name}_scale"][..., None]
    found: dict[str, list[Net]] = {}
    for i, line in enumerate(lines):
        spec = manifest["inputs"][int(tensors["input"][i])]
        layers = [(tensors[f"w{n}"][i], tensors[f"b{n}"][i]) for n in (1, 2) if f"w{n}" in tensors]
        if "w3" in tensors:
            layers.append((tensors["w3"][i][None], tensors["b3"][i][None]))
        found[json.loads(line)["id"]] = [
            Net(layers, spec.get("norm", "none"), spec.get("eps", 1e-6), site=spec["site"])
        ]
    if "softmax_group" in tensors:
        ids, of = list(found), np.asarray(tensors["softmax_group"])
        for group in set(of[of >= 0].tolist()):
            members = [ids[i] for i in np.flatnonzero(of == group)]
            found.update(zip(members, ([net] for net in shares([found[name][0] for name in members])), strict=True))
    return found


def _standardised(layers: list[tuple[Array, Array]], mean: Array, scale: Array, **more: Any) -> Net:
    with np.errstate(all="ignore"):
        return Net(layers, shift=mean, affine=(1 / scale, np.zeros_like(mean)), **more)


def probelab(folder: Path) -> dict[str, list[Net]]:
    found = {}
    for path in folder.glob("*.pt"):
        saved = torch_file(path)
        state = {name: _array(value) for name, value in saved["state_dict"].items()}
        if saved["class"] == "MassMean":
            net = _standardised(
                [(state["direction"].reshape(1, -1), state["bias"].reshape(-1))],
                state["global_mean"],
                np.ones_like(state["global_mean"]),
            )
        elif saved["class"] == "Logistic":
            net = _standardised(
                [(state["linear.weight"].reshape(1, -1), state["linear.bias"].reshape(-1))],
                state["scaler_mean"],
                state["scaler_std"],
            )
        elif saved["class"] == "MLP":
            net = Net([(state["fc1.weight"], state["fc1.bias"]), (state["fc2.weight"], state["fc2.bias"])])
        else:
            n = saved["init_kwargs"]["n_layers"]
            layers = [(state[f"layers.{i}.0.weight"], state[f"layers.{i}.0.bias"]) for i in range(n)] + [
                (state[f"heads.{n}.weight"], state[f"heads.{n}.bias"])
            ]
            net = _standardised(layers, state["scaler_mean"], state["scaler_std"])
        found[path.stem] = [net]
    return found


def probekit(path: Path) -> dict[str, list[Net]]:
    said = json.loads(path.read_bytes().decode("utf-8-sig"))
    entries = {path.stem: said} if isinstance(said.get("weights"), list) else said
    found = {}
    for name, entry in entries.items():
        layers = [
            (
                np.array(entry["weights"], dtype=np.float64).reshape(1, -1),
                np.array(entry.get("bias", 0.0), dtype=np.float64).reshape(-1),
            )
        ]
        norm = entry.get("normalization")
        if norm is None:
            found[name] = [Net(layers)]
            continue
        std = np.array(norm["std"], dtype=np.float64)
        found[name] = [
            _standardised(layers, np.array(norm["mean"], dtype=np.float64), np.where(np.abs(std) <= 1e-12, 1.0, std))
        ]
    return found


def steerkit(folder: Path, scale: float) -> dict[str, list[Net]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        tensors, metadata = safetensors(path.read_bytes())
        method = metadata.get("default_method", "logistic")
        direction = tensors[f"direction.{method}"].reshape(1, -1) * scale
        layer = int(metadata["layer"]) - (metadata["hook_site"] == "resid_pre")
        found[path.stem] = [
            Net([(direction, np.array([float(json.loads(metadata["bias_json"])[method])]))], site=f"resid_post.{layer}")
        ]
    return found


def lie_detectors(folder: Path) -> dict[str, list[Net]]:
    """What a checkpoint scores, less its threshold."""
    found = {}
    for path in folder.glob("*.pt"):
        saved = torch_file(path)
        state = {name: _array(value) for name, value in saved["state_dict"].items()}
        site, threshold = f"resid_post.{saved['hyperparams']['layer']}", state["threshold"].reshape(-1)
        if saved["hyperparams"]["probe_architecture"] == "dim":
            found[path.stem] = [Net([(state["direction"].reshape(1, -1), -threshold)], site=site)]
            continue
        names = {"lr": ["linear"], "mlp": ["net.0", "net.2"]}[saved["hyperparams"]["probe_architecture"]]
        layers = [(state[f"{name}.weight"], state[f"{name}.bias"]) for name in names]
        layers[-1] = (layers[-1][0].reshape(1, -1), layers[-1][1] - threshold)
        found[path.stem] = [_standardised(layers, state["dataset_mean"], state["dataset_std"], site=site)]
    return found


def repeng(folder: Path, layer: int) -> dict[str, list[Net]]:
    """Projections on the direction of a layer, as llama.cpp's own package reads the files."""
    import gguf

    found = {}
    for path in folder.glob("*.gguf"):
        try:
            named = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
            direction = np.asarray(named[f"direction.{layer}"], dtype=np.float64)
        except Exception as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from error
        found[path.stem] = [
            Net([(direction.reshape(1, -1) / np.linalg.norm(direction), np.zeros(1))], site=f"resid_post.{layer}")
        ]
    return found


def sae(folder: Path) -> dict[str, list[Net]]:
    """As the encoder computes: active where the product passes all its thresholds."""
    config = json.loads((folder / "cfg.json").read_bytes().decode("utf-8-sig"))
    said = {**config, **(config.get("metadata") or {})}
    tensors, _ = safetensors((folder / "sae_weights.safetensors").read_bytes())
    architecture = config.get("architecture", "standard")
    encoder = tensors["W_enc"]
    how = said.get("normalize_activations")
    norm = (
        {"layer_norm": "layernorm", "constant_norm_rescale": "rmsnorm"}.get(how, "none")
        if isinstance(how, str)
        else "none"
    )
    factor = np.sqrt((len(encoder) - 1) / len(encoder)) if norm == "layernorm" else 1.0
    loaded = said.get("model_from_pretrained_kwargs")
    centred = norm != "layernorm" and isinstance(loaded, dict) and bool(loaded.get("center_writing_weights", False))
    shift = (
        tensors["b_dec"]
        if config.get("apply_b_dec_to_input", said.get("apply_b_dec_to_input", True))
        and "transcoder" not in architecture
        else None
    )
    match = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(post|pre)", str(said.get("hook_name", said.get("hook_point"))))
    site = None if match is None else f"resid_post.{int(match[1]) - (match[2] == 'pre')}"
    found = {}
    for i in range(encoder.shape[1]):
        row = encoder[:, i][None]
        row_of = row - row.mean(axis=1, keepdims=True) if centred and norm == "none" else row * factor
        base = 0.0 if shift is None else -(row @ shift)
        extra = []
        with np.errstate(all="ignore"):
            if architecture == "gated":
                bias = tensors["b_gate"][i] + base
                extra = [(row_of, np.atleast_1d(tensors["b_mag"][i] * np.exp(-tensors["r_mag"][i]) + base))]
            else:
                threshold = max(tensors["threshold"][i], 0.0) if "jumprelu" in architecture else 0.0
                bias = tensors["b_enc"][i] - threshold + base
        kind = "layernorm" if centred and norm == "rmsnorm" else norm
        found[f"f{i}"] = [Net([(row_of, np.atleast_1d(bias))], kind, 1e-12, site=site, extra=extra)]
    return found


def hallucination(folder: Path) -> dict[str, list[Net]]:
    config = json.loads((folder / "probe_config.json").read_bytes().decode("utf-8-sig"))
    path = folder / "probe_head.bin"
    state = (
        {name: _array(value) for name, value in torch_file(path).items()}
        if path.exists()
        else safetensors((folder / "probe_head.safetensors").read_bytes())[0]
    )
    return {
        "hallucination": [
            Net([(state["weight"].reshape(1, -1), state["bias"].reshape(-1))], site=f"resid_post.{config['layer_idx']}")
        ]
    }


def generic(folder: Path) -> dict[str, list[Net]]:
    said = json.loads((folder / "mapping.json").read_bytes().decode("utf-8-sig"))
    tensors, _ = safetensors((folder / "heads.safetensors").read_bytes())
    found = {}
    for name, entry in said["probes"].items():
        layers = []
        for part in entry.get("layers", [entry]):
            weight = tensors[part["weight"]]
            weight = weight.reshape(1, -1) if weight.ndim == 1 else weight
            layers.append((weight, tensors[part["bias"]].reshape(-1) if "bias" in part else np.zeros(len(weight))))
        if entry.get("row") is not None:
            at = entry["row"]
            layers = [(layers[0][0][at : at + 1], layers[0][1][at : at + 1])]
        more: dict[str, Any] = {
            "norm": said["normalize"],
            "eps": said.get("eps", 1e-6),
            "site": entry.get("site") or said.get("site"),
        }
        if "standardize" in said:
            found[name] = [
                _standardised(
                    layers, tensors[said["standardize"]["mean"]], tensors[said["standardize"]["scale"]], **more
                )
            ]
        else:
            found[name] = [Net(layers, **more)]
    return found


class Partly(dict[str, list[Net]]):
    """Candidates where not every file could be read: `unread` of them."""

    unread = 0


def hatcat(folder: Path, normalize: str) -> Partly:
    """Probes by name, whatever their level: a name that is stored twice has several."""
    found = Partly()
    for path in sorted(folder.rglob("*.pt")):
        try:
            saved = torch_file(path)
            states = (
                saved
                if all(isinstance(value, Mapping) for value in saved.values())
                else {path.stem.removesuffix("_classifier") or path.stem: saved}
            )
            for name, state in states.items():
                for pole, net in _hatcat(state, normalize):
                    found.setdefault(f"{name}/{pole}" if pole else name, []).append(net)
        except (Unreadable, AttributeError, TypeError, KeyError, RuntimeError):
            found.unread += 1
    return found


def _poles(weight: Array, bias: Array, normalize: str) -> list[tuple[str, Net]]:
    rows = [Net([(weight[i : i + 1], bias[i : i + 1])], normalize, 1e-5) for i in range(3)]
    return list(zip(("negative", "neutral", "positive"), shares(rows), strict=True))


def _hatcat(state: Mapping[str, Any], normalize: str) -> list[tuple[str, Net]]:
    """What a state dict holds: a probe, or the poles of a three-way head, each with its name."""
    bare = {name.removeprefix("net."): _array(value) for name, value in state.items()}
    if "linear.weight" in bare:
        weight, bias = bare["linear.weight"], bare["linear.bias"]
        return [("", Net([(weight, bias)], normalize, 1e-5))] if len(weight) == 1 else _poles(weight, bias, normalize)
    normed = "1.weight" in bare
    places = (1, 4, 7) if normed else (0, 3, 6)
    layers = [(bare[f"{at}.weight"], bare[f"{at}.bias"]) for at in places]
    affine = (bare["0.weight"], bare["0.bias"]) if normed else None
    return [("", Net(layers, normalize, 1e-5, affine=affine, own_norm=normed))]
