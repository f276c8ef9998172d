"""HostHooks: what an adapter runs in each forward of its host, and around each generate().

    with ExitStack() as stack:
        HostHooks(bem, host, states).attach(stack)       # on its way out the stack takes everything off

Hooks run before the decoder (which columns and tokens this forward has, and the state of its cache), before layer
`read_layer` (the controller, once), after each site (the update), and after the decoder (no site was left out). Four
methods are shadowed on the instance:

    generate                        counts what is under way
    prepare_inputs_for_generation   says what is padding
    get_compiled_call               runs a steered host eagerly
    _expand_inputs_for_generation   says how long the prompts are, for level="auto"

States are kept by cache, and what is under way by thread.
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
from probemon.adapters.bem.sites import Site, SiteUpdate
from probemon.adapters.bem.state import ControllerState, States
from probemon.adapters.bem.update import generated_update
from probemon.errors import BemError, BemStateError, NotSupportedDecoding, NotSupportedHost
from probemon.host.adapters import OWN
from probemon.host.cache import n_cached
from probemon.host.internals import (
    forget_hook_free_graphs,
    has_forward_hooks,
    shadow_compiled_call,
    shadow_expanded_inputs,
    shadow_prepared_inputs,
)
from probemon.host.model import forget_compiled, text_config
from probemon.util.shadow import shadow

if TYPE_CHECKING:
    from probemon.adapters.bem.attached import Bem

LOG = logging.getLogger("probemon")

_ZEROS = torch.finfo(torch.float32).tiny  # an eps by which rows of zeros are left out, and no others that matter


class Host(NamedTuple):
    """The model that an adapter is for, its decoder, and the decoder's layers."""

    model: Any
    decoder: Any
    layers: nn.ModuleList


class _Owner:
    """Says to the shadows whether the adapter is on. They do not ask the adapter, which would keep the host alive."""

    open = False


class _ThreadState(threading.local):
    """What a thread has under way. `generations`: its generate() calls, the innermost last, each with the lengths of
    its prompts `[B]` once they are known.
    """

    def __init__(self) -> None:
        self.forward: Forward | None = None
        self.generations: list[Tensor | None] = []
        self.prepared = False  # generate() has prepared a forward that has not begun
        self.mask: Any = None  # its 2D mask
        self.first = False  # no forward of the innermost generate() has begun
        self.by_leaf = False  # a layer is run again whose codes' gradients end there


