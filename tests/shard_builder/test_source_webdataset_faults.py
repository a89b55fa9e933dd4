"""Damaged, cut and hostile tars: a named error at the right place, complete samples before it, never half a sample."""

from __future__ import annotations

import gzip
import os
import tarfile
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
from tarkit import BYTES, everything, header, pairs, source, tar_bytes, write

from lfdata.errors import SampleError, SourceError
from shard_builder.sources.base import BadRecord, FieldSpec, Record

WHOLE = tar_bytes(pairs(4, 700))
SAMPLES = {f"{n:04d}".encode(): {x: f"{n}{x}".encode().ljust(700, b".") for x in "ab"} for n in range(4)}


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def codes(bad: list[BadRecord]) -> list[str]:
    return [record.code for record in bad]


@pytest.mark.parametrize("at", [*range(512, len(WHOLE), 512), 1, 511, 513, 1500, len(WHOLE) - 1, len(WHOLE) - 513])
def test_cut_anywhere_gives_whole_samples_and_an_error_or_a_warning(tmp_path: Path, at: int) -> None:
    opened = source(put(tmp_path / "cut.tar", WHOLE[:at]), BYTES)
    samples, bad = everything(opened, tmp_path)
    complete = sum(at >= 2 * 1536 * (n + 1) for n in range(4))
    assert samples == dict(list(SAMPLES.items())[:complete])
    if at < len(WHOLE) - 1024 and at % (2 * 1536):
        assert codes(bad) == ["truncated"]
        assert bad[0].path.startswith("cut.tar")
        assert "byte" in bad[0].path
        if at >= 512 + 2 * 1536 * complete:
            assert bad[0].key == f"{complete:04d}".encode()
    elif at % 512 == 0 and at <= len(WHOLE) - 1024:
        assert not bad
        assert "end-of-archive" in " ".join(opened.notes()["warnings"])
    assert all(record.code == "truncated" for record in bad)


