"""Hidden states unlike those of the calibration are reported, however and with whatever else they are scored."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.core.familiarity import Familiar
from probemon.core.inputs import prepare_input
from probemon.core.scores import unlike
from probemon.engine.far_states import FarStates
from probemon.errors import ConfigError, PackCorrupt, PackError
from probemon.monitor.summary import summarise
from probemon.packs.copies import copy_pack
from probemon.packs.edit import merge, subset
from probemon.packs.tensors import familiar_of, familiar_tensors

PACK = ProbePack.open("probes/wordnet-smollm2-135m")


def states(n, seed, directions=5, width=24):
    """Random states that vary along a few directions, and little elsewhere."""
    g = torch.Generator().manual_seed(seed)
    along = torch.randn(directions, width, generator=torch.Generator().manual_seed(1))
    return torch.randn(n, directions, generator=g) @ along + 0.1 * torch.randn(n, width, generator=g) + 2.0


def test_residual_equals_that_of_principal_components():
    fitted, held_out = states(2000, 2), states(1000, 3)
    familiar = Familiar.of(fitted, held_out, n_components=5)
    x = fitted.double().numpy()
    _, _, components = np.linalg.svd(x - x.mean(0), full_matrices=False)
    y = held_out.double().numpy() - x.mean(0)
    residual = ((y - y @ components[:5].T @ components[:5]) ** 2).sum(1)
    assert familiar.limit == pytest.approx(np.quantile(residual, 0.99), rel=0.02)
    assert int(familiar.far(held_out).sum()) == 10
    # As far along the components as you like, and it is familiar; a little elsewhere, and it is not.
    along = 100 * torch.from_numpy(components[:5]).float() + fitted.mean(0)
    across = torch.from_numpy(components[5:10]).float() * familiar.limit**0.5 * 1.5 + fitted.mean(0)
    assert familiar.far(across).tolist() == [1] * 5
    assert Familiar(familiar.mean, torch.from_numpy(components[:5]), familiar.limit).far(along).tolist() == [0] * 5
    assert familiar.far(torch.full((1, 24), torch.nan)).tolist() == [0]


def test_familiarity_is_reproducible_and_independent_of_the_batch():
    a, b = (Familiar.of(states(500, 2), states(300, 3)) for _ in range(2))
    assert torch.equal(a.basis, b.basis) and a.limit == b.limit and len(a.basis) == 12  # half of the width
    many, fast = states(400, 4), FarStates(a, torch.device("cpu"))
    few = FarStates(a, torch.device("cpu"), pytest.importorskip("probemon.engine.kernels.numba_inputs").far_few)
    many[::7] *= torch.rand(58, 1, generator=torch.Generator().manual_seed(6)) * 2
    # On the limit itself, as nearly as fp32 can say.
    along = (many - a.mean) @ a.basis.float().T @ a.basis.float()
    off = many - a.mean - along
    many[1::7] = (a.mean + along + off * (a.limit**0.5 / off.norm(dim=1, keepdim=True)))[1::7]
    alone = torch.cat([fast(one[None]) for one in many])
    assert torch.equal(a.far(many), alone) and torch.equal(fast(many), alone) and 20 < int(alone.sum()) < 100
    for at in range(0, 400, 8):
        assert torch.equal(few(many[at : at + 8]), alone[at : at + 8])
    for one in (fast, few):
        assert one(torch.full((1, 24), torch.inf)).tolist() == one(torch.full((1, 24), torch.nan)).tolist() == [0]


@pytest.mark.parametrize(
    ("n", "n_held_out", "n_components", "named"),
    [(12, 100, None, "12 states"), (500, 99, None, "99 held-out"), (500, 100, 24, "n_components"), (9, 100, 0, "0")],
)
def test_too_few_states_are_refused(n, n_held_out, n_components, named):
    with pytest.raises(ConfigError, match=named):
        Familiar.of(states(n, 1), states(n_held_out, 2), n_components)


def test_text_with_over_5_percent_unfamiliar_tokens_is_reported():
    assert unlike(5, 100) == "" and unlike(2, 10) == "" and unlike(0, 0) == ""
    assert unlike(6, 100).startswith("6 of 100 tokens (6%) are unlike the text that this pack was calibrated on")


def with_familiar(path, familiar, **spec):
    concepts = [{"id": f"c{i}", "name": f"c{i}", "parents": []} for i in range(2)]
    return ProbePack.write(
        path,
        name="random",
        concepts=[{**concept, "id": spec.get("prefix", "") + concept["id"]} for concept in concepts],
        weights={"w1": torch.randn(2, 1, 24), "b1": torch.zeros(2, 1)},
        score_rule="independent",
        inputs=[{"site": "resid_post.0", "norm": "rmsnorm", "eps": 1e-6}, {"site": "resid_post.1"}],
        input_index=torch.tensor([0, 1]),
        host={"model_id": "none"},
        licence="CC0-1.0",
        card="Random.",
        familiar=familiar,
    )


def test_every_way_of_scoring_reports_it_and_derived_packs_keep_it(tmp_path):
    fitted, held_out = states(500, 2), states(300, 3)
    normed = prepare_input(fitted, PACK.inputs[0], torch.float32)
    familiar = Familiar.of(normed, prepare_input(held_out, PACK.inputs[0], torch.float32), 5)
    pack = with_familiar(tmp_path / "pack", [familiar, None])
    assert pack.familiar[1] is None and torch.equal(pack.familiar[0].basis, familiar.basis)
    g = torch.Generator().manual_seed(7)
    hidden = {"resid_post.0": states(40, 5), "resid_post.1": torch.randn(40, 24, generator=g)}
    hidden["resid_post.0"][::4] = torch.randn(10, 24, generator=g)
    hidden["resid_post.0"][1, 0] = torch.nan
    expected = pack.familiar[0].far(prepare_input(hidden["resid_post.0"], PACK.inputs[0], torch.float32))
    assert expected[::4].tolist() == [1] * 10 and int(expected.sum()) < 14
    for kwargs in ({}, {"impl": "reference"}, {"strategy": "exhaustive"}, {"audit_rate": 1.0}):
        manager = DynamicProbeManager(pack, **kwargs)
        for n_prompt in (40, 20):
            coverage = manager.score_tokens(hidden, n_prompt).coverage
            assert coverage.far.tolist() == expected.tolist() and coverage.unseen[1] and coverage.far[1] == 0
        assert coverage.totals()["far"] == int(expected.sum())
        with torch.autocast("cpu", dtype=torch.bfloat16):  # the caller's
            assert manager.score_tokens(hidden).coverage.far.tolist() == expected.tolist()
    other = with_familiar(tmp_path / "other", None, prefix="o")
    both = DynamicProbeManager({"a": pack, "b": other})
    assert both.score_tokens(hidden).coverage.far.tolist() == expected.tolist()
    assert DynamicProbeManager(other).score_tokens(hidden).coverage.far.tolist() == [0] * 40
    kept = subset(pack, tmp_path / "part", ["c1"])
    assert kept.familiar[0].limit == pack.familiar[0].limit
    # Of two packs that were calibrated on different texts nobody knows what both are for.
    twin = with_familiar(tmp_path / "twin", [familiar, None], prefix="t")
    assert merge([pack, twin], tmp_path / "merged", name="merged").familiar[0].limit == pack.familiar[0].limit
    assert merge([pack, other], tmp_path / "unknown", name="unknown").familiar == [None, None]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("familiar_mean@0"),
        lambda t: t.update({"familiar_basis@0": t["familiar_basis@0"].float()}),
        lambda t: t.update({"familiar_basis@0": t["familiar_basis@0"][:, :3]}),
        lambda t: t.update({"familiar_limit@0": torch.tensor([torch.nan])}),
        lambda t: t.update({f"familiar_{name}@2": t[f"familiar_{name}@0"] for name in ("mean", "basis", "limit")}),
        lambda t: t.update({"familiar_mean@": t.pop("familiar_mean@0")}),
    ],
)
def test_broken_familiarity_tensors_are_refused(change):
    tensors = familiar_tensors([Familiar.of(states(500, 2), states(300, 3)), None])
    known = familiar_of(tensors, tensors.__getitem__, 2, 24, "file")
    assert known[0].limit > 0 and known[1] is None
    change(tensors)
    with pytest.raises(PackCorrupt, match="file: "):
        familiar_of(tensors, tensors.__getitem__, 2, 24, "file")


def test_familiarity_of_another_width_is_not_written(tmp_path):
    familiar = Familiar.of(states(500, 2, width=16), states(300, 3, width=16))
    for wrong in ([familiar, None], [None], ["text", None]):
        with pytest.raises(PackError, match="familiar says something of"):
            with_familiar(tmp_path / "pack", wrong)


def test_code_is_unfamiliar_to_a_pack_calibrated_without_code(tmp_path):
    model, tokenizer = load_bundled(torch.float32)
    definitions = [concept["definition"] for concept in PACK.concepts]
    prose = [". ".join(definitions[i::14]) for i in range(14)]  # of some 400 tokens each, which begin once
    code = Path("probemon/core/hierarchy.py").read_text(encoding="utf-8")

    def normed(texts):
        parts = []
        for text in texts:
            ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :400]
            with torch.no_grad():
                hidden = model(ids, output_hidden_states=True).hidden_states[16][0]
            parts.append(prepare_input(hidden, PACK.inputs[0], torch.float32))
        return torch.cat(parts)

    familiar = Familiar.of(normed(prose[:8]), normed(prose[8:12]))
    pack = copy_pack(PACK, tmp_path / "prose", "Calibrated on definitions", {}, familiar=[familiar])
    manager = DynamicProbeManager(pack)
    said = {}
    for name, text in {"prose": prose[12], "more prose": prose[13], "code": code[:1500]}.items():
        with torch.no_grad(), manager.attach(model, tokenizer) as run:
            ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :400]
            model(ids)
        said[name] = summarise(run.result(ids), phase=None).unlike
    assert said["prose"] == said["more prose"] == ""
    assert re.fullmatch(
        r"\d+ of \d+ tokens \(\d+%\) are unlike the text that this pack was calibrated on.*", said["code"]
    )
