"""An experiment is its file: the same bits again, other bits by another seed, errors before a model is loaded."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

import bem_experiments
from arrangements import tokenizer
from bem_oracle import make_host
from probemon.adapters.bem import BemConfig
from probemon.adapters.bem.losses import LossWeights
from probemon.adapters.bem.training import TrainSettings
from probemon.errors import ConfigError

FOLDER = Path(bem_experiments.__file__).with_suffix("")
TINY = {
    "name": "tiny",
    "rows": "rows.jsonl",
    "seeds": [0],
    "lora_rank": 6,
    "config": {"form": "kronecker", "terms": 1, "start": "svd", "level": "token", "width": 4, "spectral_cap": None},
    "train": {"n_steps": 4, "lr": 0.02},
    "weights": {"kl": 0.0, "orthogonality": 0.1},
    "answers": {"requests": 12, "tokens": 2},
    "rounds": 6,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    make_host().save_pretrained(folder / "host")
    tokenizer().save_pretrained(folder / "host")
    rows = [{"prompt": f"w1 w{20 + i}", "answer": f"w{3 + i} w11", "group": f"d{i}"} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write(place, name, **changes):
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**TINY, "model": str(place / "host"), **changes}))
    return file


@pytest.mark.filterwarnings("ignore")  # PEFT asks transformers by older names
def test_one_file_gives_the_same_bits_again_and_another_seed_others(place):
    file = write(place, "tiny")
    first, again = bem_experiments.run(file), bem_experiments.run(file)
    assert first["result"] == again["result"]
    for name in ("tiny.yaml", "rows.jsonl"):
        assert first["files"][name] == hashlib.sha256((place / name).read_bytes()).hexdigest()
    (seed,) = first["result"]["seeds"]
    (other,) = bem_experiments.run(write(place, "other", seeds=[1]))["result"]["seeds"]
    assert seed["sha256"] != other["sha256"] and seed["nats"]["bare"] > 0
    assert set(seed["nats"]) == {"bare", "lora", "routed"} and set(seed["gates"]) == {
        "parameters",
        "operations",
        "memory",
    }
    lora = 6 * ((16 + 16) + (24 + 16)) * 2  # attention outputs and MLPs of two layers
    assert seed["costs"]["lora"]["parameters"] == lora and seed["gates"]["parameters"][0] == "passed"
    assert 2 * lora <= seed["costs"]["lora"]["operations"] <= 3 * lora  # a multiply-add for each, and sums
    assert seed["config"]["terms"] >= 1 and seed["config"]["start"] == "svd"


@pytest.mark.filterwarnings("ignore")
def test_answers_are_timed_one_after_another(place):
    found = bem_experiments.run(write(place, "timed"))["measured"]
    answers = found["answers"]
    assert answers["requests"] == 12 and answers["tokens"] == 2
    low, high = answers["p50_ms"][1:]
    assert low <= answers["p50_ms"][0] <= high <= answers["p95_ms"][0] or answers["p95_ms"][1] is None
    mean = 60_000 / answers["requests_a_minute"]
    assert 0.3 * answers["p50_ms"][0] < mean and 0 < answers["memory"] < 1
    assert answers["holds"]["requests_a_minute"] == (answers["requests_a_minute"] > 1000)
    assert found["forward"]["over_bare"][0] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sedes": [1]}, "did you mean 'seeds'"),
        ({"config": {"form": "film", "rnk": 2}}, "did you mean 'rank'"),
        ({"train": {"n_steps": 0}}, "n_steps is 0"),
    ],
)
def test_invalid_files_are_refused(place, changes, words):
    with pytest.raises(ConfigError, match=words):
        bem_experiments.run(write(place, "wrong", **changes))
    (place / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="is no experiment"):
        bem_experiments.read(place / "list.yaml")
    (place / "short.yaml").write_text("name: only this")
    with pytest.raises(ConfigError, match="missing"):
        bem_experiments.read(place / "short.yaml")


@pytest.mark.parametrize("variant", ["pt1", "pt2", "pt3", "pt4"])
def test_each_variant_has_a_file_whose_settings_are_valid(variant):
    one = bem_experiments.read(FOLDER / f"{variant}.yaml")
    config = BemConfig.from_dict(one.config)
    assert config.form == {"pt1": "head_groups", "pt2": "rank_mask", "pt3": "kronecker", "pt4": "film"}[variant]
    TrainSettings(**one.train)
    LossWeights(**one.weights)
    assert (FOLDER / one.rows).is_file() and len(one.seeds) >= 3
