"""Golden data sets: unchanged, read alike by two readers, and still what today's writer makes of the same values."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from independent_reader import DataSetReader, Image, ShardReader
from shardkit import GROUP_BYTES, add_index
from xxh3_pure import xxh3 as pure_xxh3

from lfdata.codecs.base import Encoded
from lfdata.codecs.registry import make_decoder
from lfdata.dataset import ShardDataset
from lfdata.format.meta import FieldMeta, ShardMeta, encode_manifest, read_manifest
from lfdata.format.verify import verify_file
from lfdata.format.writer import ShardWriter

GOLDEN = Path(__file__).parents[1] / "golden"
SETS = sorted(path for version in GOLDEN.glob("v*") for path in version.iterdir() if path.is_dir())
FILES = sorted(path for root in SETS for path in root.glob("*.lf?"))


def name(path: Path) -> str:
    """Test id of a path."""
    return str(path.relative_to(GOLDEN))


def test_files_are_the_listed_ones() -> None:
    assert SETS
    for version in GOLDEN.glob("v*"):
        listed = dict(line.split("  ")[::-1] for line in (version / "SHA256SUMS").read_text().splitlines())
        found = {
            str(p.relative_to(version)): hashlib.sha256(p.read_bytes()).hexdigest() for p in version.rglob("*") if p.is_file()
        }
        del found["SHA256SUMS"]
        assert found == listed


def same(ours: Any, theirs: Any) -> bool:
    """Whether the package's value is the independent reader's."""
    if isinstance(theirs, tuple):
        return ours.rate == theirs[1] and np.array_equal(ours.samples, theirs[0])
    if isinstance(theirs, np.ndarray):
        return bool(
            ours.dtype == theirs.dtype.newbyteorder("=") and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
        )
    if isinstance(theirs, float) and theirs != theirs:
        return bool(ours != ours)
    return type(theirs)(ours) == theirs if isinstance(ours, np.generic) else bool(ours == theirs)


@pytest.mark.parametrize("root", SETS, ids=name)
def test_both_readers_agree_on_every_value(root: Path) -> None:
    theirs = list(DataSetReader(root).samples())
    data = ShardDataset(root)
    stored = data.read_many(range(len(data)), decode=False)
    assert len(data) == len(theirs)
    for row, (mine, sample) in enumerate(zip(data, theirs, strict=True)):
        assert mine.keys() == sample.keys()
        for field, value in sample.items():
            if isinstance(value, Image):
                width, height, channels = (value.sizes[role] for role in ("width", "height", "channels"))
                assert stored[field][row].tobytes() == value.payload
                assert mine[field].shape == (height, width, channels)
                if value.sizes["codec"] == 4:
                    assert mine[field].tobytes() == value.payload
            else:
                assert (mine[field] is None) if value is None else same(mine[field], value), (row, field)
        assert data.index_of(sample["__key__"]) == row


@pytest.mark.parametrize("root", SETS, ids=name)
def test_columns_agree(root: Path) -> None:
    other, data = DataSetReader(root), ShardDataset(root)
    for column in data.columns:
        field, _, role = column.rpartition(".") if column not in data.schema else (column, "", "value")
        parts = []
        for number in range(len(other.shards)):
            home = other.home(field, number)
            parts.append(home.columns[home.fields[field][0], role])
        assert np.concatenate(parts).tobytes() == data.column(column).tobytes()
        if other.index:
            assert np.array_equal(other.index.columns[other.index.fields[field][0], role], data.column(column), equal_nan=True)
    assert (data.index() is not None) == (other.index is not None)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_full_verification_finds_nothing(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert list(verify_file(path, sha256=digest, decoders=make_decoder)) == []


def values_of(shard: ShardReader, row: int) -> dict[str, Encoded]:
    """A row as the writer takes it, from the independent reader."""
    values = {}
    for field, (number, kind, params) in shard.fields.items():
        if not shard.present(number, row):
            continue
        if kind == "scalar":
            values[field] = Encoded(shard.columns[number, "value"][row].tobytes())
            continue
        sizes = {role: int(c[row]) for (n, role), c in shard.columns.items() if n == number and role not in ("dims", "aux")}
        if kind == "array":
            sizes["dims"] = tuple(shard.columns[number, "dims"][row].tolist())
        aux = np.array(shard._aux(number, row), "<u8") if kind == "image" and shard._aux(number, row) else None
        values[field] = Encoded(shard.payload(number, kind, params, row), sizes, aux)
    return values


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".lfd"], ids=name)
def test_todays_writer_makes_the_same_bytes(path: Path, tmp_path: Path) -> None:
    shard = ShardReader(path)
    fields = [FieldMeta(field, kind, params) for field, (_, kind, params) in shard.fields.items()]
    dictionaries = {fields[s.field].name: s.data for s in shard.sections if s.type == "DICT"}
    group_bytes = shard.meta["provenance"]["options"]["group_bytes"]
    assert group_bytes == GROUP_BYTES
    writer = ShardWriter(tmp_path / "again.lfd", fields, shard.shard_id, shard.part_id, dictionaries, group_bytes)
    for row in range(shard.rows):
        writer.add(shard.keys[row] if shard.keys else b"", values_of(shard, row))
    writer.finish(msgspec.convert(shard.meta, ShardMeta))
    assert (tmp_path / "again.lfd").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("root", SETS, ids=name)
def test_manifest_and_index_are_rewritten_alike(root: Path, tmp_path: Path) -> None:
    manifest = read_manifest(root)
    assert encode_manifest(manifest) == (root / "manifest.json").read_bytes()
    if (root / "index.lfi").exists():
        for file in root.iterdir():
            if file.suffix != ".lfi":
                (tmp_path / file.name).symlink_to(file)
        add_index(tmp_path, manifest)
        assert (tmp_path / "index.lfi").read_bytes() == (root / "index.lfi").read_bytes()


def test_the_sets_hold_what_they_should() -> None:
    """The cases the golden files stand for are really in them."""
    mixed = DataSetReader(GOLDEN / "v1.0" / "mixed")
    base = mixed.shards[0][0]
    assert {kind for _, kind, _ in base.fields.values()} == {
        "image",
        "audio",
        "json",
        "array",
        "text",
        "bytes",
        "tokens",
        "scalar",
    }
    assert len(base.groups) > 2 and mixed.shards[1][0].rows == 0 and len(mixed.shards) == 3 and mixed.index
    assert any(s.type == "DICT" for s in base.sections)
    samples = list(mixed.samples())
    assert any(s["rows"] and len(s["rows"].row_offsets) > 1 for s in samples) and any(s["caption"] is None for s in samples)
    assert any(s["blob"] == b"" for s in samples) and all(
        s["caption"] is None or s["caption"].startswith("better") for s in samples
    )
    number = base.fields["picture"][0]
    locators = np.frombuffer(base._one("LOCR", number).data, "<u8")[::2].tolist()
    assert len(set(locators)) < len([x for x in locators if x]), "no payload is shared"
    assert len(ShardReader(next((GOLDEN / "v1.0" / "large").glob("*.lfd")))._one("KEYS").data) > 65536


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, 0x0123456789ABCDEF])
def test_the_written_out_hash_is_the_librarys(seed: int) -> None:
    rng = np.random.default_rng(5)
    for length in [*range(300), 511, 512, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 5000, 65536, 70001]:
        data = rng.bytes(length)
        assert pure_xxh3(data, seed) == xxhash.xxh3_64_intdigest(data, seed), length
