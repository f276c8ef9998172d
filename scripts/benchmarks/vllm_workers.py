"""Workers for the evidence on vLLM: one that keeps what it scored, and some that are broken on purpose. Need vLLM.

LLM(..., worker_cls="vllm_workers.KeepingWorker")
llm.collective_rpc("keep_states", args=(True,)); llm.collective_rpc("write_states", args=("states.npz",))
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from probemon.ops.vllm.worker import ProbeWorker


class KeepingWorker(ProbeWorker):
    """Keeps the states that it scored, row by row, and can be told not to score."""

    _keep, _paused = False, None
    _rows_kept: list[tuple[Any, Any, Any]]

    def keep_states(self, wanted: bool) -> None:
        """Begin to keep, or end."""
        self._keep, self._rows_kept = wanted, []

    def write_states(self, path: str) -> int:
        """Write what was kept: of every row its request, position, token and states, in the order of the steps.

        Of several ranks, which hold the same states, the first writes.
        """
        if self.rank:
            return 0
        sites = list(self._settings.sites)
        names = [name for requests, *_ in self._rows_kept for name in requests]
        numbers = {
            "positions": np.concatenate([rows.positions for _, rows, _ in self._rows_kept]),
            "ids": np.concatenate([rows.ids for _, rows, _ in self._rows_kept]),
        }
        states = {f"states {site}": np.concatenate([taken[site] for *_, taken in self._rows_kept]) for site in sites}
        np.savez(path, requests=np.array(names), **numbers, **states)
        return len(names)

    def pause(self, wanted: bool) -> None:
        """Run steps without scoring them, or score again."""
        if wanted:
            self._paused, self._watch = self._watch, None
        else:
            self._watch, self._paused = self._paused, None

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step; keep its rows."""
        output = super().execute_model(scheduler_output)
        if self._keep and scheduler_output.total_num_scheduled_tokens:
            rows = self._rows(scheduler_output)
            lengths = np.diff(rows.starts)
            names = [name for name, n in zip(rows.requests, lengths.tolist(), strict=True) for _ in range(n)]
            taken = {site: states[: len(names)].float().cpu().numpy() for site, states in self._taken().items()}
            self._rows_kept.append((names, rows, {site: states.copy() for site, states in taken.items()}))
        return output


class WithoutStates(ProbeWorker):
    """Its model hands out no states: as where layers were asked for after the graph was made."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load, and take the request for states back."""
        loaded = super().load_model(*args, **kwargs)
        self.model_runner.get_model().set_aux_hidden_state_layers(())
        self.model_runner.use_aux_hidden_state_outputs = False
        return loaded


class OtherLayer(ProbeWorker):
    """Its model hands out the states of the layer before: as a stale compiled graph would."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load, and ask for the layer before."""
        loaded = super().load_model(*args, **kwargs)
        sites = [int(site.rpartition(".")[2]) for site in self._settings.sites]
        self.model_runner.get_model().set_aux_hidden_state_layers(tuple(sorted(sites)))
        return loaded


class OtherWeights(ProbeWorker):
    """The norm of its first layer has other weights than the files (those of products are packed by then)."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load, and change weights."""
        loaded = super().load_model(*args, **kwargs)
        with torch.no_grad():
            self.model_runner.get_model().model.layers[0].input_layernorm.weight.mul_(1.5)
        return loaded
