"""All probes of a site trained together, each as if it were alone.

    weights = fit(x, labels, parents, seeds, split, Recipe(), shape=())        # linear: {"w1" [P, 1, D], "b1" [P, 1]}
    weights = fit(..., shape=(32, 16))                                         # ReLU layers, names as in a pack

The losses of the probes are summed and share no parameter, and AdamW works element by element: a probe trained in
a bank is the probe trained alone, up to the order of floating-point sums. Every probe has its own initial weights,
drawn from a seed of its own, and keeps its own best epoch by validation loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional
from tqdm import tqdm

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    epochs: int = 8
    batch: int = 512
    rate: float = 3e-3  # the peak of one cycle
    decay: float = 0.01
    outside: float = 0.5  # share of a probe's negative weight on points outside its parent


LINEAR = Recipe()
# Hidden layers are trained on from the linear solution, gently: from scratch they overfit.
HIDDEN = Recipe(epochs=2, rate=3e-4, decay=0.05)
MAX_INSIDE = 1000.0  # a point inside the parent weighs at most this many times one outside


def initial(shape: tuple[int, ...], seeds: list[int], width: int, linear: Weights | None = None) -> Weights:
    """Weights [P, ...] before training: zero for linear probes (shape ()), else He-normal from each probe's seed.

    With `linear`, the first two units of both hidden layers carry that linear probe as relu(z) - relu(-z) and the last
    layer reads nothing else: training begins at its solution and is kept only where validation improves on it.
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
    """Logits [N, P] of every probe for x [N, D]; layers and names as in a pack, ReLU between layers."""
    n_probes, width, _ = weights["w1"].shape
    flat = functional.linear(x, weights["w1"].reshape(n_probes * width, -1), weights["b1"].reshape(-1))
    if "w3" not in weights:
        return flat
    hidden = torch.relu(flat).view(len(x), n_probes, width).transpose(0, 1)  # [P, N, H1]
    hidden = torch.relu(torch.baddbmm(weights["b2"].unsqueeze(1), hidden, weights["w2"].transpose(1, 2)))
    return (torch.bmm(hidden, weights["w3"].unsqueeze(-1)).squeeze(-1) + weights["b3"].unsqueeze(-1)).T


@dataclass(frozen=True)
class Balance:
    """Weight of a point in a probe's loss, by where it stands: [P] each."""

    positive: torch.Tensor
    inside: torch.Tensor
    outside: torch.Tensor


def balance(labels: torch.Tensor, parents: torch.Tensor, recipe: Recipe) -> Balance:
    """Half of a probe's weight on its positives, half on its negatives, of which `outside` lies outside its parent.

    Conditional training: a probe under the path rule is asked "given the parent", so its siblings' points count most.
    """
    n_positive = (labels == 1).sum(0).clamp(min=1).float()
    negative = labels == 0
    inside = negative & inside_parent(labels, parents)
    n_inside = inside.sum(0).float()
    n_outside = (negative.sum(0).float() - n_inside).clamp(min=1)
    is_root = parents < 0
    outside = torch.where(is_root, torch.ones(()), torch.full((), recipe.outside)) / n_outside
    within = torch.minimum((1 - recipe.outside) / n_inside.clamp(min=1), outside * MAX_INSIDE)
    return Balance(1 / n_positive, torch.where(is_root, outside, within), outside)


def inside_parent(labels: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """[N, P] bool: points to which the probe's parent applies; for a root, none."""
    return (labels[:, parents.clamp(min=0)] == 1) & (parents >= 0)


def losses(logits: torch.Tensor, labels: torch.Tensor, parents: torch.Tensor, weight: Balance) -> torch.Tensor:
    """Weighted cross-entropy of every probe, summed over the points: [P]; unknown labels weigh nothing."""
    positive = labels == 1
    w = torch.where(inside_parent(labels, parents), weight.inside, weight.outside)
    w = torch.where(positive, weight.positive, w) * (labels >= 0)
    # softplus(-z) for positives, softplus(z) for negatives
    return (functional.softplus(torch.where(positive, -logits, logits)) * w).sum(0)


@torch.no_grad()
def logits_of(x: torch.Tensor, weights: Weights, batch: int = 1024) -> torch.Tensor:
    """`forward` in batches, to bound memory."""
    return torch.cat([forward(part, weights) for part in x.split(batch)])


def fit(
    x: torch.Tensor,
    labels: torch.Tensor,
    parents: torch.Tensor,
    seeds: list[int],
    validation: tuple[torch.Tensor, torch.Tensor],
    recipe: Recipe,
    *,
    shape: tuple[int, ...] = (),
    seed: int = 0,
    start: Weights | None = None,
    progress: bool = True,
) -> Weights:
    """Weights of P probes for standardised x [N, D] fp32 and labels [N, P]; `validation` is (x, labels) likewise."""
    weights = {name: value.clone() for name, value in (start or initial(shape, seeds, x.shape[1])).items()}
    for value in weights.values():
        value.requires_grad_(True)
    optimiser = torch.optim.AdamW(weights.values(), lr=recipe.rate, weight_decay=recipe.decay)
    steps = -(-len(x) // recipe.batch) * recipe.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.rate, total_steps=steps, pct_start=0.2)
    generator = torch.Generator().manual_seed(seed)
    weight = balance(labels, parents, recipe)
    weight_v = balance(validation[1], parents, recipe)
    best = {name: value.detach().clone() for name, value in weights.items()}
    best_loss = losses(logits_of(validation[0], best), validation[1], parents, weight_v)
    with tqdm(total=steps, desc=f"training {len(seeds)} probes", unit="step", disable=not progress) as bar:
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(x), generator=generator).split(recipe.batch):
                loss = losses(forward(x[rows], weights), labels[rows], parents, weight)
                optimiser.zero_grad()
                # Scaled to a mean over the batch, the same for every probe.
                (loss.sum() * (len(x) / len(rows))).backward()
                optimiser.step()
                schedule.step()
                bar.update()
            now = losses(logits_of(validation[0], weights), validation[1], parents, weight_v)
            better = now < best_loss
            best_loss = torch.where(better, now, best_loss)
            for name, value in weights.items():
                best[name][better] = value.detach()[better]
    return best
