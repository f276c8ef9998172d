"""Undocumented features of torch, transformers, accelerate and PEFT, one function each.

Only `_parameters`, `_buffers`, `_forward_pre_hooks` and `_version` are used elsewhere. After an upgrade run
`tests/host/test_internals.py` first.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.modeling_outputs import BaseModelOutputWithPast

from probemon.util.shadow import Owner, shadow, unshadowed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# -- torch ---------------------------------------------------------------------------------------

COMPILED_CALL = "_compiled_call_impl"  # set by `module.compile()`
_WRAPPED = re.compile(r"\.(_orig_mod|token_adapter|base_layer|original_module)(?=\.)")


def uncompiled(model: Any) -> Any:
    """Return the module inside torch.compile's wrappers."""
    while hasattr(model, "_orig_mod"):
        model = model._orig_mod
    return model


def compiled_attributes(module: nn.Module) -> list[str]:
    """Return the attributes that torch.compile made."""
    return [
        name for name in (COMPILED_CALL, "forward") if hasattr(vars(module).get(name), "_torchdynamo_orig_callable")
    ]


def forget_hook_free_graphs() -> None:
    """Make dynamo check for hooks, else it reuses graphs made without ours."""
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()


def keep_address(tensor: Tensor) -> None:
    """Mark a tensor's address as fixed, for captured graphs that write to it."""
    torch._dynamo.mark_static_address(tensor)  # type: ignore[no-untyped-call,unused-ignore]


def in_backward() -> bool:
    """True in a backward pass, where gradient checkpointing reruns layers."""
    return torch._C._current_graph_task_id() != -1


def is_dropout(module: nn.Module) -> bool:
    """True for torch's dropouts."""
    return isinstance(module, _DropoutNd)


def keeps_statistics(module: nn.Module) -> bool:
    """True for batch norms."""
    return isinstance(module, _BatchNorm)


# Attributes that affect no hidden state, or are compared elsewhere.
_OF_TORCH = frozenset(vars(nn.Module()))
_OF_LIBRARIES = re.compile(
    r"_is_hf_initialized|\w*gradient_checkpointing\w*|_require_grads_hooks?|_compiled_call\w*|_last_compile_config"
    r"|_hf_hook|_old_forward|hf_device_map|warnings_issued|name_or_path|model_tags|is_parallelizable|model_parallel"
    r"|_(no_split|keep_in|skip_keys|keys_to)\w*|\w*_?tied_weights_keys|_(tp|ep|pp|fsdp)_plan|_?loss_\w+|kernel_config"
    r"|\w*max_seq_len_cached|\w*long_inv_freq"
)


def own_attributes(module: nn.Module) -> list[str]:
    """Return attributes set by the module's class or a user."""
    made = [*compiled_attributes(module), "forward"] if has_accelerate_hook(module) else compiled_attributes(module)
    return [
        name
        for name in vars(module)
        if name not in _OF_TORCH and name not in made and _OF_LIBRARIES.fullmatch(name) is None
    ]


def temporary_buffers(module: nn.Module) -> list[str]:
    """Return buffers outside of checkpoints."""
    return [name for name in module._buffers if name in module._non_persistent_buffers_set]


@dataclass(frozen=True)
class MethodNames:
    """Names in the code of a class's methods.

    - `assigned`: assigned or registered outside of `__init__`
    - `edited`: containers that may be changed in place
    - `mentioned`: all names and string constants
    - `parts`: strings that may become parts of names
    - `known`: False if the forward's code is unreadable
    """

    assigned: frozenset[str]
    edited: frozenset[str]
    mentioned: frozenset[str]
    parts: tuple[str, ...]
    known: bool

    def mention(self, name: str) -> bool:
        """True if a method may use an attribute of this name."""
        return not self.known or name in self.mentioned or name.startswith(self.parts) or name.endswith(self.parts)


_NAMES: weakref.WeakKeyDictionary[type, MethodNames] = weakref.WeakKeyDictionary()
_EDITING = {"append", "extend", "insert", "pop", "popitem", "popleft", "appendleft", "remove", "clear", "sort"}
_EDITING |= {"add", "discard", "update", "setdefault", "difference_update", "intersection_update"}
_BY_TEXT = {"register_buffer", "setattr", "__setattr__", "__dict__", "vars"}


