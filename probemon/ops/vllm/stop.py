"""StopRows: vLLM's logits processor that ends the rows at which a rule stopped, inside the step. Needs vLLM.

LLM(model, logits_processors=[STOP_ROWS], ...)        # as `VllmClient.engine_arguments` does where a rule stops

The worker has said in `STOPS` which rows they are by the time that they are sampled, in the same process.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from probemon.errors import ConfigError
from probemon.ops.vllm.row_ends import check_stoppable, force_end
from probemon.ops.vllm.step_stops import STOPS


class StopRows(LogitsProcessor):
    """Ends rows. Requests that could not be ended are refused before they enter the engine.

    Raises `ConfigError` with speculation, where rows of logits are drafted tokens and not requests.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        if vllm_config.speculative_config is not None:
            raise ConfigError(
                "rules that stop end rows of the sampler, which are drafted tokens with speculation and not requests:"
                " leave speculation out, or let the client abort (stops='abort')"
            )
        self._eos: dict[int, int] = {}  # by row
        STOPS.installed = True

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise `ConfigError`, which is a `ValueError`, for a request that could not be stopped."""
        check_stoppable(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Return False: a greedy row that is ended takes another token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch, each with its end of sequence."""
        process_dict_updates(self._eos, batch_update, lambda params, _prompt, _output: params.eos_token_id)

    def apply(self, logits: Tensor) -> Tensor:
        """End the rows that have to end in this step."""
        rows, STOPS.rows = STOPS.rows, []
        if rows:
            force_end(logits, rows, self._eos)
        return logits
