"""Imports features of a SAELens autoencoder as probes that fire when the feature is active.

    pack = import_sae("sae/", "my-pack", features=[17, 4021], names={17: "cats", 4021: "legal text"})

`sae/` is from `SAE.save_model`. Scores are sigmoid(pre-activation - threshold), with threshold 0 for ReLU and the
feature's for JumpReLU, and alert at 0.5. Activations are logit(score) + threshold (`sae_threshold` in concepts.jsonl),
except for gated encoders. Strong features all score near 1; `sharpness` below 1 separates them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers.flat import ImportOptions, check_factor, check_options, write_stacked
from probemon.lab.importers.foreign_files import as_path, field, read_safetensors, site_of, tensor_of
from probemon.lab.importers.kinds import instead
from probemon.lab.importers.weights import Folder
from probemon.packs.pack import ProbePack
from probemon.util.files import sha256

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_THRESHOLDED = ("jumprelu", "jumprelu_transcoder", "jumprelu_skip_transcoder")
_ARCHITECTURES = ("standard", "gated", "transcoder", "skip_transcoder", *_THRESHOLDED)
_NORMS = {
    "none": "none",
    "expected_average_only_in": "none",
    "layer_norm": "layernorm",
    "constant_norm_rescale": "rmsnorm",
}
_RESIDUAL = re.compile(r"blocks\.(\d+)\.hook_resid_(post|pre)")
_PART = re.compile(r"blocks\.(\d{1,4})\.hook_(attn_out|mlp_out)")
# Models that add attention and feed-forward outputs unchanged, and those that normalise them first. TransformerLens
# hooks what is added, a site what the module gives.
_ADDED_AS_GIVEN = re.compile(
    r"(distil)?gpt2|gpt-neo|pythia|(meta-)?llama-?[23]|tinyllama|mistral-|qwen-?(1\.5|2|2\.5|3)-", re.IGNORECASE
)
_NORMALISED_FIRST = re.compile(r"gemma-?[23]n?-|olmo-?[23]", re.IGNORECASE)
_TINY = 1e-12
_SLICE = 4096  # features at a time


def import_sae(
    folder: str | Path,
    target: str | Path,
    *,
    features: Iterable[int] | None = None,
    names: Mapping[int, str] | None = None,
    site: str | None = None,
    centered: bool | None = None,
    activation_scale: float | None = None,
    sharpness: float = 1.0,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write features of an SAE as a pack; probe `f17` is feature 17.

    - `features`: in this order (default all)
    - `names`: by feature
    - `site`, `centered`: if the file does not say them; `centered`: the model had centred writing weights
      (TransformerLens)
    - `activation_scale`: factor of `expected_average_only_in`, which no file holds
    - `sharpness`: multiplies the logits, by 0.001 to 1,000
    - `about`: `ImportOptions` of `probemon.lab.importers.flat`

    Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_sae, about, without=("eps", "notes", "dtype"))
    if not isinstance(names, Mapping | None) or not all(isinstance(name, str) for name in (names or {}).values()):
        raise ImportRefused(
            f"names is {names!r:.80}: give a dict of names by number of feature, such as {{17: 'cats'}}"
        )
    check_factor("sharpness", sharpness)
    check_factor("activation_scale", 1.0 if activation_scale is None else activation_scale, 1e-6, 1e6)
    if not isinstance(centered, bool | None):
        raise ImportRefused(f"centered is {centered!r:.80}: give True or False")
    source = Folder(as_path(folder, "the folder of the SAE"))
    where, config = source.inside(CONFIG), source.json(CONFIG)
    if config is None:
        raise ImportRefused(f"{where} is missing: {instead(source.path)}give the folder that SAE.save_model wrote")
    architecture = field(config, "architecture", str, where, "standard")
    settings = {**config, **(field(config, "metadata", dict, where, None) or {})}
    place = site_of(_site(settings, site, where), site, where)
    norm = _normalisation(settings, architecture, where)
    if (norm == "expected_average_only_in") is not (activation_scale is not None):
        raise ImportRefused(
            f"{where}: activations were normalised by {norm!r}: activation_scale= is the factor on states of"
            " 'expected_average_only_in', which no file holds, and only of that"
        )
    centered = norm != "layer_norm" and _centered(settings, centered, where)
    # The root mean square of a centred state is its deviation.
    normalize = "layernorm" if centered and norm == "constant_norm_rescale" else _NORMS[norm]
    path = source.inside(WEIGHTS)
    tensors, _ = read_safetensors(path, lambda name: name not in ("W_dec", "W_skip"))
    encoder, bias, threshold = _encoder(tensors, architecture, path)
    offset = (
        tensor_of(tensors, "b_dec", path)
        if field(settings, "apply_b_dec_to_input", bool, where, True) and "transcoder" not in architecture
        else None
    )
    wanted = _wanted(features, names or {}, encoder.shape[1])
    factor = sharpness * (activation_scale or 1.0)
    if norm == "layer_norm":  # SAELens divides by the deviation with n - 1, a pack by that with n
        factor *= math.sqrt((len(encoder) - 1) / len(encoder))
    changed = factor != 1 or (centered and normalize == "none")
    dtype = torch.bfloat16 if encoder.dtype == torch.bfloat16 and not changed else torch.float32
    w1 = torch.empty(len(wanted), 1, len(encoder), dtype=dtype, device="cpu")
    b1 = torch.empty(len(wanted), 1, dtype=torch.float32, device="cpu")
    for begin in range(0, len(wanted), _SLICE):
        at = torch.tensor(wanted[begin : begin + _SLICE], device="cpu")
        rows = encoder[:, at].T.double()
        shift = bias[at].double() - threshold[at].double() - (0 if offset is None else rows @ offset.double())
        if centered and normalize == "none":
            rows = rows - rows.mean(dim=1, keepdim=True)  # its product with a centred state
        w1[begin : begin + len(at), 0] = (factor * rows).to(dtype)
        b1[begin : begin + len(at), 0] = (sharpness * shift).float()
    if not bool(torch.isfinite(w1.sum(dim=(1, 2), dtype=torch.float64)).all() and torch.isfinite(b1).all()):
        raise ImportRefused(
            f"{path}: an encoder row or bias is not a finite number: the file is damaged, or training diverged"
        )
    concepts = [
        {
            "id": f"f{i}",
            "name": (names or {}).get(i, f"feature {i}"),
            "parents": [],
            "sae_feature": i,
            "sae_threshold": float(threshold[i]),
        }
        for i in wanted
    ]
    record = {
        "architecture": architecture,
        "normalize_activations": norm,
        "hook_name": settings.get("hook_name", settings.get("hook_point")),
        "n_features": encoder.shape[1],
        "centered": centered,
        "activation_scale": activation_scale,
        "sharpness": sharpness,
    }
    notes = ["Every alert threshold is 0.5: a probe fires where its feature's activation is above 0."]
    if architecture == "gated":
        notes.append("The encoder is gated: logits say when a feature is active, not its activation.")
    if norm == "layer_norm":
        notes.append(
            "The encoder adds 1e-5 to a state's standard deviation, which a pack does not: logits differ by a share of"
            " 1e-5 / deviation."
        )
    model_options: dict[str, Any] = {
        "model": settings.get("model_name") if isinstance(settings.get("model_name"), str) else None,
        **about,
    }
    return write_stacked(
        target,
        concepts,
        {"w1": w1, "b1": b1},
        source="SAELens",
        sites=[place] * len(wanted),
        normalize=normalize,
        eps=_TINY,
        alert_threshold=torch.full((len(wanted),), 0.5, dtype=torch.float32, device="cpu"),
        notes=notes,
        stated=record,
        files={one: sha256(source.inside(one)) for one in (CONFIG, WEIGHTS)},
        **model_options,
    )


def _normalisation(settings: Mapping[str, Any], architecture: str, where: Path) -> str:
    """Return the normalisation. Raises `ImportRefused` for an unsupported encoder."""
    activation = settings.get("activation_fn", settings.get("activation_fn_str", "relu"))
    if architecture not in _ARCHITECTURES or activation not in ("relu", None):
        what = architecture if architecture not in _ARCHITECTURES else f"{architecture} with {activation}"
        raise ImportRefused(
            f"{where}: the encoder is {what}, in which a feature is not active by itself: supported are"
            f" {', '.join(_ARCHITECTURES)} (SAELens saves batchtopk as jumprelu)"
        )
    if settings.get("reshape_activations", "none") != "none" or settings.get("hook_head_index") is not None:
        raise ImportRefused(f"{where}: the encoder reads heads of attention, which are not a site of probemon")
    norm = settings.get("normalize_activations")
    if norm is None or isinstance(norm, bool):
        norm = "expected_average_only_in" if norm else "none"
    if not isinstance(norm, str) or norm not in _NORMS:
        raise ImportRefused(
            f"{where}: activations were normalised by {norm!r}; supported are {', '.join(_NORMS)}: let SAELens fold"
            " others in, and save again"
        )
    return norm


def _centered(settings: Mapping[str, Any], centered: bool | None, where: Path) -> bool:
    loaded = settings.get("model_from_pretrained_kwargs")
    # SAELens loads without processing.
    recorded = bool(loaded.get("center_writing_weights", False)) if isinstance(loaded, dict) else None
    if recorded is None and centered is None:
        raise ImportRefused(
            f"{where} does not say how the model was loaded: give centered=False, or True if it was a TransformerLens"
            " model with centred writing weights (its default for models with a LayerNorm)"
        )
    if recorded is not None and centered not in (None, recorded):
        raise ImportRefused(
            f"{where} says that writing weights were {'' if recorded else 'not '}centred, and centered={centered} was"
            " given: leave it out"
        )
    return bool(centered if recorded is None else recorded)


def _site(settings: Mapping[str, Any], site: str | None, where: Path) -> str | None:
    """Return a hook's site, or None. Raises `ImportRefused` if it is not a site, or may not be."""
    hook = settings.get("hook_name", settings.get("hook_point"))
    if not isinstance(hook, str):
        return None
    match = _RESIDUAL.fullmatch(hook)
    if match is not None and len(match[1]) < 6:
        layer = int(match[1]) - (match[2] == "pre")  # a block's input is the output before it
        if layer >= 0:
            return f"resid_post.{layer}"
    match = _PART.fullmatch(hook)
    if match is not None:
        place = f"{match[2]}.{int(match[1])}"
        model = str(settings.get("model_name")).rpartition("/")[2]
        if _NORMALISED_FIRST.match(model):
            raise ImportRefused(
                f"{where}: the encoder reads {hook} of {model}, which normalises what {place} gives before that hook:"
                " probemon has no such site"
            )
        if _ADDED_AS_GIVEN.match(model) or site == place:
            return place
        raise ImportRefused(
            f"{where}: the encoder reads {hook}, what is added to the residual stream. In a model with a norm or a"
            f" factor before it is added that is not {place}, and it is not known here whether {model} has one:"
            f" give site='{place}' if it has none"
        )
    if hook.startswith(("blocks.", "hook_", "ln_final")):
        raise ImportRefused(
            f"{where}: the encoder reads {hook}, which is not a site of probemon: those are outputs of a block, its"
            " attention and its feed-forward part"
        )
    return None


