"""Compare continuous batching with the same requests alone: are texts and scores the same?

    python scripts/benchmarks/batching_exactness.py --out docs/benchmarks/batching_exactness.json

On the demo model, in its own bf16 and in fp32: four chats are generated one by one with `generate()`, together by
`generate_batch`, and each alone by `generate_batch`. Compared are the tokens, and the scores of all tokens up to the
first that differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.monitor.result import Result
from probemon.util.files import write_text_atomically
from provenance import about

QUESTIONS = ("Tell me about whales.", "What is a ship?", "Name three trees.", "Why is the sky blue?")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
N_TOKENS = 8
BATCHING = {"max_batch_tokens": 256, "page_size": 32, "num_blocks": 64, "allow_block_sharing": False}


def by_generate(manager: Any, model: Any, prompts: list[list[int]]) -> list[Result]:
    """Return the result of each prompt by a call of its own."""
    results = []
    for ids in prompts:
        with manager.attach(model) as run:
            out = model.generate(torch.tensor([ids]), max_new_tokens=N_TOKENS, do_sample=False)
        results.append(run.result(out))
    return results


def by_batching(manager: Any, model: Any, prompts: list[list[int]]) -> Result:
    """Return the result of the prompts together, a row each."""
    with manager.attach(model) as run:
        outputs = model.generate_batch(
            prompts,
            max_new_tokens=N_TOKENS,
            do_sample=False,
            progress_bar=False,
            continuous_batching_config=ContinuousBatchingConfig(**BATCHING),
        )
    return run.result(outputs)


def compared(one: Result, row: int, other: Result, other_row: int) -> dict[str, Any]:
    """Compare two rows, token by token, up to the first token that differs."""
    tokens, others = one.tokens_of(row), other.tokens_of(other_row)
    same_text = one.token_id[tokens].tolist() == other.token_id[others].tolist()
    n, n_exact, largest = 0, 0, 0.0
    for a, b in zip(tokens.tolist(), others.tolist(), strict=False):
        if one.token_id[a] != other.token_id[b]:
            break
        if one.coverage.unseen[a] or other.coverage.unseen[b]:
            continue
        mine, theirs = (
            dict(zip(r.scores.active(i).tolist(), r.scores.active_scores(i).tolist(), strict=True))
            for r, i in ((one, a), (other, b))
        )
        n, n_exact = n + 1, n_exact + (mine == theirs)
        largest = max([largest, *(abs(mine[p] - theirs[p]) for p in mine.keys() & theirs.keys())])
    return {"same_text": same_text, "tokens": n, "tokens_with_equal_scores": n_exact, "largest_difference": largest}


def measure(dtype: torch.dtype) -> dict[str, Any]:
    """Compare on the demo model in a dtype."""
    model, tokenizer = load_bundled(dtype)
    manager = DynamicProbeManager(ProbePack.open("probes/wordnet-smollm2-135m"))
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in QUESTIONS
    ]
    alone, together = by_generate(manager, model, prompts), by_batching(manager, model, prompts)
    single = [by_batching(manager, model, [ids]) for ids in prompts]
    return {
        "together, beside generate()": [compared(together, i, alone[i], 0) for i in range(len(prompts))],
        "together, beside a batch of one": [compared(together, i, single[i], 0) for i in range(len(prompts))],
    }


def main() -> int:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = {name: measure(dtype) for name, dtype in DTYPES.items()}
    result = {**about(), "tokens_generated": N_TOKENS, "batching": BATCHING, "found": found}
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
