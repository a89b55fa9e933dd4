"""Damage of every sort: bits, truncation, appended bytes, exchanged files and sections (RELIABILITY 12)."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from hostilekit import damage_of, entries_of, is_damaged, outcome, reseal, sections_of, small_shard
from shardkit import Part, Side, add_index, identity, plain, save_manifest, scalar, write_dataset, write_shard

from lfdata.codecs.registry import make_decoder
from lfdata.dataset import ShardDataset
from lfdata.errors import ChangedError, CorruptError, FormatError, LfdataError, TruncatedError
from lfdata.format.files import LocalFile
from lfdata.format.meta import FieldMeta, Manifest, parse_manifest, read_manifest
from lfdata.format.reader import ShardFile
from lfdata.format.verify import verify_file

FIELDS = [FieldMeta("blob", "bytes", {}), FieldMeta("n", "scalar", {"dtype": "int32"})]


@functools.cache
def tiny_shard() -> bytes:
    """The smallest shard with a payload, an absent value and a key."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.lfd"
        write_shard(path, FIELDS, [(b"a", {"blob": plain(b"payload"), "n": scalar(7, "int32")}), (b"b", {})], identity("tiny"))
        return path.read_bytes()


def flip_all(raw: bytes, bits: Iterable[int]) -> int:
    """Flip each bit: reading gives a typed error or the same values, verification always finds it."""
    intact = outcome(raw)
    assert isinstance(intact, dict)
    count = 0
    damaged = bytearray(raw)
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
        found = outcome(bytes(damaged))
        assert isinstance(found, LfdataError) or found == intact, f"bit {bit} of byte {bit // 8}: other values"
        assert is_damaged(bytes(damaged)), f"bit {bit % 8} of byte {bit // 8}: not detected"
        damaged[bit // 8] ^= 1 << bit % 8
        count += 1
    return count


def fixed_parts(raw: bytes) -> list[int]:
    """Bytes of trailer, directory and the named part of the header."""
    start = len(raw) - 128 - 64 * len(entries_of(raw))
    return [*range(64), *range(4088, 4096), *range(start, len(raw))]


def test_bits_of_header_directory_and_trailer() -> None:
    raw = tiny_shard()
    assert flip_all(raw, (byte * 8 + bit for byte in fixed_parts(raw) for bit in range(8))) > 7000


@pytest.mark.parametrize("make", [tiny_shard, small_shard], ids=["tiny", "every kind"])
def test_bits_everywhere_sampled(make: functools._lru_cache_wrapper[bytes]) -> None:
    raw, rng = make(), random.Random(1)
    used = [byte for e in entries_of(raw) for byte in range(e["offset"], e["offset"] + e["length"])]
    chosen = {*rng.sample(used, 150), *rng.sample(range(len(raw)), 150)}
    flip_all(raw, (byte * 8 + rng.randrange(8) for byte in sorted(chosen)))


@pytest.mark.slow
def test_every_bit_of_a_tiny_shard() -> None:
    raw = tiny_shard()
    assert flip_all(raw, range(len(raw) * 8)) == len(raw) * 8


@pytest.mark.slow
def test_every_used_byte_of_a_shard_of_every_kind() -> None:
    raw, rng = small_shard(), random.Random(2)
    used = [byte for e in entries_of(raw) for byte in range(e["offset"], e["offset"] + e["length"])]
    flip_all(raw, (byte * 8 + rng.randrange(8) for byte in used))


def test_truncated_at_every_byte() -> None:
    raw = tiny_shard()
    for length in range(len(raw)):
        found = outcome(raw[:length])
        assert isinstance(found, FormatError), length


def test_truncated_files_are_found_on_disk(tmp_path: Path) -> None:
    raw, path = small_shard(), tmp_path / "s.lfd"
    for length in (0, 1, 4095, 4096, 4223, 4224, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:length])
        with pytest.raises((TruncatedError, CorruptError)):
            ShardFile(LocalFile(path))
        assert list(verify_file(path))


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 128, b"x" * 5000, b"LFDTRAIL" + bytes(120)])
def test_appended_bytes(extra: bytes) -> None:
    raw = small_shard()
    for changed in (raw + extra, raw + extra + raw[-128:], raw[:-128] + extra + raw[-128:]):
        assert isinstance(outcome(changed), FormatError)
        assert damage_of(changed)


def two_shards(root: Path) -> Manifest:
    """A data set of two shards of equal shape."""
    rows = [
        [(f"{s}{n}".encode(), {"blob": plain(f"payload {s}{n}".encode()), "n": scalar(n, "int32")}) for n in range(4)]
        for s in "ab"
    ]
    side = [Side([FieldMeta("more", "bytes", {})], [{"more": plain(b"more%d" % n)} for n in range(4)])]
    return write_dataset(root, FIELDS, [Part(rows[0], side), Part(rows[1], side)])


def test_exchanged_shards_are_refused(tmp_path: Path) -> None:
    first, second = two_shards(tmp_path).shards
    for one, other in (
        (first.file, second.file),
        (first.sidecars[0].file, second.sidecars[0].file),
        (first.file, first.sidecars[0].file),
    ):
        exchange(tmp_path / one, tmp_path / other)
        data = ShardDataset(tmp_path)
        with pytest.raises(ChangedError):
            data[0]
        exchange(tmp_path / one, tmp_path / other)
    assert ShardDataset(tmp_path)[5]["blob"] == b"payload b1"


