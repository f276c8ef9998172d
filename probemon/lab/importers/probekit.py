"""Imports probekit's linear probes, from memory or JSON.

    pack = import_probes({"deception": probe}, "my-pack", site="resid_post.15", normalize="none")
    pack = import_file("probes.json", "my-pack", site="resid_post.15", normalize="none")

Scores are the sigmoid of `predict_score`. Normalisation is folded into the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers.flat import Classifier, ImportOptions, check_options, linear, write_flat
from probemon.lab.importers.foreign_files import as_path, field, read_json
from probemon.packs.pack import ProbePack
from probemon.util.files import sha256

_KEYS = ("weights", "bias", "normalization", "metadata")
_FLAT = 1e-12  # probekit.utils.normalization: smaller deviations count as 1


def import_probes(
    probes: Mapping[str, Any],
    target: str | Path,
    *,
    site: str,
    normalize: str | None = None,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write `LinearProbe`s, or their `to_dict()`, as a pack, by name.

    - `site`: where the states were read
    - `normalize`: of states before probekit (`none`, `layernorm`, `rmsnorm`); required
    - `about`: `ImportOptions` of `probemon.lab.importers.flat`

    Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_probes, about, normalize=normalize)
    if not isinstance(probes, Mapping):
        raise ImportRefused(f"probes is a {type(probes).__name__}: give a dict of names and probes")
    classifiers = [_probe(name, probe) for name, probe in probes.items()]
    return write_flat(target, classifiers, source="probekit", site=site, normalize=normalize, **about)


def import_collection(
    collection: Any,
    names: Sequence[str],
    target: str | Path,
    *,
    site: str,
    normalize: str | None = None,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write a `ProbeCollection` as a pack; `names`: in its order. Otherwise as `import_probes`."""
    check_options(import_collection, about, normalize=normalize)
    if not hasattr(collection, "to_tensor") or not hasattr(collection, "normalizations"):
        raise ImportRefused(
            f"{type(collection).__name__} is not a probekit collection: give one, or a dict of probes to import_probes"
        )
    weights, biases = (part.detach().cpu() for part in collection.to_tensor())
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ImportRefused(f"names is {names!r}: give a list of names, one for each of the {len(weights)} probes")
    if not len(names) == len(weights) == len(biases) == len(collection.normalizations):
        raise ImportRefused(
            f"{len(names)} names for {len(weights)} probes: give one for each, in the order of the collection"
        )
    classifiers = [
        _fold_normalisation(linear(name, weights[i], biases[i]), norm)
        for i, (name, norm) in enumerate(zip(names, collection.normalizations, strict=True))
    ]
    return write_flat(target, classifiers, source="probekit", site=site, normalize=normalize, **about)


def import_file(
    path: str | Path,
    target: str | Path,
    *,
    site: str,
    normalize: str | None = None,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write a JSON file as a pack: `{name: to_dict()}`, or one `to_dict()`, named by the file.

    Otherwise as `import_probes`.
    """
    check_options(import_file, about, normalize=normalize)
    path = as_path(path, "the file of probes")
    content = read_json(path)
    if not isinstance(content, dict):
        raise ImportRefused(f"{path}: expected an object, found {type(content).__name__}")
    listed = {path.stem: content} if isinstance(content.get("weights"), list) else content
    classifiers = [_probe(name, entry) for name, entry in listed.items()]
    return write_flat(
        target, classifiers, source="probekit", site=site, normalize=normalize, files={path.name: sha256(path)}, **about
    )


def _probe(name: str, probe: Any) -> Classifier:
    if isinstance(probe, dict):
        where = f"probe {name!r}"
        strange = [key for key in probe if key not in _KEYS]
        if strange:  # a score may depend on it
            raise ImportRefused(
                f"{where} has {strange[0]!r:.80}, which probekit's to_dict() does not write (it writes"
                f" {', '.join(_KEYS)}): take it out, or give the weights to"
                " probemon.lab.importers.generic.import_weights"
            )
        weights, norm = _vector(field(probe, "weights", list, where), where), probe.get("normalization")
        bias: Any = probe.get("bias", 0.0)
        metadata = field(probe, "metadata", dict, where, {})
    elif hasattr(probe, "weights") and hasattr(probe, "bias") and hasattr(probe, "normalization"):
        weights, norm, bias, metadata = (
            _vector(probe.weights, f"probe {name!r}"),
            probe.normalization,
            probe.bias,
            getattr(probe, "metadata", None) or {},
        )
    else:
        raise ImportRefused(
            f"probe {name!r} is a {type(probe).__name__}: give a probekit LinearProbe, or the dict of its to_dict()"
        )
    if weights.dim() == 2 and len(weights) > 1:
        raise ImportRefused(
            f"probe {name!r} has {len(weights)} rows, of classes whose probabilities it does not define: give each row"
            " as a probe, with probemon.lab.importers.generic.import_weights"
        )
    solver = metadata.get("solver") if isinstance(metadata, Mapping) else None
    return _fold_normalisation(
        linear(
            name,
            weights,
            _vector(bias, f"probe {name!r}: bias"),
            fields={"solver": solver} if isinstance(solver, str) else {},
        ),
        norm,
    )


def _fold_normalisation(probe: Classifier, norm: Any) -> Classifier:
    if norm is None:
        return probe
    parts = [norm.get(name) if isinstance(norm, dict) else getattr(norm, name, None) for name in ("mean", "std")]
    mean, std = (_vector(part, f"{probe.id}: normalization") for part in parts)
    return probe.standardised(mean, torch.where(std.abs() <= _FLAT, torch.ones_like(std), std))


def _vector(values: Any, where: str) -> Tensor:
    try:
        return torch.from_numpy(
            np.array(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ImportRefused(f"{where}: expected numbers ({error})") from None
