"""Readers while the data set is being replaced: every read is of one generation, or a typed error."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
from faultkit import SMALL, run, synthetic, with_options

import lfdata
from lfdata.errors import LfdataError

OPTIONS = with_options(SMALL, segment_rows=25, shard_bytes=9_000)
RECORDS = 60
MIXED, NEVER, FINE = 5, 6, 0


def _generation(samples: list[dict[str, Any]]) -> set[int]:
    return {sample["about"]["seed"] for sample in samples}


def _reader(target: Path, stop: Path) -> int:
    """Open and read until told to stop. The data set is there all the time, so that opening it always works."""
    whole = 0
    seen: set[int] = set()
    while True:
        last = stop.exists()
        found = lfdata.open(target)
        try:
            samples = [found[number] for number in range(len(found))]
        except LfdataError:
            samples = []
        if samples:
            whole += 1
            generation = _generation(samples)
            seen |= generation
            if len(generation) != 1 or len(samples) != RECORDS:
                return MIXED
            if whole > 1 and len(seen) > 1:
                (stop.parent / f"seen-{os.getpid()}").touch()
        if last:
            return FINE if whole > 1 and len(seen) > 1 else NEVER


def _with_reader(target: Path, stop: Path, rounds: int) -> int:
    run(target, synthetic(RECORDS, 0), OPTIONS)
    readers = []
    for _ in range(2):
        child = os.fork()
        if not child:
            status = 1
            try:
                gc.freeze()  # or every collection copies the whole heap of the parent
                status = _reader(target, stop)
            except BaseException as error:
                os.write(2, f"in the reader: {error!r}\n".encode())
            finally:
                os._exit(status)
        readers.append(child)
    try:
        for number in range(1, rounds):
            run(target, synthetic(RECORDS, number % 3), OPTIONS, overwrite=True)
        # A reader that is slower than the replacements meets one in every pass: more rounds, at a slower and slower pace.
        extra = 0
        while len(list(stop.parent.glob("seen-*"))) < len(readers) and extra < 20:
            extra += 1
            run(target, synthetic(RECORDS, extra % 3), OPTIONS, overwrite=True)
            time.sleep(0.5 * extra)
    finally:
        stop.touch()
        results = [os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) for reader in readers]
    return max(results, key=abs)


def test_readers_during_replacement(place: Path) -> None:
    assert _with_reader(place / "target", place / "stop", 12) == FINE


@pytest.mark.fault
def test_readers_during_much_replacement(place: Path) -> None:
    assert _with_reader(place / "target", place / "stop", 200) == FINE


def test_an_open_data_set_keeps_its_generation_or_says_so(place: Path) -> None:
    target = place / "target"
    run(target, synthetic(RECORDS, 0), OPTIONS)
    touched, untouched = lfdata.open(target), lfdata.open(target)
    assert _generation(list(touched)) == {0}
    run(target, synthetic(RECORDS, 1), OPTIONS, overwrite=True)
    assert _generation(list(lfdata.open(target))) == {1}
    for found in (touched, untouched):
        for number in range(RECORDS):
            try:
                assert found[number]["about"]["seed"] == 0
            except LfdataError as error:
                assert str(target) in str(error)


def test_readers_of_an_unfinished_conversion_see_none(place: Path) -> None:
    target = place / "target"

    class Spy:
        looked = 0

        def __call__(self, done: int, total: int) -> None:
            del done, total
            with pytest.raises(LfdataError, match="no manifest"):
                lfdata.open(target)
            Spy.looked += 1

    from faultkit import InProcessPool, convert, convert_module

    kept = convert_module.Pool
    convert_module.Pool = InProcessPool  # type: ignore[misc, assignment]
    try:
        convert(synthetic(RECORDS), target, OPTIONS, progress=Spy())
    finally:
        convert_module.Pool = kept  # type: ignore[misc]
    assert Spy.looked > 2
    assert len(lfdata.open(target)) == RECORDS
