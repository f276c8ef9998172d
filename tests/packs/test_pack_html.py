"""A pack in a notebook shows its own counts, and its names only as text."""

import numpy as np
import pytest
import torch

from conftest import make_pack
from probemon import ProbePack
from probemon.packs.group import PackGroup
from static_page import HOSTILE, harmful, read


def rows_of(page):
    cells = [text for _, _, text in page.of("td")]
    return [tuple(cells[i : i + 3]) for i in range(0, len(cells), 3)]


@pytest.mark.parametrize("name", ["wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp"])
def test_shipped_pack_is_shown_with_its_counts(name):
    pack = ProbePack.open(f"probes/{name}").with_alert_set("rate_0.01")
    page = read(pack._repr_html_())
    counts = [(level, str(n), str(n)) for level, n in pack.manifest["counts_per_level"].items()]
    assert rows_of(page) == counts and sum(int(n) for _, n, _ in counts) == pack.n_probes
    assert f"ProbePack {name}" in page.text and f"{pack.n_probes} probes" in page.text
    assert "HuggingFaceTB/SmolLM2-135M-Instruct, at resid_post.15" in page.text
    assert "Alert thresholds: precision_0.9, rate_0.01 (in force)" in page.text
    roots = {text for _, _, text in page.of("b")} - {"rate_0.01"}
    assert roots == {pack.concepts[root]["name"] for root in pack.tree.roots}
    n_below = sum(1 for probe in range(pack.n_probes) if pack.tree.path(probe)[0] == pack.find("whole.n.02")) - 1
    assert f"whole {n_below} › " in page.text


def test_missing_thresholds_are_counted_by_level(model, tmp_path):
    alert = torch.full((40,), 0.3)
    alert[::3] = float("nan")
    pack = make_pack(tmp_path / "p", model, alert_threshold=alert)
    known = ~np.isnan(pack.alert_threshold.numpy())
    expected = [
        (str(level), str(int((pack.tree.level == level).sum())), str(int((known & (pack.tree.level == level)).sum())))
        for level in np.unique(pack.tree.level)
    ]
    page = read(pack._repr_html_())
    assert rows_of(page) == expected and "one set without a name" in page.text


@pytest.mark.parametrize("named", [{}, {"model_id": None}, {"model_id": "org/<b>"}])
def test_model_is_named_as_the_pack_states_it(model, tmp_path, named):
    pack = make_pack(tmp_path / "p", model, host={"hidden_size": 16, "n_layers": 3, **named})
    name = named.get("model_id") or "a model that is not stated"
    assert f" MB) for {name}, at resid_post.1" in read(pack._repr_html_()).text


def test_concept_names_are_shown_as_text(model, tmp_path):
    names = [name for name in HOSTILE if not harmful(name, "") and len(name) < 200]
    concepts = [{"id": f"c{i}", "name": names[i % len(names)], "parents": []} for i in range(40)]
    page = read(make_pack(tmp_path / "p", model, concepts=concepts)._repr_html_())
    assert len(names) > 5 and [text for _, _, text in page.of("b")] == [names[i % len(names)] for i in range(40)]


def test_large_pack_shows_the_top_and_counts_the_rest(model, tmp_path):
    n, long = 3000, "é" * 300
    concepts = [{"id": f"c{i}", "name": f"{long}{i}", "parents": [] if i < 100 else [f"c{i % 100}"]} for i in range(n)]
    weights = {"w1": torch.zeros(n, 1, 16), "b1": torch.zeros(n, 1)}
    alert = torch.full((n,), 0.3)
    pack = make_pack(
        tmp_path / "p", model, n=n, concepts=concepts, weights=weights, alert_threshold=alert, golden_hidden=None
    )
    page = read(pack._repr_html_())
    assert len(page.of("li")) == 40 and "and 60 more roots" in page.text and page.text.count("and 17 more") == 40
    assert page.of("b")[0][2] == f"{'é' * 60}… (301 characters)"


def test_several_packs_are_shown_one_after_another(model, tmp_path):
    packs = {f"p{i}": make_pack(tmp_path / f"p{i}", model, name=f"p{i}", seed=i, n=10 + i) for i in range(10)}
    page = read(PackGroup(packs)._repr_html_())
    assert [f"{10 + i} probes" in page.text for i in range(10)] == [True] * 8 + [False] * 2
    assert "and 2 more packs" in page.text
