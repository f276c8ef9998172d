"""Telemetry of runs: metrics for Prometheus."""
