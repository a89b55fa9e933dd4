"""Fuzz targets of the format: each takes any bytes and may end in nothing but one of our own errors.

Run one with atheris:  ``python tests/fuzz/targets.py manifest -runs=100000``
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests" / "format")]

if __name__ == "__main__":
    import atheris

    with atheris.instrument_imports(include=["lfdata"]):
        pass

import hostilekit  # noqa: E402

from lfdata.errors import LfdataError  # noqa: E402
from lfdata.format import layout  # noqa: E402
from lfdata.format.meta import parse_manifest  # noqa: E402

_shards: list[bytes] = []


def shard() -> bytes:
    """An intact shard that targets put the input into."""
    if not _shards:
        _shards.append(hostilekit.small_shard())
    return _shards[0]


def header(data: bytes) -> None:
    """Header and trailer of a file, with and without right checks."""
    raw = bytearray(data.ljust(4096 + 128, b"\0"))
    for candidate in (bytes(raw), hostilekit.reseal(raw)):
        try:
            layout.parse_header("fuzz", candidate[:4096])
            layout.parse_trailer("fuzz", candidate[-128:], len(candidate))
        except LfdataError:
            continue


def directory(data: bytes) -> None:
    """The input as the directory of a file, its check right."""
    table = data[: len(data) // 64 * 64]
    identity = layout.parse_header("fuzz", shard()[:4096])[0]
    count = len(table) // 64
    trailer = layout.Trailer(identity, 5, 1 << 20, count, layout.xxh3(table, identity.seed), (1 << 20) + len(table) + 128, 0)
    try:
        layout.parse_directory("fuzz", table, trailer)
    except LfdataError:
        return


def index(data: bytes) -> None:
    """The input over the index columns and the directory of a shard, every check right; then every value is read."""
    raw = bytearray(shard())
    start = struct.unpack_from("<Q", raw, len(raw) - 56)[0]
    for at in range(0, len(data) - 5, 6):
        where, value = struct.unpack_from("<HI", data, at)
        place = 16384 + where % (len(raw) - 128 - 16384)
        width = 4 if place < start else 1
        raw[place : place + width] = value.to_bytes(4, "little")[:width]
    candidates = [hostilekit.reseal(raw)]
    with contextlib.suppress(struct.error, UnicodeDecodeError):  # nothing may be left that could be put together again
        candidates.append(hostilekit.rebuild(bytes(raw), lambda _sections: None))
    for candidate in candidates:
        try:
            hostilekit.read_everything(candidate)
        except LfdataError:
            continue


def manifest(data: bytes) -> None:
    """A manifest."""
    try:
        parse_manifest("fuzz", data)
    except LfdataError:
        return


TARGETS: dict[str, Callable[[bytes], None]] = {"header": header, "directory": directory, "index": index, "manifest": manifest}


def seeds(name: str) -> list[bytes]:
    """Inputs to start from."""
    raw = shard()
    start = struct.unpack_from("<Q", raw, len(raw) - 56)[0]
    golden = (REPO / "tests" / "golden" / "v1.0" / "mixed" / "manifest.json").read_bytes()
    return {"header": [raw[:4096] + raw[-128:]], "directory": [raw[start:-128]], "index": [bytes(60)], "manifest": [golden]}[
        name
    ]


def main() -> None:
    """Hand over to atheris."""
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
