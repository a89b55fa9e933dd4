"""Messages over a stream socket: length, then MessagePack."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

_LENGTH = struct.Struct("<Q")


class Hello(msgspec.Struct, frozen=True):
    """What a decoder is started with: the spec, the slots, the process id of the trainer, and where that finds modules: PYTHONPATH holds no
    directory with a colon in its name."""

    spec: bytes
    slots: int
    slot_bytes: int
    lanes: int
    trainer: int
    path: tuple[bytes, ...]


def pack(hello: Hello) -> bytes:
    """For the decoder's descriptor."""
    return msgspec.msgpack.encode(hello)


def unpack(data: bytes) -> Hello:
    """What :func:`pack` made."""
    return msgspec.msgpack.decode(data, type=Hello)


def send(connection: socket.socket, message: Any) -> None:
    """One message, whole."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


class Receiver:
    """Whole messages out of what arrives; an interruption between two calls loses nothing."""

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._connection, self._decoder, self._buffer = connection, msgspec.msgpack.Decoder(kind), bytearray()
        self._room = bytearray(1 << 16)

    def next(self) -> Any:
        """The next message; ``None`` when the other end has gone."""
        while True:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                end = _LENGTH.size + length
                if len(self._buffer) >= end:
                    message = self._decoder.decode(memoryview(self._buffer)[_LENGTH.size : end].tobytes())
                    del self._buffer[:end]
                    return message
            if not self.fill():
                return None

    def fill(self) -> bool:
        """Read what is there, waiting for at least one byte; false at the end."""
        try:
            # Into memory that is there: a buffer of its own for each call would be asked of the kernel, and given back.
            count = self._connection.recv_into(self._room)
        except ConnectionError:
            return False
        self._buffer += memoryview(self._room)[:count]
        return bool(count)

    def ready(self) -> bool:
        """Whether a whole message is here already."""
        return len(self._buffer) >= _LENGTH.size and len(self._buffer) >= _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
