"""Routing telemetry: what the routers of a model decide, which do not know of it.

from probemon.adapters.routing import Routing, RoutingMonitor, RoutingParquet
"""

from probemon.adapters.routing.alerts import DEFAULT_RULES, Alert, AlertRule
from probemon.adapters.routing.monitor import RoutingMonitor
from probemon.adapters.routing.recorder import Routing
from probemon.adapters.routing.records import RoutingJsonLines, RoutingParquet, RoutingRecord
from probemon.adapters.routing.settings import RoutingSettings

__all__ = [
    "DEFAULT_RULES",
    "Alert",
    "AlertRule",
    "Routing",
    "RoutingJsonLines",
    "RoutingMonitor",
    "RoutingParquet",
    "RoutingRecord",
    "RoutingSettings",
]
