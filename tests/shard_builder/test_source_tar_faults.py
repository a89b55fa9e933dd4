"""Damaged, cut and hostile tars: typed outcomes, bounded time and memory, whole samples or none."""

from __future__ import annotations

import gzip
import random
import resource
import signal
import tarfile
import time
from pathlib import Path

import pytest
from _tars import END, header, open_source, padded, scan, special, tar_bytes, values, write

from lfdata.errors import DiskFullError, SampleError, SourceError
from shard_builder.fields import parse_field
from shard_builder.sources.base import Source

PAIR = [parse_field("image:image=jpg"), parse_field("text:text=txt")]
SAMPLES = {b"%d" % n: {"image": bytes([n]) * (300 * n), "text": b"%d" % n} for n in range(1, 5)}
ENTRIES = [(f"{n}.{e}", SAMPLES[b"%d" % n][f]) for n in range(1, 5) for e, f in (("jpg", "image"), ("txt", "text"))]
TAR = tar_bytes(ENTRIES)


def outcome(source: Source, work: Path) -> tuple[int, list[str], list[str]]:
    """Number of whole samples, codes of bad ones, warnings; every good sample is checked against the original."""
    _, bad = scan(source)
    found = values(source, work)
    for key, sample in found.items():
        assert sample == SAMPLES[key]
    assert list(found) == list(SAMPLES)[: len(found)]
    return len(found), [b.code for b in bad], source.notes()["warnings"]


