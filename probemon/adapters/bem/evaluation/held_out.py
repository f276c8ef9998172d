"""Held-out loss with an adapter and without, with an interval by document.

measured = measure(bem, batches, documents)           # documents: a number for each row
measured.adapter.loss, measured.bare.loss, measured.difference.low, measured.difference.high
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.evaluation.statistics import Doubles, document_interval
from probemon.adapters.bem.form_governance import FormGovernor
from probemon.adapters.bem.losses import (
    Batch,
    applied_codes,
    codes_taken,
    forward_inputs,
    mode,
    model_inputs,
    predictions,
    real_tokens,
    recorded_codes,
    silenced,
)
from probemon.errors import ConfigError, MissingExtra

_ROUNDING = 1e-5  # share of a code's norm


@dataclass(frozen=True, eq=False)
class ByDocument:
    """Summed losses in nats `[N]` and labels `[N]` of documents with a label, in the order of their numbers."""

    sums: Doubles
    labels: Doubles

    @property
    def loss(self) -> float:
        """Mean in nats a label."""
        return float(self.sums.sum() / self.labels.sum())


@dataclass(frozen=True)
class Difference:
    """A mean loss minus another of the same documents, in nats a label: negative if the first is better.

    `low`, `high`: 95 % interval over documents (BCa); None for one document, or without SciPy.
    `n_better`: documents at which the first is better.
    """

    value: float
    low: float | None
    high: float | None
    n_better: int
    n_documents: int

    @classmethod
    def of(cls, first: ByDocument, second: ByDocument) -> Difference:
        """Compare two losses of the same documents."""
        differences, low, high = first.sums - second.sums, None, None
        if len(differences) > 1:
            with suppress(MissingExtra):
                low, high = document_interval(differences, first.labels)
        return cls(first.loss - second.loss, low, high, int((differences < 0).sum()), len(differences))


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Losses by document, with an adapter and of the bare model."""

    adapter: ByDocument
    bare: ByDocument

    @property
    def difference(self) -> Difference:
        """The adapter's loss minus the bare model's."""
        return Difference.of(self.adapter, self.bare)


def measure(
    bem: Bem, batches: Sequence[Batch], documents: Sequence[int], progress: Callable[[int], object] = lambda n: None
) -> HeldOut:
    """Return losses on `batches`. `documents`: a number for each row. Raises `ConfigError` for another count, or
    without labels.
    """
    adapter = by_document(bem.host, batches, documents, progress)
    with silenced(bem):
        return HeldOut(adapter, by_document(bem.host, batches, documents))


@torch.no_grad()
def by_document(
    host: nn.Module,
    batches: Sequence[Batch],
    documents: Sequence[int],
    progress: Callable[[int], object] = lambda n: None,
) -> ByDocument:
    """Return a model's losses, with what is on it, as `measure`."""
    n_rows = sum(len(model_inputs(batch)["input_ids"]) for batch in batches)
    if len(documents) != n_rows:
        raise ConfigError(f"{len(documents)} documents for {n_rows} rows: give a number for each row of all batches")
    sums, counts, at = dict[int, float](), dict[int, int](), 0
    with mode(host, training=False):
        for batch in batches:
            row_documents = documents[at : at + len(batch["input_ids"])]
            at += len(row_documents)
            losses, n = label_losses(host, batch)
            for row, document in enumerate(row_documents):
                sums[document] = sums.get(document, 0.0) + float(losses[row])
                counts[document] = counts.get(document, 0) + int(n[row])
            progress(len(row_documents))
    counted = [document for document, n in sorted(counts.items()) if n]
    if not counted:
        raise ConfigError("no document has a label that is to be predicted: there is nothing to measure")
    return ByDocument(
        np.array([sums[document] for document in counted]), np.array([counts[document] for document in counted], float)
    )


@torch.no_grad()
def share_at_limits(bem: Bem, batches: Sequence[Batch]) -> float | None:
    """Return the share of updates, one a token and site, that `spectral_cap` or `trust_region` makes smaller; None
    without either.
    """
    if bem.config.spectral_cap is None and bem.config.trust_region is None:
        return None
    n_limited, n_updates, levels = 0, 0, {} if bem.levels is None else bem.levels.chosen()
    with mode(bem.host, training=False):
        for batch in batches:
            real = real_tokens(batch)
            with recorded_codes(bem) as recorded:
                bem.host(**forward_inputs(bem.host, batch), use_cache=False)
            limited, taken = applied_codes(bem, recorded[-1]), codes_taken(bem, recorded[-1])
            for site in bem.sites:
                after = limited[site.key][real].double()
                if isinstance(bem.governor, FormGovernor):  # the share that is left; without a code there is no update
                    smaller = (after[:, -1] < 1 - _ROUNDING) & (after[:, :-1] != 0).any(dim=-1)
                else:
                    level = levels.get(site.name)
                    before = (taken[site.chunked] if level is None else recorded[-1].of(level))[real].double()
                    smaller = after.norm(dim=-1) < before.norm(dim=-1) * (1 - _ROUNDING)
                n_limited += int(smaller.sum())
                n_updates += int(real.sum())
    return n_limited / n_updates if n_updates else 0.0


def label_losses(host: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each row's summed cross-entropy `[B]` fp64, and number of labels `[B]`."""
    logits, labels = predictions(host, batch)
    losses = nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    return losses.view(labels.shape).sum(dim=1), (labels != -100).sum(dim=1)
