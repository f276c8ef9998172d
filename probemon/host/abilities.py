"""Abilities: whether a model answers correctly in a given way of running it, tried on a tiny copy.

    abilities = Abilities(model)
    abilities.check_streams(["resid_post.3"])   # UnsupportedModel
    abilities.check_generate({"beams"})         # UnsupportedDecoding
    abilities.check_forward(used=True, several=True, positions=False)

Some models lose their state, mix up beams or read padding. A twin runs in that way and is compared with a single
forward. Models that differ even without a cache are never refused.
"""

from __future__ import annotations

import copy
import json
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from probemon.core.probes import is_recurrent, parse_site
from probemon.errors import UnsupportedDecoding, UnsupportedModel
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

BAR = 1e-2  # of the largest logit: rounding is below 3e-3, a wrong state above 5e-2
LENGTHS_MATTER = ("longrope", "dynamic")  # a long row changes the positions of all rows
ROWS_SHAPE = (len(ROWS), len(ROWS[0]))
SHORT = 8  # attention windows that a twin's sequences exceed
# Ways that every stateful model should support
_PADDED = frozenset({"padded", "padded, no cache"})
_SIMPLEST = ("steps", "padded", "padded, no cache", "forward")


class Abilities:
    """A model's abilities. Only a twin is run."""

    def __init__(self, model: Any) -> None:
        self._model = unwrap(model)

    def check_streams(self, sites: Sequence[Any]) -> None:
        """Raise `UnsupportedModel` if a site is not one hidden state per token, or includes the residual stream."""
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
                raise UnsupportedModel(adds_stream(site, module))
            shape = trials.shapes().get(key, expected)
            if shape != expected:
                sizes = ", ".join(str(n) if n != trials.width else "D" for n in shape)
                n_rows, n_tokens = ROWS_SHAPE
                raise UnsupportedModel(
                    f"{site} of {type(self._model).__name__} is not a stream of hidden states: for {n_rows} rows of "
                    f"{n_tokens} tokens a tiny copy of it (D = {trials.width}) gives "
                    f"[{sizes}], expected [{n_rows}, {n_tokens}, D]. Choose another site"
                )

    def check_generate(self, ways: Iterable[str], length: int = 0) -> None:
        """Raise `UnsupportedDecoding` if the model is wrong in one of these `WAYS`.

        `length`: longest possible sequence, which may exceed attention windows.
        """
        requested = set(ways)
        if (
            not requested.isdisjoint(_PADDED)
            and is_stateful(self._model)
            and _trials_of(self._model, length) is not None
        ):
            # Padding shows most in a state's first answers.
            requested.add("whole, padded")
        self._check([way for way in WAYS if way in requested], length)

    def check_forward(self, *, used: bool, several: bool, positions: bool, mask: str = "", length: int = 0) -> None:
        """Raise `UnsupportedDecoding` if the model is wrong in such a plain forward.

        - `used`: on a used cache
        - `several`: several tokens
        - `positions`: with `position_ids`
        - `mask`: "", "masked" (all ones), "padded" (before the tokens), "gapped" (between them)
        - `length`: longest possible sequence
        """
        variant = f"{f', {mask}' if mask else ''}{'' if positions else ', no positions'}"
        if used:
            pieces = ["pieces", f"pieces{variant}"] if several else []
            self._check([*pieces, f"forward{variant}", "forwards beside"], length)
        elif mask in ("padded", "gapped"):
            self._check([f"whole{variant}"], length)

    def takes_padding(self, length: int = 0) -> bool:
        """True if padding after up to `length` tokens is known to be harmless."""
        if any(kind in LENGTHS_MATTER for kind in _rope_types(self._model.config.to_dict())):
            return False
        trials = _trials_of(self._model, length)
        return trials is not None and trials.passes(PADDING_AFTER)

    def looks_ahead(self, length: int = 0) -> bool:
        """True if a hidden state may depend on later tokens."""
        trials = _trials_of(self._model, length)
        return trials is None or not trials.passes(MORE_AFTER)

    def check_again(self, length: int = 0) -> None:
        """Raise `UnsupportedModel` if answers depend on earlier inputs, without a cache."""
        trials = _trials_of(self._model, length)
        distance = None if trials is None else trials.distance(AGAIN)
        if distance is not None and not distance <= BAR:
            raise UnsupportedModel(
                f"what {type(self._model).__name__} answers depends on what it read before: a text's scores would"
                f" depend on earlier texts (a tiny copy is {distance:.2g} of the largest logit away from its first"
                " answer after a short text). Load it with another attention, if it has one"
            )

    def drops_mask(self) -> bool:
        """True if the decoder does not receive the attention mask."""
        trials = _trials_of(self._model)
        return trials is not None and trials.drops_mask

    def _check(self, ways: Sequence[str], length: int) -> None:
        trials = _trials_of(self._model, length)
        name = type(self._model).__name__
        if trials is None:
            if is_stateful(self._model) and (unknown := [WAYS[way] for way in ways if way not in _SIMPLEST]):
                raise UnsupportedDecoding(
                    f"{unknown[0].name} is not supported for {name}: it keeps a state, and no tiny copy of it could be"
                    f" made to see whether it can {unknown[0].cannot}. {unknown[0].remedy}, or detach"
                )
            return
        for way in ways:
            distance = trials.distance(way)
            if trials.depends_on_the_cut:  # padding is compared within the way
                as_run = PADDING_BEFORE if "padded" in way else GAP_AS_RUN if "gap" in way else None
                distance = None if as_run is None else trials.distance(as_run)
            if distance is not None and not distance <= BAR:
                raise UnsupportedDecoding(
                    f"{WAYS[way].name} is not supported for {name}, whose own answer is wrong there: it does not "
                    f"{WAYS[way].cannot} (logits of a tiny copy of it are {distance:.2g} of the largest away from those"
                    f" of one forward). {WAYS[way].remedy}, or detach"
                )


