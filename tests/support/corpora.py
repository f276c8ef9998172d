"""Random texts, a tokenizer of characters, and an analysis in plain Python: the oracle of what an analysis says."""

import random

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from oracle import states

LETTERS = "abcdefghijklmnopqrstuvwxyz .,é"


def make_tokenizer(adds_bos=False):
    """One token a character; ids from 4 on, so that those of special tokens are their own."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {letter: 4 + i for i, letter in enumerate(LETTERS)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def random_texts(n, seed=0, longest=90):
    rng = random.Random(seed)
    return ["".join(rng.choice(LETTERS) for _ in range(rng.randint(1, longest))).strip() or "x" for _ in range(n)]


def oracle(manager, model, text, *, n_tokens, overlap, prefix=(1,)):
    """Scores of a text's tokens, token by token: each in the first window that holds it, one window at a time,
    unpadded.
    """
    ids = [LETTERS.index(letter) + 4 if letter in LETTERS else 3 for letter in text]
    scored, begin, parts = 0, 0, []
    room = n_tokens - len(prefix)
    while scored < len(ids):
        stop = min(begin + room, len(ids))
        found = states(model, manager.pack, [*prefix, *ids[begin:stop]])
        wanted = {site: hidden[len(prefix) + scored - begin :] for site, hidden in found.items()}
        found = manager.score_tokens(wanted)
        parts += [
            dict(zip(found.active(t).tolist(), found.active_scores(t).tolist(), strict=True))
            for t in range(stop - scored)
        ]
        begin, scored = stop - overlap, stop
    return ids, parts


def close(a, b):
    return np.allclose(a, b, rtol=0, atol=2e-5)
