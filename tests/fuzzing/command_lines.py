"""Command lines drawn at random from the command line's own table, with the files and the environment of each.

    case = draw(Random(7), COMMANDS)                # a `Case`, the same for the same seed
    case.line()                                     # "env -u HOME COLUMNS=20 probemon analyze host pack docs.jsonl ..."
    for simpler in case.simpler(): ...              # with less of it, for whoever looks for the smallest in trouble

A command that is added is drawn, and so is an option: values follow from a parameter's type, and from its name where
that says which files it is meant for (`fuzzing.workshop.VALID`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.workshop import MADE, ODD, VALID

_NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "7",
    "0.5",
    "1e-9",
    "1e309",
    "nan",
    "-inf",
    "99999999999999999999",
    "1e3",
    "",
    "x",
    "½",
)
_WORDS = (
    "a",
    "sea",
    "c0",
    "c*",
    "",
    " ",
    "\n",
    "\x1b[2J",
    "\udcff",
    "[red]",
    "{0}",
    "%s",
    "-x",
    "é" * 300,
    "None",
    "[",
)
# Plausible values of options that take a text, by name; others are words.
_TEXTS = {
    "floor": ("fired", "0.5", "0"),
    "site": ("resid_post.1", "resid_post.9", "attn_out.0"),
    "sites": ("resid_post.1", "resid_post.0,resid_post.1"),
    "normalize": ("none", "layernorm", "rmsnorm"),
    "layers": ("auto", "0", "0,1", "9"),
    "method": ("auto", "plain", "mass_mean"),
    "aggregate": ("ema:0.3", "each", "mean", "max", "rolling_mean:3", "rolling_logit:4"),
    "on": ("assistant", "user", "system"),
    "special_tokens": ("bos", "none", "tokenizer"),
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("cpu", "cpu", "cpu", "cuda", "meta", "cuda:7"),
    "prompt": ("a sea", ""),
    "text": ("a sea",),
    "text_field": ("text", "text", "id", "messages"),
    "id_field": ("id", "text"),
    "unit": ("token", "document"),
    "by": ("concept", "token"),
    "host": ("127.0.0.1", "127.0.0.1", "nowhere.invalid", "::"),
    "features": ("0", "0-3", "3-0"),
    "concept": ("c0", "c1", "c*"),
    "watch": ("c0", "c1"),
    "stop_on": ("c0", "c1:0.5"),
    "holdout": ("group=g", "author=a", "group", "=", "group="),
}
_SMALL = {  # numbers of which large ones only take long, or start what is not meant
    "max_new_tokens": ("1", "3", "0", "-1", "x"), "epochs": ("1", "0", "x"), "steps": ("1", "0", "x"),
    "threads": ("0", "1", "-1", "x"), "ray": ("0", "-1", "x"), "resamples": ("20", "0", "-3"),
    "port": ("0", "-1", "70000", "x"), "generate": ("0", "-1", "1"), "at_once": ("1", "0", "-1"),
    "max_tokens": ("3", "0", "-1"), "drain_seconds": ("0", "-1", "x"), "rank": ("1", "0", "-1"),
    "ordinary": ("0", "1", "-1"),
}  # fmt: skip
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "plain": {},
    "no home": {"HOME": None, "XDG_CACHE_HOME": None},
    "home cannot be made": {"HOME": "/proc/none", "XDG_CACHE_HOME": None},
    "narrow": {"COLUMNS": "12", "LINES": "3"},
    "ascii": {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    "dumb": {"TERM": "dumb", "NO_COLOR": "1"},
    "ranks": {"RANK": "0", "WORLD_SIZE": "2"},
    "wrong rank": {"RANK": "x"},
}
STREAMS = (*["plain"] * 9, "stdin closed", "stdin has documents", "stdout closed", "nobody reads", "full")
LIMITS = (*[""] * 9, "file size", "memory", "files")
SIGNALS = (*[""] * 9, "INT", "TERM")


@dataclass(frozen=True)
class Case:
    """A command line and all around it.

    - `command`: as (`analyze`,) or (`pack`, `merge`); `words`: arguments and options, each with its value
    - `files`: kinds by name, to be put into the folder that the command runs in; `broken`: those changed, by what seed
    - `environment`, `streams`, `limit`: of ENVIRONMENTS, STREAMS, LIMITS; `signal` after `seconds`
    """

    command: tuple[str, ...]
    words: tuple[tuple[str, ...], ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    environment: str = "plain"
    streams: str = "plain"
    limit: str = ""
    signal: str = ""
    seconds: float = 0.0

    @property
    def arguments(self) -> list[str]:
        """What `sys.argv` has behind the program."""
        return [*self.command, *(part for word in self.words for part in word)]

    def line(self) -> str:
        """The command line as a shell takes it, with what is around it."""
        variables = ENVIRONMENTS[self.environment].items()
        unset = [part for name, value in variables if value is None for part in ("-u", name)]
        given = [f"{name}={shlex.quote(value)}" for name, value in variables if value is not None]
        prefix = " ".join(["env", *unset, *given]) + " " if variables else ""
        words = " ".join(shlex.quote(word) for word in self.arguments)
        around = {
            "streams": self.streams,
            "limit": self.limit,
            "signal": self.signal and f"{self.signal} at {self.seconds:.3f} s",
        }
        files = {name: kind + (" (broken)" if name in self.broken else "") for name, kind in self.files.items()}
        said = [f"{name}: {value}" for name, value in around.items() if value not in ("", "plain")]
        return f"{prefix}probemon {words}   # {'; '.join([*said, f'files: {files}'])}"

    def simpler(self) -> Iterator[Case]:
        """Cases with one thing less."""
        for name, value in (("environment", "plain"), ("streams", "plain"), ("limit", ""), ("signal", "")):
            if getattr(self, name) != value:
                yield replace(self, **{name: value})
        for i in range(len(self.words)):
            yield replace(self, words=self.words[:i] + self.words[i + 1 :])
        for name in self.broken:
            yield replace(self, broken={other: seed for other, seed in self.broken.items() if other != name})


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return every command of the table by its words."""
    found: dict[tuple[str, ...], Any] = {}
    for name, below in group.commands.items():
        inner = getattr(below, "commands", None)
        found |= commands(below, (*path, name)) if inner else {(*path, name): below}
    return found


