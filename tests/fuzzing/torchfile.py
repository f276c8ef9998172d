"""Break files of torch.save: their zip, and the instructions of the pickle in it.

broken = break_torch(data, random.Random(7))
evil = with_pickle(data, exploit)                # the same file, with another pickle
"""

from __future__ import annotations

import io
import pickletools
import struct
import warnings
import zipfile
from random import Random

MARKER = "probemon_fuzz_ran"  # what an exploit would make, were it run

# Each asks for a function and calls it, in the ways that the protocols of pickle have: (global, pickle).
EXPLOITS: tuple[tuple[str, bytes], ...] = (
    ("os.system", f"cos\nsystem\n(Vtouch {MARKER}\ntR.".encode()),
    ("posix.system", f"\x80\x02cposix\nsystem\nX{chr(len(MARKER) + 6)}\0\0\0touch {MARKER}\x85R.".encode("latin-1")),
    (
        "os.system",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(MARKER) + 6]) + f"touch {MARKER}".encode() + b"\x85R.",
    ),
    ("os.system", f"(Vtouch {MARKER}\nios\nsystem\n.".encode()),
    ("os.system", f"(cos\nsystem\nVtouch {MARKER}\no.".encode()),
    ("builtins.eval", f"cbuiltins\neval\n(Vopen('{MARKER}','w')\ntR.".encode()),
    ("builtins.exec", f"\x80\x02cbuiltins\nexec\n(Vopen('{MARKER}','w')\ntR.".encode("latin-1")),
    ("subprocess.Popen", f"\x80\x02csubprocess\nPopen\n(Vtouch {MARKER}\ntR.".encode("latin-1")),
    ("runpy._run_code", f"\x80\x02crunpy\n_run_code\n(Vopen('{MARKER}','w')\n}}tR.".encode("latin-1")),
    ("os.system", b"\x80\x04C\x01xcos\nsystem\n(Vx\ntR."),
    ("torch.load", b"\x80\x02ctorch\nload\n(Vx\ntR."),
    ("torch.hub.load", b"\x80\x02ctorch.hub\nload\n(Vx\nVy\ntR."),
    ("builtins.getattr", b"\x80\x02cbuiltins\ngetattr\n(cbuiltins\n__import__\nV__self__\ntR."),
    (
        "torch.FloatStorage.from_file",
        b"\x80\x04\x8c\x05torch\x8c\x16FloatStorage.from_file\x93\x8c\x0b/etc/passwd\x85R.",
    ),
)


def _doubled(n: int) -> bytes:
    """Pairs of the same pair, n times: 2**n values to whoever walks, prints or hashes it."""
    return b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(n))


# Small pickles of which something may become large, deep or endless: within themselves, doubled as value and as key,
# thousands deep, as a storage's description.
BOMBS: tuple[bytes, ...] = (
    b"\x80\x02]q\x00h\x00a.", b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.", b"\x80\x02K\x01" + _doubled(60) + b".",
    b"\x80\x02}K\x01" + _doubled(60) + b"K\x01s.",
    b"\x80\x02)" + b"\x85" * 60_000 + b".", b"\x80\x02})" + b"\x85" * 60_000 + b"K\x01s.",
    b"\x80\x02K\x01" + _doubled(60) + b"Q.", b"\x80\x02" + b"]" * 60_000 + b"a" * 59_999 + b".",
    b"\x80\x02}X\x05\x00\x00\x00classK\x01" + _doubled(40) + b"s.",
    b"\x80\x02X\x07\x00\x00\x00storageNNNK\x01" + _doubled(50) + b"\x87Q.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00K\x01" + _doubled(50) + b"K\x01" + _doubled(50) + b"tR.",
    b"\x80\x02" + b"(" * 100_000 + b".",
    b"\x80\x04X\x05\x00\x00\x00torchK\x01" + _doubled(40) + b"\x93.",
)  # fmt: skip
_SNIPPETS = (
    b"cos\nsystem\n", b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_parameter\n", b"ctorch\nFloatStorage\n", b"R", b"b", b"o", b"Q",
    b"0", b"1", b"2", b"(", b")", b"]", b"}", b"N", b"\x85", b"\x86", b"\x87", b"e", b"a", b"u", b"s", b"t", b"l",
    b"d", b"\x88", b"K\x00", b"M\xff\xff", b"J\xff\xff\xff\xff",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x8a\x0a" + b"\x7f" * 10, b"\x8b\xff\xff\xff\x7f",
    b"G\x7f\xf0\x00\x00\x00\x00\x00\x00", b"h\x00", b"h\xff", b"q\x00", b"r\xff\xff\xff\x7f",
    b"X\x01\x00\x00\x00a", b"X\xff\xff\xff\x7f", b"\x94", b"\x93", b"\x82\x01",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b".", b"I99999999999999999999\n", b"L1L\n", b"S'a'\n",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"X\x03\x00\x00\x00\xed\xa0\x80",
)  # fmt: skip
_SWAPS = (
    b"FloatStorage", b"HalfStorage", b"BFloat16Storage", b"DoubleStorage", b"LongStorage", b"BoolStorage",
    b"ByteStorage", b"QInt8Storage", b"_rebuild_tensor_v2", b"_rebuild_parameter",
    b"_rebuild_qtensor", b"OrderedDict", b"collections", b"torch._utils", b"torch", b"storage", b"cpu", b"weight",
    b"bias", b"linear", b"net.0", b"net.3",
)  # fmt: skip


