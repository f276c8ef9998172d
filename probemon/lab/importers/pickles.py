"""Reads the pickle of a state dict as data.

    state = Machine(path, storage, tensor).run(data)

Any other instruction or global is refused by name: nothing in a file can be called.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probemon.errors import ImportRefused

_MAX_VALUES, _MAX_DEPTH = 1 << 18, 64
STORAGES = {
    "FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16, "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip
_CALLS = ("collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
# Enums of lie-detectors' checkpoints; a member is read as its value, a text. Published files name the first.
_ENUMS = ("deception.detectors.utils.types ProbeArchitecture", "lie_detectors.types ProbeArchitecture")
_PUSH_ARGUMENT = {
    "BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
}  # fmt: skip
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
AGAIN = "fetch it again"


@dataclass(frozen=True)
class Global:
    """A global that a pickle names; never looked up."""

    name: str


@dataclass(frozen=True)
class Storage:
    dtype: torch.dtype
    data: bytearray
    numel: int


def _is_known(name: str) -> bool:
    module, _, word = name.partition(" ")
    return name in _CALLS or name in _ENUMS or (module == "torch" and word in STORAGES)


class Machine:
    """Runs the instructions of a state dict, as pickletools documents them.

    `storage` makes a `Storage` of a persistent id, `tensor` a tensor of the arguments of `_rebuild_tensor_v2`.
    """

    def __init__(self, path: Path, storage: Callable[[Any], Any], tensor: Any = None) -> None:
        self._path, self._storage, self._tensor = path, storage, tensor
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        self._data = data
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                content = self._stack.pop()
                self._check_plain(content)
                return content
            self._do(opcode.name, argument)
        raise ImportRefused(f"{self._path}: its pickle has no end: {AGAIN}")

    def _do(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _PUSH_ARGUMENT:
            stack.append(argument)
            return
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
            return
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(self._global(argument))
            case "STACK_GLOBAL":
                # Text first: printing anything else may never end.
                if not all(isinstance(part, str) for part in stack[-2:]):
                    raise ImportRefused(
                        f"{self._path}: its pickle names a global by something that is not text: {AGAIN}"
                    )
                stack[-2:] = [self._global(" ".join(stack[-2:]))]
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                called, arguments = stack[-2:]
                stack[-2:] = [self._call(called, arguments)]
            case "BUILD":  # attributes of an OrderedDict, such as module versions
                stack.pop()
            case _:
                self._fill_container(name)

    def _fill_container(self, name: str) -> None:
        stack = self._stack
        match name:
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
            case "APPEND":
                self._extend([stack.pop()])
            case "APPENDS":
                self._extend(self._pop_to_mark())
            case "SETITEM":
                self._set([stack.pop(-2), stack.pop()])
            case "SETITEMS":
                self._set(self._pop_to_mark())
            case _:
                raise ImportRefused(
                    f"{self._path} is a pickle with the instruction {name}{self._name_foreign_global()}, which no state"
                    " dict needs: it may run code and is not read"
                )

    def _check_plain(self, content: Any) -> None:
        """Refuse a value that contains itself, or nests too deeply: printing it would never end."""
        n, waiting = 0, [(content, 0)]
        while waiting:
            value, depth = waiting.pop()
            n += 1
            if n > _MAX_VALUES or depth > _MAX_DEPTH:
                raise ImportRefused(
                    f"{self._path} holds values within values, over {_MAX_DEPTH} deep or {_MAX_VALUES:,} in all: that"
                    " is not a probe"
                )
            if isinstance(value, (Global, Storage)):
                raise ImportRefused(f"{self._path} holds a part of a tensor by itself: {AGAIN}")
            if isinstance(value, (dict, list, tuple)):
                waiting += [(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)]

    def _pop_to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        values, self._stack[mark:] = self._stack[mark:], []
        return values

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ImportRefused(f"{self._path}: its pickle appends to something that is not a list: {AGAIN}")
        self._stack[-1].extend(values)

    def _set(self, pairs: list[Any]) -> None:
        if type(self._stack[-1]) is not dict:
            raise ImportRefused(f"{self._path}: its pickle sets items of something that is not a dict: {AGAIN}")
        # nested tuples could be hashed without end
        if not all(isinstance(key, (str, int)) for key in pairs[::2]):
            raise ImportRefused(f"{self._path}: its pickle names a value by what is neither text nor number: {AGAIN}")
        self._stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def _global(self, name: str) -> Global:
        module, _, word = name.partition(" ")
        if not _is_known(name):
            raise ImportRefused(
                f"{self._path} is a pickle that asks for {module}.{word}, which no state dict needs: it may run code"
                " and is not read"
            )
        return Global(name)

    def _name_foreign_global(self) -> str:
        words: list[str] = []
        try:
            for opcode, argument, _ in pickletools.genops(self._data):
                name = ""
                if opcode.name in ("GLOBAL", "INST"):
                    name = str(argument)
                elif isinstance(argument, str):
                    words = [*words[-1:], argument]
                elif opcode.name == "STACK_GLOBAL":
                    name = " ".join(words)
                if name and not _is_known(name):
                    return f", that asks for {name.replace(' ', '.', 1)[:200]}"
        except Exception:  # it is broken further on
            pass
        return ""

    def _call(self, called: Any, arguments: Any) -> Any:
        """Return a call's result; nothing is called."""
        match called, arguments:
            case Global("collections OrderedDict"), ():
                return {}
            case Global("torch._utils _rebuild_tensor_v2"), (_, _, _, _, *_):
                return self._tensor(*arguments)
            case Global("torch._utils _rebuild_parameter"), (Tensor() as tensor, *_):
                return tensor
            case Global(name), (str() as value,) if name in _ENUMS:
                return value
        raise ImportRefused(f"{self._path}: its pickle calls what no state dict calls: {AGAIN}")