def _encoder(tensors: Mapping[str, Tensor], architecture: str, path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return encoder `[D, F]`, bias and threshold `[F]`: active if state @ encoder + bias > threshold."""
    encoder = tensor_of(tensors, "W_enc", path)
    if encoder.dim() != 2 or not encoder.numel():
        raise ImportRefused(f"{path}: W_enc has shape {tuple(encoder.shape)}, expected [D, features]")
    needed = ["b_gate", "b_mag", "r_mag"] if architecture == "gated" else ["b_enc"]
    if architecture in _THRESHOLDED:
        needed.append("threshold")
    elif "threshold" in tensors:
        raise ImportRefused(
            f"{path} has a tensor 'threshold', which an encoder of architecture {architecture!r} does not use: its"
            " configuration is of another one, or lacks its architecture"
        )
    sizes = dict.fromkeys(needed, encoder.shape[1])
    if "transcoder" not in architecture:
        sizes["b_dec"] = len(encoder)
    for name, size in sizes.items():
        tensor = tensor_of(tensors, name, path)
        if tuple(tensor.shape) != (size,):
            raise ImportRefused(f"{path}: {name} has shape {tuple(tensor.shape)}, expected ({size},)")
    zero = torch.zeros(encoder.shape[1], dtype=torch.float64, device="cpu")
    if architecture == "gated":
        # Active if s + b_gate > 0 and s exp(r_mag) + b_mag > 0, of one product s.
        gate, magnitude = tensors["b_gate"].double(), tensors["b_mag"].double()
        return encoder, torch.minimum(gate, magnitude * torch.exp(-tensors["r_mag"].double())), zero
    # Activations are cut at 0, so a lower threshold has no effect.
    threshold = tensors["threshold"].double().clamp(min=0) if architecture in _THRESHOLDED else zero
    return encoder, tensors["b_enc"], threshold


def _wanted(features: Iterable[int] | None, names: Mapping[int, str], n: int) -> list[int]:
    if not isinstance(features, Iterable | None):
        raise ImportRefused(f"features is {features!r:.80}: give a list of numbers, even of one")

    def checked(i: Any) -> int:
        try:
            number = -1 if isinstance(i, bool) else operator.index(i)  # numbers of NumPy and torch too
        except TypeError:
            number = -1
        if not 0 <= number < n:
            raise ImportRefused(f"there is no feature {i!r:.80}: the SAE has features 0 to {n - 1}")
        return number

    for i in names:
        checked(i)
    wanted: dict[int, None] = {}
    for i in range(n) if features is None else features:  # may be longer than memory
        number = checked(i)
        if number in wanted:
            raise ImportRefused(f"features names {number} twice")
        wanted[number] = None
    if not wanted:
        raise ImportRefused("features is empty: give the numbers of those to import, or leave it out for all")
    return list(wanted)
