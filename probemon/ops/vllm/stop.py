"""vLLM's logits processor that ends rows at which a rule stopped. Needs vLLM.

The worker sets `STOPS` before sampling, in the same process.
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
    """Ends rows. Raises `ConfigError` with speculation: its rows are drafted tokens."""

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
        """Raise `ConfigError`, a `ValueError`, for requests that could not be stopped."""
        check_stoppable(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Return False: it changes greedy rows."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch."""
        process_dict_updates(self._eos, batch_update, lambda params, _prompt, _output: params.eos_token_id)

    def apply(self, logits: Tensor) -> Tensor:
        """End the rows of this step."""
        rows, STOPS.rows = STOPS.rows, []
        if rows:
            force_end(logits, rows, self._eos)
        return logits
