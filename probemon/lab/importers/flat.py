"""Writes probes without a hierarchy as a pack.

    probe = Classifier("deception", [(weight, bias)])               # [1, D], [1]
    write_flat("my-pack", [probe], source="my own", site="resid_post.15", normalize="none")

Smaller shapes are widened exactly. bf16 weights without folding stay bf16; others are folded in fp64 and become fp32.
"""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from probemon.core.dtypes import FLOATS, ROUNDINGS
from probemon.core.probes import NORMS, Architecture, as_site, is_recurrent, parse_site
from probemon.core.score_rules import INDEPENDENT
from probemon.core.settings import CascadeConfig
from probemon.errors import ImportRefused, UnknownSetting, closest
from probemon.lab.importers.foreign_files import as_path
from probemon.packs.files import check_target
from probemon.packs.pack import ProbePack
from probemon.packs.widen import smallest_common, widen
from probemon.util.checks import check_number, is_missing, is_number

Layer = tuple[Tensor, Tensor]
MAX_PACK_BYTES = 8 << 30  # of fp32 weights; in memory several times


class ImportOptions(TypedDict, total=False):
    """Options that importers share.

    - `name`, `licence`: of the pack
    - `model` (a hub name), `n_layers`, `adapters`: of the model that the probes are of, if known
    - `eps`: of the normalisation
    - `notes`: lines for the card
    - `overwrite`: replace a pack that is there
    - `dtype`: of the weights, "bf16" (rounded) or "fp32"; None: bf16 if all are, else fp32
    """

    name: str | None
    licence: str
    model: str | None
    n_layers: int | None
    eps: float
    adapters: Sequence[str]
    notes: Sequence[str]
    overwrite: bool
    dtype: str | None


# Their classes.
OPTIONS: dict[str, Any] = {
    "name": str | None, "licence": str, "model": str | None, "n_layers": int | None, "eps": int | float,
    "adapters": list | tuple, "notes": list | tuple, "overwrite": bool, "dtype": str | None,
}  # fmt: skip
_NO_SCORE_ABOVE = 1 - 2**-25  # fp32 rounds this and more to 1


@dataclass(frozen=True)
class Classifier:
    """One probe.

    - `layers`: weight `[out, in]`, bias `[out]` of one to three linear maps, ReLU between them; the last of one row
    - `alert_threshold`: NaN for none
    - `site`: "" for the pack's
    - `centre [D]`: a typical state, at which rounding costs nothing
    - `group`: its softmax group, or ""
    - `fields`: of concepts.jsonl, such as `name`
    """

    id: str
    layers: Sequence[Layer]
    alert_threshold: float = math.nan
    site: str = ""
    centre: Tensor | None = None
    group: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ImportRefused(f"a probe is called {self.id!r}: give it a name, a string that is not empty")
        if not self.layers:
            raise ImportRefused(
                f"{self.id}: it has no layers: give weight and bias of each linear map from the state to the logit, one"
                " to three of them"
            )
        if len(self.layers) > 3:
            raise ImportRefused(
                f"{self.id}: {len(self.layers) - 1} hidden layers; a pack's probes have none, one or two"
            )
        if not is_missing(self.alert_threshold) and not (
            is_number(self.alert_threshold) and 0 <= self.alert_threshold < _NO_SCORE_ABOVE
        ):
            raise ImportRefused(
                f"{self.id}: alert_threshold is {self.alert_threshold!r}, and scores lie between 0 and 1, so that it"
                " would fire never, or always: give a number from 0 to less than 1"
            )
        width: int | None = None
        for weight, bias in self.layers:
            if (
                weight.dim() != 2
                or bias.dim() != 1
                or len(bias) != len(weight)
                or not weight.numel()
                or width not in (None, weight.shape[1])
            ):
                shapes = [(tuple(w.shape), tuple(b.shape)) for w, b in self.layers]
                raise ImportRefused(
                    f"{self.id}: weights and biases of shapes {shapes} do not follow one another: expected [out, in]"
                    " and [out], each `in` the `out` before it"
                )
            dtype = next((tensor.dtype for tensor in (weight, bias) if tensor.dtype not in FLOATS), None)
            if dtype is not None:
                names = [str(one).removeprefix("torch.") for one in FLOATS]
                raise ImportRefused(
                    f"{self.id}: a weight or bias is {dtype}, expected {', '.join(names[:-1])} or {names[-1]}: convert"
                    " it first, a quantised one with its scale"
                )
            if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
                raise ImportRefused(
                    f"{self.id}: a weight or bias is not a finite number: it was trained to divergence, or the file is"
                    " damaged"
                )
            width = len(weight)
        if width != 1:
            raise ImportRefused(
                f"{self.id}: its last layer has {width} outputs, a probe has one: give each output as a separate"
                " probe, and those whose softmax is taken as one group"
            )

    @property
    def hidden_size(self) -> int:
        """Number of values that it reads."""
        return int(self.layers[0][0].shape[1])

    @property
    def hidden(self) -> tuple[int, ...]:
        return tuple(len(weight) for weight, _ in self.layers[:-1])

    def standardised(self, mean: Tensor, scale: Tensor) -> Classifier:
        """Fold `(state - mean) / scale`, both `[D]`, into the first layer, in fp64."""
        (weight, bias), *rest = self.layers
        mean, scale = mean.double(), scale.double()
        for name, values in (("mean", mean), ("scale", scale)):
            if tuple(values.shape) != (self.hidden_size,) or not torch.isfinite(values).all():
                raise ImportRefused(
                    f"{self.id}: its {name} has shape {tuple(values.shape)} or values that are not finite, expected"
                    f" ({self.hidden_size},) numbers"
                )
        if not bool((scale != 0).all()):
            raise ImportRefused(
                f"{self.id}: {int((scale == 0).sum())} scales are 0, and a state cannot be divided by them"
            )
        folded = weight.double() / scale
        centre = mean if self.centre is None else mean + scale * self.centre.double()
        return replace(self, layers=[(folded, bias.double() - folded @ mean), *rest], centre=centre)


