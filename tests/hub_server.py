"""A Hugging Face hub on this host for tests: serves folders as repositories, and counts what it was asked.

with Hub({"models/org/name": folder, "datasets/org/name": folder}) as hub:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": …}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The parts of the hub's interface that huggingface_hub and datasets use to fetch a repository."""

    def __init__(self, repositories: Mapping[str, Path]) -> None:
        self.repositories = repositories
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, recursive: bool) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers for a path."""
        if path == "/":
            return 200, b"", {}
        for name, folder in self.repositories.items():
            files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
            if path in (f"/api/{name}", f"/api/{name}/revision/main", f"/api/{name}/revision/{COMMIT}"):
                siblings = [{"rfilename": file} for file in files]
                about = {"id": name.partition("/")[2], "sha": COMMIT, "siblings": siblings, "_id": "1", "tags": []}
                return 200, json.dumps({**about, "private": False, "downloads": 0}).encode(), {}
            if path.startswith(tree := f"/api/{name}/tree/{COMMIT}"):
                return 200, json.dumps(listing(files, path[len(tree) :].strip("/"), recursive)).encode(), {}
            resolve = f"/{name.removeprefix('models/')}/resolve/"
            if path.startswith(resolve) and (file := path[len(resolve) :].partition("/")[2]) in files:
                body = files[file].read_bytes()
                return 200, body, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return 404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}

    def __enter__(self) -> Hub:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def listing(files: Mapping[str, Path], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """What is in a folder of a repository."""
    items: dict[str, dict[str, Any]] = {}
    for name, file in files.items():
        if folder and not name.startswith(f"{folder}/"):
            continue
        below = name[len(folder) :].lstrip("/")
        if "/" in below and not recursive:
            path = name[: len(name) - len(below)] + below.split("/")[0]
            items[path] = {"type": "directory", "path": path, "oid": "1", "size": 0}
        else:
            oid = hashlib.sha1(file.read_bytes()).hexdigest()
            items[name] = {"type": "file", "path": name, "oid": oid, "size": file.stat().st_size}
    return list(items.values())


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        code, body, headers = self.hub.answer(unquote(urlparse(self.path).path), "recursive=true" in self.path)
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""
