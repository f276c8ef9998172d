"""Adapters: models that route, and models that remember. The core does not import it."""
