"""Requests that are kept: as many, and as many bytes, as the limits let."""

import json

from probemon.serving.limits import Limits
from probemon.serving.records import Records


def content(n):
    choice = {"text": "", "finish_reason": None, "tokens": [], "events": [], "summary": None}
    return {"request": f"r{n}", "created": n, "kind": "completion", "prompt": "a", "options": {}, "choices": [choice]}


def test_bytes_of_all_records_stay_under_the_limit_and_what_runs_is_never_forgotten():
    limits = Limits(kept_requests=50, kept_requests_bytes=10_000)
    records = Records(limits)
    running = records.begin("r0", content(0))
    for n in range(1, 40):
        own = content(n)
        record = records.begin(f"r{n}", own)
        for at in range(20):
            records.add(record, own["choices"][0]["tokens"], {"position": at}, 15)
            records.add_text(record, own["choices"][0], "word ")
        records.set(record, own["choices"][0], {"finish_reason": "length"})
        records.end(record)
        kept = [json.loads(records.get(one["request"])) for one in records.list()]
        assert sum(len(json.dumps(one)) for one in kept) <= 10_000 * 1.1  # commas between entries are not counted
        assert kept[0] == own and kept[-1]["request"] == "r0"
    assert records.get("r1") is None and len(records.list()) >= 10
    records.end(running)
    records.begin("new", content(99))
    assert records.get("r0") is None


def test_list_is_the_newest_first_and_shortened():
    records = Records(Limits())
    chat = {**content(1), "kind": "chat", "messages": [{"role": "user", "content": "b" * 500}]}
    records.begin("one", content(0))
    records.end(records.begin("two", chat))
    newest, oldest = records.list()
    assert (newest["request"], newest["running"], newest["beginning"]) == ("two", False, "b" * 200)
    assert (oldest["request"], oldest["running"], oldest["beginning"]) == ("one", True, "a")
