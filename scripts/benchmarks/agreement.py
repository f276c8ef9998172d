"""How near scores of the real host are to those of another forward: what "the same scores" means where arithmetic is
the host's.

    python scripts/benchmarks/agreement.py --out docs/benchmarks/agreement.json

SmolLM2-135M-Instruct in fp32 and bf16, both shipped packs. Watched while it generates, the monitor's scores are
compared with (a) scores of the states that a plain hook of ours copied in the very same forwards, which must be the
same bits, and (b) those of one plain forward over the finished sequence. An analysis is compared with (b) too. What
differs in (b) is the host: its states with a cache, in a batch or in a window are not those of one forward to the last
bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.host.model import find_layers, site_module
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.windows import Reading, Window
from probemon.monitor.stream import encode
from probemon.util.files import write_text_atomically
from provenance import about
from real_text import bbc

ROOT = Path(__file__).resolve().parents[2]
PACKS = ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp")
PROMPTS = (
    "Tell me about whales and the ships that hunted them.",
    "What does a lawyer do all day?",
    "Write a short letter about a broken violin.",
)
N_NEW, N_ARTICLES = 40, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = load_bundled(dtype)
        for name in PACKS:
            manager = DynamicProbeManager(ProbePack.open(ROOT / "probes" / name))
            where = {"pack": name, "dtype": str(dtype).removeprefix("torch.")}
            rows += [
                {**where, "mode": mode, **found}
                for mode, found in (
                    *online(manager, model, tokenizer),
                    ("analysis", offline(manager, model, tokenizer)),
                )
            ]
    found = {"host": "SmolLM2-135M-Instruct", "rows": rows, **about()}
    print(json.dumps(found, indent=1))
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


def online(manager: DynamicProbeManager, model: Any, tokenizer: Any) -> list[tuple[str, dict[str, Any]]]:
    """Greedy answers, each prompt by itself: against states of the same forwards, and of one plain forward."""
    [site] = manager.pack.sites
    module = site_module(find_layers(model)[1], site)
    same, other = Differences(), Differences()
    for prompt in PROMPTS:
        inputs, copied = encode(tokenizer, [{"role": "user", "content": prompt}]), []
        handle = module.register_forward_hook(
            lambda module, args, output, copied=copied: copied.append(output[0].detach().clone())
        )
        with manager.attach(model, tokenizer) as run:
            out = model.generate(**inputs, max_new_tokens=N_NEW, do_sample=False)
        handle.remove()
        seen = run.result(out).scores
        n = out.shape[1] - 1  # the last token has no state
        watched = dense(seen, manager.pack.n_probes)[:n]
        # The same batches of tokens, the prompt and then one by one, so that nothing but the states could differ.
        same.add(
            watched,
            dense(
                manager.score_tokens(torch.cat(copied), prompt_len=inputs["input_ids"].shape[1]), manager.pack.n_probes
            ),
            manager,
        )
        other.add(watched, plain(manager, model, out[:, :n], prompt_len=inputs["input_ids"].shape[1]), manager)
    return [("generate, states of the same forwards", same.told()), ("generate", other.told())]


def offline(manager: DynamicProbeManager, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Articles in windows and batches, against one plain forward over each window's tokens."""
    found, texts = Differences(), [text.text for text in bbc()][:N_ARTICLES]
    texts = [text[:900] for text in texts]  # shorter than a window: the plain forward has the same tokens before each
    with tempfile.TemporaryDirectory() as folder:
        analysis = manager.analyze(
            model, tokenizer, texts, Path(folder) / "out", floor=0.0, reading=Reading(Window(1024, 128))
        )
        for document in read_documents(texts):
            rows = analysis.scores(document=document.index)
            ids = torch.tensor(
                [[tokenizer.bos_token_id, *tokenizer(document.text, add_special_tokens=False)["input_ids"]]]
            )
            values = np.full((ids.shape[1] - 1, manager.pack.n_probes), np.nan, dtype=np.float32)
            number = {concept["id"]: i for i, concept in enumerate(manager.pack.concepts)}
            values[
                rows.column("position").to_numpy(), [number[name] for name in rows.column("concept").to_pylist()]
            ] = rows.column("score").to_numpy()
            found.add(values, plain(manager, model, ids, prompt_len=ids.shape[1])[1:], manager)
    return found.told()


def plain(manager: DynamicProbeManager, model: Any, ids: torch.Tensor, prompt_len: int) -> np.ndarray:
    """Scores `[T, P]` by one forward over ids `[1, T]`, NaN where inactive."""
    [site] = manager.pack.sites
    kept: list[torch.Tensor] = []
    handle = site_module(find_layers(model)[1], site).register_forward_hook(
        lambda module, args, output: kept.append(output[0].detach())
    )
    with torch.inference_mode():
        model(ids, use_cache=False)
    handle.remove()
    return dense(manager.score_tokens(kept[0], prompt_len=prompt_len), manager.pack.n_probes)


def dense(scores: Any, n_probes: int) -> np.ndarray:
    """Scores `[T, P]`, NaN where inactive."""
    found = np.full((len(scores), n_probes), np.nan, dtype=np.float32)
    found[scores.state_of, scores.probes] = scores.values
    return found


class Differences:
    """Of scores that both have; how many only one has, and fire."""

    def __init__(self) -> None:
        self.gaps: list[np.ndarray] = []
        self.n_fired = self.n_fired_once = 0

    def add(self, one: np.ndarray, other: np.ndarray, manager: DynamicProbeManager) -> None:
        both = ~np.isnan(one) & ~np.isnan(other)
        self.gaps.append(np.abs(one[both] - other[both]))
        with np.errstate(invalid="ignore"):
            fired, fires = (values > manager.pack.alert_threshold.numpy() for values in (one, other))
        self.n_fired += int((fired | fires).sum())
        self.n_fired_once += int((fired ^ fires).sum())

    def told(self) -> dict[str, Any]:
        gaps = np.concatenate(self.gaps)
        return {
            "n_scores": len(gaps),
            "largest": float(f"{gaps.max():.2g}"),
            "median": float(f"{np.median(gaps):.2g}"),
            "p999": float(f"{np.quantile(gaps, 0.999):.2g}"),
            "over_1e-5": int((gaps > 1e-5).sum()),
            "n_fired": self.n_fired,
            "n_fired_in_one_only": self.n_fired_once,
        }


if __name__ == "__main__":
    main()
