"""Abilities: whether a host's own answer is right in the way it is about to be run, tried on a tiny copy of it.

    abilities = Abilities(model)
    abilities.check_streams(["resid_post.3"])   # raises NotSupportedHost where that is no [rows, tokens, hidden size]
    abilities.check_generate({"beams"})         # raises NotSupportedDecoding where it cannot reorder its state
    abilities.check_forward(used=True, several=True, positions=False)  # of a forward outside generate()

A host may forget its state, leave it with the wrong beam, start it anew or let padding into it, and its own answer is
then wrong. What it can do does not show in the names of its classes, so a twin of it (`probemon.host.twin`) is run in
that very way, and once in one forward over the same tokens: the two answers must be one. A host that answers otherwise
already when it generates without a cache (one that is not causal, or whose attention chooses among all tokens there
are) does so by design, and is never refused. Each way is tried once for each class and kind of configuration, in some
tenths of a second.
"""

from __future__ import annotations

import copy
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from probemon.core.probes import is_recurrent, parse_site
from probemon.errors import NotSupportedDecoding, NotSupportedHost
from probemon.host.internals import is_stateful
from probemon.host.model import adds_stream, check_one_feed_forward, find_layers, hidden_size, site_module, unwrap
from probemon.host.trials import (
    AGAIN,
    BLOCKS,
    GAP_AS_RUN,
    MORE_AFTER,
    PADDING_AFTER,
    PADDING_BEFORE,
    ROWS,
    WAYS,
    Kind,
    blocks_with_stream,
    drops_mask,
    isolated,
    site_shapes,
    try_way,
)
from probemon.host.twin import UNCROSSED, shrunken, twin, window_of

BAR = 1e-2  # of the largest logit: rounding stays below 3e-3, a state that is lost or another row's is above 5e-2
LENGTHS_MATTER = ("longrope", "dynamic")  # one long row changes how positions are told apart in all rows
ROWS_SHAPE = (len(ROWS), len(ROWS[0]))
SHORT = 8  # windows of a twin that its sequences cross
# What every host that keeps a state is expected to be able to do
_PADDED = frozenset({"padded", "padded, no cache"})
_SIMPLEST = ("steps", "padded", "padded, no cache", "forward")


