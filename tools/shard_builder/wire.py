"""Messages between the converter and its workers: a length-prefixed MessagePack head, then raw payload bytes. No pickle."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

_PREFIX = struct.Struct("<QQ")


class ClosedError(ConnectionError):
    """The other side is gone."""


def send(connection: socket.socket, head: Any, payloads: list[Any] | None = None) -> None:
    """Send one message. Payloads are bytes-like; their lengths must be in the head."""
    encoded = msgspec.msgpack.encode(head)
    total = sum(len(part) for part in payloads or ())
    parts = [_PREFIX.pack(len(encoded), total), encoded]
    connection.sendall(b"".join([*parts, *(payloads or ())]) if total < 1 << 20 else b"".join(parts))
    if total >= 1 << 20:
        for part in payloads or ():
            connection.sendall(part)


def receive(connection: socket.socket) -> tuple[Any, memoryview]:
    """Receive one message: head and payload bytes. Raises :class:`ClosedError` at the end of the stream."""
    head_size, size = _PREFIX.unpack(_exactly(connection, _PREFIX.size))
    head = msgspec.msgpack.decode(_exactly(connection, head_size))
    return head, _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> memoryview:
    buffer = memoryview(bytearray(size))
    done = 0
    while done < size:
        count = connection.recv_into(buffer[done:], min(size - done, 1 << 24))
        if not count:
            raise ClosedError("the connection was closed")
        done += count
    return buffer
