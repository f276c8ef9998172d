"""Loads a model by name.

model, tokenizer = load_model("demo", "cpu", print)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from probemon.errors import ConfigError
from probemon.util.cache_folders import check_hub_cache, hub_cache_problem
from probemon.util.counted import counted
from probemon.util.first_sentence import first_sentence
from probemon.util.near_folders import folders_with, is_path, near_folders

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_MARKER = "config.json"  # marks a model folder

_MODELS_OF_WINGS = ("probemon.adapters.ltm",)  # importing them registers their classes with transformers


def load_model(name: str, device: str, say: Callable[[str], None], dtype: str = "auto") -> tuple[Any, Any]:
    """Return `(model, tokenizer)` in eval mode on `device`; `dtype` "auto" uses the files' own.

    Raises `ConfigError` if the model cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    for wing in _MODELS_OF_WINGS:
        import_module(wing)
    check_dtype(dtype)
    kind: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    logging.disable_progress_bar()
    _check_name(name)
    if name == "demo":
        from probemon.bundled import load_bundled

        model, tokenizer = load_bundled(torch.float32 if dtype == "auto" else kind, say=say)
        return model.to(device), tokenizer
    has_folder = Path(name).is_dir()
    if not has_folder:
        check_hub_cache()
    only_cached = not has_folder and not _hub_answers(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=only_cached)
        load: Any = AutoModelForCausalLM.from_pretrained
        model, loaded = load(name, dtype=kind, local_files_only=only_cached, output_loading_info=True)
        _check_whole(name, model, sorted(loaded["missing_keys"]))
        return model.eval().to(torch.device(device)), tokenizer
    except ConfigError:
        raise
    except Exception as error:  # damaged folders fail in many ways
        if not has_folder and (problem := hub_cache_problem(error)):
            raise ConfigError(f"{name!r} cannot be fetched: {problem}") from error
        if not has_folder and not _is_cached(name):
            raise ConfigError(
                f"{name!r} is neither a folder nor a model {_why_not_fetched(name, only_cached)}"
            ) from error
        where = "is a folder" if has_folder else "is in the cache of the hub"
        raise ConfigError(f"{name!r} {where} and cannot be loaded: {first_sentence(error)}") from error


def check_is_no_pack(name: str, remedy: str = "give the folder of a model, a name on the hub, or demo") -> None:
    """Raise `ConfigError` if `name` is a probe pack."""
    from probemon.packs.local import is_pack  # imports torch

    if is_pack(name) and not (Path(name) / _MARKER).is_file():
        raise ConfigError(f"{name} is a probe pack, not a model: {remedy}")


def slow_number(model: Any) -> str:
    """Return the model's half-precision dtype if this CPU lacks instructions for it, else "".

    float32 then reads texts several times faster; single tokens take the same time.
    """
    import torch

    if model.device.type != "cpu":
        return ""
    has = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return str(model.dtype).removeprefix("torch.") if model.dtype in has and not has[model.dtype]() else ""


def check_dtype(dtype: str) -> None:
    """Raise `ConfigError` for an unknown dtype."""
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: give one of {', '.join(_DTYPES)}")


def _check_name(name: str) -> None:
    if not name.strip():
        raise ConfigError("the name of the model is empty: give a folder, a name on the hub, or demo")
    check_is_no_pack(name)
    if Path(name).is_file():
        raise ConfigError(f"{name} is a file: give the folder of a model")
    if not Path(name).is_dir() and (is_path(name) or ("/" in name and folders_with(Path(name).parent, _MARKER))):
        raise ConfigError(f"no such folder: {name!r}{_hint(name) or '; give a folder, or a name on the hub'}")


def _check_whole(name: str, model: Any, missing: Sequence[str]) -> None:
    """Raise `ConfigError` if weights are missing or an encoder would be dropped."""
    kind = type(model).__name__
    saved = getattr(model.config, "architectures", None) or [kind]
    if kind not in saved and type(model.config)().is_encoder_decoder:
        raise ConfigError(
            f"{name!r} holds a {saved[0]}, which has an encoder, and would be loaded as its decoder alone: load it in"
            " Python, and give that model to manager.attach"
        )
    if missing:
        raise ConfigError(
            f"{name!r} lacks {counted(len(missing), 'weight')} of a {kind}, such as {missing[0]}, which would be"
            " random: load it in Python by the class that it was saved by (adapters by PeftModel.from_pretrained), and"
            " give that model to manager.attach or manager.analyze"
        )


def _hint(name: str) -> str:
    """Return a suggestion of similar names, or ""."""
    near = [] if Path(name).is_dir() else near_folders(name, _MARKER, ["demo"])
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, _MARKER), str)
    except HFValidationError:
        return False


def _why_not_fetched(name: str, only_cached: bool) -> str:
    """Return the end of the message for a missing model."""
    from huggingface_hub import constants

    hint = _hint(name)
    if not only_cached:
        return f"on the hub{hint or ': check the name; where it is private, log in by `hf auth login`'}"
    if constants.is_offline_mode():
        return f"in the cache, and HF_HUB_OFFLINE forbids to ask the hub{hint or ': unset it, or give a folder'}"
    return f"in the cache, and the hub cannot be reached{hint or ': check the connection, or give a folder'}"


def _hub_answers(name: str) -> bool:
    """Ask the hub once: transformers would retry for a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, _MARKER))
    except HfHubHTTPError as error:  # "no such model" is an answer too
        return error.response.status_code < 500
    except Exception:  # offline, or an impossible name
        return False
    return True
