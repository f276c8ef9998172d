"""Real texts of domains that conflict, on the demo model: the same word is continued in three ways, and a line before
it says in which.

    data = Domains("marks")                     # its rows as states that the frozen lower layers made, kept on disk
    host = data.host()                          # the upper layers, which read those states
    parts = data.parts(seed)                    # batches to learn from, to choose by, to be tested on

The texts are WordNet's: of a noun its definition, kinds of it, and what it is a kind of. The line before it is a
mark ("marks": "List B:"), which by itself says nothing, or names the domain ("words": "Its kinds:"). Both have four
tokens.

Nothing below layer `FIRST` is changed by any method, so each row's states there are computed once. The host that learns
has the layers from `FIRST` on, an "embedding" that looks states up by their number, and of the head the rows of tokens
that answers have: its losses are those among these tokens.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from probemon.bundled import load_bundled
from probemon.util.cache_folders import cache_dir
from probemon.util.files import write_text_atomically
from wordnet_pack.wordnet import WordNet, find_wordnet

DOMAINS = ("definition", "kinds", "above")
HEADERS = {
    "marks": {"definition": "List B:\n", "kinds": "List K:\n", "above": "List R:\n"},
    "words": {"definition": "Its meaning:\n", "kinds": "Its kinds:\n", "above": "Its classes:\n"},
}
N_HEADER, MOST_PROMPT, MOST_ANSWER = 4, 5, 10  # tokens
FIRST = 29  # the layer that learns, and all that are over it: of this model, the last
N_WORDS, N_TRAIN, N_CHOOSE, N_TEST = 370, 270, 40, 60  # words, and how many of them are in the parts of a seed
ROWS = 8  # of a batch


@dataclass(frozen=True)
class Row:
    """One text: `ids` of header, prompt and answer, of which the last `n_answer` are to be said."""

    word: str
    domain: str
    ids: list[int]
    n_answer: int


def entries(wordnet: WordNet, n: int) -> list[tuple[str, dict[str, str]]]:
    """`n` nouns with their answer in each domain, drawn once: of synsets with a definition, three kinds and three
    classes over them, the most frequent sense of their word.
    """
    below: dict[str, list[str]] = {}
    for synset in wordnet.synsets.values():
        if synset.hypernym is not None and synset.key[0] == "n":
            below.setdefault(synset.hypernym, []).append(synset.lemmas[0])
    found = []
    for key in sorted(below):
        synset = wordnet.synsets[key]
        word, above = synset.lemmas[0], [up.lemmas[0] for up in wordnet.chain(synset)[1:]]
        first = next((sense for sense in wordnet.senses.get(word.lower(), []) if sense.key[0] == "n"), None)
        if len(below[key]) >= 3 and len(above) >= 3 and first is not None and first.key == key and word.islower():
            answers = {"definition": synset.definition, "kinds": ", ".join(below[key]), "above": ", ".join(above)}
            found.append((word, answers))
    return random.Random(0).sample(found, n)


def rows(tokenizer: Any, kind: str) -> list[Row]:
    """Every word in every domain, words in order."""
    made = []
    for word, answers in entries(WordNet.read(find_wordnet(None)), N_WORDS):
        for domain in DOMAINS:
            header, prompt, answer = (
                tokenizer(text, add_special_tokens=False)["input_ids"]
                for text in (HEADERS[kind][domain], f"{word}:", f" {answers[domain]}\n")
            )
            assert len(header) == N_HEADER, (HEADERS[kind][domain], tokenizer.convert_ids_to_tokens(header))
            answer = answer[:MOST_ANSWER]
            made.append(Row(word, domain, header + prompt[-MOST_PROMPT:] + answer, len(answer)))
    return made


class Domains:
    """The rows of one kind of header, and their states before layer `FIRST`, which the demo model makes once."""

    def __init__(self, kind: str) -> None:
        self.kind, self.folder = kind, cache_dir() / "bem-domains"
        settings = [HEADERS[kind], N_WORDS, MOST_PROMPT, MOST_ANSWER, FIRST]
        name = f"{kind}-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]}"
        self._rows, self._states = (self.folder / f"{name}.{ending}" for ending in ("json", "npy"))
        if not self._states.is_file():
            self._make()
        self.rows = [Row(**row) for row in json.loads(self._rows.read_text(encoding="utf-8"))]
        self.starts = np.cumsum([0, *(len(row.ids) for row in self.rows)])

    @torch.no_grad()
    def _make(self) -> None:
        model, tokenizer = load_bundled(torch.float32)
        made = rows(tokenizer, self.kind)
        decoder, states = model.model, [np.empty(0)] * len(made)
        decoder.layers, decoder.norm = decoder.layers[:FIRST], nn.Identity()
        order = sorted(range(len(made)), key=lambda i: len(made[i].ids))
        for at in range(0, len(order), 64):
            some = order[at : at + 64]
            ids = nn.utils.rnn.pad_sequence([torch.tensor(made[i].ids) for i in some], batch_first=True)
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state  # causal: what pads is behind
            for i, state in zip(some, hidden, strict=True):
                states[i] = state[: len(made[i].ids)].numpy()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(self._rows, json.dumps([asdict(row) for row in made]))
        partial = self._states.with_suffix(".partial.npy")
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
            elif inner[0] == "layers" and int(inner[1]) >= FIRST:
                kept[".".join(["model", "layers", str(int(inner[1]) - FIRST), *inner[2:]])] = tensor
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
            "num_hidden_layers": self.config.num_hidden_layers - FIRST,
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
        domain = torch.tensor([DOMAINS.index(self.rows[i].domain) for i in numbers])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "domain": domain}

    def words(self, seed: int) -> list[int]:
        """Numbers of the words of a seed: first those to learn from, then those to choose by, then the test's."""
        words = list(range(N_WORDS))
        random.Random(1000 + seed).shuffle(words)
        return words[: N_TRAIN + N_CHOOSE + N_TEST]

    def parts(self, seed: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], dict[str, Any]]:
        """Batches of all domains to learn from and to choose by, and of each domain those of the test. No word is in
        two parts.
        """
        words, n = self.words(seed), len(DOMAINS)

        def of(some: list[int], domains: tuple[str, ...] = DOMAINS) -> list[dict[str, Tensor]]:
            numbers = [n * word + DOMAINS.index(domain) for word in some for domain in domains]
            random.Random(seed).shuffle(numbers)
            return [self.batch(numbers[at : at + ROWS]) for at in range(0, len(numbers), ROWS)]

        train, choose, test = words[:N_TRAIN], words[N_TRAIN:][:N_CHOOSE], words[N_TRAIN + N_CHOOSE :]
        return of(train), of(choose), {domain: of(test, (domain,)) for domain in DOMAINS}
