"""A stand-in for the hub on this machine: what huggingface_hub's client asks over HTTP, answered from bytes in a
folder.

    with HubStandIn(tmp_path / "hub") as hub:
        pack.push_to_hub("org/name", token=hub.token, endpoint=hub.url)
        hub.requests                                  # ["POST /api/repos/create", ...]
        hub.replace("org/name", "probes.safetensors", changed)      # other bytes than were pushed, under the same names

It knows repositories, branches, tags, pull requests, commits of small files in ndjson and of large ones by LFS (batch,
PUT, verify), trees, sizes, ETags, X-Repo-Commit, redirects to storage, ranges, tokens, private and gated repositories,
and the error codes of the hub. Hashes are git's and sha256.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

NAME = r"(?P<repo>[\w.-]+/[\w.-]+)"
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


class Refused(Exception):
    """An answer other than success: status, the hub's error code, and a message."""

    def __init__(self, status, code="", message=""):
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


@dataclass
class Blob:
    """A file of a commit: `etag` (git's hash, or sha256 for a large one), where its bytes lie, and the size that the
    hub states.
    """

    etag: str
    sha256: str
    size: int
    large: bool


@dataclass
class Repository:
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branches, tags and pull requests

    def commit(self, ref, files, message):
        text = json.dumps([self.refs.get(ref), message, sorted((path, blob.etag) for path, blob in files.items())])
        self.refs[ref] = hashlib.sha1(text.encode()).hexdigest()
        self.commits[self.refs[ref]] = files
        return self.refs[ref]

    def resolve(self, revision):
        commit = self.refs.get(revision, revision)
        if commit not in self.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit


