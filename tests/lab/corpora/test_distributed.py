"""Two workers of a real Ray cluster on this machine give the rows that one process gives."""

import dataclasses
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


def load(in_training=False, seed=0):
    """In the worker, which knows nothing of the tests: a model on a file would be loaded by its name."""
    return make_model(seed=seed).train(in_training), make_tokenizer()


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
    texts = random_texts(60)
    manager = DynamicProbeManager(pack, keep_top_k=5, impl="cpu", audit_rate=0.2)
    local = analyze(
        manager,
        *load(),
        [{"text": text, "id": f"d{i}"} for i, text in enumerate(texts)],
        tmp_path / "local",
        reading=READING,
    )
    ds = ray.data.from_items([{"text": text, "id": f"d{i}"} for i, text in enumerate(texts)])
    told = []
    out = tmp_path / "ray"
    strategy = local.manifest["identity"]["kernel"]["strategy"]
    settings = {"keep_top_k": 5, "impl": "cpu", "audit_rate": 0.2, "strategy": strategy}
    spread = analyze_dataset(ds, job(pack, out, settings=settings), progress=lambda *a: told.append(a))
    assert spread.complete and tables(spread) == tables(local)
    assert sum(n for n, _ in told) == 60 and sum(n for _, n in told) == local.manifest["totals"]["tokens"]
    assert not (out / ".spool").exists()
    with pytest.raises(ConfigError, match="resume=True"):
        analyze_dataset(ds, job(pack, out))
    (out / "shards" / "00003.json").unlink()  # as if it had been interrupted there
    again = analyze_dataset(ds, job(pack, out, settings=settings), resume=True)
    assert tables(again) == tables(local)
    with pytest.raises(ConfigError, match=r"document 0 \(id '0'\) has taken the place of 'd0'"):
        analyze_dataset(["other", *texts[1:]], job(pack, out, settings=settings), resume=True)


@pytest.mark.filterwarnings("ignore")
def test_a_finished_analysis_of_another_job_is_refused(model, pack, tmp_path):
    """No shard is missing, so nothing is left to score; what the folder holds is compared all the same."""
    out = tmp_path / "out"
    made = analyze_dataset(["abc", "cab"], job(pack, out), concurrency=1)
    before = tables(made)
    others = {
        r"host\.weights was": {"load": functools.partial(load, seed=5)},
        r"kernel\.impl was 'cpu', now 'reference'": {
            "settings": {"keep_top_k": 5, "impl": "reference", "audit_rate": 0.2}
        },
    }
    for differs, changes in others.items():
        with pytest.raises(ConfigError, match=f"made otherwise.*{differs}"):
            analyze_dataset(["abc", "cab"], dataclasses.replace(job(pack, out), **changes), concurrency=1, resume=True)
    assert tables(analyze_dataset(["abc", "cab"], job(pack, out), concurrency=1, resume=True)) == before


def late_at_first(row):
    """As a step of the user's own may be, so that later blocks are ready before earlier ones."""
    time.sleep(0.05 if row["at"] < 20 else 0)
    return row


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_is_read_in_the_order_of_its_rows(pack, tmp_path):
    rows = [{"text": f"abc {i}", "at": i} for i in range(100)]
    ds = ray.data.from_items(rows, override_num_blocks=10).map(late_at_first)
    found = analyze_dataset(ds, job(pack, tmp_path / "out"), concurrency=1).documents(["doc_id", "text"]).to_pylist()
    assert found == [{"doc_id": str(i), "text": row["text"]} for i, row in enumerate(rows)]


@pytest.mark.filterwarnings("ignore")
def test_what_a_worker_raises_is_raised_here(pack, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.eval"):
        analyze_dataset(["abc"], job(pack, tmp_path / "out", load=functools.partial(load, True)), concurrency=1)
    with pytest.raises(ConfigError, match="concurrency"):
        analyze_dataset(["abc"], job(pack, tmp_path / "out"), concurrency=0)


@pytest.mark.filterwarnings("ignore")
def test_an_empty_corpus_is_an_analysis_of_nothing(pack, tmp_path):
    found = analyze_dataset([], job(pack, tmp_path / "out"), concurrency=1)
    assert (
        found.complete
        and found.manifest["totals"]["documents"] == 0
        and torch.get_num_threads() == found.manifest["environment"]["threads"]
    )
