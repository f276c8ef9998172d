"""What both managers are given: one hierarchy, one set of random weights, one stream of hidden states.

    world = make_world(n_probes=1000, n_tokens=100, hidden_size=576, seed=0)
    files = write_files(world, folder)          # one .pt a probe, as the original stored them
    pack = write_pack(world, folder)            # the same fp32 weights, stacked

The weights are random and say nothing about the text. They are scaled to the stream so that probes are active
about as often as the original's were: some passing the load threshold at a token, the set moving as the text does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from probemon.errors import MissingExtra
from probemon.host.tap import Tap
from probemon.packs.pack import ProbePack

SITE = "resid_post.15"
MODEL_HIDDEN_SIZE = 576
LOAD_THRESHOLD = 0.3
N_ROOTS = 14
H1, H2 = 128, 64
LEVEL_SHARES = (0.08, 0.27, 0.35, 0.30)  # of the probes below the roots, level by level
FIRING_RATES = (0.05, 0.30)  # share of tokens at which a probe passes the load threshold, drawn evenly per probe
LOGIT_SPREAD = 1.5  # standard deviation of a probe's logit over the stream
PASSAGE = """The whale surfaced twice before dawn, and the two biologists on the deck wrote down the time, the heading \
and the temperature of the water. Nobody had expected a mother and calf so far north in March. By eight o'clock the \
harbour was awake: trucks backed up to the fish market, a baker carried out trays of bread, and somebody's radio said \
that the court had postponed its ruling on the election again. "They will never tell us the truth about the money," \
said the old lawyer, folding his newspaper. His granddaughter, who was nine, wanted to know whether a court could be \
afraid. He thought about it while he stirred his coffee. In the afternoon the wind turned, the ferry was cancelled, \
and the passengers waited in the church hall, where a nurse played the piano and a chess teacher from Lisbon lost four \
games to a boy with a broken arm. Proof that every even number is the sum of two primes is still missing, the teacher \
told him, but people keep looking, because a thing can be true for a long time before anyone knows why."""


class WorldError(Exception):
    """The stream or the hierarchy asked for cannot be made."""


@dataclass(frozen=True)
class World:
    """`parent [P]` (-1: a root), numbered as a pack numbers; `weights` stacked fp32; `states [T, D]` fp32,
    normalised.
    """

    parent: np.ndarray
    level: np.ndarray
    weights: dict[str, Tensor]
    states: Tensor
    states_are: str

    @property
    def n_probes(self) -> int:
        return len(self.parent)

    def children(self) -> list[list[int]]:
        """Ascending children of every probe."""
        found: list[list[int]] = [[] for _ in range(self.n_probes)]
        for child, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                found[parent].append(child)
        return found


def make_world(*, n_probes: int, n_tokens: int, hidden_size: int, seed: int) -> World:
    """Seeded. The states are the demo model's where they have its width and it is installed, random otherwise."""
    rng = np.random.default_rng(seed)
    parent, level = _hierarchy(n_probes, rng)
    states, states_are = _states(n_tokens, hidden_size, rng)
    return World(parent, level, _weights(n_probes, states, rng), states, states_are)


def write_files(world: World, folder: Path) -> list[Path]:
    """One state dict a probe, under the names that the slow twin's modules have."""
    names = {"0.weight": "w1", "0.bias": "b1", "3.weight": "w2", "3.bias": "b2", "6.weight": "w3", "6.bias": "b3"}
    folder.mkdir()
    paths = []
    for probe in range(world.n_probes):
        rows = {name: world.weights[key][probe].clone() for name, key in names.items()}
        rows["6.weight"], rows["6.bias"] = rows["6.weight"][None], rows["6.bias"][None]
        paths.append(folder / f"{name_of(probe)}_classifier.pt")
        torch.save(rows, paths[-1])
    return paths


def write_pack(world: World, folder: Path, norm: str = "none") -> ProbePack:
    """The same weights as a pack. The states are normalised already, so its input is read as it is (`norm`: or a
    host's, as the pack reads them).
    """
    concepts = [
        {"id": name_of(i), "name": name_of(i), "parents": [name_of(p)] if p >= 0 else []}
        for i, p in enumerate(world.parent.tolist())
    ]
    pack = ProbePack.write(
        folder,
        name="random-profile",
        concepts=concepts,
        weights=world.weights,
        score_rule="independent",
        inputs=[{"site": SITE, "norm": norm}],
        host={"hidden_size": world.states.shape[1]},
        licence="Apache-2.0",
        card="Random weights, for measuring time only.\n",
    )
    # Ties go to the lower number, so both managers must number alike.
    assert [concept["id"] for concept in pack.concepts] == [name_of(i) for i in range(world.n_probes)]
    return pack


