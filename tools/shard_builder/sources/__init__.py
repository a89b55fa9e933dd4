"""Where samples come from: one module a kind of source, behind the protocol of ``base``.

Sources may import ``lfdata.errors``, ``shard_builder.fields`` and helpers of this folder (``common``, ``files``, ``options``, ...); they know
nothing of each other, of codecs or of shards.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lfdata.errors import OptionError
from shard_builder.sources.base import FieldSpec, Source
from shard_builder.sources.common import import_extra
from shard_builder.sources.detect import guess_kind

__all__ = ["KINDS", "guess_kind", "open_source", "source_from_config"]

KINDS = {
    "arrow": ("shard_builder.sources.arrow", "Arrow"),
    "coco": ("shard_builder.sources.coco", "Coco"),
    "hdf5": ("shard_builder.sources.hdf5", "Hdf5"),
    "image-folder": ("shard_builder.sources.image_folder", "ImageFolder"),
    "lerobot": ("shard_builder.sources.lerobot", "LeRobot"),
    "mds": ("shard_builder.sources.mds", "Mds"),
    "megatron": ("shard_builder.sources.megatron", "Megatron"),
    "parquet": ("shard_builder.sources.parquet", "Parquet"),
    "table": ("shard_builder.sources.table", "Table"),
    "voc": ("shard_builder.sources.voc", "Voc"),
    "webdataset": ("shard_builder.sources.webdataset", "WebDatasetSource"),
    "yolo": ("shard_builder.sources.yolo", "Yolo"),
}
# Optional libraries: the module, and the extra that brings it.
LIBRARIES = {
    "arrow": ("pyarrow.parquet", "arrow"),
    "hdf5": ("h5py", "hdf5"),
    "lerobot": ("pyarrow.parquet", "arrow"),
    "parquet": ("pyarrow.parquet", "arrow"),
    "yolo": ("yaml", "yaml"),
}


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
    if kind in LIBRARIES:
        import_extra(*LIBRARIES[kind], f"the source {kind}")
    module, name = KINDS[kind]
    source: Source = getattr(importlib.import_module(module), name)(location, fields, stage_dir, **options)
    return source