def linear(id: str, weight: Tensor, bias: Tensor | float, **more: Any) -> Classifier:
    """Make a linear probe: weight `[D]` or `[1, D]`, bias a number or `[1]`."""
    row = weight.reshape(1, -1) if weight.dim() == 1 else weight
    shift = bias if isinstance(bias, Tensor) else torch.as_tensor(bias, dtype=torch.float64)
    return Classifier(id, [(row, shift.reshape(-1))], **more)


def check_total(probes: Sequence[Classifier]) -> None:
    """Raise `ImportRefused` above `MAX_PACK_BYTES`: a small file can name one tensor many times."""
    _check_size(sum(weight.numel() for probe in probes for weight, _ in probe.layers))


def _check_size(n_weights: int) -> None:
    if 4 * n_weights > MAX_PACK_BYTES:
        raise ImportRefused(
            f"the probes have {n_weights} weights, {4 * n_weights} bytes; at most {MAX_PACK_BYTES} bytes are imported"
            " at once: make several packs"
        )


def stack(probes: Sequence[Classifier], dtype: str | None = None) -> dict[str, Tensor]:
    """Stack probes of one hidden size into tensors `[P, ...]`, widened; `dtype`: as in `write_flat`.

    Raises `ImportRefused`.
    """
    if dtype not in (None, *ROUNDINGS):
        raise ImportRefused(f"dtype is {dtype!r:.40}: give {' or '.join(map(repr, ROUNDINGS))}, or leave it out")
    if not probes:
        raise ImportRefused("there is no probe to import: the source is empty")
    for probe in probes:
        if probe.hidden_size != probes[0].hidden_size:
            raise ImportRefused(
                f"{probes[0].id} reads {probes[0].hidden_size} values, {probe.id} {probe.hidden_size}: probes of"
                " different models go into different packs"
            )
    architecture = smallest_common([Architecture(probe.hidden_size, probe.hidden) for probe in probes])
    _check_size(len(probes) * architecture.parameters_per_probe())
    is_bf16 = all(weight.dtype == torch.bfloat16 for probe in probes for weight, _ in probe.layers)
    written = ROUNDINGS[dtype] if dtype is not None else torch.bfloat16 if is_bf16 else torch.float32
    stacked: dict[str, Tensor] = {}
    for i, probe in enumerate(probes):
        for name, values in widen(_alone(probe, written), architecture).items():
            if i == 0:
                stacked[name] = values.new_empty(len(probes), *values.shape[1:])
            stacked[name][i] = values[0]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in stacked.values()):
        raise ImportRefused(
            f"a folded weight is past the largest number of {stacked['w1'].dtype}: a scale of the standardisation is"
            " nearly 0"
        )
    return stacked


