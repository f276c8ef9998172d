"""One of two processes (torchrun): python -m torch.distributed.run --nproc_per_node 2 two_ranks.py WHAT KIND."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipe_rows.hosts import IDS, Watch, largest, make
from recipe_rows.training import gradients, step


def data(kind: str) -> dict[str, float]:
    """Gradients of both halves of a batch, averaged over the processes."""
    from torch.nn.parallel import DistributedDataParallel

    model, plain = make(kind).train(), make(kind)
    step(plain)
    half = IDS.chunk(2)[dist.get_rank()]
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with Watch(model, training=True) as watch:
        wrapped(input_ids=half, labels=half, use_cache=False).loss.backward()
    return {"value": largest(gradients(model), gradients(plain)), "watched": watch.distance(half, last=0)}


def tensor(kind: str) -> dict[str, float]:
    """Projections cut by columns or rows; what they give is whole on both processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, plain = make(kind), make(kind)
    columns = ColwiseParallel(output_layouts=Replicate())  # gathered, since gate and up lie in one matrix
    rows = RowwiseParallel(input_layouts=Replicate())
    names = {
        "ltm": ("mlp.gate_up_proj", "mlp.down_proj"),
        "falcon_h1": ("feed_forward.up_proj", "feed_forward.down_proj"),
    }
    first, last = names[kind]
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {first: columns, last: rows, "self_attn.o_proj": rows})
    with torch.no_grad():
        with Watch(model) as watch:
            logits = model(IDS).logits
        expected = plain(IDS).logits
    return {"value": largest(logits, expected), "watched": watch.distance(IDS, plain=plain, last=0)}


class Stage(nn.Module):
    """Half of a host: the layers of this process; the first stage embeds, the last one gives logits."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        self.model, self.number = model, number
        self.decoder = model.model if hasattr(model, "model") else model.backbone
        layers = self.decoder.layers
        self.mine = layers[number * len(layers) // 2 : (number + 1) * len(layers) // 2]

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens or states to states or logits."""
        decoder = self.decoder
        if self.number == 0:
            hidden = decoder.embed_tokens(hidden) if hasattr(decoder, "embed_tokens") else decoder.embeddings(hidden)
        for layer in self.mine:
            hidden = layer(hidden, *self._more(hidden))
        if self.number == 0:
            return hidden
        norm = decoder.norm if hasattr(decoder, "norm") else decoder.norm_f
        return self.model.lm_head(norm(hidden))

    def _more(self, hidden: Tensor) -> tuple[Any, ...]:
        """What a layer with a memory needs beside the states."""
        if not hasattr(self.decoder, "_rotation"):
            return ()
        b, t, _ = hidden.shape
        at = torch.arange(t)
        near = (at <= at[:, None]) & (at > at[:, None] - self.model.config.sliding_window)
        return (
            self.decoder._rotation(at.expand(b, t), hidden.dtype),
            near[None, None],
            torch.ones(b, t, dtype=torch.bool),
        )


def pipeline(kind: str) -> dict[str, float]:
    """Two stages, four micro-batches of one row each."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model, plain, rank = make(kind), make(kind), dist.get_rank()
    stage = PipelineStage(Stage(model, rank), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=len(IDS))
    with torch.no_grad():
        out = schedule.step(IDS) if rank == 0 else schedule.step()
        value = 0.0 if rank == 0 else largest(out, plain(IDS).logits)
    return {"value": value}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"data": data, "tensor": tensor, "pipeline": pipeline}[sys.argv[1]](sys.argv[2])
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps({key: max(one[key] for one in everyone) for key in found}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the ordinary way
