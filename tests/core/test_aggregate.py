"""Every aggregator equals plain Python in fp64, bit for bit the same however its random scores arrive."""

import math

import numpy as np
import pytest

from probemon.core.aggregate import (
    Aggregator,
    Attention,
    Each,
    Ema,
    Max,
    Mean,
    RollingLogit,
    RollingMax,
    RollingMean,
    named,
    over,
    parse,
)
from probemon.errors import ConfigError

EPS = float(np.finfo(np.float64).eps)


def soft(xs, temperature):
    weights = [math.exp((x - max(xs)) / temperature) for x in xs]
    return math.fsum(w * x for w, x in zip(weights, xs, strict=True)) / math.fsum(weights)


def smoothed(xs, weight):
    """By its closed form: the first score counts with what is left over."""
    keep = 1 - weight
    return math.fsum([keep ** (len(xs) - 1) * xs[0], *(weight * keep**i * x for i, x in enumerate(reversed(xs[1:])))])


def rolling_logit(xs, n):
    """Of the newest n: 0 until there are half as many, then by the mean of the log odds, clipped away from 0 and 1."""
    if len(xs) < n / 2:
        return 0.0
    clipped = [min(max(x, 2**-24), 1 - 2**-24) for x in xs[-n:]]
    mean = math.fsum(math.log(x) - math.log1p(-x) for x in clipped) / len(clipped)
    return 1 / (1 + math.exp(-mean))


# What each says of the scores so far, oldest first, of one concept.
ORACLES = {
    Each(): lambda xs: xs[-1],
    Mean(): lambda xs: math.fsum(xs) / len(xs),
    Max(): max,
    Ema(0.3): lambda xs: smoothed(xs, 0.3),
    Ema(1): lambda xs: xs[-1],
    RollingMean(1): lambda xs: xs[-1],
    RollingMean(7): lambda xs: math.fsum(xs[-7:]) / len(xs[-7:]),
    RollingMean(20): lambda xs: math.fsum(xs[-20:]) / len(xs[-20:]),
    RollingMax(1): lambda xs: xs[-1],
    RollingMax(7): lambda xs: max(xs[-7:]),
    RollingMax(20): lambda xs: max(xs[-20:]),
    RollingLogit(1): lambda xs: rolling_logit(xs, 1),
    RollingLogit(7): lambda xs: rolling_logit(xs, 7),
    RollingLogit(20): lambda xs: rolling_logit(xs, 20),
    Attention(): lambda xs: soft(xs, 0.1),
    Attention(1e-3): lambda xs: soft(xs, 1e-3),
    Attention(5): lambda xs: soft(xs, 5.0),
}
each_aggregator = pytest.mark.parametrize("aggregator", ORACLES, ids=str)


def stream(t, k, seed=0):
    """Scores [t, k]: many random, many 0, some 1, and many that tie."""
    rng = np.random.default_rng(seed)
    kinds = [rng.random((t, k)), np.zeros((t, k)), np.ones((t, k)), rng.choice([0.25, 0.7, 0.9], (t, k))]
    return np.choose(rng.choice(4, (t, k), p=[0.5, 0.2, 0.1, 0.2]), kinds)


def fed(aggregator, state, scores):
    """The state after some tokens, and the values [T, K] on the way."""
    values = []
    for token in scores:
        state, value = aggregator.add(state, token)
        values.append(value)
    return state, np.array(values)


def same_bits(a, b):
    return a.dtype == b.dtype == np.float64 and a.shape == b.shape and a.tobytes() == b.tobytes()


def arrays(state):
    return [part for part in state if isinstance(part, np.ndarray)]


