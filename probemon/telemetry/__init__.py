"""Telemetry: it asks what it measures; what is measured does not know of it."""
