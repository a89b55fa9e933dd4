"""A web server with the manners of an object store: every answer comes late, and all together go no faster than a link."""

from __future__ import annotations

import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

_CHUNK = 1 << 16


class _Link:
    """Bytes a second, shared by all connections: who sends is told how long to wait."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free = rate, 0.0
        self._lock = threading.Lock()

    def pass_(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free = max(now, self._free) + count / self._rate
            wait = self._free - now
        if wait > 0:
            time.sleep(wait)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up."""


class SlowServer:
    """Files below a folder, by GET and HEAD with ranges; S3's clients take it for S3 (path style, unsigned answers).

    Args:
        latency: seconds before every answer.
        rate: bytes a second, of all connections together.
    """

    def __init__(self, root: Path, latency: float, rate: float) -> None:
        self.requests = self.bytes = 0
        lock, link, server = threading.Lock(), _Link(rate), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 0
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._answer(body=True)

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def _answer(self, body: bool) -> None:
                time.sleep(latency)
                path = root / self.path.partition("?")[0].lstrip("/")
                if not path.is_file():
                    self._head(404, {"Content-Length": "0"}, 0)
                    return
                found = path.stat()
                first, stop, status = 0, found.st_size, 200
                headers = {
                    "ETag": f'"{found.st_size:x}-{found.st_mtime_ns:x}"',
                    "Last-Modified": self.date_time_string(int(found.st_mtime)),
                }
                asked = self.headers.get("Range")
                if asked is not None:
                    begin, _, end = asked.removeprefix("bytes=").partition("-")
                    first, status = int(begin), 206
                    stop = min(stop, int(end) + 1) if end else stop
                    headers["Content-Range"] = f"bytes {first}-{stop - 1}/{found.st_size}"
                headers |= {"Content-Length": str(stop - first), "Accept-Ranges": "bytes"}
                self._head(status, headers, stop - first if body else 0)
                if body:
                    self._send(path, first, stop)

            def _head(self, status: int, headers: dict[str, str], count: int) -> None:
                with lock:
                    server.requests += 1
                    server.bytes += count
                lines = [
                    f"HTTP/1.1 {status} {'OK' if status < 300 else 'Not Found'}",
                    *(f"{name}: {value}" for name, value in headers.items()),
                ]
                self.wfile.write(("\r\n".join(lines) + "\r\n\r\n").encode())

            def _send(self, path: Path, first: int, stop: int) -> None:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    while first < stop:
                        data = os.pread(descriptor, min(_CHUNK, stop - first), first)
                        link.pass_(len(data))
                        self.wfile.write(data)
                        first += len(data)
                finally:
                    os.close(descriptor)

            def log_message(self, format: str, *args: object) -> None:
                """Keep quiet."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
