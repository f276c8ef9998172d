"""Probes of recurrent states and steps score every token as plain fp64 arithmetic over that sequence alone."""

import copy
import json
import math

import numpy as np
import pytest
import torch

from conftest import PAD, make_model, make_pack, n_hooks
from corpora import make_tokenizer
from host.test_state_sites import steps_alone
from probemon import DynamicProbeManager, ProbePack
from probemon.errors import ConfigError, ModelMismatch, PackCorrupt, PackError, TrainingError, UnsupportedModel
from probemon.host.fingerprint import fingerprint
from probemon.host.recurrent.state_sites import site_width
from probemon.lab.corpora.windows import Reading, Window
from probemon.lab.training.collect import collect
from probemon.packs.diff import pack_diff
from probemon.packs.edit import merge, rename
from recurrent_hosts import BATCH, GREEDY, HOSTS, make_host, states_alone

N = 6
MASK = (BATCH != PAD).long()


def pack_for(folder, host, site, name="probes", **changes):
    """Random linear probes over a site, which has `site_width` values; their inputs are normalised."""
    width = site_width(host, site)
    host_says = {"model_id": "tiny", "n_layers": 2, "fingerprint": fingerprint(host), "hidden_size": 16}
    spec = {
        "name": name,
        "concepts": [{"id": f"{name}{i}", "name": f"{name} {i}", "parents": []} for i in range(N)],
        "weights": {"w1": torch.randn(N, 1, width) / math.sqrt(width), "b1": torch.randn(N, 1) / 4},
        "score_rule": "independent",
        "inputs": [{"site": site, "norm": "rmsnorm", "eps": 1e-9}],
        "host": host_says,
        "licence": "CC0-1.0",
        "card": "Random probes.\n",
        "alert_threshold": torch.full((N,), 0.5),
    }
    return ProbePack.write(folder / name, **{**spec, **changes})


def oracle(pack, exact, ids, site):
    """Scores `[T, N]` of one text alone, in fp64."""
    kind, layer = site.split(".")
    x = states_alone(exact, ids, int(layer)) if kind == "ssm_state" else steps_alone(exact, torch.tensor(ids))
    x = x.double() / torch.sqrt((x.double() ** 2).mean(dim=1, keepdim=True) + 1e-9)
    weights = {name: tensor.double() for name, tensor in pack.weights.items()}
    return torch.sigmoid(x @ weights["w1"][:, 0].T + weights["b1"][:, 0])


def check_rows(pack, exact, site, result, out, n_begin=None):
    """Every seen token has the oracle's scores; those before column `n_begin` were in a cache and are none."""
    worst, spread = 0.0, []
    for row, line in enumerate(out.tolist()):
        first = next(i for i, token in enumerate(line) if token != PAD)
        scores = oracle(pack, exact, line[first:-1], site)
        for i in np.flatnonzero(result.row == row):
            position = int(result.position[i])
            if position == len(line) - 1 or (n_begin is not None and position < n_begin):
                assert result.coverage.unseen[i]
                continue
            assert not result.coverage.unseen[i] and result.scores.active(i).tolist() == list(range(N))
            own = result.scores.active_scores(i)
            worst = max(worst, float(np.abs(own - scores[position - first].numpy()).max()))
            spread.append(own)
    assert worst < 2e-5, worst
    assert np.concatenate(spread).std() > 0.05
    return len(spread)


@pytest.mark.parametrize("site", ["ssm_state.0", "delta.0"])
@pytest.mark.parametrize("kind", HOSTS)
def test_recurrent_scores_equal_the_oracle_with_padding_beams_and_no_cache(tmp_path, kind, site):
    host = make_host(kind)
    exact, pack = copy.deepcopy(host).double(), pack_for(tmp_path, host, site)
    manager = DynamicProbeManager(pack)
    assert pack.scope == ("so far" if site == "ssm_state.0" else "here")
    for options in ({}, {"num_beams": 3, "num_return_sequences": 2}, {"use_cache": False}):
        bare = host.generate(BATCH, attention_mask=MASK, **GREEDY, **options)
        with manager.attach(host) as run:
            out = host.generate(BATCH, attention_mask=MASK, **GREEDY, **options)
        assert torch.equal(out, bare) and n_hooks(host) == 0
        n = check_rows(pack, exact, site, run.result(out), out)
        assert n == (30 if "num_beams" not in options else 60)


