"""What hosts with a recurrent state keep: step sizes, decays, and how far back their states reach."""

from probemon.adapters.routing.recurrent.monitor import StateMonitor

__all__ = ["StateMonitor"]
