"""Sources: the routers of a model, their sites, and how outputs become decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.config import CHUNK_KINDS
from probemon.adapters.routing.decisions import BEM, MOE, XLORA, Decisions, Numbers, Singles, Stream, largest
from probemon.adapters.routing.slot_memories import SlotMemories, slot_memories
from probemon.errors import ConfigError, UnsupportedModel
from probemon.host.adapters import xlora_of
from probemon.host.internals import xlora_classifier
from probemon.host.model import find_layers
from probemon.host.site import Site

_SHOWN = 4  # entries recorded if a router does not choose


def find_sources(model: Any, *, bem: Any = None) -> list[Source]:
    """Return every router of an unwrapped model. Raises `ConfigError` if `bem` belongs to another model.

    `bem`: the result of attach_bem, or its controller.
    """
    groups: dict[tuple[int, int], list[tuple[str, int, nn.Module]]] = {}
    for name, layer, router in _routers(model):
        groups.setdefault((router.weight.shape[0], int(router.top_k)), []).append((name, layer, router))
    sources: list[Source] = [ExpertRouters(routers, *sizes) for sizes, routers in groups.items()]
    sources += slot_memories(model)
    xlora = xlora_of(model)
    if xlora is not None:
        sources.append(XLoraClassifier(xlora[0]))
    if bem is not None:
        sources.append(BemController(bem, model))
    return sources


NO_ROUTER = (
    " has no router that is known: no experts (modules of its layers with weight [experts, hidden size] and top_k), no"
    " memory slots (LtmForCausalLM), no X-LoRA and no recurrent layer. A BEM adapter has to be given, as attach_bem"
    " returned it: attach(followers=[Routing(bem=bem)]), RoutingMonitor(model, bem=bem), in the shell --bem FOLDER"
)


def _routers(model: Any) -> Iterator[tuple[str, int, Any]]:
    for number, layer in enumerate(find_layers(model)[1]):
        routers = [(name, module) for name, module in layer.named_modules() if _routes(module)]
        for name, module in routers:
            yield f"router.{number}" if len(routers) == 1 else f"router.{number}.{name}", number, module


def _routes(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    n_experts = getattr(module, "num_experts", None) or getattr(module, "n_routed_experts", None)
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 2
        and n_experts == weight.shape[0] > 1
        and isinstance(getattr(module, "top_k", None), int)
    )


class ExpertRouters:
    """Mixture-of-experts routers, each with E experts of which k are chosen.

    A router gives logits `[B * T, E]`, then weights and numbers of the chosen experts `[B * T, k]`. The distribution is
    the softmax of the logits; some transformers versions return it as the logits. Sigmoid routers (deepseek_v3,
    glm4_moe) get softmax entropies too; choices, weights and load are always the router's own.
    """

    kind, codes = MOE, False

    def __init__(self, routers: Sequence[tuple[str, int, nn.Module]], n_experts: int, n_chosen: int) -> None:
        self.n_experts, self.n_chosen = n_experts, n_chosen
        self.sites = [
            Site(name, module, self._reader(name), width=n_experts + 2 * n_chosen, flat=True, layer=layer)
            for name, layer, module in routers
        ]
        self.streams = [Stream(MOE, name, layer) for name, layer, _ in routers]

    def _reader(self, name: str) -> Any:
        e, k = self.n_experts, self.n_chosen

        def read(output: Any) -> Tensor:
            parts = output if isinstance(output, tuple) else ()
            shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
            if [len(shape) == 2 and shape[1] for shape in shapes[:3]] != [e, k, k]:
                raise UnsupportedModel(
                    f"{name} gives {shapes or type(output).__name__}: expected logits [tokens, {e}], weights and"
                    f" experts [tokens, {k}], so what it decided is unknown"
                )
            logits, weights, experts = output[:3]
            return torch.cat([logits.float(), weights.float(), experts.float()], dim=-1)[None]

        return read

    def decisions(self, states: Mapping[str, Singles]) -> Decisions:
        """Return the decisions about n tokens from each site's output `[n, K]`."""
        e, k = self.n_experts, self.n_chosen
        packed = np.stack([states[site.name] for site in self.sites])
        raw, top_w, top_idx = packed[:, :, :e], packed[:, :, e : e + k], packed[:, :, e + k :]
        order = np.argsort(-top_w, axis=-1, kind="stable")
        with np.errstate(invalid="ignore"):  # non-finite rows are left out later
            chosen = np.take_along_axis(top_idx, order, axis=-1).astype(np.int64)
            weights = _softmax(raw.astype(np.float64))
        is_softmax = (raw >= 0).all(axis=-1) & (np.abs(raw.sum(axis=-1) - 1) < 1e-3)
        if is_softmax.any():
            weights[is_softmax] = raw[is_softmax] / raw[is_softmax].sum(axis=-1, keepdims=True, dtype=np.float64)
        return Decisions.of(raw, weights, chosen, np.take_along_axis(top_w, order, axis=-1))


