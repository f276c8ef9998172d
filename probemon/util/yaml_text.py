"""Hand-written YAML (or JSON): its value, and the line of each part.

    text = read_yaml(path.read_text(), path.name, ConfigError)
    text.line(["rules", 0, "above"])     # 12; for a missing part, its parent's

Repeated keys are errors: YAML's own reader drops the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from probemon.errors import ProbemonError

_LONGEST = 200  # of a problem


@dataclass(frozen=True)
class YamlText:
    """A parsed text. `root`: its node or None; `aliases`: the lines that use one."""

    value: Any
    root: Any
    aliases: tuple[int, ...]

    def line(self, path: Iterable[str | int]) -> int:
        """Return the line of a part, from 1."""
        node, line = self.root, 1 if self.root is None else self.root.start_mark.line + 1
        for step in path:
            entry = _entry(node, step)
            if entry is None:
                return line
            line, node = entry
        return line


def read_yaml(text: str, name: str, error: type[ProbemonError]) -> YamlText:
    """Read a text. Raises `error` with `name` and the line."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        aliases = _look(root, name, error)
        return YamlText(yaml.safe_load(text), root, aliases)
    except error:
        raise
    except RecursionError:
        raise error(f"{name} is nested too deeply: write it flatter") from None
    except yaml.MarkedYAMLError as raised:
        place = "" if raised.problem_mark is None else f", line {raised.problem_mark.line + 1},"
        raise error(f"{name}{place} is not YAML: {_in_short(raised.problem or raised)}") from None
    except yaml.reader.ReaderError as raised:  # its position is one of the text
        line = text.count("\n", 0, raised.position) + 1
        character = raised.character if isinstance(raised.character, int) else ord(raised.character)
        raise error(f"{name}, line {line}, is not YAML: it has the character U+{character:04X}: remove it") from None
    except (yaml.YAMLError, ValueError, TypeError) as raised:  # an impossible date is a ValueError
        raise error(f"{name} is not YAML: {_in_short(raised)}") from None


def _in_short(problem: object) -> str:
    text = " ".join(str(problem).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _look(root: Any, name: str, error: type[ProbemonError]) -> tuple[int, ...]:
    """Raise `error` for a repeated key; return the aliases' lines."""
    import yaml

    waiting, done, aliases = deque([(root, 0)] if root is not None else []), set[int](), []
    while waiting:
        node, line = waiting.popleft()
        if id(node) in done:
            aliases.append(line)
            continue
        done.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [(item, item.start_mark.line + 1) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                waiting.append((value, line))
                if isinstance(key, yaml.ScalarNode):
                    if key.value in lines:
                        raise error(
                            f"{name}, line {line}: {key.value!r:.80} is in line {lines[key.value]} already: give it"
                            " once"
                        )
                    lines[key.value] = line
    return tuple(sorted(aliases))


def _entry(node: Any, step: str | int) -> tuple[int, Any] | None:
    import yaml

    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line + 1, node.value[step]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == step:
                return key.start_mark.line + 1, value
    return None
