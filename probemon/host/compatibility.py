"""Whether a pack fits a host: its shapes, its weights and settings, and what was put around them.

check_host(pack, model, strict=False)          # of a group, every pack
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from probemon.core.probes import is_recurrent, parse_site
from probemon.core.scores import HostState
from probemon.core.state_settings import differing
from probemon.errors import HostMismatch
from probemon.host.fingerprint import active_adapters_fingerprint, fingerprint
from probemon.host.model import find_layers, host_state, unwrap
from probemon.host.recurrent.state_sites import site_width
from probemon.host.settings import host_settings
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.pack import ProbePack

_SHOWN = 3  # settings that differ, so many are named


def check_host(pack: AnyPack, model: Any, *, strict: bool) -> None:
    """Raise `HostMismatch` where a pack cannot read this host; another checkpoint warns, or raises if `strict`."""
    problems = host_problems(pack, model, strict=strict)
    if problems and strict:
        raise HostMismatch(
            f"{'; '.join(problems)}. Load the model the pack was made for, or attach without strict=True"
        )
    for problem in problems:
        warnings.warn(problem, UserWarning, stacklevel=4)


def host_problems(pack: AnyPack, model: Any, *, strict: bool) -> list[str]:
    """Return why scores of a pack may mean nothing on this host; `strict`: also that it is unknown. Raises
    `HostMismatch` where the pack cannot read it.
    """
    packs = _packs_of(pack)
    for one in packs:
        _check_shapes(one, model)
    # It reads every weight: once for all packs, and not for those that state none.
    stated = any(one.manifest["host"].get("fingerprint") is not None for one in packs)
    actual, now = fingerprint(model) if stated else None, host_state(model)
    return [
        text
        for one in packs
        for text in (*_of_weights(one, model, now, actual, strict), *_of_adapters(one, model, now, strict))
    ]


def check_readable(pack: AnyPack, model: Any, *, strict: bool) -> None:
    """Raise what `check_host` raises, and warn of nothing: for before a run, which warns then."""
    if strict:
        check_host(pack, model, strict=True)
    for one in _packs_of(pack):
        _check_shapes(one, model)


def _packs_of(pack: AnyPack) -> list[ProbePack]:
    return list(pack.packs.values()) if isinstance(pack, PackGroup) else [pack]


def _check_shapes(pack: ProbePack, model: Any) -> None:
    _, layers = find_layers(model)
    stated = pack.manifest["host"]
    expected, name = pack.architecture.hidden_size, type(model).__name__
    of = f"{stated['model_id']}, which it was made for" if stated.get("model_id") else "the model that it was made for"
    remedy = f"use a pack that was made for this model, or load {of}"
    for site in pack.sites:
        if parse_site(site)[1] >= len(layers):
            raise HostMismatch(f"{pack.name} reads {site}, {name} has layers 0..{len(layers) - 1}: {remedy}")
        size = site_width(model, site)
        if size != expected:
            what = "hidden states" if not is_recurrent(site) else site
            raise HostMismatch(f"{pack.name} reads {what} of {expected} values, {name} has {size}: {remedy}")
    if stated.get("n_layers") not in (None, len(layers)):
        raise HostMismatch(f"{pack.name} was made for {stated['n_layers']} layers, {name} has {len(layers)}: {remedy}")


def _of_weights(pack: ProbePack, model: Any, now: HostState, actual: str | None, strict: bool) -> list[str]:
    stated, name = pack.manifest["host"], type(model).__name__
    known = stated.get("fingerprint")
    if known not in (None, actual):
        changed = f", in {now.quantisation}" if now.quantisation else ""
        return [
            f"{pack.name} was made for {stated.get('model_id') or 'a model without a name'} ({known}), this model's"
            f" weights are others ({actual}{changed}): scores may mean nothing"
        ]
    problems = []
    if known is None and (other := _other_name(stated.get("model_id"), model)):
        problems.append(
            f"{pack.name} was made for {stated['model_id']}, of unknown weights, and this model is called {other}:"
            " scores may mean nothing. `probemon calibrate` states the weights of the model it calibrates on"
        )
    elif strict and (unknown := [part for part in ("fingerprint", "settings") if stated.get(part) is None]):
        problems.append(f"{pack.name} records no {unknown[0]} of its host, so nobody can tell whether {name} is it")
    if differences := differing(stated.get("settings") or {}, host_settings(model)):
        more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        problems.append(
            f"{pack.name} was made with other settings of the model: {', '.join(differences[:_SHOWN])}{more}. Scores"
            " may mean something else"
        )
    return problems


def _other_name(stated: str | None, model: Any) -> str:
    """Return what a model calls itself, where that is another name than `stated`; "" where one of them has none."""
    name = str(getattr(unwrap(model), "name_or_path", "") or "")
    return name if stated and name and _last_part(name) != _last_part(stated) else ""


def _last_part(name: str) -> str:
    """The name of a model without its owner or folder; a cache of the hub has it further up."""
    cached = re.search(r"models--[^/\\]+--([^/\\]+)[/\\]snapshots", name)
    return (cached[1] if cached else Path(name).name).lower()


def _of_adapters(pack: ProbePack, model: Any, now: HostState, strict: bool) -> list[str]:
    stated = pack.manifest["host"]
    names, weights = tuple(stated.get("adapters") or ()), stated.get("adapter_weights")
    if now.adapters != names:
        return [
            f"adapters {list(now.adapters)} are active, {pack.name} was made with {list(names)}: scores may mean"
            " something else"
        ]
    if strict and names and weights is None:
        return [
            f"{pack.name} records no weights of the adapters {list(names)}, so nobody can tell whether these are they"
        ]
    if weights is not None and (actual := active_adapters_fingerprint(model, names)) != weights:
        return [
            f"adapters {list(names)} are active, {pack.name} was made with others of these names ({weights}, these are"
            f" {actual or 'none'}): scores may mean something else"
        ]
    return []