@pytest.mark.parametrize(("t", "k"), [(1, 1), (2, 3), (7, 5), (53, 17)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@each_aggregator
def test_values_equal_plain_python(aggregator, dtype, t, k):
    scores = stream(t, k, seed=t).astype(dtype)
    columns = [[float(x) for x in column] for column in scores.T]
    expected = np.array([[ORACLES[aggregator](column[: i + 1]) for column in columns] for i in range(t)])
    # A sum of t numbers in [0, 1] in any order is off by t * eps; a weight exp(-a) that matters, by a * eps with a <
    # 37.
    np.testing.assert_allclose(over(aggregator, scores), expected, rtol=0, atol=(t + 40) * EPS)


@pytest.mark.parametrize("temperature", [0.003, 0.1, 2.0])
def test_attention_is_right_when_every_score_is_a_new_maximum(temperature):
    scores = np.linspace(-3, 4, 501)[:, None]  # logits too: the largest weight alone would be exp(1333)
    expected = [soft(scores[: i + 1, 0].tolist(), temperature) for i in range(501)]
    np.testing.assert_allclose(over(Attention(temperature), scores)[:, 0], expected, rtol=0, atol=4 * 541 * EPS)


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_attention_with_a_tiny_temperature_is_the_maximum(temperature):
    scores = stream(60, 5)
    np.testing.assert_allclose(over(Attention(temperature), scores), over(Max(), scores), rtol=0, atol=60 * EPS)


@pytest.mark.parametrize("temperature", [1e15, 1e300])
def test_attention_with_a_large_temperature_is_the_mean(temperature):
    scores = stream(60, 5)
    np.testing.assert_allclose(over(Attention(temperature), scores), over(Mean(), scores), rtol=0, atol=120 * EPS)


@each_aggregator
def test_scores_of_one_stay_one(aggregator):
    values = over(aggregator, np.ones((50, 3), np.float32))
    if isinstance(aggregator, RollingLogit):  # 1 has no log odds
        half = (aggregator.n + 1) // 2 - 1
        assert (values[:half] == 0).all() and np.allclose(values[half:], 1 - 2**-24, rtol=0, atol=8 * EPS)
    else:
        assert (values == 1).all()


@each_aggregator
def test_chunked_and_interleaved_sequences_equal_each_alone_bit_for_bit(aggregator):
    rows = [stream(41, 6, seed) for seed in range(3)]
    states, values = [aggregator.begin()] * 3, [[], [], []]
    for begin, end in [(0, 1), (1, 14), (14, 16), (16, 41)]:
        for row, scores in enumerate(rows):
            states[row], chunk = fed(aggregator, states[row], scores[begin:end])
            values[row].append(chunk)
    for scores, chunks in zip(rows, values, strict=True):
        assert same_bits(np.concatenate(chunks), over(aggregator, scores))


@each_aggregator
def test_later_tokens_do_not_change_earlier_values(aggregator):
    scores = stream(40, 3)
    assert all(same_bits(over(aggregator, scores[:t]), over(aggregator, scores)[:t]) for t in (0, 1, 13, 39))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 64, 257])
