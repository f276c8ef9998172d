"""Settings of a model's modules: attributes, buffers outside of the checkpoint, configurations.

settings = ModuleSettings(model)
before = settings.now()                   # later calls take a fraction of a millisecond
differing(before, settings.now())         # ["model.layers.3.input_layernorm.variance_epsilon was 1e-05, is 0.1"]

Attributes that forwards write do not count. The training mode counts in modules that drop values, add noise or
normalise by batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from numbers import Number
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from probemon.core.state_settings import sets_states
from probemon.host.internals import (
    ATTENTION,
    attention_kind,
    keeps_statistics,
    may_read,
    names_in_methods,
    own_attributes,
    remade_frequencies,
    switches_adapters,
    temporary_buffers,
    uncompiled,
    without_wrappers,
    write_marks,
)
from probemon.host.model import drop_rates
from probemon.util.checks import shown
from probemon.util.shadow import unshadowed

# By place (of a module, configuration or class) and name; "" is a module's class.
Settings = Mapping[tuple[str, str], Any]
_PLAIN = (type(None), bool, Number, str, bytes, torch.dtype)
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_ABSENT = object()
_TRIES = 100


def differing(before: Settings, now: Settings) -> list[str]:
    """Return a text for each difference. One-sided settings count only if the class is the same."""
    texts = []
    for key in () if before is now else dict.fromkeys((*before, *now)):
        (place, name), was, value = key, before.get(key, _ABSENT), now.get(key, _ABSENT)
        alone = _ABSENT in (was, value) and name and before.get((place, "")) is not now.get((place, ""), _ABSENT)
        if not (alone or was is value or was == value):
            setting, kinds = ".".join(filter(None, (place, name))) or "the model", {type(was), type(value)}
            if kinds.isdisjoint({_Written, _Itself}):
                texts.append(f"{setting} was {_shown(was)}, is {_shown(value)}")
            else:
                texts.append(f"{setting} was {'written to' if _Written in kinds else 'replaced'}")
    return texts


class ModuleSettings:
    """The settings of a model's modules. Thread-safe."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._look = model, _look(model)

    def now(self) -> Settings:
        """Return the current settings; the same object if nothing changed."""
        look = self._look
        if not look.holds():
            look = self._look = _look(self._model)
        return look.settings


def _look(model: nn.Module) -> _Look:
    """Walk over the modules, again if another thread patches one meanwhile."""
    for _ in range(_TRIES):
        try:
            return _Look(model)
        except (KeyError, RuntimeError):  # an attribute came or went
            continue
    return _Look(model)


class _Written(tuple[int, int]):
    """Address of a tensor, and its number of writes."""