def test_offline_equals_online_and_labels_cover_all_tokens_so_far(tmp_path):
    host, tokenizer = make_host("mamba2", vocab_size=100), make_tokenizer()
    pack = pack_for(tmp_path, host, "ssm_state.1")
    manager = DynamicProbeManager(pack)
    texts = [{"text": "abczzabc", "spans": [{"start": 3, "end": 5, "concept": "zed"}]}, {"text": "ab"}]
    collected = manager.collect(host, tokenizer, texts, tmp_path / "states", reading=Reading(special_tokens="none"))
    states = collected.states("ssm_state.1")[torch.arange(10)]
    assert states.shape == (10, 4 * 8 * 6) and states.dtype == torch.float32
    own = DynamicProbeManager(pack).score_all(states).numpy()
    for document, first in ((0, 0), (1, 8)):
        rows = collected.document == document
        ids = torch.from_numpy(collected.token[rows])[None]
        with manager.attach(host) as run, torch.no_grad():
            host(ids)
        online = np.stack([run.result(ids).scores.active_scores(i) for i in range(ids.shape[1])])
        assert np.abs(online - own[first : first + len(online)]).max() < 1e-6
    assert collected.known[:8, 0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert collected.known_so_far()[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, -1, -1]
    with pytest.raises(TrainingError, match="only some tokens are in rows"):
        manager.collect(
            host, tokenizer, [{"text": "abcdefgh" * 9}], tmp_path / "some", budget=20 * 4 * states.shape[1]
        ).known_so_far()


def test_probes_over_all_tokens_so_far_are_not_cut_into_windows(tmp_path):
    """A later window begins with an empty state, and with no attention to what came before it."""
    host, tokenizer = make_host("mamba2", vocab_size=100), make_tokenizer()
    texts, short = ["abcdefgh", "abcdefghabcdefgh"], Reading(window=Window(12, 2), special_tokens="none")
    reason = "16 tokens, more than a window of 12 takes: after it scores of all tokens so far would restart"
    here = pack_for(tmp_path, host, "delta.1", "here")
    for pack, left_out in (
        (pack_for(tmp_path, host, "ssm_state.1", "state"), True),
        (pack_for(tmp_path, host, "resid_post.1", "stated", scope="so far"), True),
        (here, False),
    ):
        manager = DynamicProbeManager(pack)
        for name, reading in (("short", short), ("long", Reading(window=Window(16, 2), special_tokens="none"))):
            analysis = manager.analyze(host, tokenizer, texts, tmp_path / f"{pack.name}-{name}", reading=reading)
            first, second = analysis.documents().column("reason").to_pylist()
            assert first == "" and second.startswith(reason) == (left_out and name == "short")
    assert DynamicProbeManager([here, pack_for(tmp_path, host, "delta.0", "other")]).pack.scope == "here"
    texts = [{"text": text, "spans": [{"start": 0, "end": 1, "concept": "a"}]} for text in texts]
    with pytest.raises(TrainingError, match=reason):
        collect(host, tokenizer, texts, tmp_path / "states", sites=["ssm_state.1"], reading=short)
    collected = collect(host, tokenizer, texts, tmp_path / "residual", sites=["resid_post.1"], reading=short)
    with pytest.raises(TrainingError, match="text 1 took more than one window"):
        collected.known_so_far()


def test_recurrent_states_of_a_bf16_model_are_stored_in_fp32(tmp_path):
    host, tokenizer = make_host("mamba2", vocab_size=100).bfloat16(), make_tokenizer()
    sites = ["resid_post.1", "ssm_state.1", "delta.1"]
    first = collect(host, tokenizer, [{"text": "abcdefgh"}], tmp_path / "s", sites=sites)
    kinds = {site: (first.states(site).dtype, first.states(site).shape) for site in sites}
    assert kinds == {
        "resid_post.1": (torch.bfloat16, (8, 16)),
        "ssm_state.1": (torch.float32, (8, 192)),
        "delta.1": (torch.float32, (8, 4)),
    }
    before = (tmp_path / "s" / "ssm_state.1.safetensors").read_bytes()
    ran = []
    collect(host, tokenizer, [{"text": "abcdefgh"}], tmp_path / "s", sites=sites, progress=ran.append)
    assert (tmp_path / "s" / "ssm_state.1.safetensors").read_bytes() == before and sum(ran) == 8
    first.write_parquet(tmp_path / "states.parquet")
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "states.parquet")
    assert [table.schema.field(site).type.list_size for site in sites] == [16, 192, 4]
    assert np.allclose(table["delta.1"].to_pylist()[3], first.states("delta.1")[torch.tensor([3])][0])