@each_aggregator
def test_concept_has_the_same_bits_alone_and_among_others(aggregator, k):
    # Vectorised code may treat the last few elements, or a single column, in another way than the rest.
    scores = stream(30, k, seed=k)
    together = over(aggregator, scores)
    for at in {0, 1, k // 2, k - 3, k - 2, k - 1} & set(range(k)) if k > 17 else range(k):
        assert same_bits(together[:, at : at + 1].copy(), over(aggregator, scores[:, at : at + 1])), at


@each_aggregator
def test_memory_layout_does_not_change_the_bits(aggregator):
    scores = stream(30, 17)
    expected = over(aggregator, scores)
    assert same_bits(over(aggregator, np.asfortranarray(scores)), expected)
    assert same_bits(over(aggregator, scores[:, ::-1])[:, ::-1].copy(), expected)


@each_aggregator
def test_float32_scores_are_aggregated_in_float64(aggregator):
    scores = stream(30, 5).astype(np.float32)
    assert same_bits(over(aggregator, scores), over(aggregator, scores.astype(np.float64)))


@each_aggregator
def test_beams_with_a_shared_past_do_not_affect_each_other(aggregator):
    past, one, other = stream(11, 4, 1), stream(9, 4, 2), stream(9, 4, 3)
    a = b = fed(aggregator, aggregator.begin(), past)[0]
    values = []
    for x, y in zip(one, other, strict=True):
        a, of_a = aggregator.add(a, x)
        b, of_b = aggregator.add(b, y)
        values.append((of_a, of_b))
    assert same_bits(np.array([v for v, _ in values]), over(aggregator, np.concatenate([past, one]))[11:])
    assert same_bits(np.array([v for _, v in values]), over(aggregator, np.concatenate([past, other]))[11:])


@each_aggregator
def test_rejected_drafts_leave_nothing_behind(aggregator):
    tokens, drafts = stream(20, 4, 1), np.ones((3, 4))
    state, values = aggregator.begin(), []
    for token in tokens:
        fed(aggregator, state, drafts)
        state, value = aggregator.add(state, token)
        values.append(value)
    assert same_bits(np.array(values), over(aggregator, tokens))


@each_aggregator
def test_caller_arrays_cannot_change_a_state(aggregator):
    scores, buffer, state, values = stream(12, 3), np.empty(3), aggregator.begin(), []
    for token in scores:
        buffer[:] = token
        state, value = aggregator.add(state, buffer)
        values.append(value)
        assert not value.flags.writeable and not any(part.flags.writeable for part in arrays(state))
    assert same_bits(np.array(values), over(aggregator, scores)) and buffer.flags.writeable


@each_aggregator
def test_state_does_not_grow_or_keep_tokens(aggregator):
    scores = stream(500, 5)
    state = fed(aggregator, aggregator.begin(), scores)[0]
    assert all(part.base is None for part in arrays(state))  # a view of a document keeps all of it
    assert (
        len(state) <= max(3, getattr(aggregator, "n", 0)) and sum(part.size for part in arrays(state)) <= len(state) * 5
    )


@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize("rolling", [RollingMean, RollingMax, RollingLogit])
def test_rolling_window_forgets_older_tokens_completely(rolling, n):
    scores = stream(300, 3)
    scores[:250] *= 1e12  # a sum carried along would keep the rounding of these
    for end in (250 + n, 299, 300):
        assert same_bits(over(rolling(n), scores[:end])[-1], over(rolling(n), scores[end - n : end])[-1])


def test_mean_of_many_tokens_is_within_rounding_error():
    scores = stream(20_000, 1)
    assert abs(over(Mean(), scores)[-1, 0] - math.fsum(scores[:, 0]) / 20_000) < 20_000 * EPS


def test_negative_zero_is_never_returned():
    for aggregator in ORACLES:
        assert not np.signbit(over(aggregator, np.array([[-0.0, 0.0], [0.0, -0.0]]))).any(), aggregator


@each_aggregator
def test_no_tokens_or_concepts_give_empty_values(aggregator):
    assert over(aggregator, np.zeros((0, 3))).shape == (0, 3) and over(aggregator, np.zeros((4, 0))).shape == (4, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@each_aggregator
def test_nonfinite_score_is_refused_and_the_state_stays_usable(aggregator, bad):
    scores = stream(9, 3)
    for t in (0, 5):
        state = fed(aggregator, aggregator.begin(), scores[:t])[0]
        with pytest.raises(
            ConfigError, match=rf"score 1 of 3 is {bad}: .* an unseen token has no score and is to be left out"
        ):
            aggregator.add(state, np.array([0.5, bad, 0.5]))
        assert same_bits(fed(aggregator, state, scores[t:])[1], over(aggregator, scores)[t:])


@each_aggregator
def test_number_of_concepts_is_fixed_by_the_first_token(aggregator):
    state, _ = aggregator.add(aggregator.begin(), np.zeros(3))
    for k in (1, 2, 4):  # 1 would be broadcast
        with pytest.raises(ConfigError, match=f"{k} scores after 3: .* begin"):
            aggregator.add(state, np.zeros(k))


@each_aggregator
def test_scores_of_another_rank_are_refused(aggregator):
    for scores in (np.float64(0.5), np.zeros((2, 3))):
        with pytest.raises(ConfigError, match=r"give \[K\]"):
            aggregator.add(aggregator.begin(), scores)
    for scores in (np.zeros(3), np.zeros((2, 3, 1))):
        with pytest.raises(ConfigError, match=r"give \[T, K\]"):
            over(aggregator, scores)


def short(value):
    return repr(value)[:12]


NOT_NUMBERS = [True, False, "0.5", None, math.nan, math.inf, -math.inf, 0, 0.0, -1, -0.1, 1j, [1], np.True_]


@pytest.mark.parametrize("bad", [*NOT_NUMBERS, 1.1, 2, 10**400], ids=short)
def test_weight_outside_0_to_1_is_refused(bad):
    with pytest.raises(ConfigError, match=r"weight is .*: .*more than 0 and at most 1"):
        Ema(bad)


@pytest.mark.parametrize("bad", [*NOT_NUMBERS, 10**400], ids=short)
def test_temperature_that_is_not_finite_and_positive_is_refused(bad):
    with pytest.raises(ConfigError, match=r"temperature is .*: .*finite number over 0"):
        Attention(bad)


@pytest.mark.parametrize("bad", [*NOT_NUMBERS, 1.0, 2.5, np.float64(3)], ids=repr)
@pytest.mark.parametrize("rolling", [RollingMean, RollingMax, RollingLogit])
def test_window_that_is_not_a_positive_integer_is_refused(rolling, bad):
    with pytest.raises(ConfigError, match=r"n is .*: it counts tokens, so give 1 or more"):
        rolling(bad)


def test_names_are_short_stable_and_distinct():
    made = [Each(), Mean(), Max(), Ema(0.3), RollingMean(8), RollingMax(8), RollingLogit(8), Attention()]
    made.append(Attention(1e-3))
    names = [
        "each",
        "mean",
        "max",
        "ema(0.3)",
        "rolling_mean(8)",
        "rolling_max(8)",
        "rolling_logit(8)",
        "attention(0.1)",
        "attention(0.001)",
    ]
    assert [str(aggregator) for aggregator in made] == names
    assert str(Ema(0.3)) != str(Ema(0.1 + 0.2))  # thresholds of one are not those of the other


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (Ema(1), Ema(1.0)),
        (Ema(np.float64(0.3)), Ema(0.3)),
        (Attention(np.float32(0.5)), Attention(0.5)),
        (RollingMax(np.int64(8)), RollingMax(8)),
    ],
)
def test_equal_parameters_of_other_types_have_one_name(one, same):
    assert str(one) == str(same) and one == same and hash(one) == hash(same)


