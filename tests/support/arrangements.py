"""Ways of running a host beside the modes of generate(): each function watches one and holds it against the oracle, or
raises.
"""

import copy
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, CompileConfig, GenerationConfig

from conftest import LAYERS, OLDEST, PAD, make_model, make_pack
from oracle import check, expected
from probemon import DynamicProbeManager

PROMPT = torch.tensor([[1, 44, 3, 17, 8]])
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8], [PAD, 1, 21, 22, 23]])
COMMON = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
PADDED = {"attention_mask": (BATCH != PAD).long(), **COMMON}


def manager_for(model, folder, **changes):
    return DynamicProbeManager(
        make_pack(folder / "pack", model, sites=("resid_post.0", "resid_post.2"), **changes), keep_top_k=6
    )


def check_batch(manager, model, result, out):
    for row, line in enumerate(out.tolist()):
        first = int((BATCH[row] == PAD).sum())
        check(manager, model, result, row, line, first, [(5 - first, len(line) - 6)])


def watch_batch(model, folder, watched=None):
    """A padded batch of `model` (or of `watched`, a wrapper around it); returns the result."""
    manager = manager_for(model, folder)
    with manager.attach(watched or model) as run:
        out = (watched or model).generate(BATCH, **PADDED)
    check_batch(manager, model, run.result(out), out)
    return run.result(out)


def embeddings(folder):
    model = make_model()
    manager = manager_for(model, folder)
    with manager.attach(model) as run:
        out = model.generate(inputs_embeds=model.get_input_embeddings()(PROMPT).detach(), **COMMON)
    result, n = run.result(out), out.shape[1]
    oracle = expected(manager, model, [*PROMPT[0].tolist(), *out[0].tolist()], [(5, n - 1)])[5:]
    assert result.token_id.tolist() == out[0].tolist() and result.coverage.n_unseen == 1
    for i, (phase, scores, t) in enumerate(oracle):
        assert phase == "generated" and result.scores.active(i).tolist() == scores.active(t).tolist()
        assert np.abs(result.scores.active_scores(i) - scores.active_scores(t)).max() < 1e-5


def compiled(folder, before, **more):
    torch._dynamo.reset()
    model = make_model()
    config = CompileConfig(**{"mode": "default", "backend": "eager", **more})
    config._compile_all_devices = True  # on a CPU generate() compiles only if told so
    options = {**COMMON, "cache_implementation": "static", "compile_config": config}
    if not before:
        model.generate(PROMPT, **options)
    manager = manager_for(model, folder)
    with manager.attach(model) as run:
        out = model.generate(PROMPT, **options)
    torch._dynamo.reset()
    check(manager, make_model(), run.result(out), 0, out[0].tolist(), 0, [(5, 7)])


def batching(folder):
    model = make_model().double()
    manager = manager_for(model, folder)
    configs = {"generation_config": GenerationConfig(**{**COMMON, "eos_token_id": 60})}
    if not OLDEST:  # which has no such class, and is refused
        from transformers import ContinuousBatchingConfig

        configs["continuous_batching_config"] = ContinuousBatchingConfig(
            max_batch_tokens=16, page_size=4, num_blocks=32, allow_block_sharing=False
        )
    with manager.attach(model) as run:
        outputs = model.generate_batch([row[row != PAD].tolist() for row in BATCH], progress_bar=False, **configs)
    for row, output in enumerate(outputs.values()):
        n = len(output.prompt_ids)
        check(
            manager,
            model,
            run.result(outputs),
            row,
            [*output.prompt_ids, *output.generated_tokens],
            0,
            [(n, len(output.generated_tokens) - 1)],
        )


def threads(folder):
    model = make_model()
    manager = manager_for(model, folder)
    with manager.attach(model) as run, ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(lambda k: model.generate(PROMPT + k, **COMMON), range(6)))
    for out in outs:
        check(manager, model, run.result(out), 0, out[0].tolist(), 0, [(5, 7)])


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w60", unk_token="w0")


