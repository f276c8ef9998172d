"""The event ring counts what each subscriber lost, and the count never falls."""

import asyncio

from probemon.ops.server.limits import Limits
from probemon.ops.server.subscribers import EventRing


def test_lost_events_stay_counted_after_the_subscriber_leaves():
    async def counts():
        ring = EventRing(Limits(kept_events=10))
        deaf, reader = ring.subscribe(None, dict), ring.subscribe(None, dict)
        seen = []
        for n in range(100):
            ring.publish("token", {"n": n})
            if n % 25 == 24:
                ring.read(reader)
            seen.append(ring.n_lost + ring.n_behind())
        ring.leave(deaf)
        seen.append(ring.n_lost + ring.n_behind())
        for n in range(50):
            ring.publish("token", {"n": n})
        ring.read(reader)
        ring.leave(reader)
        return [*seen, ring.n_lost + ring.n_behind()]

    seen = asyncio.run(counts())
    assert seen == sorted(seen)
    assert seen[99] == seen[100] == 90 + 4 * 15 and seen[-1] == 90 + 4 * 15 + 40
