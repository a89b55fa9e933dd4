"""What is read: one request opens a shard over HTTP, one more a payload field, and a field's reads touch that field alone."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hostilekit import MemoryFile
from shardkit import AUDIO_PARAMS, Part, Side, audio, plain, scalar, tokens, write_dataset

from lfdata.dataset.shard import Shard
from lfdata.errors import ChangedError, CorruptError, TruncatedError
from lfdata.format.cache import IndexCache
from lfdata.format.meta import FieldMeta, Manifest
from lfdata.format.reader import ShardFile

FIELDS = [
    FieldMeta("blob", "bytes", {}),
    FieldMeta("snd", "audio", AUDIO_PARAMS),
    FieldMeta("txt", "text", {}),
    FieldMeta("ids", "tokens", {"dtype": "uint16", "vocab": 60_000}),
    FieldMeta("n", "scalar", {"dtype": "int32"}),
]
ROWS = 40


class Server:
    """A loopback HTTP server with ranges; it logs every request."""

    def __init__(self, root: Path) -> None:
        self.requests: list[tuple[str, int, int]] = []
        log = self.requests

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                first, last = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
                data = (root / self.path.lstrip("/")).read_bytes()
                part = data[first : last + 1]
                log.append((self.path, first, len(part)))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                self.wfile.write(part)

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop it."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)


class HttpFile:
    """A range file over HTTP: one request a read."""

    def __init__(self, port: int, name: str, size: int) -> None:
        self.port, self.name, self.size = port, name, size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """One range request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", "/" + self.name, headers={"Range": f"bytes={offset}-{offset + len(buffer) - 1}"})
        data = connection.getresponse().read()
        connection.close()
        if len(data) != len(buffer):
            raise TruncatedError(self.name, offset + len(data), "the server sent less than was asked for")
        buffer[:] = data


@pytest.fixture
def built(tmp_path: Path) -> tuple[Path, Manifest]:
    """A data set of one shard with a sidecar."""
    rows = []
    for n in range(ROWS):
        values = {
            "blob": plain(bytes([n]) * 500),
            "snd": audio(np.full((200, 1), n, np.int16)),
            "txt": plain(f"text {n}".encode()),
            "ids": tokens([n] * 20, "uint16"),
            "n": scalar(n, "int32"),
        }
        rows.append((f"key{n}".encode(), values))
    side = Side([FieldMeta("more", "bytes", {})], [{"more": plain(b"more %d" % n)} for n in range(ROWS)])
    return tmp_path, write_dataset(tmp_path, FIELDS, [Part(rows, [side])], group_bytes=8000)


@pytest.fixture
def server(built: tuple[Path, Manifest]) -> Iterator[Server]:
    """It, served."""
    running = Server(built[0])
    yield running
    running.close()


def test_one_request_opens_a_shard_and_one_reads_a_payload(built: tuple[Path, Manifest], server: Server) -> None:
    entry = built[1].shards[0]
    file = HttpFile(server.server.server_port, entry.file, entry.bytes)
    shard = ShardFile(file, entry.tail, (bytes.fromhex(entry.id), bytes(16), entry.rows))
    assert server.requests == [(f"/{entry.file}", entry.tail, entry.bytes - entry.tail)]
    assert [f.name for f in shard.fields] == [f.name for f in FIELDS] and shard.rows == ROWS
    # The first payload of a field costs its index blocks (locators, lengths) and the payload; the next ones the payload alone.
    located = shard.locate("blob", np.array([7]))
    assert len(server.requests) == 3
    shard.file.read_into(memoryview(bytearray(500)), int(located[0][0]))
    assert server.requests[-1] == (f"/{entry.file}", int(located[0][0]), 500)
    shard.locate("blob", np.array([30]))
    assert len(server.requests) == 4


