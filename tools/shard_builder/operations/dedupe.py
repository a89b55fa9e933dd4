"""``dedupe``: which values, and which whole samples, occur more than once. A report; nothing is changed.

Values are the same if their stored bytes are: the same picture file, the same text; json by its MessagePack, since its compression depends
on the shard's dictionary. Digests (the first 128 bits of SHA-256) are spilled to disk by their first bits and grouped bucket by bucket, so
memory does not grow with the data set.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.base import Encoded
from lfdata.codecs.structured import JsonDecoder
from lfdata.dataset import ShardDataset
from lfdata.dataset.shard import Shard
from lfdata.errors import OptionError, SampleError
from lfdata.format.durable import Files, OutputFile, storage_error
from shard_builder.operations.inputs import open_input, stored_rows

SAMPLE = "__sample__"
_RECORD = np.dtype([("high", ">u8"), ("low", ">u8"), ("index", "<u8"), ("bytes", "<u8")])
_BUFFERED = 1 << 16
_LISTED_KEYS = 100
_MAX_FILES = 256
Progress = Callable[[int, int], None]
"""Called with (samples done, samples in all)."""


class Group(msgspec.Struct, omit_defaults=True):
    """Samples that have one value: the first ``_LISTED_KEYS`` of them, by index, with their keys.

    Attributes:
        field: its name, or ``__sample__`` for whole samples. digest: of the value, hexadecimal. bytes: of one of them. count: samples.
    """

    field: str
    digest: str
    bytes: int
    count: int
    indices: list[int]
    keys: list[str]


class FieldReport(msgspec.Struct):
    """One field: values present, groups of equal ones, values beyond the first of each group, and their bytes as if stored each."""

    values: int = 0
    groups: int = 0
    repeats: int = 0
    repeated_bytes: int = 0


@dataclass(slots=True)
class Report:
    """What was found: by field, and the largest groups of each, largest first."""

    rows: int
    fields: dict[str, FieldReport] = field(default_factory=dict)
    largest: dict[str, list[Group]] = field(default_factory=dict)


def dedupe(
    dataset: str | Path,
    *,
    fields: Sequence[str] = (),
    output: OutputFile | None = None,
    scratch: str | Path | None = None,
    shown: int = 5,
    progress: Progress | None = None,
) -> Report:
    """Find exact duplicates.

    Args:
        fields: names; all but scalars by default. Whole samples are compared over these fields (and all scalars, by default).
        output: every group as a JSON line, in the order of fields, then of digests.
        scratch: directory for digests, 32 bytes a value; the system's by default.
        shown: groups a field in the result.

    Raises:
        OptionError: a field that is not there. FormatError: a damaged shard. StorageError: the scratch directory is full.
    """
    data = open_input(dataset)
    unknown = [name for name in fields if name not in data.schema]
    if unknown:
        raise OptionError(f"{data.path}: no field {unknown[0]!r}; there are {', '.join(data.schema)}")
    compared = list(fields) or list(data.schema)
    reported = [name for name in compared if fields or data.schema[name].kind != "scalar"]
    report = Report(len(data))
    try:
        with tempfile.TemporaryDirectory(prefix="dedupe-", dir=scratch) as folder:
            names = [*reported, SAMPLE]
            bits = bucket_bits(len(data), len(names))
            tables: dict[str, _Table] = {}
            try:
                for number, name in enumerate(names):
                    tables[name] = _Table(Path(folder), str(number), bits)
                _digest(data, compared, tables, progress or (lambda _done, _total: None))
                for name, table in tables.items():
                    _report(data, name, table, report, output, shown)
            finally:
                for table in tables.values():
                    table.close()
    except OSError as error:
        raise storage_error(scratch or tempfile.gettempdir(), "write digests", error) from error
    return report


def bucket_bits(rows: int, tables: int) -> int:
    """Bits by which digests are dealt out: about a million to a bucket (32 MB), as far as descriptors go."""
    return max(0, min((rows >> 20).bit_length(), (_MAX_FILES // max(1, tables)).bit_length() - 1))


class _Table:
    """Digests of one field, spilled by their first bits into as many files as keep one of them small."""

    def __init__(self, folder: Path, name: str, bits: int) -> None:
        self._bits = bits
        self._files = [Files().scratch(folder, f"{name}-{bucket}") for bucket in range(1 << bits)]
        self._buffer = np.empty(_BUFFERED, _RECORD)
        self._used = 0
        self.values = 0

    def add(self, digest: bytes, index: int, size: int) -> None:
        """Take one value in."""
        self._buffer[self._used] = (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big"), index, size)
        self._used += 1
        self.values += 1
        if self._used == _BUFFERED:
            self._spill()

    def _spill(self) -> None:
        records = self._buffer[: self._used]
        bucket_of = (
            records["high"].astype(np.uint64) >> np.uint64(64 - self._bits) if self._bits else np.zeros(len(records), np.uint64)
        )
        for bucket in np.unique(bucket_of).tolist():
            self._files[int(bucket)].write(records[bucket_of == bucket].tobytes())
        self._used = 0

    def groups(self) -> Iterator[NDArray[Any]]:
        """Records of every digest that occurs more than once, in ascending order of digests; inside a group by index."""
        self._spill()
        for file in self._files:
            records = np.frombuffer(file.pread(file.position, 0), _RECORD) if file.position else np.empty(0, _RECORD)
            ordered = records[np.lexsort((records["index"], records["low"], records["high"]))]
            same = (ordered["high"][1:] == ordered["high"][:-1]) & (ordered["low"][1:] == ordered["low"][:-1])
            edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
            for start, stop in edges.reshape(-1, 2).tolist():
                yield ordered[start : stop + 1]

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _digest(data: ShardDataset, names: Sequence[str], tables: dict[str, _Table], progress: Progress) -> None:
    index = 0
    for number in range(len(data.manifest.shards)):
        shard = data.shard(number)
        for row, key, values in stored_rows(shard, names, np.arange(shard.rows)):
            whole = hashlib.sha256()
            size = 0
            for name in names:
                value = values.get(name)
                if value is None:
                    whole.update(b"-")
                    continue
                digest, length = _value(shard, name, value, row, key)
                size += length
                whole.update(b"+" + digest)
                if name in tables:
                    tables[name].add(digest, index, length)
            tables[SAMPLE].add(whole.digest(), index, size)
            index += 1
        progress(index, len(data))


def _value(shard: Shard, name: str, value: Encoded, row: int, key: bytes) -> tuple[bytes, int]:
    """Digest of a value with what its bytes alone do not say (the shape of an array, the rate of a recording), and its length."""
    payload: Any = value.payload
    sizes = {role: size for role, size in value.sizes.items() if role != "raw_bytes"}
    decoder = shard.decoder(name) if shard.field(name).kind == "json" else None
    if isinstance(decoder, JsonDecoder):
        try:
            payload = decoder.messagepack(payload, value.sizes)
        except SampleError as error:
            error.field, error.key, error.path = name, key, f"{shard.name}, row {row}"
            raise
    digest = hashlib.sha256(payload)
    digest.update(repr(sorted(sizes.items())).encode())
    return digest.digest(), len(value.payload)


def _report(data: ShardDataset, name: str, table: _Table, report: Report, output: OutputFile | None, shown: int) -> None:
    found = FieldReport(values=table.values)
    largest: list[tuple[int, str, NDArray[Any]]] = []
    for records in table.groups():
        count, size = len(records), int(records["bytes"][0])
        found.groups += 1
        found.repeats += count - 1
        found.repeated_bytes += (count - 1) * size
        digest = f"{int(records['high'][0]):016x}{int(records['low'][0]):016x}"
        largest.append((-count * max(1, size), digest, records))
        if len(largest) > 2 * shown:
            largest = sorted(largest, key=lambda item: item[:2])[:shown]
        if output is not None:
            output.write(msgspec.json.encode(_group(data, name, digest, records)) + b"\n")
    report.fields[name] = found
    best = sorted(largest, key=lambda item: item[:2])[:shown]
    report.largest[name] = [_group(data, name, digest, records) for _, digest, records in best]


def _group(data: ShardDataset, name: str, digest: str, records: NDArray[Any]) -> Group:
    indices = records["index"][:_LISTED_KEYS].tolist()
    keys = [key.decode("utf-8", "backslashreplace") for key in data.keys(indices)]
    return Group(name, digest, int(records["bytes"][0]), len(records), indices, keys)
