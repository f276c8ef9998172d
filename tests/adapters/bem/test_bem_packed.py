"""Sequences packed in one row behave like separate ones, or are refused if their boundaries are unknown."""

import pytest
import torch

from bem_oracle import FORMS, VOCAB, make_host, randomise
from probemon.adapters.bem import BemConfig, FallbackPolicy, attach_bem
from probemon.adapters.bem.distil import distil_trained
from probemon.adapters.bem.evaluation.held_out import measure
from probemon.adapters.bem.losses import LossWeights, adapter_losses, silenced
from probemon.adapters.bem.packing import Packing, packing_of
from probemon.adapters.bem.training import Objective, TrainSettings, evaluate, train
from probemon.errors import UnsupportedDecoding

SMALL = {"rank": 3, "width": 6, "chunk_tokens": 3, "prefix_tokens": 6, "token_limit": 8}
CONFIGS = {
    "by position": BemConfig(sites=("q", "v", "o", "down"), **SMALL),
    "by length": BemConfig(level="auto", auto_limits=(2, 9), **SMALL),
    "prefix": BemConfig(level="prefix", spectral_cap=None, **SMALL),
    "film": FORMS["film"],
}
LENGTHS = [7, 1, 11, 3]
ROWS = [torch.randint(3, VOCAB, (1, n), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(LENGTHS)]
PACKED = {"input_ids": torch.cat(ROWS, dim=1), "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
ENDS = torch.tensor([0, 7, 8, 19, 22])


def recorded(model, bem, **inputs):
    seen = []
    with bem.controller.register_forward_hook(lambda module, args, codes: seen.append(codes)):
        logits = model(**inputs, use_cache=False).logits
    return logits[0], seen[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_equal_each_alone_in_codes_logits_and_gradients(name, attention):
    model = make_host().double()
    model.set_attn_implementation(attention)
    close = {"sdpa": 1e-10, "eager": 1e-5}[attention]  # whose softmax is in fp32
    with randomise(attach_bem(model, CONFIGS[name])) as bem:
        bem.double()
        logits, codes = recorded(model, bem, **PACKED)
        (logits.square().mean(dim=-1).sum()).backward()
        found = [parameter.grad.clone() for parameter in bem.parameters()]
        bem.zero_grad()
        alone = [recorded(model, bem, input_ids=row) for row in ROWS]
        sum(one.square().mean(dim=-1).sum() for one, _ in alone).backward()
    assert (logits - torch.cat([one for one, _ in alone])).abs().max() < close
    for level, of_level in codes.by_level().items():
        expected = torch.cat([one.of(level)[0] for _, one in alone])
        assert (of_level[0] - expected).abs().max() < close and expected.std() > 1e-3
    for field in ("level", "chunk_index", "boundary"):
        assert torch.equal(getattr(codes, field)[0], torch.cat([getattr(one, field)[0] for _, one in alone]))
    for parameter, grad in zip(bem.parameters(), found, strict=True):
        assert (parameter.grad - grad).abs().max() <= close * max(1.0, float(grad.abs().max()))


def test_packed_sequences_are_separated_in_a_batch():
    model = make_host().double()
    ids = torch.cat([torch.cat([ROWS[0], ROWS[3]], dim=1), torch.cat([ROWS[3], ROWS[0]], dim=1)])
    positions = torch.tensor([[*range(7), *range(3)], [*range(3), *range(7)]])
    with randomise(attach_bem(model, CONFIGS["by position"])) as bem, torch.no_grad():
        bem.double()
        logits = model(ids, position_ids=positions, use_cache=False).logits
        for row, columns, alone in ((0, slice(7), 0), (0, slice(7, 10), 3), (1, slice(3), 3), (1, slice(3, 10), 0)):
            expected = model(ROWS[alone], use_cache=False).logits[0]
            assert (logits[row, columns] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_on_packed_sequences_equals_training_on_each_alone(reentrant):
    """All six terms, with the host's gradient checkpointing too. What each row's mean is over, the packed one's is."""
    model = make_host().double()
    if reentrant is not None:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
    rows = {
        "input_ids": torch.cat([torch.nn.functional.pad(row, (0, 11 - row.shape[1])) for row in ROWS]),
        "attention_mask": (torch.arange(11) < torch.tensor(LENGTHS)[:, None]).long(),
    }
    weights = LossWeights(kl=0.3, entropy=0.2, update=0.1, decorrelation=0.1, flips=3.0)
    found = []
    for batch in (PACKED, rows):
        with randomise(attach_bem(model, CONFIGS["by position"])) as bem:
            bem.double()
            model.train()
            losses = adapter_losses(bem, batch, weights)
            losses.total.backward()
            found.append((losses, [parameter.grad for parameter in bem.parameters()]))
            model.eval()
    assert found[0][0].terms.keys() == found[1][0].terms.keys()
    for term, value in found[0][0].terms.items():
        assert abs(float(value - found[1][0].terms[term])) < 1e-6 and value != 0, term  # some are summed in fp32
    for packed, single in zip(found[0][1], found[1][1], strict=True):
        assert (packed - single).norm() <= 1e-6 * max(1e-3, float(single.norm()))


@pytest.mark.parametrize("name", CONFIGS)
def test_evaluation_and_distillation_of_packed_equal_separate_sequences(name):
    """By hand: each row's own labels, behind its own tokens."""
    model, labels = make_host().double(), PACKED["input_ids"].clone()
    labels[:, 2:4] = -100
    packed, ends = {**PACKED, "labels": labels}, ENDS.tolist()
    alone = [{"input_ids": row, "labels": labels[:, a:b]} for row, a, b in zip(ROWS, ends[:-1], ends[1:], strict=True)]
    wanted = torch.cat([one["labels"][0, 1:] for one in alone])
    n = int((wanted != -100).sum())
    with randomise(attach_bem(model, CONFIGS[name])) as bem, torch.no_grad():
        bem.double()
        said = torch.cat([model(row, use_cache=False).logits[0, :-1] for row in ROWS])
        exact = float(torch.nn.functional.cross_entropy(said, wanted, ignore_index=-100))
        assert n == 22 - 4 - 2 and abs(evaluate(model, [packed]) - exact) < 1e-9
        assert abs(float(adapter_losses(bem, packed).terms["lm"]) - exact) < 1e-6
        found, rows = measure(bem, [packed], [0]), measure(bem, alone, range(4))
        assert abs(found.adapter.loss - exact) < 1e-9
        assert found.adapter.labels.sum() == rows.adapter.labels.sum() == n
        assert abs(found.bare.loss - rows.bare.loss) < 1e-9 and abs(rows.adapter.loss - exact) < 1e-9
        with silenced(bem):
            assert abs(evaluate(model, [packed]) - found.bare.loss) < 1e-9
    assert abs(evaluate(model, [packed]) - found.bare.loss) < 1e-9


def test_static_lora_trains_on_labels_within_each_packed_sequence():
    model = make_host().double()
    packed = {**PACKED, "labels": PACKED["input_ids"]}
    said = torch.cat([model(row, use_cache=False).logits[0, :-1] for row in ROWS])
    exact = torch.nn.functional.cross_entropy(said, torch.cat([row[0, 1:] for row in ROWS]))
    with randomise(attach_bem(model, CONFIGS["by position"])) as bem:
        settings = TrainSettings(n_steps=1, lr=1e-12)
        _, history = distil_trained(bem.double(), [packed], settings, rank=2, start="fresh", labels=1.0)
    assert abs(history.losses[0] - float(exact)) < 1e-5  # in fp32


def test_an_adapter_trains_on_packed_rows():
    model = make_host()
    with randomise(attach_bem(model, CONFIGS["by position"])) as bem:
        history = train(bem, [PACKED], TrainSettings(n_steps=4, lr=3e-3, n_warmup=0))
        with torch.no_grad():
            loss = Objective(bem)(**PACKED, labels=PACKED["input_ids"])["loss"]
    assert float(loss) < history.losses[0]


def test_split_sequences_join_to_the_original():
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[0, [0, 1, 5]] = starts[1, [0, 8]] = True
    packing, x = Packing.of(starts), torch.arange(36.0).view(2, 9, 2)
    lengths = [1, 4, 4, 8, 1]
    assert packing.real.sum(dim=1).tolist() == lengths and torch.equal(packing.join(packing.split(x)), x)
    for row, part in zip(packing.split(x), x.flatten(0, 1).split(lengths), strict=True):
        assert torch.equal(row[: len(part)], part)


def test_sequence_boundaries_are_known_or_refused():
    model = make_host()
    ids, positions = PACKED["input_ids"], PACKED["position_ids"]
    assert packing_of(model, {"input_ids": ids, "use_cache": False}) is None
    gap = positions.clone()
    gap[0, 19:] += 2
    both = {"position_ids": positions, "cu_seq_lens_q": ENDS}
    assert torch.equal(
        packing_of(model, {"input_ids": ids, "use_cache": False, **both}).starts[0].nonzero()[:, 0], ENDS[:-1]
    )
    for inputs, words in [
        (PACKED, "give use_cache=False"),
        ({**PACKED, "past_key_values": object(), "use_cache": False}, "with a cache the model's attention goes from"),
        ({"input_ids": ids, "position_ids": gap, "use_cache": False}, "one of them does not begin at 0"),
        ({"input_ids": ids, "cu_seq_lens_q": ENDS, "use_cache": False}, "position_ids that begin again at 0"),
        (
            {"input_ids": ids, **both, "attention_mask": torch.ones_like(ids), "use_cache": False},
            "give these too, without an attention mask",
        ),
        ({"input_ids": ids, **both, "cu_seq_lens_q": ENDS[[0, 2, 4]], "use_cache": False}, "begin elsewhere by"),
        ({"input_ids": ids, **both, "cu_seq_lens_q": ENDS[:-1], "use_cache": False}, "begin elsewhere by"),
    ]:
        with pytest.raises(UnsupportedDecoding, match=words):
            packing_of(model, inputs)
    with (
        attach_bem(model, CONFIGS["by position"], fallback=FallbackPolicy()),
        pytest.raises(UnsupportedDecoding, match="with a FallbackPolicy"),
    ):
        model(**PACKED, use_cache=False)


def test_flash_attention_boundaries_are_accepted_for_one_row():
    """It drops a mask that hides nothing, and reads lengths; but of one row alone."""
    model = make_host()
    model.config._attn_implementation = "flash_attention_2"
    ids, positions = PACKED["input_ids"], PACKED["position_ids"]
    lengths = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 11, "max_length_k": 11}
    for inputs in ({"attention_mask": torch.ones_like(ids)}, lengths):
        packing = packing_of(model, {"input_ids": ids, "position_ids": positions, "use_cache": False, **inputs})
        assert torch.equal(packing.starts[0].nonzero()[:, 0], ENDS[:-1])
    two = {"input_ids": ids.repeat(2, 1), "position_ids": positions.repeat(2, 1), "use_cache": False}
    with pytest.raises(UnsupportedDecoding, match="only those of one row"):
        packing_of(model, two)
    with pytest.raises(UnsupportedDecoding, match="give these too"):
        packing_of(model, {"input_ids": ids, "cu_seq_lens_q": ENDS, "use_cache": False})
