"""Batched reads: natively from a mapping, natively by pread, and in Python give the same bytes and the same errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from lfdata.errors import TruncatedError
from lfdata.format import gather as module
from lfdata.format.files import LocalFile
from lfdata.format.layout import LOCATOR

REPO = Path(__file__).resolve().parents[2]
SEED = 0xFEDCBA9876543210
WAYS = ("mapped", "pread", "python")
needs_native = pytest.mark.skipif(module.native is None, reason="the native module is not built")


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``gather`` take one of its ways."""
    if way == "python":
        monkeypatch.setattr(module, "native", None)
    elif module.native is None:
        pytest.skip("the native module is not built")
    else:
        native = module.native

        def resident(_mapping: object, samples: int, _random: int) -> int:
            return samples if way == "mapped" else 0

        fake = SimpleNamespace(**vars(native) | {"resident": resident})
        monkeypatch.setattr(module, "native", fake)


def rows_of(data: bytes, ranges: list[tuple[int, int]]) -> tuple[Any, ...]:
    """Offsets, lengths, checks, an output buffer of sevens, and places with a byte between values."""
    offsets = np.array([start for start, _ in ranges], np.int64)
    lengths = np.array([size for _, size in ranges], np.int64)
    checks = np.array([xxhash.xxh3_64_intdigest(data[a : a + n], SEED) for a, n in ranges], np.uint64)
    places = np.concatenate([[0], np.cumsum(lengths + 1)[:-1]])
    return offsets, lengths, checks, np.full(int((lengths + 1).sum()), 7, np.uint8), places


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_length_and_alignment(way: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(way, monkeypatch)
    monkeypatch.setattr(module, "BYTES_A_THREAD", 1000)
    data = os.urandom(400_000)
    (tmp_path / "file").write_bytes(data)
    sizes = [*range(300), 511, 512, 513, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 4095, 4097, 65_535, 65_537, 300_001]
    rng = np.random.default_rng(0)
    ranges = [(int(rng.integers(0, len(data) - size + 1)), size) for size in rng.permutation(sizes).tolist()]
    offsets, lengths, checks, out, places = rows_of(data, ranges)
    assert module.gather(LocalFile(tmp_path / "file"), SEED, offsets, lengths, checks, out, places, threads) == -1
    for (start, size), place in zip(ranges, places.tolist(), strict=True):
        assert out[place : place + size].tobytes() == data[start : start + size]
        assert out[place + size] == 7, "a byte beyond the value was written"


@pytest.mark.parametrize("way", WAYS)
def test_one_wrong_byte_anywhere_is_that_row(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(way, monkeypatch)
    data = bytearray(os.urandom(60_000))
    ranges = [(start, 3000) for start in range(0, 60_000, 3000)][::-1]
    offsets, lengths, checks, out, places = rows_of(bytes(data), ranges)
    for at in (0, 1, 2999, 3000, 31_234, 59_999):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        (tmp_path / f"file{at}").write_bytes(damaged)
        row = module.gather(LocalFile(tmp_path / f"file{at}"), SEED, offsets, lengths, checks, out, places, 2)
        assert ranges[row][0] <= at < ranges[row][0] + 3000


@pytest.mark.parametrize("way", WAYS)
def test_a_file_cut_while_it_is_open_is_an_error_that_names_the_place(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(way, monkeypatch)
    data = os.urandom(100_000)
    path = tmp_path / "file"
    path.write_bytes(data)
    file = LocalFile(path)
    rows = rows_of(data, [(start, 10_000) for start in range(0, 100_000, 10_000)])
    assert module.gather(file, SEED, *rows, 2) == -1
    os.truncate(path, 45_000)
    for _ in range(3):
        with pytest.raises(TruncatedError, match="byte 45000: the file ends here"):
            module.gather(file, SEED, *rows, 2)
    whole = rows_of(data, [(start, 10_000) for start in range(0, 40_000, 10_000)])
    assert module.gather(file, SEED, *whole, 2) == -1


SCRIPT = """
import faulthandler, mmap, os, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
path, when = sys.argv[2], sys.argv[3]
if when == "before": faulthandler.enable()
from lfdata.format import gather
from lfdata.format.files import LocalFile
from lfdata.format.layout import LOCATOR
file = LocalFile(path)
i = lambda *v: np.array(v, np.int64)
checks, out = i(1, 1).view(np.uint64), np.empty(20, np.uint8)
def read(): return gather.native.read_mapped(file.map(), 0, i(0, 60_000), i(10, 10), checks, i(0, 10), out, 1)
read()
if when == "after": faulthandler.enable()
os.truncate(path, 4096)
assert read() == 0, "both rows fail: one check is wrong, one page is gone"
print("alive", flush=True)
file.map()[60_000]
"""


@needs_native
@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_only_our_own_faults_are_caught(when: str, tmp_path: Path) -> None:
    """A row on a lost page fails; a fault of anybody else still ends the process, at once, and reaches its handler."""
    (tmp_path / "file").write_bytes(os.urandom(100_000))
    command = [sys.executable, "-c", SCRIPT, str(REPO), str(tmp_path / "file"), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "alive\n", done.stderr
    assert done.returncode == -signal.SIGBUS
    assert ("Bus error" in done.stderr) == (when != "never")


@needs_native
@pytest.mark.parametrize(
    ("offset", "length", "place"),
    [(-1, 5, 0), (0, -1, 0), (0, 5, -1), (96, 5, 0), (0, 5, 96), (2**62, 5, 0), (0, 2**62, 0), (0, 5, 2**62)],
)
def test_rows_outside_the_file_or_the_buffer_are_refused(offset: int, length: int, place: int) -> None:
    assert module.native is not None

    def one(value: int, dtype: Any = np.int64) -> Any:
        return np.array([value], dtype)

    with pytest.raises(ValueError, match="lie inside the file and the buffer"):
        module.native.read_mapped(
            bytes(100), 0, one(offset), one(length), one(0, np.uint64), one(place), np.empty(100, np.uint8), 1
        )
    with pytest.raises(ValueError, match="must match offsets"):
        module.native.read_mapped(
            bytes(100), 0, one(0), np.zeros(2, np.int64), one(0, np.uint64), one(0), np.empty(9, np.uint8), 1
        )


@needs_native
def test_the_native_hash_is_xxh3() -> None:
    assert module.native is not None
    for size in [*range(500), 1024, 1025, 4096, 70_000]:
        data = os.urandom(size)
        for seed in (0, SEED):
            assert module.native.xxh3(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


@pytest.mark.parametrize("way", ["native", "python"])
def test_where_payloads_lie(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside one span to the last byte is inside; between spans, across two, or before the first is not."""
    if way == "python":
        monkeypatch.setattr(module, "native", None)
    elif module.native is None:
        pytest.skip("the native module is not built")
    spans = np.array([0, 100, 300], np.uint64), np.array([0, 200, 400], np.uint64)
    cases = [(100, 100, 1), (150, 50, 1), (150, 51, 0), (200, 0, 1), (201, 0, 0), (250, 1, 0), (99, 1, 0), (0, 0, 1), (0, 1, 0)]
    cases += [(300, 100, 1), (399, 1, 1), (400, 1, 0), (100, 300, 0), (2**64 - 1, 1, 0), (300, 2**32 - 1, 0)]
    locators = np.zeros(len(cases), LOCATOR)
    locators["offset"] = [start for start, _, _ in cases]
    locators["check"] = np.arange(len(cases)) + 7
    for dtype in (np.uint32, np.uint64):
        counts = np.array([size for _, size, _ in cases], dtype)
        for row, (start, size, inside) in enumerate(cases):
            offsets, lengths, checks, outside = module.locate(locators, counts, np.array([0, row, 0]), spans, 2, 64)
            assert outside == (-1 if row == 0 or inside else 1)
            if inside:
                assert (offsets[1], lengths[1], checks[1]) == (64 + 2 * start, 2 * size, row + 7)
    assert module.locate(locators, counts, np.zeros(0, np.int64), spans, 1, 0)[3] == -1


@needs_native
@pytest.mark.parametrize("row", [-1, 3, 2**62, -(2**62)])
def test_rows_outside_the_columns_are_refused(row: int) -> None:
    spans = np.zeros(1, np.uint64), np.full(1, 9, np.uint64)
    with pytest.raises(ValueError, match=f"row {row} lies outside the columns"):
        module.locate(np.zeros(3, LOCATOR), np.zeros(3, np.uint32), np.array([0, row]), spans, 1, 0)
    with pytest.raises(ValueError, match="must match each other"):
        module.locate(np.zeros(3, LOCATOR), np.zeros(4, np.uint32), np.array([0]), spans, 1, 0)


HELPED = """
import os, sys, threading
import numpy as np
sys.path.insert(0, sys.argv[1])
from lfdata.format import gather
from lfdata.format.files import LocalFile
from lfdata.format.layout import LOCATOR
data = open(sys.argv[2], "rb").read()
gather.BYTES_A_THREAD = 1000
file = LocalFile(sys.argv[2])
def check(seed):
    offsets = np.random.default_rng(seed).integers(0, len(data) - 5000, 200)
    lengths = np.full(200, 5000)
    checks = np.array([gather.xxh3(data[at : at + 5000]) for at in offsets.tolist()], np.uint64)
    for _ in range(20):
        out = np.zeros(1_000_000, np.uint8)
        assert gather.gather(file, 0, offsets, lengths, checks, out, np.arange(200) * 5000, 4) == -1
        assert out.tobytes() == b"".join(data[at : at + 5000] for at in offsets.tolist())
check(0)
threads = [threading.Thread(target=check, args=(seed,)) for seed in range(1, 6)]
[thread.start() for thread in threads]
children = []
for seed in range(10, 16):
    child = os.fork()
    if not child:
        check(seed)
        os._exit(0)
    children.append(child)
[thread.join() for thread in threads]
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
print("all the same")
"""


@needs_native
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_threads_kept_between_calls_serve_threads_and_forked_children(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(200_000))
    command = [sys.executable, "-W", "ignore", "-c", HELPED, str(REPO), str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "all the same\n", done.stderr
