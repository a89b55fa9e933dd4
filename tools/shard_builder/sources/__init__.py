"""Where samples come from: one module a kind of source, behind the protocol of ``base``.

Sources may import ``lfdata.errors``, ``shard_builder.fields`` and helpers of this folder (``files``, ``options``); they know
nothing of each other, of codecs or of shards.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lfdata.errors import OptionError, SourceError
from shard_builder.sources.base import FieldSpec, Source

KINDS = {
    "image-folder": ("shard_builder.sources.image_folder", "ImageFolder"),
    "table": ("shard_builder.sources.table", "Table"),
    "webdataset": ("shard_builder.sources.webdataset", "WebDatasetSource"),
}
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv")
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")


def guess_kind(location: str) -> str:
    """Kind of source that a location looks like. Raises :class:`SourceError` naming what is supported."""
    lower = location.lower()
    if lower.endswith(TABLE_SUFFIXES):
        return "table"
    if lower.endswith(TAR_SUFFIXES):
        return "webdataset"
    path = Path(location)
    if not path.exists() and ("{" in location or "::" in location):
        return "webdataset"
    if path.is_dir():
        try:
            names = [name.lower() for name in os.listdir(path)]
        except OSError as error:
            raise SourceError(f"{location}: cannot be listed: {error.strerror}") from error
        return "webdataset" if any(name.endswith(TAR_SUFFIXES) for name in names) else "image-folder"
    if not path.exists():
        raise SourceError(f"{location}: no such file or directory")
    raise SourceError(
        f"{location}: not a kind of source this version knows. It takes a folder of images (with a directory a class), a table "
        f"({', '.join(TABLE_SUFFIXES)}), or WebDataset tars ({', '.join(TAR_SUFFIXES)}, brace patterns, a folder of tars)"
    )


def open_source(location: str, *, kind: str | None = None, fields: Sequence[FieldSpec] | None = None, **options: str) -> Source:
    """The source at ``location``; its kind is guessed unless given. ``options`` are the source's own, as text.

    Raises:
        SourceError: missing, unreadable or of no known kind. OptionError: an option or field that makes no sense.
    """
    return _make(kind or guess_kind(location), location, fields, None, options)


def source_from_config(config: Mapping[str, Any], stage_dir: Path) -> Source:
    """The same source in a worker process."""
    fields = None if config["fields"] is None else [FieldSpec(**spec) for spec in config["fields"]]
    return _make(config["kind"], config["location"], fields, stage_dir, config["options"])


def _make(
    kind: str, location: str, fields: Sequence[FieldSpec] | None, stage_dir: Path | None, options: Mapping[str, str]
) -> Source:
    if kind not in KINDS:
        raise OptionError(f"unknown kind of source {kind!r}; valid: {', '.join(KINDS)}")
    module, name = KINDS[kind]
    source: Source = getattr(importlib.import_module(module), name)(location, fields, stage_dir, **options)
    return source
