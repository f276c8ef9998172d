"""Adapters: models that route and models with memory. The core does not import them."""
