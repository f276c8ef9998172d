"""probemon: watch a language model from the inside, token by token."""

from probemon.pack import ProbePack

__all__ = ["ProbePack"]
