"""YAML that somebody wrote by hand: its value, and the line of each of its parts.

    text = read_yaml(path.read_text(), path.name, ConfigError)
    text.value                           # of dicts, lists, texts, numbers
    text.line(["rules", 0, "above"])     # 12; of what is not there that of what it would be in

JSON is read, too. A key that stands twice is an error, where YAML's own reader loses the first. So is what is no YAML,
or is nested too deeply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from probemon.errors import ProbemonError


@dataclass(frozen=True)
class YamlText:
    """What a text holds. `root`: its node, None of an empty text; `aliases`: the lines at which one stands."""

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
    """Read a text. Raises `error`, which begins with the `name` of its file and names the line where one is known."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        aliases = _look(root, name, error)
        return YamlText(yaml.safe_load(text), root, aliases)
    except error:  # which may be a ValueError, too
        raise
    except RecursionError:
        raise error(f"{name} is nested too deeply: write it flatter") from None
    except yaml.MarkedYAMLError as raised:
        where = "" if raised.problem_mark is None else f", line {raised.problem_mark.line + 1},"
        raise error(f"{name}{where} is no YAML: {' '.join(str(raised.problem or raised).split())}") from None
    except (yaml.YAMLError, ValueError, TypeError) as raised:  # a date that there is not is a ValueError
        raise error(f"{name} is no YAML: {' '.join(str(raised).split())}") from None


def _look(root: Any, name: str, error: type[ProbemonError]) -> tuple[int, ...]:
    """Raise `error` for a key that stands twice; return the lines of aliases."""
    import yaml

    waiting, done, aliases = deque([(root, 0)] if root is not None else []), set[int](), []
    while waiting:
        node, line = waiting.popleft()
        if id(node) in done:  # maybe of what it is in
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
    """Return the line and the node of a part of a node, None where there is none."""
    import yaml

    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line + 1, node.value[step]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == step:
                return key.start_mark.line + 1, value
    return None
