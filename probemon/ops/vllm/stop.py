"""vLLM's logits processor that ends rows at which a rule stopped, for both of its model runners. Needs vLLM.

The worker sets `STOPS` before sampling, in the same process.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorOfV1
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorOfV2

from probemon.errors import ConfigError
from probemon.ops.vllm.row_ends import check_stoppable, force_end
from probemon.ops.vllm.step_stops import STOPS


class StopRows(ProcessorOfV1, ProcessorOfV2):
    """Ends rows. Raises `ConfigError` with speculation: its rows are drafted tokens.

    Which runner reads an engine's arguments is not known before the engine is made, so one class is both. Runner V1
    gives `device` and `is_pin_memory`, and tells of rows by `update_state`; V2 gives the states of requests, and tells
    of slots by `add_request`, which `apply` finds in its context.
    """

    def __init__(self, vllm_config: Any, *of_runner: Any) -> None:
        if vllm_config.speculative_config is not None:
            raise ConfigError(
                "rules that stop end rows of the sampler, which are drafted tokens with speculation and not requests:"
                " leave speculation out, or let the client abort (stops='abort')"
            )
        self._eos: dict[int, int | None] = {}  # by row of V1, or slot of V2
        STOPS.installed = True

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise `ConfigError`, a `ValueError`, for requests that could not be stopped."""
        check_stoppable(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Return False: it changes greedy rows."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of a V1 batch."""
        process_dict_updates(self._eos, batch_update, lambda params, _prompt, _output: params.eos_token_id)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take a request into a slot of V2."""
        self._eos[req_idx] = sampling_params.eos_token_id
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext | None = None) -> Tensor:
        """End the rows of this step."""
        rows, STOPS.rows = STOPS.rows, []
        if rows:
            slots = range(len(logits)) if ctx is None else ctx.idx_mapping_np.tolist()
            of_requests = len(slots) == len(logits)  # else whose row it is would be a guess, which ends the engine
            force_end(logits, rows, {row: self._eos.get(slots[row]) for row in rows} if of_requests else {})
        return logits
