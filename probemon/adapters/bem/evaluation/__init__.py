"""Is an adapter worth it: budgets, held-out losses, latency and memory. Intervals over documents need SciPy."""