def names_in_methods(kind: type) -> MethodNames:
    """Return the names in the methods of a class, cached."""
    if kind not in _NAMES:
        assigned, edited, mentioned, parts = set[str](), set[str](), set[str](), set[str]()
        for code, acts in dict.fromkeys(_codes(kind)):
            names, texts = set(code.co_names), _texts(code.co_consts)
            mentioned |= names | texts
            if not names.isdisjoint(_BY_TEXT | {"getattr", "hasattr"}):
                parts |= {text for text in texts if len(text) > 1}
            if acts:
                steps = list(dis.get_instructions(code))
                assigned |= {step.argval for step in steps if step.opname == "STORE_ATTR"}
                assigned |= set() if names.isdisjoint(_BY_TEXT) else texts
                puts = any(step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for step in steps)
                edited |= names if puts or not names.isdisjoint(_EDITING) else set()
        readable = hasattr(inspect.unwrap(getattr(kind, "forward", None)), "__code__")  # type: ignore[arg-type]
        _NAMES[kind] = MethodNames(frozenset(assigned), frozenset(edited), frozenset(mentioned), tuple(parts), readable)
    return _NAMES[kind]


def may_read(module: nn.Module, name: str) -> bool:
    """True if the module's class may use an attribute or buffer."""
    kind = type(module)
    mentioned = names_in_methods(kind).mention(name) or hasattr(kind, name)
    return mentioned or unshadowed(vars(module).get("forward")) is not None


_PREPARING = {"__init__", "__setstate__", "reset_parameters", "_init_weights", "init_weights", "post_init"}


def _codes(kind: type) -> Iterator[tuple[CodeType, bool]]:
    """Yield the code of a class's methods, and whether a forward may run it; torch's modules change nothing."""
    for base in kind.__mro__:
        if base is nn.Module or base.__module__.startswith(
            ("builtins", "transformers.modeling_", "transformers.generation")
        ):
            continue
        for name, method in vars(base).items():
            parts: list[Any] = [method.fget, method.fset] if isinstance(method, property) else [method]
            for function in filter(callable, parts):
                acts = name not in _PREPARING and not base.__module__.startswith("torch.")
                while hasattr(function, "__wrapped__"):  # decorators need not run in a forward
                    yield from _codes_of(function, acts=False)
                    function = function.__wrapped__
                yield from _codes_of(function, acts)


def _codes_of(function: Any, acts: bool) -> Iterator[tuple[CodeType, bool]]:
    waiting, seen = [getattr(function, "__func__", function)], set[CodeType]()
    while waiting:
        function = waiting.pop()
        code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
        if not isinstance(code, CodeType) or code in seen:
            continue
        seen.add(code)
        yield code, acts
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        if not isinstance(function, CodeType):
            called = [function.__globals__.get(name) for name in code.co_names]
            waiting += [one for one in called if inspect.isfunction(one) and one.__module__ == function.__module__]


def _texts(constants: Iterable[Any]) -> set[str]:
    """Return the strings in constants, also in tuples."""
    texts = set[str]()
    for value in constants:
        texts |= (
            {value} if isinstance(value, str) else _texts(value) if isinstance(value, (tuple, frozenset)) else set()
        )
    return texts


def remade_frequencies(module: nn.Module) -> list[str]:
    """Return the frequencies that forwards recompute (dynamic rope)."""
    kinds = vars(module).get("rope_type")
    if kinds is None:
        return []
    if not isinstance(kinds, Mapping):
        kinds = {"": kinds}
    remade = [
        kind for kind, rope in kinds.items() if isinstance(rope, str) and ("dynamic" in rope or rope == "longrope")
    ]
    return [f"{kind}_inv_freq" if kind else "inv_freq" for kind in remade]


def child(module: nn.Module, name: str) -> nn.Module | None:
    """Return a module's child; PEFT's layers answer `getattr` for the wrapped module."""
    return module._modules.get(name)


