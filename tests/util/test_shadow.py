"""Patches of one object by several threads at once."""

import sys
import threading
from argparse import Namespace
from contextlib import ExitStack

import pytest

from probemon.util.shadow import shadow


class Host:
    def answer(self):
        return 0


@pytest.fixture
def hasty():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_patches_by_several_threads_are_all_there_and_all_gone(hasty):
    host, missed = Host(), []

    def patch():
        for _ in range(3000):
            owner, calls = Namespace(open=True), []

            def around(original, calls=calls):
                calls.append(threading.get_ident())  # calls of others pass here, too
                return original()

            try:
                with ExitStack() as stack:
                    stack.callback(setattr, owner, "open", False)
                    shadow(stack, owner, host, "answer", around)
                    if host.answer() != 0 or threading.get_ident() not in calls:
                        missed.append("a patch")
                    owner.open = False
            except KeyError as error:
                missed.append(repr(error))

    threads = [threading.Thread(target=patch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missed == [] and vars(host) == {} and host.answer() == 0
