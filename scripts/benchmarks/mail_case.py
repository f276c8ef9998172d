"""From labelled mails to a calibrated monitor, on real text: what single tokens, running scores and two baselines make
of it.

    python scripts/benchmarks/mail_case.py --out docs/benchmarks/mails.json

SpamAssassin's public corpus (fetched), each mail its subject and body, cut; mails with the same text count once. A
random split: two fifths train a pack of two linear probes (mail that sells > spam; the first also learns from
legitimate mail that looks like it), three tenths calibrate alert thresholds to 1 % of benign mails and of benign tokens
for every aggregator, three tenths are watched. Baselines, by document: logistic regression on mean-pooled hidden states
of the same layer, and on TF-IDF of words, thresholds calibrated the same way.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import MODEL_ID, load_bundled
from probemon.core.aggregate import Aggregator, Attention, Each, Ema, Max, Mean, RollingMax, RollingMean, over
from probemon.core.intervals import clopper_pearson
from probemon.host.fingerprint import fingerprint
from probemon.lab.calibration.calibrate import calibrate_alerts
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.state_reader import StateReader
from probemon.lab.corpora.windows import Reading, shards
from probemon.util.files import write_text_atomically
from provenance import about
from real_text import Text, mails

SITE, NORM, SEED, FPR = "resid_post.15", "rmsnorm", 0, 0.01
AGGREGATORS: tuple[Aggregator, ...] = (
    Each(),
    Ema(0.3),
    Ema(0.1),
    Ema(0.03),
    RollingMean(16),
    RollingMax(16),
    Mean(),
    Max(),
    Attention(),
)
PARTS = {"train": 0.4, "calibrate": 0.3, "watch": 0.3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--mails", type=int, default=4000, help="how many of the distinct ones")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    parts = split(list(mails()), arguments.mails)
    model, tokenizer = load_bundled(torch.bfloat16)
    reader = StateReader(model, tokenizer, [SITE], Reading())
    with tempfile.TemporaryDirectory() as folder:
        states = {name: read(reader, texts) for name, texts in parts.items()}
        pooled = {name: np.stack([normalised(x).mean(dim=0).numpy() for x in part]) for name, part in states.items()}
        manager = DynamicProbeManager(
            train(Path(folder) / "mails", model, states["train"], parts["train"]), load_threshold=0.0
        )
        scored = {name: watch(manager, states[name]) for name in ("calibrate", "watch")}
    labels = {name: np.asarray([text.label == "spam" for text in texts]) for name, texts in parts.items()}
    rows = [monitored(aggregator, scored, labels) for aggregator in AGGREGATORS]
    rows.append(baseline("logistic regression on mean-pooled states", pooled, labels))
    rows.append(baseline("logistic regression on TF-IDF of words", tf_idf(parts), labels))
    found = {
        "texts": "SpamAssassin public corpus: subject and body, at most 800 characters",
        "seed": SEED,
        "fpr": FPR,
        "site": SITE,
        "host": f"{MODEL_ID}, bf16",
        "mails": {name: dict(Counter(text.label for text in texts)) for name, texts in parts.items()},
        "tokens": {name: int(sum(map(len, part))) for name, part in scored.items()},
        "rows": rows,
        "minutes": round((time.perf_counter() - begin) / 60, 1),
        **about(),
    }
    for row in rows:
        print(json.dumps(row))
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


def split(texts: Sequence[Text], most: int | None) -> dict[str, list[Text]]:
    """Distinct texts in a random order, cut into the parts: a text that came twice could stand on both sides."""
    distinct = list({text.text: text for text in texts if text.text.strip()}.values())
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(SEED)).tolist()[:most]
    ends = np.cumsum([0.0, *PARTS.values()]) * len(order)
    return {
        name: [distinct[i] for i in order[round(a) : round(b)]]
        for name, a, b in zip(PARTS, ends, ends[1:], strict=False)
    }


def documents(texts: Sequence[Text]) -> Any:
    return read_documents({"text": text.text, "id": text.id} for text in texts)


def read(reader: StateReader, texts: Sequence[Text]) -> list[torch.Tensor]:
    """Hidden states `[T, D]` of every mail, as the corpus reader has them."""
    return [
        found[SITE]
        for _, _, found in tqdm(reader.states(shards(documents(texts))), total=len(texts), desc="states", disable=None)
    ]


def normalised(hidden: torch.Tensor) -> torch.Tensor:
    x = hidden.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


def write(path: Path, model: Any, w1: torch.Tensor, b1: torch.Tensor, concepts: list[dict[str, Any]]) -> ProbePack:
    host = {"model_id": MODEL_ID, "hidden_size": 576, "n_layers": 30, "fingerprint": fingerprint(model)}
    return ProbePack.write(
        path,
        name="mails",
        concepts=concepts,
        weights={"w1": w1, "b1": b1},
        score_rule="path",
        host=host,
        licence="Apache-2.0",
        card="Mails.\n",
        inputs=[{"site": SITE, "norm": NORM, "eps": 1e-6}],
        alert_threshold=torch.full((len(concepts),), 0.5),
    )


def train(path: Path, model: Any, states: list[torch.Tensor], texts: Sequence[Text]) -> ProbePack:
    """Two linear probes on single tokens, each labelled as its mail is; the second learns on tokens of mail that sells
    alone.
    """
    torch.manual_seed(SEED)
    spam = torch.tensor([text.label == "spam" for text in texts])
    sells = spam | torch.tensor([text.id.startswith("hard-ham") for text in texts])
    of_mail = torch.repeat_interleave(torch.arange(len(states)), torch.tensor([len(x) for x in states]))
    x, y = (
        torch.cat([normalised(hidden).half() for hidden in states]),
        torch.stack([sells, spam], dim=1)[of_mail].float(),
    )
    # Every mail weighs the same, and both sides of a question do.
    inside = (
        torch.stack([torch.ones(len(x)), sells[of_mail].float()], dim=1)
        / torch.tensor([len(s) for s in states])[of_mail][:, None]
    )
    weight = inside * torch.where(y > 0, 0.5 / (inside * y).sum(dim=0), 0.5 / (inside * (1 - y)).sum(dim=0)) * len(x)
    w, b = torch.zeros(576, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    epochs, batch = 4, 1024
    steps = epochs * math.ceil(len(x) / batch)
    optimiser = torch.optim.AdamW([w, b], lr=2e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for _ in tqdm(range(epochs), desc="training", disable=None):
        for at in torch.randperm(len(x)).split(batch):
            loss = (
                torch.nn.functional.binary_cross_entropy_with_logits(x[at].float() @ w + b, y[at], reduction="none")
                * weight[at]
            ).sum() / len(at)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            rate.step()
    concepts = [
        {"id": "sells", "name": "mail that sells", "parents": []},
        {"id": "spam", "name": "spam", "parents": ["sells"]},
    ]
    return write(path, model, w.detach().T[:, None].contiguous(), b.detach()[:, None], concepts)


def watch(manager: DynamicProbeManager, states: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Scores `[T, 1]` of spam at every token of each mail, as a run would see them; inactive is 0."""
    spam = manager.pack.find("spam")
    return [
        manager.score_tokens(hidden).column(spam)[:, None] for hidden in tqdm(states, desc="watching", disable=None)
    ]


