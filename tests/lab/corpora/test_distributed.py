"""Two workers of a local Ray cluster write the rows that one process writes."""

import functools
import os
import time
from pathlib import Path

import pytest
import torch

from conftest import make_model
from corpora import make_tokenizer, random_texts
from probemon import DynamicProbeManager
from probemon.errors import ConfigError
from probemon.lab.corpora.analysis_files import TABLES
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.analyze import analyze
from probemon.lab.corpora.distributed import CorpusJob, analyze_dataset
from probemon.lab.corpora.windows import Reading, Window

ray = pytest.importorskip("ray")
READING = Reading(Window(24, 6), batch_tokens=100, batch_rows=5)


def load(seed=0):
    """In the worker, which knows nothing of the tests: a model on a file would be loaded by its name."""
    return make_model(seed=seed), make_tokenizer()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    paths = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("", "lab/corpora", "support"))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr("probemon.lab.corpora.windows.SHARD_DOCUMENTS", 7)


def tables(analysis):
    opened = Analysis.open(analysis.directory)
    return (
        {name: getattr(opened, name)().to_pydict() for name in TABLES},
        opened.manifest["totals"],
        opened.manifest["identity"],
    )


def job(pack, out, **changes):
    arguments = {
        "model": "tiny",
        "pack": str(pack.directory),
        "out": str(out),
        "load": load,
        "settings": {"keep_top_k": 5, "impl": "cpu", "audit_rate": 0.2},
        "reading": READING,
    }
    return CorpusJob(**{**arguments, **changes})


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_two_workers_give_the_rows_of_one_process(pack, tmp_path, small_shards):
    """In the order of the dataset, though its first blocks are ready last, as a step of the user's own may have it."""

    def late_at_first(row):
        time.sleep(0.2 if row["id"] < "d2" else 0)
        return row

    rows = [{"text": text, "id": f"d{i:02}"} for i, text in enumerate(random_texts(60))]
    manager = DynamicProbeManager(pack, keep_top_k=5, impl="cpu", audit_rate=0.2)
    local = analyze(manager, *load(), rows, tmp_path / "local", reading=READING)
    ds = ray.data.from_items(rows, override_num_blocks=10).map(late_at_first)
    told = []
    out = tmp_path / "ray"
    strategy = local.manifest["identity"]["kernel"]["strategy"]
    settings = {"keep_top_k": 5, "impl": "cpu", "audit_rate": 0.2, "strategy": strategy}
    spread = analyze_dataset(ds, job(pack, out, settings=settings), progress=lambda *a: told.append(a))
    assert spread.complete and tables(spread) == tables(local)
    assert sum(n for n, _ in told) == 60 and sum(n for _, n in told) == local.manifest["totals"]["tokens"]
    assert not (out / ".spool").exists()
    with pytest.raises(ConfigError, match="resume=True"):
        analyze_dataset(rows, job(pack, out))
    (out / "shards" / "00003.json").unlink()  # as if it had been interrupted there
    again = analyze_dataset(rows, job(pack, out, settings=settings), concurrency=1, resume=True)
    assert tables(again) == tables(local)
    with pytest.raises(ConfigError, match=r"document 0 \(id '0'\) has taken the place of 'd00'"):
        analyze_dataset(["other", *rows[1:]], job(pack, out, settings=settings), resume=True)


@pytest.mark.filterwarnings("ignore")
def test_a_finished_analysis_of_another_job_is_refused(pack, tmp_path):
    """No shard is missing, so nothing is left to score; what the folder holds is compared all the same, and what the
    worker raises is raised here.
    """
    out = tmp_path / "out"
    found = analyze_dataset([], job(pack, out), concurrency=1)
    assert (
        found.complete
        and found.manifest["totals"]["documents"] == 0
        and torch.get_num_threads() == found.manifest["environment"]["threads"]
    )
    settings = {"keep_top_k": 5, "impl": "reference", "audit_rate": 0.2}
    other = job(pack, out, load=functools.partial(load, seed=5), settings=settings)
    with pytest.raises(ConfigError, match="with other settings") as refused:
        analyze_dataset([], other, concurrency=1, resume=True)
    assert "host.weights was" in str(refused.value)
    assert "kernel.impl was 'cpu', now 'reference'" in str(refused.value)
    with pytest.raises(ConfigError, match="concurrency"):
        analyze_dataset([], job(pack, tmp_path / "none"), concurrency=0)