class XLoraClassifier:
    """PEFT's X-LoRA: each adapter's weight per token, for all layers or per layer (`layerwise_scalings`).

    The distribution is each adapter's share of the absolute applied scalings; equal if all are 0. The classifier runs
    before the forward it scales.
    """

    kind, codes = XLORA, False

    def __init__(self, xlora: Any) -> None:
        classifier = xlora_classifier(xlora)
        self._config, self.n_experts = classifier.config, int(classifier.n_classes)
        self._s = int(classifier.n_layers) if self._config.layerwise_scalings else 1
        if self.n_experts < 2:
            raise UnsupportedModel(f"X-LoRA with {self.n_experts} adapter: nothing is routed. Add another")
        self.n_chosen = int(self._config.top_k_lora or 1)
        self.sites = [Site("xlora", classifier, self._read, early=True)]
        self.streams = [Stream(XLORA, "xlora", layer if self._s > 1 else -1) for layer in range(self._s)]

    def _read(self, scalings: Any) -> Tensor:
        flat: Tensor = scalings[:, :, : self._s].flatten(2)
        return flat

    def decisions(self, states: Mapping[str, Singles]) -> Decisions:
        """Return the decisions about n tokens from each site's output `[n, K]`."""
        scalings = states["xlora"]
        raw = np.moveaxis(scalings.reshape(len(scalings), self._s, self.n_experts), 1, 0)
        applied = raw.astype(np.float64)
        k = self._config.top_k_lora
        if k is not None and k < self.n_experts:
            best = np.zeros(raw.shape, dtype=bool)
            np.put_along_axis(best, largest(applied, k), True, axis=-1)
            applied = np.where(best, applied, 0.0)
        if self._config.enable_softmax_topk:
            applied = np.where(applied != 0, _softmax(np.where(applied != 0, applied, -np.inf)), 0.0)
        size = np.abs(applied)
        whole = size.sum(axis=-1, keepdims=True)
        weights = np.divide(size, whole, out=np.full(size.shape, 1 / self.n_experts), where=whole > 0)
        top = largest(size, min(self.n_experts, k or _SHOWN))
        return Decisions.of(raw, weights, top, np.take_along_axis(applied, top, axis=-1).astype(np.float32))


