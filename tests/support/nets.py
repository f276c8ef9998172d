"""Stacked random probes of every shape, their scores in fp64, and probes whose scores are told."""

import numpy as np
import torch

from probemon.packs.quantize import quantize_weights

SHAPES = {"linear": (), "one layer": (24,), "two layers": (24, 9)}


def weights(shape, d, dtype, n=11, seed=0):
    if dtype == torch.int8:
        return quantize_weights(weights(shape, d, torch.float32, n, seed))
    generator = torch.Generator().manual_seed(seed)

    def random(*size, scale=1.0):
        return torch.randn(size, generator=generator) * scale

    h1 = shape[0] if shape else 1
    made = {"w1": random(n, h1, d, scale=d**-0.5).to(dtype), "b1": random(n, h1)}
    if len(shape) == 2:
        made |= {"w2": random(n, shape[1], h1, scale=0.2).to(dtype), "b2": random(n, shape[1])}
    if shape:
        made |= {"w3": random(n, shape[-1], scale=0.3).to(dtype), "b3": random(n)}
    return made


def dequantized(net):
    """What int8 weights mean, in fp64; others as they are."""
    return {
        name: w.double() * net[f"{name}_scale"].double()[..., None] if f"{name}_scale" in net else w
        for name, w in net.items()
    }


def oracle(net, x):
    """fp64, probe by probe."""
    net = dequantized(net)
    columns = []
    for p in range(len(net["w1"])):
        z = x.double() @ net["w1"][p].double().T + net["b1"][p].double()
        if "w2" in net:
            z = z.relu() @ net["w2"][p].double().T + net["b2"][p].double()
        z = z.relu() @ net["w3"][p].double() + net["b3"][p].double() if "w3" in net else z[:, 0]
        columns.append(z.sigmoid())
    return torch.stack(columns, dim=1)


def logit_net(ticks):
    """Linear probes that give state r, the r-th one-hot vector, the scores `ticks [N, P]`, nearly; equal ones stay
    equal.
    """
    with np.errstate(divide="ignore"):
        logits = np.clip(np.log(ticks.astype(np.float64)) - np.log1p(-ticks.astype(np.float64)), -30, 30)
    return {"w1": torch.from_numpy(logits.T.astype(np.float32).copy())[:, None], "b1": torch.zeros(ticks.shape[1], 1)}
