"""Weights that others saved, read without running anything that is in the file.

    state = load_state_dict(path)                          # {name: tensor} of a .pt (torch.save) or .safetensors file
    bank = load_bank(path)                                 # {concept: {name: tensor}}
    folder = Folder("lens_packs/mine"); folder.file("layer0", "Entity.pt"); folder.json("hierarchy.json")

A `.pt` is a zip of stored bytes and one pickle. The pickle is read here as data: a few instructions build dicts,
tuples, texts, numbers and tensors, and any other instruction, or any global but those of a state dict, is refused by
name. Nothing is unpickled, so nothing in a file can be called. Bounds: a file has at most `MAX_BYTES` (checked before
it is opened), and its tensors state no more bytes than the file has: in memory are at most the file, the storages in it
and the tensors, so three times its size, and some 150 MB for its pickle (2 MiB of instructions) and its table of
members. JSON has at most `MAX_JSON_BYTES`, which may take thirty times that while it is read. Files from before torch
1.6, which are no zip, are refused.
"""

from __future__ import annotations

import io
import math
import pickletools
import reprlib
import stat
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probemon.core.strict_json import RepeatedKey, loads
from probemon.errors import ImportRefused

MAX_BYTES = 256 << 20
MAX_JSON_BYTES = 64 << 20
_MAX_PICKLE_BYTES = 2 << 20
_MAX_MEMBERS = 1 << 16
_MAX_DIMS = 8
_MAX_VALUES, _MAX_DEPTH = 1 << 18, 64
_STORAGES = {
    "FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16, "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip
_CALLS = ("collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
_AGAIN = "fetch it again"


def load_state_dict(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, Tensor]:
    """Tensors by name of a file written by `torch.save(module.state_dict(), path)` or safetensors, on the CPU.

    Raises `ImportRefused` where the file is larger than `max_bytes`, damaged, holds code (the global is named) or is no
    state dict.
    """
    content = load_plain(path, max_bytes)
    if (
        not isinstance(content, dict)
        or not content
        or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items())
    ):
        raise ImportRefused(f"{path} holds {_describe(content)}, not tensors by name: save module.state_dict()")
    return content


def load_bank(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, dict[str, Tensor]]:
    """State dicts by name of one file. Raises `ImportRefused` as `load_state_dict` does."""
    content = load_plain(path, max_bytes)
    if not isinstance(content, dict) or not content:
        raise ImportRefused(
            f"{path} holds {_describe(content)}, not state dicts by name: save {{concept: module.state_dict()}}"
        )
    n_bytes = 0
    for name, state in content.items():
        if (
            not isinstance(name, str)
            or not isinstance(state, dict)
            or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items())
        ):
            raise ImportRefused(
                f"{path}: {name!r} holds {_describe(state)}, not tensors by name: save {{concept: module.state_dict()}}"
            )
        n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        if n_bytes > max_bytes:
            raise ImportRefused(
                f"{path} states the same tensors for more and more concepts, over {max_bytes:,} bytes in all: that is"
                " no bank of probes"
            )
    return content