def name_of(probe: int) -> str:
    return f"random-{probe:05d}"


def _hierarchy(n_probes: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    n_roots = min(N_ROOTS, n_probes // 8)
    sizes = [n_roots, *(int((n_probes - n_roots) * share) for share in LEVEL_SHARES)]
    sizes[-1] += n_probes - sum(sizes)
    parent, first = [np.full(n_roots, -1)], 0
    for above, size in itertools.pairwise(sizes):
        # Heavy-tailed: most have a few children or none, some have dozens, which is what made the original's bursts.
        share = rng.pareto(1.5, above) + 0.1
        parent.append(first + np.sort(rng.choice(above, size, p=share / share.sum())))
        first += above
    return np.concatenate(parent), np.repeat(np.arange(len(sizes)), sizes)


def _states(n_tokens: int, hidden_size: int, rng: np.random.Generator) -> tuple[Tensor, str]:
    why = f"the demo model's states have width {MODEL_HIDDEN_SIZE}"
    if hidden_size == MODEL_HIDDEN_SIZE:
        try:
            return _model_states(n_tokens)
        except MissingExtra as error:
            why = str(error)
    # The same lag-one correlation as the demo model's centred states have, roughly.
    noise = rng.standard_normal((n_tokens, hidden_size)).astype(np.float32)
    for t in range(1, n_tokens):
        noise[t] = 0.5 * noise[t - 1] + np.sqrt(0.75) * noise[t]
    states = torch.nn.functional.layer_norm(torch.from_numpy(noise), (hidden_size,))
    return states, f"random and autocorrelated ({why}), LayerNorm applied"


def _model_states(n_tokens: int) -> tuple[Tensor, str]:
    from transformers.utils import logging

    from probemon.bundled import MODEL_ID, load_bundled

    logging.disable_progress_bar()
    model, tokenizer = load_bundled()
    ids = tokenizer(PASSAGE, return_tensors="pt")
    found: list[Tensor] = []
    with Tap(model, [SITE], lambda _, hidden: found.append(hidden)), torch.no_grad():
        model(**ids)
    # The first token is an attention sink whose state is a hundred times longer than any other's.
    states = found[0][0, 1:].to(torch.float32)
    if n_tokens > len(states):
        raise WorldError(
            f"--tokens is {n_tokens}, the text has {len(states)} (random states, any --hidden but {MODEL_HIDDEN_SIZE},"
            " have no end)"
        )
    states = torch.nn.functional.layer_norm(states[:n_tokens], (MODEL_HIDDEN_SIZE,))
    return states, f"real: {MODEL_ID} at {SITE}, one token after another of a fixed text, LayerNorm applied"


def _weights(n_probes: int, states: Tensor, rng: np.random.Generator) -> dict[str, Tensor]:
    def normal(*shape: int, scale: float) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * np.float32(scale))

    d = states.shape[1]
    w1, w2, w3 = (
        normal(n_probes, *s, scale=k) for s, k in (((H1, d), d**-0.5), ((H2, H1), H1**-0.5), ((H2,), H2**-0.5))
    )
    # Centred on the stream: real states share a large common part, which would fix every probe's answer.
    b1 = normal(n_probes, H1, scale=0.1) - w1 @ states.mean(dim=0)
    b2 = normal(n_probes, H2, scale=0.1)
    logits = torch.empty(len(states), n_probes)
    for probe in range(n_probes):
        h = (states @ w1[probe].T + b1[probe]).relu()
        logits[:, probe] = (h @ w2[probe].T + b2[probe]).relu() @ w3[probe]
    gain = LOGIT_SPREAD / logits.std(dim=0).clamp_min(1e-3)
    rates = rng.uniform(*FIRING_RATES, n_probes)
    cut = np.log(LOAD_THRESHOLD / (1 - LOAD_THRESHOLD))
    centre = [cut - LOGIT_SPREAD * NormalDist().inv_cdf(1 - rate) for rate in rates.tolist()]
    b3 = torch.tensor(centre, dtype=torch.float32) - gain * logits.mean(dim=0)
    return {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "w3": w3 * gain[:, None], "b3": b3}