def draw(rng: Random, table: dict[tuple[str, ...], Any]) -> Case:
    """Draw a case: the arguments that a command needs, one to four more options, some of it odd."""
    path = rng.choice(sorted(table))
    files: dict[str, str] = {}
    words: list[tuple[str, ...]] = []  # arguments in their order, then options
    odd = rng.choice((0.0, 0.0, 0.0, 0.03, 0.15, 0.4))  # how often a value is none that is meant
    options = []
    for parameter in table[path].params:
        if parameter.param_type_name == "argument":
            if parameter.required or rng.random() < 0.6:
                n = rng.choice((1, 1, 2)) if parameter.nargs == -1 else 1
                words += [(_value(path[0], parameter, rng, odd, files),) for _ in range(n) if rng.random() >= odd / 10]
        elif parameter.name not in ("help", "measure"):  # which times the machine for a minute, as it is meant to
            options.append(parameter)
    required = [parameter for parameter in options if parameter.required and rng.random() >= odd / 10]
    more = rng.sample(options, min(len(options), rng.choice((0, 1, 2, 2, 3, 4))))
    for parameter in dict.fromkeys([*required, *more]):
        name = rng.choice([*parameter.opts, *parameter.secondary_opts])
        words.append((name,) if parameter.is_flag else (name, _value(path[0], parameter, rng, odd, files)))
    if rng.random() < odd / 5:
        words.append((rng.choice(("--nonsense", "-", "--", "--help", "-h", "extra")),))
    if rng.random() < odd:
        rng.shuffle(words)
    broken = {name: rng.randrange(1 << 30) for name in files if rng.random() < odd}
    return Case(
        path,
        tuple(words),
        files,
        broken,
        rng.choice(("plain", "plain", *ENVIRONMENTS)),
        rng.choice(STREAMS),
        rng.choice(LIMITS),
        signal=rng.choice(SIGNALS),
        seconds=0.03 + rng.choice((0.0, 0.02, 0.1, 0.3, 1.0)) * rng.random(),
    )


def _value(command: str, parameter: Any, rng: Random, odd: float, files: dict[str, str]) -> str:
    """A value of a parameter, odd with this probability; a file that it names is noted in `files`."""
    name, kind = parameter.name, parameter.type_descriptor.annotation
    is_odd = rng.random() < odd
    if name in _SMALL:
        values = _SMALL[name]
        return rng.choice(values if is_odd else values[:1])
    if name in _TEXTS and not (is_odd and rng.random() < 0.8):
        return rng.choice(_TEXTS[name])
    meant = VALID.get(f"{command} {name}", VALID.get(name))
    if meant or kind is Path:
        pool = meant or (*MADE, "new")
        return _file(rng.choice((*MADE, *ODD) if is_odd else pool), rng, files)
    if kind in (int, float):
        default = parameter.default
        return rng.choice(_NUMBERS) if is_odd or default is None else str(default)
    return rng.choice((*_WORDS, *_NUMBERS) if is_odd else ("a", "sea", "c0"))


def _file(kind: str, rng: Random, files: dict[str, str]) -> str:
    if kind.startswith(("/", "-", "long")):
        return kind
    if kind in ("new", "absent") and rng.random() < 0.5:
        return f"{kind}{len(files)}"
    files[kind] = kind
    return kind