def test_compiled_model_is_read_outside_its_graphs(tmp_path):
    host = make_host("mamba2")
    exact = copy.deepcopy(host).double()
    ids = BATCH[1:2]
    pack = pack_for(tmp_path, host, "ssm_state.1")
    compiled = torch.compile(copy.deepcopy(host), backend="eager")
    with DynamicProbeManager(pack).attach(compiled) as run, torch.no_grad():
        compiled(ids)
        compiled(ids)
    result = run.result(ids, generation=1)
    scores = oracle(pack, exact, ids[0].tolist(), "ssm_state.1")
    own = np.stack([result.scores.active_scores(i) for i in range(5)])
    assert np.abs(own - scores.numpy()).max() < 2e-5


def test_second_turn_is_scored_if_the_first_was_not_watched(tmp_path):
    host = make_host("falcon_h1")
    exact, pack = copy.deepcopy(host).double(), pack_for(tmp_path, host, "ssm_state.1")
    first = host.generate(BATCH[1:2], return_dict_in_generate=True, **GREEDY)
    ids = torch.cat([first.sequences, torch.tensor([[4, 5, 11]])], dim=1)
    with DynamicProbeManager(pack).attach(host) as run:
        out = host.generate(ids, past_key_values=first.past_key_values, **GREEDY)
    assert check_rows(pack, exact, "ssm_state.1", run.result(out), out, n_begin=11) == 4 + 6


def test_packs_of_recurrent_and_residual_sites_need_separate_managers(tmp_path):
    host = make_host("mamba2")
    packs = [pack_for(tmp_path, host, site, site.partition(".")[0]) for site in ("ssm_state.1", "resid_post.1")]
    with pytest.raises(ConfigError, match="a recurrent state and the residual stream"):
        DynamicProbeManager(packs)
    first, second = (DynamicProbeManager(pack).attach(host) for pack in packs)
    with first, second:
        out = host.generate(BATCH, attention_mask=MASK, **GREEDY)
    for run, pack in ((first, packs[0]), (second, packs[1])):
        with DynamicProbeManager(pack).attach(host) as alone:
            host.generate(BATCH, attention_mask=MASK, **GREEDY)
        assert np.array_equal(run.result(out).scores.values, alone.result(out).scores.values)
    assert n_hooks(host) == 0


def test_pack_is_refused_by_models_without_its_site_or_width(tmp_path):
    host = make_host("mamba2")
    manager = DynamicProbeManager(pack_for(tmp_path, host, "ssm_state.1"))
    with pytest.raises(UnsupportedModel, match=r"site 'ssm_state\.1': layer 1 of LlamaForCausalLM"):
        manager.attach(make_model())
    wider = make_host("mamba2", state_size=7)
    with pytest.raises(ModelMismatch, match=r"reads ssm_state\.1 of 192 values, Mamba2ForCausalLM has 224"):
        manager.attach(wider)
    assert n_hooks(wider) == 0


def test_packs_of_different_scopes_are_not_mixed(tmp_path):
    host = make_host("mamba2")
    here = pack_for(tmp_path, host, "resid_post.1", "here")
    so_far = pack_for(tmp_path, host, "resid_post.1", "so-far", scope="so far")
    assert (here.scope, so_far.scope) == ("here", "so far")
    assert "scope" not in json.loads((here.directory / "manifest.json").read_text())
    with pytest.raises(PackError, match=r"scope differs: here \(here\), so far \(so-far\)"):
        merge([here, so_far], tmp_path / "both", name="both")
    assert pack_diff(here, so_far).about["scope"] == ["here", "so far"]
    assert rename(so_far, tmp_path / "renamed", name="renamed").scope == "so far"
    assert "all tokens so far" in so_far._repr_html_() and "all tokens so far" not in here._repr_html_()
    with pytest.raises(PackError, match=r"scope is 'here', and its probes read ssm_state\.1"):
        pack_for(tmp_path, host, "ssm_state.1", "wrong", scope="here")
    states = pack_for(tmp_path, host, "ssm_state.1", "right")
    manifest = json.loads((states.directory / "manifest.json").read_text())
    for scope, words in (("here", "its probes read"), ("everywhere", "expected one of here, so far")):
        (states.directory / "manifest.json").write_text(json.dumps({**manifest, "scope": scope}))
        with pytest.raises(PackCorrupt if scope == "here" else PackError, match=words):
            ProbePack.open(states.directory)


def test_pack_without_a_scope_scores_the_token_alone(tmp_path):
    assert make_pack(tmp_path / "old", make_model()).scope == "here"
