"""An adapter over two processes (DDP, FSDP2, accelerate, tensor parallel) equals one in a single process.

The program is tests/programs/bem_ranks.py; everything runs in fp32, over gloo on a CPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bem_oracle import make_host
from probemon.adapters.bem.saved import read_saved

LEVELS = ("token", "chunk")
# Differences of fp32 sums in another order: of values of the size of 1, and of gradients smaller than that.
ROUNDING, OF_GRADIENTS = 1e-5, 1e-6


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What each of the two ranks found, and the folder that they saved adapters in."""
    folder = tmp_path_factory.mktemp("ranks")
    make_host(key_value_heads=2).save_pretrained(folder / "host")
    program = Path(__file__).parents[2] / "programs/bem_ranks.py"
    run = "-m torch.distributed.run --nproc_per_node 2 --master_port 0 --rdzv-backend c10d --rdzv-endpoint localhost:0"
    words = [sys.executable, *run.split(), str(program), str(folder / "host"), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), folder


@pytest.mark.parametrize("way", ["ddp", "fsdp", "accelerate", "peft", "tp"])
@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_train_as_one_process(ran, way, level):
    for found in ran[0]:
        assert found[f"size {level}"]["gradients"] > 1e4 * OF_GRADIENTS  # else nearly anything would agree
        assert found[f"{way} {level}"]["losses"] < ROUNDING
        assert found[f"{way} {level}"]["gradients"] < OF_GRADIENTS
        assert found[f"{way} {level}"]["parameters"] < ROUNDING


@pytest.mark.parametrize("level", LEVELS)
def test_sharded_model_gives_the_logits_of_a_whole_one(ran, level):
    for found in ran[0]:
        assert found[f"size {level}"]["logits"] > 1e4 * ROUNDING
        for way, sharded in (("fsdp", None), ("accelerate", [True, False]), ("peft", [True, True])):
            assert found[f"{way} {level}"]["logits"] == 0.0
            assert found[f"{way} {level}"].get("sharded") == sharded  # the host, the adapter
        assert found[f"tp {level}"]["logits"] < ROUNDING
        assert found[f"tp {level}"]["tokens"] == 0  # of generate(), with a cache


def test_tensor_parallel_ranks_hold_half_of_each_sharded_matrix(ran):
    for found in ran[0]:
        assert found["tp chunk"]["shards"] == {"q": [16, 8], "k": [16, 8], "v": [16, 8], "o": [8, 16], "down": [12, 16]}


def test_adapter_saved_from_two_ranks_equals_that_of_one(ran):
    """Rank 0 writes that of a tensor-parallel host; by FSDP2 each rank knows the whole adapter, and the same one."""
    found, folder = ran
    for level in LEVELS:
        assert [of_rank[f"tp {level}"]["reloaded"] < ROUNDING for of_rank in found] == [True, True]
        saved = [read_saved(folder / name) for name in (f"tp-{level}", f"fsdp-{level}-0", f"fsdp-{level}-1")]
        assert len({one.host["fingerprint"] for one in saved}) == 1
        assert all((saved[1].tensors[name] == saved[2].tensors[name]).all() for name in saved[1].tensors)


def test_routing_of_a_tensor_parallel_model_is_counted_once(ran):
    """4 prompts of 11 tokens, and the 5 of each row that the host then reads."""
    assert [of_rank["tp token"]["n_tokens"] for of_rank in ran[0]] == [4 * 16, 0]
