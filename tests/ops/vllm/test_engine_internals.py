"""Each name that probemon reads inside vLLM exists; a failure names what a version moved. Needs vLLM's environment."""

import dataclasses
import inspect
from importlib.metadata import entry_points
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import DEFAULT_PLUGINS_GROUP, ENDPOINT_PLUGINS_GROUP
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorOfV2

from probemon.errors import ConfigError
from probemon.ops.vllm import internals, plugin
from probemon.ops.vllm.step_stops import STOPS
from probemon.ops.vllm.stop import StopRows


def test_worker_has_what_the_subclass_overrides_and_reads():
    worker = internals.worker_class()
    for name in ("load_model", "compile_or_warm_up_model", "execute_model", "sample_tokens", "shutdown"):
        assert callable(getattr(worker, name)), name
    assert {"grammar_output"} <= set(inspect.signature(worker.sample_tokens).parameters)


def test_both_runners_keep_the_state_of_a_step():
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState as OfV2
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState as OfV1

    assert "aux_hidden_states" in OfV1._fields and {"aux_hidden_states", "input_batch"} <= set(OfV2._fields)
    assert {"req_ids", "num_reqs", "query_start_loc_np", "input_ids", "positions"} <= set(InputBatch.__annotations__)


def test_requests_of_ones_own_and_their_end():
    class Runner:
        class kv_cache_config:
            class Group:
                class kv_cache_spec:
                    block_size = 4

            kv_cache_groups = (Group,)

    first, last = internals.new_requests(Runner, {"a": list(range(9)), "b": [7]})
    news = [(new.req_id, new.prompt_token_ids, new.block_ids) for new in first.scheduled_new_reqs]
    assert news == [("a", list(range(9)), ([1, 2, 3],)), ("b", [7], ([4],))]
    assert first.num_scheduled_tokens == {"a": 9, "b": 1} and last.finished_req_ids == {"a", "b"}
    Runner.kv_cache_config.num_blocks = 10
    assert internals.prefix_cache(Runner) == (4, 10)


def test_what_was_sampled_is_read_from_outputs_of_both_runners():
    output = ModelRunnerOutput(req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1}, sampled_token_ids=[[5], [6, 7]])

    methods = {name: lambda _: output for name in AsyncModelRunnerOutput.__abstractmethods__}
    Later = type("Later", (AsyncModelRunnerOutput,), methods)
    assert internals.sampled(output) == internals.sampled(Later()) == (output, {"a": 1, "b": 2})


def test_one_class_is_a_processor_of_both_runners():
    assert issubclass(StopRows, ProcessorOfV2) and not inspect.isabstract(StopRows)
    assert "idx_mapping_np" in LogitsContext.__annotations__
    assert hasattr(SamplingParams(), "eos_token_id")


def test_rows_of_v2_end_by_the_slots_of_their_requests():
    stop = StopRows(SimpleNamespace(speculative_config=None), None)
    for slot, eos in ((7, 1), (4, 2)):
        assert stop.add_request(slot, SimpleNamespace(eos_token_id=eos))
    context = SimpleNamespace(idx_mapping_np=np.array([4, 7]))
    STOPS.rows = [1]
    logits = stop.apply(torch.zeros(2, 3), context)
    assert logits.argmax(dim=1).tolist() == [0, 1] and logits[0].tolist() == [0, 0, 0]
    STOPS.rows = [0]
    with pytest.raises(ConfigError, match="a stop could not be made"):  # rows of drafts, not of requests
        stop.apply(torch.zeros(3, 3), context)


def test_command_line_and_choice_of_a_runner():
    _, command, set_up = internals.serve_command()
    assert callable(command.cmd) and callable(set_up)
    assert internals.expected_runner()[0] in ("v1", "v2")
    assert "use_v2_model_runner" in dir(VllmConfig)


def test_what_the_plugin_sets_of_an_engine_is_there():
    assert {"worker_cls", "additional_config", "logits_processors", "_api_process_count"} <= {
        field.name for field in dataclasses.fields(EngineArgs)
    }
    assert callable(EngineArgs.create_engine_config)
    groups = (DEFAULT_PLUGINS_GROUP, ENDPOINT_PLUGINS_GROUP)
    [watch], [endpoints] = ([one for one in entry_points(group=group) if one.name == "probemon"] for group in groups)
    assert watch.load() is plugin.watch_engines and isinstance(endpoints.load()(), EndpointPlugin)
