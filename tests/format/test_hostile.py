"""Files with every check recomputed that lie all the same (RELIABILITY 13, 14): typed error or bounded, never a crash or a bomb."""

from __future__ import annotations

import functools
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hostilekit import (
    Section,
    change_column,
    change_meta,
    damage_of,
    entries_of,
    outcome,
    rebuild,
    reseal,
    seed_of,
    small_shard,
)
from shardkit import Part, scalar, write_dataset

from lfdata.errors import CorruptError, FormatError, LfdataError, LimitError, VersionError
from lfdata.format import layout
from lfdata.format.files import LocalFile
from lfdata.format.meta import FieldMeta, Manifest, decode_json
from lfdata.format.reader import ShardFile

VALUES = (0, 1, 2**63 - 1, 2**63, 2**64 - 1)
HEADER_64 = {"required": 16, "optional": 24, "shard id low": 32, "shard id high": 40, "part id low": 48, "part id high": 56}
TRAILER_64 = {"rows": 64, "directory offset": 72, "directory entries": 80, "directory check": 88, "file size": 96,
              "header check": 104, "zero": 112}  # fmt: skip
ENTRY_64 = {"offset": 16, "length": 24, "count": 32, "check": 40, "first": 48, "zero": 56}
MEMORY, SECONDS = 24 << 20, 1.0


@functools.cache
def shard() -> bytes:
    """The shard that is tampered with."""
    return small_shard()


@functools.cache
def intact() -> Any:
    """Its values."""
    return outcome(shard())


def bounded(raw: bytes, *, verify: bool = True) -> dict[str, Any] | LfdataError:
    """The outcome, with time and memory measured."""
    tracemalloc.start()
    begun = time.perf_counter()
    try:
        found = outcome(raw, verify=verify)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY + 3 * len(raw), f"{peak} bytes allocated"
    assert time.perf_counter() - begun < SECONDS * 5
    return found


def header_cases() -> Iterator[tuple[str, bytes]]:
    """Every 64-bit field of header, trailer and directory with every value."""
    raw = shard()
    at = len(raw) - 128
    for value in VALUES:
        word = struct.pack("<Q", value)
        for name, offset in HEADER_64.items():
            changed = bytearray(raw)
            changed[offset : offset + 8] = changed[at + offset : at + offset + 8] = word
            yield f"header {name} = {value}", reseal(changed)
        for name, offset in TRAILER_64.items():
            changed = bytearray(raw)
            changed[at + offset : at + offset + 8] = word
            yield f"trailer {name} = {value}", seal_trailer(changed)
    start = struct.unpack_from("<Q", raw, at + 72)[0]
    for number, entry in enumerate(entries_of(raw)):
        for name, offset in ENTRY_64.items():
            for value in VALUES:
                if value != entry[name]:
                    changed = bytearray(raw)
                    struct.pack_into("<Q", changed, start + 64 * number + offset, value)
                    yield f"entry {number} {entry['type'].decode()} {name} = {value}", reseal(changed)


def seal_trailer(raw: bytearray) -> bytes:
    """Only the trailer's own check anew, so that its other fields stay what they were set to."""
    raw[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(raw[-128:-8])))
    return bytes(raw)


def test_every_64_bit_field_with_recomputed_checks() -> None:
    cases = list(header_cases())
    assert len(cases) > 1000
    refused = 0
    for name, raw in cases:
        found = bounded(raw, verify=False)
        assert isinstance(found, FormatError) or found == intact(), name
        refused += isinstance(found, FormatError)
    assert refused > 0.9 * len(cases)


@pytest.mark.parametrize("name", ["type", "flags", "field", "role", "element"])
def test_every_small_field_of_the_directory(name: str) -> None:
    raw = shard()
    start = struct.unpack_from("<Q", raw, len(raw) - 56)[0]
    where = {"type": (0, "<I"), "flags": (4, "<I"), "field": (8, "<I"), "role": (12, "<H"), "element": (14, "<H")}[name]
    for number, entry in enumerate(entries_of(raw)):
        for value in (0, 1, 2, 3, 4, 13, 15, 16, 0x7FFF, 0xFFFF, 0x41414141, 0xFFFFFFFF):
            if (where[1] == "<H" and value > 0xFFFF) or value == entry[name]:
                continue
            changed = bytearray(raw)
            struct.pack_into(where[1], changed, start + 64 * number + where[0], value)
            found = outcome(reseal(changed), verify=True)
            # What is left is consistent in itself, like the presence of one field given to another: verification sees that.
            assert isinstance(found, FormatError) or found.pop("damage") or found == intact(), (entry["type"], value)