def exchange(one: Path, other: Path) -> None:
    """Swap two files."""
    middle = one.with_name("middle")
    one.rename(middle)
    other.rename(one)
    middle.rename(other)


def test_sections_moved_between_shards_are_found(tmp_path: Path) -> None:
    first, second = two_shards(tmp_path).shards
    raw, donor = (tmp_path / first.file).read_bytes(), (tmp_path / second.file).read_bytes()
    assert len(raw) == len(donor)
    moved = 0
    for entry, part in zip(entries_of(raw), sections_of(donor), strict=True):
        start, stop = entry["offset"], entry["offset"] + entry["length"]
        if raw[start:stop] == part.data:
            continue
        changed = raw[:start] + part.data + raw[stop:]
        assert isinstance(outcome(changed), CorruptError), entry["type"]
        assert damage_of(changed), entry["type"]
        moved += 1
    assert moved >= 5


def test_equal_bytes_have_other_checks_in_another_shard(tmp_path: Path) -> None:
    """A row group with its directory entry, its block checks and its locators, all moved: the seed is another one."""
    rows = [(b"k", {"blob": plain(b"the same"), "n": scalar(1, "int32")})]
    for word in ("one", "two"):
        write_shard(tmp_path / word, FIELDS, rows, identity(word))
    one, two = ((tmp_path / word).read_bytes() for word in ("one", "two"))
    mixed = reseal(one[:32] + two[32:48] + one[48:-128] + one[-128:-96] + two[-96:-80] + one[-80:])
    assert isinstance(outcome(mixed), CorruptError)


def test_stale_index_is_not_used(tmp_path: Path) -> None:
    two_shards(tmp_path / "a")
    rows = [(b"%d" % n, {"blob": plain(b"other"), "n": scalar(100 + n, "int32")}) for n in range(8)]
    other = write_dataset(tmp_path / "b", FIELDS, [Part(rows)], name="another", with_index=True)
    shutil.copy(tmp_path / "b" / "index.lfi", tmp_path / "a" / "index.lfi")
    data = ShardDataset(tmp_path / "a")
    assert data.index() is None
    assert data.column("n").tolist() == [0, 1, 2, 3] * 2
    assert data.index_of("b2") == 6
    # The right shards, but another schema: as after fields were renamed in the manifest.
    renamed = Manifest(other.rows, (other.fields[0], FieldMeta("m", "scalar", {"dtype": "int32"})), other.shards)
    save_manifest(tmp_path / "b", renamed)
    assert ShardDataset(tmp_path / "b").index() is None


def test_damaged_index_is_found_and_never_gives_other_values(tmp_path: Path) -> None:
    manifest = two_shards(tmp_path)
    add_index(tmp_path, manifest)
    path, rng = tmp_path / "index.lfi", random.Random(3)
    raw = path.read_bytes()
    want = [ShardDataset(tmp_path).column(c).tolist() for c in ("n", "blob.bytes", "more.bytes")]
    used = [byte for e in entries_of(raw) for byte in range(e["offset"], e["offset"] + e["length"])]
    for byte in [*rng.sample(used, 60), *rng.sample(range(len(raw)), 30)]:
        changed = bytearray(raw)
        changed[byte] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert list(verify_file(path))
        data = ShardDataset(tmp_path)
        try:
            assert [data.column(c).tolist() for c in ("n", "blob.bytes", "more.bytes")] == want
            assert data.index_of("b2") == 6
        except CorruptError as error:
            assert error.file == str(path)


def test_manifest_bits(tmp_path: Path) -> None:
    two_shards(tmp_path)
    text = (tmp_path / "manifest.json").read_bytes()
    whole = parse_manifest("m", text)
    for byte in range(len(text)):
        for bit in (0, 3, 5):
            changed = bytearray(text)
            changed[byte] ^= 1 << bit
            try:
                found = parse_manifest("m", bytes(changed))
            except FormatError:
                continue
            assert found == whole, byte
    for length in range(len(text) - 1):
        with pytest.raises(FormatError):
            parse_manifest("m", text[:length])


def test_findings_name_section_field_and_row(tmp_path: Path) -> None:
    path = tmp_path / "s.lfd"
    raw = bytearray(small_shard())
    group = entries_of(bytes(raw))[0]
    raw[group["offset"] + group["length"] - 1] ^= 1
    raw[len(raw) // 2 - len(raw) // 2 % 4096 + 4000] ^= 1
    path.write_bytes(raw)
    found = list(verify_file(path, decoders=make_decoder, sha256="0" * 64))
    assert any(d.section == "GRUP" and d.field and d.row is not None for d in found)
    assert any(d.section == "padding" and d.offset for d in found)
    assert any(d.section == "file" and "SHA-256" in d.reason for d in found)
    assert all(str(path) in str(d) for d in found)
    assert next(verify_file(tmp_path / "none.lfd")).section == "file"


def test_verification_compares_the_identity(tmp_path: Path) -> None:
    entry = two_shards(tmp_path).shards[0]
    expect = (bytes.fromhex(entry.id), bytes(16), entry.rows)
    assert list(verify_file(tmp_path / entry.file, expect=expect, sha256=entry.sha256)) == []
    assert list(verify_file(tmp_path / entry.file, expect=(expect[0], expect[1], 3)))
    assert read_manifest(tmp_path).shards[0] == entry