def pipeline(folder):
    from transformers import pipeline

    model = make_model()
    manager, pipe = manager_for(model, folder), pipeline("text-generation", model=model, tokenizer=tokenizer())
    with manager.attach(model) as run:
        pipe(["w1 w5 w9", "w1 w44 w3"], **{**COMMON, "eos_token_id": None})
    for recording in run.recordings:
        [line] = recording.output.tolist()
        check(manager, model, run.result(recording.output), 0, line, 0, [(3, len(line) - 4)])
    assert len(run.recordings) == 2


def streamer(folder):
    from transformers import TextIteratorStreamer

    model = make_model()
    manager, stream, outs = manager_for(model, folder), TextIteratorStreamer(tokenizer()), []
    with manager.attach(model) as run:
        thread = threading.Thread(target=lambda: outs.append(model.generate(PROMPT, streamer=stream, **COMMON)))
        thread.start()
        text = "".join(stream)
        thread.join()
    assert text.split() == [f"w{i}" for i in outs[0][0].tolist()]
    check(manager, model, run.result(outs[0]), 0, outs[0][0].tolist(), 0, [(5, 7)])


def adapters(folder):
    """Enabled, disabled, another one, merged: each generation is right for the weights it ran with, and says which
    these were.
    """
    from peft import LoraConfig, get_peft_model

    base = make_model()
    manager = manager_for(base, folder)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    watched = get_peft_model(copy.deepcopy(base), config, adapter_name="one")
    watched.add_adapter("two", config)
    inner = watched.get_base_model()
    cases = []
    with manager.attach(watched) as run:
        for name in ("one", "two", "", "merged"):
            if name == "merged":
                watched.set_adapter("one")
                watched.merge_adapter()
            elif name:
                watched.set_adapter(name)
            with watched.disable_adapter() if name == "" else torch.no_grad():
                out = watched.generate(input_ids=BATCH, **PADDED)
            cases.append((name, out, run.result(out)))
    seen = []
    for name, out, result in cases:
        plain = get_peft_model(copy.deepcopy(base), config, adapter_name="one")
        plain.add_adapter("two", config)
        plain.load_state_dict({k: v for k, v in watched.state_dict().items() if "base_layer" not in k}, strict=False)
        plain = plain.get_base_model()
        for module in plain.modules():
            if hasattr(module, "set_adapter") and hasattr(module, "base_layer"):
                module.set_adapter({"": "one", "merged": "one"}.get(name, name))
                module.enable_adapters(name != "")
        check_batch(manager, plain, result, out)
        seen.append((result.host.adapters, result.host.adapters_disabled, result.host.adapters_merged))
    assert seen == [(("one",), (), ()), (("two",), (), ()), ((), ("two",), ()), (("one",), (), ("one",))]
    assert len({out.tolist().__repr__() for _, out, _ in cases[:3]}) == 3 and torch.equal(cases[0][1], cases[3][1])
    assert type(inner).__name__ == "LlamaForCausalLM"


def int8(folder):
    """In a process of its own: where torchao can be imported, every import of transformers does so, and talks
    about it.
    """
    code = "import sys, pathlib, arrangements; arrangements.int8_here(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(sys.prefix) / "torchao")]
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def int8_here(folder):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = make_model()
    quantize_(model, Int8WeightOnlyConfig())
    assert watch_batch(model, folder).host.quantisation == "Int8Tensor"


def device_map(folder):
    from accelerate import dispatch_model

    model = make_model()
    parts = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    model = dispatch_model(
        model, device_map=parts, main_device="cpu", offload_dir=str(folder / "offloaded"), force_hooks=True
    )
    assert watch_batch(model, folder).host.devices == ("cpu", "offloaded")


def offload(folder):
    from accelerate import cpu_offload

    model = make_model()
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert watch_batch(model, folder).host.devices == ("offloaded",)


