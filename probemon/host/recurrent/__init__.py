"""Recurrent layers of a model: steps, states, and the recurrence."""
