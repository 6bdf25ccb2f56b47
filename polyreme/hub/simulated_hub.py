"""A stand-in of a Hugging Face hub's HTTP interface, for tests without a network.

Contract: `huggingface_hub` and `datasets`, pointed at `url` by HF_ENDPOINT, find repositories, revisions, file lists and files as
at the hub itself: `api/{models,datasets}/NAME/{revision,tree,paths-info}` and `[datasets/]NAME/resolve/REVISION/FILE`, with the
hub's headers and error codes. It has no search, no upload, no access control and no Xet storage.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote

Files = Mapping[str, bytes]

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class SimulatedHub:
    """Serves repositories on loopback from `with` to its end.

    Attributes:
        url: the address for HF_ENDPOINT.
        requests: method and path of every request.
    """

    def __init__(self) -> None:
        self._commits: dict[tuple[str, str], dict[str, Files]] = {}
        self.requests: list[str] = []
        self.url = ""

    def commit(self, kind: str, name: str, files: Files) -> str:
        """Adds a commit to a repository of the kind `models` or `datasets`, as the newest one of `main`. Returns its id."""
        content = b"".join(path.encode() + b"\0" + files[path] for path in sorted(files))
        commit = hashlib.sha1(content).hexdigest()
        self._commits.setdefault((kind, name), {})[commit] = dict(files)
        return commit

    def find(self, kind: str, name: str, revision: str | None) -> "tuple[str, Files] | str":
        """The commit and files of a revision; else the hub's error code."""
        commits = self._commits.get((kind, name))
        if commits is None:
            return "RepoNotFound"
        commit = list(commits)[-1] if revision in (None, "main") else str(revision)
        return (commit, commits[commit]) if commit in commits else "RevisionNotFound"

    def __enter__(self) -> "SimulatedHub":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: SimulatedHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, body: bytes = b"") -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append(f"{self.command} {path}")
        if api := _API.fullmatch(path):
            kind, name, call, revision, below = api.groups()
            found = self.hub.find(kind, name, revision)
            if isinstance(found, str):
                return self._error(found)
            commit, files = found
            if call in ("tree", "paths-info"):
                return self._json(
                    _tree(files, below or "", "recursive" in self.path, _paths(body) if call == "paths-info" else None)
                )
            siblings = [{"rfilename": file} for file in sorted(files)]
            return self._json({"id": name, "sha": commit, "private": False, "gated": False, "tags": [], "siblings": siblings})
        if file := _FILE.fullmatch(path):
            kind, name, revision, wanted = file.groups()
            found = self.hub.find("datasets" if kind else "models", name, revision)
            if isinstance(found, str):
                return self._error(found)
            commit, files = found
            if wanted not in files:
                return self._error("EntryNotFound", commit)
            return self._send(200, files[wanted], {"ETag": f'"{_digest(files[wanted])}"', "X-Repo-Commit": commit})
        self._error("EntryNotFound")

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, code: str, commit: str = "") -> None:
        self._send(404, b"", {"X-Error-Code": code, "X-Error-Message": code} | ({"X-Repo-Commit": commit} if commit else {}))

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        first, whole = 0, len(content)
        if (wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) and status == 200:
            first, last = int(wanted[1]), min(int(wanted[2] or whole - 1), whole - 1)
            content, status = content[first : last + 1], 206
            headers = {**headers, "Content-Range": f"bytes {first}-{last}/{whole}"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _paths(body: bytes) -> list[str]:
    """The paths that a form or a JSON object asks for."""
    if body.startswith(b"{"):
        paths = json.loads(body)["paths"]
        return [paths] if isinstance(paths, str) else list(paths)
    return parse_qs(body.decode())["paths"]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _tree(files: Files, below: str, recursive: bool, only: list[str] | None) -> list[dict[str, object]]:
    """The files and folders of a repository as the hub lists them: those of a folder, or `only` these paths."""
    folders = {path.rsplit("/", depth)[0] for path in files for depth in range(1, path.count("/") + 1)}
    entries = [
        *({"type": "directory", "path": path, "size": 0, "oid": _digest(path.encode())} for path in folders),
        *({"type": "file", "path": path, "size": len(content), "oid": _digest(content)} for path, content in files.items()),
    ]
    prefix = f"{below.rstrip('/')}/" if below else ""
    return sorted(
        (
            entry
            for entry in entries
            if (path := str(entry["path"])) in (only or ())
            or (only is None and path.startswith(prefix) and (recursive or "/" not in path.removeprefix(prefix)))
        ),
        key=lambda entry: str(entry["path"]),
    )
