"""A converter's worker process: loads records, encodes and hashes their fields, sends them back.

Started by :mod:`shard_builder.pool`; speaks :mod:`shard_builder.wire`. The first message is a set-up (a map), every further one a mode
and a chunk of locators (a list), or another set-up. It ends when the connection does, or with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import signal
import socket
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from lfdata.codecs.base import Encoded, Encoder
from lfdata.codecs.dictionary import MAX_SAMPLE
from lfdata.codecs.registry import make_encoder
from lfdata.codecs.structured import JsonEncoder
from lfdata.errors import LfdataError, SampleError
from shard_builder import wire
from shard_builder.sources import source_from_config
from shard_builder.sources.base import FieldSpec, RawSample

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
        self.keep_bad = setup["keep_bad"]

    def process(self, chunk: list[Any], mode: str = "encode") -> tuple[list[Any], list[Any]]:
        """Work on ``[(ordinal, locator), ...]``: ``encode`` them, or ``pack`` their ``json`` fields for the training of dictionaries."""
        handle = {"encode": self._sample, "pack": self._pack}[mode]
        heads: list[Any] = []
        payloads: list[Any] = []
        for ordinal, locator in chunk:
            head: dict[str, Any]
            data: list[Any] = []
            raw = None
            try:
                raw = self.source.load(locator)
                head, data = handle(raw)
            except SampleError as error:
                head = {"error": [error.code, error.reason, error.field, error.path]}
                if raw is not None and self.keep_bad:
                    head["raw"], data = kept_values(raw)
            except MemoryError:
                head = {"error": ["memory", "not enough memory to load or encode this sample", "", ""]}
            heads.append([ordinal, head])
            payloads += data
        return heads, payloads

    def _pack(self, raw: RawSample) -> tuple[dict[str, Any], list[Any]]:
        """MessagePack of the ``json`` fields, as much of it as training looks at."""
        packed: list[Any] = []
        payloads: list[Any] = []
        for name, encoder in self.encoders.items():
            if isinstance(encoder, JsonEncoder) and name in raw.values:
                with contextlib.suppress(SampleError):
                    payloads.append(encoder.pack(raw.values[name])[:MAX_SAMPLE])
                    packed.append([name, len(payloads[-1])])
        return {"packed": packed}, payloads

    def _sample(self, raw: RawSample) -> tuple[dict[str, Any], list[Any]]:
        # Values are let go as they are encoded, unless a bad sample's are still wanted.
        left = dict(raw.values) if self.keep_bad else raw.values
        values: list[Any] = []
        payloads: list[Any] = []
        for name, encoder in self.encoders.items():
            if name not in left:
                continue
            encoded = self._encode(name, encoder, left.pop(name), raw.place(name))
            data = encoded.payload
            digest = b"" if encoder.kind in ("tokens", "scalar") else hashlib.sha256(data).digest()
            aux = None if encoded.aux is None else encoded.aux.astype("<u8").tobytes()
            values.append([name, len(data), encoded.sizes, aux, list(encoded.warnings), digest])
            payloads.append(data)
        return {"values": values, "path": raw.path, "files": raw.files}, payloads

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


def kept_values(raw: RawSample) -> tuple[list[Any], list[Any]]:
    """A bad sample's values for quarantine: ``[name, length, whether bytes]`` and their bytes (JSON for what is not bytes)."""
    about: list[Any] = []
    payloads: list[Any] = []
    for name, value in raw.values.items():
        is_bytes = isinstance(value, bytes | bytearray | memoryview)
        data = value if is_bytes else _as_json(value)
        about.append([name, len(data), is_bytes])
        payloads.append(data)
    return about, payloads


def _as_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
        return ascii(value).encode()


def main(descriptor: int) -> None:
    """Serve until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    connection = socket.socket(fileno=descriptor)
    try:
        while True:
            message, _ = wire.receive(connection)
            if isinstance(message, dict):
                try:
                    worker = Worker(message)
                except LfdataError as error:
                    wire.send(connection, {"fatal": str(error)})
                    return
                wire.send(connection, {"ready": True})
            else:
                mode, chunk = message
                wire.send(connection, *worker.process(chunk, mode))
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