def named_weights(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """`named_parameters()`, faster: every step needs it."""
    weights: dict[str, Tensor] = {
        prefix + name: weight for name, weight in module._parameters.items() if weight is not None
    }
    for name, inner in module._modules.items():
        if inner is not None:
            weights |= named_weights(inner, f"{prefix}{name}.")
    return weights


def all_modules(model: nn.Module) -> list[nn.Module]:
    """`modules()` in its order, five times as fast."""
    modules, waiting = dict[nn.Module, None](), [model]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules[module] = None
            waiting.extend(inner for inner in reversed(module._modules.values()) if inner is not None)
    return list(modules)


class Members:
    """All modules, parameters and persistent buffers below some roots, comparable without another walk.

    A walk takes about 1 ms on a small model. torch changes the content of its dicts, and never replaces them.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(roots)
        self.modules = [module for root in roots for module in all_modules(root)]
        self._dicts: list[Any] = [
            tensors for module in self.modules for tensors in (module._modules, module._parameters)
        ]
        self._buffers = [
            (module._buffers, name)
            for module in self.modules
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
            if may_read(module, name) or module._forward_pre_hooks  # else a user's counter
        ]
        self._held = self._now()  # kept alive, so that ids stay unique
        self._ids = list(map(id, self._held))
        tensors = [
            *(parameter for module in self.modules for parameter in module._parameters.values()),
            *(buffers[name] for buffers, name in self._buffers),
        ]
        self.weights: list[Tensor] = [tensor for tensor in tensors if tensor is not None]

    def same(self, roots: Sequence[nn.Module]) -> bool:
        """True if roots and members are the same objects."""
        return list(map(id, roots)) == list(map(id, self._roots)) and list(map(id, self._now())) == self._ids

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(_VALUES, self._dicts)), *(held.get(name) for held, name in self._buffers)]


_VALUES = methodcaller("values")


def stored_tensors(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Return the live dict of a module's parameters, or else of its buffers."""
    return module._parameters or module._buffers


def write_marks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return address and write count of each tensor.

    Wrapping tensors (quantised, sharded) have no address, inference tensors no count.
    """
    if not any(hasattr(kind, "__tensor_flatten__") for kind in set(map(type, tensors))):
        with suppress(RuntimeError):  # an inference tensor
            return [(p.data_ptr(), p._version) for p in tensors]
    return [(id(p) if is_wrapping_tensor(p) else p.data_ptr(), 0 if p.is_inference() else p._version) for p in tensors]


def has_forward_hooks(module: nn.Module) -> bool:
    """True if a module has forward hooks."""
    return bool(module._forward_hooks)


def hook_of(module: nn.Module, handle: RemovableHandle) -> Any | None:
    """Return a handle's hook if it is still installed."""
    return module._forward_hooks.get(handle.id) or module._forward_pre_hooks.get(handle.id)


def hooks_after(module: nn.Module, handle: RemovableHandle) -> list[Any]:
    """Return the forward hooks that run after a handle's."""
    hooks = dict(module._forward_hooks)
    numbers = list(hooks)
    return [hooks[number] for number in numbers[numbers.index(handle.id) + 1 :]] if handle.id in hooks else []


def own_methods(module: nn.Module) -> dict[str, Any]:
    """Return the methods that a call of a module runs."""
    names = ("_call_impl", "forward", COMPILED_CALL)
    methods = {name: unshadowed(vars(module).get(name)) for name in names}
    # Restoring a patched method leaves a bound method on the instance.
    methods = {
        name: getattr(method, "__func__", method) if getattr(method, "__self__", None) is module else method
        for name, method in methods.items()
    }
    return {name: getattr(type(module), name, None) if method is None else method for name, method in methods.items()}


def is_wrapping_tensor(tensor: Tensor) -> bool:
    """True for tensors that wrap others (quantised, sharded)."""
    return hasattr(type(tensor), "__tensor_flatten__")  # ten times as fast as on the tensor


def intercept_operators(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Run this thread's operators by `run(operator, args, kwargs)` in a `with` block."""

    class Interceptor(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(func, args, dict(kwargs or {}))

    return Interceptor()


def with_generator(operator: Any) -> Any | None:
    """Return the overload of a random operator that takes a generator, or None."""
    overload = operator._overloadname
    name = "generator" if overload == "default" else f"{overload}_generator"
    variant = getattr(operator.overloadpacket, name, operator)
    return variant if any(argument.name == "generator" for argument in variant._schema.arguments) else None


# -- transformers: models and generate() ---------------------------------------------------------


def forget_generates_graph(model: nn.Module) -> bool:
    """Drop the graph that `generate()` compiled; return whether there was one."""
    return vars(model).pop("_compiled_call", None) is not None


def has_generates_graph(model: nn.Module) -> bool:
    """True if `generate()` compiled a graph."""
    return vars(model).get("_compiled_call") is not None


ATTENTION = "_attn_implementation_internal"  # a configuration's attribute


def attention_kind(config: Any) -> str:
    """Return the model's attention, such as "sdpa" or "paged|sdpa"."""
    return str(getattr(config, "_attn_implementation", ""))


def masks_padding(model: Any) -> bool:
    """True if the model derives a missing mask from padding tokens (t5gemma)."""
    return hasattr(sys.modules.get(type(model).__module__), "make_default_2d_attention_mask")


def is_stateful(model: Any) -> bool:
    """True if the model's state cannot be rolled back."""
    return bool(getattr(model, "_is_stateful", False))


def tensor_parallel_size(model: Any) -> int:
    """Return the number of processes of a model."""
    return int(getattr(model, "tp_size", None) or 1)


def checkpoint_function(layer: nn.Module) -> Callable[..., Any] | None:
    """Return a layer's gradient checkpointing function, or None."""
    return vars(layer).get("_gradient_checkpointing_func")


def set_checkpoint_function(layer: nn.Module, function: Callable[..., Any]) -> None:
    """Replace a layer's gradient checkpointing function."""
    vars(layer)["_gradient_checkpointing_func"] = function


def generation_config(model: Any, config: Any, options: Mapping[str, Any]) -> Any:
    """Return the configuration that `generate()` will use."""
    return model._prepare_generation_config(config, **options)[0]


def patch_prepared_inputs(stack: ExitStack, owner: Owner, model: Any, around: Callable[..., Any]) -> None:
    """Patch `prepare_inputs_for_generation`, which runs before each forward of `generate()`."""
    shadow(stack, owner, model, "prepare_inputs_for_generation", around)


def patch_stopping_criteria(stack: ExitStack, owner: Owner, model: Any, around: Callable[..., Any]) -> None:
    """Patch `_get_stopping_criteria`, whose result ends rows after each token."""
    shadow(stack, owner, model, "_get_stopping_criteria", around)


def patch_expanded_inputs(stack: ExitStack, owner: Owner, model: Any, around: Callable[..., Any]) -> None:
    """Patch `_expand_inputs_for_generation`, which repeats the prompt's rows."""
    shadow(stack, owner, model, "_expand_inputs_for_generation", around)


def patch_compiled_call(stack: ExitStack, owner: Owner, model: Any, around: Callable[..., Any]) -> None:
    """Patch `get_compiled_call`, absent in older versions."""
    if hasattr(model, "get_compiled_call"):
        shadow(stack, owner, model, "get_compiled_call", around)


def generates_of_thread() -> Iterator[tuple[FrameType, PreTrainedModel]]:
    """Yield this thread's `generate()` frames and models, innermost first."""
    from transformers import PreTrainedModel  # brings torch._dynamo, which a model has imported anyway

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate":
            owner = frame.f_locals.get("self")
            if isinstance(owner, PreTrainedModel):
                yield frame, owner
        frame = frame.f_back


def proposes_tokens() -> bool:
    """Return whether this thread's innermost `generate()` is in `get_candidates`, which drafts tokens for it."""
    from transformers import PreTrainedModel

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("generate", "get_candidates"):
            owner = frame.f_locals.get("self")
            if isinstance(owner, CandidateGenerator):
                return True
            if isinstance(owner, PreTrainedModel):
                return False
        frame = frame.f_back
    return False


# -- transformers: caches ------------------------------------------------------------------------

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # since 5.24, before, and before in Mamba's models

# The one among them that the models of this transformers take and return.
CACHE_NAME = next(name for name in CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)


def cache_among(values: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments or the output of `generate()`, a model or a layer, or None."""
    names = list(values)  # an output of 5.24 answers `in` and `get` for the older names, too, and logs it
    return next((values[name] for name in CACHE_NAMES if name in names and values[name] is not None), None)


def counts_columns(cache: Any) -> bool:
    """True if a cache counts its columns; one with recurrent layers only does not."""
    try:
        return hasattr(cache, "get_seq_length") and cache.get_seq_length() is not None
    except ValueError:
        return False


def recurrent_state_among(values: Mapping[str, Any]) -> Any:
    """Return the cache among arguments if it does not count its columns, or None."""
    cache = cache_among(values)
    return None if counts_columns(cache) else cache


def decoder_cache(cache: Any) -> Any:
    """Return the decoder's cache inside an encoder-decoder's."""
    return getattr(cache, "self_attention_cache", cache)


def cross_attention_cache(cache: Any) -> Any:
    """Return an encoder-decoder's cross-attention cache, or None."""
    return getattr(cache, "cross_attention_cache", None)


def cache_layers(cache: Any) -> list[Any]:
    """Return a cache's layers, or []."""
    layers = getattr(cache, "layers", None)
    return layers if isinstance(layers, list) else []


def keys_and_values(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return `keys` and `values` `[B, H, columns, D]` of a cache layer, or None."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    return (keys, values) if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == 4 else None


def keeps_every_column(layer: Any) -> bool:
    """True unless a cache layer keeps a window only."""
    return not getattr(layer, "is_sliding", False)


def tensors_of(layer: Any) -> list[Tensor]:
    """Return all tensors of a cache layer."""
    values = vars(layer).values()
    return [
        tensor
        for value in values
        for tensor in (value.values() if isinstance(value, dict) else (value,))
        if isinstance(tensor, Tensor)
    ]


# -- transformers: continuous batching -----------------------------------------------------------

_CHILD, _WARM_UP = "__child#", "__warmup_"


def can_follow_batches(manager: Any) -> bool:
    """True if a manager is recent enough to be followed."""
    config = getattr(manager, "continuous_batching_config", None)
    reports_graphs = getattr(config, "cuda_graph_booleans", None) is not None
    return reports_graphs and hasattr(getattr(manager, "output_router", None), "deliver_batch")


def compiles_batches(manager: Any) -> bool:
    """True with CUDA graphs or compiled code."""
    config = manager.continuous_batching_config
    compiled = config.varlen_compile_config is not None or config.decode_compile_config is not None
    return any(config.cuda_graph_booleans) or compiled


def patch_delivery(stack: ExitStack, owner: Owner, manager: Any, around: Callable[..., Any]) -> None:
    """Patch `deliver_batch`, which gets ended requests."""
    shadow(stack, owner, manager.output_router, "deliver_batch", around)


def attention_before_batches(manager: Any) -> str | None:
    """Return the attention that a manager replaced."""
    return getattr(manager, "_original_attn_impl", None)


def batch_cache(manager: Any) -> Any | None:
    """Return a manager's cache, or None before it has one."""
    return None if manager.batch_processor is None else manager.batch_processor.cache


def requests_in_batch(manager: Any) -> list[Any]:
    """Return the requests of the next packed forward, with `state` and `query_length`."""
    io = manager.batch_processor.inputs_and_outputs
    if hasattr(io, "io_pairs"):  # double-buffered
        io = io.io_pairs[io.current_pair].host_io
    batch: list[Any] = io.requests_in_batch
    return batch


def runs_in_this_thread(manager: Any) -> bool:
    """True in the thread that runs a manager's forwards."""
    return threading.current_thread() is manager._generation_thread


def has_left_queues(manager: Any, request_id: str) -> bool:
    """True if a request is in no queue."""
    return bool(manager.batch_processor.scheduler.request_is_cancelled(request_id))


def may_share_columns(manager: Any, n_columns: int) -> bool:
    """True if a request's first columns may be another's pages."""
    page_size = int(manager.continuous_batching_config.page_size)
    return bool(manager.batch_processor.cache.use_prefix_sharing) and n_columns % page_size == 0


def preempted_prompt_length(state: Any) -> int:
    """Return the prompt length of a preempted request, else 0."""
    return int(state._true_initial_tokens)


def end_at_next_token(state: Any) -> None:
    """Make a request's next token its last."""
    state._new_tokens_limit = state.generated_len() + 1


def parent_of(request_id: str) -> str | None:
    """Return a fork's parent, or None."""
    return request_id.split(_CHILD)[0] if _CHILD in request_id else None


def is_warm_up(request_id: str) -> bool:
    """True for a manager's warm-up requests."""
    return request_id.startswith(_WARM_UP)


# -- accelerate and PEFT -------------------------------------------------------------------------


def has_accelerate_hook(module: nn.Module) -> bool:
    """True if accelerate moves a module's weights or inputs."""
    return hasattr(module, "_hf_hook")


def add_peft_type(name: str) -> Any:
    """Return the PEFT type of a name, added if missing; there is no public way."""
    from peft.utils.peft_types import PeftType

    if name not in PeftType.__members__:
        member: Any = str.__new__(PeftType, name)
        member._name_ = member._value_ = name
        member._sort_order_ = len(PeftType.__members__)
        PeftType._member_names_.append(name)
        PeftType._member_map_[name] = member
        PeftType._value2member_map_[name] = member
        type.__setattr__(PeftType, name, member)
    return PeftType[name]


def is_tuner_class(kind: type) -> bool:
    """True if a class's modules may be PEFT layers."""
    return hasattr(kind, "active_adapters") and hasattr(kind, "disable_adapters")


def switches_adapters(module: nn.Module) -> bool:
    """True for a PEFT layer that can be switched."""
    return "_disable_adapters" in vars(module)


def adapter_switches(tuners: Sequence[nn.Module]) -> list[Any]:
    """Return active and merged adapters of each layer, () if disabled."""
    return [
        () if layer._disable_adapters else (layer._active_adapter, list(getattr(layer, "merged_adapters", ())))
        for layer in tuners
    ]


def adapter_scales(layer: Any) -> dict[str, float]:
    """Return a PEFT layer's scales by adapter."""
    scaling = getattr(layer, "scaling", None)
    return {str(name): float(scale) for name, scale in scaling.items()} if isinstance(scaling, Mapping) else {}


def adapters_in_force(layer: Any) -> list[str]:
    """Return the adapters that a PEFT layer runs if enabled: merged ones only, else its active ones."""
    merged = [] if layer.disable_adapters else list(getattr(layer, "merged_adapters", ()))
    names = (*getattr(layer, "adapter_layer_names", ()), "modules_to_save")
    containers = [layer._modules.get(name) or vars(layer).get(name) for name in names]  # ten times as fast as `getattr`
    names_here = {str(name) for part in containers if part is not None and hasattr(part, "keys") for name in list(part)}
    return merged or [name for name in layer.active_adapters if name in names_here or not names_here]


def is_adaption_prompt_class(kind: type) -> bool:
    """True for PEFT's AdaptionPrompt attentions."""
    return kind.__module__.startswith("peft.tuners.adaption_prompt") and kind.__name__.startswith("Adapted")


def adapters_by_row(layer: nn.Module) -> tuple[str, ...]:
    """Return the adapters that PEFT passes for rows."""
    by_row: tuple[str, ...] = ()
    for hook in list(layer._forward_pre_hooks.values()):
        by_row = tuple(getattr(hook, "keywords", {}).get("adapter_names") or by_row)
    return by_row


def wrapped_by_adapter(module: nn.Module) -> nn.Module | None:
    """Return the module that a PEFT layer wraps, or None."""
    for name, mark in (("base_layer", "adapter_layer_names"), ("original_module", "set_adapter")):
        inner = child(module, name)
        if inner is not None:
            return inner if hasattr(type(module), mark) else None
    return None


def without_wrappers(name: str) -> str:
    """Return a parameter's name without wrappers of torch.compile and PEFT."""
    return _WRAPPED.sub("", f".{name}").lstrip(".")


def xlora_behind(layer: nn.Module) -> Any | None:
    """Return the X-LoRA model behind a layer's forward, or None."""
    mixer = getattr(vars(layer).get("forward"), "__self__", None)
    model = getattr(mixer, "model", None)
    return model if hasattr(model, "internal_xlora_classifier") else None


def xlora_classifier(xlora: Any) -> Any:
    """Return X-LoRA's classifier."""
    return xlora.internal_xlora_classifier


def xlora_rehearses(xlora: Any, layer: Any) -> bool:
    """True during X-LoRA's first pass, without adapters."""
    return bool(layer.disable_adapters) and not xlora.disabled