class _Trials:
    """A twin and its cached results."""

    def __init__(self, kind: type, config: Any) -> None:
        self._distances: dict[str, float | None] = {}
        self._shapes: dict[Kind, tuple[int, ...]] | None = None
        self._with_stream: set[Kind] | None = None
        self._drops: bool | None = None
        self._lock = threading.RLock()
        with isolated():
            self._model = twin(kind, config)
            self.width = hidden_size(self._model)

    def distance(self, way: str) -> float | None:
        """Return the distance from a single forward; None if it fails."""
        with self._lock:
            if way not in self._distances:
                with isolated():
                    try:
                        self._distances[way] = try_way(copy.deepcopy(self._model), way)
                    except Exception:  # the model refuses
                        self._distances[way] = None
            return self._distances[way]

    def passes(self, way: str) -> bool:
        """True if the twin's answer is right."""
        distance = self.distance(way)
        return distance is not None and distance <= BAR

    @property
    def depends_on_the_cut(self) -> bool:
        """True if answers depend on later tokens even without a cache."""
        distance = self.distance("no cache")
        return distance is not None and not distance <= BAR

    @property
    def drops_mask(self) -> bool:
        with self._lock:
            if self._drops is None:
                with isolated():
                    self._drops = drops_mask(copy.deepcopy(self._model))
            return self._drops

    def shapes(self) -> dict[Kind, tuple[int, ...]]:
        """Return shapes of sites for two rows."""
        with self._lock:
            if self._shapes is None:
                with isolated():
                    self._shapes = site_shapes(copy.deepcopy(self._model))
            return self._shapes

    def blocks_with_stream(self) -> set[Kind]:
        """Return kinds of blocks that include the stream."""
        with self._lock:
            if self._with_stream is None:
                with isolated():
                    self._with_stream = blocks_with_stream(copy.deepcopy(self._model))
            return self._with_stream


_BY_KIND: dict[tuple[type, str], _Trials | None] = {}
_BY_MODEL: weakref.WeakKeyDictionary[Any, dict[bool, _Trials | None]] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


def _trials_of(model: Any, length: int = 0) -> _Trials | None:
    """Return the trials for a class and configuration; None without a twin."""
    with _LOCK:
        trials = _BY_MODEL.setdefault(model, {})
        try:
            crossed = length > (window_of(model.config) or length)
            if crossed not in trials:
                trials[crossed] = None
                config = shrunken(model.config, SHORT if crossed else UNCROSSED)
                key = type(model), json.dumps(config.to_dict(), sort_keys=True, default=str)
                if key not in _BY_KIND:
                    _BY_KIND[key] = _Trials(type(model), config)
                trials[crossed] = _BY_KIND[key]
            return trials[crossed]
        except Exception:  # unknown configurations may raise anything
            return None


def _rope_types(config: Any) -> Iterator[str]:
    """Yield the rope types in a dict."""
    for name, value in config.items():
        if name in ("rope_type", "type") and isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _rope_types(value)
