"""Routed low-rank adapters (BEM), causal and bounded, on an unchanged host model.

from probemon.bem import BemConfig, attach_bem

with attach_bem(model, BemConfig(sites=("o", "down"))) as bem:
    model.generate(**inputs)
"""

from probemon.bem.attached import Bem, attach_bem
from probemon.bem.config import LEVELS, BemConfig
from probemon.bem.controller import Codes, Controller
from probemon.bem.fallback import CircuitBreaker, FallbackPolicy, Fallbacks
from probemon.bem.int8 import quantize
from probemon.bem.memory import memory_pressure, with_batch_backoff
from probemon.bem.state import ControllerState

__all__ = [
    "LEVELS", "Bem", "BemConfig", "CircuitBreaker", "Codes", "Controller", "ControllerState", "FallbackPolicy",
    "Fallbacks", "attach_bem", "memory_pressure",
    "quantize", "with_batch_backoff",
]  # fmt: skip
