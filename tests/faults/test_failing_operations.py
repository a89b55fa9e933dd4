"""Every operation of the durable layer fails once, and for ever: a typed error, the old data readable, resume byte-identical."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from faultkit import SMALL, digests, expected_digests, finish, leftovers, readable, run, synthetic, verified, with_options

from lfdata.errors import DiskFullError, StorageError
from lfdata.format import durable
from lfdata.format.durable import Files

T = TypeVar("T")
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR}
RECORDS = 36
OPTIONS = with_options(SMALL, segment_rows=14, shard_bytes=9_000, group_bytes=3_000)
BAD = {5: "load", 20: "scan"}


class FaultyFiles(Files):
    """Operation number ``at`` fails with ``kind``; all later ones too if ``always``. ``operations`` lists what was asked."""

    def __init__(self, at: int = -1, kind: str = "EIO", *, always: bool = False) -> None:
        self.at, self.kind, self.always = at, kind, always
        self.operations: list[str] = []
        self.hit = False

    def call(self, operation: str, path: Path, function: Callable[[], T], **detail: object) -> T:
        del detail
        number = len(self.operations)
        self.operations.append(operation)
        if number != self.at and not (self.always and number > self.at >= 0):
            return function()
        if self.kind in ("short", "nothing"):
            return self._write(operation, function)
        self.hit = True
        if operation == "close":
            function()
        raise OSError(ERRORS[self.kind], os.strerror(ERRORS[self.kind]), str(path))

    def _write(self, operation: str, function: Callable[[], T]) -> T:
        if operation != "write" or not isinstance(function, partial):
            return function()
        self.hit = True
        descriptor, data = function.args
        length = len(data) // 2 if self.kind == "short" else 0
        return os.write(descriptor, data[: max(length, 1)]) if length or self.kind == "short" else 0  # type: ignore[return-value]


@cache
def expected(seed: int) -> dict[str, str]:
    return expected_digests(synthetic(RECORDS, seed, BAD), with_options(OPTIONS, on_error="skip"))


def source(seed: int) -> Any:
    return synthetic(RECORDS, seed, BAD)


class Scenario:
    """What lies in the target before, and what is asked."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self.place = name, place
        self.options = with_options(OPTIONS, on_error="skip", overwrite=name in ("overwrite", "again"), resume=name == "resume")
        self.seed = 1 if name == "overwrite" else 0
        self.before = place / "before"
        if name in ("overwrite", "again"):
            run(self.before, source(0), with_options(OPTIONS, on_error="skip"))
        elif name == "resume":
            broken = FaultyFiles(len(self._dry(place / "dry")) // 2)
            with pytest.raises(StorageError):
                run(self.before, source(0), with_options(OPTIONS, on_error="skip"), broken)
        self.operations = self._dry(place / "dry", start=self.before)

    def _dry(self, target: Path, start: Path | None = None) -> list[str]:
        if start is not None and start.exists():
            shutil.copytree(start, target)
        files = FaultyFiles()
        options = self.options if start is not None else with_options(self.options, resume=False)
        run(target, source(self.seed), options, files)
        assert digests(target) == expected(self.seed)
        shutil.rmtree(target)
        return files.operations

    def check(self, number: int, kind: str, always: bool) -> None:
        """One run with the fault, and what must hold after it."""
        target = self.place / "target"
        if self.before.exists():
            shutil.copytree(self.before, target)
        files = FaultyFiles(number, kind, always=always)
        error = _outcome(target, self, files)
        assert files.hit, f"operation {number} was not reached"
        if error is None:
            assert digests(target) == expected(self.seed)
        else:
            assert not isinstance(error, DiskFullError) or kind == "ENOSPC", error
            assert kind != "ENOSPC" or isinstance(error, DiskFullError), error
            self._visible(target)
        finish(target, source(self.seed), with_options(OPTIONS, on_error="skip"))
        assert digests(target) == expected(self.seed)
        assert leftovers(target) == []
        verified(target)
        shutil.rmtree(target)

    def _visible(self, target: Path) -> None:
        allowed = {expected(self.seed)["manifest.json"]}
        allowed |= {expected(0)["manifest.json"]} if self.name in ("overwrite", "again") else {""}
        if target.exists():
            assert readable(target) in allowed
            if (target / "manifest.json").exists():
                verified(target)


def _outcome(target: Path, scenario: Scenario, files: FaultyFiles) -> StorageError | None:
    try:
        run(target, source(scenario.seed), scenario.options, files)
    except StorageError as error:
        return error
    return None


def _chosen(operations: list[str], kind: str, stride: int, offset: int) -> list[int]:
    """Operations to fail: of the many writes every ``stride``-th, of the others every fourth part of that, so that none is out of reach."""
    writes = [n for n, operation in enumerate(operations) if operation == "write"]
    others = [n for n, operation in enumerate(operations) if operation != "write"]
    if kind in ("short", "nothing"):
        others = []
    return sorted(writes[offset % stride :: stride] + others[offset % max(stride // 8, 1) :: max(stride // 8, 1)])


CASES = [(kind, always) for kind in ("EIO", "ENOSPC", "EINTR", "short", "nothing") for always in (False, True)]
SCENARIOS = ("fresh", "overwrite", "again", "resume")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local renames are visible at once."""
    monkeypatch.setattr(durable, "_VISIBILITY_WAITS", ())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_failure_of_some_operations(scenario: str, place: Path) -> None:
    made = Scenario(scenario, place)
    for number, (kind, always) in enumerate(CASES):
        for at in _chosen(made.operations, kind, 97, number * 7):
            made.check(at, kind, always)


@pytest.mark.fault
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("kind", "always"), CASES)
def test_failure_of_every_operation(scenario: str, kind: str, always: bool, place: Path) -> None:
    made = Scenario(scenario, place)
    stride = 1 if (kind, always) == ("EIO", False) else 4 if kind in ("EIO", "ENOSPC") else 9
    for at in _chosen(made.operations, kind, stride, 0):
        made.check(at, kind, always)