def load_plain(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """What is in a `.pt` or `.safetensors` file, of dicts, lists, tuples, texts, numbers and tensors. Raises
    `ImportRefused`.
    """
    path = Path(path)
    size = check_file(path, max_bytes)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with path.open("rb") as stream:
            data = stream.read(size)
        # Before the zip's table is read, which takes ten times its size in memory.
        if data.count(b"PK\1\2") > _MAX_MEMBERS:
            raise ImportRefused(f"{path} has more than {_MAX_MEMBERS:,} members: it is no file of torch.save")
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise _not_a_zip(path, data)
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            return _Reader(path, file, size).read()
    except ImportRefused:
        raise
    except Exception as error:  # what a forged file can break is endless: one error that names the file
        first = (str(error).splitlines() or [""])[0][:200]
        raise ImportRefused(f"{path} cannot be read ({type(error).__name__}: {first}): {_AGAIN}") from error


def check_file(path: Path, max_bytes: int) -> int:
    """Size of a regular file. Raises `ImportRefused` where it is missing, something else, or larger than
    `max_bytes`.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        raise ImportRefused(
            f"{path} {'is not there' if missing else f'cannot be read ({error})'}: check the path"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ImportRefused(
            f"{path} is no file{', but a folder' if stat.S_ISDIR(status.st_mode) else ''}: check the path"
        )
    if status.st_size > max_bytes:
        raise ImportRefused(
            f"{path} has {status.st_size:,} bytes, at most {max_bytes:,} are read: raise the bound if you trust it"
        )
    return status.st_size


class Folder:
    """A folder of somebody else's: files in it, and never one outside of it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ImportRefused(f"{path} is not a folder: give the one that holds the probes")
        self._real = self.path.resolve()

    def inside(self, *parts: str) -> Path:
        """The path of something in the folder. Raises `ImportRefused` for an absolute path, for `..`, and for a link
        that leads outside.
        """
        relative = "/".join(parts).replace("\\", "/")
        steps = relative.split("/")
        if not relative or "\0" in relative or ".." in steps or steps[0] == "" or ":" in steps[0]:
            raise ImportRefused(
                f"{self.path}: {relative!r} does not lie in this folder: a path is relative and has no '..'"
            )
        return self._check(self.path.joinpath(*steps))

    def _check(self, path: Path) -> Path:
        try:
            real = path.resolve()
            path.exists()  # a name that is too long for a file system, say
        except (OSError, RuntimeError, ValueError) as error:
            raise ImportRefused(f"{path} cannot be followed ({error})") from None
        if not real.is_relative_to(self._real):
            raise ImportRefused(
                f"{path} is a link that leads outside of {self.path}: copy the folder with the files that it links to"
                " (cp -rL)"
            )
        return path

    def files(self, *parts: str, suffix: str) -> list[Path]:
        """Files of one folder inside, by name; none where there is no such folder."""
        folder = self.inside(*parts) if parts else self.path
        if not folder.is_dir():
            return []
        return [self._check(entry) for entry in sorted(folder.iterdir()) if entry.name.endswith(suffix)]

    def json(self, *parts: str) -> Any:
        """A JSON file inside, or None where there is none; NaN and infinities, which are no JSON, read as None. Raises
        `ImportRefused`.
        """
        path = self.inside(*parts)
        if not path.exists() and not path.is_symlink():
            return None
        check_file(path, MAX_JSON_BYTES)
        try:
            return loads(path.read_bytes().decode("utf-8-sig"), constant=lambda _: None)
        except RepeatedKey as error:
            raise ImportRefused(f"{path}: {error}") from None
        except (OSError, RecursionError, ValueError) as error:
            raise ImportRefused(f"{path} is not valid JSON ({str(error)[:200]}): {_AGAIN}") from None


def _describe(found: object) -> str:
    if isinstance(found, Mapping):
        return (
            "an empty dict"
            if not found
            else f"a dict of {type(next(iter(found.values()))).__name__} by {type(next(iter(found))).__name__}"
        )
    return f"a {type(found).__name__}"


def _not_a_zip(path: Path, data: bytes) -> ImportRefused:
    if not data or data.startswith(b"PK\3\4"):
        return ImportRefused(
            f"{path} is {'cut short or damaged: a zip without its end' if data else 'empty'}: {_AGAIN}"
        )
    try:
        _Machine(path, lambda pid: None).run(data[:_MAX_PICKLE_BYTES])
    except ImportRefused as refused:
        return refused
    except Exception:  # no pickle either
        pass
    return ImportRefused(
        f"{path} is no file of torch.save (a zip since torch 1.6): load it where you trust it, and save its state dict"
        " again"
    )


@dataclass(frozen=True)
class _Global:
    """A global that a pickle names: a word, never looked up."""

    name: str


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    data: bytearray
    numel: int


class _Reader:
    """A `.pt` in a zip."""

    def __init__(self, path: Path, file: zipfile.ZipFile, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.stated_bytes = 0
        self.storages: dict[str, _Storage] = {}
        names = [info.filename for info in file.infolist()]
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if len(pickles) != 1 or len(set(names)) != len(names):
            raise ImportRefused(
                f"{path} has {len(pickles)} data.pkl among {len(names)} members: it is no file of torch.save"
            )
        self.root = pickles[0].removesuffix("data.pkl")
        for info in file.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ImportRefused(f"{path}: {info.filename!r} is compressed, which torch.save never does: {_AGAIN}")
        if sum(info.file_size for info in file.infolist()) > size:
            raise ImportRefused(f"{path}: its members overlap: {_AGAIN}")

    def read(self) -> Any:
        info = self.file.getinfo(f"{self.root}data.pkl")
        if info.file_size > _MAX_PICKLE_BYTES:
            raise ImportRefused(
                f"{self.path}: its data.pkl has {info.file_size:,} bytes, at most {_MAX_PICKLE_BYTES:,} are read"
            )
        order = f"{self.root}byteorder"
        if order in self.file.namelist() and self.file.read(order) != b"little":
            raise ImportRefused(f"{self.path} was written on a big-endian machine: save it on a little-endian one")
        return _Machine(self.path, self.storage, self.tensor).run(self.file.read(info))

    def storage(self, pid: Any) -> _Storage:
        """The bytes that a persistent id `("storage", kind, key, location, numel)` means."""
        tag, kind, key, _, numel = pid
        name = kind.name.removeprefix("torch ") if isinstance(kind, _Global) else None
        if tag != "storage" or name not in _STORAGES or not isinstance(key, str) or not _is_count(numel):
            raise ImportRefused(f"{self.path} refers to {reprlib.repr(pid)}, which is no storage of torch.save")
        if key not in self.storages:
            dtype = _STORAGES[name]
            info = self.file.getinfo(f"{self.root}data/{key}")
            if info.file_size != numel * dtype.itemsize:
                raise ImportRefused(
                    f"{self.path}: storage {key} has {info.file_size:,} bytes, {numel} values of {dtype} are stated:"
                    f" {_AGAIN}"
                )
            self.storages[key] = _Storage(dtype, bytearray(self.file.read(info)), numel)
        known = self.storages[key]
        if (known.dtype, known.numel) != (_STORAGES[name], numel):
            raise ImportRefused(f"{self.path}: storage {key} is stated as two kinds: {_AGAIN}")
        return known

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
        """A contiguous tensor of a storage; what is not the whole of it is copied."""
        if (
            not isinstance(storage, _Storage)
            or not _is_count(offset)
            or not isinstance(size, tuple)
            or not isinstance(stride, tuple)
        ):
            raise ImportRefused(f"{self.path}: a tensor is not described as torch.save does it: {_AGAIN}")
        if len(size) != len(stride) or len(size) > _MAX_DIMS or not all(_is_count(value) for value in (*size, *stride)):
            raise ImportRefused(
                f"{self.path}: a tensor has size {reprlib.repr(size)} and strides {reprlib.repr(stride)}: {_AGAIN}"
            )
        numel = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if numel else 0
        self.stated_bytes += numel * storage.dtype.itemsize
        if last >= max(storage.numel, 1) or self.stated_bytes > self.size:
            raise ImportRefused(
                f"{self.path}: tensors of size {size} state more than the {self.size:,} bytes of the file: {_AGAIN}"
            )
        if not numel:
            return torch.empty(size, dtype=storage.dtype, device="cpu")
        view = torch.frombuffer(storage.data, dtype=storage.dtype).as_strided(size, stride, offset)
        return (
            view
            if numel == storage.numel and view.is_contiguous()
            else view.clone(memory_format=torch.contiguous_format)
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _known(name: str) -> bool:
    """Whether a global "module word" is one of a state dict's."""
    module, _, word = name.partition(" ")
    return name in _CALLS or (module == "torch" and word in _STORAGES)


# Instructions of a pickle: without effect, pushing their argument, pushing a value of their own.
_IGNORED = frozenset({"PROTO", "FRAME"})
_PUSHED = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}


class _Machine:
    """The instructions of a pickle that a state dict needs, over plain values. Method: the opcodes' documentation in
    Python's pickletools.
    """

    def __init__(self, path: Path, storage: Any, tensor: Any = None) -> None:
        self._path, self._storage, self._tensor = path, storage, tensor
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        self._data = data
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                value = self._stack.pop()
                self._check_plain(value)
                return value
            self._do(opcode.name, argument)
        raise ImportRefused(f"{self._path}: its pickle has no end: {_AGAIN}")

    def _do(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _IGNORED:
            return
        if name in _PUSHED:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif not self._fill(name) and not self._refer(name, argument):
            raise ImportRefused(
                f"{self._path} is a pickle with the instruction {name}{self._asking()}, which no state dict needs:"
                " it may run code and is not read"
            )

    def _fill(self, name: str) -> bool:
        """Make or fill a container; False for an instruction that does something else."""
        stack = self._stack
        match name:
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
            case "APPEND":
                self._extend([stack.pop()])
            case "APPENDS":
                self._extend(self._to_mark())
            case "SETITEM":
                self._set([stack.pop(-2), stack.pop()])
            case "SETITEMS":
                self._set(self._to_mark())
            case "BUILD":  # attributes of an OrderedDict, such as the versions of modules
                stack.pop()
            case _:
                return False
        return True

    def _refer(self, name: str, argument: Any) -> bool:
        """Name, call or load one of the few things that a state dict refers to; False for anything else."""
        stack = self._stack
        match name:
            case "GLOBAL":
                stack.append(self._global(argument))
            case "STACK_GLOBAL":
                # To print what else stands there may never end.
                if not all(isinstance(part, str) for part in stack[-2:]):
                    raise ImportRefused(f"{self._path}: its pickle names a global by what is no text: {_AGAIN}")
                stack[-2:] = [self._global(" ".join(stack[-2:]))]
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                called, arguments = stack[-2:]
                stack[-2:] = [self._call(called, arguments)]
            case _:
                return False
        return True

    def _check_plain(self, found: Any) -> None:
        """A pickle can hold a value in itself, or twice in each of many that hold one another: whoever compares or
        prints such a thing never ends.
        """
        n, waiting = 0, [(found, 0)]
        while waiting:
            value, depth = waiting.pop()
            n += 1
            if n > _MAX_VALUES or depth > _MAX_DEPTH:
                raise ImportRefused(
                    f"{self._path} holds values within values, over {_MAX_DEPTH} deep or {_MAX_VALUES:,} in all: that"
                    " is no probe"
                )
            if isinstance(value, (_Global, _Storage)):
                raise ImportRefused(f"{self._path} holds a part of a tensor by itself: {_AGAIN}")
            if isinstance(value, (dict, list, tuple)):
                waiting += [(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)]

    def _to_mark(self) -> list[Any]:
        at = self._marks.pop()
        values, self._stack[at:] = self._stack[at:], []
        return values

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ImportRefused(f"{self._path}: its pickle appends to what is no list: {_AGAIN}")
        self._stack[-1].extend(values)

    def _set(self, pairs: list[Any]) -> None:
        if type(self._stack[-1]) is not dict:
            raise ImportRefused(f"{self._path}: its pickle sets items of what is no dict: {_AGAIN}")
        # A key is hashed, and a tuple within tuples without end would be hashed without end.
        if not all(isinstance(key, (str, int)) for key in pairs[::2]):
            raise ImportRefused(f"{self._path}: its pickle names a value by what is neither text nor number: {_AGAIN}")
        self._stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def _global(self, name: str) -> _Global:
        module, _, word = name.partition(" ")
        if not _known(name):
            raise ImportRefused(
                f"{self._path} is a pickle that asks for {module}.{word}, which no state dict needs: it may run code"
                " and is not read"
            )
        return _Global(name)

    def _asking(self) -> str:
        """The first global that the whole pickle asks for beyond those of a state dict, in words; "" where there is
        none.
        """
        words: list[str] = []
        try:
            for opcode, argument, _ in pickletools.genops(self._data):
                if isinstance(argument, str) and opcode.name not in ("GLOBAL", "INST"):
                    words = [*words[-1:], argument]
                asked = (
                    argument
                    if opcode.name in ("GLOBAL", "INST")
                    else " ".join(words)
                    if opcode.name == "STACK_GLOBAL"
                    else ""
                )
                if asked and not _known(asked):
                    return f", that asks for {asked.replace(' ', '.', 1)[:200]}"
        except Exception:  # it is broken further on
            pass
        return ""

    def _call(self, called: Any, arguments: Any) -> Any:
        """What the three functions of a state dict make of their arguments, made here."""
        match called, arguments:
            case _Global("collections OrderedDict"), ():
                return {}
            case _Global("torch._utils _rebuild_tensor_v2"), (_, _, _, _, *_):
                return self._tensor(*arguments)
            case _Global("torch._utils _rebuild_parameter"), (Tensor() as tensor, *_):
                return tensor
        raise ImportRefused(f"{self._path}: its pickle calls what no state dict calls: {_AGAIN}")
