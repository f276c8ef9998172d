"""A real Prometheus that scrapes some ports, for tests and scripts."""

import json
import math
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request


class Prometheus:
    """A server of its own; `ask(query)` waits for a number. `targets`: addresses by job. A scrape that is longer than
    `every` is lost.
    """

    def __init__(self, folder, targets, every="1s"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        jobs = [
            {"job_name": job, "scrape_interval": every, "static_configs": [{"targets": addresses}]}
            for job, addresses in targets.items()
        ]
        (folder / "prometheus.json").write_text(json.dumps({"scrape_configs": jobs}))
        self._log = (folder / "log").open("w")
        self._command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.json'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def __enter__(self):
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        return self

    def __exit__(self, *error):
        self._process.kill()  # its data is of no use any more
        self._process.wait(timeout=30)
        self._log.close()

    def ask(self, query, seconds=60):
        """The first number that the query has."""
        return self.vector(query, seconds)[0][1]

    def vector(self, query, seconds=60):
        """Every (labels, number) of a query, once it has finite ones; an error of the query is raised at once."""
        end, found = time.monotonic() + seconds, []
        while time.monotonic() < end:
            try:
                found = self.api_query(query)
            except urllib.error.HTTPError as error:
                if error.code != 503:  # it is not ready yet
                    raise AssertionError(f"{query}: {error.read().decode()}") from error
            except (urllib.error.URLError, ConnectionError):  # not up yet
                pass
            values = [(one["metric"], float(one["value"][1])) for one in found]
            if any(math.isfinite(value) for _, value in values):
                return [(labels, value) for labels, value in values if math.isfinite(value)]
            time.sleep(0.1)
        raise AssertionError(f"no number for {query}: {found}")

    def is_empty(self, query, seconds=20):
        """Whether a query has nothing within that time: a scrape may be late where other work takes the machine."""
        end = time.monotonic() + seconds
        while found := self.api_query(query):
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return not found

    def api_query(self, query):
        """What the query has now."""
        return self.api(f"query?{urllib.parse.urlencode({'query': query})}")["result"]

    def api(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]
