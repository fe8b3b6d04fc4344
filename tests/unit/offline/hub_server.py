"""A loopback server with the routes of the Hugging Face hub that an upload uses."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_COMMIT = "0" * 40


@dataclass
class Hub:
    """What clients have uploaded. `files`: content by branch and path."""

    url: str = ""
    token: str = "secret"
    repositories: dict[str, bool | None] = field(default_factory=dict)
    branches: set[str] = field(default_factory=lambda: {"main"})
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: bytes) -> Any:
        """None: no such route."""
        parts = path.strip("/").split("/")
        if (method, parts) == ("POST", ["api", "repos", "create"]):
            wanted = json.loads(body)
            owner = wanted.get("organization") or "me"
            name = f"{owner}/{wanted['name']}"
            private = wanted.get("private", wanted.get("visibility"))
            self.repositories[name] = private
            return {"url": f"{self.url}/{name}"}
        if parts[:2] != ["api", "models"] or len(parts) < 5:
            return None
        route, rest = parts[4], "/".join(parts[5:])
        if route == "refs":
            refs = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": _COMMIT}
                for name in sorted(self.branches)
            ]
            return {"branches": refs, "converts": [], "tags": []}
        if route == "branch":
            self.branches.add(rest)
            return {}
        if route == "preupload":
            files = json.loads(body)["files"]
            return {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in files
                ]
            }
        if route == "commit":
            for line in body.splitlines():
                record = json.loads(line)
                if record["key"] == "file":
                    value = record["value"]
                    self.files[rest, value["path"]] = base64.b64decode(value["content"])
            name = "/".join(parts[2:4])
            return {"commitUrl": f"{self.url}/{name}/commit/{_COMMIT}", "commitOid": _COMMIT}
        return None


@contextmanager
def loopback_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._send(401, {"error": "wrong token"})
            answer = hub.answer(self.command, self.path.partition("?")[0], body)
            return self._send(404 if answer is None else 200, answer or {})

        do_GET = do_POST = _answer

        def _send(self, status: int, content: Any) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
