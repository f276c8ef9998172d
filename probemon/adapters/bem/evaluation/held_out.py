"""Held-out loss with an adapter and without, with an interval by document.

measured = measure(bem, batches, documents)           # documents: a number for each row
measured.loss, measured.bare_loss, measured.low, measured.high
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.evaluation.statistics import document_interval
from probemon.adapters.bem.losses import Batch, forward_inputs, mode, model_inputs, next_labels, silenced
from probemon.errors import ConfigError, MissingExtra


@dataclass(frozen=True)
class HeldOut:
    """Mean losses in nats a label.

    `low`, `high`: 95 % interval of `loss - bare_loss` over documents (BCa); None for one document, or without SciPy.
    `n_better`: documents that the adapter improves.
    """

    n_documents: int
    n_labels: int
    loss: float
    bare_loss: float
    low: float | None
    high: float | None
    n_better: int

    @property
    def difference(self) -> float:
        """Negative if the adapter is better."""
        return self.loss - self.bare_loss


@torch.no_grad()
def measure(
    bem: Bem, batches: Sequence[Batch], documents: Sequence[int], progress: Callable[[int], object] = lambda n: None
) -> HeldOut:
    """Return losses on `batches`. `documents`: a number for each row. Raises `ConfigError` for another count, or
    without labels.
    """
    n_rows = sum(len(model_inputs(batch)["input_ids"]) for batch in batches)
    if len(documents) != n_rows:
        raise ConfigError(f"{len(documents)} documents for {n_rows} rows: give a number for each row of all batches")
    steered, bare, counts = dict[int, float](), dict[int, float](), dict[int, int]()
    at = 0
    with mode(bem.host, training=False):
        for batch in batches:
            row_documents = documents[at : at + len(batch["input_ids"])]
            at += len(row_documents)
            sums, n = label_losses(bem.host, batch)
            with silenced(bem):
                without, _ = label_losses(bem.host, batch)
            for row, document in enumerate(row_documents):
                steered[document] = steered.get(document, 0.0) + float(sums[row])
                bare[document] = bare.get(document, 0.0) + float(without[row])
                counts[document] = counts.get(document, 0) + int(n[row])
            progress(len(row_documents))
    n_labels = sum(counts.values())
    if not n_labels:
        raise ConfigError("no document has a label that is to be predicted: there is nothing to measure")
    counted = [document for document, n in counts.items() if n]
    differences = np.array([steered[document] - bare[document] for document in counted])
    low = high = None
    if len(counted) > 1:
        with suppress(MissingExtra):
            low, high = document_interval(differences, np.array([counts[document] for document in counted], float))
    totals = sum(steered.values()) / n_labels, sum(bare.values()) / n_labels
    return HeldOut(len(counted), n_labels, *totals, low, high, int((differences < 0).sum()))


def label_losses(host: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each row's summed cross-entropy `[B]` fp64, and number of labels `[B]`."""
    inputs = forward_inputs(host, batch)
    if batch.get("labels") is None:
        raise ConfigError(
            f"a batch has {', '.join(batch)} and no labels: give them, [B, T] with -100 for tokens that do not count"
        )
    labels = next_labels(host, batch)
    logits = host(**inputs, use_cache=False).logits[:, :-1]
    losses = nn.functional.cross_entropy(
        logits.double().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    )
    return losses.view(labels.shape).sum(dim=1), (labels != -100).sum(dim=1)
