"""Break safetensors files: the header, the offsets, or a tensor and all that goes with it.

broken = break_safetensors(data, random.Random(7))
"""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

from fuzzing.values import WORDS, break_bytes, break_json, break_value

_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "U64": 8,
    "C64": 8,
    "F4": 1,
    "": 1,
}
_FORMATS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I8": "<b", "U8": "<B"}


def break_safetensors(data: bytes, rng: Random) -> bytes:
    """Header, offsets, or a tensor and all that goes with it."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        parts = {
            name: (
                entry["dtype"],
                entry["shape"],
                data[8 + size + entry["data_offsets"][0] : 8 + size + entry["data_offsets"][1]],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return break_bytes(data, rng)
    names = sorted(parts)
    if not names:
        return break_bytes(data, rng)
    match rng.randrange(10):
        case 0:
            text = break_json(json.dumps(header).encode(), rng)
            return len(text).to_bytes(8, "little") + text + data[8 + size :]
        case 1:
            length = rng.choice((0, 1, size - 1, size + 1, size + 8, len(data), 2**32, 2**63, 2**64 - 1))
            return (length % 2**64).to_bytes(8, "little") + data[8:]
        case 2:
            entry = header[rng.choice(names)]
            shape, offsets = entry["shape"], entry["data_offsets"]
            match rng.randrange(4):
                case 0 if shape:
                    shape[rng.randrange(len(shape))] = rng.choice(
                        (0, 1, -1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1, shape[0] + 1)
                    )
                case 1:
                    offsets[rng.randrange(2)] += rng.choice((-8, -4, -1, 1, 4, 8, 2**40))
                case 2:
                    entry["dtype"] = rng.choice(list(_SIZES))
                case _:
                    entry["data_offsets"] = list(header[rng.choice(names)]["data_offsets"])
            text = json.dumps(header).encode()
            return len(text).to_bytes(8, "little") + text + data[8 + size :]
        case 3 if "__metadata__" in header or rng.random() < 0.3:
            metadata = break_value(header.get("__metadata__", {"a": "b"}), rng)
            return pack_safetensors(parts, metadata if rng.random() < 0.2 else _texts(metadata))
        case 4:
            _break_parts(parts, names, rng)
        case _:
            name = rng.choice(names)
            dtype, shape, raw = parts[name]
            parts[name] = (dtype, shape, break_values(dtype, raw, rng))
    return pack_safetensors(parts, header.get("__metadata__"))


def _texts(metadata: Any) -> Any:
    """Metadata as safetensors wants it, texts by name, so that what is in the texts is reached."""
    return (
        {str(key): value if isinstance(value, str) else str(value)[:1000] for key, value in metadata.items()}
        if isinstance(metadata, dict)
        else metadata
    )


def _break_parts(parts: dict[str, tuple[str, list[int], bytes]], names: list[str], rng: Random) -> None:
    """A tensor taken away, renamed, doubled, put in another's place, turned, cut, read as another type: sizes and
    offsets stay right.
    """
    name, other = rng.choice(names), rng.choice(names)
    dtype, shape, raw = parts[name]
    row = len(raw) // shape[0] if shape and shape[0] else 0
    match rng.randrange(8):
        case 0:
            del parts[name]
        case 1:
            parts[
                rng.choice((*WORDS, "alert_threshold:ema(0.3)", "alert_threshold:", "w1_scale", "w2", "golden_scores"))
            ] = parts.pop(name)
        case 2:
            parts[rng.choice(("alert_threshold:each", "alert_threshold:max", "golden_hidden", "w2", "extra"))] = parts[
                name
            ]
        case 3:
            parts[name] = parts[other]
        case 4:
            parts[name] = (dtype, rng.sample(shape, len(shape)), raw)
        case 5 if row:
            parts[name] = (dtype, [shape[0] - 1, *shape[1:]], raw[:-row])
        case 6 if row:
            parts[name] = (dtype, [shape[0] + 1, *shape[1:]], raw + raw[-row:])
        case _:
            parts[name] = rng.choice(
                (
                    (dtype, [0, *shape[1:]], b""),
                    (dtype, [1, *shape], raw),
                    (dtype, [], raw[: _SIZES.get(dtype, 1)]),
                    (dtype, [*shape, 0], b""),
                )
            )
            if rng.random() < 0.4:
                wanted = rng.choice([kind for kind, size in _SIZES.items() if size == _SIZES.get(dtype, 1)])
                parts[name] = (wanted, shape, raw)


def break_values(dtype: str, raw: bytes, rng: Random) -> bytes:
    """Some values of a tensor replaced by unusual ones."""
    made = bytearray(raw)
    size = _SIZES.get(dtype, 1)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if len(made) < size:
            break
        at = rng.randrange(len(made) // size) * size
        if dtype in ("F64", "F32", "F16"):
            value: Any = rng.choice(
                (
                    0.0,
                    -0.0,
                    1.0,
                    -1.0,
                    0.5,
                    3e38 if dtype != "F16" else 6e4,
                    1e-40,
                    float("nan"),
                    float("inf"),
                    float("-inf"),
                    rng.gauss(0, 10),
                )
            )
            made[at : at + size] = struct.pack(_FORMATS[dtype], value)
        elif dtype in _FORMATS:
            bits = 8 * size - (dtype != "U8")
            value = rng.choice(
                (0, 1, 2, 5, len(raw) // size, 1000, 32768, 2**20, 2**33, 2**bits - 1, rng.randrange(16))
            )
            value = value % 2**bits if rng.random() < 0.7 or dtype == "U8" else -(value % 2**bits)
            made[at : at + size] = struct.pack(_FORMATS[dtype], value)
        else:
            made[at : at + size] = rng.choice((b"\0" * size, b"\xff" * size, rng.randbytes(size)))
    return bytes(made)


def pack_safetensors(parts: dict[str, tuple[str, list[int], bytes]], metadata: Any = None) -> bytes:
    """The bytes of a safetensors file."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    # Larger items first, as safetensors and the pack's writer have it, so that all are aligned.
    ordered = sorted(parts.items(), key=lambda item: (-_SIZES.get(item[1][0], 1), item[0]))
    for name, (dtype, shape, raw) in ordered:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(raw for _, (_, _, raw) in ordered)