class HubStandIn:
    """A hub at `url`. `token` is the one that may write and read what is private. `requests`: what was asked, with
    sizes and ranges left out.
    """

    token = "hf_of_the_stand_in"

    def __init__(self, folder):
        self.folder = Path(folder)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.break_once = 0  # bytes after which the next large download breaks off, once
        self.asked = lambda request: None  # called with each request before it is answered
        (self.folder / "objects").mkdir(parents=True)
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def answer(self):
                hub.requests.append(f"{self.command} {urlsplit(self.path).path}")
                hub.asked(hub.requests[-1])
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = b"".join(self.chunks())
                try:
                    status, headers, data = hub.answer(self.command, self.path, body, self.headers)
                except Refused as refused:
                    told = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
                    status, headers, data = (
                        refused.status,
                        {key: value for key, value in told.items() if value},
                        json.dumps({"error": refused.message}).encode(),
                    )
                broken = hub.break_once if status == 200 and self.command == "GET" and "/storage/" in self.path else 0
                self.send_response(status)
                # A connection for each request, so that none outlives the hub.
                for key, value in {"Content-Length": str(len(data)), "Connection": "close", **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if broken:
                    hub.break_once = 0
                if self.command != "HEAD":
                    self.wfile.write(data[:broken] if broken else data)

            def chunks(self):
                while size := int(self.rfile.readline(), 16):
                    yield self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()

            do_GET = do_HEAD = do_POST = do_PUT = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.storage = (  # another host to the client, as the hub's storage is
            f"http://localhost:{self.server.server_port}/storage"
        )
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def stop(self):
        """Nothing is answered from now on: connections are refused."""
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()

    # -- what is stored --------------------------------------------------------------------------

    def create(self, repo, *, private=False, gated=False):
        made = self.repositories[repo] = Repository(private, gated)
        made.commit("main", {".gitattributes": self.keep(ATTRIBUTES, large=False)}, "initial commit")
        return made

    def put(self, repo, files):
        """Commit bytes by path, past all that the client would do. The new commit's hash."""
        repository = self.repositories.get(repo) or self.create(repo)
        kept = {path: self.keep(data, large=path.endswith(".safetensors")) for path, data in files.items()}
        return repository.commit("main", {**repository.commits[repository.refs["main"]], **kept}, "put")

    def replace(self, repo, path, data, *, stated=None):
        """From now on the newest commit's file is `data`, under its old hash, and under its old size unless that is
        `stated` anew.
        """
        repository = self.repositories[repo]
        blob = repository.commits[repository.refs["main"]][path]
        (self.folder / "objects" / blob.sha256).write_bytes(data)
        blob.size = blob.size if stated is None else stated

    def read(self, repo, path, revision="main"):
        repository = self.repositories[repo]
        return (self.folder / "objects" / repository.commits[repository.resolve(revision)][path].sha256).read_bytes()

    def keep(self, data, *, large):
        sha256 = hashlib.sha256(data).hexdigest()
        (self.folder / "objects" / sha256).write_bytes(data)
        return Blob(
            sha256 if large else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), sha256, len(data), large
        )

    # -- what is answered ------------------------------------------------------------------------

    def answer(self, method, target, body, headers):
        """Status, headers and body for one request. Raises `Refused`."""
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        given = headers.get("Authorization")
        if given is not None and parts.path.startswith("/storage/"):
            raise Refused(400, message="a token was sent to the storage")
        if given is not None and given != f"Bearer {self.token}":
            raise Refused(401, message="Invalid credentials in Authorization header")
        for wanted, pattern, write, act in ROUTES:
            found = re.fullmatch(pattern, parts.path)
            if found and method in wanted.split("|"):
                if write and given is None:
                    raise Refused(401, message="Invalid username or password.")
                named = {key: unquote(value) for key, value in found.groupdict().items()}
                if "repo" in named:
                    repository = self.repositories.get(named["repo"])
                    if repository is None or (repository.private and given is None):
                        raise Refused(404 if given else 401, "RepoNotFound", "Repository not found")
                    named = {**named, "repository": repository}
                out = act(self, body=body, query=query, headers=headers, **named)
                return (
                    out
                    if isinstance(out, tuple)
                    else (200, {"Content-Type": "application/json"}, json.dumps(out).encode())
                )
        raise Refused(404, message=f"the stand-in does not know {method} {parts.path}")

    def create_repo(self, *, body, **_):
        asked = json.loads(body)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if name in self.repositories:
            return (
                409,
                {},
                json.dumps({"error": "You already created this model repo", "url": f"{self.url}/{name}"}).encode(),
            )
        self.create(name, private=bool(asked.get("private")) or asked.get("visibility") == "private")
        return {"url": f"{self.url}/{name}", "name": name}

    def validate(self, *, body, **_):
        found = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
        if not found:
            return {"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]}
        return {"errors": [], "warnings": []}

    def branch(self, *, repository, rev, **_):
        if rev in repository.refs:
            raise Refused(409, message=f"Reference already exists: {rev}")
        repository.refs[rev] = repository.refs["main"]
        return {}

    def tag(self, *, repository, rev, body, **_):
        repository.refs[json.loads(body)["tag"]] = repository.resolve(rev)
        return {}

    def preupload(self, *, repository, rev, body, **_):
        before = repository.commits[repository.resolve(rev)]
        return {
            "files": [
                {
                    "path": path,
                    "uploadMode": "lfs" if path.endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": before[path].etag if path in before else None,
                }
                for path in (file["path"] for file in json.loads(body)["files"])
            ]
        }

    def batch(self, *, repo, body, **_):
        objects = []
        for one in json.loads(body)["objects"]:
            there = (self.folder / "objects" / one["oid"]).is_file()
            actions = {
                "upload": {"href": f"{self.storage}/{one['oid']}"},
                "verify": {"href": f"{self.url}/{repo}.git/info/lfs/verify"},
            }
            objects.append({"oid": one["oid"], "size": one["size"], **({} if there else {"actions": actions})})
        return (
            200,
            {"Content-Type": "application/vnd.git-lfs+json"},
            json.dumps({"transfer": "basic", "objects": objects}).encode(),
        )

    def upload(self, *, oid, body, **_):
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, message="the bytes are not those of this hash")
        (self.folder / "objects" / oid).write_bytes(body)
        return 200, {"ETag": f'"{oid}"'}, b""

    def verify(self, *, body, **_):
        asked = json.loads(body)
        if (self.folder / "objects" / asked["oid"]).stat().st_size != asked["size"]:
            raise Refused(400, message="size differs")
        return {"message": "success"}

    def commit(self, *, repo, repository, rev, body, query, **_):
        header, *operations = [json.loads(line) for line in body.splitlines()]
        files = dict(repository.commits[repository.resolve(rev)])
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = self.keep(base64.b64decode(value["content"]), large=False)
            elif operation["key"] == "lfsFile" and (self.folder / "objects" / value["oid"]).is_file():
                files[value["path"]] = Blob(value["oid"], value["oid"], value["size"], True)
            else:
                raise Refused(400, message=f"{operation['key']} {value['path']}: not uploaded, or not known")
        number = 1 + sum(ref.startswith("refs/pr/") for ref in repository.refs)
        asked = "create_pr" in query
        ref = f"refs/pr/{number}" if asked else rev
        made = repository.commit(ref, files, header["value"]["summary"])
        url = f"{self.url}/{repo}"
        return {
            "success": True,
            "commitOid": made,
            "commitUrl": f"{url}/commit/{made}",
            "pullRequestUrl": f"{url}/discussions/{number}" if asked else None,
        }

    def info(self, *, repo, repository, rev="main", **_):
        commit = repository.resolve(rev)
        names = [{"rfilename": path} for path in repository.commits[commit]]
        return {
            "_id": repo,
            "id": repo,
            "modelId": repo,
            "sha": commit,
            "private": repository.private,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": names,
        }

    def described(self, path, blob):
        large = {"lfs": {"oid": blob.sha256, "size": blob.size, "pointerSize": 134}} if blob.large else {}
        return {"type": "file", "path": path, "size": blob.size, "oid": blob.etag[:40], **large}

    def tree(self, *, repository, rev, **_):
        return [self.described(path, blob) for path, blob in repository.commits[repository.resolve(rev)].items()]

    def paths(self, *, repository, rev, body, **_):
        wanted = parse_qs(body.decode())["paths"]
        return [
            self.described(path, blob)
            for path, blob in repository.commits[repository.resolve(rev)].items()
            if path in wanted
        ]

    def file(self, *, repository, rev, path, headers, **_):
        commit = repository.resolve(rev)
        if repository.gated:
            raise Refused(403, "GatedRepo", "Access to this model is restricted")
        if path not in repository.commits[commit]:
            raise Refused(404, "EntryNotFound", "Entry not found")
        blob = repository.commits[commit][path]
        about = {"X-Repo-Commit": commit, "ETag": f'"{blob.etag}"'}
        if blob.large:
            linked = {
                "X-Linked-Etag": f'"{blob.etag}"',
                "X-Linked-Size": str(blob.size),
                "Location": f"{self.storage}/{blob.sha256}",
            }
            return 302, {**about, **linked}, b""
        data = (self.folder / "objects" / blob.sha256).read_bytes()
        return 200, {**about, "Content-Length": str(len(data))}, data

    def stored(self, *, oid, headers, **_):
        data = (self.folder / "objects" / oid).read_bytes()
        first = re.fullmatch(r"bytes=(\d+)-", headers.get("Range") or "")
        if first is None:
            return 200, {}, data
        return 206, {"Content-Range": f"bytes {first[1]}-{len(data) - 1}/{len(data)}"}, data[int(first[1]) :]