def monitored(
    aggregator: Aggregator, scored: dict[str, list[np.ndarray]], labels: dict[str, np.ndarray]
) -> dict[str, Any]:
    """One aggregator: AUROC on the watched mails, and rates at thresholds from the calibration mails alone."""
    benign = [scores for scores, spam in zip(scored["calibrate"], labels["calibrate"], strict=True) if not spam]
    running = [over(aggregator, scores)[:, 0] for scores in scored["watch"]]
    of_token = np.repeat(labels["watch"], [len(values) for values in running])
    tokens, highest = np.concatenate(running), np.asarray([values.max() for values in running])
    by_token = calibrate_alerts(benign, fpr=FPR, aggregate=aggregator)
    by_document = calibrate_alerts(benign, fpr=FPR, aggregate=aggregator, unit="document")
    return {
        "method": str(aggregator),
        "token": rates(tokens, of_token, float(by_token.threshold[0])),
        "document": rates(highest, labels["watch"], float(by_document.threshold[0])),
    }


def rates(values: np.ndarray, positive: np.ndarray, threshold: float) -> dict[str, Any]:
    """AUROC, and shares over the threshold with exact intervals (of tokens: as if they were independent, which those of
    one mail are not).
    """
    above = values > threshold
    found: dict[str, Any] = {"auroc": round(auroc(values, positive), 4), "threshold": threshold}
    for name, side in (("tpr", positive), ("fpr", ~positive)):
        low, high = clopper_pearson(int(above[side].sum()), int(side.sum()))
        found[name] = {
            "rate": round(float(above[side].mean()), 4),
            "low": round(float(low), 4),
            "high": round(float(high), 4),
            "n": int(side.sum()),
        }
    return found


