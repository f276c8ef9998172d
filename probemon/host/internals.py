"""What probemon relies on that torch, transformers, accelerate and PEFT do not promise: one function each.

A name that is private or undocumented in its library stands in this file, but for torch's oldest (`_parameters`,
`_buffers`, `_forward_pre_hooks`, `_version`). Of a new version, run
`tests/host/test_internals.py` first: it tries each function on the real library, and says what was dropped.
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from probemon.util.shadow import Owner, shadow, unshadowed

# -- torch ---------------------------------------------------------------------------------------

COMPILED_CALL = "_compiled_call_impl"  # the attribute that `module.compile()` sets
_WRAPPED = re.compile(r"\.(_orig_mod|token_adapter|base_layer|original_module)(?=\.)")


def uncompiled(model: Any) -> Any:
    """Return the module inside torch.compile's wrappers, which keep it as `_orig_mod`."""
    while hasattr(model, "_orig_mod"):
        model = model._orig_mod
    return model


def compiled_attributes(module: nn.Module) -> list[str]:
    """Return the attributes of a module that torch.compile made: dynamo marks them by `_torchdynamo_orig_callable`."""
    return [
        name for name in (COMPILED_CALL, "forward") if hasattr(vars(module).get(name), "_torchdynamo_orig_callable")
    ]


def forget_hook_free_graphs() -> None:
    """Make dynamo look for hooks: with `skip_nnmodule_hook_guards` it would run a graph that was made without ours."""
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()


def keep_address(tensor: Tensor) -> None:
    """Tell dynamo that a tensor stays where it is; else it gives up a captured graph that writes to the tensor."""
    torch._dynamo.mark_static_address(tensor)  # type: ignore[no-untyped-call,unused-ignore]


def in_backward() -> bool:
    """Whether the calling thread is in a backward pass, in which gradient checkpointing runs layers again."""
    return torch._C._current_graph_task_id() != -1


def is_dropout(module: nn.Module) -> bool:
    """Whether a module is one of torch's dropouts, whose common class is private: only theirs is `p` a rate."""
    return isinstance(module, _DropoutNd)


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module normalises by the batch that it reads in training, as torch's batch norms do."""
    return isinstance(module, _BatchNorm)


# What torch keeps in every module, and libraries in some: no state depends on it, or it is compared elsewhere.
_OF_TORCH = frozenset(vars(nn.Module()))
_OF_LIBRARIES = re.compile(
    r"_is_hf_initialized|\w*gradient_checkpointing\w*|_require_grads_hooks?|_compiled_call\w*|_last_compile_config"
    r"|_hf_hook|_old_forward|hf_device_map|warnings_issued|name_or_path|model_tags|is_parallelizable|model_parallel"
    r"|_(no_split|keep_in|skip_keys|keys_to)\w*|\w*_?tied_weights_keys|_(tp|ep|pp|fsdp)_plan|_?loss_\w+|kernel_config"
    r"|\w*max_seq_len_cached|\w*long_inv_freq"
)


def own_attributes(module: nn.Module) -> list[str]:
    """Return the names of the attributes in which a module's own class, or a user, keeps something."""
    made = [*compiled_attributes(module), "forward"] if has_accelerate_hook(module) else compiled_attributes(module)
    return [
        name
        for name in vars(module)
        if name not in _OF_TORCH and name not in made and _OF_LIBRARIES.fullmatch(name) is None
    ]


