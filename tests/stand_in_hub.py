"""A Hugging Face hub on this machine: repositories with commits, served as huggingface_hub asks for them.

Served are the description of a commit, its tree, paths in it and its files. Files that end in ``.safetensors`` are
described as large files (SHA-256), all others as git objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from local_server import LocalServer

Commit = dict[str, bytes]
"""Path in the repository -> contents."""


def _entry(path: str, data: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry = {"type": "file", "path": path, "size": len(data), "oid": git}
    if path.endswith(".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def _folders(commit: Commit) -> set[str]:
    parents = {path.rpartition("/")[0] for path in commit} - {""}
    return parents | {p.rpartition("/")[0] for p in parents} - {""}


class Hub:
    """``repositories["org/name"]``: the commits of a repository, the newest last; "main" is the newest one."""

    def __init__(self) -> None:
        self.repositories: dict[str, list[Commit]] = {}
        self.token = ""
        """If not empty, requests without it are refused as those to a gated repository."""
        self.refused: set[str] = set()
        """Paths of files that are described in trees and refused with status 403 when they are asked for."""
        self.fetched: list[str] = []
        """Paths of the files that were sent, in order."""
        self.endpoint = ""

    def commits(self, repository: str) -> dict[str, Commit]:
        """Commit id -> files, the newest last."""
        commits = enumerate(self.repositories[repository])
        return {hashlib.sha1(f"{repository} {i}".encode()).hexdigest(): files for i, files in commits}


@contextmanager
def serving() -> Iterator[Hub]:
    """An empty hub that answers at ``endpoint`` in a ``with`` block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def answer_json(self, value: Any) -> None:
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def do_POST(self) -> None:
            self.do_GET()

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            parts = unquote(url.path).strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            repository, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
            if repository not in hub.repositories:
                return self.answer(404, X_Error_Code="RepoNotFound")
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.answer(403, X_Error_Code="GatedRepo")
            what, revision, path = (rest or ["revision"])[0], (rest[1:2] or ["main"])[0], "/".join(rest[2:])
            commits = hub.commits(repository)
            commit_id = [*commits][-1] if revision == "main" else revision
            if commit_id not in commits:
                return self.answer(404, X_Error_Code="RevisionNotFound")
            files = commits[commit_id]
            if what == "revision":
                siblings = [{"rfilename": p} for p in files]
                return self.answer_json({"id": repository, "sha": commit_id, "siblings": siblings})
            if what == "tree":
                deep = parse_qs(url.query).get("recursive", ["False"])[0].lower() == "true"
                prefix = path + "/" if path else ""
                below = [p for p in (*files, *_folders(files)) if p.startswith(prefix)]
                listed = [p for p in below if deep or "/" not in p[len(prefix) :]]
                return self.answer_json([self.described(p, files) for p in sorted(listed)])
            if what == "paths-info":
                asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
                return self.answer_json([self.described(p, files) for p in asked if p in files or p in _folders(files)])
            return self.send_contents(path, files, commit_id)

        def described(self, path: str, files: Commit) -> dict[str, Any]:
            folder = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            return _entry(path, files[path]) if path in files else folder

        def send_contents(self, path: str, files: Commit, commit_id: str) -> None:
            if path not in files:
                return self.answer(404, X_Error_Code="EntryNotFound")
            if path in hub.refused:
                return self.answer(403)
            if self.command == "GET":
                hub.fetched.append(path)
            entry = _entry(path, files[path])
            etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
            return self.answer(200, files[path], ETag=f'"{etag}"', X_Repo_Commit=commit_id)

    server = LocalServer(Handler)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    hub.endpoint = server.url
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
