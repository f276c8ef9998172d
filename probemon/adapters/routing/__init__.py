"""Telemetry: measures routers and runs, which do not know of it.

from probemon.adapters.routing import RoutingMonitor, RoutingParquet         # routers
from probemon.ops.telemetry.metrics import ProcessMetrics                 # the runs of a process
"""

from probemon.adapters.routing.alerts import DEFAULT_RULES, Alert, Rule
from probemon.adapters.routing.monitor import RoutingMonitor
from probemon.adapters.routing.records import RoutingJsonLines, RoutingParquet, RoutingRecord
from probemon.adapters.routing.settings import RoutingSettings

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
