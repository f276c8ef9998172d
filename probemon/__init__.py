"""probemon: watch a language model from the inside, token by token."""

from probemon.manager import DynamicProbeManager
from probemon.pack import ProbePack

__all__ = ["DynamicProbeManager", "ProbePack"]
