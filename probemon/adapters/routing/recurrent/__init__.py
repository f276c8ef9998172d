"""Telemetry of recurrent layers."""
