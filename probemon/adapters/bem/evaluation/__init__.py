"""Budgets, held-out losses, latency and memory of adapters. Intervals over documents need SciPy."""
