"""Break bytes, JSON values and JSON texts.

break_json(data, rng), break_lines(data, rng)   # a JSON file; one of JSON by lines
break_bytes(data, rng)                          # any file
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

WORDS = (
    "", ".", "..", "../outside", "/etc/hostname", "a/b", "a\\b", "C:/x", "nul\0byte", "\ud800", "x" * 300, "x" * 5000,
    "none", "layernorm", "rmsnorm", "path", "independent",
    "resid_post.0", "resid_post.1", "resid_post.99999999999999999999", "__class__", "1", "-1", "1e999", "\u2028",
    "\x1b[31m", "Entity:0", "Whale:2", "a:1001", ":1", "c0", "c1",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 127, 255, 256, 1000, 1001, 32768, 2**31 - 1, 2**31, 2**48, 2**53, 2**63 - 1, 2**63, -(2**63),
    2**64, 10**30, 10**400, 0.0, 0.5, 1.0, -0.0, 1e-320,
    1e308, -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
DEPTHS = (
    3,
    60,
    200,
    900,
    960,
    980,
    990,
    5000,
    200_000,
)  # around where Python's own limit of 1,000 begins, and far beyond


def break_bytes(data: bytes, rng: Random) -> bytes:
    """Bits, bytes and numbers changed, pieces cut, doubled or moved."""
    made = bytearray(data)
    at = rng.randrange(len(made) + 1)
    # Half of the time near the beginning, where headers are.
    at = min(at, rng.randrange(64)) if rng.random() < 0.5 else at
    match rng.randrange(8):
        case 0 if made:
            made[at % len(made)] ^= 1 << rng.randrange(8)
        case 1 if made:
            made[at % len(made)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 2:
            del made[at:]
        case 3:
            del made[at : at + rng.randrange(1, 33)]
        case 4:
            made[at:at] = made[at : at + rng.randrange(1, 65)]
        case 5:
            made[at:at] = rng.randbytes(rng.randrange(1, 17))
        case 6:
            size = rng.choice((2, 4, 8))
            made[at : at + size] = (rng.choice([n for n in NUMBERS if isinstance(n, int)]) % (1 << 8 * size)).to_bytes(
                size, rng.choice(("little", "big"))
            )
        case _:
            made += rng.choice((b"\0", b"\0" * 64, b"{}", b"\n", made[:64]))
    return bytes(made)


def break_json(data: bytes, rng: Random) -> bytes:
    """A JSON file broken in a value, or as text."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return break_bytes(data, rng)
    if rng.random() < 0.8:
        value = break_value(value, rng)
    try:
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    except RecursionError:
        return break_bytes(data, rng)
    if rng.random() < 0.15:
        text = break_text(text, value, rng)
    return text.encode("utf-8", "surrogatepass" if rng.random() < 0.5 else "replace")


def break_text(text: str, value: Any, rng: Random) -> str:
    """What no value says: a key stated twice, brackets without end, another encoding's beginning."""
    keys = list(value) if isinstance(value, dict) else []
    match rng.randrange(6):
        case 0 if keys:
            places = [i for i, char in enumerate(text) if char == "{"]
            at = rng.choice(places) + 1
            return f"{text[:at]}{json.dumps(rng.choice(keys))}: {json.dumps(any_value(rng))}, {text[at:]}"
        case 1:
            depth = rng.choice(DEPTHS)
            return "[" * depth + ("]" * depth if rng.random() < 0.5 else "")
        case 2:
            depth = rng.choice(DEPTHS)
            return '{"a":' * depth + "1" + "}" * depth
        case 3:
            return "\ufeff" + text
        case 4:
            return text.replace(
                ": ", ": " + rng.choice(("1" * 5000, "-", "1e99999", "NaN", "Infinity", "'x'", "\0")), 1
            )
        case _:
            return text + rng.choice(("x", "\n\n", "\0", text))


def break_value(value: Any, rng: Random) -> Any:
    """One place of a JSON value replaced, taken away, doubled or exchanged with another."""
    slots: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        here = waiting.pop()
        inner = (
            list(here.items()) if isinstance(here, dict) else list(enumerate(here)) if isinstance(here, list) else []
        )
        slots += [(here, key) for key, _ in inner]
        waiting += [part for _, part in inner if isinstance(part, (dict, list))]
    if not slots or rng.random() < 0.02:
        return any_value(rng)
    at, key = rng.choice(slots)
    match rng.randrange(10):
        case 0:
            del at[key]
        case 1 if isinstance(at, dict):
            at[rng.choice((*WORDS, str(key) + "x", str(key).upper()))] = at.pop(key)
        case 2:
            other, place = rng.choice(slots)
            if place in other if isinstance(other, dict) else place < len(other):
                copied = json.loads(json.dumps(other[place]))
                at[key] = copied
        case 3 if isinstance(at, list):
            at.insert(key, json.loads(json.dumps(at[key])))
        case 4 if isinstance(at[key], (int, float)):
            at[key] = at[key] + rng.choice((1, -1, 0.5))
        case 5 if isinstance(at[key], str):
            word = at[key]
            cut = rng.randrange(len(word) + 1)
            at[key] = rng.choice((word[:cut], word[:cut] + rng.choice(WORDS) + word[cut:], word.swapcase()))
        case 6:
            at[key] = [at[key]] if rng.random() < 0.5 else {"a": at[key]}
        case 7 if isinstance(at, dict):
            at[rng.choice(WORDS)] = any_value(rng)
        case _:
            at[key] = any_value(rng)
    return value


def any_value(rng: Random) -> Any:
    """Something that a reader may not expect."""
    match rng.randrange(6):
        case 0:
            return rng.choice(WORDS)
        case 1 | 2:
            return rng.choice(NUMBERS)
        case 3:
            return rng.choice((None, True, False, [], {}, [[]], [None], [1, "a"], {"a": {}}, [0.5] * 12))
        case 4:
            nested: Any = rng.choice((1, "a", []))
            for _ in range(rng.choice((3, 60, 200, rng.randrange(850, 990)))):
                nested = [nested] if rng.random() < 0.5 else {"a": nested}
            return nested
        case _:
            return [rng.choice(WORDS) for _ in range(rng.randrange(4))]


def break_lines(data: bytes, rng: Random) -> bytes:
    """JSON by lines: one line broken, or lines taken away, doubled, exchanged."""
    lines = data.removesuffix(b"\n").split(b"\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            del lines[i]
        case 1:
            lines.insert(i, lines[j])
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case _:
            lines[i] = break_json(lines[i], rng)
    return b"\n".join(lines) + b"\n"
