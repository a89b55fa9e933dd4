"""What every sink looks like, and what an export is asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lfdata.codecs.base import Encoded
from lfdata.errors import OptionError
from lfdata.format.meta import FieldMeta

KEY_RULES = ("escape", "refuse")
RAW_IMAGES = ("png", "npy")


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``export``; all but ``workers`` determine bytes.

    format: one of :data:`shard_builder.sinks.job.FORMATS`.
    fields: names, in order; all by default. prefix: begins the name of every file.
    shard_bytes: size at which a new file begins. 1 GiB, as for shards.
    keys: what happens to keys that a tar member's name cannot carry: ``escape`` (reversibly) or ``refuse``.
    raw_images: pictures stored as raw pixels, and others no file format holds as they are: ``png`` (lossless) or ``npy``.
    endings: of a tar's members, by field; ``short`` leaves the field's name out of the others where that is clear.
    row_group_bytes: stored bytes of a Parquet row group. 64 MiB: a few are in memory at a time on either side.
    """

    format: str
    fields: tuple[str, ...] = ()
    prefix: str = "data"
    shard_bytes: int = 1 << 30
    keys: str = "escape"
    raw_images: str = "png"
    endings: Mapping[str, str] = field(default_factory=dict)
    short: bool = False
    row_group_bytes: int = 64 << 20
    workers: int = 0

    def __post_init__(self) -> None:
        if self.keys not in KEY_RULES:
            raise OptionError(f"keys is {self.keys!r}; valid: {', '.join(KEY_RULES)}")
        if self.raw_images not in RAW_IMAGES:
            raise OptionError(f"raw_images is {self.raw_images!r}; valid: {', '.join(RAW_IMAGES)}")
        if self.shard_bytes < 1 or self.row_group_bytes < 1 or self.workers < 0:
            raise OptionError("sizes must be at least 1 byte and workers not negative")
        if not self.prefix or self.prefix.startswith(".") or set(self.prefix) & set("/\0{}:"):
            raise OptionError(f"prefix {self.prefix!r}: a file name that begins with no dot and has none of / {{ }} :")
        if len(set(self.fields)) != len(self.fields):
            raise OptionError("a field is named twice")


class Writer(Protocol):
    """Writes one file. The file's bytes go to an ``OutputFile`` that the caller commits."""

    def add(self, key: bytes, fields: Mapping[str, FieldMeta], values: Mapping[str, Encoded]) -> None:
        """Append a sample: its stored values, and the fields as the shard stores them. Raises :class:`lfdata.errors.SampleError`."""
        ...

    def finish(self) -> None:
        """Write what ends the file."""
        ...

    def abandon(self) -> None:
        """The file is given up: write nothing more."""
        ...


class Sink(Protocol):
    """One format. Made once a process from the data set's schema; refuses at once what no file could hold."""

    suffix: str

    def open(self, output: Any) -> Writer:
        """A writer of one file; ``output`` has ``write`` and ``position``."""
        ...

    def row_overhead(self) -> int:
        """Bytes a sample takes beside its payloads, about: for cutting files."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """JSON-able: what each field became."""
        ...


def chosen(schema: Sequence[FieldMeta], names: Sequence[str]) -> tuple[FieldMeta, ...]:
    """The fields to export. Raises :class:`OptionError` for one that is not there."""
    known = {item.name: item for item in schema}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise OptionError(f"no field {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else tuple(schema)
