"""Routing telemetry: records, statistics and alerts of a model's routers."""

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
