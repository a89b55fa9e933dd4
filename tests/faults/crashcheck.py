"""Checks that no legal crash state loses an acknowledged commit, shows half a data set or stops a resume."""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from crashkit import Disk, LoggingFiles, Op, State, read_tree, write_tree
from faultkit import SMALL, digests, expected_digests, finish, leftovers, readable, run, synthetic, with_options

from lfdata.errors import LfdataError
from lfdata.format.meta import parse_manifest
from shard_builder.journal import read

RECORDS = 30
OPTIONS = with_options(SMALL, segment_rows=12, shard_bytes=9_000, group_bytes=3_000, on_error="skip")
BAD = {4: "load", 17: "scan"}
MANIFEST, JOURNAL = "target/manifest.json", "target/.work/journal"


def source(seed: int) -> Any:
    return synthetic(RECORDS, seed, BAD)


@cache
def wanted(seed: int) -> dict[str, str]:
    return expected_digests(source(seed), OPTIONS)


@dataclass(slots=True)
class Scenario:
    """A logged run: what was there before, what is wanted after it, and what may be seen meanwhile."""

    name: str
    before: State
    log: list[Op]
    seed: int
    old: dict[str, str] | None


def record(name: str, place: Path) -> Scenario:
    """Run a scenario once, with the log. ``fresh``, ``overwrite`` (other data), ``again`` (the same), ``resume``, ``torn``."""
    root = place / name
    target = root / "target"
    root.mkdir()
    old = None
    seed = 0
    if name in ("overwrite", "again"):
        run(target, source(0), OPTIONS)
        old, seed = wanted(0), int(name == "overwrite")
    elif name in ("resume", "torn"):
        _interrupted(root, torn=name == "torn")
    before = read_tree(root)
    files = LoggingFiles(root)
    run(target, source(seed), with_options(OPTIONS, overwrite=old is not None, resume=name in ("resume", "torn")), files)
    files.log.append(Op("ack", "finished"))
    shutil.rmtree(root)
    return Scenario(name, before, files.log, seed, old)


class _PowerCut(Exception):
    pass


class _Cut(LoggingFiles):
    """Stops before the line of the second shard."""

    def call(self, operation: str, path: Path, function: Any, **detail: Any) -> Any:
        lines = sum(op.kind == "write" and op.path == JOURNAL for op in self.log)
        if operation == "write" and self.relative(path) == JOURNAL and lines == 2:
            raise _PowerCut
        return super().call(operation, path, function, **detail)


def _interrupted(root: Path, *, torn: bool) -> None:
    with contextlib.suppress(_PowerCut):
        run(root / "target", source(0), OPTIONS, _Cut(root))
    if torn:
        # A line of which the first and the last sector reached the disk.
        with open(root / JOURNAL, "ab") as file:
            file.write(b'0123456789abcdef {"shard":' + b"x" * 4000 + b"\n")


@dataclass(slots=True)
class Acknowledged:
    """What had been promised when the machine died."""

    shards: list[str] = field(default_factory=list)
    manifest: bool = False

    def step(self, op: Op) -> None:
        if op.kind == "ack":
            if op.path.endswith(".lfd"):
                self.shards.append(op.path)
            self.manifest = self.manifest or op.path in (MANIFEST, "finished")


class Checker:
    """Examines states of one scenario; ``findings`` are violations."""

    def __init__(self, scenario: Scenario, place: Path, rng: random.Random) -> None:
        self.scenario, self.place, self.rng = scenario, place, rng
        self.findings: list[str] = []
        self.states = self.resumed = 0

    def explore(self, each: int, resume_share: float, enough: int = 20) -> None:
        """``each`` states at every point of the log (more where the journal is being written), some of them resumed from."""
        disk, acknowledged = Disk(self.scenario.before), Acknowledged()
        for number, op in enumerate(self.scenario.log):
            disk.step(op)
            acknowledged.step(op)
            count = each * 8 if op.path == JOURNAL and op.kind in ("write", "truncate") else each
            for _ in range(count):
                state = disk.after_crash(self.rng)
                where = f"{self.scenario.name}, after operation {number} ({op.kind} {op.path})"
                self.findings += [f"{where}: {finding}" for finding in self.examine(state, acknowledged)]
                if self.rng.random() < resume_share:
                    self.findings += [f"{where}: {finding}" for finding in self.resume(state, acknowledged)]
                if len(self.findings) >= enough:
                    return

    def examine(self, state: State, acknowledged: Acknowledged) -> Iterator[str]:
        """Violations visible without running anything."""
        self.states += 1
        yield from self._generation(state, acknowledged)
        everything = wanted(self.scenario.seed)
        for path in acknowledged.shards:
            if _sha(state.get(path)) != everything[path.removeprefix("target/")]:
                yield f"{path}: an acknowledged shard is lost or damaged"
        if not acknowledged.manifest:
            yield from self._journal(state, acknowledged)

    def _generation(self, state: State, acknowledged: Acknowledged) -> Iterator[str]:
        manifest = state.get(MANIFEST)
        new, old = wanted(self.scenario.seed), self.scenario.old
        if manifest is None:
            if old is not None or acknowledged.manifest:
                yield "the manifest is lost"
            return
        digest = _sha(manifest)
        if acknowledged.manifest and digest != new["manifest.json"]:
            yield "the acknowledged manifest is lost"
        if digest not in (new["manifest.json"], (old or new)["manifest.json"]):
            yield "the manifest is neither the old nor the new one"
            return
        for shard in parse_manifest(MANIFEST, manifest).shards:
            if _sha(state.get(f"target/{shard.file}")) != shard.sha256:
                yield f"the manifest names {shard.file}, which is missing or damaged"

    def _journal(self, state: State, acknowledged: Acknowledged) -> Iterator[str]:
        contents = state.get(JOURNAL)
        if contents is None:
            if acknowledged.shards:
                yield "the journal of acknowledged shards is lost"
            return
        path = self.place / "journal"
        path.write_bytes(contents)
        try:
            lines, _ = read(path)
        except Exception as error:
            yield f"the journal cannot be read: {error!r}"
            return
        announced = {f"target/{line['shard']['file']}" for line in lines if "shard" in line}
        for missing in sorted(set(acknowledged.shards) - announced):
            yield f"{missing}: an acknowledged shard is not in the journal"

    def resume(self, state: State, acknowledged: Acknowledged) -> Iterator[str]:
        """Violations found by reading the state as a user, and by going on from it."""
        self.resumed += 1
        root = self.place / "state"
        write_tree(root, state)
        target = root / "target"
        try:
            readable(target)
            summary = finish(target, source(self.scenario.seed), OPTIONS)
            if digests(target) != wanted(self.scenario.seed) or leftovers(target):
                yield f"resume gave other files: {sorted(digests(target))}, {leftovers(target)}"
            begun = JOURNAL in state
            if begun and summary.resumed_shards < len(acknowledged.shards):
                yield f"resume made {len(acknowledged.shards)} acknowledged shards again"
        except LfdataError as error:
            yield f"an error that no legal state may cause: {error}"
        except Exception as error:
            yield f"an error without a type: {error!r}"
        finally:
            shutil.rmtree(root)


def _sha(data: bytes | None) -> str:
    return "" if data is None else hashlib.sha256(data).hexdigest()


def explore(name: str, place: Path, *, seed: int, each: int, resume_share: float, enough: int = 20) -> Checker:
    """Record and check one scenario."""
    wanted(0), wanted(1)
    checker = Checker(record(name, place), place, random.Random(seed))
    checker.explore(each, resume_share, enough)
    return checker