@dataclass(frozen=True, eq=False)
class _Itself:
    """A container that forwards may change: compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class _Look:
    """One walk over the modules; later states are compared with it, values by identity."""

    def __init__(self, model: nn.Module) -> None:
        self.settings: dict[tuple[str, str], Any] = {}
        self._readers: list[tuple[dict[str, Any], itemgetter[Any]]] = []
        self._tensors: list[tuple[tuple[str, str], Mapping[str, Any]]] = []  # with the mapping that keeps each
        self._containers: list[Any] = []  # may change in place
        configurations: dict[int, tuple[str, PretrainedConfig]] = {}  # each once, at its first place
        for path, module in model.named_modules():
            if uncompiled(module) is module:  # not a wrapper of torch.compile
                self._read_module(without_wrappers(f"{path}.").rstrip("."), module, configurations)
        for place, configuration in configurations.values():
            self._read_configuration(place, configuration)
        self._modules = list(model.modules())
        self._kinds: list[Any] = list(dict.fromkeys(map(type, self._modules)))
        for kind in self._kinds:
            for name in ("forward", "__call__"):
                self.settings[f"{kind.__module__}.{kind.__qualname__}", name] = getattr(kind, name)
        self._sizes, self._values, self._parts = self._sizes_now(), self._values_now(), self._parts_now()
        self._marks = self._marks_now()
        self.settings.update({key: _Written(mark) for (key, _), mark in zip(self._tensors, self._marks, strict=True)})

    def holds(self) -> bool:
        try:
            values = self._values_now()
        except KeyError:  # an attribute was deleted
            return False
        return (
            all(map(is_, values, self._values))
            and self._sizes_now() == self._sizes
            and self._parts_now() == self._parts
            and self._marks_now() == self._marks
        )

    def _values_now(self) -> list[Any]:
        tensors = [attributes.get(name) for (_, name), attributes in self._tensors]
        return [
            *chain.from_iterable([read(attributes) for attributes, read in self._readers]),
            *map(type, self._modules),
            *(kind.forward for kind in self._kinds),
            *(kind.__call__ for kind in self._kinds),
            *tensors,
        ]

    def _sizes_now(self) -> list[int]:
        return [len(attributes) for attributes, _ in self._readers]

    def _parts_now(self) -> list[Any]:
        return list(map(_plain, self._containers))

    def _marks_now(self) -> list[tuple[int, int]]:
        return write_marks([attributes[name] for (_, name), attributes in self._tensors])

    def _read_module(self, place: str, module: nn.Module, configurations: dict[int, tuple[str, Any]]) -> None:
        attributes, kind = vars(module), type(module)
        methods, remade = names_in_methods(kind), remade_frequencies(module)
        self.settings[place, ""] = kind
        # Compared as adapter switches.
        candidates = [] if switches_adapters(module) else own_attributes(module)
        names = [name for name in candidates if name not in methods.assigned and may_read(module, name)]
        for name in names:
            self._read(place, name, attributes, module)
        self._tensors += [
            ((place, name), module._buffers)
            for name in temporary_buffers(module)
            if name not in methods.assigned and name not in remade and module._buffers[name] is not None
            if may_read(module, name)
        ]
        rates = drop_rates(module) | _noise(module) if module.training else {}
        is_custom = (
            not kind.__module__.startswith(("torch.", "transformers.", "peft.")) and "training" in methods.mentioned
        )
        acts = module.training and (bool(rates) or keeps_statistics(module) or is_custom)
        self.settings.update({(place, name): rate for name, rate in rates.items()})
        self.settings[place, "training"] = acts
        configuration = attributes.get("config")
        if id(configuration) not in configurations and isinstance(configuration, PretrainedConfig):
            configurations[id(configuration)] = (f"{place}.config".lstrip("."), configuration)
        # With two names or more, itemgetter returns a tuple.
        self._readers.append((attributes, itemgetter("training", "_modules", *names)))

    def _read_configuration(self, place: str, configuration: PretrainedConfig) -> None:
        attributes = vars(configuration)
        for name, value in attributes.items():
            if isinstance(value, PretrainedConfig):
                self._read_configuration(f"{place}.{name}", value)
        self.settings[place, ""] = type(configuration)
        names = [name for name, value in attributes.items() if sets_states(name, value)]
        for name in names:
            self._read(place, name, attributes)
        # Continuous batching changes it temporarily.
        self.settings[place, "_attn_implementation"] = attention_kind(configuration).removeprefix("paged|")
        self._readers.append((attributes, itemgetter(*names, *(name for name in attributes if name == ATTENTION))))

    def _read(self, place: str, name: str, attributes: dict[str, Any], module: nn.Module | None = None) -> None:
        value, key = attributes[name], (place, name)
        if module is not None and hasattr(type(module), name):
            value = _over_class(module, name, value)
            if value is _ABSENT:
                return
        if isinstance(value, Tensor):
            self._tensors.append((key, attributes))
        elif isinstance(value, _CONTAINERS) and module is not None and name in names_in_methods(type(module)).edited:
            self.settings[key] = _Itself(value)
        elif isinstance(value, _CONTAINERS):
            self.settings[key] = _plain(value)
            self._containers.append(value)
        elif isinstance(value, _PLAIN) or (callable(value) and not isinstance(value, nn.Module)):
            self.settings[key] = value


def _over_class(module: nn.Module, name: str, value: Any) -> Any:
    """Return a module's override of a class attribute, else `_ABSENT`; our patches do not count."""
    class_value = getattr(type(module), name)
    if callable(value):
        value = unshadowed(value)
    if getattr(value, "__self__", None) is module:  # a removed patch left the bound method
        value = value.__func__
    return _ABSENT if (value is None and callable(class_value)) or value is class_value else value


def _noise(module: nn.Module) -> dict[str, float]:
    """Return the jitter of a router's input, by attribute name."""
    jitters = {name: value for name, value in vars(module).items() if "jitter" in name}
    return {name: value for name, value in jitters.items() if isinstance(value, float) and value > 0}


def _plain(value: Any) -> Any:
    """Return a copy in which values that cannot be compared are their types."""
    if isinstance(value, Mapping):
        return tuple((_plain(key), _plain(inner)) for key, inner in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_plain, value))
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, _PLAIN) or (callable(value) and not isinstance(value, nn.Module)) else type(value)


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    return str(getattr(value, "__qualname__", None) or shown(value))
