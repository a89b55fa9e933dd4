"""WebDataset tars: consecutive members of one key are a sample, extensions are columns. Nothing is ever extracted.

A plain tar is read in place by offsets; a compressed one is decompressed to a scratch file while its records are loaded
(:meth:`stage`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import DiskFullError, OptionError, SampleError, SourceError, StorageError
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.files import refuse_pointer
from shard_builder.sources.grouping import DUPLICATE_MEMBERS, SPLITS, Group, Grouper, Splitter
from shard_builder.sources.guess import guess_fields, guess_notes
from shard_builder.sources.inflate import gunzip
from shard_builder.sources.options import SourceOptions
from shard_builder.sources.tarlist import Tars
from shard_builder.sources.tarscan import NO_END, TarNotes, TarRules, TarScan
from shard_builder.sources.tarstream import GZIP_MAGIC, GzipStream, TarFault, members

_VALID = {
    "key_split": "|".join(SPLITS),
    "members": "|".join(DUPLICATE_MEMBERS),
    "no_end": "|".join(NO_END),
    "gunzip": "yes|no",
    "keys": "plain|escaped",
    "max_member_bytes": "<largest member read, such as 512M; default 4G>",
    "max_unpacked_bytes": "<most bytes that one .tar.gz may decompress to; default 256G>",
}
_GUESS_SAMPLES = 64
_GUESS_MEMBERS = 100_000

_decode = msgspec.msgpack.Decoder(tuple[int, int, list[tuple[int, int, int, int]]]).decode


class WebDatasetSource:
    """The source of kind ``webdataset``.

    Args:
        location: a tar, a brace pattern, several of these joined by ``::``, or a directory of tars (in byte order of
            names).
        fields: the declared fields; a column is an extension, or several joined by ``;`` of which the first that is there
            counts. ``None``: guessed from the first samples (:mod:`shard_builder.sources.guess`).
        stage_dir: in a worker process: where :meth:`stage` was told to decompress to.
        options: ``key_split``, ``members`` (``error``, ``first``, ``last``: two of one extension), ``no_end``,
            ``gunzip``, ``keys``, ``max_member_bytes``, ``max_unpacked_bytes``.

    Raises:
        SourceError: at once when a tar is missing or unreadable; from :meth:`scan` when a declared column is in no sample.
        OptionError: fields or options that make no sense.
    """

    kind = "webdataset"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        reader = SourceOptions(self.kind, options, _VALID)
        self._given = reader.given
        self._location = location
        self._tars = Tars(location)
        self._gunzip = reader.flag("gunzip", False)
        self._split = reader.choice("key_split", SPLITS, "first")
        self._escaped = reader.choice("keys", ("plain", "escaped"), "plain") == "escaped"
        self._unpacked = reader.size("max_unpacked_bytes", 256 << 30)
        self._limit = reader.size("max_member_bytes", 4 << 30)
        self._duplicates = reader.choice("members", DUPLICATE_MEMBERS, "error")
        self._no_end = reader.choice("no_end", NO_END, "check")
        self.fields: Sequence[FieldSpec] = self._guess() if fields is None else _check(fields)
        self._remarks = guess_notes(self.fields) if fields is None else []
        self._columns = [_extensions(spec.column, self._gunzip) for spec in self.fields]
        self._notes = TarNotes()
        self._stage_dir = stage_dir
        self._open: tuple[int, int] = (-1, -1)  # unit, descriptor

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        _, descriptor = getattr(self, "_open", (-1, -1))
        self._open = (-1, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def _guess(self) -> list[FieldSpec]:
        grouper = Grouper(Splitter("first" if self._split == "first" else "last", ()), "last")
        groups: list[Group] = []
        left_out: Counter[str] = Counter()
        budget = _GUESS_MEMBERS
        for unit in range(len(self._tars)):
            with self._tars.stream(unit, self._unpacked) as stream:
                try:
                    for member in itertools.islice(members(stream), budget):
                        budget -= 1
                        done, reason = grouper.feed(member)
                        groups += [done] if done else []
                        left_out.update([reason] if reason else [])
                        if len(groups) >= _GUESS_SAMPLES:
                            break
                except TarFault as fault:
                    left_out.update([f"{self._tars.name(unit)}: {fault.reason}"])
            last = grouper.take()
            groups += [last] if last else []
            if len(groups) >= _GUESS_SAMPLES or budget <= 0:
                break
        if not groups:
            why = "; ".join(f"{reason} ({count})" for reason, count in sorted(left_out.items())[:8]) or "no members"
            raise SourceError(f"{self._location}: no sample to guess the fields from; left out: {why}")
        return guess_fields([list(group.members) for group in groups[:_GUESS_SAMPLES]], gunzip=self._gunzip)

    # -- protocol -----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return {
            "kind": self.kind,
            "fields": [msgspec.structs.asdict(spec) for spec in self.fields],
            "tars": self._tars.describe(),
            "key_split": self._split,
            "members": self._duplicates,
            "no_end": self._no_end,
            "gunzip": self._gunzip,
            **({"keys": "escaped"} if self._escaped else {}),
            "limits": [self._limit, self._unpacked],
        }

    def notes(self) -> dict[str, Any]:
        """What was skipped and why, extensions that no field takes, in how many samples each field is, warnings."""
        summary = self._notes.summary([spec.name for spec in self.fields])
        return summary | {"warnings": [*self._remarks, *summary["warnings"]]}

    def config(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        return {"kind": self.kind, "location": self._tars.absolute, "fields": fields, "options": self._given}

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every sample, tar by tar, in the order of the tars. The records of one tar are spooled, beyond 8 MiB to disk."""
        self._notes = TarNotes()
        rules = TarRules(self._columns, self._split, self._duplicates, self._no_end, self._limit, self._escaped)
        # A unit ends a segment. Only a compressed tar needs one of its own; shards may span plain ones.
        units = any(self._tars.compressed(tar) for tar in range(len(self._tars)))
        for tar in range(len(self._tars)):
            with self._tars.stream(tar, self._unpacked) as stream:
                yield from TarScan(tar, tar if units else 0, self._tars.name(tar), stream, rules, self._notes).run()
        if self._notes.whole and not self._notes.faults and not self._escaped:  # what lies behind a fault is unknown
            for number, spec in enumerate(self.fields):
                if not self._notes.present[number]:
                    there = self._notes.listing()
                    raise SourceError(f"no sample has a member for field {spec.name!r} ({spec.column}); extensions: {there}")

    def stage(self, unit: int, directory: Path) -> None:
        """Decompress a compressed tar to ``directory/unit-NNNNNN.tar``, as far as :meth:`scan` could read it.

        Raises:
            DiskFullError, StorageError: the scratch file cannot be written.
        """
        self._stage_dir = directory
        if not self._tars.compressed(unit) or self._staged(unit, directory).exists():
            return
        path = self._staged(unit, directory)
        temporary = path.with_suffix(".part")
        with self._tars.stream(unit, self._unpacked) as stream:
            assert isinstance(stream, GzipStream)
            try:
                with open(temporary, "wb", buffering=1 << 20) as file, contextlib.suppress(SampleError):
                    # A broken stream ends here as it ended in the scan, which has reported it.
                    while data := stream.step():
                        file.write(data)
                os.replace(temporary, path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else StorageError
                raise kind(
                    temporary, "write", error.errno, f"decompressing {self._tars.name(unit)}: {error.strerror}"
                ) from error

    def unstage(self, unit: int, directory: Path) -> None:
        """Remove the decompressed tar."""
        self._close()
        if self._tars.compressed(unit):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._staged(unit, directory))

    def _staged(self, unit: int, directory: Path) -> Path:
        return directory / f"unit-{unit:06d}.tar"

    def place(self, locator: bytes) -> str:
        """The tar, and where in it the sample begins."""
        unit, start, _ = _decode(locator)
        return f"{self._tars.name(unit)}: byte {start}"

    def load(self, locator: bytes) -> RawSample:
        """One sample. Raises :class:`SampleError`."""
        unit, _, places = _decode(locator)
        path = self.place(locator)
        values: dict[str, Any] = {}
        for field, alternative, offset, size in places:
            spec = self.fields[field]
            try:
                data = self._read(unit, offset, size)
                if self._gunzip and self._columns[field][alternative].endswith(".gz") and data[:2] == GZIP_MAGIC:
                    data = gunzip(data, self._limit)
                refuse_pointer(data, path)
            except SampleError as error:
                error.field, error.path = spec.name, path
                raise
            values[spec.name] = data
        return RawSample(values, path)

    def _read(self, unit: int, offset: int, size: int) -> bytes:
        try:
            descriptor = self._descriptor(unit)
            data = bytearray()
            while len(data) < size and (chunk := os.pread(descriptor, min(size - len(data), 16 << 20), offset + len(data))):
                data += chunk
        except OSError as error:
            raise SampleError("unreadable", f"the tar cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise SampleError(
                "changed", f"the tar became shorter after it was scanned: {len(data)} of {size} bytes at {offset}"
            )
        return bytes(data)

    def _descriptor(self, unit: int) -> int:
        if self._open[0] != unit:
            self._close()
            if not self._tars.compressed(unit):
                self._open = (unit, self._tars.open(unit))
            elif self._stage_dir is None:
                raise SampleError("unstaged", "a compressed tar must be staged before it can be read")
            else:
                self._open = (unit, os.open(self._staged(unit, self._stage_dir), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        return self._open[1]


def _extensions(column: str, gunzip: bool) -> tuple[str, ...]:
    """What a column names, in order of preference; where gzip members are decompressed, ``txt`` also stands for ``txt.gz``."""
    named = [part.strip().lstrip(".").lower() for part in column.split(";")]
    more = [f"{name}.gz" for name in named if gunzip and not name.endswith(".gz")]
    return tuple(dict.fromkeys([*named, *more]))


def _check(fields: Sequence[FieldSpec]) -> Sequence[FieldSpec]:
    for spec in fields:
        if spec.column == "*":
            raise OptionError(
                f"field {spec.name!r}: '*' is for tables; in a tar, name the extension, such as {spec.name}:{spec.kind}=json"
            )
        if spec.origin == "base64":
            raise OptionError(f"field {spec.name!r}: members of a tar hold the value itself; leave '@base64' away")
        if not all(part.strip().lstrip(".") for part in spec.column.split(";")):
            raise OptionError(f"field {spec.name!r}: {spec.column!r} holds an empty extension; write for example jpg;jpeg;png")
    if not fields:
        raise OptionError("no field is declared; write for example --field image:image=jpg")
    return fields