def test_a_data_sets_shard_opens_with_one_request_a_file(built: tuple[Path, Manifest], server: Server) -> None:
    manifest = built[1]
    entry, port = manifest.shards[0], server.server.server_port
    shard = Shard(
        entry, lambda name, size: HttpFile(port, name, size), {f.name: f for f in manifest.fields}, IndexCache(), remote=True
    )
    assert [r[0] for r in server.requests] == [f"/{entry.file}", f"/{entry.sidecars[0].file}"]
    rows = np.array([3, 20])
    for count in (
        2,
        4,
    ):  # two payloads, and in the first round the columns: present is left out, bytes and locators are one read each
        server.requests.clear()
        located = shard.lengths("blob", rows)
        out = np.empty(1000, np.uint8)
        shard.read("blob", rows, located, out, np.array([0, 500]))
        assert out.tolist() == [3] * 500 + [20] * 500
        assert len(server.requests) == (4 if count == 2 else 2)
    server.requests.clear()
    shard.lengths("blob", np.arange(5, 9)), shard.lengths("more", rows)
    assert len(server.requests) == 2  # only the sidecar's two columns were not there yet


def test_a_wrong_tail_or_identity_is_refused(built: tuple[Path, Manifest]) -> None:
    entry = built[1].shards[0]
    raw = (built[0] / entry.file).read_bytes()
    for tail in (0, 4095, entry.bytes - 127, entry.bytes, 2**63):
        with pytest.raises(CorruptError):
            ShardFile(MemoryFile(raw), tail)
    for tail in (4096, entry.tail - 64, entry.tail + 64, entry.bytes - 128):  # only more, or more often, is read
        assert ShardFile(MemoryFile(raw), tail).rows == ROWS
    identity = bytes.fromhex(entry.id)
    for expect in ((bytes(16), bytes(16), ROWS), (identity, identity, ROWS), (identity, bytes(16), ROWS + 1)):
        with pytest.raises(ChangedError):
            ShardFile(MemoryFile(raw), entry.tail, expect)


def bytes_of(shard: ShardFile, field: str) -> list[tuple[int, int]]:
    """Where a field's bytes lie: its columns, its token region, its payloads."""
    number = shard.ordinal(field)
    places = [(e.offset, e.end) for e in shard.entries if e.field == number]
    if shard.fields[number].kind not in ("tokens", "scalar"):
        offsets, lengths, _ = shard.locate(field, np.arange(shard.rows))
        places += list(zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True))
    return places


@pytest.mark.parametrize("field", [f.name for f in FIELDS])
def test_reading_a_field_touches_that_field_alone(built: tuple[Path, Manifest], field: str) -> None:
    entry = built[1].shards[0]
    raw = (built[0] / entry.file).read_bytes()
    allowed = bytes_of(ShardFile(MemoryFile(raw)), field)
    file = MemoryFile(raw)
    alone = msgspec.structs.replace(entry, sidecars=())
    shard = Shard(alone, lambda _name, _size: file, {f.name: f for f in FIELDS}, IndexCache())
    file.reads.clear()
    rows = np.array([1, 2, 17, 30])
    if field == "n":
        assert shard.scalars(field, rows).tolist() == rows.tolist()
    else:
        located = shard.lengths(field, rows)
        ends = np.cumsum(located[1])
        shard.sizes(field, rows)
        shard.present(field, rows)
        shard.read(field, rows, located, np.empty(int(ends[-1]), np.uint8), ends - located[1])
    assert file.reads
    for offset, length in file.reads:
        assert any(start <= offset and offset + length <= stop for start, stop in allowed), (offset, length)


def test_keys_of_neighbouring_rows_are_one_read(tmp_path: Path) -> None:
    rows = [(f"key-{n:06d}-{'x' * 40}".encode(), {"n": scalar(n, "int32")}) for n in range(5000)]
    manifest = write_dataset(tmp_path, FIELDS[-1:], [Part(rows)])
    for budget in (1, 1 << 30):
        file = MemoryFile((tmp_path / manifest.shards[0].file).read_bytes())
        shard = ShardFile(file, cache=IndexCache(budget))
        file.reads.clear()
        assert shard.keys(np.arange(5000)) == [key for key, _ in rows]
        assert len(file.reads) <= 3, "one for the offsets, one for the keys"
        assert shard.keys(np.array([4999, 0, 1300, 1300])) == [rows[n][0] for n in (4999, 0, 1300, 1300)]
