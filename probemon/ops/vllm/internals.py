"""Undocumented features of vLLM, one function each; the bases of its logits processors are in `stop`.

`rows` and `layer_states` read fields of what these functions return. Needs vLLM. After an upgrade run
`tests/ops/vllm/test_engine_internals.py` in vLLM's environment first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm import envs
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.triton_utils import HAS_TRITON
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from probemon.ops.vllm.rows import StepRows, rows_of_v1, rows_of_v2

# Modules of a name, by version, the newest first.
_ENV_SETUP = ("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils")

has_auxiliary_states: Callable[[Any], bool] = supports_eagle3


def worker_class() -> Any:
    """Return the class of workers of this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def expected_runner() -> tuple[str, str]:
    """Return which model runner an engine takes here, "v1" or "v2", and why."""
    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    if asked is not None:
        return "v2" if asked else "v1", "VLLM_USE_V2_MODEL_RUNNER is set"
    if HAS_TRITON:
        return "v2", "vLLM takes it if Triton works, except for options of the engine that only v1 has"
    return "v1", "v2 needs Triton, which does not work here"


def runner_name(runner: Any) -> str:
    """Return "v1" or "v2"."""
    return "v1" if hasattr(runner, "query_start_loc") else "v2"


def step_state(runner: Any) -> Any:
    """Return what a runner keeps between running a step and sampling: it has `aux_hidden_states`."""
    return runner.execute_model_state


def step_rows(runner: Any, scheduled: Mapping[str, int]) -> StepRows:
    """Return the rows of a runner's newest step. `scheduled`: rows by request. Raises `AlignmentError`."""
    state = step_state(runner)
    if hasattr(state, "input_batch"):
        return rows_of_v2(state.input_batch, scheduled)
    return rows_of_v1(runner, scheduled)


def prefix_cache(runner: Any) -> tuple[int, int]:
    """Return the tokens of the smallest block that is cached, and how many of these the cache holds."""
    config = runner.kv_cache_config
    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    return min(sizes), config.num_blocks * max(sizes) // min(sizes)


def told_by_first_rank(rows: list[int]) -> list[int]:
    """Return the rows of the first rank of tensor parallelism, on every rank."""
    told: list[int] = get_tp_group().broadcast_object(rows, src=0)
    return told


def sampled(output: Any) -> tuple[Any, dict[str, int]]:
    """Return the output of sampling, waited for, and how many tokens each request got."""
    if isinstance(output, AsyncModelRunnerOutput):  # of runner V2: it is on its way from the GPU
        output = output.get_output()
    counts = {name: len(output.sampled_token_ids[i]) for name, i in getattr(output, "req_id_to_index", {}).items()}
    return output, counts


def new_requests(runner: Any, prompts: Mapping[str, Sequence[int]]) -> tuple[SchedulerOutput, SchedulerOutput]:
    """Return a step that runs new requests, and the step that ends them."""
    groups = runner.kv_cache_config.kv_cache_groups
    first, last = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    begins = [1] * len(groups)  # block 0 is vLLM's
    for name, ids in prompts.items():
        sizes = [-(-(len(ids) + 1) // group.kv_cache_spec.block_size) for group in groups]
        blocks = tuple(list(range(begin, begin + size)) for begin, size in zip(begins, sizes, strict=True))
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
        first.scheduled_new_reqs.append(
            NewRequestData(
                req_id=name,
                prompt_token_ids=list(ids),
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
                pooling_params=None,
                block_ids=blocks,
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=list(ids),
            )
        )
    first.num_scheduled_tokens = {name: len(ids) for name, ids in prompts.items()}
    first.total_num_scheduled_tokens = sum(map(len, prompts.values()))
    first.num_common_prefix_blocks = [0] * len(groups)
    last.finished_req_ids = set(prompts)
    return first, last


def serve_command() -> tuple[Any, Any, Callable[[], None]]:
    """Return vLLM's command line: its parser, the command serve, and what prepares the environment."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, command = FlexibleArgumentParser(prog="vllm"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    return parser, command, _found("cli_env_setup", _ENV_SETUP)


def _found(name: str, modules: Sequence[str]) -> Any:
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"vLLM has no {name} in {', '.join(modules)}: this version moved it")