def test_versions_and_features() -> None:
    raw = bytearray(shard())
    at = len(raw) - 128
    cases = ((8, b"\2\0", False), (8, b"\0\0", False), (10, b"\7\0", True), (12, b"\3\0\0\0", False), (24, b"\xff" * 8, True))
    for offset, word, accepted in cases:
        changed = bytearray(raw)
        changed[offset : offset + len(word)] = changed[at + offset : at + offset + len(word)] = word
        found = outcome(reseal(changed))
        assert (found == intact()) if accepted else isinstance(found, FormatError)
    named = bytearray(change_meta(bytes(raw), lambda meta: meta.update(features={"3": "colour-planes"})))
    named[16] = named[len(named) - 128 + 16] = 0b11000
    error = outcome(reseal(named))
    assert isinstance(error, VersionError) and "colour-planes" in str(error) and "bit 4" in str(error)


def unknown(flags: int, data: bytes = b"hello", **fields: int) -> bytes:
    """The shard with a section of a type nobody knows, before META."""

    def add(sections: list[Section]) -> None:
        values = {"field": 0xFFFFFFFF, "role": 77, "element": 99, "count": 5} | fields
        sections.insert(
            -2, Section("XTRA", flags, values["field"], values["role"], values["element"], values["count"], 0, data)
        )

    return rebuild(shard(), add)


def test_unknown_sections() -> None:
    assert outcome(unknown(0)) == intact()
    assert outcome(unknown(2, b"blocked" * 30_000)) == intact()
    assert damage_of(unknown(0)) == [] and damage_of(unknown(2)) == []
    for flags in (1, 3):
        error = outcome(unknown(flags))
        assert isinstance(error, VersionError) and "XTRA" in str(error)
    broken = bytearray(unknown(0))
    broken[bytes(broken).index(b"hello")] ^= 1
    assert outcome(bytes(broken)) == intact() and [d.section for d in damage_of(bytes(broken))] == ["XTRA"]


def deep(levels: int) -> bytes:
    """META with a nested list."""
    return b'{"fields":[],"provenance":{"x":' + b"[" * levels + b"]" * levels + b"}}"