def temporary_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers that are in no checkpoint, from `_non_persistent_buffers_set`."""
    return [name for name in module._buffers if name in module._non_persistent_buffers_set]


@dataclass(frozen=True)
class MethodNames:
    """Names in the methods of a class, from their code.

    `assigned`: what they assign or register outside of `__init__`, which a forward may; `edited`: in what they may put
    or replace parts; `mentioned`: all names and texts in them; `parts`: texts of which they may make names. `known` is
    False where the code of its forward cannot be read.
    """

    assigned: frozenset[str]
    edited: frozenset[str]
    mentioned: frozenset[str]
    parts: tuple[str, ...]
    known: bool

    def mention(self, name: str) -> bool:
        """Whether a method may read or set an attribute of this name."""
        return not self.known or name in self.mentioned or name.startswith(self.parts) or name.endswith(self.parts)


_NAMES: weakref.WeakKeyDictionary[type, MethodNames] = weakref.WeakKeyDictionary()
_EDITING = {"append", "extend", "insert", "pop", "popitem", "popleft", "appendleft", "remove", "clear", "sort"}
_EDITING |= {"add", "discard", "update", "setdefault", "difference_update", "intersection_update"}
_BY_TEXT = {"register_buffer", "setattr", "__setattr__", "__dict__", "vars"}


def names_in_methods(kind: type) -> MethodNames:
    """Return the names in the methods of a class."""
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
        known = hasattr(inspect.unwrap(getattr(kind, "forward", None)), "__code__")  # type: ignore[arg-type]
        _NAMES[kind] = MethodNames(frozenset(assigned), frozenset(edited), frozenset(mentioned), tuple(parts), known)
    return _NAMES[kind]


def may_read(module: nn.Module, name: str) -> bool:
    """Whether a module's forward may read an attribute or a buffer of this name, by the code of its class."""
    kind = type(module)
    mentioned = names_in_methods(kind).mention(name) or hasattr(kind, name)
    return mentioned or unshadowed(vars(module).get("forward")) is not None


_PREPARING = {"__init__", "__setstate__", "reset_parameters", "_init_weights", "init_weights", "post_init"}


def _codes(kind: type) -> Iterator[tuple[CodeType, bool]]:
    """Yield the code of a class's methods, of functions in them, and of those of the same file that they call; not of
    bases that every module has. And whether a forward may run it; torch's own modules are taken to change nothing.
    """
    for base in kind.__mro__:
        if base is nn.Module or base.__module__.startswith(
            ("builtins", "transformers.modeling_", "transformers.generation")
        ):
            continue
        for name, method in vars(base).items():
            parts: list[Any] = [method.fget, method.fset] if isinstance(method, property) else [method]
            for function in filter(callable, parts):
                acts = name not in _PREPARING and not base.__module__.startswith("torch.")
                while hasattr(function, "__wrapped__"):  # what a decorator does is not known to be done in a forward
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
            named = [function.__globals__.get(name) for name in code.co_names]
            waiting += [one for one in named if inspect.isfunction(one) and one.__module__ == function.__module__]


def _texts(constants: Iterable[Any]) -> set[str]:
    """Return the texts among the constants of code, and those in tuples of them."""
    texts = set[str]()
    for value in constants:
        texts |= (
            {value} if isinstance(value, str) else _texts(value) if isinstance(value, (tuple, frozenset)) else set()
        )
    return texts


def remade_frequencies(module: nn.Module) -> list[str]:
    """Return the names of the frequencies that a module's forwards make anew, by transformers' `rope_type`: those of a
    dynamic rope, which several kinds of layers each have.
    """
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
    """Return a module's own child from `_modules`: PEFT's layers answer `getattr` with what they are around."""
    return module._modules.get(name)


