"""Controller codes equal a token-by-token oracle, whatever the split into forwards; levels follow their policy."""

import dataclasses

import numpy as np
import pytest
import torch

from bem_oracle import VOCAB, codes_of_row, make_host, randomise, steered_logits
from probemon.adapters.bem import Bem, BemConfig, Controller, ControllerState, attach_bem
from probemon.adapters.bem.config import LEVELS
from probemon.errors import BemStateError, ConfigError, UnknownSetting

SMALL = {
    "chunk_tokens": 4,
    "prefix_tokens": 8,
    "width": 6,
    "rank": 3,
    "ema": 0.7,
    "sites": ("q", "k", "v", "o", "down"),
}
D = 10


class Alone:
    """A controller without a host, with weights that route."""

    def __init__(self, seed=0, **changes):
        self.config = BemConfig(**{**SMALL, "level": "auto", **changes})
        torch.manual_seed(seed)
        self.controller = Controller(D, self.config).requires_grad_(False)
        self.updates = torch.nn.ModuleDict()
        randomise(self, seed)

    def named_parameters(self):
        return self.controller.named_parameters("controller")


def check_row(codes, row, real, oracle, tolerance=2e-6):
    at = real[row].nonzero()[:, 0].tolist()
    assert len(at) == len(oracle)
    for t, token in zip(at, oracle, strict=True):
        for level in LEVELS:
            if level in token and getattr(codes, level) is not None:
                assert np.abs(codes.of(level)[row, t].detach().numpy() - token[level]).max() < tolerance, (
                    row,
                    t,
                    level,
                )
        assert abs(float(codes.confidence[row, t]) - token["confidence"]) < tolerance
        assert (
            int(codes.chunk_index[row, t]) == token["chunk_index"] and bool(codes.boundary[row, t]) == token["boundary"]
        )
        assert LEVELS[int(codes.level[row, t])] == token["level"]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 13, 31, 40])
def test_codes_equal_the_oracle(length):
    alone, hidden = Alone(), torch.randn(2, length, D)
    real = torch.ones(2, length, dtype=torch.bool)
    codes = alone.controller(hidden, real, ControllerState(2))
    for row in range(2):
        check_row(codes, row, real, codes_of_row(alone, hidden[row].numpy()))


@pytest.mark.parametrize("pads", ["left", "right", "inside"])
def test_padding_does_not_affect_codes(pads):
    alone, hidden = Alone(level="position", token_limit=10), torch.randn(3, 23, D)
    real = torch.ones(3, 23, dtype=torch.bool)
    where = {"left": slice(0, 6), "right": slice(17, 23), "inside": slice(5, 11)}[pads]
    real[0, where], real[2, 3:19] = False, False
    hidden[~real] = float("nan")
    codes = alone.controller(hidden, real, ControllerState(3))
    for row in range(3):
        check_row(codes, row, real, codes_of_row(alone, hidden[row][real[row]].numpy()))
    for level in ("chunk", "token"):
        assert not codes.of(level)[~real].any()
    assert (
        (codes.chunk_index[~real] == -1).all() and not codes.boundary[~real].any() and not codes.confidence[~real].any()
    )


@pytest.mark.parametrize("sizes", [[1] * 29, [7] * 5, [3, 1, 8, 1, 1, 4, 11], [16, 1, 1, 1, 13], [29]], ids=str)
def test_codes_do_not_depend_on_how_tokens_are_split_into_forwards(sizes):
    alone, n = Alone(), sum(sizes)
    hidden, real = torch.randn(2, n, D), torch.ones(2, n, dtype=torch.bool)
    real[0, :5] = False
    state, parts = ControllerState(2, alone.controller.decide(real.sum(dim=1))), []
    for part, mask in zip(hidden.split(sizes, dim=1), real.split(sizes, dim=1), strict=True):
        parts.append(alone.controller(part, mask, state))
    whole = alone.controller(hidden, real, ControllerState(2))
    for name in (*LEVELS, "confidence"):
        assert (torch.cat([getattr(part, name) for part in parts], dim=1) - getattr(whole, name)).abs().max() < 1e-6
    for name in ("level", "chunk_index", "boundary"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(whole, name))
    assert state.n_columns == n


def test_codes_of_the_test_controller_depend_on_the_tokens():
    """The random controller is no constant: what the tests compare depends on the tokens."""
    alone = Alone()
    real = torch.ones(2, 40, dtype=torch.bool)
    codes = alone.controller(torch.randn(2, 40, D), real, ControllerState(2))
    for level in LEVELS:
        code = codes.of(level)
        assert code[:, 12:].std(dim=1).min() > 1e-3 or level == "prefix"
        assert (code[0] - code[1]).abs().max() > 0.05
    assert codes.confidence.std() > 0.01
    assert float(codes.of("token").norm(dim=-1).max()) <= 3.0


