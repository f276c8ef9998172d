"""The server keeps as many requests, and as many bytes of them, as the limits allow."""

import json
import tracemalloc

from probemon.ops.server.limits import Limits
from probemon.ops.server.records import Records


def content(n):
    choice = {"text": "", "finish_reason": None, "tokens": [], "events": [], "summary": None}
    return {"request": f"r{n}", "created": n, "kind": "completion", "prompt": "a", "options": {}, "choices": [choice]}


def test_records_stay_under_the_byte_limit_and_running_ones_are_kept():
    limits = Limits(kept_requests=50, kept_requests_bytes=10_000)
    records = Records(limits)
    running = records.begin("r0", content(0))
    for n in range(1, 40):
        own = content(n)
        record = records.begin(f"r{n}", own)
        for at in range(20):
            records.add(record, own["choices"][0]["tokens"], {"position": at}, 15)
            records.add_text(record, own["choices"][0], "text", "word ")
        records.set(record, own["choices"][0], {"finish_reason": "length"})
        records.end(record)
        kept = [json.loads(records.get(one["request"])) for one in records.list()]
        # Of one that runs, commas between entries are not counted.
        assert sum(len(json.dumps(one)) for one in kept) <= 10_000 + 1000
        assert kept[0] == own and kept[-1]["request"] == "r0"
    assert records.get("r1") is None and len(records.list()) >= 10
    records.end(running)
    for n in range(40, 90):
        records.end(records.begin(f"r{n}", content(n)))
    assert records.get("r0") is None and len(records.list()) <= 50


def test_ended_records_use_the_memory_that_the_limit_counts():
    records, token = Records(Limits()), {"position": 1, "token": "word", "concepts": [{"concept": "a", "score": 0.5}]}
    tracemalloc.start()
    try:
        for n in range(5):
            own = content(n)
            record = records.begin(f"r{n}", own)
            for at in range(1000):
                records.add(record, own["choices"][0]["tokens"], {**token, "position": at}, 90)
            records.end(record)
            del own, record
        n_bytes = sum(len(records.get(f"r{n}")) for n in range(5))
        assert tracemalloc.get_traced_memory()[0] < 1.1 * n_bytes + 50_000
    finally:
        tracemalloc.stop()


def test_list_is_newest_first_and_shortened():
    records = Records(Limits())
    chat = {**content(1), "kind": "chat", "messages": [{"role": "user", "content": "b" * 500}]}
    records.begin("one", content(0))
    records.end(records.begin("two", chat))
    newest, oldest = records.list()
    assert (newest["request"], newest["running"], newest["beginning"]) == ("two", False, "b" * 200)
    assert (oldest["request"], oldest["running"], oldest["beginning"]) == ("one", True, "a")
