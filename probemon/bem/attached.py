"""attach_bem: an adapter on an unchanged host, correct under a cache, removable without trace.

    with attach_bem(model, BemConfig()) as bem:          # or bem = attach_bem(model, config) ... bem.detach()
        model.generate(**inputs)
    bem.save_pretrained("adapter/")
    bem = attach_bem(model, "adapter/", impl="auto", fallback=FallbackPolicy())

Hooks: before the decoder (which columns and tokens this forward has, and the state of its cache), before layer
`read_layer` (the controller, once), after each site (the update), after the decoder (nothing was passed by). Four
methods are shadowed on the instance: `generate`, `prepare_inputs_for_generation` (what is padding), `get_compiled_call`
(a steered host is run eagerly), and for level="auto" `_expand_inputs_for_generation` (how long the prompts are). State
is kept by cache, and what is under way by thread.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache

from probemon.bem.config import BemConfig
from probemon.bem.controller import Codes, Controller
from probemon.bem.fallback import CircuitBreaker, FallbackGuard, FallbackPolicy, Fallbacks, choose_impl
from probemon.bem.governance import Governor
from probemon.bem.int8 import make_int8
from probemon.bem.saved import check_host, read_saved, write_saved
from probemon.bem.sites import Site, SiteUpdate, device_of, find_sites, make_updates
from probemon.bem.state import ControllerState, States
from probemon.bem.update import generated_update
from probemon.errors import AlignmentError, BemError, BemStateError, ConfigError, NotSupportedDecoding, NotSupportedHost
from probemon.host.adapters import OWN
from probemon.host.cache import n_cached
from probemon.host.internals import (
    attention_kind,
    cache_layers,
    forget_hook_free_graphs,
    has_forward_hooks,
    keys_and_values,
    shadow_compiled_call,
    shadow_expanded_inputs,
    shadow_prepared_inputs,
)
from probemon.host.model import find_layers, forget_compiled, hidden_size, is_encoder_decoder, text_config, unwrap
from probemon.host.shadow import shadow

LOG = logging.getLogger("probemon")

_ZEROS = torch.finfo(torch.float32).tiny  # an eps by which rows of zeros are left out, and no others that matter


def attach_bem(model: Any, config: BemConfig | str | Path | None = None, *, strict: bool = False, **how: Any) -> Bem:
    """Attach a fresh adapter (U = 0: the host is unchanged, bit for bit), or a saved one from a folder.

    `how`: as `Bem` takes it. `strict`: a saved adapter of another checkpoint is an error, not a warning. Raises
    `ConfigError`, `NotSupportedHost`, `KernelUnavailable`, `BemError`, and for a folder `BemFileError`, `HostMismatch`.
    """
    if isinstance(config, (str, Path)):
        return Bem.from_pretrained(model, config, strict=strict, **how)
    return Bem(model, BemConfig() if config is None else config, **how).attach()


@dataclass(eq=False)
class _Forward:
    """One forward of the decoder; `applied`: codes `[B * T, r]` by site key, once the controller has run."""

    cache: Any
    state: ControllerState
    real: Tensor
    applied: dict[str, Tensor] | None = None
    sparse: bool = False  # whether codes of zeros mark updates that are left out
    reached: set[Site] = field(default_factory=set)


class Steered(nn.Module):
    """Gives on the codes of a forward, with the sizes of what is applied: for who watches. It is called where a hook is
    on it.
    """

    def forward(self, codes: Codes, sizes: tuple[Tensor, Tensor]) -> Codes:
        sigma1, relative = (size.view(codes.level.shape) for size in sizes)
        return codes.replace(sigma1=sigma1, delta_rel_norm=relative)


class _Owner:
    """Whether the adapter is on: what its shadows ask. Not the adapter itself, which would keep the host alive through
    them.
    """

    open = False


class _Thread(threading.local):
    """What a thread has under way: forwards, and generate() calls with the lengths of their prompts `[B]`, the
    innermost last.
    """

    def __init__(self) -> None:
        self.forward: _Forward | None = None
        self.generations: list[Tensor | None] = []
        self.prepared = False  # a forward of generate() is due
        self.mask: Any = None  # its 2D mask


class Bem(nn.Module):
    """An adapter and its parameters: `controller`, and `updates` by site. `attach` and `detach` put it on its host and
    take it off.

    Its parameters are its own: the host's do not change, and are not frozen by it. Write to them under
    `torch.no_grad()`: what is written through `.data` torch does not tell, and limits would be those of before. `impl`:
    how updates, and the codes of steps of one column, are computed, "reference", "triton" or "auto", which chooses here
    and once; `impl_why` says why. `fallback`: when codes fall back to the static 1; None: never, and a controller's
    error is raised. `checkpoint_controller`: the controller is computed again in the backward pass, and little of it
    kept.
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
        n_ranks = int(getattr(host, "tp_size", None) or 1)
        if n_ranks > 1:
            raise NotSupportedHost(
                f"this {type(host).__name__} is spread over {n_ranks} ranks (tensor parallel), and each has a part of "
                "what goes into a site, too little for its update: load it whole, "
                "without tp_plan (device_map= spreads whole layers over devices), or distil the adapter on one "
                "process (probemon.bem.distil) and spread the host with that LoRA merged"
            )
        decoder, layers = find_layers(host)
        self.config, self.fallback, self.sites = config, fallback, find_sites(host, config)
        self._host: tuple[Any, Any, nn.ModuleList] = (
            host,
            decoder,
            layers,
        )  # in a tuple: as an attribute it would be a part of this module
        read = layers[config.read_layer]
        self.impl, self.impl_why = choose_impl(
            impl, [device_of(module) for module in (read, *(site.module for site in self.sites))], config
        )
        with torch.inference_mode(False), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                config.seed
            )  # in a fork: what is sampled afterwards is the same as without an adapter
            self.controller = Controller(hidden_size(host), config).to(device_of(read), torch.float32)
            self.updates = make_updates(self.sites, config)
        self.controller.checkpointed, self.controller.fused = checkpoint_controller, self.impl == "triton"
        self._guard = self.controller.guard = None if fallback is None else FallbackGuard(fallback)
        self.governor = Governor(config, self.sites, self.updates)
        self._signature = list(inspect.signature(decoder.forward).parameters)
        self._groups = {site.chunked for site in self.sites}
        self.steered = Steered()
        self._states, self._thread, self._stack = States(), _Thread(), ExitStack()
        self._owner = _Owner()
        self._lock, self._n_generating = threading.Lock(), 0

    # -- on and off ------------------------------------------------------------------------------

    @property
    def host(self) -> Any:
        """The transformers model that it is for, without the wrappers of torch.compile and PEFT."""
        return self._host[0]

    @property
    def open(self) -> bool:
        """Whether it is on its host."""
        return self._owner.open

    @property
    def fallbacks(self) -> Fallbacks:
        """What fell back so far."""
        return Fallbacks() if self._guard is None else self._guard.told

    @property
    def breaker(self) -> CircuitBreaker | None:
        """What leaves the controller out after failures; None without a `FallbackPolicy`."""
        return None if self._guard is None else self._guard.breaker

    def attach(self) -> Bem:
        """Put it on its host. Raises `BemError` where another adapter is on it. All is found before anything is
        attached.
        """
        host, decoder, layers = self._host
        if self.open:
            return self
        if decoder in OWN:  # two adapters would both believe that the states they read are the host's own
            raise BemError(f"an adapter is on this {type(host).__name__} already: detach it first")
        forget_hook_free_graphs()
        with ExitStack() as stack:
            forget_compiled(host)
            stack.callback(forget_compiled, host)
            # Another one each time: a shadow of an earlier time may lie under someone else's, and must not wake up.
            owner = self._owner = _Owner()
            owner.open = True
            stack.callback(setattr, owner, "open", False)
            stack.callback(self._states.clear)
            OWN[decoder] = weakref.ref(self)
            stack.callback(OWN.pop, decoder, None)
            hook = self._hook
            stack.callback(decoder.register_forward_hook(hook(self._after)).remove)
            for site in self.sites:
                steer = partial(self._steer, site, cast(SiteUpdate, self.updates[site.key]))
                stack.callback(site.module.register_forward_hook(hook(steer), with_kwargs=True).remove)
            stack.callback(
                layers[self.config.read_layer].register_forward_pre_hook(hook(self._read), with_kwargs=True).remove
            )
            stack.callback(decoder.register_forward_pre_hook(hook(self._before), with_kwargs=True).remove)
            if hasattr(host, "generate"):
                shadow(stack, self._owner, host, "generate", self._generate)
                shadow_prepared_inputs(stack, self._owner, host, self._prepare)
                shadow_compiled_call(stack, self._owner, host, self._uncompiled)
                if self.config.level == "auto":
                    shadow_expanded_inputs(stack, self._owner, host, self._expand)
            stack.callback(
                setattr, owner, "open", False
            )  # before the shadows go: what of them lies under another's is then passed by
            self._stack = stack.pop_all()
        return self

    def detach(self) -> None:
        """Take it off; what is left of it on the host and on caches is nothing. Its parameters stay, and it can be
        attached again.

        Raises `BemError` while a generate() runs, in whatever thread: half of its output would be steered.
        """
        if self._n_generating:
            raise BemError(
                f"{self._n_generating} generate() of this host is under way: detach when it has returned, else part of"
                " its output is steered and part is not"
            )
        self._stack.close()

    def __enter__(self) -> Bem:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @staticmethod
    def _hook(call: Callable[..., Any]) -> Callable[..., Any]:
        # A partial, not a closure: who copies or pickles the model finds in it whose hook this is.
        return partial(_outside_of_graphs, call, torch.compiler.disable(call))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupportedHost(
            "an adapter, and a model that it is on, cannot be copied, pickled or saved whole: use save_pretrained, or"
            " detach first"
        )

    # -- kept ------------------------------------------------------------------------------------

    def told(self) -> dict[str, Any]:
        """What the host's states depend on beside its tensors, as JSON takes it."""
        return {"config": asdict(self.config), "fallback": repr(self.fallback)}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `bem.json` and `bem.safetensors` into a folder, each whole or not at all. Raises `BemError` for a
        parameter that is not finite, or of 8 bits and no int8: what is there stays.
        """
        for name, tensor in self.state_dict().items():
            if tensor.dtype.itemsize == 1 and tensor.dtype != torch.int8:
                raise BemError(
                    f"{name} is {tensor.dtype}, which adapters are not kept in, so nothing is saved: save it after "
                    "bem.float(), or quantize(bem), whose U and V are int8"
                )
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise BemError(
                    f"{name} is not finite, so nothing is saved: its training diverged. Go back to parameters from"
                    " before"
                )
        write_saved(Path(folder), self.config, self._host[0], self.sites, self.state_dict())

    @classmethod
    def from_pretrained(cls, model: Any, folder: str | Path, *, strict: bool = False, **how: Any) -> Bem:
        """Attach what `save_pretrained` wrote. Raises `BemFileError`, `HostMismatch`, and as `attach_bem`."""
        saved = read_saved(Path(folder))
        check_host(saved, unwrap(model), strict=strict)
        bem = cls(model, saved.config, **how)
        if saved.int8:
            make_int8(bem)
        saved.load(bem)
        half = next(
            (parameter.dtype for parameter in bem.controller.parameters() if parameter.dtype.itemsize < 4), None
        )
        if bem.impl == "triton" and half is not None:
            if how["impl"] == "triton":
                raise ConfigError(
                    f"the controller of {folder} was saved in {half}, and the controller's kernel computes in fp32 and"
                    " fp64: use impl='reference', or save it after bem.float()"
                )
            bem.impl = "reference"
            bem.impl_why, bem.controller.fused = (
                f"its controller was saved in {half}, and the controller's kernel computes in fp32 and fp64",
                False,
            )
        return bem.attach()

    def state(self, cache: Cache) -> ControllerState | None:
        """What the controller knows of the sequences in a cache (a copy), as long as the cache now is; None if it never
        saw it. Raises `BemStateError` for what is no cache.
        """
        known = self._states.get(_a_cache(cache))
        if known is None:
            return None
        state, n_columns = known.copy(), n_cached(cache, {})
        if state.n_columns > n_columns:
            state.keep(n_columns)
        return state

    def restore(self, cache: Cache, saved: Mapping[str, Tensor]) -> None:
        """Give a cache the state that `bem.state(...).tensors()` was, with which its keys were computed. Raises
        `BemStateError`.
        """
        _a_cache(cache)
        if not isinstance(saved, Mapping) or not all(isinstance(x, Tensor) for x in saved.values()):
            raise BemStateError(
                f"what is to be restored is a {type(saved).__name__}: give the tensors by name that "
                "bem.state(cache).tensors() gave"
            )
        state = ControllerState.from_tensors({name: x.to(self.controller.query.device) for name, x in saved.items()})
        z = state.history()[0]
        if z.dtype != (own := self.controller.project.weight.dtype):
            raise BemStateError(
                f"a state of {z.dtype} for a controller of {own}: give what state.tensors() gave as it was, or the"
                " adapter that gave it"
            )
        if (n_rows := _n_rows(cache)) not in (None, len(z)):
            raise BemStateError(
                f"a state of {len(z)} rows for a cache of {n_rows}: it is of another cache, or rows of one of them were"
                " taken out or moved"
            )
        if z.shape[2] != self.config.width or z.shape[1] != n_cached(cache, {}):
            raise BemStateError(
                f"a state of {z.shape[1]} columns and {z.shape[2]} features for a cache of {n_cached(cache, {})}"
                f" columns and a controller of {self.config.width}: it is of another cache or adapter"
            )
        if (state.level is None) != (self.config.level != "auto"):
            told = (
                "has no level of its rows, which this adapter decides"
                if state.level is None
                else "has a level of its rows, and this adapter's is fixed"
            )
            raise BemStateError(f"the state {told} (level={self.config.level!r}): it is of another adapter")
        self._states.put(cache, state)

    # -- one generate() --------------------------------------------------------------------------

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mine = self._thread
        mine.generations.append(None)
        mine.prepared = False
        with self._lock:
            self._n_generating += 1
        try:
            out = original(*args, **kwargs)
            self._due()
            return out
        finally:
            mine.generations.pop()
            mine.prepared, mine.mask, mine.forward = False, None, None
            with self._lock:
                self._n_generating -= 1

    def _expand(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Here `generate` has its whole prompt and mask, a row for each sequence it will run."""
        ids, given = original(*args, **kwargs)
        if self._thread.generations:
            mask, embeds = given.get("attention_mask"), given.get("inputs_embeds")
            tokens = ids if embeds is None else embeds
            self._thread.generations[-1] = (
                torch.full((len(tokens),), tokens.shape[1], dtype=torch.int64, device=tokens.device)
                if mask is None
                else (mask != 0).sum(dim=1)
            )
        return ids, given

    def _uncompiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """In place of the compiled host that generate() would run: our hooks leave a graph at every site, so little of
        it would be left.
        """
        LOG.info("generate() runs this host eagerly while an adapter is on it")
        call: Callable[..., Any] = self._host[0].__call__
        return call

    def _prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mine = self._thread
        if mine.generations:
            self._due()
            mine.prepared, mine.mask = True, kwargs.get("attention_mask")
        return original(*args, **kwargs)

    def _due(self) -> None:
        if self._thread.prepared:
            raise BemError(
                "a forward of this generate() ran past our hooks, without the adapter (was the host compiled before it"
                " was attached?): attach first, or torch._dynamo.reset()"
            )

    # -- one forward -----------------------------------------------------------------------------

    def _packed(self, positions: Any, mask: Any) -> bool:
        """Whether the host may tell sequences of one row apart by their positions: without a mask, or where flash
        attention drops one that hides nothing.
        """
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
            return False
        flash = attention_kind(self.host.config).startswith("flash") and isinstance(mask, Tensor)
        return (mask is None or (flash and bool((mask != 0).all()))) and bool((positions.diff(dim=1) != 1).any())

    def _before(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        mine = self._thread
        mine.forward = None
        given = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        for name, what in (
            ("cu_seq_lens_q", "several sequences packed in one row"),
            ("cache_params", "a recurrent state in place of a cache"),
        ):
            if given.get(name) is not None:
                raise NotSupportedDecoding(
                    f"{what} ({name}) is not supported under an adapter: where each sequence begins is not said. Give"
                    " one a row, or detach"
                )
        if self._packed(given.get("position_ids"), given.get("attention_mask")):
            raise NotSupportedDecoding(
                "position_ids that do not rise by one, without an attention mask, are several sequences packed in one"
                " row, and codes would go on from one to the next: give each sequence a row, with a 2D attention mask"
            )
        if decoder.training and any(
            getattr(part, "gradient_checkpointing", False) for part in (decoder, *self._host[2])
        ):
            raise BemError(
                "gradient checkpointing runs the host's layers again outside of its forward, where codes are unknown:"
                " disable it on the host"
            )
        tokens: Tensor = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        cache = given.get("past_key_values")
        start = 0 if cache is None else n_cached(cache, given)
        n_rows, n_tokens = tokens.shape[:2]
        real = self._real(given.get("attention_mask"), n_rows, start, n_tokens)
        mine.prepared = False
        mine.forward = _Forward(cache, self._state(cache, start, n_rows), real)

    def _real(self, mask: Any, n_rows: int, start: int, n_tokens: int) -> Tensor:
        """Which of this forward's columns are tokens `[B, T]` bool."""
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            if not self._thread.prepared:
                raise NotSupportedDecoding(
                    "an attention mask that is not 2D hides which columns are padding: give a 2D one"
                )
            mask = self._thread.mask  # generate() made the other one from this
        if mask is None:
            return torch.ones(n_rows, n_tokens, dtype=torch.bool, device=self.controller.query.device)
        if mask.shape[0] != n_rows or mask.shape[1] < start + n_tokens:
            raise AlignmentError(
                f"attention mask of shape {tuple(mask.shape)} for {n_rows} rows that end at column {start + n_tokens}:"
                " padding cannot be told apart"
            )
        return (mask[:, start : start + n_tokens] != 0).to(self.controller.query.device)

    def _state(self, cache: Any, start: int, n_rows: int) -> ControllerState:
        """The state to go on from at column `start`; a new one at column 0."""
        if start == 0:
            lengths = self._thread.generations[-1] if self._thread.generations else None
            if lengths is None:
                return ControllerState(n_rows)
            if len(lengths) != n_rows:
                raise BemStateError(
                    f"a forward of {n_rows} rows in a generate() of {len(lengths)}: which prompt decides which row's"
                    " level is unknown. Fix the level"
                )
            return ControllerState(n_rows, self.controller.decide(lengths.to(self.controller.query.device)))
        known = self._states.get(cache)
        if known is None or known.n_columns < start or known.n_rows != n_rows:
            read = "none of them" if known is None else f"{known.n_columns} columns of {known.n_rows} rows"
            raise BemStateError(
                f"a forward of {n_rows} rows goes on from {start} cached columns, and the adapter has read {read}:"
                " attach it before the cache is filled, copy caches by copy.deepcopy, or use restore()"
            )
        if known.n_columns > start:  # rejected drafts, or any other crop
            known.keep(start)  # the controller reads what is left again
        return known

    def _read(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        forward = self._opened()
        hidden = args[0] if args else kwargs["hidden_states"]
        with _own_precision(hidden.device):
            codes = self.controller(hidden.to(self.controller.query.device), forward.real, forward.state)
            given = {chunked: codes.of("chunk") if chunked else codes.adaptive() for chunked in self._groups}
            forward.applied = self.governor.apply({chunked: code.flatten(0, 1) for chunked, code in given.items()})
            if self.config.sparse_eps and not torch.is_grad_enabled():
                # Where gradients are made nothing is left out: what is has none, so an adapter whose updates are small,
                # as every fresh one's are, would never learn.
                forward.applied, forward.sparse = self.governor.leave_out(forward.applied, self.config.sparse_eps), True
            if has_forward_hooks(self.steered):
                self.steered(codes, self.governor.sizes(forward.applied))

    def _steer(
        self,
        site: Site,
        update: SiteUpdate,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Any:
        forward = self._opened()
        if forward.applied is None:
            raise BemError(
                f"site {site.name} ran before layer {self.config.read_layer}, which the controller reads: choose an"
                " earlier read_layer"
            )
        x = args[0] if args else kwargs["hidden_states"]
        x, code = x.reshape(-1, site.n_in), forward.applied[site.key].to(x.device)
        if len(x) != len(code):
            rows, tokens = forward.real.shape
            raise NotSupportedHost(
                f"site {site.name} is run on {len(x)} states in a forward of {rows} rows and {tokens} tokens: whose "
                f"code is whose is unknown. Leave {site.kind!r} out of sites; of a host that is sharded over ranks, "
                "load it whole"
            )
        if self.config.dropout and module.training:
            x = nn.functional.dropout(x, self.config.dropout)
        whole = isinstance(output, tuple)  # some mixtures of experts give their routing too
        base = output[0] if whole else output
        with _own_precision(x.device):
            steered = generated_update(
                x,
                update.V,
                update.U,
                code,
                self.config.scale,
                base=base.reshape(-1, site.n_out),
                eps=_ZEROS if forward.sparse else None,
                impl=self.impl,
            ).view(base.shape)
        forward.reached.add(site)
        return (steered, *output[1:]) if whole else steered

    def _after(self, decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        forward = self._opened()
        self._thread.forward = None
        n_layers = int(text_config(self._host[0]).num_hidden_layers)  # fewer while drafts are made by the first of them
        if n_layers <= self.config.read_layer:
            raise NotSupportedDecoding(
                f"drafts are made by the first {n_layers} layers, and the controller reads the input of layer"
                f" {self.config.read_layer}: give assistant_early_exit of {self.config.read_layer + 1} or more, or an"
                " earlier read_layer"
            )
        missed = [site.name for site in self.sites if site.layer < n_layers and site not in forward.reached]
        if missed:
            raise BemError(
                f"a forward of the host did not pass {', '.join(missed[:4])}{' ...' if len(missed) > 4 else ''}: its"
                " hook was removed, or the module is not called by the host. Detach and attach again, or leave it out"
                " of sites"
            )
        made = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
        for cache in (forward.cache, *made):
            if isinstance(cache, Cache):
                self._states.put(cache, forward.state)

    def _opened(self) -> _Forward:
        forward = self._thread.forward
        if forward is None:
            raise BemError(
                "a layer of the host ran outside of a forward of its decoder: its tokens have no codes. Detach to run"
                " layers alone"
            )
        return forward


def _a_cache(cache: Any) -> Cache:
    """The same. Raises `BemStateError` for what is none: states are kept by caches."""
    if not isinstance(cache, Cache):
        raise BemStateError(
            f"{type(cache).__name__} is no cache, and an adapter's states are kept by caches: give the "
            "past_key_values that the host was run with"
        )
    return cache


def _n_rows(cache: Cache) -> int | None:
    """Rows of a cache; None for one that does not tell, since it is empty or keeps its keys in some way of its own."""
    return next((len(kept[0]) for layer in cache_layers(cache) if (kept := keys_and_values(layer)) is not None), None)


def _own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast would compute the codes and their limits in bf16."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _outside_of_graphs(call: Callable[..., Any], disabled: Callable[..., Any], *args: Any) -> Any:
    """A hook that leaves the graph of compiled code. The wrapper alone would do, but costs more than most hooks."""
    return disabled(*args) if torch.compiler.is_dynamo_compiling() else call(*args)
