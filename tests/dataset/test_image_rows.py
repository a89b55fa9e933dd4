"""Rows of restart-marked JPEGs, from a data set on disk: the same pixels as the whole picture's, any start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lfdata import ShardDataset
from lfdata.codecs.registry import make_encoder
from lfdata.errors import KeyMissingError, OptionError, SampleError
from lfdata.format.durable import Files
from lfdata.format.meta import MANIFEST, FieldMeta, Manifest, ShardEntry, ShardMeta, encode_manifest
from lfdata.format.writer import ShardWriter

HEIGHTS = (7, 100, 333, 64)


@pytest.fixture
def dataset(tmp_path: Path) -> ShardDataset:
    encoders = {
        "marked": make_encoder("image", {"codec": "jpeg", "restart": "rows"}),
        "plain": make_encoder("image", {"codec": "jpeg"}),
        "note": make_encoder("text", {}),
    }
    fields = tuple(FieldMeta(name, encoder.kind, encoder.params) for name, encoder in encoders.items())
    writer = ShardWriter(tmp_path / "s.lfd", fields, bytes(15) + b"\1")
    rng = np.random.default_rng(0)
    for number, height in enumerate(HEIGHTS):
        picture = np.kron(rng.integers(0, 256, (-(-height // 5), 30, 3), dtype=np.uint8), np.ones((5, 4, 1), np.uint8))[:height]
        values = {name: encoders[name].encode(picture) for name in ("marked", "plain")}
        writer.add(b"k%d" % number, {**values, "note": encoders["note"].encode("x")})
    writer.add(b"none", {"note": encoders["note"].encode("x")})
    written = writer.finish(ShardMeta(fields=fields))
    entry = ShardEntry("s.lfd", (bytes(15) + b"\1").hex(), written.rows, written.bytes, written.tail, written.sha256)
    Files().write_file(tmp_path / MANIFEST, encode_manifest(Manifest(written.rows, fields, (entry,), written.statistics)))
    return ShardDataset(tmp_path)


@pytest.mark.parametrize("index", range(len(HEIGHTS)))
def test_rows_equal_those_of_the_whole_picture(dataset: ShardDataset, index: int) -> None:
    whole = dataset[index]["marked"]
    height = HEIGHTS[index]
    for start, stop in {(0, 1), (0, height), (height // 2, height // 2 + 1), (height // 3, height), (height - 1, height)}:
        rows = dataset.read_image_rows(index, "marked", start, stop)
        assert np.array_equal(rows, whole[start:stop])
        assert rows.flags.owndata
        assert rows.flags.writeable


def test_what_cannot_be_read_by_row_is_named(dataset: ShardDataset) -> None:
    with pytest.raises(OptionError, match="restart=rows"):
        dataset.read_image_rows(0, "plain", 0, 1)
    with pytest.raises(OptionError, match="not inside a picture of 7 rows"):
        dataset.read_image_rows(0, "marked", 0, 8)
    with pytest.raises(OptionError, match="is of kind text, not image"):
        dataset.read_image_rows(0, "note", 0, 1)
    with pytest.raises(KeyMissingError, match="nothing"):
        dataset.read_image_rows(0, "nothing", 0, 1)
    with pytest.raises(SampleError, match="absent"):
        dataset.read_image_rows(-1, "marked", 0, 1)
    with pytest.raises(IndexError):
        dataset.read_image_rows(5, "marked", 0, 1)