class Abilities:
    """What one host can do. Never touches it: everything is tried on a twin."""

    def __init__(self, model: Any) -> None:
        self._model = unwrap(model)

    def check_streams(self, sites: Sequence[Any]) -> None:
        """Raise `NotSupportedHost` where such layers are known not to give a token one state of the hidden size, and
        where what such a block gives has the residual stream in it, or is a part of what it stands for.
        """
        names = [site for site in sites if isinstance(site, str) and not is_recurrent(site)]
        if not names:
            return
        _, layers = find_layers(self._model)
        for site in names:
            check_one_feed_forward(layers, site)
        trials = _trials_of(self._model)
        if trials is None:
            return
        expected = (*ROWS_SHAPE, trials.width)
        for site in names:
            kind, at = parse_site(site)
            if at >= len(layers):
                continue
            module = site_module(layers, site)
            key = (kind, type(layers[at]).__name__, type(module).__name__)
            if kind in BLOCKS and key in trials.blocks_with_stream():
                raise NotSupportedHost(adds_stream(site, module))
            shape = trials.shapes().get(key, expected)
            if shape != expected:
                sizes = ", ".join(str(n) if n != trials.width else "D" for n in shape)
                n_rows, n_tokens = ROWS_SHAPE
                raise NotSupportedHost(
                    f"{site} of {type(self._model).__name__} is no stream of hidden states: for {n_rows} rows of "
                    f"{n_tokens} tokens a tiny copy of it (D = {trials.width}) gives "
                    f"[{sizes}], expected [{n_rows}, {n_tokens}, D]. Choose another site"
                )

    def check_generate(self, ways: Iterable[str], length: int = 0) -> None:
        """Raise `NotSupportedDecoding` where the host's own answer is wrong in one of these `WAYS` of generating.

        `length`: how long the sequence may become. Windows of attention are crossed on the twin if they will be.
        """
        asked = set(ways)
        if not asked.isdisjoint(_PADDED) and is_stateful(self._model) and _trials_of(self._model, length) is not None:
            # A state forgets, so what padding did to it shows in the prompt, and hardly any more in what follows.
            asked.add("whole, padded")
        self._check([way for way in WAYS if way in asked], length)

    def check_forward(self, *, used: bool, several: bool, positions: bool, mask: str = "", length: int = 0) -> None:
        """Raise `NotSupportedDecoding` where the host's own answer is wrong in such a plain forward.

        `used`: on a used cache.
        `several`: of several tokens, not of one.
        `positions`: with `position_ids`.
        `mask`: "" for none, "masked" where it says that all are tokens, "padded" for padding before them, "gapped" for
            masked columns between them.
        `length`: how long the sequence may become.
        """
        variant = f"{f', {mask}' if mask else ''}{'' if positions else ', no positions'}"
        if used:
            pieces = ["pieces", f"pieces{variant}"] if several else []
            self._check([*pieces, f"forward{variant}", "forwards beside"], length)
        elif mask in ("padded", "gapped"):
            self._check([f"whole{variant}"], length)

    def takes_padding(self, length: int = 0) -> bool:
        """Whether padding after a row of up to `length` tokens, under a mask, is known to change none of its states."""
        if any(kind in LENGTHS_MATTER for kind in _rope_types(self._model.config.to_dict())):
            return False
        trials = _trials_of(self._model, length)
        return trials is not None and trials.passes(PADDING_AFTER)

    def looks_ahead(self, length: int = 0) -> bool:
        """Whether a token's state may depend on tokens after it, in rows of up to `length` tokens."""
        trials = _trials_of(self._model, length)
        return trials is None or not trials.passes(MORE_AFTER)

    def check_again(self, length: int = 0) -> None:
        """Raise `NotSupportedHost` where what it answers is known to depend on what it read before, without a cache."""
        trials = _trials_of(self._model, length)
        distance = None if trials is None else trials.distance(AGAIN)
        if distance is not None and not distance <= BAR:
            raise NotSupportedHost(
                f"what {type(self._model).__name__} answers depends on what it read before: a text would have other"
                f" scores after others (a tiny copy of it is {distance:.2g} of the largest logit away from its first"
                " answer after a short text). Load it with another attention, if it has one"
            )

    def drops_mask(self) -> bool:
        """Whether the host's forward takes an attention mask and its decoder, as far as is known, is never given it."""
        trials = _trials_of(self._model)
        return trials is not None and trials.drops_mask

    def on_twin(self, name: str, trial: Callable[[Any], Any]) -> Any:
        """Return what `trial` returns of a copy of the twin, which it may change, once for each kind of host and
        `name`; None where no twin can be made, or not be run so.
        """
        trials = _trials_of(self._model)
        return None if trials is None else trials.outcome(name, trial)

    def _check(self, ways: Sequence[str], length: int) -> None:
        trials = _trials_of(self._model, length)
        name = type(self._model).__name__
        if trials is None:
            if is_stateful(self._model) and (unknown := [WAYS[way] for way in ways if way not in _SIMPLEST]):
                raise NotSupportedDecoding(
                    f"{unknown[0].name} is not supported for {name}: it keeps a state, and no tiny copy of it could be"
                    f" made to see whether it can {unknown[0].cannot}. {unknown[0].remedy}, or detach"
                )
            return
        for way in ways:
            distance = trials.distance(way)
            if trials.depends_on_the_cut:  # no way gives what one forward gives; padding may be asked of the way itself
                as_run = PADDING_BEFORE if "padded" in way else GAP_AS_RUN if "gap" in way else None
                distance = None if as_run is None else trials.distance(as_run)
            if distance is not None and not distance <= BAR:
                raise NotSupportedDecoding(
                    f"{WAYS[way].name} is not supported for {name}, whose own answer is wrong there: it does not "
                    f"{WAYS[way].cannot} (logits of a tiny copy of it are {distance:.2g} of the largest away from those"
                    f" of one forward). {WAYS[way].remedy}, or detach"
                )


