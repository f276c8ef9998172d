"""Is an adapter worth it: paired statistics, frontiers of cost and quality, and the gates that it has to pass.

Its statistics are SciPy's: `pip install scipy`.
"""
