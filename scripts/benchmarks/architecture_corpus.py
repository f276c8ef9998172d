"""The mode "corpus" of architectures.py: documents of many lengths, which share batches where they may, each against
its own plain forward.

entry = corpus(model, manager, forward)     # forward(ids) -> scores [T, P] of one plain forward of `ids`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from probemon import DynamicProbeManager
from probemon.host.twin import VOCABULARY
from probemon.lab.corpora.corpus import score_documents
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.windows import Reading, Window

BOS = 1
LENGTHS = (3, 9, 5, 21, 1, 11, 21)


def corpus(model: Any, manager: DynamicProbeManager, forward: Callable[[list[int]], Tensor]) -> tuple[float, int]:
    """The largest difference of a score, and how many tokens were not seen."""
    vocabulary = {"<pad>": 0, "<s>": BOS} | {f"t{i}": i for i in range(2, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", pad_token="<pad>")
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, VOCABULARY - 20, (n,), generator=g).tolist() for n in LENGTHS]
    read = read_documents([" ".join(f"t{i}" for i in ids) for ids in texts])
    worst, unseen = 0.0, 0
    for ids, scored in zip(
        texts,
        score_documents(manager, model, tokenizer, read, reading=Reading(Window(64, 8)), exhaustive=True),
        strict=True,
    ):
        assert (
            scored.scores is not None
            and scored.everything is not None
            and scored.tokens is not None
            and scored.tokens.ids.tolist() == ids
        )
        worst = max(worst, float((scored.everything - forward([BOS, *ids])[1:]).abs().max()))
        unseen += sum(map(bool, scored.scores.coverage.unseen))
    return worst, unseen
