"""Telemetry of recurrent layers."""

from probemon.adapters.routing.recurrent.monitor import StateMonitor

__all__ = ["StateMonitor"]
