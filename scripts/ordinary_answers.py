"""Writes the kinds of ordinary text that are answers of the demo model, `answer` and `draft`.

    python scripts/ordinary_answers.py --kind answer --prompts FILE    # one prompt a line
    python scripts/ordinary_texts.py                                   # then counts

What a model writes is what its monitors read most, and differs from what people write: it repeats itself, apologises,
and starts sentences alike. Every second answer is greedy, the others are sampled.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ordinary_texts import ANSWERS, FOLDER
from probemon.bundled import load_bundled
from probemon.host.chat_dates import CHAT_DATE
from probemon.host.chat_template import render
from probemon.util.files import write_text_atomically

TOKENS, TEMPERATURE, BATCH = 160, 0.8, 10


def answers(prompts: list[str], model: Any, tokenizer: Any, *, greedy: bool, seed: int) -> list[str]:
    """Return an answer to each prompt."""
    torch.manual_seed(seed)
    tokenizer.padding_side = "left"
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [render(tokenizer, chat, date=CHAT_DATE, add_generation_prompt=True).text for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    options = {"do_sample": False} if greedy else {"do_sample": True, "temperature": TEMPERATURE}
    ids = model.generate(**inputs, **options, max_new_tokens=TOKENS, pad_token_id=tokenizer.pad_token_id)
    said = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=ANSWERS, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    arguments = parser.parse_args()
    prompts = [line.strip() for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    model, tokenizer = load_bundled()
    found: dict[int, str] = {}
    for greedy in (True, False):
        # Prompts of a like length together, so that little is padded.
        places = sorted(range(greedy, len(prompts), 2), key=lambda i: (len(prompts[i]), i))
        for at in range(0, len(places), BATCH):
            batch = places[at : at + BATCH]
            said = answers([prompts[i] for i in batch], model, tokenizer, greedy=greedy, seed=at)
            found |= dict(zip(batch, said, strict=True))
    rows = [
        {"messages": [{"role": "user", "content": prompts[i]}, {"role": "assistant", "content": found[i]}]}
        for i in range(len(prompts))
        if found[i]
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_text_atomically(FOLDER / f"{arguments.kind}.jsonl", "\n".join(lines) + "\n")
    print(f"{len(rows)} of {len(prompts)} prompts were answered")


if __name__ == "__main__":
    main()