BAD_META: dict[str, bytes | Callable[[dict[str, Any]], Any]] = {
    "empty": b"",
    "not JSON": b"\x00\x01",
    "not UTF-8": b'{"fields":[{"name":"\xff\xfe","kind":"text"}]}',
    "surrogate": b'{"fields":[{"name":"\\ud800","kind":"text"}]}',
    "nested 1000": deep(1000),
    "nested a million": deep(1_000_000),
    "a list": b"[]",
    "null": b"null",
    "NaN": b'{"fields":[],"statistics":{"x":NaN}}',
    "infinite": b'{"fields":[],"statistics":{"x":1e999}}',
    "huge integer": b'{"fields":[],"position":{"segment":' + b"9" * 5000 + b"}}",
    "fields missing": b"{}",
    "fields a number": b'{"fields":7}',
    "million fields": b'{"fields":[' + b",".join(b'{"name":"%d","kind":"text"}' % n for n in range(1_000_000)) + b"]}",
    "5000 fields": b'{"fields":[' + b",".join(b'{"name":"%d","kind":"text"}' % n for n in range(5000)) + b"]}",
    "duplicate names": lambda m: m["fields"].append(m["fields"][0]),
    "one field fewer": lambda m: m["fields"].pop(),
    "one field more": lambda m: m["fields"].append({"name": "new", "kind": "text", "params": {}}),
    "reordered": lambda m: m["fields"].reverse(),
    "empty name": lambda m: m["fields"][0].update(name=""),
    "long name": lambda m: m["fields"][0].update(name="x" * 256),
    "reserved name": lambda m: m["fields"][0].update(name="__key__"),
    "name a number": lambda m: m["fields"][0].update(name=3),
    "unknown kind": lambda m: m["fields"][0].update(kind="video"),
    "params a list": lambda m: m["fields"][0].update(params=[]),
    "chunk_frames missing": lambda m: m["fields"][1]["params"].pop("chunk_frames"),
    "chunk_frames zero": lambda m: m["fields"][1]["params"].update(chunk_frames=0),
    "chunk_frames negative": lambda m: m["fields"][1]["params"].update(chunk_frames=-64),
    "chunk_frames huge": lambda m: m["fields"][1]["params"].update(chunk_frames=2**63),
    "chunk_frames text": lambda m: m["fields"][1]["params"].update(chunk_frames="64"),
    "ndim missing": lambda m: m["fields"][3]["params"].pop("ndim"),
    "ndim negative": lambda m: m["fields"][3]["params"].update(ndim=-1),
    "ndim zero": lambda m: m["fields"][3]["params"].update(ndim=0),
    "ndim huge": lambda m: m["fields"][3]["params"].update(ndim=2**40),
    "ndim true": lambda m: m["fields"][3]["params"].update(ndim=True),
    "ndim fraction": lambda m: m["fields"][3]["params"].update(ndim=2.0),
    "dtype missing": lambda m: m["fields"][5]["params"].pop("dtype"),
    "dtype object": lambda m: m["fields"][5]["params"].update(dtype="object"),
    "dtype record": lambda m: m["fields"][5]["params"].update(dtype=[["offset", "<u8"]]),
    "dtype float tokens": lambda m: m["fields"][5]["params"].update(dtype="float16"),
    "dtype signed tokens": lambda m: m["fields"][5]["params"].update(dtype="int16"),
    "dtype of another width": lambda m: m["fields"][6]["params"].update(dtype="int32"),
}
# Schemas that are wrong only for the codec: the values cannot be had, but the sections are in order.
BAD_PARAMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "vocab missing": lambda m: m["fields"][5]["params"].pop("vocab"),
    "vocab text": lambda m: m["fields"][5]["params"].update(vocab="many"),
    "vocab zero": lambda m: m["fields"][5]["params"].update(vocab=0),
    "vocab huge": lambda m: m["fields"][5]["params"].update(vocab=2**200),
    "image params empty": lambda m: m["fields"][0].update(params={}),
    "image params nonsense": lambda m: m["fields"][0].update(params={k: [1] for k in m["fields"][0]["params"]}),
    "image params null": lambda m: m["fields"][0].update(params=dict.fromkeys(m["fields"][0]["params"])),
    "json params empty": lambda m: m["fields"][2].update(params={}),
    "json params null": lambda m: m["fields"][2].update(params=dict.fromkeys(m["fields"][2]["params"])),
    "json dictionary": lambda m: m["fields"][2]["params"].update(dictionary={"sha256": 7}),
    "json max_raw": lambda m: m["fields"][2]["params"].update(max_raw=-(2**70)),
    "array shape": lambda m: m["fields"][3]["params"].update(shape=[1]),
    "array shape text": lambda m: m["fields"][3]["params"].update(shape="12"),
    "array shape nested": lambda m: m["fields"][3]["params"].update(shape=[{}, []]),
    "sample format": lambda m: m["fields"][1]["params"].update(sample_format="f32"),
    "text params": lambda m: m["fields"][4].update(params={"encoding": "utf-16"}),
}


@pytest.mark.parametrize("case", BAD_META)
def test_hostile_meta(case: str) -> None:
    change = BAD_META[case]
    raw = change_meta(shard(), change)
    begun = time.perf_counter()
    found = outcome(raw)
    assert isinstance(found, FormatError) and found.offset is not None
    assert time.perf_counter() - begun < 5
    assert damage_of(raw)


