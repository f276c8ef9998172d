"""A real headless Chromium, driven over its DevTools pipe: no package and no port.

    with Browser(tmp_path) as browser:
        page = browser.open(path, width=1280)       # a file, or an address
        page("document.title")                      # a value of the page; raises what the page raises
        page.click("nav a"); page.press("Enter"); page.picture("page.png")
        browser.requests, browser.complaints  # every address asked for, every line of the console and every exception

`find()` is the program's path: PROBEMON_CHROMIUM, or the first of the usual names; None where there is none.
"""

import base64
import json
import os
import re
import select
import shutil
import subprocess
import time
from contextlib import contextmanager

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-extensions", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio",
)  # fmt: skip
_KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, None),
    "ArrowLeft": (37, None),
    "ArrowUp": (38, None),
    "ArrowRight": (39, None),
    "ArrowDown": (40, None),
    "Tab": (9, None),
    "Home": (36, None),
    "End": (35, None),
}


def find():
    given = os.environ.get("PROBEMON_CHROMIUM")
    return given or next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def asks_only(browser, pattern):
    """Hold what is opened in the block to addresses of a pattern, and to a console without a line."""
    browser.requests.clear()
    browser.complaints.clear()
    yield
    browser.close_pages()
    strange = [url for url in browser.requests if not re.fullmatch(pattern, url)]
    assert browser.requests and (strange, browser.complaints) == ([], [])


class Browser:
    """`settled`: what is true of a page (an expression) once it has answered to a click or a key."""

    def __init__(self, folder, settled="true", timeout=60):
        self.folder, self.settled, self.timeout = folder, settled, timeout
        self.requests, self.complaints, self._n, self._rest, self._pages = [], [], 0, b"", []

    def __enter__(self):
        there, self._write = os.pipe()
        self._read, back = os.pipe()
        # The browser reads from descriptor 3 and writes to 4, which a shell can lay there.
        command = [
            f'exec "$0" "$@" 3<&{there} 4>&{back}',
            find(),
            *_FLAGS,
            f"--user-data-dir={self.folder / 'browser'}",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", *command],
            pass_fds=(there, back),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        return self

    def __exit__(self, *_):
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method, session=None, /, **parameters):
        """Send a command and return its result; events that come before it are kept."""
        self._n += 1
        message = {"id": self._n, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._n:
            self._event(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self):
        end = time.monotonic() + self.timeout
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0, end - time.monotonic()))[0]:
                raise OSError(f"no answer from the browser in {self.timeout} s")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise OSError("the browser has gone")
            self._rest += more
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def _event(self, message):
        found = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(str([a.get("value", a.get("description")) for a in found["args"]]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(
                found["exceptionDetails"].get("exception", {}).get("description", found["exceptionDetails"]["text"])
            )
        elif message.get("method") == "Log.entryAdded":
            self.complaints.append(found["entry"]["text"])

    def close_pages(self):
        while self._pages:
            self.call("Target.closeTarget", targetId=self._pages.pop())

    def open(self, path, place="", *, width=1280, height=900, dark=False, window=False):
        """A new page on a file or at an address, loaded and drawn; in a window of its own it stays in sight."""
        target = self.call("Target.createTarget", url="about:blank", newWindow=window)["targetId"]
        self._pages.append(target)
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        page.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        address = path if isinstance(path, str) else path.absolute().as_uri()
        page.call("Page.navigate", url=f"{address}{place}")
        page.until("document.readyState === 'complete'")
        return page


class Page:
    def __init__(self, browser, session):
        self.browser, self._session = browser, session

    def call(self, method, **parameters):
        return self.browser.call(method, self._session, **parameters)

    def __call__(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "the page raised"))
        return answer["result"].get("value")

    def until(self, expression):
        end = time.monotonic() + self.browser.timeout
        while not self(expression):
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.01)

    def go(self, place):
        """To a place of the page, as its address says it; drawn when this returns."""
        self(f"location.hash = {json.dumps(place)}")
        self.until(self.browser.settled)

    def at(self, node):
        """The middle of an element (an expression), scrolled into view."""
        return self(
            f"(() => {{ const n = {node}; n.scrollIntoView({{ block: 'center' }}); const r = n.getClientRects()[0];"
            " return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )

    def point(self, node):
        x, y = self.at(node)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, node):
        x, y = self.point(node)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.until(self.browser.settled)

    def press(self, key):
        code, text = _KEYS.get(key) or (ord(key), key)
        more = {"windowsVirtualKeyCode": code, "key": key, "code": key}
        self.call("Input.dispatchKeyEvent", type="keyDown", **more, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)
        self.until(self.browser.settled)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def picture(self, path):
        """A PNG of the window."""
        with open(path, "wb") as stream:
            stream.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
