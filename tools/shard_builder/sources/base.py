"""The protocol every source follows.

A source is *scanned* once, in the parent, in a deterministic order (the plan pass: keys, locators, sizes; nothing is decoded),
and its records are *loaded* in worker processes from their locators. Nothing a locator holds may be an absolute path, and
nothing outside the declared root is ever read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec


class Record(msgspec.Struct, frozen=True):
    """One sample of the source.

    ``key``: bytes, never normalised. ``locator``: opaque to everyone but its source, enough to load the sample.
    ``size``: source bytes (for segment planning). ``unit``: ordinal of the container it lies in (tar number); never decreases.
    """

    key: bytes
    locator: bytes
    size: int
    unit: int = 0


class BadRecord(msgspec.Struct, frozen=True):
    """A sample already known to be bad at scan time; the run's error policy decides what happens, at its place in the order."""

    key: bytes
    path: str
    code: str
    reason: str
    unit: int = 0


class RawSample(msgspec.Struct):
    """Raw values of one sample by *field name*; a value that is absent in the source is left out.

    Values are ``bytes`` for file contents and whatever the source holds inline (str, int, float, bool, list, dict).
    ``path`` names the sample in error reports, ``files`` the file a field came from, where that is another one.
    """

    values: dict[str, Any]
    path: str
    files: dict[str, str] = {}

    def place(self, field: str) -> str:
        """Where a field's value came from, for error reports."""
        return f"{self.path}: {self.files[field]}" if field in self.files else self.path


class FieldSpec(msgspec.Struct, frozen=True):
    """One declared field: where it comes from and how it is stored.

    ``column``: the column (JSONL/CSV), member extension(s) separated by ``;`` (tar), or ``*`` for all that is left.
    ``origin``: ``inline``, ``file`` (the column holds a path relative to the root) or ``base64``.
    ``options``: the codec's options, as text.
    """

    name: str
    kind: str
    column: str
    origin: str = "inline"
    options: dict[str, str] = {}


class Source(Protocol):
    """One way of getting samples in.

    A source whose neighbouring records are cheaper together (frames of a video) may have an attribute ``chunk_records``: how many a
    worker is given at a time. It decides nothing about what is stored.
    """

    fields: Sequence[FieldSpec]

    def describe(self) -> dict[str, Any]:
        """JSON-able options that determine the samples; no absolute paths. Part of the provenance and fingerprint."""
        ...

    def notes(self) -> dict[str, Any]:
        """JSON-able facts known after ``scan``: class names, counts of skipped links, warnings. Deterministic."""
        ...

    def scan(self) -> Iterator[Record | BadRecord]:
        """Yield every sample in the data set's order, bounded memory where the source allows it."""
        ...

    def stage(self, unit: int, directory: Path) -> None:
        """Make ``unit`` randomly readable below ``directory`` (decompress a tar.gz); no-op for most. Idempotent."""
        ...

    def unstage(self, unit: int, directory: Path) -> None:
        """Remove what ``stage`` made."""
        ...

    def place(self, locator: bytes) -> str:
        """Where a sample lies, for messages; reads nothing."""
        ...

    def load(self, locator: bytes) -> RawSample:
        """Load one sample (in a worker process). Raises :class:`lfdata.errors.SampleError`."""
        ...

    def config(self) -> dict[str, Any]:
        """Msgpack-able arguments from which a worker process rebuilds this source (they may hold absolute paths)."""
        ...
