"""One of two processes that run and train one tiny host with an adapter on it (torchrun). Each makes the host whole
first, and what one process says of all rows; then how far the two together are from that is printed by rank 0, by name.

torchrun --nproc_per_node 2 bem_ranks.py HOST FOLDER
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.losses import LossWeights
from probemon.adapters.bem.peft_tuner import BemPeftConfig
from probemon.adapters.bem.training import Objective
from probemon.adapters.routing import RoutingMonitor

warnings.filterwarnings("ignore", category=FutureWarning)  # of tp_plan, which every supported transformers takes
torch.set_num_threads(1)
HOST, FOLDER = sys.argv[1], Path(sys.argv[2])
# Terms that are means over tokens: those over pairs of tokens are, over ranks, of each rank's rows.
WEIGHTS = LossWeights(entropy=0, decorrelation=0, flips=0)
SMALL = {"rank": 3, "width": 6, "chunk_tokens": 3, "prefix_tokens": 6, "token_limit": 8, "ema": 0.7}
SETTINGS = {
    "token": SMALL,
    "chunk": {**SMALL, "sites": ("q", "k", "v", "o", "down"), "spectral_cap": 0.8, "trust_region": 1.5},
}
CONFIGS = {name: BemConfig(**settings) for name, settings in SETTINGS.items()}
IDS = torch.randint(1, 60, (4, 11), generator=torch.Generator().manual_seed(1))
PROMPT = {"attention_mask": torch.ones(4, 11, dtype=torch.int64), "max_new_tokens": 6, "do_sample": False}
STEPS = 2


def load(**how):
    return AutoModelForCausalLM.from_pretrained(HOST, **how).eval()


def adapter(host, config):
    return randomise(attach_bem(host, config))


def randomise(bem):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in bem.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 3)
    return bem


def learn(objective, bem, ids, optimiser=None):
    """Losses, the first gradients, and the parameters in the end."""
    optimiser, losses, first = optimiser or torch.optim.AdamW(bem.parameters(), lr=1e-2), [], None
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = objective(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        losses.append(loss.detach())
        first = first or [whole(parameter.grad) for parameter in bem.parameters()]
        optimiser.step()
    return torch.stack(losses), first, [whole(parameter.detach()) for parameter in bem.parameters()]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def by_fsdp2():
    """An Accelerator that shards by FSDP2. By itself it takes that plugin on GPUs alone: here its kind is given."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    return accelerator


def is_sharded(module):
    return all(isinstance(parameter, DTensor) for parameter in module.parameters())


def say(host):
    with torch.no_grad():
        return host(IDS).logits, host.generate(IDS, **PROMPT)


def apart(ours, theirs):
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def compare(ours, theirs):
    names = ("losses", "gradients", "parameters")
    return {name: apart(a, b) for name, a, b in zip(names, ours, theirs, strict=True)}


accelerator = by_fsdp2()  # which begins the group, by gloo
rank, half = dist.get_rank(), IDS[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
found = {}
for name, config in CONFIGS.items():
    # One process, all rows.
    host = load()
    bare, _ = say(host)
    with adapter(host, config) as bem:
        logits, tokens = say(host)
        alone = learn(Objective(bem, WEIGHTS), bem, IDS)
    largest = max(float(gradient.abs().max()) for gradient in alone[1])
    found[f"size {name}"] = {"logits": apart(logits, bare), "gradients": largest}
    # DDP: the host on each rank, half of the rows.
    host = load()
    with adapter(host, config) as bem:
        losses, *rest = learn(DistributedDataParallel(Objective(bem, WEIGHTS)), bem, half)
        dist.all_reduce(losses)
        found[f"ddp {name}"] = compare((losses / 2, *rest), alone)
    # FSDP2: half of the host on each rank, half of the rows.
    host = load()
    mesh = init_device_mesh("cpu", (2,))
    for layer in host.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(host, mesh=mesh)
    with adapter(host, config) as bem:
        with torch.no_grad():
            spread = {"logits": apart(host(IDS).logits, logits)}
        losses, *rest = learn(DistributedDataParallel(Objective(bem, WEIGHTS)), bem, half)
        dist.all_reduce(losses)
        found[f"fsdp {name}"] = spread | compare((losses / 2, *rest), alone)
        bem.save_pretrained(FOLDER / f"fsdp-{name}-{rank}")
    # Accelerate shards the host: the adapter comes afterwards, and is whole on each rank.
    host, _ = accelerator.prepare(host := load(), torch.optim.SGD(host.parameters()))
    with adapter(host, config) as bem:
        spread = {"sharded": [is_sharded(host), is_sharded(bem)]}
        with torch.no_grad():
            spread["logits"] = apart(host(IDS).logits, logits)
        losses, *rest = learn(DistributedDataParallel(Objective(bem, WEIGHTS)), bem, half)
        dist.all_reduce(losses)
        found[f"accelerate {name}"] = spread | compare((losses / 2, *rest), alone)
    # Accelerate shards host and adapter together, as a method of PEFT. It learns the language model's loss alone.
    with adapter(load(), config) as bem:
        alone_in_peft = learn(bem.host, bem, IDS)
    tuned = get_peft_model(load(), BemPeftConfig(**SETTINGS[name], task_type="CAUSAL_LM"))
    randomise(tuned.bem)
    tuned, optimiser = accelerator.prepare(tuned, torch.optim.AdamW(tuned.bem.parameters(), lr=1e-2))
    spread = {"sharded": [is_sharded(tuned), is_sharded(tuned.bem)]}
    with torch.no_grad():
        spread["logits"] = apart(tuned(IDS).logits, logits)
    losses, *rest = learn(tuned, tuned.bem, half, optimiser)
    dist.all_reduce(losses)
    found[f"peft {name}"] = spread | compare((losses / 2, *rest), alone_in_peft)
    # Tensor parallel: half of every layer on each rank, all rows.
    host = load(tp_plan="auto")
    with adapter(host, config) as bem:
        shards = {site.kind: site.sizes_here for site in bem.sites}
        theirs, their_tokens = say(host)
        spread = {"logits": apart(theirs, logits), "tokens": apart(their_tokens, tokens), "shards": shards}
        with RoutingMonitor(host, bem=bem) as monitor:
            host.generate(IDS, **PROMPT)
        spread["n_tokens"] = monitor.report()["n_tokens"]
        spread |= compare(learn(Objective(bem, WEIGHTS), bem, IDS), alone)
        bem.save_pretrained(FOLDER / f"tp-{name}")
        with torch.no_grad():
            learned = host(IDS).logits
    with attach_bem(load(), FOLDER / f"tp-{name}") as bem, torch.no_grad():  # saved of the two, opened by one
        spread["reloaded"] = apart(bem.host(IDS).logits, learned)
    found[f"tp {name}"] = spread
everyone = [None, None]
dist.all_gather_object(everyone, found)
if rank == 0:
    print(json.dumps(everyone), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that ends in the ordinary way