class HostHooks:
    """An adapter's hooks and shadows on its host. `n_generating`: generate() calls under way, in all threads."""

    def __init__(self, bem: Bem, host: Host, states: States) -> None:
        self._bem, self._states, self._controller = bem, states, bem.controller
        self._host, self._decoder, self._layers = host
        self._signature = list(inspect.signature(self._decoder.forward).parameters)
        self._checkpoints = Checkpoints(list(self._layers)[bem.config.read_layer :], self._run_within, self._read)
        # Another one each time: a shadow of an earlier time may lie under someone else's, and must not wake up.
        self._owner, self._thread = _Owner(), _ThreadState()
        self._lock, self.n_generating = threading.Lock(), 0

    @property
    def open(self) -> bool:
        """Whether the adapter is on its host."""
        return self._owner.open

    def attach(self, stack: ExitStack) -> None:
        """Put every hook and shadow on the host; `stack` takes them off."""
        bem, host, decoder, owner = self._bem, self._host, self._decoder, self._owner
        # With this setting torch would run a graph again that was made without our hooks.
        forget_hook_free_graphs()
        forget_compiled(host)
        stack.callback(forget_compiled, host)
        owner.open = True
        stack.callback(setattr, owner, "open", False)
        stack.callback(self._states.clear)
        stack.callback(self._checkpoints.leave)
        OWN.setdefault(decoder, weakref.WeakSet()).add(bem)
        stack.callback(OWN[decoder].discard, bem)
        stack.callback(decoder.register_forward_hook(_hook(self._close_forward)).remove)
        for site in bem.sites:
            steer = partial(self._steer, site, cast(SiteUpdate | Form, bem.updates[site.key]))
            # Before others' hooks: whoever reads a site reads what is steered, in whatever order they came.
            handle = site.module.register_forward_hook(_hook(steer), with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        read_layer = self._layers[bem.config.read_layer]
        stack.callback(read_layer.register_forward_pre_hook(_hook(self._run_controller), with_kwargs=True).remove)
        stack.callback(decoder.register_forward_pre_hook(_hook(self._open_forward), with_kwargs=True).remove)
        if hasattr(host, "generate"):
            shadow(stack, owner, host, "generate", self._generate)
            shadow_prepared_inputs(stack, owner, host, self._prepare)
            shadow_compiled_call(stack, owner, host, self._run_eagerly)
            if bem.config.level == "auto":
                shadow_expanded_inputs(stack, owner, host, self._note_prompt_lengths)
        # Before the shadows go: what of them lies under another's then passes calls on.
        stack.callback(setattr, owner, "open", False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._bem.__reduce_ex__(protocol)  # which raises: a host that is steered cannot be copied

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

    def _note_prompt_lengths(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Here `generate` has its whole prompt and mask, a row for each sequence it will run."""
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
        """In place of the compiled host: our hooks leave a graph at every site, so little of it would be left."""
        LOG.info("generate() runs this host eagerly while an adapter is on it")
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
                "a forward of this generate() ran past our hooks, without the adapter (was the host compiled before it"
                " was attached?): attach first, or torch._dynamo.reset()"
            )

    # -- one forward -----------------------------------------------------------------------------

    def _open_forward(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        thread, bem = self._thread, self._bem
        thread.forward = None
        inputs = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        checkpointed = self._checkpoints.used(decoder)
        cache = inputs.get("past_key_values")
        start = 0 if cache is None else n_cached(cache, inputs)
        if not bem.enabled:
            self._states.forget(cache)  # what is written now is unknown to the controller
            thread.forward = Forward(off=True)
        else:
            thread.forward = self._forward_of(inputs, cache, start)
        thread.prepared = thread.first = False
        if checkpointed:
            if self._controller.guard is not None:
                raise BemError(
                    "gradient checkpointing of the host runs layers again with the codes of their forward, and with a"
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
                raise NotSupportedDecoding(
                    "several sequences packed in one row are not supported with a FallbackPolicy: attach without "
                    "fallback=, or give each sequence a row"
                )
            packing = packing.to(device)
            state = ControllerState(len(packing.real), packing=packing)
            return Forward(cache, state, torch.ones(n_rows, n_tokens, dtype=torch.bool, device=device))
        state = self._state_at(cache, start, n_rows)
        real = self._real_columns(mask, n_rows, start, n_tokens)
        # Within a generate() masks only grow; before it a row may have ended early, and what it was fed is masked now.
        if start and mask is not None and (thread.first or not thread.generations):
            state.mask(self._real_columns(mask, n_rows, 0, start))
        return Forward(cache, state, real)

    def _real_columns(self, mask: Any, n_rows: int, start: int, n_tokens: int) -> Tensor:
        """Which of this forward's columns are tokens `[B, T]` bool."""
        device = self._controller.query.device
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2) and self._thread.prepared:
            mask = self._thread.mask  # generate() made the other one from this
        if mask is None:
            return torch.ones(n_rows, n_tokens, dtype=torch.bool, device=device)
        return real_columns(mask, n_rows, start, n_tokens).to(device)

    def _state_at(self, cache: Any, start: int, n_rows: int) -> ControllerState:
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
            return ControllerState(n_rows, self._controller.decide(lengths.to(self._controller.query.device)))
        known = self._states.get(cache)
        if known is None or known.n_columns < start or known.n_rows != n_rows:
            read = "none of them" if known is None else f"{known.n_columns} columns of {known.n_rows} rows"
            raise BemStateError(
                f"a forward of {n_rows} rows goes on from {start} cached columns, and the adapter has read {read}:"
                " attach it before the cache is filled, copy caches by copy.deepcopy, or use restore()"
            )
        if known.n_columns > start:  # rejected drafts, or any other crop
            known.truncate(start)  # the controller reads what is left again
        return known

    def _run_controller(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self._current_forward()
        if forward.off or forward.applied is not None:  # before a checkpoint that has this hook within
            return None
        if args:
            return (self._read(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._read(kwargs["hidden_states"])}

    def _read(self, hidden: Tensor) -> Tensor:
        """Run the controller on what its layer is given; return what the layer is to be given."""
        bem, forward, controller = self._bem, self._current_forward(), self._controller
        assert forward.real is not None and forward.state is not None
        with _own_precision(hidden.device):
            if bem.levels is not None:
                # Whoever watches sees the same levels in every forward: training or not, fallen back or not.
                every = self._decoder.training or has_forward_hooks(bem.steered)
                controller.needed = LEVELS if every else bem.levels.needed()
            codes = controller(hidden.to(controller.query.device), forward.real, forward.state)
            forward.applied = bem.limited(codes, self._decoder.training)
            eps = bem.config.sparse_eps
            # Where gradients are made nothing is left out: what is has none, so an adapter whose updates are small, as
            # every fresh one's are, would never learn.
            if eps and not torch.is_grad_enabled():
                forward.applied, forward.sparse = bem.governor.leave_out(forward.applied, eps), True
            if has_forward_hooks(bem.steered):
                bem.steered(codes, bem.governor.sizes(forward.applied))
            if has_forward_hooks(bem.measured):
                if bem.measured.n_asking:
                    forward.measures = Measures(bem)
                else:
                    bem.measured(hidden.new_empty((*forward.real.shape, 0)))
        checkpointed = torch.is_grad_enabled() and self._checkpoints.used(self._decoder)
        return self._checkpoints.with_gradients(forward, hidden) if checkpointed else hidden

    def _run_within(self, forward: Forward, by_leaf: bool, what: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a part of a forward, now or in the backward pass, in whatever thread that runs."""
        if not self._owner.open:
            raise BemError(
                "the backward pass runs the host's layers again (gradient checkpointing), and the adapter that was on"
                " them is off: detach it, or set another one, after the backward pass"
            )
        thread = self._thread
        before, thread.forward, thread.by_leaf = (thread.forward, thread.by_leaf), forward, by_leaf
        try:
            return what(*args)
        finally:
            thread.forward, thread.by_leaf = before

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
        code = forward.leaf(site.key) if self._thread.by_leaf else forward.applied[site.key]
        (n_in, n_out), code = site.sizes_here, code.to(x.device)
        x = x.reshape(-1, n_in)
        with_routing = isinstance(output, tuple)  # of some mixtures of experts
        base = output[0] if with_routing else output
        if len(x) != len(code) or base.shape[-1] != n_out:
            n_rows, n_tokens = forward.real.shape
            raise NotSupportedHost(
                f"site {site.name} is run on {len(x)} states in a forward of {n_rows} rows and {n_tokens} tokens: whose"
                f" code is whose is unknown. Leave {site.kind!r} out of sites; of a host that is spread over ranks in"
                " another way than by rows or columns, load it whole"
            )
        given = x
        if config.dropout and module.training:
            x = nn.functional.dropout(x, config.dropout)
        with _own_precision(x.device):
            flat = base.reshape(-1, n_out)
            if site.shard is not None:
                low_rank = cast(SiteUpdate, update)
                steered = site.shard.update(x, low_rank.V, low_rank.U, code, config.scale, flat).view(base.shape)
            elif isinstance(update, Form):
                steered = steer(update, x, code, flat).view(base.shape)
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
            forward.measures.take(site, given.detach(), flat.detach(), steered.detach().view(flat.shape))
            self._pass_measures(forward)
        return (steered, *output[1:]) if with_routing else steered

    def take_layer(self, layer: int, output: Any) -> None:
        """Take what a layer hands on, where updates are measured."""
        forward = self._thread.forward
        if forward is not None and forward.measures is not None:
            hidden = output[0] if isinstance(output, tuple) else output
            forward.measures.take_layer(layer, hidden.detach())
            self._pass_measures(forward)

    def _pass_measures(self, forward: Forward, whole: bool = True) -> None:
        """Pass on what was measured, once; `whole`: when nothing of it is awaited any more."""
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
        n_layers = int(text_config(self._host).num_hidden_layers)  # fewer while drafts are made by the first of them
        if n_layers <= read_layer:
            raise NotSupportedDecoding(
                f"drafts are made by the first {n_layers} layers, and the controller reads the input of layer"
                f" {read_layer}: give assistant_early_exit of {read_layer + 1} or more, or an earlier read_layer"
            )
        missed = [site.name for site in self._bem.sites if site.layer < n_layers and site not in forward.reached]
        if missed:
            raise BemError(
                f"a forward of the host did not pass {', '.join(missed[:4])}{' ...' if len(missed) > 4 else ''}: its"
                " hook was removed, or the module is not called by the host. Detach and attach again, or leave it out"
                " of sites"
            )
        self._pass_measures(forward, whole=False)  # whoever asked has gone meanwhile, and others listen still
        outputs = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
        for cache in (forward.cache, *outputs):
            if isinstance(cache, Cache):
                self._states.put(cache, forward.state)

    def _current_forward(self) -> Forward:
        forward = self._thread.forward
        if forward is None and not self._bem.enabled:
            return Forward(off=True)
        if forward is None:
            raise BemError(
                "a layer of the host ran outside of a forward of its decoder: its tokens have no codes. Detach to run"
                " layers alone"
            )
        return forward


def take_layer_hook(hooks_now: Callable[[], HostHooks | None], layer: int) -> Callable[..., Any]:
    """Return a forward hook for a layer, which gives what it hands on to the hooks that the adapter has then."""

    def take_layer(module: nn.Module, args: Any, output: Any) -> None:
        hooks = hooks_now()
        if hooks is not None:
            hooks.take_layer(layer, output)

    return _hook(take_layer)


def _own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast would compute the codes and their limits in bf16."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _hook(call: Callable[..., Any]) -> Callable[..., Any]:
    # A partial, not a closure: who copies or pickles the model finds in it whose hook this is.
    return partial(_outside_of_graphs, call, torch.compiler.disable(call))


def _outside_of_graphs(call: Callable[..., Any], disabled: Callable[..., Any], *args: Any) -> Any:
    """A hook that leaves the graph of compiled code. The wrapper alone would do, but costs more than most hooks."""
    return disabled(*args) if torch.compiler.is_dynamo_compiling() else call(*args)
