"""Everything a pack is trained on and measured by, from WordNet's files and the host model.

    data = prepare(Source(wordnet=None, layer=15, seed=0))
    data.points, data.states                         # N points, [N, D] raw hidden states

The states, which take minutes, are cached; the rest is made again each time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .generated import generate_texts
from .mentions import MEANT, MEANT_COUNT, Limits, Point, collect
from .passages import passages
from .running import Running
from .states import extract, read_tokens
from .wordnet import WordNet, find_wordnet, licence_text

EPS = 1e-6


@dataclass(frozen=True)
class Source:
    wordnet: Path | None
    layer: int
    seed: int
    limits: Limits = Limits()


@dataclass
class Dataset:
    source: Source
    wordnet: WordNet
    licence: str  # WordNet's notice
    points: list[Point]
    texts: list[str]
    states: torch.Tensor  # [N, D], the host's dtype, raw
    token_ids: torch.Tensor  # [N] int64, the token that each point reads
    embedding: torch.Tensor  # [V, D], the host's input embeddings
    host: dict[str, Any]  # as a pack's manifest states it
    running: Running  # every token of running text, beside the points

    def where(self, *, split: str | None = None, sources: tuple[str, ...] | None = None) -> torch.Tensor:
        """[N] bool: points of a split and of some sources."""
        return torch.tensor(
            [
                (split is None or point.split == split) and (sources is None or point.source in sources)
                for point in self.points
            ]
        )

    def recipe(self) -> dict[str, Any]:
        """What the points were made from, for a pack's provenance."""
        return {
            "wordnet": self.wordnet.version,
            "layer": self.source.layer,
            "seed": self.source.seed,
            "limits": asdict(self.source.limits),
        }


def rmsnorm(hidden: torch.Tensor) -> torch.Tensor:
    """What a probe reads: hidden [N, D] divided by its root mean square (no affine), rounded to bf16, as fp32."""
    x = hidden.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16().float()


def prepare(source: Source) -> Dataset:
    """Find WordNet, load the host model, let it write some text, collect the points and read their states."""
    from probemon.bundled import MODEL_ID, REVISION, load_bundled
    from probemon.host.fingerprint import fingerprint
    from probemon.util.cache_folders import cache_dir

    folder = find_wordnet(source.wordnet)
    cache = cache_dir() / "wordnet-pack"
    model, tokenizer = load_bundled(dtype=torch.bfloat16, say=print)
    mark = fingerprint(model)
    wordnet = WordNet.read(folder)
    generated = generate_texts(model, tokenizer, seed=source.seed, fingerprint=mark, folder=cache)
    texts, points = collect(wordnet, generated=[], seed=source.seed, limits=source.limits)
    tokens = read_tokens(tokenizer, texts, points)
    states = extract(model, tokens, [source.layer], mark, cache)[source.layer]
    # Of WordNet's own examples the sense is known; running text has to be told.
    wordnet = wordnet.with_meant(MEANT, MEANT_COUNT)
    running = Running.read(
        model, tokenizer, wordnet, passages(generated), layer=source.layer, fingerprint=mark, folder=cache
    )
    host = {
        "model_id": MODEL_ID,
        "revision": REVISION,
        "hidden_size": model.config.hidden_size,
        "n_layers": model.config.num_hidden_layers,
        "fingerprint": mark,
        "quantisation": "GGUF Q4_1, dequantised to bf16",
    }
    embedding = model.get_input_embeddings().weight.detach()
    return Dataset(source, wordnet, licence_text(folder), points, texts, states, tokens.id, embedding, host, running)
