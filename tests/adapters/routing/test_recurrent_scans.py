"""The recurrence of a state-space layer and its metrics equal independently computed fp64 values."""

import math

import numpy as np
import pytest
import torch

from probemon.errors import ConfigError
from probemon.host.recurrent.scan import (
    effective_length,
    effective_rank,
    half_life,
    hidden_attention,
    look_back,
    scan_chunked,
    scan_loop,
    scan_parallel,
    update_share,
)

T, D, N = 6, 2, 2


def wave(k, *shape):
    return torch.sin(k + 1.7 * torch.arange(math.prod(shape), dtype=torch.float64)).reshape(shape)


A = -torch.tensor([[1.0, 2.0], [0.5, 4.0]], dtype=torch.float64)
DT = torch.nn.functional.softplus(wave(30, T, D))
B, C, X = wave(31, T, N), wave(32, T, N), wave(33, T, D)
LOG = DT[..., None] * A
INTO = (DT[..., None] * B[:, None]).expand(T, D, N)
ADDED = INTO * X[..., None]
SCANS = {
    "loop": scan_loop,
    "chunks of 1": lambda *a: scan_chunked(*a, chunk=1),
    "chunks of 4": lambda *a: scan_chunked(*a, chunk=4),
    "one chunk": lambda *a: scan_chunked(*a, chunk=T + 1),
    "parallel": scan_parallel,
}


def near(found, expected):
    np.testing.assert_allclose(np.ravel(found), expected, rtol=0, atol=5e-9)  # given to 8 or 9 decimals


@pytest.mark.parametrize("scan", SCANS)
def test_states_and_outputs_equal_the_oracle(scan):
    states = SCANS[scan](LOG, ADDED)
    y = (states * C[:, None]).sum(-1)
    near(states[5], [0.283060954, 0.207217255, -0.883401592, -0.41657238])
    near(y[0], [0.159041096, -0.060163066])
    near(y[5], [-0.182737303, 0.667180959])
    near(y.sum(), [-0.458299286])
    near(torch.linalg.vector_norm(states[5]), [1.037782932])


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("n", [1, 5, 13])
def test_scans_continue_from_a_state(scan, n):
    log, added, start = -wave(40, n, 3, 2).abs(), wave(41, n, 3, 2), wave(42, 3, 2)
    states = SCANS[scan](log, added, start)
    state = start.numpy()
    for t in range(n):
        state = np.exp(log[t].numpy()) * state + added[t].numpy()
        np.testing.assert_allclose(states[t], state, atol=1e-12)


def test_oracle_detects_a_scan_that_is_off_by_one_token():
    wrong = torch.zeros(T, D, N, dtype=torch.float64)
    for t in range(T):
        wrong[t] = LOG[t].exp() * (wrong[t - 2] if t > 1 else 0) + ADDED[t]
    y = ((wrong - scan_loop(LOG, ADDED)) * C[:, None]).sum(-1)
    assert float(y.abs().max()) > 0.1  # where the right ones agree to 1e-12, though every shape is the same


def test_chunked_scan_is_finite_if_products_of_decays_underflow():
    log, added = torch.full((64, 1), -1.6), torch.ones(64, 1)
    assert not bool((1 / log.cumsum(0).exp()).isfinite().all())  # what dividing by products would need
    assert float(scan_chunked(log, added, chunk=64)[-1]) == pytest.approx(1 / (1 - math.exp(-1.6)), rel=1e-6)


def test_half_life_length_and_look_back_equal_the_oracle():
    near(half_life(LOG), [0.975762599, 0.4878813, 1.899496842, 0.237437105])
    near(effective_length(LOG)[5], [1.932557944, 1.311956941, 3.066656525, 1.287679198])
    attention = hidden_attention(LOG, INTO, C[:, None].expand(T, D, N))
    near(look_back(attention)[5], [0.54762988, 1.29473177])
    y = (scan_loop(LOG, ADDED) * C[:, None]).sum(-1)
    near((attention * X[None]).sum(1) - y, np.zeros(T * D))
    assert bool((attention[torch.ones(T, T, dtype=torch.bool).triu(1)] == 0).all())
    near(effective_length(LOG[3:], effective_length(LOG[:3])[-1])[-1], effective_length(LOG)[5].ravel())


@pytest.mark.parametrize(("decay", "half"), [(0.5, 1.0), (0.99, 68.9675639365)])
def test_a_constant_decay_has_its_half_life_and_length(decay, half):
    log = torch.full((4000, 1), math.log(decay), dtype=torch.float64)
    assert float(half_life(log)) == pytest.approx(half)
    assert float(effective_length(log)[-1]) == pytest.approx(1 / (1 - decay))


def test_update_share_is_the_new_part_of_the_state():
    before = torch.cat([torch.zeros(1, D, N, dtype=torch.float64), scan_loop(LOG, ADDED)[:-1]])
    share = update_share(LOG, ADDED, before, (-1,))
    assert bool((share[0] == 1).all()) and bool((share <= 1).all())
    new, kept = np.linalg.norm(ADDED[3, 1]), np.linalg.norm(LOG[3, 1].exp() * before[3, 1])
    assert float(share[3, 1]) == pytest.approx(new / (new + kept), rel=1e-12)
    nothing = torch.zeros_like(ADDED)
    assert bool((update_share(LOG, nothing, before + 1, (-1,)) == 0).all())
    gone = scan_loop(LOG, nothing, torch.ones(D, N, dtype=torch.float64))
    np.testing.assert_allclose(gone[-1], LOG.sum(0).exp(), rtol=1e-12)  # it decays by what the decays say


def test_effective_rank_has_known_values():
    assert float(effective_rank(torch.eye(3))) == pytest.approx(3)
    assert float(effective_rank(torch.ones(4, 3))) == pytest.approx(1, abs=1e-6)
    assert float(effective_rank(torch.zeros(4, 3))) == 1


def test_empty_chunk_is_refused():
    with pytest.raises(ConfigError, match="chunk"):
        scan_chunked(LOG, ADDED, chunk=0)
