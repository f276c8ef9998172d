"""Hidden states of the host model at chosen points of texts, cached on disk.

    tokens = read_tokens(tokenizer, texts, points)              # which token each point reads
    hidden = extract(model, tokens, layers=[15], folder=cache)  # {15: [N, D] bf16}

A point is read at the token that covers its last character: the last sub-token of a word. Every text begins with
the beginning-of-sequence token. A cached file is named by everything that its content depends on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from .mentions import Point

BATCH_TOKENS = 4096
RECIPE = 1  # raise it when the reading of states changes, so that old cache files are not used


@dataclass(frozen=True)
class Tokens:
    """Texts as token ids, and where each point lies in them."""

    ids: list[list[int]]  # one list a text, beginning-of-sequence first
    text: torch.Tensor  # [N] int64
    at: torch.Tensor  # [N] int64, index into the text's ids
    id: torch.Tensor  # [N] int64, the token read


def read_tokens(tokenizer: Any, texts: list[str], points: list[Point]) -> Tokens:
    """Tokenise the texts and find each point's token; a text that begins with the BOS markup gets no second one."""
    bos = tokenizer.bos_token
    whole = [text if text.startswith(bos) else bos + text for text in texts]
    shift = [0 if text.startswith(bos) else len(bos) for text in texts]
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids = [list(row) for row in encoded["input_ids"]]
    ends = [[end for _, end in row] for row in encoded["offset_mapping"]]
    at = torch.zeros(len(points), dtype=torch.int64)
    for i, point in enumerate(points):
        if point.end > 0:
            last = shift[point.text] + point.end
            row = ends[point.text]
            at[i] = next((j for j, end in enumerate(row) if end >= last), len(row) - 1)
    text = torch.tensor([point.text for point in points], dtype=torch.int64)
    chosen = torch.tensor([ids[t][a] for t, a in zip(text.tolist(), at.tolist(), strict=True)], dtype=torch.int64)
    return Tokens(ids, text, at, chosen)


def cache_key(tokens: Tokens, fingerprint: str, layer: int) -> str:
    """Names a cache file by texts, points, host weights, layer and this module's recipe."""
    digest = hashlib.sha256(json.dumps([RECIPE, BATCH_TOKENS, fingerprint, layer, torch.__version__]).encode())
    digest.update(json.dumps(tokens.ids).encode())
    digest.update(tokens.text.numpy().tobytes())
    digest.update(tokens.at.numpy().tobytes())
    return digest.hexdigest()[:24]


def extract(model: Any, tokens: Tokens, layers: list[int], fingerprint: str, folder: Path) -> dict[int, torch.Tensor]:
    """Hidden states [N, D] in the host's dtype for each layer (output of that decoder block), raw."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {layer: folder / f"states-{cache_key(tokens, fingerprint, layer)}.safetensors" for layer in layers}
    found = {layer: load_file(file)["hidden"] for layer, file in files.items() if file.is_file()}
    missing = sorted(set(layers) - set(found))
    if missing:
        for layer, hidden in _forward(model, tokens, missing).items():
            half_made = files[layer].with_suffix(".part")
            save_file({"hidden": hidden}, half_made)
            half_made.rename(files[layer])
            found[layer] = hidden
    return found


def _batches(tokens: Tokens) -> list[list[int]]:
    """Texts of like length together, at most BATCH_TOKENS a batch with padding."""
    order = sorted(range(len(tokens.ids)), key=lambda t: (len(tokens.ids[t]), t))
    batches: list[list[int]] = []
    for number in order:
        if batches and len(tokens.ids[number]) * (len(batches[-1]) + 1) <= BATCH_TOKENS:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


@torch.no_grad()
def _forward(model: Any, tokens: Tokens, layers: list[int]) -> dict[int, torch.Tensor]:
    decoder = model.get_decoder()
    every = decoder.layers
    dtype = next(decoder.parameters()).dtype
    hidden = {
        layer: torch.full((len(tokens.at), model.config.hidden_size), float("nan"), dtype=dtype) for layer in layers
    }
    by_text: dict[int, list[int]] = {}
    for i, text in enumerate(tokens.text.tolist()):
        by_text.setdefault(text, []).append(i)
    caught: dict[int, torch.Tensor] = {}

    def catch(layer: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            caught[layer] = output if isinstance(output, torch.Tensor) else output[0]

        return hook

    handles = [every[layer].register_forward_hook(catch(layer)) for layer in layers]
    # Blocks above the highest site are not needed: leave them out for the time of the extraction.
    decoder.layers = every[: max(layers) + 1]
    try:
        with tqdm(total=sum(map(len, tokens.ids)), desc="hidden states", unit="token", unit_scale=True) as progress:
            for batch in _batches(tokens):
                rows = [torch.tensor(tokens.ids[t]) for t in batch]
                ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
                mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                decoder(input_ids=ids, attention_mask=mask, use_cache=False)
                where = [(i, row) for row, text in enumerate(batch) for i in by_text.get(text, ())]
                index = torch.tensor([i for i, _ in where], dtype=torch.int64)
                row_of = torch.tensor([row for _, row in where], dtype=torch.int64)
                for layer in layers:
                    hidden[layer][index] = caught[layer][row_of, tokens.at[index]]
                progress.update(sum(map(len, rows)))
    finally:
        decoder.layers = every
        for handle in handles:
            handle.remove()
    for layer, states in hidden.items():
        if not torch.isfinite(states).all():
            raise RuntimeError(f"layer {layer} has hidden states that are not finite: this host cannot be probed there")
    return hidden
