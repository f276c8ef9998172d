"""Routed low-rank adapters (BEM) on an unchanged model.

    from probemon.adapters.bem import BemConfig, attach_bem

    with attach_bem(model, BemConfig(sites=("o", "down"))) as bem:
        model.generate(**inputs)

They are causal and bounded.
"""

from probemon.adapters.bem.attached import Bem, attach_bem
from probemon.adapters.bem.config import LEVELS, BemConfig
from probemon.adapters.bem.controller import Codes, Controller
from probemon.adapters.bem.fallback import FallbackPolicy, Fallbacks
from probemon.adapters.bem.int8 import quantize
from probemon.adapters.bem.memory import memory_pressure, with_batch_backoff
from probemon.adapters.bem.state import ControllerState

__all__ = [
    "LEVELS", "Bem", "BemConfig", "Codes", "Controller", "ControllerState", "FallbackPolicy",
    "Fallbacks", "attach_bem", "memory_pressure",
    "quantize", "with_batch_backoff",
]  # fmt: skip
