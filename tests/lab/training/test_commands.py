"""The commands train and states, run as processes on a model folder, killed and resumed."""

import json
import os
import re
import signal
import sys
import time

import pytest

from conftest import make_model
from corpora import make_tokenizer, random_texts
from forked import ended, forked
from lab.training.test_train import rows
from probemon import cli
from probemon.lab.training.state_store import STATE
from probemon.packs.pack import ProbePack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("host")
    make_model(hidden=32).save_pretrained(home / "host")
    make_tokenizer().save_pretrained(home / "host")
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(30)))
    return home


@pytest.fixture
def begin(folder, tmp_path):
    """Begins a command in the folder."""

    def begin(*arguments):
        cache = {"XDG_CACHE_HOME": str(folder / "cache")}
        return forked(arguments, out=tmp_path / "out", errors=tmp_path / "errors", cwd=folder, **cache)

    return begin


@pytest.fixture
def run(begin, tmp_path):
    """Runs a command to its end, which is to be a good one; returns what it printed."""

    def run(*arguments):
        assert ended(begin(*arguments)) == 0, (tmp_path / "errors").read_text()
        return (tmp_path / "out").read_text()

    return run


def test_train_writes_a_pack_and_a_report_with_its_caveats(folder, run):
    given = ("train", "host", "rows.jsonl", "--out", "letters", "--ordinary", "0", "--layers", "0,1")
    said = run(*given)
    pack = ProbePack.open(folder / "letters", verify=True)
    assert pack.manifest["host"]["model_id"] == "host" and pack.n_probes == 2
    assert "letters: letters, 2 probes; report in letters.html" in said
    assert "No ordinary text was used: of 100 of your texts without it" in said
    heads = "read by threshold finds in other text near misses of 100 ordinary texts worst kind"
    (shown,) = [line for line in said.splitlines() if line.startswith("concept") and "threshold" in line]
    assert shown.split() == ["concept", *heads.split()]
    page = (folder / "letters.html").read_text()
    assert "<svg" in page and "over the threshold" in page and "<script" not in page
    again = json.loads(run(*given, "--json", "--overwrite"))
    assert again["concepts"] == pack.manifest["quality"]["concepts"]
    assert sorted(path.name for path in folder.iterdir()) == ["cache", "host", "letters", "letters.html", "rows.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "host", "row.jsonl", "--out", "x"), "did you mean rows.jsonl?"),
        (("train", "host", "rows.jsonl", "--out", "x", "--layers", "9"), "the model's are 0 to 2"),
        (("train", "host", "rows.jsonl", "--out", "x", "--aggregate", "emo:0.3"), "did you mean"),
        (("train", "host", "rows.jsonl", "--out", "host"), "exists"),
        (("states", "host", "rows.jsonl", "--out", "x", "--sites", "layer 3"), "is not supported"),
        (
            ("states", "host", "rows.jsonl", "--out", "x", "--sites", "resid_post.2", "--budget", "nan"),
            "--budget is nan",
        ),
        (("train", "host", "rows.jsonl", "--out", "x", "--budget", "inf"), "--budget is inf"),
        (("train", "host", "rows.jsonl", "--out", "x", "--holdout", "far"), "--holdout is 'far': give FIELD=VALUE"),
        (("train", "host", "rows.jsonl", "--out", "x", "--holdout", "author="), "--holdout is 'author=': give FIELD"),
        (
            ("train", "host", "rows.jsonl", "--out", "x", "--ordinary", "0", "--holdout", "author=a2"),
            "no example has author 'a2', which is to be held out",
        ),
        (
            ("states", "host", "rows.jsonl", "--out", "x", "--sites", "resid_post.2", "--budget", "1e-10"),
            "--budget is 1e-10: give a number of GB, one byte (1e-09) or more",
        ),
        (
            ("states", "host", "rows.jsonl", "--out", "x", "--sites", "resid_post.2", "--budget", "1e-9"),
            "the budget is 1 byte (1e-09 GB), and the states of one token take 128 bytes (1.28e-07 GB): give that or",
        ),
        (
            ("states", "host", "rows.jsonl", "--out", "x", "--sites", "resid_post.2,resid_post.2"),
            "the site 'resid_post.2' is named twice: name it once",
        ),
        (("train", "host", "rows.jsonl", "--out", "x", "--layers", "1,resid_post.1"), "'resid_post.1' is named twice"),
    ],
)
def test_errors_are_one_line_with_status_2(folder, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(sys, "argv", ["probemon", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and len(error.splitlines()) == 1 and said in error
    assert not (folder / "x").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--out /proc/none/x", "/proc/none/x cannot be written: nothing can be written in /proc ("),
        ("--out loop/x", "loop is a link that leads nowhere"),
        ("--out x --report /proc/none/x.html", "the report /proc/none/x.html cannot be made: nothing can be written"),
        ("--out x --report loop/x.html", "loop is a link that leads nowhere"),
        ("--out x --report x", "the report x and the pack x are inside one another"),
        ("--out x --report x/x.html", "the report x/x.html and the pack x are inside one another"),
        ("--out x --report ./beside/../x", "are inside one another"),
        ("--out new/x --report new", "the report new and the pack new/x are inside one another"),
        ("--out x --report host", "the report host exists and is not a file"),
        ("--out x --report /dev/null", "the report /dev/null exists and is not a file"),
    ],
)
def test_unwritable_output_is_reported_before_a_model_is_loaded(folder, monkeypatch, capsys, more, said):
    monkeypatch.chdir(folder)
    if not os.path.lexists("loop"):
        os.symlink("loop", "loop")
    monkeypatch.setattr("probemon.lab.cli.train.load_aloud", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "argv", ["probemon", "train", "host", "rows.jsonl", *more.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    os.unlink("loop")
    error = capsys.readouterr().err
    assert ended.value.code == 2 and len(error.splitlines()) == 1 and said in error


def test_killed_states_command_resumes_to_the_same_bytes(folder, begin, run):
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in random_texts(3000, longest=60)))
    given = ("states", "host", texts, "--sites", "resid_post.2", "--json", "--out")
    child = begin(*given, "killed")
    while _texts_done(folder / "killed") < 1000:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    before = _texts_done(folder / "killed")
    assert 0 < before < 3000
    for name in ("killed", "whole"):
        assert json.loads(run(*given, name))["texts"] == 3000
    less = run("states", "host", "rows.jsonl", "--sites", "resid_post.2", "--budget", "0.0001", "--out", "less")
    assert re.search(r"the budget had no room for \d+ tokens more", less)
    for path in sorted((folder / "whole").iterdir()):
        assert path.read_bytes() == (folder / "killed" / path.name).read_bytes(), path.name


def _texts_done(folder):
    try:
        return json.loads((folder / STATE).read_text())["texts"]
    except (OSError, ValueError):
        return 0