def _alone(probe: Classifier, dtype: torch.dtype) -> dict[str, Tensor]:
    names = ("1",) if not probe.hidden else ("1", "3") if len(probe.hidden) == 1 else ("1", "2", "3")
    tensors: dict[str, Tensor] = {}
    for name, (weight, bias) in zip(names, probe.layers, strict=True):
        if name == "1" and probe.centre is not None:  # corrects rounding at the centre
            bias = bias.double() + (weight.double() - weight.to(dtype).double()) @ probe.centre.double()
        last = name == "3"
        tensors |= {
            f"w{name}": weight.to(dtype) if last else weight.to(dtype)[None],
            f"b{name}": bias.float() if last else bias.float()[None],
        }
    return tensors


def check_options(
    importer: Callable[..., ProbePack],
    about: Mapping[str, Any],
    *,
    normalize: str | None = "none",
    without: Sequence[str] = (),
) -> None:
    """Check an importer's options before anything is read.

    Raises `UnknownSetting`, or `ImportRefused` for a missing or unknown normalisation.
    """
    parameters = inspect.signature(importer).parameters.values()
    takes = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    takes += [name for name in OPTIONS if name not in without]
    for name, value in about.items():
        if name not in takes:
            raise UnknownSetting(
                f"{importer.__name__} has no option {name!r}{closest(name, takes)}: it takes {', '.join(takes)}"
            )
        if not isinstance(value, OPTIONS[name]):
            raise ImportRefused(f"{name} is {value!r:.80}: give {getattr(OPTIONS[name], '__name__', OPTIONS[name])}")
    _check_norm(normalize)


def _check_norm(normalize: str | None) -> None:
    choices = ", ".join(map(repr, NORMS))
    if normalize is None:
        raise ImportRefused(
            f"nothing says what was done to each state before the probes saw it: give normalize=, one of {choices},"
            " without affine part (the probe's own scaler is not meant)"
        )
    if normalize not in NORMS:
        raise ImportRefused(
            f"normalize is {normalize!r}: give one of {choices}, what was done to the states that the probes were"
            " trained on"
        )


def check_factor(name: str, factor: object, low: float = 1e-3, high: float = 1e3) -> None:
    """Raise `ImportRefused` for a factor on logits beyond which fp32 scores are all 0.5, or all 0 and 1."""
    remedy = f"give a number from {low:g} to {high:g}, so that scores can differ"
    check_number(name, factor, low=low, high=high, remedy=remedy, error=ImportRefused)


def write_flat(
    target: str | Path,
    probes: Sequence[Classifier],
    *,
    source: str,
    site: str | None = "",
    normalize: str | None,
    dtype: str | None = None,
    **about: Any,
) -> ProbePack:
    """Write probes as a pack and open it. `about`: of `write_stacked`, which raises the same.

    `dtype`: of the weights, "bf16" (rounded) or "fp32"; None: bf16 if all are, else fp32
    """
    weights = stack(probes, dtype)
    places = [probe.site or site for probe in probes]
    concepts = [{"id": probe.id, "name": probe.id, "parents": [], **probe.fields} for probe in probes]
    alert = torch.tensor([probe.alert_threshold for probe in probes], dtype=torch.float32)
    return write_stacked(
        target,
        concepts,
        weights,
        source=source,
        sites=places,
        normalize=normalize,
        alert_threshold=alert,
        softmax_group=_group_numbers(probes),
        **about,
    )