@pytest.mark.parametrize("t", range(0, 22, 3))
def test_code_depends_on_its_own_token_and_earlier_complete_chunks(t):
    alone, hidden = Alone(), torch.randn(1, 22, D)
    real, other = torch.ones(1, 22, dtype=torch.bool), hidden.clone()
    other[0, t] = torch.randn(D)
    before, after = (alone.controller(x, real, ControllerState(1)) for x in (hidden, other))
    chunk_end = (t // 4 + 1) * 4
    assert torch.equal(before.of("token")[:, :t], after.of("token")[:, :t])
    assert (before.of("token")[:, t] - after.of("token")[:, t]).abs().max() > 1e-4
    assert torch.equal(before.of("token")[:, t + 1 : chunk_end], after.of("token")[:, t + 1 : chunk_end])
    for level in ("prefix", "chunk"):
        assert torch.equal(before.of(level)[:, :chunk_end], after.of(level)[:, :chunk_end])
    if chunk_end < 22:
        assert (before.of("chunk")[:, chunk_end:] - after.of("chunk")[:, chunk_end:]).abs().min(
            dim=1
        ).values.max() > 1e-6
        unsure = [codes.of("prefix") / codes.confidence[..., None] for codes in (before, after)]
        changed = (unsure[0] - unsure[1])[:, chunk_end:].abs().max()
        assert changed > 1e-4 if t < 8 else changed < 1e-6  # beyond P the prefix is what it was, but for its confidence


@pytest.mark.parametrize("cut", range(14))
def test_state_built_token_by_token_can_be_truncated_anywhere(cut):
    alone, hidden, real = Alone(), torch.randn(1, 22, D), torch.ones(1, 22, dtype=torch.bool)
    state = ControllerState(1, torch.tensor([2]))
    for t in range(14):
        alone.controller(hidden[:, t : t + 1], real[:, :1], state)
    state.carry = alone.controller.replay(*state.truncate(cut))
    parts = [alone.controller(hidden[:, t : t + 1], real[:, :1], state) for t in range(cut, 22)]
    whole = alone.controller(hidden, real, ControllerState(1, state.level))
    for name in (*LEVELS, "confidence"):
        assert (
            torch.cat([getattr(part, name) for part in parts], dim=1) - getattr(whole, name)[:, cut:]
        ).abs().max() < 1e-6


def test_state_can_be_truncated_selected_and_saved():
    alone, hidden = Alone(auto_limits=(4, 12)), torch.randn(3, 20, D)
    real = torch.ones(3, 20, dtype=torch.bool)
    real[1, :7], real[0, :15] = False, False  # 17, 10 and 2 tokens: levels of every kind
    state = ControllerState(3)
    alone.controller(hidden[:, :17], real[:, :17], state)
    saved = {name: x.clone() for name, x in state.copy().tensors().items()}
    state.carry = alone.controller.replay(*state.truncate(9))
    state.select(torch.tensor([2, 1, 1]))
    rows = torch.tensor([2, 1, 1])
    codes = alone.controller(hidden[rows, 9:20], real[rows, 9:20], state)
    assert [LEVELS[level] for level in codes.level[:, 0].tolist()] == ["token", "chunk", "chunk"]
    whole = alone.controller(hidden[rows], real[rows], ControllerState(3, state.level))
    assert (codes.chunk - whole.chunk[:, 9:]).abs().max() < 1e-6 and (
        codes.token - whole.token[:, 9:]
    ).abs().max() < 1e-6
    again = ControllerState.from_tensors(saved)
    again.carry = alone.controller.replay(*again.history())
    codes = alone.controller(hidden[:, 17:], real[:, 17:], again)
    whole = alone.controller(hidden, real, ControllerState(3, again.level))
    assert (codes.chunk - whole.chunk[:, 17:]).abs().max() < 1e-6
    for wrong in (
        {},
        {"z": saved["z"]},
        {**saved, "real": saved["real"].float()},
        {**saved, "level": saved["level"][:2]},
    ):
        with pytest.raises(BemStateError):
            ControllerState.from_tensors(wrong)


# -- level policy --------------------------------------------------------------------------------


def test_position_policy_uses_token_codes_up_to_each_sequences_limit():
    alone = Alone(level="position", token_limit=6)
    real = torch.ones(2, 10, dtype=torch.bool)
    real[1, :3] = False
    codes = alone.controller(torch.randn(2, 10, D), real, ControllerState(2))
    adaptive = codes.adaptive()
    assert torch.equal(adaptive[0, :6], codes.token[0, :6]) and torch.equal(adaptive[0, 6:], codes.chunk[0, 6:])
    assert torch.equal(adaptive[1, :9], codes.token[1, :9]) and torch.equal(adaptive[1, 9:], codes.chunk[1, 9:])


def test_auto_level_is_fixed_by_each_sequences_prompt():
    alone = Alone(level="auto", auto_limits=(4, 7))
    real = torch.ones(3, 9, dtype=torch.bool)
    real[0, :6], real[1, :3] = False, False  # 3, 6 and 9 real tokens
    state = ControllerState(3)
    hidden = torch.randn(3, 20, D)
    first = alone.controller(hidden[:, :9], real, state)
    later = alone.controller(hidden[:, 9:], torch.ones(3, 11, dtype=torch.bool), state)
    for codes in (first, later):
        assert [LEVELS[level] for level in codes.level[:, 0].tolist()] == ["prefix", "chunk", "token"]
        assert (codes.level == codes.level[:, :1]).all()
        for row, level in enumerate(LEVELS):
            assert torch.equal(codes.adaptive()[row], codes.of(level)[row])


@pytest.mark.parametrize("level", LEVELS)
def test_fixed_level_is_constant_and_builds_only_its_router(level):
    alone = Alone(level=level, sites=("o", "down"))
    codes = alone.controller(torch.randn(2, 30, D), torch.ones(2, 30, dtype=torch.bool), ControllerState(2))
    assert alone.config.levels == (level,) and torch.equal(codes.adaptive(), codes.of(level))
    for other in set(LEVELS) - {level}:
        with pytest.raises(ConfigError, match=f"this adapter uses {level}"):
            codes.of(other)
        assert not any(name.startswith(f"{other}.") for name, _ in alone.controller.named_parameters())


def test_default_controller_is_under_a_hundredth_of_the_model():
    """At a width of 576 and the defaults it is far under a hundredth of a 135 million parameter host."""
    assert sum(p.numel() for p in Controller(576, BemConfig()).parameters()) < 70_000


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": True}, "rank is True"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"sites": "down"}, "sites is 'down'"),
        ({"sites": ()}, "sites is"),
        ({"sites": ("o", "o")}, "each once"),
        ({"sites": ("o", ["q"])}, "sites is"),
        ({"level": "chunks"}, "level is 'chunks'"),
        ({"prefix_tokens": 100}, "give a multiple"),
        ({"auto_limits": (9, 3)}, "auto_limits is"),
        ({"layers": (0,), "read_layer": 1}, "layers is"),
        ({"spectral_cap": 0.0}, "spectral_cap is 0.0"),
        ({"sparse_eps": -1.0}, "sparse_eps is -1.0"),
        ({"sites": ("q", "v"), "level": "token"}, "these take chunk codes"),
        ({"sites": ("k",), "level": "prefix"}, "these take chunk codes"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        BemConfig(**changes)


def test_settings_round_trip_through_a_dict_and_a_typo_is_named():
    config = BemConfig(sites=("q", "down"), layers=(1, 2), level="auto")
    stated = dataclasses.asdict(config)
    assert (
        BemConfig.from_dict({**stated, "sites": list(config.sites), "layers": [1, 2], "auto_limits": [64, 256]})
        == config
    )
    with pytest.raises(UnknownSetting, match="did you mean 'sites'"):
        BemConfig.from_dict({"sights": ["o"]})


# -- the whole adapter against the oracle ----------------------------------------------------------


@pytest.mark.parametrize("shape", ["llama", "qwen2", "qwen3", "mixtral"])
@pytest.mark.parametrize("level", ["position", "auto"])
def test_logits_equal_a_model_steered_by_hand_in_fp64(shape, level):
    """Every update as a full matrix, governed by its own singular values, added token by token."""
    model = make_host(shape)
    config = BemConfig(
        **{**SMALL, "level": level, "token_limit": 11, "auto_limits": (5, 30), "spectral_cap": 0.8, "trust_region": 2.0}
    )
    bem = randomise(Bem(model, config))
    ids = torch.randint(3, VOCAB, (19,), generator=torch.Generator().manual_seed(1))
    expected = steered_logits(model, bem, ids.tolist())
    with torch.no_grad():
        base = model(ids[None]).logits[0]
        with bem:
            found = model(ids[None]).logits[0]
    assert (found - expected).abs().max() < 1e-5
    assert (found - base).abs().max() > 0.1  # it steers


def test_controller_reads_the_configured_layer():
    model = make_host(layers=3)
    with pytest.raises(ConfigError, match=r"read_layer is 3: the model has layers 0\.\.2"):
        attach_bem(model, BemConfig(read_layer=3))
    bem = randomise(Bem(model, BemConfig(**{**SMALL, "read_layer": 1}, spectral_cap=1.0)))
    assert {site.layer for site in bem.sites} == {1, 2}
    ids = torch.randint(3, VOCAB, (13,), generator=torch.Generator().manual_seed(1))
    expected = steered_logits(model, bem, ids.tolist())
    with torch.no_grad(), bem:
        assert (model(ids[None]).logits[0] - expected).abs().max() < 1e-5
