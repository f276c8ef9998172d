"""One server for all tests that ask one; what it needs is imported by those alone."""

import pytest


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    from running_server import tiny_served

    return tiny_served(tmp_path_factory.mktemp("packs") / "served")


@pytest.fixture(scope="session")
def server(served):
    from running_server import Running

    running = Running(served)
    yield running
    running.close()
