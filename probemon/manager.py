"""DynamicProbeManager: composes pack, kernels and cascade into scores.

    manager = DynamicProbeManager(ProbePack.open(path), keep_top_k=30)
    state, scores = manager.step(None, hidden)            # one token of each of B rows, hidden [B, D]
    scores = manager.score_tokens(hidden)                 # one document, hidden [T, D]
    everything = manager.score_all(hidden)                # fp32 [T, P]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.cascade import CascadePlan, Descent, descend, expand_thresholds, retain
from probemon.errors import ConfigError
from probemon.hierarchy import Ints, Mask
from probemon.kernels import check_impl, default_impl, prepare_input, score_probes
from probemon.pack import ProbePack
from probemon.types import CascadeConfig, Coverage, Floats, RowState, Scores

Hidden = Tensor | Mapping[str, Tensor]
_BATCH_CELLS = 1 << 22  # (state, probe) cells of one descent: bounds the memory of a long document


class DynamicProbeManager:
    """Scores hidden states with a pack, descending its hierarchy.

    `device`, `impl` (kernel; None picks by device) and the settings of `CascadeConfig` by name:
    base_layers, load_threshold, keep_top_k, aggressive_pruning, max_loaded_probes, unload_threshold,
    always_on, report_top_k, max_rounds. Raises `ConfigError` (`UnknownSetting` for a typo).
    """

    def __init__(self, pack: ProbePack, *, device: str = "cpu", impl: str | None = None, **settings: Any) -> None:
        self.pack = pack
        self.config = CascadeConfig.of(settings)
        self.device = torch.device(device)
        self.impl = check_impl(impl or default_impl(self.device, pack.dtype), self.device, pack.dtype)
        self._weights = {name: tensor.to(self.device) for name, tensor in pack.weights.items()}
        self._alert = pack.alert_threshold.numpy()
        self._input = pack.input_index.numpy()
        thresholds = expand_thresholds(
            pack.tree, pack.score_rule, self.config.load_threshold, self._alert, pack.expand_threshold.numpy(),
            pack.recommended.get("load_threshold"),
        )  # fmt: skip
        always_on = [pack.find(concept) for concept in self.config.always_on]
        self.plan = CascadePlan.of(pack.tree, pack.score_rule, self.config, thresholds, always_on)
        self._checked = np.zeros(pack.n_probes, dtype=bool)

    def step(self, state: RowState | None, hidden: Hidden) -> tuple[RowState, Scores]:
        """Score one token of each of B rows, hidden [B, D]; `state=None` begins with empty retained sets.

        A row whose state is not finite is unseen and keeps its retained set.
        """
        inputs, finite = self._inputs(hidden)
        if state is not None and state.retained.shape != (len(finite), self.pack.n_probes):
            raise ConfigError(f"state holds {len(state)} rows, hidden {len(finite)}: give one state a row")
        retained = None if state is None else state.retained
        step, scores, released = self._descend(inputs, finite, retained)
        kept = np.zeros_like(step.active) if retained is None else retained.copy()
        kept[finite] = released[0][finite]
        return RowState(kept), scores

    def score_tokens(self, hidden: Hidden, prompt_len: int | None = None) -> Scores:
        """Score one document, hidden [T, D]. Its first `prompt_len` tokens (default all) memorylessly, the rest step by step.

        The last prompt token's retained set begins the generation, as online.
        """
        sites = self._sites(hidden)
        n_tokens = len(next(iter(sites.values())))
        n_prompt = n_tokens if prompt_len is None else prompt_len
        if not 0 <= n_prompt <= n_tokens:
            raise ConfigError(f"prompt_len is {prompt_len}, the document has {n_tokens} tokens")
        parts, state = [], None
        per_batch = max(1, _BATCH_CELLS // self.pack.n_probes)
        for at in range(0, n_prompt, per_batch):
            batch = {site: x[at : min(at + per_batch, n_prompt)] for site, x in sites.items()}
            inputs, finite = self._inputs(batch)
            _, scores, (kept, _) = self._descend(inputs, finite, None)
            parts.append(scores)
            state = RowState(kept[-1:] & finite[-1])
        for t in range(n_prompt, n_tokens):
            state, scores = self.step(state, {site: x[t : t + 1] for site, x in sites.items()})
            parts.append(scores)
        return Scores.join(parts, self.pack.n_probes, self.config.report_top_k)

    def score_all(self, hidden: Hidden) -> Tensor:
        """Every probe's score, fp32 [T, P], for audits and tests; NaN rows where the hidden state is not finite."""
        inputs, finite = self._inputs(hidden)
        n, p = len(finite), self.pack.n_probes
        own = self._score_pairs(inputs, n, np.repeat(np.arange(n), p), np.tile(np.arange(p), n)).reshape(n, p)
        if self.plan.path_rule:
            own = self.pack.tree.times_best_parent(own)
        own[~finite] = np.nan
        return torch.from_numpy(own)

    # -- inside ----------------------------------------------------------------------------------

    def _sites(self, hidden: Hidden) -> dict[str, Tensor]:
        if isinstance(hidden, Tensor):
            if len(self.pack.sites) != 1:
                raise ConfigError(f"the pack reads {self.pack.sites}: give hidden as a dict of these")
            hidden = {self.pack.sites[0]: hidden}
        lengths = set()
        for site in self.pack.sites:
            if site not in hidden:
                raise ConfigError(f"hidden has no site {site!r}, which the pack reads; it has {list(hidden)}")
            shape = tuple(hidden[site].shape)
            if len(shape) != 2 or shape[1] != self.pack.architecture.hidden_size:
                raise ConfigError(f"hidden at {site} has shape {shape}, expected [N, {self.pack.architecture.hidden_size}]")
            lengths.add(shape[0])
        if len(lengths) != 1:
            raise ConfigError(f"hidden states of the sites have different lengths {sorted(lengths)}")
        return {site: hidden[site].detach() for site in self.pack.sites}

    def _inputs(self, hidden: Hidden) -> tuple[Tensor, np.ndarray]:
        """Prepared inputs `[I * N, D]`, one block of N an input, and which of the N states are finite."""
        sites = self._sites(hidden)
        blocks = [prepare_input(sites[spec.site].to(self.device), spec, self.pack.dtype) for spec in self.pack.inputs]
        finite = torch.stack([torch.isfinite(x).all(dim=-1) for x in (*sites.values(), *(b.cpu() for b in blocks))])
        return torch.cat(blocks), finite.all(dim=0).cpu().numpy()

    def _score_pairs(self, inputs: Tensor, n: int, rows: Ints, probes: Ints) -> Floats:
        fresh = np.unique(probes[~self._checked[probes]])
        if len(fresh):
            self.pack.check_finite(fresh)
            self._checked[fresh] = True
        at = torch.from_numpy(self._input[probes] * n + rows).to(self.device)
        slots = torch.from_numpy(np.ascontiguousarray(probes)).to(self.device)
        scores: Floats = score_probes(inputs, self._weights, at, slots, impl=self.impl).cpu().numpy()
        return scores

    def _descend(
        self, inputs: Tensor, finite: np.ndarray, retained: Mask | None
    ) -> tuple[Descent, Scores, tuple[Mask, Ints]]:
        n, p = len(finite), self.pack.n_probes
        step = descend(self.plan, n, retained, lambda rows, probes: self._score_pairs(inputs, n, rows, probes))
        kept, released = retain(self.plan, step)
        step.active[~finite] = False
        step.dropped[~finite] = False
        rows, probes = np.nonzero(step.active)
        values = step.scores[rows, probes]
        active, dropped = step.active.sum(axis=1), step.dropped.sum(axis=1)
        coverage = Coverage(
            n_probes=p, active=active, dropped=dropped, not_reached=np.where(finite, p - active - dropped, 0),
            evaluated=active.copy(), released=np.where(finite, released, 0),
            unseen=tuple("" if ok else "hidden state is not finite" for ok in finite.tolist()),
        )  # fmt: skip
        scores = Scores(
            ptr=np.concatenate([[0], np.cumsum(active)]), probes=probes.astype(np.int32), values=values,
            fired_mask=values > self._alert[probes], coverage=coverage, report_top_k=self.config.report_top_k,
        )  # fmt: skip
        return step, scores, (kept, released)
