"""A converter's worker process: loads records, encodes and hashes their fields, sends them back.

Started as ``python -m shard_builder.worker FD``; speaks :mod:`shard_builder.wire`. The first message is the set-up, every further one a
chunk of locators. It ends when the connection does, or with its parent.
"""

from __future__ import annotations

import ctypes
import hashlib
import signal
import socket
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

from lfdata.codecs.base import Encoded, Encoder
from lfdata.codecs.registry import make_encoder
from lfdata.errors import LfdataError, SampleError
from shard_builder import wire
from shard_builder.sources import source_from_config
from shard_builder.sources.base import FieldSpec

_PR_SET_PDEATHSIG = 1
RECENT_IMAGES = 16


def encoders_of(fields: list[FieldSpec], dictionaries: dict[str, bytes]) -> dict[str, Encoder]:
    """One encoder a field."""
    return {f.name: make_encoder(f.kind, f.options, dictionary=dictionaries.get(f.name)) for f in fields}


class Worker:
    """Encodes chunks. ``process`` returns a message head and payloads."""

    def __init__(self, setup: dict[str, Any]) -> None:
        fields = [FieldSpec(**spec) for spec in setup["fields"]]
        self.source = source_from_config(setup["source"], Path(setup["stage"]))
        self.encoders = encoders_of(fields, setup["dictionaries"])
        self._recent: OrderedDict[tuple[str, bytes], Encoded] = OrderedDict()

    def process(self, chunk: list[Any]) -> tuple[list[Any], list[Any]]:
        """Encode ``[(ordinal, locator), ...]``."""
        heads: list[Any] = []
        payloads: list[Any] = []
        for ordinal, locator in chunk:
            try:
                head, data = self._sample(locator)
            except SampleError as error:
                head, data = {"error": [error.code, error.reason, error.field, error.path]}, []
            except MemoryError:
                head, data = {"error": ["memory", "not enough memory to load or encode this sample", "", ""]}, []
            heads.append([ordinal, head])
            payloads += data
        return heads, payloads

    def _sample(self, locator: bytes) -> tuple[dict[str, Any], list[Any]]:
        raw = self.source.load(locator)
        values: list[Any] = []
        payloads: list[Any] = []
        for name, encoder in self.encoders.items():
            if name not in raw.values:
                continue
            encoded = self._encode(name, encoder, raw.values.pop(name), raw.path)
            data = encoded.payload
            digest = b"" if encoder.kind in ("tokens", "scalar") else hashlib.sha256(data).digest()
            aux = None if encoded.aux is None else encoded.aux.astype("<u8").tobytes()
            values.append([name, len(data), encoded.sizes, aux, list(encoded.warnings), digest])
            payloads.append(data)
        return {"values": values, "path": raw.path}, payloads

    def _encode(self, name: str, encoder: Encoder, value: Any, path: str) -> Encoded:
        if encoder.kind != "image" or not isinstance(value, bytes):
            return self._encode_new(name, encoder, value, path)
        # One picture with many captions comes many times in a row: encode it once.
        place = (name, hashlib.sha256(value).digest())
        encoded = self._recent.get(place)
        if encoded is None:
            encoded = self._recent[place] = self._encode_new(name, encoder, value, path)
            if len(self._recent) > RECENT_IMAGES:
                self._recent.popitem(last=False)
        return encoded

    def _encode_new(self, name: str, encoder: Encoder, value: Any, path: str) -> Encoded:
        try:
            return encoder.encode(value)
        except SampleError as error:
            error.field = error.field or name
            error.path = error.path or path
            raise


def main(descriptor: int) -> None:
    """Serve until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    connection = socket.socket(fileno=descriptor)
    try:
        setup, _ = wire.receive(connection)
        try:
            worker = Worker(setup)
        except LfdataError as error:
            wire.send(connection, {"fatal": str(error)})
            return
        wire.send(connection, {"ready": True})
        while True:
            chunk, _ = wire.receive(connection)
            heads, payloads = worker.process(chunk)
            wire.send(connection, heads, payloads)
    except (wire.ClosedError, BrokenPipeError, ConnectionResetError):
        return


def _die_with_parent() -> None:
    """Ask the kernel to end this process with its parent, where it can; a closed connection does the same a little later."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
