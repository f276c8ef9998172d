"""started(sink, max_batches=4): a delivery that has begun, without a run."""

from typing import Any

from probemon.monitor.delivery import Delivery


def started(sink: Any, concepts: Any = ("c0",), **settings: Any) -> Delivery:
    """Return it."""
    delivery = Delivery(sink, **settings)
    delivery.start(list(concepts))
    return delivery
