"""Random packs with softmax groups, and their scores in fp64."""

import torch

from conftest import HIDDEN
from nets import dequantized, weights
from probemon import ProbePack
from probemon.core.dtypes import input_dtype

# Two roots on their own, a group of three roots; below the first two a group each, below one of these a group of two
# with a sibling between them that stands alone.
PARENTS = [[], [], [], [], [], [0], [0], [1], [1], [1], [5], [5], [5], [0], [2, 3]]
GROUPS = [-1, -1, 7, 7, 7, 2, 2, 5, 5, 5, 0, -1, 0, -1, -1]


def write(path, shape, dtype, rule="independent", d=HIDDEN, seed=0, sites=("resid_post.1",), **changes):
    n = len(PARENTS)
    random = torch.Generator().manual_seed(seed)
    arguments = {
        "name": "groups",
        "concepts": [
            {"id": f"c{i}", "name": f"c{i}", "parents": [f"c{p}" for p in above]} for i, above in enumerate(PARENTS)
        ],
        "weights": weights(shape, d, dtype, n=n, seed=seed),
        "score_rule": rule,
        "inputs": [{"site": site, "norm": "rmsnorm"} for site in sites],
        "input_index": torch.tensor([0 if i != 11 else len(sites) - 1 for i in range(n)]),
        "softmax_group": torch.tensor(GROUPS),
        "host": {"model_id": "none"},
        "licence": "CC0-1.0",
        "card": "Random.\n",
        "alert_threshold": torch.rand(n, generator=random) / 2 + 0.2,
        "golden_hidden": torch.randn(3, len(sites), d, generator=random),
    }
    return ProbePack.write(path, **{**arguments, **changes})


def everything_by_fp64(pack, hidden):
    """Scores [N, P] in fp64, by the words of the format; probes numbered as in the pack."""
    net = {name: tensor.clone() for name, tensor in dequantized(pack.weights).items()}
    x = hidden.double()
    x = (x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()).to(input_dtype(pack.dtype)).double()
    logits = []
    for p in range(pack.n_probes):
        z = x @ net["w1"][p].double().T + net["b1"][p].double()
        if "w2" in net:
            z = z.relu() @ net["w2"][p].double().T + net["b2"][p].double()
        z = z.relu() @ net["w3"][p].double() + net["b3"][p].double() if "w3" in net else z[:, 0]
        logits.append(z)
    z, scores = torch.stack(logits, dim=1), torch.stack(logits, dim=1).sigmoid()
    group_of = {f"c{i}": group for i, group in enumerate(GROUPS)}
    groups = [group_of[concept["id"]] for concept in pack.concepts]
    for p, group in enumerate(groups):
        if group >= 0:
            others = [q for q, other in enumerate(groups) if other == group]
            scores[:, p] = (z[:, p] - z[:, others].logsumexp(dim=1)).exp()
    if pack.score_rule == "path":
        for p, concept in enumerate(pack.concepts):
            above = [pack.find(parent) for parent in concept["parents"]]
            if above:
                scores[:, p] *= scores[:, above].amax(dim=1)
    return scores