def test_a_tar_cut_anywhere_gives_the_samples_before_the_cut_and_says_where_it_ends(tmp_path: Path) -> None:
    ends = [TAR.index(b"%d.jpg\0" % n) for n in range(2, 5)] + [len(TAR.rstrip(b"\0")) // 512 * 512 + 512]
    for cut in sorted({at + d for at in range(512, len(TAR), 512) for d in (-1, 0, 1)}):
        source = open_source(write(tmp_path, TAR[:cut]), fields=PAIR)
        whole, codes, warnings = outcome(source, tmp_path / "w")
        if cut > ends[-1]:
            assert (whole, codes, warnings) == (4, [], []), cut
        elif cut in ends:
            assert (whole, codes) == (ends.index(cut) + 1, []), cut
            assert "without its end" in warnings[0]
        elif any(0 < cut - end < 512 for end in ends):
            # Cut in a header, whose name might have been another member of the sample before it.
            assert (whole, codes) == (sum(end <= cut for end in ends) - 1, ["truncated"]), cut
        else:
            before = sum(end <= cut for end in ends)
            # Cut in the last data's padding, everything that was meant to be there is there.
            assert whole in (before, before + 1), cut
            assert whole > before or codes == ["truncated"], cut
            assert whole == before or "without its end" in warnings[0], cut


def test_a_missing_end_can_be_an_error_or_accepted(tmp_path: Path) -> None:
    last = TAR.index(b"4.txt\0")
    path = write(tmp_path, TAR[:last])
    for policy, whole, codes in (("check", 3, ["truncated"]), ("error", 3, ["truncated"])):
        assert outcome(open_source(path, fields=PAIR, no_end=policy), tmp_path / "w")[:2] == (whole, codes)
    records, bad = scan(open_source(path, fields=PAIR, no_end="accept"))
    assert (len(records), bad) == (4, [])
    complete = write(tmp_path, TAR[: len(TAR.rstrip(b"\0")) // 512 * 512 + 512], "b.tar")
    assert outcome(open_source(complete, fields=PAIR, no_end="error"), tmp_path / "w")[:2] == (3, ["truncated"])


def test_a_bad_record_of_a_cut_sample_names_tar_key_and_offset(tmp_path: Path) -> None:
    cut = TAR.index(b"3.jpg\0") + 512 + 100
    records, bad = scan(open_source(write(tmp_path, TAR[:cut], "shard-7.tar"), fields=PAIR))
    assert len(records) == 2
    assert bad[0].key == b"3"
    assert bad[0].path.startswith("shard-7.tar: byte ")
    assert "byte " in bad[0].reason


def test_a_compressed_tar_cut_anywhere_never_passes_silently(tmp_path: Path) -> None:
    data = gzip.compress(TAR, mtime=0)
    wholes = []
    for cut in [*range(0, len(data), 7), *range(len(data) - 12, len(data))]:
        source = open_source(write(tmp_path, data[:cut], "a.tgz"), fields=PAIR)
        whole, codes, _ = outcome(source, tmp_path / "w")
        assert codes, cut
        assert set(codes) <= {"truncated", "empty-file", "gzip", "tar-header"}, (cut, codes)
        wholes.append(whole)
    assert wholes == sorted(wholes)
    assert wholes[-1] >= 3


@pytest.mark.parametrize("cut", [2600, 4000, 6000])
def test_several_tars_go_on_after_one_that_is_cut(tmp_path: Path, cut: int) -> None:
    write(tmp_path, TAR[:cut], "0.tar")
    write(tmp_path, tar_bytes([("x.jpg", b"x"), ("x.txt", b"x")]), "1.tar")
    records, bad = scan(open_source(str(tmp_path), fields=PAIR))
    assert records[-1].key == b"x"
    assert [b.code for b in bad] == ["truncated"]


def test_gzip_damage_is_named_and_samples_before_it_stay(tmp_path: Path) -> None:
    data = gzip.compress(TAR, mtime=0)
    crc = data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]
    length = data[:-1] + b"\x7f"
    for damaged, good, codes in (
        (crc, 0, ["gzip-crc"] * 5),
        (length, 0, ["gzip-crc"] * 5),
        (data + b"garbage", 4, ["trailing-data"]),
    ):
        source = open_source(write(tmp_path, damaged, "a.tgz"), fields=PAIR)
        assert outcome(source, tmp_path / "w")[:2] == (good, codes)
    middle = bytearray(data)
    middle[len(data) // 2 : len(data) // 2 + 8] = bytes(8)
    source = open_source(write(tmp_path, bytes(middle), "a.tgz"), fields=PAIR)
    assert scan(source)[1]


def test_data_after_the_end_is_reported_and_not_read(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, TAR + TAR), fields=PAIR)
    assert outcome(source, tmp_path / "w")[:2] == (4, ["trailing-data"])
    assert outcome(open_source(write(tmp_path, TAR + bytes(1 << 20)), fields=PAIR), tmp_path / "w")[:2] == (4, [])


def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(tmp_path: Path) -> None:
    at = TAR.index(b"3.jpg\0")
    damaged = bytearray(TAR)
    damaged[at + 150] ^= 1  # its checksum
    whole, codes, _ = outcome(open_source(write(tmp_path, bytes(damaged)), fields=PAIR), tmp_path / "w")
    assert codes
    assert set(codes) == {"tar-header"}
    assert whole in (1, 2)


def limits_hold(path: str) -> list[str]:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    records, bad = scan(open_source(path, fields=PAIR))
    assert not records
    assert time.monotonic() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    return [b.code for b in bad]


@pytest.mark.parametrize("type_", [b"x", b"g", b"L", b"K", b"X"])
@pytest.mark.parametrize("size", [1 << 20, 1 << 33, 1 << 60, -512, -(1 << 40)])
def test_extended_headers_of_absurd_size_are_refused_without_allocating(tmp_path: Path, type_: bytes, size: int) -> None:
    path = tmp_path / "a.tar"
    with open(path, "wb") as file:
        file.write(header("h", size, type_) + header("a.txt", 0))
        file.truncate(8 << 30)  # as large as a claim may be, and sparse
    assert limits_hold(str(path)) == ["tar-header"]


@pytest.mark.parametrize(
    "body",
    [
        b"2 " * 30000,  # quadratic for a pattern that looks for "="
        b"1" * 60000,
        b"60000 comment=" + b"1" * 59985 + b"\n",
        b"0 a=b\n",
        b"99999999999 path=x\n",
        b"12 path=ab\n" * 5,
        b"18 size=-1000000\n",
        b"22 GNU.sparse.map=1,x\n",
        b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n",
    ],
)
def test_hostile_extended_headers_end_in_a_bad_record_quickly(tmp_path: Path, body: bytes) -> None:
    path = write(tmp_path, header("h", len(body), b"x") + padded(body) + header("a.txt", 1) + padded(b"x") + END)
    codes = limits_hold(path)
    assert codes
    assert set(codes) <= {"tar-header", "truncated", "sparse"}


def test_chains_of_headers_and_sparse_maps_are_bounded(tmp_path: Path) -> None:
    chain = b"".join(header("l", 2, b"L") + padded(b"n\0") for _ in range(3000)) + header("a.txt", 0)
    assert limits_hold(write(tmp_path, chain + END)) == ["tar-header"]
    first = bytearray(header("s.txt", 0, b"S"))
    first[482] = 1  # more of the map follows
    first[148:156] = b" " * 8
    first[148:156] = b"%06o\0 " % sum(first)
    extension = (b"00000000001\0" * 42)[:504] + b"\1" + bytes(7)
    assert limits_hold(write(tmp_path, bytes(first) + extension * 20000)) == ["tar-header"]
    many = b"".join(header("g", 20, b"g") + padded(b"20 comment%06d=x\n" % n) for n in range(1500))
    assert limits_hold(write(tmp_path, many + END)) == ["tar-header"]


def test_members_of_huge_or_negative_size_are_refused(tmp_path: Path) -> None:
    for size in (1 << 40, (1 << 62), -1, -(1 << 30)):
        path = write(tmp_path, header("a.txt", size) + padded(b"x") + END)
        assert set(limits_hold(path)) <= {"truncated", "tar-header"}


def test_too_many_members_of_one_key_are_a_bad_sample(tmp_path: Path) -> None:
    data = tar_bytes([(f"a.{n}", b"") for n in range(5000)] + [("b.txt", b"x")])
    records, bad = scan(open_source(write(tmp_path, data), fields=PAIR[1:]))
    assert [r.key for r in records] == [b"b"]
    assert [(b.key, b.code) for b in bad] == [(b"a", "too-many-members")]


def test_every_kind_of_sparse_member_is_refused(tmp_path: Path) -> None:
    out = []
    for number, version in enumerate(("0.0", "0.1", "1.0")):
        pax = {"0.0": {"GNU.sparse.size": "9", "GNU.sparse.numblocks": "0"}, "0.1": {"GNU.sparse.map": "0,1"}}.get(
            version, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
        )
        info = special(f"s{number}.txt", b"0")
        info.pax_headers = pax
        info.size = 512
        out.append(info.tobuf(tarfile.PAX_FORMAT) + padded(b"0\n"))
    records, bad = scan(open_source(write(tmp_path, b"".join(out) + END), fields=PAIR[1:]))
    assert records == []
    assert [b.code for b in bad] == ["sparse"] * 3


def test_a_bomb_is_read_in_bounded_memory_up_to_its_limit(tmp_path: Path) -> None:
    size = 1 << 28
    path = tmp_path / "bomb.tgz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(tar_bytes([("1.jpg", SAMPLES[b"1"]["image"]), ("1.txt", b"1")])[: 4 * 512])
        file.write(header("2.jpg", size))
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = open_source(str(path), fields=PAIR, max_unpacked_bytes="64M")
    assert outcome(source, tmp_path / "w")[:2] == (1, ["too-large"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 96 << 10


def test_a_full_disk_while_staging_is_typed_and_leaves_nothing(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, gzip.compress(tar_bytes([("a.txt", bytes(1 << 20))])), "a.tgz"), fields=PAIR[1:])
    records, _ = scan(source)
    work = tmp_path / "w"
    work.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(DiskFullError):
            source.stage(0, work)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list(work.iterdir())
    with pytest.raises(SampleError):
        source.load(records[0].locator)


def test_random_damage_never_gives_anything_but_records(tmp_path: Path) -> None:
    rng = random.Random(5)
    base = tar_bytes([*ENTRIES, ("é" * 80 + ".txt", b"x")], tarfile.PAX_FORMAT)
    for number in range(400):
        data = bytearray(base)
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(len(data))
            if rng.random() < 0.8:
                at = at // 512 * 512 + rng.choice((0, 100, 108, 116, 124, 130, 135, 136, 148, 156, 157, 257, 263, 345, 482))
            data[min(at, len(data) - 1)] = rng.randrange(256)
            if rng.random() < 0.7:  # with a checksum that holds, the parser believes the rest
                block = at // 512 * 512
                data[block + 148 : block + 156] = b" " * 8
                data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])
        source = open_source(write(tmp_path, bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])), fields=PAIR)
        try:
            keys = [record.key for record in source.scan()]
        except SourceError as error:
            assert "no sample has a member" in str(error), number
            continue
        assert len(keys) <= 12, number