def tensor_parallel(folder):
    model = make_model(heads=2)
    manager = manager_for(model, folder)
    model.save_pretrained(folder / "model")
    program = Path(__file__).parents[1] / "programs/tensor_parallel.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    done = subprocess.run(
        [*command, str(program), str(folder / "model"), str(folder / "pack")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = json.loads(done.stdout.strip().splitlines()[-1])
    assert first["free"]["out"] == second["free"]["out"] and first["stopped"]["out"] == second["stopped"]["out"]
    assert first["free"]["ranks"] == 2 and "its scores are on rank 0" in second["free"]["refused"]
    assert (
        [len(line) for line in first["stopped"]["out"]] == [7, 7]
        and "concept 3" in first["raised"]
        and "on rank 0" in second["raised"]
    )
    plan = manager.plan_with(["c3"])  # the rule's concept is evaluated at every token there
    for row, line in enumerate(first["free"]["out"]):
        begin = (2, 0)[row]
        mine = [i for i, r in enumerate(first["free"]["row"]) if r == row]
        assert [first["free"]["position"][i] for i in mine] == list(range(begin, 13)) and first["free"]["unseen"][
            mine[-1]
        ]
        always = DynamicProbeManager(manager.pack, keep_top_k=6, always_on=["c3"])
        assert np.array_equal(always.plan.always, plan.always)
        for i, (_, scores, t) in zip(mine, expected(always, model, line[begin:12], [(5 - begin, 7)]), strict=False):
            probes, values = first["free"]["scores"][i]
            assert (
                probes == scores.active(t).tolist() and np.abs(np.array(values) - scores.active_scores(t)).max() < 1e-5
            )


def vision_language(folder):
    """Its decoder is given embeddings at every step, never ids; with and without a picture."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    text = LlamaConfig(
        **{
            k: getattr(make_model().config, k)
            for k in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
                "pad_token_id",
                "initializer_range",
            )
        }
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=60, vision_feature_layer=-1)
    ).eval()
    watch_batch(model, folder)
    manager, pixels = manager_for(model, folder, overwrite=True), torch.randn(1, 3, 8, 8)
    ids = torch.tensor([[1, 60, 60, 60, 60, 17, 8]])  # four patches
    with manager.attach(model) as run:
        out = model.generate(ids, pixel_values=pixels, **COMMON)
    check(manager, model, run.result(out), 0, out[0].tolist(), 0, [(7, 7)], forward={"pixel_values": pixels})
    if not OLDEST:
        with manager.attach(model) as run:
            out = model.generate(torch.tensor([[1, 5, 9, 13, 7]]), prefill_chunk_size=2, **COMMON)
        check(manager, model, run.result(out), 0, out[0].tolist(), 0, [(5, 7)])


def encoder_only(folder, name):
    """A plain forward of padded documents: a document's tokens are all prompt, and see one another in both
    directions.
    """
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "pad_token_id": PAD,
        "initializer_range": 0.5,
    }
    sizes |= {
        "distilbert": {"dim": 16, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": 24},
        "modernbert": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    }.get(name, {})
    model = AutoModel.from_config(AutoConfig.for_model(name, **sizes)).eval()
    manager = manager_for(model, folder)
    rows = torch.tensor([[*row[row != PAD], *row[row == PAD]] for row in BATCH])
    with manager.attach(model) as run, torch.no_grad():
        model(rows, attention_mask=(rows != PAD).long())
    result = run.result(rows)
    for row, line in enumerate(rows.tolist()):
        n = sum(token != PAD for token in line)
        check(manager, model, result, row, line, 0, [(n, 0)])
    assert result.coverage.n_unseen == 0


ARRANGEMENTS = {
    "prompt as `inputs_embeds`": embeddings,
    "compiled decode, attached before": lambda folder: compiled(folder, before=True),
    "compiled decode, attached after": lambda folder: compiled(folder, before=False),
    "compiled decode, one whole graph (`fullgraph=True`)": lambda folder: compiled(
        folder, before=False, fullgraph=True
    ),
    "continuous batching (`generate_batch`)": batching,
    "two threads on one model": threads,
    "`transformers.pipeline`": pipeline,
    "`TextIteratorStreamer` in a thread": streamer,
    "PEFT adapters: enabled, switched, disabled, merged": adapters,
    "torchao int8 weights": int8,
    "accelerate `device_map`, a layer on disk": device_map,
    "accelerate CPU offload": offload,
    "tensor parallel over 2 gloo ranks": tensor_parallel,
    "vision-language: llava, with and without a picture": vision_language,
    "encoder-only: bert, plain forward": lambda folder: encoder_only(folder, "bert"),
    "encoder-only: distilbert, plain forward": lambda folder: encoder_only(folder, "distilbert"),
    "encoder-only: modernbert, plain forward": lambda folder: encoder_only(folder, "modernbert"),
}