def test_no_end_blocks_as_the_option_says(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", pairs(2), end=False)
    for choice, good in (("accept", 2), ("check", 2), ("error", 1)):
        opened = source(path, BYTES, no_end=choice)
        samples, bad = everything(opened, tmp_path)
        assert len(samples) == good
        assert codes(bad) == ["truncated"] * (2 - good)
        assert bool(opened.notes()["warnings"]) == (good == 2)
    short = put(tmp_path / "half.tar", tar_bytes(pairs(2)[:3], end=False))
    samples, bad = everything(source(short, BYTES), tmp_path)
    assert ([*samples], codes(bad), bad[0].key) == ([b"0000"], ["truncated"], b"0001")


@pytest.mark.parametrize("at", [0, 100, 1536 * 3, 1536 * 5 + 130, len(WHOLE) - 1024])
def test_a_damaged_header_ends_the_tar_with_an_error(tmp_path: Path, at: int) -> None:
    data = bytearray(WHOLE)
    data[at] ^= 0x55
    samples, bad = everything(source(put(tmp_path / "t.tar", bytes(data)), BYTES), tmp_path)
    # What stood in place of the damaged header may have been one more member of the sample before it: that sample is bad too.
    assert samples == dict(list(SAMPLES.items())[: max(0, (at - 1) // (1536 * 2))])
    assert bad
    assert bad[-1].code in ("tar-header", "trailing-data")
    assert bad[-1].path.startswith("t.tar: byte ")


def test_data_after_the_end_is_no_silent_loss(tmp_path: Path) -> None:
    samples, bad = everything(source(put(tmp_path / "t.tar", WHOLE + tar_bytes([("more.a", b"x")])), BYTES), tmp_path)
    assert samples == SAMPLES
    assert codes(bad) == ["trailing-data"]


def test_zeros_after_the_end_are_padding(tmp_path: Path) -> None:
    samples, bad = everything(source(put(tmp_path / "t.tar", WHOLE + bytes(10240)), BYTES), tmp_path)
    assert samples == SAMPLES
    assert not bad


def test_no_samples(tmp_path: Path) -> None:
    empty = put(tmp_path / "e.tar", tar_bytes([]))
    assert list(source(empty, BYTES).scan()) == []
    with pytest.raises(SourceError, match="no sample"):
        source(empty)
    nothing = put(tmp_path / "n.tar", b"")
    assert codes([r for r in source(nothing, BYTES).scan() if isinstance(r, BadRecord)]) == ["empty-file"]
    with pytest.raises(SourceError):
        source(tmp_path / "missing.tar", BYTES)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(SourceError, match=r"no \.tar"):
        source(folder, BYTES)


@pytest.mark.parametrize("data", [b"hello", b"\x89PNG\r\n" * 200, bytes(range(256)) * 40, b"PK\x03\x04" + bytes(1000)])
def test_a_file_that_is_no_tar(tmp_path: Path, data: bytes) -> None:
    found = list(source(put(tmp_path / "x.tar", data), BYTES).scan())
    assert len(found) == 1
    assert isinstance(found[0], BadRecord)
    assert found[0].code in ("tar-header", "truncated")


def test_a_pointer_and_a_pipe_in_place_of_a_tar(tmp_path: Path) -> None:
    pointer = put(tmp_path / "p.tar", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    (record,) = source(pointer, BYTES).scan()
    assert isinstance(record, BadRecord)
    assert record.code == "lfs-pointer"
    assert "git lfs pull" in record.reason
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(SourceError, match="regular"):
        source(tmp_path / "pipe.tar", BYTES)


# -- compressed ---------------------------------------------------------------------------------------------------------

PACKED = gzip.compress(WHOLE, mtime=0)
NOISE = [(f"{n}.a", bytes((n * 7 + k * k) % 251 for k in range(3000))) for n in range(6)]


def stored(data: bytes) -> bytes:
    """Gzip without compression, so that a cut in the file is a cut in the tar."""
    return gzip.compress(data, 0, mtime=0)


@pytest.mark.parametrize("name", ["t.tar.gz", "t.tgz", "t.tar"])
def test_a_compressed_tar_is_read_as_a_plain_one(tmp_path: Path, name: str) -> None:
    middle = len(WHOLE) // 2
    for data in (PACKED, gzip.compress(WHOLE[:middle]) + gzip.compress(WHOLE[middle:])):
        stage = tmp_path / "stage"
        stage.mkdir(exist_ok=True)
        opened = source(put(tmp_path / name, data), BYTES)
        assert everything(opened, stage) == (SAMPLES, [])
        before = [path.stat().st_mtime_ns for path in stage.rglob("*")]
        opened.stage(0, stage)
        assert [path.stat().st_mtime_ns for path in stage.rglob("*")] == before
        opened.unstage(0, stage)
        assert not list(stage.rglob("*"))


@pytest.mark.parametrize("at", [*range(18, len(stored(WHOLE)), 700), len(stored(WHOLE)) - 9, len(stored(WHOLE)) - 1])
def test_a_truncated_gzip_keeps_the_samples_before_the_cut(tmp_path: Path, at: int) -> None:
    opened = source(put(tmp_path / "t.tar.gz", stored(WHOLE)[:at]), BYTES)
    samples, bad = everything(opened, tmp_path)
    assert codes(bad) in (["truncated"], ["truncated", "truncated"])  # the sample that is cut, and the tar
    count = len(samples)
    assert samples == dict(list(SAMPLES.items())[:count])
    # Headers of gzip take a few bytes; a sample that lies wholly before the cut is there unless its end is the cut.
    assert count >= max(0, (at - 30) // (1536 * 2) - 1)


def test_gzip_faults_are_named(tmp_path: Path) -> None:
    wrong_crc = bytearray(PACKED)
    wrong_crc[-8] ^= 1
    # Stored, not deflated: a wrong byte is a wrong byte of some sample, and only the checksum knows.
    wrong_byte = gzip.compress(gzip.decompress(PACKED), 0, mtime=0)
    wrong_byte = wrong_byte[:600] + bytes([wrong_byte[600] ^ 1]) + wrong_byte[601:]
    for data, code, good in (
        (wrong_byte, "gzip-crc", 0),
        (bytes(wrong_crc), "gzip-crc", 0),
        (PACKED + b"garbage", "trailing-data", 4),
        (PACKED + bytes(512), "", 4),
        (PACKED[:20] + bytes(20) + PACKED[40:], "gzip", 0),
        (b"\x1f\x8b", "truncated", 0),
        (b"\x1f\x8b\x01" + bytes(50), "gzip", 0),
    ):
        samples, bad = everything(source(put(tmp_path / "t.tgz", data), BYTES), tmp_path)
        assert set(codes(bad)) == ({code} if code else set()), data[:30]
        assert len(bad) == (1 + len(SAMPLES) if code == "gzip-crc" else 1 if code else 0)
        assert samples == dict(list(SAMPLES.items())[:good])
        for path in tmp_path.rglob("unit*"):
            path.unlink()


def test_a_compressed_tar_must_be_staged(tmp_path: Path) -> None:
    opened = source(put(tmp_path / "t.tgz", PACKED), BYTES)
    first = next(iter(opened.scan()))
    assert isinstance(first, Record)
    with pytest.raises(SampleError) as found:
        opened.load(first.locator)
    assert found.value.code in ("unstaged", "unreadable")


def test_a_bomb_is_bounded_in_memory_and_bytes(tmp_path: Path) -> None:
    packer = zlib.compressobj(9, wbits=31)
    info = tarfile.TarInfo("bomb.a")
    info.size = 256 << 20
    path = tmp_path / "bomb.tgz"
    with open(path, "wb") as file:
        file.write(packer.compress(info.tobuf()))
        for _ in range(256):
            file.write(packer.compress(bytes(1 << 20)))
        file.write(packer.compress(bytes(1024)) + packer.flush())
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    opened = source(path, BYTES[:1], max_unpacked_bytes="16M")
    (record,) = opened.scan()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(record, BadRecord)
    assert (record.key, record.code) == (b"bomb", "too-large")
    assert peak < 16 << 20


# -- headers that lie -------------------------------------------------------------------------------------------------------


def with_size(name: str, size: int, kind: bytes = b"0") -> bytes:
    """A header whose size may be anything."""
    block = bytearray(header(name, kind).tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (
        b"%011o\0" % size if 0 <= size < 8**11 else bytes([0xFF if size < 0 else 0x80]) + size.to_bytes(11, "big", signed=True)
    )
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("kind", [b"0", b"x", b"g", b"L", b"K", b"S", b"5", b"2", b"Z"])
@pytest.mark.parametrize("size", [-1, -(1 << 60), 10**9, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_sizes_that_cannot_be(tmp_path: Path, kind: bytes, size: int) -> None:
    path = put(
        tmp_path / "t.tar",
        tar_bytes([("ok.a", b"fine"), ("pre.a", b"unsure")], end=False) + with_size("k.a", size, kind) + bytes(4096),
    )
    tracemalloc.start()
    started = time.monotonic()
    opened = source(path, BYTES[:1])
    samples, bad = everything(opened, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert samples.pop(b"ok") == {"a": b"fine"}
    assert b"k" not in samples
    assert bad or opened.notes()["warnings"] or kind == b"5"  # a directory has no data, whatever its header says
    assert all(code in ("tar-header", "truncated", "sparse", "too-large") for code in codes(bad))
    assert peak < 8 << 20
    assert time.monotonic() - started < 5


def test_a_sparse_member_spoils_only_its_sample(tmp_path: Path) -> None:
    info = tarfile.TarInfo("k.a")
    info.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[386:398] = b"%011o\0" % 0
    block[483:495] = b"%011o\0" % (1 << 30)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    data = tar_bytes([("j.a", b"1"), ("k.b", b"2")], end=False) + bytes(block) + tar_bytes([("l.a", b"3"), ("l.b", b"4")])
    samples, bad = everything(source(put(tmp_path / "t.tar", data), BYTES), tmp_path)
    assert [*samples] == [b"j", b"l"]
    assert [(record.key, record.code) for record in bad] == [(b"k", "sparse")]


def test_a_sparse_member_in_pax_form(tmp_path: Path) -> None:
    for headers in (
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "k.a", "GNU.sparse.realsize": str(1 << 40)},
        {"GNU.sparse.size": str(1 << 40), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,4"},
    ):
        info = tarfile.TarInfo("k.a")
        info.pax_headers = headers
        data = tar_bytes([("i.a", b"0"), ("j.a", b"1")], end=False) + tar_bytes([info], end=False) + tar_bytes([("l.a", b"3")])
        samples, bad = everything(source(put(tmp_path / "t.tar", data), BYTES[:1]), tmp_path)
        assert b"k" not in samples
        assert samples[b"i"] == {"a": b"0"}
        assert bad
        assert bad[0].code in ("sparse", "tar-header")


def test_many_headers_do_not_grow_memory_by_what_they_hold(tmp_path: Path) -> None:
    count = 3_000
    template = bytearray(tar_bytes([("00000000.a", b"x")], end=False))
    path = tmp_path / "t.tar"
    with open(path, "wb") as file:
        for n in range(count):
            template[:8] = b"%08d" % n
            template[148:156] = b" " * 8
            template[148:156] = b"%06o\0 " % sum(template[:512])
            file.write(template)
        file.write(bytes(1024))
    opened = source(path, [FieldSpec("a", "bytes", "a")])
    tracemalloc.start()
    assert sum(isinstance(record, Record) for record in opened.scan()) == count
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20
