"""One of two processes that run a tiny model together (torchrun): what test_hosts.py checks is printed by rank 0.

torchrun --nproc_per_node 2 tensor_parallel.py MODEL PACK
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from probemon import DynamicProbeManager, ProbePack
from probemon.errors import ConceptRaised, ConfigError

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto").eval()
manager = DynamicProbeManager(ProbePack.open(sys.argv[2]), keep_top_k=6)
ids, mask = torch.tensor([[0, 0, 1, 5, 9], [1, 44, 3, 17, 8]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": 60, "pad_token_id": 0}
found = {}
for name, above in (("free", 0.9999999), ("stopped", 0.0)):
    with manager.attach(model) as run:
        run.on("c3", above=above)
        out = model.generate(ids, **options)
    found[name] = {"out": out.tolist()}
    if dist.get_rank() == 0:
        result = run.result(out)
        found[name] |= {
            "row": result.row.tolist(),
            "position": result.position.tolist(),
            "unseen": list(result.coverage.unseen),
            "ranks": result.host.n_ranks,
            "scores": [
                [result.scores.active(i).tolist(), result.scores.active_scores(i).tolist()] for i in range(len(result))
            ],
        }
    else:
        assert run.recordings[0].n_entries == 0
        try:
            run.result(out)
        except ConfigError as error:
            found[name]["refused"] = str(error)
with manager.attach(model) as run:
    run.on("c3", above=0.0, action="raise")
    try:
        model.generate(ids, **options)
    except ConceptRaised as error:
        found["raised"] = str(error)
everyone = [None, None]
dist.all_gather_object(everyone, found)
if dist.get_rank() == 0:
    print(json.dumps(everyone), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that ends in the ordinary way
