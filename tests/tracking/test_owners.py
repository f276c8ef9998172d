"""Only the owning class assigns the attributes of a recording or a generation."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import probemon
from probemon.tracking.align import SequenceColumns
from probemon.tracking.generation import Generation
from probemon.tracking.recording import Recording

PACKAGE = Path(probemon.__file__).parent
ATTRIBUTES = {field.name for owner in (Recording, Generation, SequenceColumns) for field in dataclasses.fields(owner)}
# Callbacks are put there by whoever wants to be called; drafts wait there for the one who reads them.
LISTS_FOR_OTHERS = {"on_failure", "drafts"}
HOLDERS = ("probemon.tracking", "probemon.monitor", ".recordings")  # who may hold one mentions one of these
CHANGING = {"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update", "setdefault", "fill"}


def foreign_writes(tree: ast.AST) -> Iterator[str]:
    """Every change of one of ATTRIBUTES of something else than `self`: assigned, deleted, its items, by `setattr`."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    aliases = {function: set(aliased_names(function)) for function in functions}
    for scope, names in [(tree, set()), *aliases.items()]:
        for node in ast.walk(scope):
            for target in changed(node):
                is_item = isinstance(target, ast.Subscript)
                while isinstance(target, ast.Subscript):
                    target = target.value
                if is_foreign(target) or (is_item and isinstance(target, ast.Name) and target.id in names):
                    yield ast.unparse(node)


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement or expression changes; the list of a method that changes it, as one of its items."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr | ast.comprehension):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    elif isinstance(node, ast.Call):
        function, arguments = node.func, node.args
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in ("setattr", "delattr", "__setattr__") and len(arguments) > 1:
            attribute = arguments[1]
            if isinstance(attribute, ast.Constant):
                targets = [ast.Attribute(arguments[0], str(attribute.value))]
        elif isinstance(function, ast.Attribute) and name in CHANGING:
            changes = getattr(function.value, "attr", "") not in LISTS_FOR_OTHERS
            targets = [ast.Subscript(function.value, ast.Constant(0))] if changes else []
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple | ast.List):
            targets += target.elts
        elif isinstance(target, ast.Starred):
            targets.append(target.value)
        else:
            yield target


def aliased_names(function: ast.AST) -> Iterator[str]:
    """Locals that are an attribute of another object under a shorter name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                yield from (name.id for name, value in pairs if isinstance(name, ast.Name) and is_foreign(value))


def is_foreign(value: ast.AST) -> bool:
    """Whether it is one of ATTRIBUTES of something else than `self`."""
    if not isinstance(value, ast.Attribute) or value.attr not in ATTRIBUTES:
        return False
    return not (isinstance(value.value, ast.Name) and value.value.id == "self")


MODULES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if any(name in path.read_text(encoding="utf-8") for name in HOLDERS)
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_owning_class_writes_recordings_and_generations(path):
    assert not list(foreign_writes(ast.parse(path.read_text(encoding="utf-8"))))


def test_modules_that_hold_recordings_are_checked():
    names = {str(path.relative_to(PACKAGE)) for path in MODULES}
    assert {"tracking/watcher.py", "tracking/recording.py", "monitor/run.py", "adapters/routing/monitor.py"} <= names
    assert {"retained", "earlier", "done", "stop_all", "stop_column", "raising", "frontier"} <= ATTRIBUTES


@pytest.mark.parametrize(
    "line",
    [
        "recording.done = True",
        "recording.output, x = out, 1",
        "self._generation.stop_all |= True",
        "recording.retained[rows] = kept",
        "call = recording.call; call.frontier = 3",
        "kept = recording.retained; kept[rows] = 0",
        "n, stop = 1, generation.stop; stop[0] = True",
        "del recording.scores[:2]",
        "recording.placed.append(placed)",
        "placed = recording.placed; placed.append(1)",
        "setattr(recording, 'earlier', None)",
        "object.__setattr__(generation, 'raising', error)",
        "with opened() as recording.output: pass",
        "for recording.number in range(3): pass",
        "generation.states[0].rule_states[1][2] = 3",
    ],
)
def test_write_by_another_class_is_detected(line):
    assert list(foreign_writes(ast.parse(f"def f(self):\n    {line}" if ";" in line else line)))


@pytest.mark.parametrize(
    "line", ["self.done = True", "self.placed.append(1)", "recording.close()", "done = recording.done; done = 3"]
)
def test_own_writes_and_reads_are_allowed(line):
    assert not list(foreign_writes(ast.parse(f"def f(self):\n    {line}")))
