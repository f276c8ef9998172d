"""What a newcomer does takes at most three lines, and gives the values of plain torch."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import probemon
from conftest import PAD, make_model, make_pack
from corpora import make_tokenizer

PROMPTS = torch.tensor([[PAD, PAD, 7, 9, 11], [3, 5, 8, 13, 21], [PAD, 4, 4, 6, 7]])
BATCH = {"input_ids": PROMPTS, "attention_mask": (PROMPTS != PAD).long()}
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
OWN = 'import_weights({"mine": (vector, 0.1)}, folder / "mine", site="model.layers.1", normalize="none")\n'
WATCH = "with DynamicProbeManager(pack).attach(model, tokenizer) as run: out = model.generate(**BATCH, **GREEDY)\n"
FRAME = "frame = run.result(out).to_pandas()"


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def do(model, tmp_path):
    """Run at most three lines, and return their variables."""

    def run(lines):
        assert len(lines.strip().splitlines()) <= 3
        generator = torch.Generator().manual_seed(0)
        size = model.config.hidden_size
        found = {name: getattr(probemon, name) for name in probemon.__all__}
        found |= {"model": model, "tokenizer": make_tokenizer(), "folder": tmp_path, "torch": torch, "BATCH": BATCH}
        found |= {
            "GREEDY": GREEDY,
            "LogisticRegression": LogisticRegression,
            "ours": make_pack(tmp_path / "ours", model),
        }
        found |= {
            "vector": torch.randn(size, generator=generator),
            "encoder": torch.randn(size, 4, generator=generator),
        }
        exec(lines, found)
        return found

    return run


def states(model, out, row, layer):
    """The states of a row's tokens but the last, by a plain forward."""
    begin = int((PROMPTS[row] == PAD).sum())
    with torch.no_grad():
        return model(out[row : row + 1, begin:-1], output_hidden_states=True).hidden_states[layer + 1][0]


def check_scores(model, found, concept, layer, weight, bias):
    for row in range(len(PROMPTS)):
        wanted = torch.sigmoid(states(model, found["out"], row, layer) @ weight + bias).numpy()
        own = found["frame"].query("row == @row and concept == @concept").sort_values("position")
        np.testing.assert_allclose(own.score, wanted, atol=1e-5)


def test_own_vector_is_watched_in_a_padded_batch(do, model):
    found = do("pack = " + OWN + WATCH + FRAME)
    check_scores(model, found, "mine", 1, found["vector"], 0.1)
    assert {"token", "path", "threshold", "strength", "fired"} <= set(found["frame"].columns)
    assert found["frame"].pivot_table(index="concept", columns="position", values="score").shape == (1, 9)


def test_probes_of_two_layers_are_one_pack(do, model):
    found = do(
        'pack = import_weights({"a": (vector, 0.1), "b": (vector, 0.2)}, folder / "two", normalize="none",'
        ' site={"a": "resid_post.0", "b": "blocks.1.hook_resid_post"})\n' + WATCH + FRAME
    )
    check_scores(model, found, "a", 0, found["vector"], 0.1)
    check_scores(model, found, "b", 1, found["vector"], 0.2)


def test_sae_features_are_probes(do, model):
    features = "{f'f{i}': (encoder[:, i], 0.0) for i in range(4)}"
    made = f'pack = import_weights({features}, folder / "sae", site="resid_post.1", normalize="none")\n'
    found = do(made + WATCH + FRAME)
    for i in range(4):
        check_scores(model, found, f"f{i}", 1, found["encoder"][:, i], 0.0)


def test_two_packs_are_watched_together_while_sampling(do, model):
    sampling = WATCH.replace("pack)", "[ours, pack])").replace("**GREEDY", '**{**GREEDY, "do_sample": True}')
    found = do("pack = " + OWN + sampling + FRAME)
    check_scores(model, found, "mine:mine", 1, found["vector"], 0.1)
    assert any(concept.startswith("random:c") for concept in found["frame"].concept)


def test_states_of_generated_tokens_are_kept(do, model):
    found = do(
        "with DynamicProbeManager(ours).attach(model, tokenizer,"
        ' followers=[KeepStates(folder / "kept", ["resid_post.1"])]): out = model.generate(**BATCH, **GREEDY)\n'
        'kept = read_states(folder / "kept")'
    )
    kept = found["kept"]
    for row in range(len(PROMPTS)):
        at = (kept["row"] == row).nonzero()[:, 0]
        at = at[kept["position"][at].argsort()]
        torch.testing.assert_close(kept["resid_post.1"][at], states(model, found["out"], row, 1))


def test_states_of_texts_train_a_classifier(do, model):
    found = do(
        'rows = [{"text": "the sea", "labels": ["sea"]}, {"text": "a house", "not": ["sea"]}]\n'
        'found = collect(model, tokenizer, rows, folder / "states", sites=["resid_post.0", "resid_post.1"])\n'
        "probe = LogisticRegression(max_iter=9999).fit("
        'found.states("resid_post.1")[torch.arange(14)], found.known[:, 0])'
    )
    ids = torch.tensor([[1, *found["tokenizer"]("the sea", add_special_tokens=False)["input_ids"]]])
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True).hidden_states[2][0, 1:]
    np.testing.assert_allclose(found["found"].states("resid_post.1")[torch.arange(7)], wanted, atol=1e-5)
    assert found["probe"].coef_.shape == (1, model.config.hidden_size)


def test_own_probe_is_attached_to_a_concept_of_another_pack(do, model):
    found = do(
        "mine = "
        + OWN
        + 'both = attach_below(ours, "c3", mine, folder / "both", score_rule="path",'
        " alert_threshold=0.5)\nscores = DynamicProbeManager(both, load_threshold=0.0).score_all(np_states)".replace(
            "np_states", "vector[None]"
        )
    )
    both, scores = found["both"], found["scores"][0]
    own = torch.sigmoid(found["vector"] @ found["vector"] + 0.1)
    assert both.path(both.find("mine"))[-2:] == ["concept 3", "mine"]
    assert float(scores[both.find("mine")]) == pytest.approx(float(own * scores[both.find("c3")]), abs=1e-5)


def test_any_function_is_a_probe(do, model):
    found = do(
        'loudness = function_probe(lambda hidden: hidden.norm(dim=-1) / 100, "resid_post.1", "loudness")\n'
        "with DynamicProbeManager(ours).attach(model, tokenizer, followers=[loudness]) as run:"
        " out = model.generate(**BATCH, **GREEDY)\n" + FRAME
    )
    for row in range(len(PROMPTS)):
        own = found["frame"].query("row == @row and concept == 'loudness'").sort_values("position")
        np.testing.assert_allclose(own.score, states(model, found["out"], row, 1).norm(dim=-1) / 100, atol=1e-5)
