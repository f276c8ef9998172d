"""attach_bem: an adapter on an unchanged host, correct under a cache, removable without trace.

    with attach_bem(model, BemConfig()) as bem:          # or bem = attach_bem(model, config) ... bem.detach()
        model.generate(**inputs)
    bem.save_pretrained("adapter/")
    bem = attach_bem(model, "adapter/", impl="auto", fallback=FallbackPolicy())

`probemon.adapters.bem.host_hooks` says what runs in the host's forwards while the adapter is attached.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.controller import Codes, Controller
from probemon.adapters.bem.fallback import FallbackGuard, FallbackPolicy, Fallbacks
from probemon.adapters.bem.form_governance import FormGovernor
from probemon.adapters.bem.forwards import Steered
from probemon.adapters.bem.governance import Governor
from probemon.adapters.bem.host_hooks import Host, HostHooks, take_layer_hook
from probemon.adapters.bem.int8 import make_int8
from probemon.adapters.bem.levels import LearnedLevels
from probemon.adapters.bem.measures import Measured
from probemon.adapters.bem.saved import check_host, check_kept, read_saved, write_saved
from probemon.adapters.bem.sharded import check_spread
from probemon.adapters.bem.sites import device_of, find_sites, make_updates
from probemon.adapters.bem.state import ControllerState, States
from probemon.adapters.bem.update import choose_impl
from probemon.errors import BemError, BemStateError, ConfigError, NotSupportedHost
from probemon.host.adapters import KNOWN, OWN
from probemon.host.cache import n_cached
from probemon.host.internals import cache_layers, forget_hook_free_graphs, keys_and_values, tensor_parallel_size
from probemon.host.model import find_layers, forget_compiled, hidden_size, is_encoder_decoder, text_config, unwrap
from probemon.monitor.breaker import Circuit


def attach_bem(model: Any, config: BemConfig | str | Path | None = None, *, strict: bool = False, **how: Any) -> Bem:
    """Attach a fresh adapter (U = 0: the host is unchanged, bit for bit), or a saved one from a folder.

    `how`: what else `Bem` takes.
    `strict`: a saved adapter of another checkpoint is an error, not a warning.

    Raises `ConfigError`, `NotSupportedHost`, `KernelUnavailable`, `BemError`; for a folder, `BemFileError` and
    `HostMismatch` too.
    """
    if isinstance(config, (str, Path)):
        return Bem.from_pretrained(model, config, strict=strict, **how)
    return Bem(model, BemConfig() if config is None else config, **how).attach()


class Bem(nn.Module):
    """An adapter and its parameters: `controller`, and `updates` by site.

    `attach` puts it on its host, `detach` takes it off. Its parameters are its own: it neither changes nor freezes the
    host's. Write to them under `torch.no_grad()`: torch does not report writes through `.data`, so limits would still
    be those of the values before.

    `impl`: how updates, and the codes of steps of one column, are computed: "reference", "triton", or "auto", which
    chooses once, here; `impl_why` gives the reason.
    `fallback`: when codes fall back to the static 1; None: never, and an error of the controller is raised.
    `checkpoint_controller`: the backward pass computes the controller again, and little of it is kept.
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
        host = unwrap(model)
        if is_encoder_decoder(host):
            raise NotSupportedHost(f"{type(host).__name__} is an encoder-decoder: an adapter is for decoders alone")
        n_ranks = tensor_parallel_size(host)
        check_spread(config, fallback, impl, n_ranks)
        decoder, layers = find_layers(host)
        KNOWN.add(self)
        self._host = Host(host, decoder, layers)  # a tuple: as attributes they would be parts of this module
        self.config, self.fallback, self.sites = config, fallback, find_sites(host, config)
        read_layer = layers[config.read_layer]
        devices = [device_of(module) for module in (read_layer, *(site.module for site in self.sites))]
        if n_ranks > 1:
            self.impl, self.impl_why = "reference", "the host is spread over ranks, which sum what they have in parts"
        else:
            self.impl, self.impl_why = choose_impl(impl, devices, config)
        with torch.inference_mode(False), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            # In a fork: what is sampled afterwards is the same as without an adapter.
            torch.default_generator.manual_seed(config.seed)
            self.controller = Controller(hidden_size(host), config).to(devices[0], torch.float32)
            self.updates = make_updates(self.sites, config, getattr(text_config(host), "num_attention_heads", None))
        self.levels = LearnedLevels(config, self.sites, self.updates) if config.level == "learned" else None
        self.controller.checkpointed, self.controller.fused = checkpoint_controller, self.impl == "triton"
        self._guard = self.controller.guard = None if fallback is None else FallbackGuard(fallback)
        governor = Governor if config.form == "low_rank" else FormGovernor
        self.governor: Governor | FormGovernor = governor(config, self.sites, self.updates)
        self.steered, self.measured, self._enabled = Steered(), Measured(), True
        self._states, self._stack = States(), ExitStack()
        self._hooks: HostHooks | None = None  # while it is attached

    def limited(self, codes: Codes, training: bool = False) -> dict[str, Tensor]:
        """Return codes `[B * T, ..]` by site key as sites take them, within the limits. `training`: the host is."""
        if self.levels is not None:
            return self.levels.limit(codes, self.governor, training)
        groups = {site.chunked for site in self.sites}
        by_group = {chunked: codes.of("chunk") if chunked else codes.adaptive() for chunked in groups}
        return self.governor.apply({chunked: code.flatten(0, 1) for chunked, code in by_group.items()})

    def measure(self, stack: ExitStack) -> None:
        """Until `stack` closes, measure how large updates are in every forward, for hooks on `measured`."""
        host, _, layers = self._host
        forget_hook_free_graphs()
        forget_compiled(host)
        stack.callback(forget_compiled, host)
        # Not among the hooks of `attach`: whoever asks for nothing has none on layers.
        self.measured.ask(self)
        stack.callback(self._stop_measuring)
        for number in sorted(self.measured.layers):
            stack.callback(layers[number].register_forward_hook(take_layer_hook(lambda: self._hooks, number)).remove)

    def _stop_measuring(self) -> None:
        self.measured.n_asking -= 1

    # -- on and off ------------------------------------------------------------------------------

    @property
    def host(self) -> Any:
        """The transformers model that it is for, without the wrappers of torch.compile and PEFT."""
        return self._host.model

    @property
    def open(self) -> bool:
        """Whether it is on its host."""
        return self._hooks is not None and self._hooks.open

    @property
    def enabled(self) -> bool:
        """Whether it steers. Set to False, it stays on its host and changes nothing, and caches that are written
        meanwhile are unknown to it; within a `generate()`, what comes after is not steered. Raises `BemError` where
        another adapter steers.
        """
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if enabled and self.open:
            self._check_alone()
        self._enabled = bool(enabled)

    @property
    def fallbacks(self) -> Fallbacks:
        """What fell back so far."""
        return Fallbacks() if self._guard is None else self._guard.counts

    @property
    def breaker(self) -> Circuit | None:
        """What leaves the controller out after failures; None without a `FallbackPolicy`."""
        return None if self._guard is None else self._guard.breaker

    def attach(self) -> Bem:
        """Put it on its host. Raises `BemError` where another adapter steers it; then nothing is attached."""
        if self.open:
            return self
        if self.enabled:
            self._check_alone()
        with ExitStack() as stack:
            stack.callback(setattr, self, "_hooks", None)
            hooks = HostHooks(self, self._host, self._states)
            hooks.attach(stack)
            self._hooks, self._stack = hooks, stack.pop_all()
        self.governor.forget_host_norm()  # the host may have changed meanwhile
        if tensor_parallel_size(self.host) > 1:
            self.governor.host_norm()  # now, with all ranks: later one alone may ask
        return self

    def _check_alone(self) -> None:
        host, decoder, _ = self._host
        # Two adapters would both believe that the states they read are the host's own.
        if any(own.enabled for own in OWN.get(decoder, ()) if own is not self):
            raise BemError(f"an adapter is on this {type(host).__name__} already: detach it first")

    def detach(self) -> None:
        """Take it off its host, and leave nothing there or on caches. Its parameters stay, for another `attach`.

        Raises `BemError` while a generate() runs, in whatever thread: half of its output would be steered.
        """
        if self._hooks is not None and self._hooks.n_generating:
            raise BemError(
                f"{self._hooks.n_generating} generate() of this host is under way: detach when it has returned, else"
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
        raise NotSupportedHost(
            "an adapter, and a model that it is on, cannot be copied, pickled or saved whole: use save_pretrained, or"
            " detach first"
        )

    # -- saved and restored ----------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """What the host's states depend on beside the adapter's tensors, in values that JSON has."""
        return {"config": asdict(self.config), "fallback": repr(self.fallback)}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `bem.json` and `bem.safetensors` into a folder, each whole or not at all.

        Raises `BemError` for a parameter that is not finite, or of 8 bits and no int8: what is there stays.
        """
        check_kept(self.state_dict())
        write_saved(Path(folder), self.config, self.host, self.sites, self.state_dict())

    @classmethod
    def from_pretrained(cls, model: Any, folder: str | Path, *, strict: bool = False, **how: Any) -> Bem:
        """Attach what `save_pretrained` wrote. Raises `BemFileError`, `HostMismatch`, and as `attach_bem`."""
        saved = read_saved(Path(folder))
        check_host(saved, unwrap(model), strict=strict)
        bem = cls(model, saved.config, **how)
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
        """Return what the controller knows of the sequences in a cache (a copy), as long as the cache is now; None if
        it never saw the cache. Raises `BemStateError` for what is no cache.
        """
        _check_cache(cache)
        known = self._states.get(cache)
        if known is None:
            return None
        state, n_columns = known.copy(), n_cached(cache, {})
        if state.n_columns > n_columns:
            state.truncate(n_columns)
        return state

    def restore(self, cache: Cache, saved: Mapping[str, Tensor]) -> None:
        """Give a cache the state that `bem.state(...).tensors()` returned when its keys were computed. Raises
        `BemStateError`.
        """
        _check_cache(cache)
        if not isinstance(saved, Mapping) or not all(isinstance(x, Tensor) for x in saved.values()):
            raise BemStateError(
                f"what is to be restored is a {type(saved).__name__}: give the tensors by name that "
                "bem.state(cache).tensors() gave"
            )
        state = ControllerState.from_tensors({name: x.to(self.controller.query.device) for name, x in saved.items()})
        z, dtype = state.history()[0], self.controller.project.weight.dtype
        if z.dtype != dtype:
            raise BemStateError(
                f"a state of {z.dtype} for a controller of {dtype}: give what state.tensors() gave as it was, or the"
                " adapter that gave it"
            )
        if (n_rows := _n_rows(cache)) not in (None, len(z)):
            raise BemStateError(
                f"a state of {len(z)} rows for a cache of {n_rows}: it is of another cache, or rows of one of them were"
                " taken out or moved"
            )
        n_columns = n_cached(cache, {})
        if z.shape[1:] != (n_columns, self.config.width):
            raise BemStateError(
                f"a state of {z.shape[1]} columns and {z.shape[2]} features for a cache of {n_columns}"
                f" columns and a controller of {self.config.width}: it is of another cache or adapter"
            )
        if (state.level is None) != (self.config.level != "auto"):
            difference = (
                "has no level of its rows, which this adapter decides"
                if state.level is None
                else "has a level of its rows, and this adapter's is fixed"
            )
            raise BemStateError(f"the state {difference} (level={self.config.level!r}): it is of another adapter")
        self._states.put(cache, state)


def _check_cache(cache: Any) -> None:
    if not isinstance(cache, Cache):
        raise BemStateError(
            f"{type(cache).__name__} is no cache, and an adapter's states are kept by caches: give the "
            "past_key_values that the host was run with"
        )


def _n_rows(cache: Cache) -> int | None:
    """Count the rows of a cache; None where it does not say: it is empty, or keeps its keys in some other way."""
    return next((len(kept[0]) for layer in cache_layers(cache) if (kept := keys_and_values(layer)) is not None), None)
