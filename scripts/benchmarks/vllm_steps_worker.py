"""The worker of `vllm_steps.py`: writes what the model runner has of every step, then lets it be scored."""

from __future__ import annotations

import json
import os
from typing import Any

from probemon.ops.vllm.internals import sampled
from probemon.ops.vllm.rows import StepRows
from probemon.ops.vllm.worker import ProbeWorker

SLACK = 4  # stale entries of the buffers after the rows of a step


class RecordingWorker(ProbeWorker):
    """Appends a line of JSON for each step to the file that the environment names."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Note what the scheduler says, then run the step."""
        output = super().execute_model(scheduler_output)
        if self._watch is None:
            return output
        cached = scheduler_output.scheduled_cached_reqs
        self._line = {
            "finished": sorted(scheduler_output.finished_req_ids),
            "new": [
                [new.req_id, new.prompt_token_ids, new.num_computed_tokens, new.prefill_token_ids]
                for new in scheduler_output.scheduled_new_reqs
            ],
            "resumed": {name: list(cached.all_token_ids.get(name) or ()) for name in cached.resumed_req_ids},
            "scheduled": dict(scheduler_output.num_scheduled_tokens),
            "drafts": {name: len(ids) for name, ids in scheduler_output.scheduled_spec_decode_tokens.items()},
            "runner": self._had if scheduler_output.total_num_scheduled_tokens else None,
            "sampled": {},
        }
        if not scheduler_output.total_num_scheduled_tokens:
            self._write()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Note how many tokens each request sampled."""
        output = super().sample_tokens(grammar_output)
        if self._watch is not None:
            output, self._line["sampled"] = sampled(output)
            self._write()
        return output

    def _rows(self, scheduled: Any) -> StepRows:
        runner = self.model_runner
        batch = getattr(runner.execute_model_state, "input_batch", None)
        if batch is not None:  # of runner V2
            n = int(batch.num_reqs)
            n_rows = int(batch.query_start_loc_np[n])
            self._had = {
                "req_ids": list(batch.req_ids),
                "num_reqs": n,
                "query_start_loc": batch.query_start_loc_np.tolist(),
                "input_ids": batch.input_ids[: n_rows + SLACK].tolist(),
                "positions": batch.positions[: n_rows + SLACK].tolist(),
            }
            return super()._rows(scheduled)
        n = int(runner.input_batch.num_reqs)
        n_rows = int(runner.query_start_loc.np[n])
        self._had = {
            "req_ids": list(runner.input_batch.req_ids),
            "num_reqs": n,
            "query_start_loc": runner.query_start_loc.np[: n + 1 + SLACK].tolist(),
            "input_ids": runner.input_ids.gpu[: n_rows + SLACK].tolist(),
            "positions": runner.positions[: n_rows + SLACK].tolist(),
        }
        return super()._rows(scheduled)

    def _write(self) -> None:
        with open(os.environ["PROBEMON_VLLM_STEPS"], "a") as file:
            file.write(json.dumps(self._line, separators=(",", ":")) + "\n")
