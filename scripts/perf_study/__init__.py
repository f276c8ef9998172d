"""Parts of `scripts/perf_track.py`: the study on the demo model, and the report."""
