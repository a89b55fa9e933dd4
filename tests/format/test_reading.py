"""Reads in the background: the same bytes and failures as in turn, held memory, forks, files that shrink."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lfdata.format import gather

native: Any = gather.native
pytestmark = pytest.mark.skipif(native is None, reason="the native module is not built")
ROWS, SIZE, SEED = 200, 4096, 7


@pytest.fixture
def source(tmp_path: Path) -> Any:
    data = np.random.default_rng(0).integers(0, 256, ROWS * SIZE, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    with open(tmp_path / "file", "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return data, memoryview(mapping), tmp_path / "file"


def _arguments(data: Any, mapping: Any, wrong: int | None = None) -> tuple[Any, ...]:
    order = np.random.default_rng(1).permutation(ROWS)
    offsets, lengths = order * SIZE, np.full(ROWS, SIZE)
    checks = np.array([native.xxh3(data[at : at + SIZE], SEED) for at in offsets], np.uint64)
    if wrong is not None:
        checks[wrong] += np.uint64(1)
    out = np.zeros(ROWS * SIZE, np.uint8)
    return mapping, SEED, offsets, lengths, checks, np.arange(ROWS) * SIZE, out, 1


def test_the_same_bytes(source: Any) -> None:
    arguments = [_arguments(*source[:2]) for _ in range(8)]
    readings = [native.start_mapped(*one) for one in arguments]
    for reading, (_, _, offsets, _, _, _, out, _) in zip(readings[::-1], arguments[::-1], strict=True):
        assert reading.finish() == reading.finish() == -1
        assert np.array_equal(out.reshape(ROWS, SIZE), source[0].reshape(ROWS, SIZE)[offsets // SIZE])


def test_a_wrong_check_is_told(source: Any) -> None:
    readings = [native.start_mapped(*_arguments(*source[:2], wrong=wrong)) for wrong in (150, None, 3)]
    assert [reading.finish() for reading in readings] == [150, -1, 3]


def test_arguments_that_do_not_fit_are_refused(source: Any) -> None:
    mapping, seed, offsets, lengths, checks, places, out, threads = _arguments(*source[:2])
    for wrong in [
        (mapping, seed, offsets + ROWS * SIZE, lengths, checks, places, out, threads),
        (mapping, seed, offsets, lengths, checks, places, out[:-1], threads),
        (mapping, seed, offsets[:-1], lengths, checks, places, out, threads),
    ]:
        with pytest.raises(ValueError, match="must match"):
            native.start_mapped(*wrong)
    with pytest.raises(TypeError):
        type(native.start_mapped(*_arguments(*source[:2])))()


def test_what_is_dropped_is_neither_leaked_nor_read_into_freed_memory(source: Any) -> None:
    before = threading.active_count()
    for _ in range(200):
        native.start_mapped(*_arguments(*source[:2]))
    gc.collect()
    arguments = _arguments(*source[:2])
    out = arguments[6]
    reading = native.start_mapped(*arguments)
    with pytest.raises(ValueError, match="resize|references"):
        out.resize(1, refcheck=True)
    assert reading.finish() == -1 and threading.active_count() == before


def test_a_file_that_shrinks_is_a_failed_row(source: Any) -> None:
    arguments = _arguments(*source[:2])
    os.truncate(source[2], SIZE)
    assert native.start_mapped(*arguments).finish() >= 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_finishes_what_its_parent_began(source: Any) -> None:
    arguments = [_arguments(*source[:2]) for _ in range(4)]
    readings = [native.start_mapped(*one) for one in arguments]
    child = os.fork()
    if child == 0:
        good = all(reading.finish() == -1 for reading in readings)
        again = native.start_mapped(*_arguments(*source[:2]))
        os._exit(0 if good and again.finish() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(reading.finish() == -1 for reading in readings)
