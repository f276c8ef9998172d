"""Whether a pack fits a model.

check_host(pack, model, strict=False)          # every pack of a group
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from probemon.core.probes import is_recurrent, parse_site
from probemon.core.scores import ModelState
from probemon.core.state_settings import differing
from probemon.errors import ModelMismatch
from probemon.host.fingerprint import active_adapters_fingerprint, fingerprint
from probemon.host.model import find_layers, model_state, unwrap
from probemon.host.recurrent.state_sites import site_width
from probemon.host.settings import model_settings
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.pack import ProbePack

_SHOWN = 3  # number of differing settings that are named


def check_host(pack: AnyPack, model: Any, *, strict: bool) -> None:
    """Raise `ModelMismatch` if the model is unreadable; another checkpoint warns, or raises if `strict`."""
    problems = model_problems(pack, model, strict=strict)
    if problems and strict:
        raise ModelMismatch(
            f"{'; '.join(problems)}. Load the model the pack was made for, or attach without strict=True"
        )
    for problem in problems:
        warnings.warn(problem, UserWarning, stacklevel=4)


def model_problems(pack: AnyPack, model: Any, *, strict: bool) -> list[str]:
    """Return why scores may be meaningless; if `strict`, also what the manifest omits. Raises `ModelMismatch`."""
    packs = _packs_of(pack)
    for member in packs:
        _check_shapes(member, model)
    # reads every weight, so at most once
    has_fingerprint = any(member.manifest["host"].get("fingerprint") is not None for member in packs)
    actual, now = fingerprint(model) if has_fingerprint else None, model_state(model)
    return [
        text
        for member in packs
        for text in (*_of_weights(member, model, now, actual, strict), *_of_adapters(member, model, now, strict))
    ]


def check_readable(pack: AnyPack, model: Any, *, strict: bool) -> None:
    """Raise as `check_host` does, without warnings."""
    if strict:
        check_host(pack, model, strict=True)
    for member in _packs_of(pack):
        _check_shapes(member, model)


def _packs_of(pack: AnyPack) -> list[ProbePack]:
    return list(pack.packs.values()) if isinstance(pack, PackGroup) else [pack]


def _check_shapes(pack: ProbePack, model: Any) -> None:
    _, layers = find_layers(model)
    section = pack.manifest["host"]
    expected, name = pack.architecture.hidden_size, type(model).__name__
    source = (
        f"{section['model_id']}, which it was made for" if section.get("model_id") else "the model that it was made for"
    )
    remedy = f"use a pack that was made for this model, or load {source}"
    for site in pack.sites:
        if parse_site(site)[1] >= len(layers):
            raise ModelMismatch(f"{pack.name} reads {site}, {name} has layers 0..{len(layers) - 1}: {remedy}")
        size = site_width(model, site)
        if size != expected:
            values = "hidden states" if not is_recurrent(site) else site
            raise ModelMismatch(f"{pack.name} reads {values} of {expected} values, {name} has {size}: {remedy}")
    if section.get("n_layers") not in (None, len(layers)):
        raise ModelMismatch(
            f"{pack.name} was made for {section['n_layers']} layers, {name} has {len(layers)}: {remedy}"
        )


def _of_weights(pack: ProbePack, model: Any, now: ModelState, actual: str | None, strict: bool) -> list[str]:
    section, name = pack.manifest["host"], type(model).__name__
    recorded = section.get("fingerprint")
    if recorded not in (None, actual):
        changed = f", in {now.quantisation}" if now.quantisation else ""
        return [
            f"{pack.name} was made for {section.get('model_id') or 'a model without a name'} ({recorded}), this model's"
            f" weights are others ({actual}{changed}): scores may mean nothing"
        ]
    problems = []
    if recorded is None and (other := _other_name(section.get("model_id"), model)):
        problems.append(
            f"{pack.name} was made for {section['model_id']}, of unknown weights, and this model is called {other}:"
            " scores may mean nothing. `probemon calibrate` records the weights of the model it calibrates on"
        )
    elif strict and (unknown := [part for part in ("fingerprint", "settings") if section.get(part) is None]):
        problems.append(
            f"{pack.name} records no {unknown[0]} of its model, so it is unknown whether it was made for {name}"
        )
    if differences := differing(section.get("settings") or {}, model_settings(model)):
        rest = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        problems.append(
            f"{pack.name} was made with other settings of the model: {', '.join(differences[:_SHOWN])}{rest}. Scores"
            " may mean something else"
        )
    return problems


def _other_name(recorded: str | None, model: Any) -> str:
    """Return the model's name if it differs from the recorded one, else ""."""
    name = str(getattr(unwrap(model), "name_or_path", "") or "")
    return name if recorded and name and _last_part(name) != _last_part(recorded) else ""


def _last_part(name: str) -> str:
    """Without owner or folder; a hub cache has it further up."""
    cached = re.search(r"models--[^/\\]+--([^/\\]+)[/\\]snapshots", name)
    return (cached[1] if cached else Path(name).name).lower()


def _of_adapters(pack: ProbePack, model: Any, now: ModelState, strict: bool) -> list[str]:
    section = pack.manifest["host"]
    names, weights = tuple(section.get("adapters") or ()), section.get("adapter_weights")
    if now.adapters != names:
        return [
            f"adapters {list(now.adapters)} are active, {pack.name} was made with {list(names)}: scores may mean"
            " something else"
        ]
    if strict and names and weights is None:
        return [
            f"{pack.name} records no weights of the adapters {list(names)}, so it is unknown whether these are the same"
        ]
    if weights is not None and (actual := active_adapters_fingerprint(model, names)) != weights:
        return [
            f"adapters {list(names)} are active, {pack.name} was made with others of these names ({weights}, these are"
            f" {actual or 'none'}): scores may mean something else"
        ]
    return []
