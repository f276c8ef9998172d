"""One browser and one server for all tests of the page; what they need is imported by those alone."""

import pytest


@pytest.fixture(scope="session")
def page_browser(tmp_path_factory):
    from browser import Browser, find

    if find() is None:
        pytest.skip("NO BROWSER: the server's page is not tested. Install chromium, or name one in PROBEMON_CHROMIUM")
    settled = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
    with Browser(tmp_path_factory.mktemp("chromium"), settled=settled, timeout=40) as opened:
        yield opened


@pytest.fixture(scope="session")
def page_server(page_browser, tmp_path_factory):
    from served_page import hostile_server

    server = hostile_server(tmp_path_factory.mktemp("packs") / "hostile")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_other_host_is_asked_and_nothing_is_complained_of(request):
    """Of every test that opens the page."""
    if "page_browser" not in request.fixturenames:
        yield
        return
    from browser import asks_only

    with asks_only(request.getfixturevalue("page_browser"), r"(blob:)?http://127\.0\.0\.1:\d+/.*|data:,"):
        yield
