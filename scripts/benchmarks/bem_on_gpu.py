"""Adapters on hosts whose formats torchao has for CUDA alone: int4 of its own packing, sparse kernels, float8 products.

python scripts/benchmarks/bem_on_gpu.py              # on a machine with a GPU and torchao; one line for each format

A format that this GPU or torchao does not have is named, with its reason. The exit status is 1 where an adapter changes
a host before it learned, or leaves something behind. No GPU has run this yet.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/adapters/bem")]
import test_bem_quantised_hosts as hosts  # noqa: E402

from probemon.adapters.bem import attach_bem  # noqa: E402
from probemon.adapters.bem.training import TrainSettings, train  # noqa: E402


def sparse(host):
    from torchao.sparsity import semi_sparse_weight, sparsify_

    sparsify_(hosts.make_small(host, "two of four"), semi_sparse_weight(), filter_fn=hosts.linear)


def quantised(name, **settings):
    def change(host):
        from torchao import quantization

        quantization.quantize_(host, getattr(quantization, name)(**settings), filter_fn=hosts.linear)

    return change


WAYS = {
    "int4 weights": quantised("Int4WeightOnlyConfig", group_size=32),
    "float8 weights and activations": quantised("Float8DynamicActivationFloat8WeightConfig"),
    "2:4 sparse kernels": sparse,
}


def main() -> int:
    ids, failed = hosts.IDS.cuda(), False
    for way, change in WAYS.items():
        host = hosts.make_host().cuda()
        try:
            change(host)
            with torch.no_grad():
                bare = host(ids).logits
        except Exception as error:  # each format has its own way of saying that it is not here
            print(f"{way}: not here ({type(error).__name__}: {error})")
            continue
        with attach_bem(host, hosts.CONFIG, impl="auto") as bem:
            with torch.no_grad():
                fresh = torch.equal(host(ids).logits, bare)
            try:
                losses = train(bem, [{"input_ids": ids, "labels": ids}], TrainSettings(n_steps=3, n_warmup=0)).losses
            except Exception as error:  # kernels for inference alone have no backward
                losses = f"no training ({type(error).__name__}: {error})"
        with torch.no_grad():
            clean = torch.equal(host(ids).logits, bare)
        failed |= not (fresh and clean)
        said = ["identical" if same else "CHANGED" for same in (fresh, clean)]
        print(f"{way}: fresh {said[0]}, afterwards {said[1]}, {losses}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
