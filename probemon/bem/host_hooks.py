"""HostHooks: what an adapter runs in each forward of its host, and around each generate().

    with ExitStack() as stack:
        HostHooks(bem, states).attach(stack)             # on its way out the stack takes everything off

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
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache

from probemon.bem.controller import Codes
from probemon.bem.forms.form import Form
from probemon.bem.forms.make import steer
from probemon.bem.sites import Site, SiteUpdate
from probemon.bem.state import ControllerState, States
from probemon.bem.update import generated_update
from probemon.errors import AlignmentError, BemError, BemStateError, NotSupportedDecoding, NotSupportedHost
from probemon.host.adapters import OWN
from probemon.host.cache import n_cached
from probemon.host.internals import (
    attention_kind,
    forget_hook_free_graphs,
    has_forward_hooks,
    shadow_compiled_call,
    shadow_expanded_inputs,
    shadow_prepared_inputs,
)
from probemon.host.model import forget_compiled, text_config
from probemon.host.shadow import shadow

if TYPE_CHECKING:
    from probemon.bem.attached import Bem

LOG = logging.getLogger("probemon")

_ZEROS = torch.finfo(torch.float32).tiny  # an eps by which rows of zeros are left out, and no others that matter


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
    """Passes on the codes of a forward, with the sizes of what is applied, to whoever puts a hook on it. Without a hook
    it is not called.
    """

    def forward(self, codes: Codes, sizes: tuple[Tensor, Tensor]) -> Codes:
        sigma1, relative = (size.view(codes.level.shape) for size in sizes)
        return codes.replace(sigma1=sigma1, delta_rel_norm=relative)


class _Owner:
    """Says to the shadows whether the adapter is on. They do not ask the adapter, which would keep the host alive."""

    open = False


class _ThreadState(threading.local):
    """What a thread has under way. `generations`: its generate() calls, the innermost last, each with the lengths of
    its prompts `[B]` once they are known.
    """

    def __init__(self) -> None:
        self.forward: _Forward | None = None
        self.generations: list[Tensor | None] = []
        self.prepared = False  # generate() has prepared a forward that has not begun
        self.mask: Any = None  # its 2D mask
        self.first = False  # no forward of the innermost generate() has begun


class HostHooks:
    """An adapter's hooks and shadows on its host. `n_generating`: generate() calls under way, in all threads."""

    def __init__(self, bem: Bem, states: States) -> None:
        self._bem, self._states, self._controller = bem, states, bem.controller
        self._host, self._decoder, self._layers = bem._host
        self._signature = list(inspect.signature(self._decoder.forward).parameters)
        self._groups = {site.chunked for site in bem.sites}
        # Another one each time: a shadow of an earlier time may lie under someone else's, and must not wake up.
        self.owner, self._thread = _Owner(), _ThreadState()
        self._lock, self.n_generating = threading.Lock(), 0

    def attach(self, stack: ExitStack) -> None:
        """Put every hook and shadow on the host; `stack` takes them off."""
        bem, host, decoder, owner = self._bem, self._host, self._decoder, self.owner
        # With this setting torch would run a graph again that was made without our hooks.
        forget_hook_free_graphs()
        forget_compiled(host)
        stack.callback(forget_compiled, host)
        owner.open = True
        stack.callback(setattr, owner, "open", False)
        stack.callback(self._states.clear)
        OWN[decoder] = weakref.ref(bem)
        stack.callback(OWN.pop, decoder, None)
        stack.callback(decoder.register_forward_hook(_hook(self._close_forward)).remove)
        for site in bem.sites:
            steer = partial(self._steer, site, cast(SiteUpdate | Form, bem.updates[site.key]))
            stack.callback(site.module.register_forward_hook(_hook(steer), with_kwargs=True).remove)
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
        self._thread.forward = None
        inputs = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        self._check_supported(inputs)
        tokens: Tensor = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        cache = inputs.get("past_key_values")
        start = 0 if cache is None else n_cached(cache, inputs)
        n_rows, n_tokens = tokens.shape[:2]
        mask, state = inputs.get("attention_mask"), self._state_at(cache, start, n_rows)
        real = self._real_columns(mask, n_rows, start, n_tokens)
        # Within a generate() masks only grow; before it a row may have ended early, and what it was fed is masked now.
        if start and mask is not None and (self._thread.first or not self._thread.generations):
            state.mask(self._real_columns(mask, n_rows, 0, start))
        self._thread.prepared = self._thread.first = False
        self._thread.forward = _Forward(cache, state, real)

    def _check_supported(self, inputs: Mapping[str, Any]) -> None:
        """Refuse forwards in which it is unknown where each sequence begins, or in which layers run twice."""
        for name, what in (
            ("cu_seq_lens_q", "several sequences packed in one row"),
            ("cache_params", "a recurrent state in place of a cache"),
        ):
            if inputs.get(name) is not None:
                raise NotSupportedDecoding(
                    f"{what} ({name}) is not supported under an adapter: where each sequence begins is not said. Give"
                    " one a row, or detach"
                )
        if self._packed(inputs.get("position_ids"), inputs.get("attention_mask")):
            raise NotSupportedDecoding(
                "position_ids that do not rise by one, without an attention mask, are several sequences packed in one"
                " row, and codes would go on from one to the next: give each sequence a row, with a 2D attention mask"
            )
        if self._decoder.training and any(
            getattr(module, "gradient_checkpointing", False) for module in (self._decoder, *self._layers)
        ):
            raise BemError(
                "gradient checkpointing runs the host's layers again outside of its forward, where codes are unknown:"
                " disable it on the host"
            )

    def _packed(self, positions: Any, mask: Any) -> bool:
        """Whether the host may tell sequences of one row apart by their positions: without a mask, or where flash
        attention drops one that hides nothing.
        """
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
            return False
        flash = attention_kind(self._host.config).startswith("flash")
        unmasked = mask is None or (flash and isinstance(mask, Tensor) and bool((mask != 0).all()))
        return unmasked and bool((positions.diff(dim=1) != 1).any())

    def _real_columns(self, mask: Any, n_rows: int, start: int, n_tokens: int) -> Tensor:
        """Which of this forward's columns are tokens `[B, T]` bool."""
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            if not self._thread.prepared:
                raise NotSupportedDecoding(
                    "an attention mask that is not 2D hides which columns are padding: give a 2D one"
                )
            mask = self._thread.mask  # generate() made the other one from this
        device = self._controller.query.device
        if mask is None:
            return torch.ones(n_rows, n_tokens, dtype=torch.bool, device=device)
        if mask.shape[0] != n_rows or mask.shape[1] < start + n_tokens:
            raise AlignmentError(
                f"attention mask of shape {tuple(mask.shape)} for {n_rows} rows that end at column {start + n_tokens}:"
                " padding cannot be told apart"
            )
        return (mask[:, start : start + n_tokens] != 0).to(device)

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

    def _run_controller(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        bem, forward, controller = self._bem, self._current_forward(), self._controller
        hidden = args[0] if args else kwargs["hidden_states"]
        with _own_precision(hidden.device):
            codes = controller(hidden.to(controller.query.device), forward.real, forward.state)
            by_group = {chunked: codes.of("chunk") if chunked else codes.adaptive() for chunked in self._groups}
            forward.applied = bem.governor.apply({chunked: code.flatten(0, 1) for chunked, code in by_group.items()})
            eps = bem.config.sparse_eps
            # Where gradients are made nothing is left out: what is has none, so an adapter whose updates are small, as
            # every fresh one's are, would never learn.
            if eps and not torch.is_grad_enabled():
                forward.applied, forward.sparse = bem.governor.leave_out(forward.applied, eps), True
            if has_forward_hooks(bem.steered):
                bem.steered(codes, bem.governor.sizes(forward.applied))

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
        if forward.applied is None:
            raise BemError(
                f"site {site.name} ran before layer {config.read_layer}, which the controller reads: choose an"
                " earlier read_layer"
            )
        x = args[0] if args else kwargs["hidden_states"]
        (n_in, n_out), code = site.sizes_here, forward.applied[site.key].to(x.device)
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
        return (steered, *output[1:]) if with_routing else steered

    def _close_forward(self, decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        forward, read_layer = self._current_forward(), self._bem.config.read_layer
        self._thread.forward = None
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
        outputs = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
        for cache in (forward.cache, *outputs):
            if isinstance(cache, Cache):
                self._states.put(cache, forward.state)

    def _current_forward(self) -> _Forward:
        forward = self._thread.forward
        if forward is None:
            raise BemError(
                "a layer of the host ran outside of a forward of its decoder: its tokens have no codes. Detach to run"
                " layers alone"
            )
        return forward


def _own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast would compute the codes and their limits in bf16."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _hook(call: Callable[..., Any]) -> Callable[..., Any]:
    # A partial, not a closure: who copies or pickles the model finds in it whose hook this is.
    return partial(_outside_of_graphs, call, torch.compiler.disable(call))


def _outside_of_graphs(call: Callable[..., Any], disabled: Callable[..., Any], *args: Any) -> Any:
    """A hook that leaves the graph of compiled code. The wrapper alone would do, but costs more than most hooks."""
    return disabled(*args) if torch.compiler.is_dynamo_compiling() else call(*args)
