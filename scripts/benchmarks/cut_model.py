"""The upper layers of the demo model over kept states: what a study of adapters trains.

    cut = CutModel(rows, first=29, name="marks")     # states before layer 29, which the demo model makes once
    host = cut.host()                                # layers 29 on, which read those states
    batch = cut.batch([0, 5, 7])

Nothing below layer `first` is changed by any method, so each row's states there are computed once, and kept on disk.
The host that learns has the layers from `first` on, an "embedding" that looks states up by their number, and of the
head the rows of tokens that answers have: its losses are those among these tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from probemon.adapters.bem import BemConfig, attach_bem
from probemon.bundled import load_bundled
from probemon.util.cache_folders import cache_dir


class Row(Protocol):
    """One text: `ids` of prompt and answer, of which the last `n_answer` are to be said."""

    ids: list[int]
    n_answer: int


class CutModel:
    """Rows, their states before layer `first`, and the model over them. `name`: of the files that keep the states."""

    rows: Sequence[Any]

    def __init__(self, rows: Sequence[Row], first: int, name: str) -> None:
        self.rows, self.first = rows, first
        self.starts = np.cumsum([0, *(len(row.ids) for row in rows)])
        digest = hashlib.sha256(json.dumps([first, [row.ids for row in rows]]).encode()).hexdigest()[:12]
        self._states = cache_dir() / "bem-domains" / f"{name}-{digest}.npy"
        if not self._states.is_file():
            self._make()

    @torch.no_grad()
    def _make(self) -> None:
        model, made = load_bundled(torch.float32)[0], self.rows
        decoder, states = model.model, [np.empty(0)] * len(made)
        decoder.layers, decoder.norm = decoder.layers[: self.first], nn.Identity()
        order = sorted(range(len(made)), key=lambda i: len(made[i].ids))
        for at in range(0, len(order), 64):
            some = order[at : at + 64]
            ids = nn.utils.rnn.pad_sequence([torch.tensor(made[i].ids) for i in some], batch_first=True)
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state  # causal: what pads is behind
            for i, state in zip(some, hidden, strict=True):
                states[i] = state[: len(made[i].ids)].numpy()
        self._states.parent.mkdir(parents=True, exist_ok=True)
        partial = self._states.with_suffix(f".{os.getpid()}.npy")
        np.save(partial, np.concatenate(states))
        partial.rename(self._states)

    @cached_property
    def vocabulary(self) -> Tensor:
        """The tokens that answers have, ascending: what the cut head gives logits of."""
        return torch.tensor(sorted({token for row in self.rows for token in row.ids[-row.n_answer :]}))

    @cached_property
    def _pieces(self) -> dict[str, Tensor]:
        """Weights of the upper layers, of the norm, and of the cut head."""
        model, _ = load_bundled(torch.float32)
        self.config = model.config
        kept = {}
        for name, tensor in model.state_dict().items():
            _, *inner = name.split(".")
            if inner[0] == "norm":
                kept[name] = tensor
            elif inner[0] == "layers" and int(inner[1]) >= self.first:
                kept[".".join(["model", "layers", str(int(inner[1]) - self.first), *inner[2:]])] = tensor
        kept["lm_head.weight"] = model.get_output_embeddings().weight[self.vocabulary]
        return {name: tensor.detach().clone() for name, tensor in kept.items()}

    @cached_property
    def _table(self) -> Tensor:
        return torch.from_numpy(np.load(self._states))

    def host(self) -> Any:
        """The upper layers of the demo model, frozen, over the states of all rows: token n of row i has the number
        `starts[i] + n`.
        """
        pieces = self._pieces
        changes = {
            "num_hidden_layers": self.config.num_hidden_layers - self.first,
            "vocab_size": len(self.vocabulary),
            "tie_word_embeddings": False,
            "use_cache": False,
            "pad_token_id": None,
        }
        host = LlamaForCausalLM(type(self.config)(**{**self.config.to_dict(), **changes}))
        host.model.embed_tokens = nn.Embedding.from_pretrained(self._table, freeze=True)
        missing, unexpected = host.load_state_dict(pieces, strict=False)
        assert missing == ["model.embed_tokens.weight"] and not unexpected, (missing, unexpected)
        return host.eval().requires_grad_(False)

    def batch(self, numbers: list[int]) -> dict[str, Tensor]:
        """Rows by their numbers, padded behind. `labels` are indices into `vocabulary`, of answers alone."""
        ids = torch.zeros(len(numbers), max(len(self.rows[i].ids) for i in numbers), dtype=torch.int64)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for at, i in enumerate(numbers):
            row = self.rows[i]
            n, answer = len(row.ids), torch.tensor(row.ids[-row.n_answer :])
            ids[at, :n] = int(self.starts[i]) + torch.arange(n)
            mask[at, :n] = 1
            labels[at, n - row.n_answer : n] = torch.searchsorted(self.vocabulary, answer)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    @torch.no_grad()
    def error(self, config: BemConfig, numbers: Sequence[int] = (0, 1, 5, 77)) -> float:
        """The largest difference of a logit between this model with an adapter of random weights and the whole model
        with the same one, beside the largest logit. `config`: the layers are counted from `first`.
        """
        whole, host = load_bundled(torch.float32)[0], self.host()
        layers = None if config.layers is None else tuple(layer + self.first for layer in config.layers)
        of_whole = replace(config, layers=layers, read_layer=config.read_layer + self.first)
        worst = largest = 0.0
        with attach_bem(host, config) as ours, attach_bem(whole, of_whole) as theirs:
            generator = torch.Generator().manual_seed(0)
            for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
                other.copy_(parameter)
            for number in numbers:
                batch, ids = self.batch([number]), torch.tensor([self.rows[number].ids])
                cut = host(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                full = whole(ids).logits[..., self.vocabulary]
                worst, largest = max(worst, float((cut - full).abs().max())), max(largest, float(full.abs().max()))
        return worst / largest
