"""Whether a pack fits a host: its shapes, its weights, and what was put around them.

check_host(pack, model, strict=False)          # of a group, every pack
"""

from __future__ import annotations

import warnings
from typing import Any

from probemon.core.probes import is_recurrent, parse_site
from probemon.errors import HostMismatch
from probemon.host.fingerprint import fingerprint
from probemon.host.model import find_layers, host_state
from probemon.host.recurrent.state_sites import site_width
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.pack import ProbePack


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
    packs = pack.packs.values() if isinstance(pack, PackGroup) else [pack]
    return [text for one in packs for text in _problems(one, model, strict)]


def check_readable(pack: AnyPack, model: Any, *, strict: bool) -> None:
    """Raise what `check_host` raises, and warn of nothing: for before a run, which warns then."""
    if strict:
        check_host(pack, model, strict=True)
    for one in pack.packs.values() if isinstance(pack, PackGroup) else [pack]:
        _check_shapes(one, model)


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


def _problems(pack: ProbePack, model: Any, strict: bool) -> list[str]:
    _check_shapes(pack, model)
    stated, name = pack.manifest["host"], type(model).__name__
    known, now = stated.get("fingerprint"), host_state(model)
    problems = []
    if known is None:
        if strict:
            problems.append(f"{pack.name} records no fingerprint of its host, so nobody can tell whether {name} is it")
    elif (actual := fingerprint(model)) != known:
        changed = f", in {now.quantisation}" if now.quantisation else ""
        problems.append(
            f"{pack.name} was made for {stated.get('model_id') or 'a model without a name'} ({known}), this model's"
            f" weights are others ({actual}{changed}): scores may mean nothing"
        )
    if now.adapters != tuple(stated.get("adapters") or ()):
        problems.append(
            f"adapters {list(now.adapters)} are active, {pack.name} was made with {list(stated.get('adapters') or ())}:"
            " scores may mean something else"
        )
    return problems
