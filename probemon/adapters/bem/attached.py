"""attach_bem: an adapter on an unchanged model.

    with attach_bem(model, BemConfig()) as bem:          # or bem = attach_bem(model, config) ... bem.detach()
        model.generate(**inputs)
    bem.save_pretrained("adapter/")
    bem = attach_bem(model, "adapter/", impl="auto", fallback=FallbackPolicy())

It is removable without trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.controller import Codes, Controller
from probemon.adapters.bem.fallback import FallbackGuard, FallbackPolicy, Fallbacks
from probemon.adapters.bem.first_factors import start_by_svd
from probemon.adapters.bem.form_governance import FormGovernor
from probemon.adapters.bem.forwards import Steered
from probemon.adapters.bem.governance import Governor
from probemon.adapters.bem.int8 import make_int8
from probemon.adapters.bem.levels import LearnedLevels
from probemon.adapters.bem.measures import Measured
from probemon.adapters.bem.model_hooks import Host, ModelHooks
from probemon.adapters.bem.saved import check_fit, check_kept, read_saved, write_saved
from probemon.adapters.bem.sharded import check_spread
from probemon.adapters.bem.sites import device_of, find_sites, make_updates
from probemon.adapters.bem.state import ControllerState, States
from probemon.adapters.bem.update import choose_impl
from probemon.errors import BemError, BemStateError, ConfigError, UnsupportedModel
from probemon.host.adapters import KNOWN, OWN
from probemon.host.cache import n_cached
from probemon.host.internals import cache_layers, forget_hook_free_graphs, keys_and_values, tensor_parallel_size
from probemon.host.model import find_layers, forget_compiled, hidden_size, is_encoder_decoder, text_config, unwrap
from probemon.monitor.breaker import Circuit


def attach_bem(model: Any, config: BemConfig | str | Path | None = None, *, strict: bool = False, **how: Any) -> Bem:
    """Attach a fresh adapter, with which the model stays bit-identical (U = 0), or a saved one from a folder.

    `strict`: raise for another checkpoint's adapter, instead of warning.
    `how`: as of `Bem`.

    Raises `ConfigError`, `UnsupportedModel`, `KernelUnavailable`, `BemError`; for a folder, `BemFileError`,
    `ModelMismatch`.
    """
    if isinstance(config, (str, Path)):
        return Bem.from_pretrained(model, config, strict=strict, **how)
    return Bem(model, BemConfig() if config is None else config, **how).attach()


class Bem(nn.Module):
    """An adapter and its parameters: `controller`, and `updates` by site. The model's are not frozen.

    Write to parameters under `torch.no_grad()`: limits do not notice writes through `.data`.

    `impl`: "reference", "triton" or "auto"; `impl_why` gives the reason.
    `fallback`: None raises the controller's errors.
    `checkpoint_controller`: recompute the controller in the backward pass.
    """

    def __init__(
        self,
        model: Any,
        config: BemConfig,
        *,
        impl: str = "reference",
        fallback: FallbackPolicy | None = None,
        checkpoint_controller: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(config, BemConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}: give a BemConfig, which BemConfig.from_dict makes of a dict, or"
                " the folder of a saved adapter"
            )
        if fallback is not None and not isinstance(fallback, FallbackPolicy):
            raise ConfigError(f"fallback is {fallback!r}: give a FallbackPolicy, or None for no fallback")
        base_model = unwrap(model)
        if is_encoder_decoder(base_model):
            raise UnsupportedModel(
                f"{type(base_model).__name__} is an encoder-decoder: an adapter is for decoders alone"
            )
        n_ranks = tensor_parallel_size(base_model)
        check_spread(config, fallback, impl, n_ranks)
        decoder, layers = find_layers(base_model)
        KNOWN.add(self)
        self._host = Host(base_model, decoder, layers)  # a tuple, so that they are not submodules
        self.config, self.fallback, self.sites = config, fallback, find_sites(base_model, config)
        read_layer = layers[config.read_layer]
        devices = [device_of(module) for module in (read_layer, *(site.module for site in self.sites))]
        if n_ranks > 1:
            self.impl, self.impl_why = "reference", "the model is spread over ranks, which sum their parts"
        else:
            self.impl, self.impl_why = choose_impl(impl, devices, config)
        with torch.inference_mode(False), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            # In a fork: later sampling must not change.
            torch.default_generator.manual_seed(config.seed)
            self.controller = Controller(hidden_size(base_model), config).to(devices[0], torch.float32)
            self.updates = make_updates(
                self.sites, config, getattr(text_config(base_model), "num_attention_heads", None)
            )
            if config.start == "svd":
                start_by_svd(self.sites, self.updates)
        self.levels = LearnedLevels(config, self.sites, self.updates) if config.level == "learned" else None
        self.controller.checkpointed, self.controller.fused = checkpoint_controller, self.impl == "triton"
        self._guard = self.controller.guard = None if fallback is None else FallbackGuard(fallback)
        governor = Governor if config.form == "low_rank" else FormGovernor
        self.governor: Governor | FormGovernor = governor(config, self.sites, self.updates)
        self.steered, self.measured, self._enabled = Steered(), Measured(), True
        self._states, self._stack = States(), ExitStack()
        self._hooks: ModelHooks | None = None  # while attached

    def limited(self, codes: Codes, training: bool = False) -> dict[str, Tensor]:
        """Return codes `[B * T, ..]` by site key, limited."""
        if self.levels is not None:
            return self.levels.limit(codes, self.governor, training)
        groups = {site.chunked for site in self.sites}
        by_group = {chunked: codes.of("chunk") if chunked else codes.adaptive() for chunked in groups}
        return self.governor.apply({chunked: code.flatten(0, 1) for chunked, code in by_group.items()})

    def measure(self, stack: ExitStack) -> None:
        """Measure updates until `stack` closes, for hooks on `measured`."""
        model = self.host
        forget_hook_free_graphs()
        forget_compiled(model)
        stack.callback(forget_compiled, model)
        self.measured.n_asking += 1
        stack.callback(self._stop_measuring)

    def _stop_measuring(self) -> None:
        self.measured.n_asking -= 1

    @property
    def host(self) -> Any:
        """The transformers model, without wrappers of torch.compile and PEFT."""
        return self._host.model

    @property
    def open(self) -> bool:
        """True while attached."""
        return self._hooks is not None and self._hooks.open

    @property
    def enabled(self) -> bool:
        """True if it steers. If False, it has no effect, and caches written meanwhile are unknown.

        Setting it raises `BemError` if another adapter steers.
        """
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if enabled and self.open:
            self._check_alone()
        self._enabled = bool(enabled)

    @property
    def fallbacks(self) -> Fallbacks:
        """Fallbacks so far."""
        return Fallbacks() if self._guard is None else self._guard.counts

    @property
    def breaker(self) -> Circuit | None:
        """Leaves the controller out after failures; None without a `FallbackPolicy`."""
        return None if self._guard is None else self._guard.breaker

    def attach(self) -> Bem:
        """Attach to the model. Raises `BemError` if another adapter steers it."""
        if self.open:
            return self
        if self.enabled:
            self._check_alone()
        with ExitStack() as stack:
            stack.callback(setattr, self, "_hooks", None)
            hooks = ModelHooks(self, self._host, self._states)
            hooks.attach(stack)
            self._hooks, self._stack = hooks, stack.pop_all()
        self.governor.forget_model_norm()  # the model may have changed
        if tensor_parallel_size(self.host) > 1:
            self.governor.model_norm()  # now, on all ranks together
        return self

    def _check_alone(self) -> None:
        model, decoder, _ = self._host
        # They would read each other's states.
        if any(other.enabled for other in OWN.get(decoder, ()) if other is not self):
            raise BemError(f"an adapter is on this {type(model).__name__} already: detach it first")

    def detach(self) -> None:
        """Remove it from the model and its caches. Raises `BemError` while any thread runs generate()."""
        if self._hooks is not None and self._hooks.n_generating:
            raise BemError(
                f"{self._hooks.n_generating} generate() of this model is under way: detach when it has returned, else"
                " part of its output is steered and part is not"
            )
        self._stack.close()

    def __enter__(self) -> Bem:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedModel(
            "an adapter, and a model that it is on, cannot be copied, pickled or saved whole: use save_pretrained, or"
            " detach first"
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings that hidden states depend on, as JSON values."""
        return {"config": asdict(self.config), "fallback": repr(self.fallback)}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `bem.json` and `bem.safetensors` into a folder, each atomically.

        Raises `BemError` for parameters that are not finite, or of 8 bits but not int8; files in the folder then stay.
        """
        check_kept(self.state_dict())
        write_saved(Path(folder), self.config, self.host, self.sites, self.state_dict())

    @classmethod
    def from_pretrained(cls, model: Any, folder: str | Path, *, strict: bool = False, **how: Any) -> Bem:
        """Attach what `save_pretrained` wrote. Raises `BemFileError`, `ModelMismatch`, and as `attach_bem`."""
        saved = read_saved(Path(folder))
        check_fit(saved.folder, saved.host, saved.config, unwrap(model), strict=strict, stacklevel=4)
        # A start would be overwritten.
        bem = cls(model, replace(saved.config, start="random"), **how)
        bem.config = saved.config
        if saved.int8:
            make_int8(bem)
        saved.load(bem)
        dtypes = (parameter.dtype for parameter in bem.controller.parameters())
        half = next((dtype for dtype in dtypes if dtype.itemsize < 4), None)
        if bem.impl == "triton" and half is not None:
            if how["impl"] == "triton":
                raise ConfigError(
                    f"the controller of {folder} was saved in {half}, and the controller's kernel computes in fp32 and"
                    " fp64: use impl='reference', or save it after bem.float()"
                )
            bem.impl, bem.controller.fused = "reference", False
            bem.impl_why = f"its controller was saved in {half}, and the controller's kernel computes in fp32 and fp64"
        return bem.attach()

    def state(self, cache: Cache) -> ControllerState | None:
        """Return a copy of the controller's state for a cache, None if it never saw the cache.

        Raises `BemStateError` if `cache` is not a cache.
        """
        _check_cache(cache)
        stored = self._states.get(cache)
        if stored is None:
            return None
        state, n_columns = stored.copy(), n_cached(cache, {})
        if state.n_columns > n_columns:
            state.truncate(n_columns)
        return state

    def restore(self, cache: Cache, saved: Mapping[str, Tensor]) -> None:
        """Give a cache its earlier `bem.state(...).tensors()`. Raises `BemStateError` if they do not fit."""
        _check_cache(cache)
        if not isinstance(saved, Mapping) or not all(isinstance(x, Tensor) for x in saved.values()):
            raise BemStateError(
                f"saved is a {type(saved).__name__}: give the tensors by name that bem.state(cache).tensors() returned"
            )
        state = ControllerState.from_tensors({name: x.to(self.controller.query.device) for name, x in saved.items()})
        z, n_rows = state.history()[0], _n_rows(cache)
        given = (*z.shape, z.dtype)
        wanted = (
            len(z) if n_rows is None else n_rows,
            n_cached(cache, {}),
            self.config.width,
            self.controller.project.weight.dtype,
        )
        if given != wanted:
            raise BemStateError(
                f"a state of (rows, columns, features, dtype) {given} for a cache and controller of {wanted}: give the"
                " unchanged state.tensors() of this adapter and cache"
            )
        if (state.level is None) != (self.config.level != "auto"):
            raise BemStateError(
                f"a state {'without levels' if state.level is None else 'with a level'} of its rows for an adapter of"
                f" level={self.config.level!r}: it is of another adapter"
            )
        self._states.put(cache, state)


def _check_cache(cache: Any) -> None:
    if not isinstance(cache, Cache):
        raise BemStateError(
            f"{type(cache).__name__} is not a cache, and an adapter's states are kept by caches: give the "
            "past_key_values that the model was run with"
        )


def _n_rows(cache: Cache) -> int | None:
    """Return the rows of a cache, if known."""
    return next(
        (len(tensors[0]) for layer in cache_layers(cache) if (tensors := keys_and_values(layer)) is not None), None
    )
