"""Commands print their own messages and no other library's: standard error is compared in real processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with documents and an empty cache, into which the first command converts the demo model."""
    folder = tmp_path_factory.mktemp("quiet")
    texts = [{"text": f"The old horse of the village stood by table {i}, and people walked home."} for i in range(40)]
    (folder / "ordinary.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return folder


def run(place, line):
    """Standard error of a command that ends well. Warnings are shown as Python shows them to anybody."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(place / "cache"), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("PYTHONWARNINGS", None)
    done = subprocess.run(
        [sys.executable, "-m", "probemon", *line.split()], cwd=place, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "\r" not in done.stdout and "it/s" not in done.stdout
    return done.stderr


def test_commands_print_nothing_from_other_libraries(place):
    model = Path("cache/probemon/smollm2-135m-instruct")
    said = run(place, "watch demo --plain --max-new-tokens 2")
    assert said == (f"converting SmolLM2-135M-Instruct.Q4_1.gguf to safetensors in {place / model} (once)\n")
    # A command that reads texts reports if this CPU is slow at the model's number format.
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    slow = (
        "" if has_bf16 else "this CPU has no bfloat16 instructions: --dtype float32 reads texts several times faster\n"
    )
    assert run(place, "analyze demo demo ordinary.jsonl --out scores --dtype bfloat16") == slow
    assert run(place, "report scores") == ""
    assert run(place, "calibrate demo --benign ordinary.jsonl --fpr 0.1 --watch animal --out mine") == ""
    # A model of one's own, of an older transformers, that samples by default.
    own = shutil.copytree(place / model, place / "own")
    config = json.loads((own / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (own / "config.json").write_text(json.dumps(config))
    generation = json.loads((own / "generation_config.json").read_text())
    (own / "generation_config.json").write_text(json.dumps(generation | {"do_sample": True, "temperature": 0.6}))
    assert run(place, "watch own mine --plain --max-new-tokens 2") == ""
