"""Hooks that run an adapter in each forward of its model, and around each generate().

    with ExitStack() as stack:
        ModelHooks(bem, model, states).attach(stack)

Hooks run before the decoder, before layer `read_layer` (the controller), after each site (the update), and after the
decoder (a check). Five methods are patched on the instance:

    generate                        counts calls under way
    init_continuous_batching        refuses, unless the adapter is disabled
    prepare_inputs_for_generation   finds padding
    get_compiled_call               runs eagerly
    _expand_inputs_for_generation   finds prompt lengths, for level="auto"
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import Cache

from probemon.adapters.bem.checkpoints import Checkpoints
from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.forms.form import Form
from probemon.adapters.bem.forms.make import steer
from probemon.adapters.bem.forwards import Forward, check_no_recurrent_state, real_columns
from probemon.adapters.bem.measures import Measures
from probemon.adapters.bem.packing import packing_of
from probemon.adapters.bem.sites import Site, SiteUpdate, value_module
from probemon.adapters.bem.state import ControllerState, States
from probemon.adapters.bem.update import generated_update
from probemon.errors import BemError, BemStateError, UnsupportedDecoding, UnsupportedModel
from probemon.host.adapters import OWN
from probemon.host.cache import filled_cache, n_cached
from probemon.host.internals import (
    cache_among,
    counts_columns,
    forget_hook_free_graphs,
    has_forward_hooks,
    patch_compiled_call,
    patch_expanded_inputs,
    patch_prepared_inputs,
)
from probemon.host.model import forget_compiled, text_config
from probemon.util.shadow import shadow

if TYPE_CHECKING:
    from probemon.adapters.bem.attached import Bem

LOG = logging.getLogger("probemon")

_ZEROS = torch.finfo(torch.float32).tiny  # as eps: leaves out zeros only


class Host(NamedTuple):
    """A model, its decoder, and the decoder's layers."""

    model: Any
    decoder: Any
    layers: nn.ModuleList


class _Owner:
    """Whether the adapter is on. Patches that held the adapter would keep the model alive."""

    open = False


class _ThreadState(threading.local):
    """`generations`: generate() calls under way, innermost last, with prompt lengths `[B]` if known."""

    def __init__(self) -> None:
        self.forward: Forward | None = None
        self.generations: list[Tensor | None] = []
        self.prepared = False  # a forward is, and has not begun
        self.mask: Any = None  # its 2D mask
        self.first = False  # the innermost call has begun no forward


