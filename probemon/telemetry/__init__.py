"""Telemetry: measures routers and runs, which do not know of it.

from probemon.telemetry import RoutingMonitor, RoutingParquet         # routers
from probemon.telemetry.metrics import ProcessMetrics                 # the runs of a process
"""

from probemon.telemetry.alerts import DEFAULT_RULES, Alert, Rule
from probemon.telemetry.monitor import RoutingMonitor
from probemon.telemetry.records import RoutingJsonLines, RoutingParquet, RoutingRecord
from probemon.telemetry.settings import RoutingSettings

__all__ = [
    "DEFAULT_RULES",
    "Alert",
    "RoutingJsonLines",
    "RoutingMonitor",
    "RoutingParquet",
    "RoutingRecord",
    "RoutingSettings",
    "Rule",
]