def test_named_accepts_none_a_name_or_an_aggregator():
    assert [named(x) for x in (None, "mean", "max", "attention")] == [Each(), Mean(), Max(), Attention(0.1)]
    for aggregator in ORACLES:
        assert named(aggregator) is aggregator


def test_named_accepts_a_custom_aggregator():
    class Last:
        def begin(self):
            return ()

        def add(self, state, scores):
            return state, np.asarray(scores, dtype=np.float64)

    own: Aggregator = Last()
    assert named(own) is own and over(own, np.array([[0.5]])).tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("ema:0.3", Ema(0.3)),
        ("rolling_mean:4", RollingMean(4)),
        ("rolling_max(3)", RollingMax(3)),
        ("none", Each()),
        ("each", Each()),
    ],
)
def test_named_parses_text_as_the_command_line_does(text, meant):
    assert named(text) == meant == parse(text)


@pytest.mark.parametrize("name", ["ema", "rolling_mean", "rolling_max", "rolling_logit"])
def test_name_without_its_required_parameter_is_explained(name):
    with pytest.raises(ConfigError, match=rf"aggregate is '{name}', without its number: give .*{name}:[WN]"):
        named(name)


@pytest.mark.parametrize(
    "bad",
    ["", "Mean", "median", "ema:", "mean:2", 0, 0.3, True, Mean, Ema, ["mean"], lambda xs: xs],
    ids=lambda bad: getattr(bad, "__name__", repr(bad)),
)
def test_named_refuses_anything_else_and_lists_the_choices(bad):
    with pytest.raises(ConfigError) as caught:
        named(bad)
    for choice in (
        repr(bad),
        "none",
        "mean",
        "max",
        "attention:T",
        "ema:W",
        "rolling_mean:N",
        "rolling_max:N",
        "rolling_logit:N",
        "Ema(0.3)",
    ):
        assert choice in str(caught.value)


def test_misspelt_name_gets_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        named("atention")


# -- names in text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "aggregator",
    [Each(), Mean(), Max(), Attention(), Attention(0.25), Ema(0.9), Ema(1 / 3), RollingMean(4), RollingLogit(1)],
    ids=str,
)
def test_aggregator_name_parses_back_to_the_same_aggregator(aggregator):
    assert parse(str(aggregator)) == aggregator


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("none", Each()),
        ("ema:0.3", Ema(0.3)),
        (" attention:0.5 ", Attention(0.5)),
        ("attention", Attention(0.1)),
        ("rolling_mean:3", RollingMean(3)),
        ("rolling_max:3", RollingMax(3)),
        ("rolling_logit:16", RollingLogit(16)),
    ],
)
def test_text_with_a_parameter_is_parsed(text, meant):
    assert parse(text) == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ema", "ema:W"),
        ("ema:", "ema:W"),
        ("ema:0.3:1", "ema:W"),
        ("ema(0.3", "ema:W"),
        ("mean:3", "give none ("),
        ("", "give none ("),
        ("atention", "did you mean 'attention'"),
        ("ema:x", "'x' is not a number"),
        ("rolling_mean:2.5", "'2.5' is not a whole number"),
        ("ema:2", "at most 1"),
        ("rolling_max:0", "n is 0"),
        ("rolling_logit:0", "n is 0"),
        ("mean:2", "mean takes no number"),
    ],
)
def test_text_that_names_no_aggregator_lists_the_choices(text, words):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert words in str(caught.value)
