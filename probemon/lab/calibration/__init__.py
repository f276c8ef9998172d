"""Thresholds from documents: alerts at a false-positive rate, expansion at a recall."""
