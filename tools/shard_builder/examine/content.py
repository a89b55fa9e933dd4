"""What is in the values: black, white, silent, empty, undecodable; and a digest of each, by which duplicates are found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import LfdataError
from shard_builder.examine.damage import code_of, reason_of
from shard_builder.examine.duplicates import record
from shard_builder.examine.opened import DataSet, Member
from shard_builder.examine.text import key_text, visible
from shard_builder.examine.values import FieldReader, Located
from shard_builder.examine.worker import Progress

BATCH = 256
DIGEST_BYTES = 16
# Share of samples at full scale from which a recording counts as clipped: a peak or two are no fault.
CLIPPED_SHARE = 0.001
# Text longer than this is no class name, and is not counted.
MAX_CLASS_BYTES = 100
SAMPLE = 0xFFFF
"""Field number of the digest of a whole sample."""


def content(data: DataSet, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``content``: ``shard``, ``start``, ``stop``, ``rows`` (a subset, or none for all), ``skip`` (field ordinals).

    Returns ``findings`` (dicts of check, field, row, index, shard, key, detail), ``digests`` (records of :mod:`duplicates`),
    ``texts`` (by field: counts of short texts), ``values``, ``errors``.
    """
    return _Rows(data, task, progress).run()


def subset(data: DataSet, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``subset``: indices of the ``limit`` samples with the smallest key hashes: the same for the same keys,
    whatever their order."""
    limit = task["limit"]
    best, places = np.empty(0, np.uint64), np.empty(0, np.int64)
    errors = []
    for number, base in enumerate(data.manifest.shards):
        progress.beat()
        try:
            hashes, rows = data.file(Member(number, base)).key_hashes()
        except LfdataError as error:
            errors.append(visible(f"shard {number}: {error}"))
            continue
        best = np.concatenate([best, hashes[:limit]])
        places = np.concatenate([places, rows[:limit].astype(np.int64) + data.starts[number]])
        order = np.argsort(best, kind="stable")[:limit]
        best, places = best[order], places[order]
    return {"indices": np.sort(places).tolist(), "errors": errors}


class _Rows:
    def __init__(self, data: DataSet, task: dict[str, Any], progress: Progress) -> None:
        self.data = data
        self.task = task
        self.number = task["shard"]
        self.member = Member(self.number, data.manifest.shards[self.number])
        self.progress = progress
        self.findings: list[dict[str, Any]] = []
        self.digests = bytearray()
        self.texts: dict[str, dict[str, int]] = {}
        self.errors: list[str] = []
        self.values = 0

    def run(self) -> dict[str, Any]:
        try:
            shard = self.data.shard(self.number)
        except LfdataError as error:
            return {
                "findings": [],
                "digests": b"",
                "texts": {},
                "values": 0,
                "errors": [visible(f"shard {self.number}: {error}")],
            }
        readers = {name: FieldReader(shard.file_of(name), name) for name in self.data.schema}
        for start, stop in self._ranges():
            whole: list[list[bytes]] = [[] for _ in range(stop - start)]
            for ordinal, name in enumerate(self.data.schema):
                if ordinal in self.task.get("skip", ()):
                    whole = []  # the sample has a value nobody can read: no digest of the whole
                    continue
                self._field(readers[name], ordinal, start, stop, whole)
            for position, parts in enumerate(whole):
                if len(parts) == len(self.data.schema):
                    self._digest(SAMPLE, hashlib.sha256(b"".join(parts)).digest()[:DIGEST_BYTES], start + position)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        return {
            "findings": self.findings,
            "digests": bytes(self.digests),
            "texts": self.texts,
            "values": self.values,
            "errors": self.errors,
        }

    def _ranges(self) -> Iterator[tuple[int, int]]:
        start, stop, chosen = self.task["start"], self.task["stop"], self.task.get("rows")
        if chosen is None:
            yield from ((at, min(at + BATCH, stop)) for at in range(start, stop, BATCH))
        else:
            yield from ((row, row + 1) for row in chosen if start <= row < stop)

    def _field(self, reader: FieldReader, ordinal: int, start: int, stop: int, whole: list[list[bytes]]) -> None:
        self.progress.beat()
        try:
            located = reader.locate(start, stop)
        except LfdataError as error:
            if stop - start == 1:
                self._find("undecodable", reader.name, start, f"{reason_of(error)} [{code_of(error)}]")
                return
            for row in range(start, stop):
                self._field(reader, ordinal, row, row + 1, whole[row - start : row - start + 1])
            return
        for position in range(stop - start):
            digest = b"absent" if not located.present[position] else self._value(reader, ordinal, located, position)
            if digest is not None and whole:
                whole[position].append(digest)

    def _value(self, reader: FieldReader, ordinal: int, located: Located, position: int) -> bytes | None:
        """Look at one value; its digest, or ``None`` if it cannot be decoded."""
        row = located.first + position
        self.values += 1
        if reader.kind == "scalar":
            value = reader.scalar(located, position)
            if value.dtype.kind == "f" and not np.isfinite(value):
                self._find("nan", reader.name, row, str(value))
            return bytes(value.tobytes())
        self.progress.at(row, ordinal)
        try:
            payload = reader.payload(located, position)
            value = reader.decode(located, position, payload)
        except Exception as error:  # a decoder may fail in any way on hostile bytes; the value is listed, the rest goes on
            self._find("undecodable", reader.name, row, f"{reason_of(error)} [{code_of(error)}]")
            return None
        for check, detail in look(reader.kind, value):
            self._find(check, reader.name, row, detail)
        if reader.kind == "text" and 0 < len(payload) <= MAX_CLASS_BYTES:
            table = self.texts.setdefault(reader.name, {})
            table[value] = table.get(value, 0) + 1
        # Sizes too: the same bytes of another shape are another value.
        digest = hashlib.sha256(repr(sorted(located.sizes_of(position).items())).encode())
        digest.update(payload)
        found = digest.digest()[:DIGEST_BYTES]
        if payload:
            self._digest(ordinal, found, row)
        return found

    def _digest(self, ordinal: int, digest: bytes, row: int) -> None:
        self.digests += record(ordinal, digest, self.data.starts[self.number] + row)

    def _find(self, check: str, field: str, row: int, detail: str) -> None:
        key = self.data.key_of(self.member, row)
        index = self.data.starts[self.number] + row
        place = {
            "shard": self.number,
            "file": self.member.file,
            "row": row,
            "index": index,
            "key": None if key is None else key_text(key),
        }
        self.findings.append({"check": check, "field": field, **place, "detail": visible(detail)})


def look(kind: str, value: Any) -> Iterator[tuple[str, str]]:
    """Checks that a decoded value fails, each with a detail."""
    match kind:
        case "image":
            yield from _image(value)
        case "audio":
            yield from _audio(value.samples)
        case "text":
            if not value.strip():
                yield ("blank", f"{len(value)} characters of white space") if value else ("empty", "no text")
        case "array":
            yield from _array(value)
        case "json":
            if value is None or (isinstance(value, str | list | dict) and not value):
                yield "empty", f"the value is {value!r}"
        case _:
            if not len(value):
                yield "empty", "no tokens" if kind == "tokens" else "no bytes"


def _image(pixels: NDArray[Any]) -> Iterator[tuple[str, str]]:
    channels = pixels.shape[2]
    full = int(np.iinfo(pixels.dtype).max)
    colour = pixels[..., : channels - 1] if channels in (2, 4) else pixels
    if channels in (2, 4) and not pixels[..., -1].any():
        yield "transparent", "every pixel is fully transparent"
    low, high = int(colour.min()), int(colour.max())
    if high == 0:
        yield "black", "every pixel is 0"
    elif low == full:
        yield "white", f"every pixel is {full}"
    elif bool((colour == colour[:1, :1]).all()):
        yield "constant", f"every pixel is {colour[0, 0].tolist()}"


def _audio(samples: NDArray[np.int16]) -> Iterator[tuple[str, str]]:
    if not samples.size:
        yield "empty", "no frames"
        return
    low, high = int(samples.min()), int(samples.max())
    if low == high:
        yield ("silent", "every sample is 0") if low == 0 else ("constant", f"every sample is {low}")
        return
    clipped = int(np.count_nonzero(samples == 32767) + np.count_nonzero(samples == -32768))
    if clipped > CLIPPED_SHARE * samples.size:
        yield "clipped", f"{clipped} of {samples.size} samples are at full scale"


def _array(values: NDArray[Any]) -> Iterator[tuple[str, str]]:
    if not values.size:
        yield "empty", f"shape {values.shape}"
    elif values.dtype.kind in "fc" and not np.isfinite(values).all():
        yield "nan", f"{int(np.count_nonzero(~np.isfinite(values)))} of {values.size} elements are not finite"