def test_a_column_of_bools_holds_zeros_and_ones(tmp_path: Path) -> None:
    field = FieldMeta("b", "scalar", {"dtype": "bool"})
    write_dataset(tmp_path, [field], [Part([(b"%d" % n, {"b": scalar(n == 1, "bool")}) for n in range(3)])])
    (path,) = tmp_path.glob("*.lfd")
    value = layout.ROLE_CODES["value"]
    for wrong in (2, 255):
        path.write_bytes(
            change_column(
                path.read_bytes(), "COLM", 0, value, lambda old, wrong=wrong: np.frombuffer(bytes([0, 1, wrong]), old.dtype)
            )
        )
        with pytest.raises(CorruptError, match="a bool that is neither 0 nor 1"):
            ShardFile(LocalFile(path)).column("b", "value")


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_hostile_params(case: str) -> None:
    bounded(change_meta(shard(), BAD_PARAMS[case]))


def test_meta_and_dictionary_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def long_dictionary(sections: list[Section]) -> None:
        (part,) = (s for s in sections if s.type == "DICT")
        part.data, part.count = bytes((16 << 20) + 1), (16 << 20) + 1

    def long_meta(sections: list[Section]) -> None:
        (part,) = (s for s in sections if s.type == "META")
        part.data = part.data.ljust((16 << 20) + 1)
        part.count = len(part.data)

    assert isinstance(outcome(rebuild(shard(), long_dictionary)), LimitError)
    assert isinstance(outcome(rebuild(shard(), long_meta)), LimitError)
    monkeypatch.setattr("lfdata.format.meta.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(LimitError):
        decode_json("f", bytes(101), Manifest, "the manifest")


# (section type, field ordinal, role) and what is done to its elements.
NO = 0xFFFFFFFF
IMG, SND, NOTE, ARR, TXT, IDS, NUM = range(7)


def put(position: int, value: int) -> Callable[[np.ndarray], None]:
    """Set one element."""

    def change(values: np.ndarray) -> None:
        values[position] = np.array(value % 2 ** (8 * values.itemsize)).astype(values.dtype)

    return change


EXTREMES = (1, 2**16 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
COLUMNS = [
    ("LOCR", IMG, 0, 0), ("LOCR", IMG, 0, 1), ("LOCR", SND, 0, 2), ("LOCR", NOTE, 0, 2), ("LOCR", ARR, 0, 2), ("LOCR", IDS, 0, 4),
    ("LOCR", IDS, 0, 5), ("COLM", IMG, 1, 0), ("COLM", IMG, 1, 3), ("COLM", IMG, 2, 0), ("COLM", IMG, 3, 0), ("COLM", IMG, 4, 0),
    ("COLM", IMG, 5, 0), ("COLM", IMG, 6, 0), ("COLM", IMG, 7, 0), ("COLM", SND, 2, 1), ("COLM", SND, 8, 1), ("COLM", SND, 5, 1),
    ("COLM", SND, 13, 2), ("COLM", SND, 14, 2), ("COLM", SND, 15, 0), ("COLM", NOTE, 2, 0), ("COLM", NOTE, 11, 0),
    ("COLM", ARR, 2, 1), ("COLM", ARR, 12, 2), ("COLM", ARR, 12, 3), ("COLM", TXT, 2, 0), ("COLM", TXT, 2, 1), ("COLM", IDS, 10, 2),
    ("KOFF", NO, 0, 0), ("KOFF", NO, 0, 1), ("KOFF", NO, 0, 5), ("KROW", NO, 0, 0), ("KROW", NO, 0, 4), ("KHSH", NO, 0, 2),
]  # fmt: skip


@pytest.mark.parametrize("place", COLUMNS, ids=lambda p: f"{p[0]}-{p[1]}-{p[2]}-{p[3]}")
def test_hostile_index_values(place: tuple[str, int, int, int]) -> None:
    """One value of one column, all checks right: reading is typed and bounded, verification names it."""
    type_, field, role, position = place
    for value in EXTREMES:
        raw = change_column(shard(), type_, field, role, put(position, value))
        if raw == shard():
            continue
        found = bounded(raw)
        if isinstance(found, dict):
            assert found["damage"], f"{place} = {value}: not found by verification"
        assert damage_of(raw)


def test_a_recording_without_a_rate_or_channels() -> None:
    for role in (5, 9):
        raw = change_column(shard(), "COLM", SND, role, put(1, 0))
        assert any(d.field == "snd" and d.row == 1 for d in damage_of(raw))


def test_key_offsets_that_descend() -> None:
    raw = change_column(shard(), "KOFF", NO, 0, lambda v: v[::-1].copy())
    assert isinstance(outcome(raw), CorruptError) and any(d.section == "KOFF" for d in damage_of(raw))


def test_key_rows_out_of_range() -> None:
    raw = change_column(shard(), "KROW", NO, 0, lambda v: v + 5)
    assert isinstance(outcome(raw), CorruptError) and any(d.section == "KROW" for d in damage_of(raw))


def test_two_rows_exchanged_in_one_column() -> None:
    """Sizes that belong to another row: the value's check fails or its sizes contradict it."""
    for type_, field, role in (("COLM", ARR, 12), ("COLM", SND, 8), ("LOCR", IMG, 0), ("COLM", IMG, 2)):
        width = 2 if type_ == "LOCR" or role == 12 else 1

        def swap(values: np.ndarray, width: int = width) -> None:
            values[width : 2 * width], values[2 * width : 3 * width] = (
                values[2 * width : 3 * width].copy(),
                values[width : 2 * width].copy(),
            )

        raw = change_column(shard(), type_, field, role, swap)
        assert raw != shard()
        assert damage_of(raw), (type_, field, role)


def bomb(frame: bytes, claimed: int) -> bytes:
    """The shard with `frame` as the last `note`: locator, length, raw_bytes and every check are right."""
    raw = shard()
    group = [e for e in entries_of(raw) if e["type"] == b"GRUP"][-1]
    assert group["length"] + len(frame) <= 4096, "the group must not push what follows it"

    def grow(sections: list[Section]) -> None:
        next(s for s in sections if s.type == "GRUP" and s.first == group["first"]).data += frame

    def locate(values: np.ndarray) -> None:
        values[8:10] = (group["offset"] + group["length"] if frame else 0), xxhash.xxh3_64_intdigest(frame, seed_of(raw))

    sealed = change_column(rebuild(raw, grow), "LOCR", NOTE, 0, locate)
    sealed = change_column(sealed, "COLM", NOTE, 2, put(4, len(frame)))
    return change_column(sealed, "COLM", NOTE, 11, put(4, claimed))


@pytest.mark.parametrize("size", [0, 1, 1 << 16, 1 << 28, 1 << 31, 1 << 40, 2**64 - 1])
def test_raw_bytes_bombs(size: int) -> None:
    frames = {"empty frame": b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + b"\x01\0\0"}
    # One RLE block of 128 KiB after a header that claims `size` bytes.
    frames["run"] = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + struct.pack("<I", (131072 << 3) | 2 | 1)[:3] + b"\xc0"
    frames["nothing"] = b""
    for name, frame in frames.items():
        raw = bomb(frame, size)
        found = bounded(raw)
        if isinstance(found, dict):
            assert found["damage"], name


def run_frame(size: int) -> bytes:
    """A frame of `size` zeros in blocks of 128 KiB: 4 bytes each."""
    frame = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", size)
    for at in range(0, size, 131072):
        part = min(131072, size - at)
        frame += struct.pack("<I", (part << 3) | 2 | (at + part == size))[:3] + b"\0"
    return frame


def test_decompression_bombs_stay_within_what_they_claim() -> None:
    size = 60_000_000
    tracemalloc.start()
    found = outcome(bomb(run_frame(size), size), verify=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, dict) and found["note"][4][3] in ("corrupt", "size-limit") and found["damage"]
    assert peak < 2 * size + (64 << 20)
    # More comes out of the frame than it, and the index, say.
    lying = run_frame(size)
    lying = lying[:5] + struct.pack("<I", 1000) + lying[9:]
    found = bounded(bomb(lying, 1000))
    assert isinstance(found, dict) and found["note"][4][3] == "corrupt"


@pytest.mark.parametrize(
    "claim",
    [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000],
)
def test_message_pack_bombs(claim: bytes) -> None:
    frame = zstandard.ZstdCompressor().compress(claim)
    found = bounded(bomb(frame, len(claim)))
    assert isinstance(found, dict) and found["note"][4][3] in ("corrupt", "depth", "size-limit")
