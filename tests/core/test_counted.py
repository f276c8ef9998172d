"""A count and its noun agree."""

import pytest

from probemon.util.counted import counted


@pytest.mark.parametrize(("n", "text"), [(0, "0 probes"), (1, "1 probe"), (2, "2 probes"), (1204, "1204 probes")])
def test_plural_is_used_for_all_counts_but_one(n, text):
    assert counted(n, "probe") == text
