"""The notebooks of examples/ run from a fresh start and print what is committed; what they show is static HTML."""

from pathlib import Path

import nbformat
import pytest

from probemon import ProbePack
from run_examples import EXAMPLES, executed
from static_page import read

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook):
    """By cell, what it printed, and the kinds of what it shows."""
    return [
        [
            (output.output_type, output.text if output.output_type == "stream" else sorted(output.data))
            for output in cell.outputs
        ]
        for cell in code_of(notebook)
    ]


def pages_of(notebook):
    return [
        read(output.data["text/html"])
        for cell in code_of(notebook)
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def committed(request):
    assert request.param.stat().st_size < 200_000
    return request.param.stem, nbformat.read(request.param, as_version=4)


def test_a_notebook_runs_and_prints_what_is_committed(committed, tmp_path, monkeypatch):
    name, notebook = committed
    (tmp_path / "probes").symlink_to(ROOT / "probes")
    (tmp_path / "examples").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    fresh, updates = executed(notebook, tmp_path / "examples")  # raises what a cell raises: their asserts, too
    if fresh.metadata["arithmetic"] == notebook.metadata["arithmetic"]:  # else the demo model writes other words
        assert outputs_of(fresh) == outputs_of(notebook)
    assert [[kind for kind, _ in cell] for cell in outputs_of(fresh)] == [
        [kind for kind, _ in cell] for cell in outputs_of(notebook)
    ]
    assert len(pages_of(fresh)) == len(pages_of(notebook))
    if name == "watch":
        live = [read(data["text/html"]) for data in updates]
        n_tokens = [len(page.tokens()) for page in live[:-1]]
        assert len(n_tokens) >= 3 and n_tokens == sorted(n_tokens) and n_tokens[0] < n_tokens[-1] <= 40
        n_probes = ProbePack.from_pretrained("demo").n_probes
        assert all("Generating" in page.text for page in live[:-1])
        assert f"Coverage: of {n_probes} probes" in live[-1].text
        assert updates[-1]["text/plain"].startswith("Result(") and live[-1].text == pages_of(fresh)[-1].text


def test_what_is_committed_was_run_in_order_and_tells_nothing_of_the_machine(committed):
    _, notebook = committed
    assert [cell.execution_count for cell in code_of(notebook)] == list(range(1, len(code_of(notebook)) + 1))
    text = nbformat.writes(notebook)
    assert not [word for word in ("/tmp/", "/home/", "/root/", "/work/", "stderr", "Traceback") if word in text]
    assert any("assert" in cell.source for cell in code_of(notebook))


def test_there_are_examples_of_watching_of_rules_and_of_a_corpus():
    assert [path.stem for path in NOTEBOOKS] == ["corpus", "rules", "watch"]