# Methods, path, whether a token is needed, and who answers.
ROUTES = [
    ("POST", "/api/repos/create", True, HubStandIn.create_repo),
    ("POST", "/api/validate-yaml", False, HubStandIn.validate),
    ("POST", f"/api/models/{NAME}/branch/(?P<rev>[^/]+)", True, HubStandIn.branch),
    ("POST", f"/api/models/{NAME}/tag/(?P<rev>[^/]+)", True, HubStandIn.tag),
    ("POST", f"/api/models/{NAME}/preupload/(?P<rev>[^/]+)", True, HubStandIn.preupload),
    ("POST", f"/api/models/{NAME}/commit/(?P<rev>[^/]+)", True, HubStandIn.commit),
    ("POST", f"/api/models/{NAME}/paths-info/(?P<rev>[^/]+)", False, HubStandIn.paths),
    ("GET", f"/api/models/{NAME}", False, HubStandIn.info),
    ("GET", f"/api/models/{NAME}/revision/(?P<rev>[^/]+)", False, HubStandIn.info),
    ("GET", f"/api/models/{NAME}/tree/(?P<rev>[^/]+)", False, HubStandIn.tree),
    ("POST", r"/(?P<repo>[\w.-]+/[\w.-]+?)\.git/info/lfs/objects/batch", True, HubStandIn.batch),
    ("POST", r"/(?P<repo>[\w.-]+/[\w.-]+?)\.git/info/lfs/verify", True, HubStandIn.verify),
    ("PUT", "/storage/(?P<oid>[0-9a-f]+)", False, HubStandIn.upload),
    ("GET|HEAD", "/storage/(?P<oid>[0-9a-f]+)", False, HubStandIn.stored),
    ("GET|HEAD", f"/{NAME}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", False, HubStandIn.file),
]