class ModelHooks:
    """An adapter's hooks and patches. `n_generating`: generate() calls under way, in all threads."""

    def __init__(self, bem: Bem, host: Host, states: States) -> None:
        self._bem, self._states, self._controller = bem, states, bem.controller
        self._host, self._decoder, self._layers = host
        self._signature = list(inspect.signature(self._decoder.forward).parameters)
        self._checkpoints = Checkpoints(self._layers, bem.config.read_layer, self._run_within, self._read)
        # New: an old patch may remain under another's, and must stay off.
        self._owner, self._thread = _Owner(), _ThreadState()
        self._lock, self.n_generating = threading.Lock(), 0

    @property
    def open(self) -> bool:
        """Whether the adapter is on its model."""
        return self._owner.open

    def attach(self, stack: ExitStack) -> None:
        """Put hooks and patches on the model, until `stack` closes."""
        bem, model, decoder, owner = self._bem, self._host, self._decoder, self._owner
        # Else torch may run a graph without our hooks.
        forget_hook_free_graphs()
        forget_compiled(model)
        stack.callback(forget_compiled, model)
        owner.open = True
        stack.callback(setattr, owner, "open", False)
        stack.callback(self._states.clear)
        stack.callback(self._checkpoints.leave)
        OWN.setdefault(decoder, weakref.WeakSet()).add(bem)
        stack.callback(OWN[decoder].discard, bem)
        stack.callback(decoder.register_forward_hook(_hook(self._close_forward)).remove)
        for site in bem.sites:
            steer = partial(self._steer, site, cast(SiteUpdate | Form, bem.updates[site.key]))
            # First, so that others' hooks read the steered output.
            handle = site.module.register_forward_hook(_hook(steer), with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
            if "retrieval" in bem.config.gate_inputs:
                values = value_module(self._layers, site.layer, site.n_in)
                keep = partial(self._keep_values, site.layer)
                stack.callback(values.register_forward_hook(_hook(keep)).remove)
        read_layer = self._layers[bem.config.read_layer]
        stack.callback(read_layer.register_forward_pre_hook(_hook(self._run_controller), with_kwargs=True).remove)
        stack.callback(decoder.register_forward_pre_hook(_hook(self._open_forward), with_kwargs=True).remove)
        if hasattr(model, "generate"):
            shadow(stack, owner, model, "generate", self._generate)
            patch_prepared_inputs(stack, owner, model, self._prepare)
            patch_compiled_call(stack, owner, model, self._run_eagerly)
            if bem.config.level == "auto":
                patch_expanded_inputs(stack, owner, model, self._note_prompt_lengths)
        if hasattr(model, "init_continuous_batching"):  # its thread would only fail each request
            shadow(stack, owner, model, "init_continuous_batching", self._refuse_batches)
        # First: a patch that remains under another's then passes calls on.
        stack.callback(setattr, owner, "open", False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._bem.__reduce_ex__(protocol)  # raises: a steered model cannot be copied

    # -- one generate() --------------------------------------------------------------------------

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = self._thread
        thread.generations.append(None)
        thread.prepared, thread.first = False, True
        with self._lock:
            self.n_generating += 1
        try:
            output = original(*args, **kwargs)
            self._check_none_is_prepared()
            return output
        finally:
            thread.generations.pop()
            thread.prepared, thread.mask, thread.forward = False, None, None
            with self._lock:
                self.n_generating -= 1

    def _refuse_batches(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._bem.enabled:
            raise UnsupportedDecoding(
                "continuous batching (generate_batch) packs several requests into one row, whose codes an adapter does"
                " not tell apart: call generate() with a row for each text, padded on the left, or detach the adapter"
            )
        return original(*args, **kwargs)

    def _note_prompt_lengths(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Here `generate` has its whole prompt and mask."""
        ids, inputs = original(*args, **kwargs)
        if self._thread.generations:
            mask, embeds = inputs.get("attention_mask"), inputs.get("inputs_embeds")
            tokens = ids if embeds is None else embeds
            self._thread.generations[-1] = (
                torch.full((len(tokens),), tokens.shape[1], dtype=torch.int64, device=tokens.device)
                if mask is None
                else (mask != 0).sum(dim=1)
            )
        return ids, inputs

    def _run_eagerly(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Hooks would break a compiled graph at every site."""
        LOG.info("generate() runs this model eagerly while an adapter is on it")
        call: Callable[..., Any] = self._host.__call__
        return call

    def _prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = self._thread
        if thread.generations:
            self._check_none_is_prepared()
            thread.prepared, thread.mask = True, kwargs.get("attention_mask")
        return original(*args, **kwargs)

    def _check_none_is_prepared(self) -> None:
        if self._thread.prepared:
            raise BemError(
                "a forward of this generate() ran past our hooks, without the adapter (was the model compiled before it"
                " was attached?): attach first, or torch._dynamo.reset()"
            )

    # -- one forward -----------------------------------------------------------------------------

    def _open_forward(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        thread, bem = self._thread, self._bem
        thread.forward = None
        inputs = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        checkpointed = self._checkpoints.used(decoder)
        cache = cache_among(inputs)
        start = n_cached(cache, inputs) if counts_columns(cache) else 0
        if not bem.enabled:
            self._states.forget(cache)  # the controller misses these columns
            thread.forward = Forward(off=True)
        else:
            thread.forward = self._forward_of(inputs, cache, start)
        thread.prepared = thread.first = False
        if checkpointed:
            if self._controller.guard is not None:
                raise BemError(
                    "gradient checkpointing of the model runs layers again with the codes of their forward, and with a"
                    " FallbackPolicy these may be nobody's: attach without fallback= to train"
                )
            self._checkpoints.follow(thread.forward)

    def _forward_of(self, inputs: Mapping[str, Any], cache: Any, start: int) -> Forward:
        thread = self._thread
        check_no_recurrent_state(inputs)
        tokens: Tensor = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        n_rows, n_tokens = tokens.shape[:2]
        packing = packing_of(self._host, inputs)
        mask, device = inputs.get("attention_mask"), self._controller.query.device
        if packing is not None:
            if self._controller.guard is not None:
                raise UnsupportedDecoding(
                    "several sequences packed in one row are not supported with a FallbackPolicy: attach without "
                    "fallback=, or give each sequence a row"
                )
            packing = packing.to(device)
            state = ControllerState(len(packing.real), packing=packing)
            return Forward(cache, state, torch.ones(n_rows, n_tokens, dtype=torch.bool, device=device))
        state = self._state_at(cache, start, n_rows)
        real = self._real_columns(mask, n_rows, start, n_tokens)
        # Within a generate() masks only grow; between two, ends of rows get masked.
        if start and mask is not None and (thread.first or not thread.generations):
            state.mask(self._real_columns(mask, n_rows, 0, start))
        return Forward(cache, state, real)

    def _real_columns(self, mask: Any, n_rows: int, start: int, n_tokens: int) -> Tensor:
        device = self._controller.query.device
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2) and self._thread.prepared:
            mask = self._thread.mask  # generate() made its mask from this
        if mask is None:
            return torch.ones(n_rows, n_tokens, dtype=torch.bool, device=device)
        return real_columns(mask, n_rows, start, n_tokens).to(device)

    def _state_at(self, cache: Any, start: int, n_rows: int) -> ControllerState:
        """The state to go on from at column `start`."""
        if start == 0:
            lengths = self._thread.generations[-1] if self._thread.generations else None
            if lengths is None:
                return ControllerState(n_rows)
            if len(lengths) != n_rows:
                raise BemStateError(
                    f"a forward of {n_rows} rows in a generate() of {len(lengths)}: which prompt decides which row's"
                    " level is unknown. Fix the level"
                )
            return ControllerState(n_rows, self._controller.decide(lengths.to(self._controller.query.device)))
        state = self._states.get(cache)
        if state is None or state.n_columns < start or state.n_rows != n_rows:
            read = "none of them" if state is None else f"{state.n_columns} columns of {state.n_rows} rows"
            raise BemStateError(
                f"a forward of {n_rows} rows goes on from {start} cached columns, and the adapter has read {read}:"
                " attach it before the cache is filled, copy caches by copy.deepcopy, or use restore()"
            )
        if state.n_columns > start:  # rejected drafts, or any other crop
            state.truncate(start)  # the controller reads what is left again
        return state

    def _run_controller(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = self._current_forward()
        if not forward.off and forward.applied is None:  # else it ran before a checkpoint around this hook
            self._read(args[0] if args else kwargs["hidden_states"])

    def _read(self, hidden: Tensor) -> None:
        """Run the controller on its layer's input."""
        bem, forward, controller = self._bem, self._current_forward(), self._controller
        assert forward.real is not None and forward.state is not None
        with _own_precision(hidden.device):
            if bem.levels is not None:
                # Watchers get the same levels in every forward.
                every = self._decoder.training or has_forward_hooks(bem.steered)
                controller.needed = LEVELS if every else bem.levels.needed()
            codes = controller(hidden.to(controller.query.device), forward.real, forward.state)
            forward.applied = bem.limited(codes, self._decoder.training)
            eps = bem.config.sparse_eps
            # Not with gradients: a fresh adapter's small updates would never learn.
            if eps and not torch.is_grad_enabled():
                forward.applied, forward.sparse = bem.governor.leave_out(forward.applied, eps), True
            if has_forward_hooks(bem.steered):
                bem.steered(codes, bem.governor.sizes(forward.applied))
            if has_forward_hooks(bem.measured):
                if bem.measured.n_asking:
                    forward.measures = Measures(bem)
                else:
                    bem.measured(hidden.new_empty((*forward.real.shape, 0)))

    def _run_within(self, forward: Forward, what: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a part of a forward, also in the backward pass, in any thread."""
        if not self._owner.open:
            raise BemError(
                "the backward pass runs the model's layers again (gradient checkpointing), and the adapter that was on"
                " them is off: detach it, or set another one, after the backward pass"
            )
        thread = self._thread
        before, thread.forward = thread.forward, forward
        try:
            return what(*args)
        finally:
            thread.forward = before

    def _keep_values(self, layer: int, module: nn.Module, args: Any, output: Tensor) -> None:
        forward = self._current_forward()
        if not forward.off:
            forward.values[layer] = output.flatten(0, -2)

    def _steer(
        self,
        site: Site,
        update: SiteUpdate | Form,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Any:
        forward, config = self._current_forward(), self._bem.config
        if forward.off:
            return output
        if forward.applied is None or forward.real is None:
            raise BemError(
                f"site {site.name} ran before layer {config.read_layer}, which the controller reads: choose an"
                " earlier read_layer"
            )
        x = args[0] if args else kwargs["hidden_states"]
        (n_in, n_out), code = site.sizes_here, forward.applied[site.key].to(x.device)
        x = x.reshape(-1, n_in)
        with_routing = isinstance(output, tuple)  # some mixtures of experts
        base = output[0] if with_routing else output
        if len(x) != len(code) or base.shape[-1] != n_out:
            n_rows, n_tokens = forward.real.shape
            raise UnsupportedModel(
                f"site {site.name} is run on {len(x)} states in a forward of {n_rows} rows and {n_tokens} tokens: which"
                f" code belongs to which state is unknown. Leave {site.kind!r} out of sites; load a model whole that is"
                " spread over ranks in another way than by rows or columns"
            )
        site_input = x
        if config.dropout and module.training:
            x = nn.functional.dropout(x, config.dropout)
        with _own_precision(x.device):
            flat = base.reshape(-1, n_out)
            if site.shard is not None:
                low_rank = cast(SiteUpdate, update)
                steered = site.shard.update(x, low_rank.V, low_rank.U, code, config.scale, flat).view(base.shape)
            elif isinstance(update, Form):
                values = forward.values.pop(site.layer, None)
                steered = steer(update, x, code, flat, read=site_input, values=values).view(base.shape)
            else:
                steered = generated_update(
                    x,
                    update.V,
                    update.U,
                    code,
                    config.scale,
                    base=flat,
                    eps=_ZEROS if forward.sparse else None,
                    impl=self._bem.impl,
                ).view(base.shape)
        forward.reached.add(site)
        if forward.measures is not None:
            forward.measures.take(site, site_input.detach(), flat.detach(), steered.detach().view(flat.shape))
            self._pass_measures(forward)
        return (steered, *output[1:]) if with_routing else steered

    def _pass_measures(self, forward: Forward, whole: bool = True) -> None:
        """Pass measures on once; if `whole`, when complete."""
        measures, real = forward.measures, forward.real
        if measures is None or real is None or (whole and measures.awaited):
            return
        forward.measures = None
        sizes = measures.all(forward.applied or {}, real.numel(), real.device)
        self._bem.measured(sizes.view(*real.shape, -1))

    def _close_forward(self, decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        forward, read_layer = self._current_forward(), self._bem.config.read_layer
        self._thread.forward = None
        if forward.off or forward.state is None:
            return
        n_layers = int(text_config(self._host).num_hidden_layers)  # fewer while the first ones make drafts
        if n_layers <= read_layer:
            raise UnsupportedDecoding(
                f"drafts are made by the first {n_layers} layers, and the controller reads the input of layer"
                f" {read_layer}: give assistant_early_exit of {read_layer + 1} or more, or an earlier read_layer"
            )
        missed = [site.name for site in self._bem.sites if site.layer < n_layers and site not in forward.reached]
        if missed:
            raise BemError(
                f"a forward of the model did not pass {', '.join(missed[:4])}{' ...' if len(missed) > 4 else ''}: its"
                " hook was removed, or the module is not called by the model. Detach and attach again, or leave it out"
                " of sites"
            )
        self._pass_measures(forward, whole=False)  # others may still listen
        for cache in (forward.cache, filled_cache(output, None)):
            if isinstance(cache, Cache):
                self._states.put(cache, forward.state)

    def _current_forward(self) -> Forward:
        forward = self._thread.forward
        if forward is None and not self._bem.enabled:
            return Forward(off=True)
        if forward is None:
            raise BemError(
                "a layer of the model ran outside of a forward of its decoder: its tokens have no codes. Detach to run"
                " layers alone"
            )
        return forward


def _own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast would compute codes and limits in bf16."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _hook(call: Callable[..., Any]) -> Callable[..., Any]:
    # A partial: copy and pickle find the hook's owner in it.
    return partial(_outside_of_graphs, call, torch.compiler.disable(call))


def _outside_of_graphs(call: Callable[..., Any], disabled: Callable[..., Any], *args: Any) -> Any:
    """The disabled wrapper alone would do, but costs more than most hooks."""
    return disabled(*args) if torch.compiler.is_dynamo_compiling() else call(*args)
