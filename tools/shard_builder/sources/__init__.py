"""Where samples come from: one module a kind of source, behind the protocol of :mod:`shard_builder.sources.base`.

May import :mod:`lfdata.errors`, :mod:`lfdata.codecs.base` and :mod:`shard_builder.fields`; knows nothing of shards, plans or workers.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import OptionError, SourceError
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record, Source

__all__ = ["KINDS", "BadRecord", "FieldSpec", "RawSample", "Record", "Source", "open_source", "source_from_config"]

KINDS = ("image-folder", "table", "webdataset")

_TABLES = (".jsonl", ".ndjson", ".csv", ".tsv")
_TARS = (".tar", ".tar.gz", ".tgz")
_SUPPORTED = (
    "supported: a directory with class directories (image-folder); a .jsonl, .ndjson, .csv or .tsv file (table); .tar, .tar.gz or .tgz files, "
    "a brace pattern, several joined by '::', or a directory of them (webdataset)"
)


def open_source(location: str, *, kind: str | None = None, fields: Sequence[FieldSpec] | None = None, **options: Any) -> Source:
    """Open a source.

    Args:
        location: a path, or for tars a brace pattern (``train-{000000..000123}.tar``) or several joined by ``::``.
        kind: one of :data:`KINDS`; told from the location by default.
        fields: the declared fields; ``None`` for the source's own defaults (a table has none).
        options: the source's options, as text; docs/sources.md lists them.

    Raises:
        SourceError: the source is missing, unreadable, or of no supported kind.
        OptionError: fields or options that make no sense.
    """
    from shard_builder.fields import check_fields

    location = os.fspath(location)
    if kind is not None and kind not in KINDS:
        raise OptionError(f"unknown kind of source {kind!r}; valid kinds: {', '.join(KINDS)}")
    checked = None if fields is None else check_fields(fields)
    return _make(kind or _guess_kind(location), location, checked, options)


def source_from_config(config: dict[str, Any], stage_dir: Path) -> Source:
    """A source as a worker process needs it, from what :meth:`Source.config` gave; ``stage_dir`` is where ``stage`` was told to work."""
    fields = msgspec.convert(config["fields"], list[FieldSpec])
    source = _make(config["kind"], config["location"], fields, config["options"])
    if hasattr(source, "stage_directory"):
        source.stage_directory = stage_dir
    return source


def _make(kind: str, location: str, fields: list[FieldSpec] | None, options: dict[str, Any]) -> Source:
    match kind:
        case "image-folder":
            from shard_builder.sources.image_folder import ImageFolder

            return ImageFolder(location, fields, options)
        case "table":
            from shard_builder.sources.table import Table

            return Table(location, fields, options)
        case _:
            from shard_builder.sources.webdataset import WebDataset

            return WebDataset(location, fields, options)


def _guess_kind(location: str) -> str:
    try:
        mode = os.stat(location).st_mode
    except OSError as error:
        if "::" in location or "{" in location or location.lower().endswith(_TARS):
            return "webdataset"  # which says what is missing
        raise SourceError(f"{location}: cannot be opened: {error.strerror}; {_SUPPORTED}") from error
    except ValueError:
        raise SourceError(f"{location!r}: not a path; {_SUPPORTED}") from None
    if stat.S_ISDIR(mode):
        return "webdataset" if _holds_tars(location) else "image-folder"
    if stat.S_ISREG(mode) and location.lower().endswith(_TABLES):
        return "table"
    if stat.S_ISREG(mode) and location.lower().endswith(_TARS):
        return "webdataset"
    what = "not a regular file" if not stat.S_ISREG(mode) else "not told by its name what it is"
    raise SourceError(f"{location}: {what}; {_SUPPORTED}, or say --kind")


def _holds_tars(location: str) -> bool:
    try:
        with os.scandir(location) as entries:
            return any(entry.name.lower().endswith(_TARS) and not entry.name.startswith(".") for entry in entries)
    except OSError as error:
        raise SourceError(f"{location}: cannot be listed: {error.strerror}") from error
