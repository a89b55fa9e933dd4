"""Servers on the loopback interface: moto's S3 as a process, a plain web server, and a proxy before either that misbehaves as told."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
BUCKET = "data"
# What the libraries of object stores read; no real ones.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t/do/not/show",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass
class Fault:
    """What becomes of one answer.

    Attributes:
        wait: seconds before it.
        status: this status instead, without a body.
        reset: the connection is reset, after ``cut`` bytes of the body.
        cut: the connection is closed after so many bytes of the body; negative: counted from its end.
        more: bytes after the body, which Content-Length counts.
        headers: instead of the server's.
        flip: this byte of the body is turned over.
        rate: bytes a second.
    """

    wait: float = 0.0
    status: int = 0
    reset: bool = False
    cut: int | None = None
    more: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    flip: int | None = None
    rate: float = 0.0


@dataclass(frozen=True)
class Asked:
    """A request: its number among those for this path, counted from 0; method, path, first and last byte asked for."""

    number: int
    method: str
    path: str
    first: int
    last: int


Rule = Callable[[Asked], Fault | None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Connections that a test cut."""


class Serving:
    """A server in a thread."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self.server = _Server((HOST, 0), handler)
        self.port = self.server.server_port
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(5)


class WebServer(Serving):
    """Files below a folder over HTTP/1.1 with ranges, entity tags and If-Match."""

    def __init__(self, root: Path) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = root / self.path.partition("?")[0].lstrip("/")
                if not path.is_file():
                    return self._answer(404, {}, b"")
                data = path.read_bytes()
                tag = f'"{hashlib.md5(data).hexdigest()}"'
                if self.headers.get("If-Match", tag) != tag:
                    return self._answer(412, {}, b"")
                asked = self.headers.get("Range")
                if asked is None:
                    return self._answer(200, {"ETag": tag}, data)
                first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
                if first >= len(data):
                    return self._answer(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
                part = data[first : last + 1]
                where = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
                return self._answer(206, {"ETag": tag, "Content-Range": where}, part)

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        super().__init__(Handler)

    @property
    def url(self) -> str:
        """Of the folder."""
        return f"http://{HOST}:{self.port}"


class Proxy(Serving):
    """Passes requests on to a port of this machine; ``rule`` says what goes wrong. ``log`` has every request."""

    def __init__(self, port: int) -> None:
        self.rule: Rule = lambda _asked: None
        self.log: list[Asked] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Headers and body in one go: two small writes would wait for each other.
            wbufsize = -1
            disable_nagle_algorithm = True

            def _pass(self) -> None:
                fault = proxy.rule(proxy.note(self)) or Fault()
                body = self._body()
                time.sleep(fault.wait)
                if fault.status:
                    return self._answer(fault, fault.status, [], b"")
                upstream = http.client.HTTPConnection(HOST, port, timeout=30)
                given = {
                    name: value for name, value in self.headers.items() if name.lower() not in ("transfer-encoding", "expect")
                }
                upstream.request(self.command, self.path, body, given)
                answer = upstream.getresponse()
                data = answer.read()
                headers = [
                    (name, value)
                    for name, value in answer.getheaders()
                    if name.lower() not in ("transfer-encoding", "connection")
                ]
                upstream.close()
                return self._answer(fault, answer.status, headers, data)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                found = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    found += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return found

            def handle_expect_100(self) -> bool:
                # Answers are buffered; this one is waited for before the body comes.
                going_on = super().handle_expect_100()
                self.wfile.flush()
                return going_on

            def _answer(self, fault: Fault, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
                if fault.flip is not None and fault.flip < len(data):
                    data = data[: fault.flip] + bytes([data[fault.flip] ^ 0xFF]) + data[fault.flip + 1 :]
                data += fault.more
                self.send_response(status)
                given = {name.lower() for name in fault.headers} | ({"content-length"} if self.command != "HEAD" else set())
                for name, value in headers:
                    if name.lower() not in given:
                        self.send_header(name, value)
                for name, value in fault.headers.items():
                    self.send_header(name, value)
                if self.command != "HEAD" and "content-length" not in {name.lower() for name in fault.headers}:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                sent = data if fault.cut is None else data[: fault.cut]
                for at in range(0, len(sent), 1 << 14):
                    part = sent[at : at + (1 << 14)]
                    self.wfile.write(part)
                    if fault.rate:
                        self.wfile.flush()
                        time.sleep(len(part) / fault.rate)
                self.wfile.flush()
                if fault.reset or fault.cut is not None:
                    if fault.reset:
                        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.close_connection = True
                    self.connection.close()

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        super().__init__(Handler)

    def note(self, request: BaseHTTPRequestHandler) -> Asked:
        """Put a request on record."""
        asked = request.headers.get("Range") or "bytes=0--1"
        first, last = asked.removeprefix("bytes=").split("-", 1)
        with self._lock:
            number = sum(one.path == request.path and one.method == request.command for one in self.log)
            found = Asked(number, request.command, request.path, int(first), int(last))
            self.log.append(found)
        return found

    @property
    def url(self) -> str:
        """Of the proxy."""
        return f"http://{HOST}:{self.port}"

    def ranges(self, suffix: str) -> list[tuple[int, int]]:
        """First and last byte of the GETs for paths with this ending."""
        return [(one.first, one.last) for one in self.log if one.method == "GET" and one.path.split("?")[0].endswith(suffix)]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[int]:
    """moto's S3 in a process of its own, with an empty bucket; gives its port."""
    import boto3

    with server_process("-m", "moto.server", "-H", HOST, "-p") as port:
        client(port, boto3).create_bucket(Bucket=BUCKET)
        yield port


@contextmanager
def gcs_server() -> Iterator[int]:
    """An emulator of Google Cloud Storage in a process of its own, with an empty bucket; gives its port."""
    start = ["start", f"--host={HOST}", "--in-memory", f"--default-bucket={BUCKET}", "--port"]
    with server_process("-m", "gcp_storage_emulator", *start) as port:
        yield port


@contextmanager
def server_process(*arguments: str) -> Iterator[int]:
    """A server out of a Python package, whose last argument is its port; gives that when it listens."""
    port = free_port()
    line = [sys.executable, *arguments, str(port)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | CREDENTIALS)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((HOST, port), 1).close()
                break
            except OSError:
                if time.monotonic() > end or process.poll() is not None:
                    raise
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def client(port: int, boto3: Any) -> Any:
    """boto3's client for a port."""
    return boto3.client(
        "s3",
        endpoint_url=f"http://{HOST}:{port}",
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )


def upload(port: int, folder: Path, prefix: str) -> str:
    """The files of a folder into the bucket; gives their URL."""
    import boto3

    store = client(port, boto3)
    for path in sorted(folder.iterdir()):
        store.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"
