"""A little Hugging Face hub on 127.0.0.1, with the faults that a download has to live with."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`claim` overrides the size that the listing states; `cut` is where the first transfer of a file breaks off."""

    files: Mapping[str, bytes]
    claim: Mapping[str, int] = field(default_factory=dict)
    cut: int | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            hub.requests.append((self.command, self.path, self.headers.get("Range")))
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/owner/repo"):
                return self.send(200, json.dumps(self.listing()).encode(), body, {"Content-Type": "application/json"})
            name = path.partition(f"/owner/repo/resolve/{COMMIT}/")[2]
            if name not in hub.files:
                return self.send(404, b"", body, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such thing"})
            return self.file(hub.files[name], body)

        def listing(self) -> dict[str, object]:
            files = [{"rfilename": name, "size": hub.claim.get(name, len(data))} for name, data in hub.files.items()]
            return {
                "id": "owner/repo",
                "modelId": "owner/repo",
                "sha": COMMIT,
                "siblings": files,
                "tags": [],
                "private": False,
            }

        def file(self, data: bytes, body: bool) -> None:
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            wanted = self.headers.get("Range")
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            part = data[start:]
            if body and not start and hub.cut is not None:
                self.head(200, len(part), headers)
                self.wfile.write(part[: hub.cut])
                self.close_connection = True
                return None
            return self.send(206 if start else 200, part, body, headers)

        def head(self, status: int, size: int, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(size), **headers}.items():
                self.send_header(key, value)
            self.end_headers()

        def send(self, status: int, data: bytes, body: bool, headers: Mapping[str, str]) -> None:
            self.head(status, len(data), headers)
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