def named_weights(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return `named_parameters()` from `_parameters` and `_modules`: it takes less time, and a step asks every time."""
    weights: dict[str, Tensor] = {
        prefix + name: weight for name, weight in module._parameters.items() if weight is not None
    }
    for name, inner in module._modules.items():
        if inner is not None:
            weights |= named_weights(inner, f"{prefix}{name}.")
    return weights


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return `modules()` in its order, from `_modules`: it takes a fifth of the time, and every generation asks."""
    modules, waiting = dict[nn.Module, None](), [model]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules[module] = None
            waiting.extend(inner for inner in reversed(module._modules.values()) if inner is not None)
    return list(modules)


class Members:
    """All modules, and all parameters and persistent buffers, below some roots, which a later look finds again without
    a walk. What a forward computes anew, such as frequencies of positions, lies in other buffers.

    A forward evicts what a walk reads (some 1 ms a step on a small host), so the dicts are kept in which torch holds a
    module's children and parameters: torch changes what is in them and never puts others in their place.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(roots)
        self.modules = [module for root in roots for module in all_modules(root)]
        self._dicts: list[Any] = [held for module in self.modules for held in (module._modules, module._parameters)]
        self._buffers = [
            (module._buffers, name)
            for module in self.modules
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
            if may_read(module, name) or module._forward_pre_hooks  # else somebody counts something in it
        ]
        self._held = self._now()  # kept alive, so that an id is nobody else's
        self._ids = list(map(id, self._held))
        held = [
            *(parameter for module in self.modules for parameter in module._parameters.values()),
            *(buffers[name] for buffers, name in self._buffers),
        ]
        self.weights: list[Tensor] = [tensor for tensor in held if tensor is not None]

    def same(self, roots: Sequence[nn.Module]) -> bool:
        """Whether these are the roots, and every module has the children, parameters and buffers that it had."""
        return list(map(id, roots)) == list(map(id, self._roots)) and list(map(id, self._now())) == self._ids

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(_VALUES, self._dicts)), *(held.get(name) for held, name in self._buffers)]


_VALUES = methodcaller("values")


def stored_tensors(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Return the live dict of a module's parameters, or else of its buffers: it shows a replaced one without a walk."""
    return module._parameters or module._buffers


def write_marks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return address and `_version` of each tensor: torch counts there how often a tensor was written in place.

    A tensor around others (quantised, sharded) has no address, and one that was made in inference mode no count.
    Hundreds of tensors are asked between two forwards: the usual ones for nothing but these.
    """
    if not any(hasattr(kind, "__tensor_flatten__") for kind in set(map(type, tensors))):
        with suppress(RuntimeError):  # of a tensor that has no count
            return [(p.data_ptr(), p._version) for p in tensors]
    return [(id(p) if is_wrapping_tensor(p) else p.data_ptr(), 0 if p.is_inference() else p._version) for p in tensors]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether somebody listens to a module, by its `_forward_hooks`: what only they would read need not be made."""
    return bool(module._forward_hooks)


def hook_of(module: nn.Module, handle: RemovableHandle) -> Any | None:
    """Return the hook that a handle stands for, if it is still among `_forward_hooks` or `_forward_pre_hooks`."""
    return module._forward_hooks.get(handle.id) or module._forward_pre_hooks.get(handle.id)


def hooks_after(module: nn.Module, handle: RemovableHandle) -> list[Any]:
    """Return the forward hooks of a module that run after that of a handle, in `_forward_hooks`' order."""
    hooks = dict(module._forward_hooks)
    numbers = list(hooks)
    return [hooks[number] for number in numbers[numbers.index(handle.id) + 1 :]] if handle.id in hooks else []


def own_methods(module: nn.Module) -> dict[str, Any]:
    """Return what a call of a module goes through: `_call_impl`, which runs the hooks, and `forward`; its own or its
    class's, and what `module.compile()` put before them.
    """
    names = ("_call_impl", "forward", COMPILED_CALL)
    own = {name: unshadowed(vars(module).get(name)) for name in names}
    # Who puts a method back leaves it bound on the instance, where it is what the class has.
    own = {
        name: getattr(method, "__func__", method) if getattr(method, "__self__", None) is module else method
        for name, method in own.items()
    }
    return {name: getattr(type(module), name, None) if method is None else method for name, method in own.items()}


def is_wrapping_tensor(tensor: Tensor) -> bool:
    """Whether a tensor is of a class around others (quantised, sharded), by the protocol `__tensor_flatten__`."""
    return hasattr(type(tensor), "__tensor_flatten__")  # asked of a tensor itself it takes ten times as long


def intercept_operators(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Run every operator of the calling thread by `run(operator, args, kwargs)` in a `with` block."""

    class Interceptor(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(func, args, dict(kwargs or {}))

    return Interceptor()


def with_generator(operator: Any) -> Any | None:
    """Return the overload of a random operator that takes a generator, found by `_overloadname` and `_schema`."""
    overload = operator._overloadname
    name = "generator" if overload == "default" else f"{overload}_generator"
    variant = getattr(operator.overloadpacket, name, operator)
    return variant if any(argument.name == "generator" for argument in variant._schema.arguments) else None


# -- transformers: models and generate() ---------------------------------------------------------


def forget_generates_graph(model: nn.Module) -> bool:
    """Drop what `generate()` compiled by itself and keeps as `_compiled_call`; return whether there was any."""
    return vars(model).pop("_compiled_call", None) is not None


def has_generates_graph(model: nn.Module) -> bool:
    """Whether `generate()` keeps what it compiled by itself."""
    return vars(model).get("_compiled_call") is not None


ATTENTION = "_attn_implementation_internal"  # under which a configuration keeps its attention


def attention_kind(config: Any) -> str:
    """Return the name of a host's attention ("sdpa", "paged|sdpa"), which its configuration keeps privately."""
    return str(getattr(config, "_attn_implementation", ""))


def masks_padding(model: Any) -> bool:
    """Whether a host that is given no mask makes one of which tokens are padding (t5gemma)."""
    return hasattr(sys.modules.get(type(model).__module__), "make_default_2d_attention_mask")


def is_stateful(model: Any) -> bool:
    """Whether transformers says by `_is_stateful` that a host keeps a state that cannot be rolled back."""
    return bool(getattr(model, "_is_stateful", False))


def tensor_parallel_size(model: Any) -> int:
    """Return over how many processes transformers spread a model, from its undocumented `tp_size`."""
    return int(getattr(model, "tp_size", None) or 1)


def checkpoint_function(layer: nn.Module) -> Callable[..., Any] | None:
    """Return the function by which a layer runs itself under gradient checkpointing, `_gradient_checkpointing_func`."""
    return vars(layer).get("_gradient_checkpointing_func")


def set_checkpoint_function(layer: nn.Module, function: Callable[..., Any]) -> None:
    """Put another `_gradient_checkpointing_func` into a layer."""
    vars(layer)["_gradient_checkpointing_func"] = function


def generation_config(model: Any, config: Any, options: Mapping[str, Any]) -> Any:
    """Return what `generate()` will run by, from `_prepare_generation_config`, which it calls first."""
    return model._prepare_generation_config(config, **options)[0]


def shadow_prepared_inputs(stack: ExitStack, owner: Owner, model: Any, around: Callable[..., Any]) -> None:
    """Shadow `prepare_inputs_for_generation`, to which `generate()` shows ids and mask before each of its forwards."""
    shadow(stack, owner, model, "prepare_inputs_for_generation", around)


def shadow_stopping_criteria(stack: ExitStack, owner: Owner, model: Any, around: Callable[..., Any]) -> None:
    """Shadow `_get_stopping_criteria`, whose answer `generate()` asks which rows end, after each token."""
    shadow(stack, owner, model, "_get_stopping_criteria", around)


def shadow_expanded_inputs(stack: ExitStack, owner: Owner, model: Any, around: Callable[..., Any]) -> None:
    """Shadow `_expand_inputs_for_generation`, through which the prompt's rows go, repeated for beams or samples."""
    shadow(stack, owner, model, "_expand_inputs_for_generation", around)


def shadow_compiled_call(stack: ExitStack, owner: Owner, model: Any, around: Callable[..., Any]) -> None:
    """Shadow `get_compiled_call`, which gives `generate()` the compiled model that it runs; older ones have none."""
    if hasattr(model, "get_compiled_call"):
        shadow(stack, owner, model, "get_compiled_call", around)


def generates_of_thread() -> Iterator[tuple[FrameType, PreTrainedModel]]:
    """Yield the frames of `generate()` that the calling thread is in, innermost first, with `self` of each."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate":
            owner = frame.f_locals.get("self")
            if isinstance(owner, PreTrainedModel):
                yield frame, owner
        frame = frame.f_back


def proposes_tokens() -> bool:
    """Whether the innermost `generate()` of the calling thread is in `get_candidates`, which drafts tokens for it."""
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


def decoder_cache(cache: Any) -> Any:
    """Return the decoder's own cache, which that of an encoder-decoder keeps as `self_attention_cache`."""
    return getattr(cache, "self_attention_cache", cache)


def cross_attention_cache(cache: Any) -> Any:
    """Return what an encoder-decoder's cache keeps of the encoder, its `cross_attention_cache`; None of any other."""
    return getattr(cache, "cross_attention_cache", None)


def cache_layers(cache: Any) -> list[Any]:
    """Return the layers of a cache from its undocumented `layers`; [] of one that has none."""
    layers = getattr(cache, "layers", None)
    return layers if isinstance(layers, list) else []


def keys_and_values(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return `keys` and `values [B, H, columns, D]` of a layer of a cache; None where it keeps them in another way."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    return (keys, values) if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == 4 else None


def keeps_every_column(layer: Any) -> bool:
    """Whether a layer of a cache keeps all columns, and not a window of them, by `is_sliding`."""
    return not getattr(layer, "is_sliding", False)


def tensors_of(layer: Any) -> list[Tensor]:
    """Return all tensors in the attributes of a layer of a cache: every kind of layer has names of its own."""
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
    """Whether a manager tells its graphs and hands outputs to `output_router.deliver_batch`, as the newest ones do."""
    config = getattr(manager, "continuous_batching_config", None)
    known = getattr(config, "cuda_graph_booleans", None) is not None
    return known and hasattr(getattr(manager, "output_router", None), "deliver_batch")


def compiles_batches(manager: Any) -> bool:
    """Whether a manager runs CUDA graphs or compiled code, by `cuda_graph_booleans` and the compile configurations."""
    config = manager.continuous_batching_config
    compiled = config.varlen_compile_config is not None or config.decode_compile_config is not None
    return any(config.cuda_graph_booleans) or compiled


def shadow_delivery(stack: ExitStack, owner: Owner, manager: Any, around: Callable[..., Any]) -> None:
    """Shadow `deliver_batch` of a manager's `output_router`, which is given the outputs of requests as they end."""
    shadow(stack, owner, manager.output_router, "deliver_batch", around)


def attention_before_batches(manager: Any) -> str | None:
    """Return the attention that the host had before a manager changed it, which is kept as `_original_attn_impl`."""
    return getattr(manager, "_original_attn_impl", None)


def batch_cache(manager: Any) -> Any | None:
    """Return the cache that a manager gives to its forwards, from its `batch_processor`; None before it has one."""
    return None if manager.batch_processor is None else manager.batch_processor.cache


def requests_in_batch(manager: Any) -> list[Any]:
    """Return the requests of a manager's next packed forward, each with its `state` and `query_length`."""
    io = manager.batch_processor.inputs_and_outputs
    if hasattr(io, "io_pairs"):  # two batches are prepared in turns
        io = io.io_pairs[io.current_pair].host_io
    batch: list[Any] = io.requests_in_batch
    return batch


def runs_in_this_thread(manager: Any) -> bool:
    """Whether the calling thread is the one in which a manager runs its forwards, its `_generation_thread`."""
    return threading.current_thread() is manager._generation_thread


def has_left_queues(manager: Any, request_id: str) -> bool:
    """Whether a request is in neither queue of a manager's scheduler, by `request_is_cancelled`."""
    return bool(manager.batch_processor.scheduler.request_is_cancelled(request_id))


def may_share_columns(manager: Any, n_columns: int) -> bool:
    """Whether a request's first columns may be another's: whole pages are, with the cache's `use_prefix_sharing`."""
    page_size = int(manager.continuous_batching_config.page_size)
    return bool(manager.batch_processor.cache.use_prefix_sharing) and n_columns % page_size == 0


def preempted_prompt_length(state: Any) -> int:
    """Return how long the prompt of a request was that runs again after preemption, `_true_initial_tokens`; else 0."""
    return int(state._true_initial_tokens)


def end_at_next_token(state: Any) -> None:
    """Make a request's next token its last one, by `_new_tokens_limit`, which its state compares with at each token."""
    state._new_tokens_limit = state.generated_len() + 1


def parent_of(request_id: str) -> str | None:
    """Return the request that one was forked from, which its id names before "__child#"; None of one that was not."""
    return request_id.split(_CHILD)[0] if _CHILD in request_id else None


def is_warm_up(request_id: str) -> bool:
    """Whether a request is one that a manager makes up before the first, by what its id begins with."""
    return request_id.startswith(_WARM_UP)


# -- accelerate and PEFT -------------------------------------------------------------------------


def has_accelerate_hook(module: nn.Module) -> bool:
    """Whether accelerate moves a module's weights or inputs around its forward, by `_hf_hook`."""
    return hasattr(module, "_hf_hook")


def add_peft_type(name: str) -> Any:
    """Return PEFT's type of a name, added where it is missing: `register_peft_method` takes only names in `PeftType`,
    an enumeration that nothing public adds to.
    """
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
    """Whether modules of a class may be PEFT's tuner layers, which all switch by these two properties."""
    return hasattr(kind, "active_adapters") and hasattr(kind, "disable_adapters")


def switches_adapters(module: nn.Module) -> bool:
    """Whether a module is a layer of PEFT's that is on or off by itself, by its `_disable_adapters`."""
    return "_disable_adapters" in vars(module)


def adapter_switches(tuners: Sequence[nn.Module]) -> list[Any]:
    """Return what each of PEFT's layers has switched on, from the attributes that its properties answer with: nothing
    where it is disabled, since its next forward takes merged ones out.
    """
    return [
        () if layer._disable_adapters else (layer._active_adapter, list(getattr(layer, "merged_adapters", ())))
        for layer in tuners
    ]


def adapter_scales(layer: Any) -> dict[str, float]:
    """Return by what a layer of PEFT's scales each adapter that it has, from the `scaling` of LoRAs and their kin."""
    scaling = getattr(layer, "scaling", None)
    return {str(name): float(scale) for name, scale in scaling.items()} if isinstance(scaling, Mapping) else {}


def adapters_in_force(layer: Any) -> list[str]:
    """Return the adapters that a layer of PEFT's runs, or would if it were not disabled: where some are merged these
    alone, else those of the active ones that it has weights of, by the names in `adapter_layer_names`.
    """
    merged = [] if layer.disable_adapters else list(getattr(layer, "merged_adapters", ()))
    names = (*getattr(layer, "adapter_layer_names", ()), "modules_to_save")
    kept = [layer._modules.get(name) or vars(layer).get(name) for name in names]  # `getattr` takes ten times as long
    known = {str(name) for part in kept if part is not None and hasattr(part, "keys") for name in list(part)}
    return merged or [name for name in layer.active_adapters if name in known or not known]


def is_adaption_prompt_class(kind: type) -> bool:
    """Whether modules of a class are attentions that PEFT's AdaptionPrompt puts in the place of a host's."""
    return kind.__module__.startswith("peft.tuners.adaption_prompt") and kind.__name__.startswith("Adapted")


def adapters_by_row(layer: nn.Module) -> tuple[str, ...]:
    """Return each row's adapter: PEFT hands `adapter_names` to its layers by a partial among `_forward_pre_hooks`."""
    by_row: tuple[str, ...] = ()
    for hook in layer._forward_pre_hooks.values():
        by_row = tuple(getattr(hook, "keywords", {}).get("adapter_names") or by_row)
    return by_row


def wrapped_by_adapter(module: nn.Module) -> nn.Module | None:
    """Return what a layer of PEFT's is around: a tuner's `base_layer`, or `original_module` of a module saved whole."""
    for name, mark in (("base_layer", "adapter_layer_names"), ("original_module", "set_adapter")):
        inner = child(module, name)
        if inner is not None:
            return inner if hasattr(type(module), mark) else None
    return None


def without_wrappers(name: str) -> str:
    """Return a parameter's name without the children by which torch.compile and PEFT wrap the module that it is of."""
    return _WRAPPED.sub("", f".{name}").lstrip(".")


def xlora_behind(layer: nn.Module) -> Any | None:
    """Return the X-LoRA model that took the place of a layer's forward, known by its `internal_xlora_classifier`."""
    mixer = getattr(vars(layer).get("forward"), "__self__", None)
    model = getattr(mixer, "model", None)
    return model if hasattr(model, "internal_xlora_classifier") else None


def xlora_classifier(xlora: Any) -> Any:
    """Return the module by which X-LoRA decides, its `internal_xlora_classifier`, with `n_classes` and `n_layers`."""
    return xlora.internal_xlora_classifier


def xlora_rehearses(xlora: Any, layer: Any) -> bool:
    """Whether X-LoRA runs its host without adapters to decide: it disables the layers then, and is not `disabled`."""
    return bool(layer.disable_adapters) and not xlora.disabled
