"""The copies in the consolidated index are what docs/format.md says, and what the shards hold."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash
import zstandard
from _build import build, rows

from lfdata.format import copies
from lfdata.format.files import LocalFile
from lfdata.format.layout import FLAG_REQUIRED
from lfdata.format.reader import ShardFile


def pieces(index: Path) -> list[tuple[bytes, bytes, int, bytes]]:
    """Shard id, part id, offset and bytes of every piece, by the documentation alone."""
    (entry,) = (entry for entry in ShardFile(LocalFile(index)).entries if entry.type == b"COPY")
    assert not entry.flags & FLAG_REQUIRED and not entry.blocked
    data, at, found = index.read_bytes()[entry.offset : entry.end], 0, []
    while at < len(data):
        shard, part, offset, length, packed, check = struct.unpack_from("<16s16sQQQQ", data, at)
        frame = data[at + 64 : at + 64 + packed]
        assert xxhash.xxh3_64_intdigest(data[at : at + 56] + bytes(8) + frame) == check
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=4 << 20)
        assert len(raw) == length <= 4 << 20
        found.append((shard, part, offset, raw))
        at += 64 + packed
    return found


@pytest.mark.parametrize("piece_bytes", [700, 4 << 20])
def test_every_file_is_copied_from_its_payloads_on_in_the_documented_form(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", piece_bytes)
    side = {1: ("caption", ("text", {}), [f"new {number}" for number in range(8)])}
    manifest = build(tmp_path / "data", [rows(5), rows(8, 5), []], index=True, sidecars=side)
    found = pieces(tmp_path / "data" / "index.lfi")
    order = list(dict.fromkeys((shard, part) for shard, part, _, _ in found))
    files = [(bytes.fromhex(entry.id), bytes(16), entry.file) for entry in manifest.shards]
    sides = [
        (bytes.fromhex(entry.id), bytes.fromhex(one.part), one.file) for entry in manifest.shards for one in entry.sidecars
    ]
    files[2:2] = sides
    assert order == [(shard, part) for shard, part, _ in files] and len(sides) == 1
    for shard, part, name in files:
        whole = (tmp_path / "data" / name).read_bytes()
        mine = [(offset, raw) for one, other, offset, raw in found if (one, other) == (shard, part)]
        assert b"".join(raw for _, raw in mine) == whole[mine[0][0] :]
        groups = [entry for entry in ShardFile(LocalFile(tmp_path / "data" / name)).entries if entry.type == b"GRUP"]
        assert mine[0][0] == (groups[-1].end if groups else 4096)


def test_long_token_regions_are_not_copied(tmp_path: Path) -> None:
    fields: dict[str, tuple[str, dict[str, str]]] = {"ids": ("tokens", {"vocab": "1000"})}
    manifest = build(tmp_path / "data", [[(b"%d" % n, {"ids": [n] * 500}) for n in range(100)]], fields, index=True)
    (region,) = (e for e in ShardFile(LocalFile(tmp_path / "data" / manifest.shards[0].file)).entries if e.type == b"TOKN")
    assert pieces(tmp_path / "data" / "index.lfi")[0][2] == region.end