class BemController:
    """A BEM controller, whose forward returns the codes for all sites; each level is a stream.

    Its codes are `prefix`, `chunk` and `token` `[B, T, r]`, None for an unused level, with the `[B, T]` values in
    `_BESIDE`; `chunk_index` and `boundary` are required.

    Prefix and chunk codes are decided at the start of a chunk, token codes at every token. A code steers its level's
    tokens; chunk codes steer all if queries, keys or values are sites. If sites learned their levels, those steer all
    tokens. In the first chunk only token codes steer.
    """

    kind, codes, n_experts, n_chosen = BEM, True, 0, 1
    _LEVELS = ("prefix", "chunk", "token")
    _BESIDE = ("confidence", "chunk_index", "boundary", "sigma1", "delta_rel_norm", "fallback", "level")

    def __init__(self, bem: Any, model: Any) -> None:
        if not isinstance(bem, nn.Module):
            raise ConfigError(f"bem is {type(bem).__name__}: give what attach_bem returned, or its controller")
        other = getattr(bem, "host", None)  # a bare controller has none
        if other is not None and find_layers(other)[0] is not find_layers(model)[0]:
            raise ConfigError(
                f"bem is the adapter of another {type(other).__name__} than this {type(model).__name__}: give the one"
                " that is attached to the model that is watched"
            )
        if not getattr(bem, "open", True):
            raise ConfigError("bem is detached, so it decides nothing: attach it first, bem.attach()")
        self.bem, self.controller = bem, getattr(bem, "controller", bem)
        # A whole adapter also reports the applied codes.
        self.sites = [Site("bem", getattr(bem, "steered", bem), self._read)]
        self._form = bem if isinstance(bem, Bem) and bem.config.form != "low_rank" else None
        if self._form is not None:
            self.sites.append(Site("bem.sizes", self._form.measured, Tensor.detach, attach=self._attach))
        self._asked = False
        self._open: ExitStack | None = None  # while the sites are read
        kinds = getattr(getattr(bem, "config", None), "sites", CHUNK_KINDS)
        self._always = "chunk" if set(kinds) & set(CHUNK_KINDS) else ""
        self._levels: tuple[str, ...] = ()
        self._beside: tuple[str, ...] = ()

    def measure(self) -> None:
        """Make `decisions` include `measured` while the sites are read."""
        if not self._asked and self._open is not None and self._form is not None:
            self._form.measure(self._open)
        self._asked = True

    def _attach(self, stack: ExitStack) -> None:
        self._open = stack.enter_context(ExitStack())
        stack.callback(setattr, self, "_open", None)
        if self._asked and self._form is not None:
            self._form.measure(self._open)

    @property
    def streams(self) -> list[Stream]:
        """One stream per level in use; none before the first forward."""
        return [Stream(BEM, "bem", -1, level) for level in self._levels]

    def _read(self, codes: Any) -> Tensor:
        levels = tuple(level for level in self._LEVELS if getattr(codes, level, None) is not None)
        beside = tuple(name for name in self._BESIDE if getattr(codes, name, None) is not None)
        if (
            not levels
            or not {"chunk_index", "boundary"} <= set(beside)
            or (self._levels and (levels, beside) != (self._levels, self._beside))
        ):
            raise UnsupportedModel(
                f"the BEM controller gave codes {levels} and {beside}, expected"
                f" {self._levels or 'prefix, chunk or token'}, with {self._beside or 'chunk_index and boundary'}: which"
                " decisions these are is unknown"
            )
        self._levels, self._beside = levels, beside
        parts = [getattr(codes, level) for level in levels] + [getattr(codes, name)[:, :, None] for name in beside]
        return torch.cat([part.float() for part in parts], dim=-1)

    def decisions(self, states: Mapping[str, Singles]) -> Decisions:
        """Return the decisions about n tokens from each site's output `[n, K]`."""
        packed, s = states["bem"], len(self._levels)
        r = (packed.shape[1] - len(self._beside)) // s
        raw = np.ascontiguousarray(np.moveaxis(packed[:, : s * r].reshape(len(packed), s, r), 1, 0))
        beside = dict(zip(self._beside, packed[:, s * r :].T, strict=True))
        top = largest(np.abs(raw), min(r, _SHOWN))
        boundary = beside["boundary"] != 0
        decided = np.stack([np.ones_like(boundary) if level == "token" else boundary for level in self._levels])
        optional: dict[str, Any] = {
            name: beside[name] for name in ("confidence", "sigma1", "delta_rel_norm") if name in beside
        }
        if "fallback" in beside:
            optional["fallback"] = beside["fallback"] != 0
        if "level" in beside:
            place = {self._LEVELS.index(level): i for i, level in enumerate(self._levels)}
            optional["level"] = np.asarray([place.get(int(level), 0) for level in beside["level"].tolist()], np.int64)
        if "bem.sizes" in states and states["bem.sizes"].shape[1]:
            optional["measured"] = states["bem.sizes"]
        learned = getattr(self.bem, "levels", None)
        by_site = [] if learned is None else list(learned.chosen().values())
        if by_site:
            most = max(self._levels, key=by_site.count)
            optional["level"] = np.full(len(packed), self._levels.index(most), np.int64)
        chunk = beside["chunk_index"].astype(np.int64)
        steering = np.stack(
            [
                (
                    np.full_like(boundary, level in by_site or level == self._always)
                    if by_site or "level" not in beside or level == self._always
                    else beside["level"] == self._LEVELS.index(level)
                )
                & ((chunk > 0) | (level == "token"))
                for level in self._levels
            ]
        )
        return Decisions.of(
            raw,
            None,
            top,
            np.take_along_axis(raw, top, axis=-1),
            decided=decided,
            chunk=chunk,
            steering=steering,
            **optional,
        )


# Routers that decide about the same tokens. `n_experts`: 0 if only a decision shows it; `codes`: no distributions;
# `streams`: one per router, known once it has decided.
Source = ExpertRouters | XLoraClassifier | BemController | SlotMemories


def _softmax(logits: Numbers) -> Numbers:
    with np.errstate(invalid="ignore"):
        powers: Numbers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)