def break_torch(data: bytes, rng: Random) -> bytes:
    """The zip, a member, or the pickle."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = [(info.filename, file.read(info)) for info in file.infolist()]
    except Exception:  # it was broken before
        return _flip(data, rng)
    found = [i for i, (name, _) in enumerate(members) if name.endswith("data.pkl")]
    if not members or not found:
        return _flip(data, rng)
    at = rng.randrange(len(members))
    name, content = members[at]
    stored = True
    match rng.randrange(16):
        case 0:
            return _flip(data, rng)
        case 1:
            return rng.choice(EXPLOITS)[1] if rng.random() < 0.5 else with_pickle(data, rng.choice(BOMBS))
        case 2:
            return with_pickle(data, rng.choice(EXPLOITS)[1])
        case 3:
            members[at] = (
                rng.choice(
                    (
                        "../../evil",
                        "/evil",
                        name + "x",
                        name.replace("data/", "data/../"),
                        "archive/data.pkl",
                        "\0",
                        "x" * 300,
                        name.upper(),
                    )
                ),
                content,
            )
        case 4:
            members.append((rng.choice((name, "other/data.pkl", "../evil", "archive/data/0")), content))
        case 5:
            del members[at]
        case 6:
            stored = False
        case 7 | 8 | 9:
            members[at] = (name, _values(content, rng) if "/data/" in name else _flip(content, rng))
        case _:
            i = found[0]
            members[i] = (members[i][0], break_pickle(members[i][1], rng))
    return zipped(members, stored)


def with_pickle(data: bytes, pickled: bytes) -> bytes:
    """The file with another pickle in it."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        members = [
            (info.filename, pickled if info.filename.endswith("data.pkl") else file.read(info))
            for info in file.infolist()
        ]
    return zipped(members)


def zipped(members: list[tuple[str, bytes]], stored: bool = True) -> bytes:
    """The bytes of a zip, with checksums that are right."""
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w") as file:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, content in members:
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED)
    return made.getvalue()


def break_pickle(data: bytes, rng: Random) -> bytes:
    """One instruction taken away, doubled, moved or put in, a number or a word changed."""
    try:
        places = [position for _, _, position in pickletools.genops(data) if position is not None]
    except Exception:  # no pickle any more
        return _flip(data, rng)
    i = rng.randrange(len(places))
    begin, end = places[i], places[i + 1] if i + 1 < len(places) else len(data)
    match rng.randrange(7):
        case 0:
            return data[:begin] + data[end:]
        case 1:
            return data[:end] + data[begin:end] + data[end:]
        case 2:
            j = rng.choice(places)
            return data[:j] + data[begin:end] + data[j:]
        case 3 | 4:
            return data[:begin] + rng.choice(_SNIPPETS) + data[begin if rng.random() < 0.5 else end :]
        case 5:
            there = [word for word in _SWAPS if word in data]
            if not there:
                return _flip(data, rng)
            old, new = rng.choice(there), rng.choice(_SWAPS)
            if len(old) != len(new):  # a short text has its length before it
                data = data.replace(struct.pack("<I", len(old)) + old, struct.pack("<I", len(new)) + new)
            return data.replace(old, new, 1) if len(old) == len(new) or old not in (b"weight", b"bias") else data
        case _:
            numbers = [
                (op.name, place)
                for op, _, place in pickletools.genops(data)
                if op.name in ("BININT1", "BININT2", "BININT")
            ]
            if not numbers:
                return _flip(data, rng)
            kind, place = rng.choice(numbers)
            assert place is not None
            size = {"BININT1": 1, "BININT2": 2, "BININT": 4}[kind]
            value = rng.choice((0, 1, 2, 3, 12, 255, 256, 65535, 2**31 - 1, rng.randrange(256))) % (1 << 8 * size)
            return data[: place + 1] + value.to_bytes(size, "little") + data[place + 1 + size :]


def _values(content: bytes, rng: Random) -> bytes:
    """A storage with other numbers in it."""
    made = bytearray(content)
    size = rng.choice((2, 4))
    if len(made) >= size:
        at = rng.randrange(len(made) // size) * size
        made[at : at + size] = rng.choice(
            (
                b"\0" * size,
                b"\xff" * size,
                struct.pack("<f", rng.gauss(0, 3))[-size:],
                struct.pack("<f", float("inf"))[-size:],
                rng.randbytes(size),
            )
        )
    return bytes(made) if rng.random() < 0.9 else content[: rng.randrange(len(content) + 1)]


def _flip(data: bytes, rng: Random) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if made:
            made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made) if rng.random() < 0.8 else bytes(made[: rng.randrange(len(made) + 1)])