def _group_numbers(probes: Sequence[Classifier]) -> Tensor:
    """Return group numbers `[P]`, -1 for none. Raises `ImportRefused` for a group of one."""
    sizes = Counter(probe.group for probe in probes if probe.group)
    names = list(sizes)
    for name, size in sizes.items():
        if size == 1:
            raise ImportRefused(
                f"the softmax group {name!r} has one probe, whose score would always be 1: give the rest"
            )
    numbers = [names.index(probe.group) if probe.group else -1 for probe in probes]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def write_stacked(
    target: str | Path,
    concepts: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    *,
    source: str,
    sites: Sequence[str | None],
    normalize: str | None,
    eps: float = 1e-6,
    alert_threshold: Tensor | None = None,
    softmax_group: Tensor | None = None,
    name: str | None = None,
    licence: str = "not stated",
    model: str | None = None,
    n_layers: int | None = None,
    adapters: Sequence[str] = (),
    notes: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    stated: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> ProbePack:
    """Write stacked weights as a pack of one level and open it.

    - `sites`: of each probe
    - `normalize`: of states, `none`, `layernorm` or `rmsnorm`, without affine part, with `eps`
    - `softmax_group [P]`: -1 for none
    - `model` (a hub name), `n_layers`, `adapters`: of the model, if known
    - `notes`: for the card
    - `files` (sha256 by name), `stated` (by the source): for the manifest

    Raises `ImportRefused`, `ConfigError` for a site, `PackError` if the target exists or cannot be written.
    """
    target = as_path(target, "the pack's folder")
    _check_norm(normalize)
    sites = [None if site is None else as_site(site) for site in sites]
    for site in sites:
        if not site or not isinstance(site, str):
            raise ImportRefused(
                f"no file says where the state is read, and site is {site!r}: give one such as 'resid_post.15' (the"
                " output of decoder block 15, counted from 0)"
            )
        _, layer = parse_site(site)
        if n_layers is not None and layer >= n_layers:
            raise ImportRefused(
                f"site {site!r} exceeds a model of {n_layers} layers, 0 to {n_layers - 1}: give the site that the"
                " probes read, or the model's n_layers"
            )
    check_target(target, overwrite)
    places = list(dict.fromkeys(sites))
    name = name or target.name
    # A recurrent layer's site is not as wide as the model.
    size = None if any(site and is_recurrent(site) for site in places) else int(weights["w1"].shape[-1])
    model_info: dict[str, Any] = {"model_id": model, "hidden_size": size, "n_layers": n_layers}
    if adapters:
        model_info["adapters"] = list(adapters)
    n_grouped = 0 if softmax_group is None else int((softmax_group >= 0).sum())
    if n_grouped:
        notes = [
            *notes,
            f"{n_grouped} concepts are in softmax groups: within each their scores add up to 1, so that one rises only"
            " when another falls.",
        ]
    imported = {
        "source": source,
        "sites": places,
        "normalize": normalize,
        "files": dict(files or {}),
        "stated": dict(stated or {}),
        "notes": list(notes),
        "versions": {"probemon": version("probemon"), "torch": torch.__version__, "numpy": np.__version__},
    }
    try:
        json.dumps([*concepts, name, licence, imported], ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise ImportRefused(
            f"a name or a field of a probe cannot be written as JSON ({str(error)[:100]}): give plain text and numbers"
        ) from None
    # all are root probes, and have to fit
    recommended = {"max_loaded_probes": len(concepts)} if len(concepts) > CascadeConfig().max_loaded_probes else {}
    return ProbePack.write(
        target,
        name=name,
        concepts=concepts,
        weights=weights,
        score_rule=INDEPENDENT,
        inputs=[{"site": site, "norm": normalize, "eps": eps} for site in places],
        input_index=torch.tensor([places.index(site) for site in sites], device="cpu"),
        softmax_group=softmax_group,
        alert_threshold=alert_threshold,
        host=model_info,
        licence=licence,
        card=_card(name, source, len(concepts), imported, model, licence),
        recommended=recommended,
        provenance={"import": imported},
        overwrite=overwrite,
    )


def _card(name: str, source: str, n: int, imported: Mapping[str, Any], model: str | None, licence: str) -> str:
    lines = [
        f"# {name}",
        "",
        f"{n} probes imported from {source}, in one level. Model: {model or 'not stated'}. Licence: {licence}.",
        "",
        (
            f"They read the state at {', '.join(imported['sites'])}, normalised by {imported['normalize']}. Their"
            " quality was not measured here, and thresholds that the source does not"
        ),
        "state are not set: `probemon calibrate` sets them to a rate of false alarms.",
        "",
        *(f"- {note}" for note in imported["notes"]),
    ]
    return "\n".join(lines).rstrip() + "\n"
