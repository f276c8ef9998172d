"""Recipes: how a host is run well, each with its check. `scripts/host_recipes.py` runs them all."""

from __future__ import annotations

from recipe_rows import inference, training, weights
from recipe_rows.rows import RECIPES

__all__ = ["RECIPES", "inference", "training", "weights"]
