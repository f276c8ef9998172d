"""probemon: watch a language model from the inside, token by token."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probemon.manager import DynamicProbeManager
    from probemon.packs.pack import ProbePack

__all__ = ["DynamicProbeManager", "ProbePack"]


def __getattr__(name: str) -> Any:
    # Imported at first use: transformers takes seconds, and inspecting a pack needs none of it.
    if name == "DynamicProbeManager":
        from probemon.manager import DynamicProbeManager

        return DynamicProbeManager
    if name == "ProbePack":
        from probemon.packs.pack import ProbePack

        return ProbePack
    raise AttributeError(f"module 'probemon' has no attribute {name!r}")