def auroc(values: np.ndarray, positive: np.ndarray) -> float:
    """The chance that a positive one is above a negative one, half of it for ties: Mann & Whitney 1947."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    n = int(positive.sum())
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * (len(values) - n)))


def baseline(method: str, features: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> dict[str, Any]:
    """Logistic regression by document, its penalty chosen on a fifth of the training mails, its threshold on the benign
    calibration mails.
    """
    x, y = torch.from_numpy(features["train"]).float(), torch.from_numpy(labels["train"]).float()
    kept = len(x) * 4 // 5
    tried = {
        penalty: auroc((x[kept:] @ logistic(x[:kept], y[:kept], penalty)[0]).numpy(), labels["train"][kept:])
        for penalty in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    }
    w, b = logistic(x, y, max(tried, key=lambda penalty: tried[penalty]))
    score = {name: torch.sigmoid(torch.from_numpy(part).float() @ w + b).numpy() for name, part in features.items()}
    benign = [value.reshape(1, 1) for value in score["calibrate"][~labels["calibrate"]]]
    threshold = float(calibrate_alerts(benign, fpr=FPR, unit="document").threshold[0])
    return {"method": method, "token": None, "document": rates(score["watch"], labels["watch"], threshold)}


def logistic(x: torch.Tensor, y: torch.Tensor, penalty: float) -> tuple[torch.Tensor, torch.Tensor]:
    w, b = torch.zeros(x.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    optimiser = torch.optim.LBFGS([w, b], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(x @ w + b, y) + penalty * w.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[arg-type]
    return w.detach(), b.detach()


def tf_idf(parts: dict[str, list[Text]]) -> dict[str, np.ndarray]:
    """Rows of unit length over the words of at least two training mails, the 20,000 most frequent: (1 + log tf) * log(n
    / df).
    """
    words = {
        name: [Counter(re.findall(r"[a-z0-9$!']+", text.text.lower())) for text in texts]
        for name, texts in parts.items()
    }
    df = Counter(word for mail in words["train"] for word in mail)
    known = {word: i for i, (word, n) in enumerate(df.most_common(20_000)) if n > 1}
    idf = np.log(len(words["train"]) / np.asarray([df[word] for word in known]))
    found = {}
    for name, part in words.items():
        rows = np.zeros((len(part), len(known)), dtype=np.float32)
        for row, mail in zip(rows, part, strict=True):
            for word, n in mail.items():
                if word in known:
                    row[known[word]] = (1 + math.log(n)) * idf[known[word]]
            row /= np.linalg.norm(row) or 1.0
        found[name] = rows
    return found


if __name__ == "__main__":
    main()
