"""Trains all probes of a site together, so that path scores are probabilities.

    weights = fit(x, labels, parents, seeds, Recipe(), shape=())     # linear: {"w1" [P, 1, D], "b1" [P, 1]}

The loss is that of the path score (product of the sigmoids from the root), at every token. So a probe learns its
concept given its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional
from tqdm import tqdm

Weights = dict[str, torch.Tensor]
HIGHEST = -1e-6  # of log-probabilities: the complement needs a logarithm


@dataclass(frozen=True)
class Recipe:
    """`rate`: peak of one cycle; `decay`: of matrices only."""

    epochs: int = 4
    batch: int = 2048
    rate: float = 3e-3
    decay: float = 0.01


LINEAR = Recipe(decay=0.1)
# From scratch, hidden layers overfit.
HIDDEN = Recipe(epochs=1, rate=3e-4, decay=0.05)


def initial(shape: tuple[int, ...], seeds: list[int], width: int, linear: Weights | None = None) -> Weights:
    """Initial weights [P, ...]: zero for linear probes (shape ()), else He-normal from each probe's seed.

    With `linear`, two hidden units carry that probe as relu(z) - relu(-z).
    """
    n = len(seeds)
    if not shape:
        return {"w1": torch.zeros(n, 1, width), "b1": torch.zeros(n, 1)}
    first, second = shape
    weights = {
        "w1": torch.empty(n, first, width),
        "b1": torch.zeros(n, first),
        "w2": torch.empty(n, second, first),
        "b2": torch.zeros(n, second),
        "w3": torch.empty(n, second),
        "b3": torch.zeros(n),
    }
    for probe, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        for name, fan_in in (("w1", width), ("w2", first), ("w3", second)):
            weights[name][probe].normal_(0.0, (2 / fan_in) ** 0.5, generator=generator)
    if linear is not None:
        for unit, sign in ((0, 1.0), (1, -1.0)):
            weights["w1"][:, unit] = sign * linear["w1"][:, 0]
            weights["b1"][:, unit] = sign * linear["b1"][:, 0]
            weights["w2"][:, unit] = 0.0
            weights["w2"][:, unit, unit] = 1.0
        weights["w3"].zero_()
        weights["w3"][:, 0], weights["w3"][:, 1] = 1.0, -1.0
    return weights


def forward(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Logits [N, P] of every probe for x [N, D]."""
    n_probes, width, _ = weights["w1"].shape
    flat = functional.linear(x, weights["w1"].reshape(n_probes * width, -1), weights["b1"].reshape(-1))
    if "w3" not in weights:
        return flat
    hidden = torch.relu(flat).view(len(x), n_probes, width).transpose(0, 1)  # [P, N, H1]
    hidden = torch.relu(torch.baddbmm(weights["b2"].unsqueeze(1), hidden, weights["w2"].transpose(1, 2)))
    return (torch.bmm(hidden, weights["w3"].unsqueeze(-1)).squeeze(-1) + weights["b3"].unsqueeze(-1)).T


def ancestors_of(parents: torch.Tensor) -> torch.Tensor:
    """[P, P] fp32: 1 if the column's concept is the row's or its ancestor."""
    above = torch.eye(len(parents))
    for probe, parent in enumerate(parents.tolist()):
        if parent >= 0:
            above[probe] = torch.maximum(above[probe], above[parent])
    return above


def log_scores(logits: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """Logarithms [N, P] of path scores, at most `HIGHEST`."""
    return (functional.logsigmoid(logits) @ ancestors.T).clamp(max=HIGHEST)


def losses(logits: torch.Tensor, labels: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """Cross-entropy [N, P] of path scores; 0 for label -1."""
    log_score = log_scores(logits, ancestors)
    complement = torch.log(-torch.expm1(log_score))
    return torch.where(labels == 1, -log_score, -complement) * (labels >= 0)


def sibling_pairs(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs of probes with a common parent, two tensors [Q]."""
    same = (parents[:, None] == parents[None, :]) & (parents[:, None] >= 0)
    same.fill_diagonal_(False)
    a, b = same.nonzero(as_tuple=True)
    return a, b


def ranking_losses(
    logits: torch.Tensor, labels: torch.Tensor, pairs: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Mean logistic loss [N] of logit differences of present and absent siblings (Burges et al. 2005, RankNet)."""
    a, b = pairs
    apart = (labels[:, a] == 1) & (labels[:, b] == 0)
    loss = functional.softplus(logits[:, b] - logits[:, a]) * apart
    return loss.sum(1) / apart.sum(1).clamp(min=1)


def starting_biases(labels: torch.Tensor, weight: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Biases [P] at which each score is its concept's share of tokens, given its parent."""
    share = ((labels == 1).float().T @ weight / weight.sum()).clamp(min=1e-6)
    above = torch.where(parents >= 0, share[parents.clamp(min=0)], torch.ones(()))
    return torch.logit((share / above).clamp(1e-5, 0.9))


@torch.no_grad()
def logits_of(x: torch.Tensor, weights: Weights, batch: int = 1024) -> torch.Tensor:
    """`forward` in batches."""
    return torch.cat([forward(part, weights) for part in x.split(batch)])


def fit(
    x: torch.Tensor,
    labels: torch.Tensor,
    parents: torch.Tensor,
    seeds: list[int],
    recipe: Recipe,
    *,
    weight: torch.Tensor | None = None,
    shape: tuple[int, ...] = (),
    seed: int = 0,
    start: Weights | None = None,
    ranking: float = 0.0,
    progress: bool = True,
) -> Weights:
    """Weights of P probes for standardised x [N, D] and labels [N, P]; `weight` [N] of tokens."""
    weight = torch.ones(len(x)) if weight is None else weight
    weights = {name: value.clone() for name, value in (start or initial(shape, seeds, x.shape[1])).items()}
    if not shape and start is None:
        weights["b1"][:, 0] = starting_biases(labels, weight, parents)
    for value in weights.values():
        value.requires_grad_(True)
    matrices = [value for name, value in weights.items() if name.startswith("w")]
    biases = [value for name, value in weights.items() if name.startswith("b")]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.decay}, {"params": biases, "weight_decay": 0.0}], lr=recipe.rate
    )
    steps = -(-len(x) // recipe.batch) * recipe.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.rate, total_steps=steps, pct_start=0.1)
    generator, above = torch.Generator().manual_seed(seed), ancestors_of(parents)
    pairs = sibling_pairs(parents) if ranking else None
    with tqdm(total=steps, desc=f"training {len(seeds)} probes", unit="step", disable=not progress) as bar:
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(x), generator=generator).split(recipe.batch):
                logits = forward(x[rows].float(), weights)
                loss = losses(logits, labels[rows], above).sum(1) @ weight[rows]
                if pairs is not None and len(pairs[0]):
                    loss = loss + ranking * ranking_losses(logits, labels[rows], pairs) @ weight[rows]
                optimiser.zero_grad()
                (loss / len(rows)).backward()
                optimiser.step()
                schedule.step()
                bar.update()
    return {name: value.detach() for name, value in weights.items()}
