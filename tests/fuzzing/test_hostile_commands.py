"""A random sample of command lines ends as commands should, and faults are detected."""

import os
import sys
from random import Random

import pytest

from fuzzing.command_lines import Case, draw
from fuzzing.command_runs import TABLE, Runs, judge
from probemon.cli import app as cli

N_CASES = 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("commands") / "runs")


@pytest.mark.parametrize("first", range(0, N_CASES, 10))
def test_every_command_line_ends_with_a_status_and_a_line(runs, first):
    """More of them: scripts/benchmarks/fuzz_commands.py."""
    for number in range(first, first + 10):
        case = draw(Random(f"sample {number}"), TABLE)
        trouble = judge(case, runs.run(case))
        assert trouble is None, f"{trouble}\n{case.line()}"


def test_a_case_is_the_same_for_the_same_seed():
    first, again = ([draw(Random(f"{n}"), TABLE).line() for n in range(300)] for _ in range(2))
    assert first == again
    assert {draw(Random(f"{n}"), TABLE).command for n in range(1000)} == set(TABLE)


FILES = {"host": "host", "pack": "pack", "rows.jsonl": "rows.jsonl"}
NEW, SITE = ("--out", "new"), ("--sites", "resid_post.1")


@pytest.mark.parametrize(
    ("case", "status", "said"),
    [
        (Case(("inspect",), (("pack",),), {"pack": "pack"}), 0, ""),
        (Case(("inspect",), (("absent",),)), 2, "probemon: "),
        (Case(("inspect",), (("pack",),), {"pack": "pack"}, streams="stdout closed"), 0, ""),
        (Case(("inspect",), (("pack",),), {"pack": "pack"}, streams="nobody reads"), 141, ""),
        (
            Case(("inspect",), (("pack",),), {"pack": "pack"}, streams="full"),
            2,
            "probemon: standard output cannot be used: No space left on device\n",
        ),
        (Case(("report",), (("--help",),), streams="nobody reads"), 141, ""),
        (Case(("concepts",), (("pack",),), {"pack": "pack"}, environment="ascii"), 0, ""),
        (Case(("analyze",), (("host",), ("pack",), ("-",), NEW), FILES, streams="stdin closed"), 2, "no documents"),
        (Case(("states",), (("host",), ("rows.jsonl",), SITE, NEW), FILES, limit="file size"), 2, "File too large"),
    ],
)  # fmt: skip
def test_closed_or_full_stream_ends_a_command_in_one_line(runs, case, status, said):
    ended = runs.run(case)
    assert judge(case, ended) is None, ended
    assert ended.status == status and said in ended.error and ended.error.count("\n") == (1 if status == 2 else 0), (
        ended
    )


def goes_on_for_ever():
    while True:
        pass


def two_lines():
    print("probemon: one\nprobemon: two", file=sys.stderr)
    sys.exit(2)


def untyped():
    raise KeyError("what")


@pytest.mark.parametrize(
    ("main", "said"),
    [
        (untyped, "a traceback"),
        (two_lines, "status 2 with 2 lines"),
        (lambda: sys.exit(3), "status 3"),
        (lambda: os.kill(os.getpid(), 9), "status -9"),
        (goes_on_for_ever, "it went on"),
    ],
)
def test_judge_detects_every_kind_of_trouble(runs, monkeypatch, main, said):
    monkeypatch.setattr(cli, "main", main)
    monkeypatch.setattr("fuzzing.command_runs.MOST_SECONDS", 0.2)
    case = Case(("inspect",), (("pack",), ("--json",)), {"pack": "pack"}, environment="narrow")
    assert said in judge(case, runs.run(case))
    smallest = runs.minimised(case)
    assert smallest.words == () and smallest.environment == "plain" and "probemon inspect" in smallest.line()
