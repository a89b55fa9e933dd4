"""The journal: a line counts whole or not at all, wherever the machine died."""

from __future__ import annotations

from pathlib import Path

import pytest

from lfdata.errors import CorruptError
from lfdata.format.durable import Files
from shard_builder.journal import Journal, journal_path, read

HEAD, LINES = {"conversion": "abc"}, [{"segment": n, "errors": ["ü\n\u2028" * n]} for n in range(4)]


def made(target: Path) -> Path:
    target.mkdir(exist_ok=True)
    journal = Journal.create(Files(), target, HEAD)
    for line in LINES:
        journal.append(line)
    journal.close()
    return journal_path(target)


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    path = made(tmp_path)
    assert read(path) == ([HEAD, *LINES], path.stat().st_size)


def test_cut_at_every_byte_it_keeps_the_whole_lines(tmp_path: Path) -> None:
    path = made(tmp_path)
    data = path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(data) if byte == 10]
    assert len(ends) == 5
    for size in range(len(data)):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        if not whole:
            with pytest.raises(CorruptError, match="no valid line"):
                read(path)
            continue
        entries, valid = read(path)
        assert entries == [HEAD, *LINES][:whole]
        assert valid == ends[whole - 1]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = made(tmp_path)
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, len(data) - 1) + 1
    for bit in range(len(data) * 8):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        if bit // 8 < last - 1:
            with pytest.raises(CorruptError):
                read(path)
        else:
            # The last line, or the end of the one before it: they may be a torn write, and count as not written.
            assert read(path)[0] in ([HEAD, *LINES[:3]], [HEAD, *LINES[:2]])


def test_resume_cuts_a_torn_line_and_goes_on(tmp_path: Path) -> None:
    path = made(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"0123456789abcdef {torn" + bytes(100) + b"\n")
    journal, entries = Journal.resume(Files(), tmp_path)
    assert entries == [HEAD, *LINES]
    journal.append({"segment": 9})
    journal.close()
    assert read(path)[0] == [HEAD, *LINES, {"segment": 9}]


@pytest.mark.parametrize("data", [b"", b"\n", b"\0" * 512, b"0" * 16 + b" {}\n"])
def test_a_file_that_is_no_journal(data: bytes, tmp_path: Path) -> None:
    path = made(tmp_path)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="--overwrite"):
        read(path)