class _Trials:
    """A twin, and the outcomes of what it has been tried at: each once, on a copy."""

    def __init__(self, kind: type, config: Any) -> None:
        self._distances: dict[str, float | None] = {}
        self._outcomes: dict[str, Any] = {}
        self._shapes: dict[Kind, tuple[int, ...]] | None = None
        self._with_stream: set[Kind] | None = None
        self._drops: bool | None = None
        self._lock = threading.RLock()
        with isolated():
            self._model = twin(kind, config)
            self.width = hidden_size(self._model)

    def distance(self, way: str) -> float | None:
        """How far the twin is from its own single forward, of the largest logit; None where it cannot be run so."""
        with self._lock:
            if way not in self._distances:
                with isolated():
                    try:
                        self._distances[way] = try_way(copy.deepcopy(self._model), way)
                    except Exception:  # the host says by itself that it cannot
                        self._distances[way] = None
            return self._distances[way]

    def passes(self, way: str) -> bool:
        """Whether the twin can be run so, and its answer is right."""
        distance = self.distance(way)
        return distance is not None and distance <= BAR

    @property
    def depends_on_the_cut(self) -> bool:
        """Whether even without a cache, and without padding, a token's answer depends on how many come after it."""
        distance = self.distance("no cache")
        return distance is not None and not distance <= BAR

    @property
    def drops_mask(self) -> bool:
        """Whether a mask of the outer forward does not come to the decoder."""
        with self._lock:
            if self._drops is None:
                with isolated():
                    self._drops = drops_mask(copy.deepcopy(self._model))
            return self._drops

    def outcome(self, name: str, trial: Callable[[Any], Any]) -> Any:
        """What a trial of someone else's gives; None where it cannot be run."""
        with self._lock:
            if name not in self._outcomes:
                with isolated():
                    try:
                        self._outcomes[name] = trial(copy.deepcopy(self._model))
                    except Exception:  # of every kind: it is of a foreign forward
                        self._outcomes[name] = None
            return self._outcomes[name]

    def shapes(self) -> dict[Kind, tuple[int, ...]]:
        """The shapes that each kind of site gives for two rows, by kind and the classes of layer and module."""
        with self._lock:
            if self._shapes is None:
                with isolated():
                    self._shapes = site_shapes(copy.deepcopy(self._model))
            return self._shapes

    def blocks_with_stream(self) -> set[Kind]:
        """The kinds of blocks that give the stream beside what is their own."""
        with self._lock:
            if self._with_stream is None:
                with isolated():
                    self._with_stream = blocks_with_stream(copy.deepcopy(self._model))
            return self._with_stream


_BY_KIND: dict[tuple[type, str], _Trials | None] = {}
_BY_MODEL: weakref.WeakKeyDictionary[Any, dict[bool, _Trials | None]] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


def _trials_of(model: Any, length: int = 0) -> _Trials | None:
    """The trials of a host's class and configuration for sequences of `length`; None where no twin can be made."""
    with _LOCK:
        known = _BY_MODEL.setdefault(model, {})
        try:
            crossed = length > (window_of(model.config) or length)
            if crossed not in known:
                known[crossed] = None
                config = shrunken(model.config, SHORT if crossed else UNCROSSED)
                key = type(model), json.dumps(config.to_dict(), sort_keys=True, default=str)
                if key not in _BY_KIND:
                    _BY_KIND[key] = _Trials(type(model), config)
                known[crossed] = _BY_KIND[key]
            return known[crossed]
        except Exception:  # of every kind: what a foreign configuration does with other sizes is not known
            return None


def _rope_types(config: Any) -> Iterator[str]:
    """The kinds of rotary positions that a configuration, as a dict, names anywhere."""
    for name, value in config.items():
        if name in ("rope_type", "type") and isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _rope_types(value)
