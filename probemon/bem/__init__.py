"""Routed low-rank adapters (BEM), causal and bounded, on an unchanged host model.

    from probemon.bem import BemConfig, attach_bem

    with attach_bem(model, BemConfig(sites=("o", "down"))) as bem:
        model.generate(**inputs)
"""

from probemon.bem.attached import Bem, attach_bem
from probemon.bem.config import LEVELS, BemConfig
from probemon.bem.controller import Codes, Controller
from probemon.bem.state import ControllerState

__all__ = ["LEVELS", "Bem", "BemConfig", "Codes", "Controller", "ControllerState", "attach_bem"]
