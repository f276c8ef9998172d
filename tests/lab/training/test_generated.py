"""Texts that the model writes of a concept: they train and do nothing else, and are the same the next time.

The demo model writes them; what it writes is not judged here, but that it is of use where own examples are few.
"""

import random
import string

import numpy as np
import pytest

from probemon.bundled import load_bundled
from probemon.errors import TrainingError
from probemon.lab.corpora.windows import Reading
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.examples import Example, read_examples
from probemon.lab.training.generated import with_generated
from probemon.lab.training.state_store import TextReader

OWN = {
    "cooking": (
        "Chop the onions and fry them in butter.", "Bring the water to the boil and add the rice.",
        "Roast the carrots with honey and thyme.", "Knead the dough and let it rise under a cloth.",
    ),
    "travel": (
        "The night train to Lisbon leaves at nine.", "Her passport was stamped twice at the border.",
        "They hired a car at the airport.", "The ferry takes six hours and is full.",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def demo():
    return load_bundled()


def concepts(*ids, **more):
    return read_examples([{"id": id, "examples": OWN[id], **more} for id in ids])


def test_a_model_writes_what_a_concept_lacks_and_writes_it_once(demo, tmp_path, monkeypatch):
    examples, file = concepts("cooking", "travel"), tmp_path / "written.json"
    more = with_generated(examples, *demo, n=8, seed=0, file=file)
    written = [example for example in more.texts if example.generated]
    assert more.texts[: len(examples.texts)] == examples.texts and len({example.text for example in written}) == 8
    assert [example.labels for example in written] == [{"cooking": True, "travel": False}] * 4 + [
        {"travel": True, "cooking": False}
    ] * 4
    assert all(example.text.rstrip("\"'”’)")[-1] in ".!?" for example in written)  # whole sentences
    monkeypatch.setattr(type(demo[0]), "generate", None)
    assert with_generated(examples, *demo, n=8, seed=0, file=file) == more
    assert with_generated(examples, *demo, n=4, seed=0, file=file) is examples
    with pytest.raises(TypeError):  # of another seed it would have to write anew
        with_generated(examples, *demo, n=8, seed=1, file=file)
    model, tokenizer = demo
    for owner, name, other in (  # nor of a model that would write otherwise
        (model.generation_config, "top_k", 1),
        (model.config, "rope_parameters", {**model.config.rope_parameters, "rope_theta": 5.0}),
        (tokenizer, "chat_template", "{{ messages[0]['content'] }}"),
    ):
        with monkeypatch.context() as patch, pytest.raises(TypeError):
            patch.setattr(owner, name, other)
            with_generated(examples, *demo, n=8, seed=0, file=file)
    neuron = model.model.layers[3].mlp.down_proj.weight.data[0]
    before = neuron.clone()
    neuron[7] += 1
    with pytest.raises(TypeError):
        with_generated(examples, *demo, n=8, seed=0, file=file)
    neuron.copy_(before)
    assert with_generated(examples, *demo, n=8, seed=0, file=file) == more


def test_one_concept_alone_is_set_against_other_subjects_without_a_word_of_it(demo, tmp_path):
    examples = concepts("cooking", definition="making food, or a letter about a garden")
    more = with_generated(examples, *demo, n=8, seed=0, file=tmp_path / "written.json")
    others = [example for example in more.texts if example.generated and not example.labels["cooking"]]
    assert len(others) == 4 and not any("letter" in other.where or "garden" in other.where for other in others)


def test_what_the_model_wrote_trains_with_all_that_is_like_it_and_tests_nothing(demo):
    model, tokenizer = demo
    rng = random.Random(0)
    own = {
        id: [*texts, *(" ".join(rng.choices(string.ascii_letters, k=9)) for _ in range(9))] for id, texts in OWN.items()
    }
    copy, fresh = OWN["travel"][0], [" ".join(rng.choices(string.ascii_letters, k=9)) for _ in range(9)]
    examples = read_examples([{"id": id, "examples": texts} for id, texts in own.items()]).extended(
        Example(f"written {i}", text, labels={"travel": True}, of_concept=True, generated=True)
        for i, text in enumerate([copy, *fresh])
    )
    data = Dataset.of_examples(examples, TextReader(model, tokenizer, ["resid_post.1"], Reading()), seed=3)
    texts = np.asarray([example.text for example in examples.texts])[data.document]
    assert data.generated.sum() == 10 and set(data.split[data.generated]) == {"train"}
    assert set(data.split[texts == copy]) == {"train"} and set(data.split) == {"train", "calibrate", "test"}


def test_a_concept_is_not_tested_on_what_the_model_wrote_alone(demo):
    model, tokenizer = demo
    examples = concepts("cooking", "travel").extended(
        Example(f"written {i}", f"{i} spoons of flour, {i} eggs.", labels={"cooking": True}, generated=True)
        for i in range(20)
    )
    reader = TextReader(model, tokenizer, ["resid_post.1"], Reading())
    with pytest.raises(
        TrainingError, match=r"'travel' has examples in 4 groups.*give 8 or more, or 4 and let the model"
    ):
        Dataset.of_examples(examples, reader)
    few = read_examples([{"id": "cooking", "examples": OWN["cooking"][:3]}]).extended(examples.texts[8:])
    with pytest.raises(
        TrainingError, match=r"in 3 groups.*give 4 or more, since what the model wrote does not test it"
    ):
        Dataset.of_examples(few, reader)
