"""A read-only mount: reading and verifying work and write nothing; converting there is a typed error."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest
from crashkit import read_tree
from faultkit import SMALL, run, synthetic, values, verified, with_options
from killkit import command, environment, in_child
from mounts import in_private_namespace, read_only

from lfdata.errors import LfdataError, StorageError
from lfdata.format.durable import Files

OPTIONS = with_options(SMALL, segment_rows=25, shard_bytes=9_000)


class Stopping(Files):
    """Stops in the middle, as a kill would."""

    left = 150

    def call(self, operation, path, function, **detail):  # type: ignore[no-untyped-def]
        del operation, path, detail
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return function()


def _whole(target: Path) -> None:
    read_only(target)
    with pytest.raises(OSError, match="Read-only"):
        (target / "probe").write_bytes(b"")
    assert len(values(target)) == 60
    verified(target)
    for verb in ("verify", "inspect", "stats"):
        done = subprocess.run(command(verb, target), env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, (verb, done)
    for how in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(LfdataError):
            run(target, synthetic(60), OPTIONS, **how)


def _unfinished(target: Path) -> None:
    read_only(target)
    with pytest.raises(StorageError, match="Read-only"):
        run(target, synthetic(60), OPTIONS, resume=True)


def test_a_finished_data_set(place: Path) -> None:
    run(place / "target", synthetic(60), OPTIONS)
    before = read_tree(place)
    in_private_namespace(partial(_whole, place / "target"))
    assert read_tree(place) == before


def test_an_unfinished_one(place: Path) -> None:
    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            run(place / "target", synthetic(60), OPTIONS, Stopping())

    assert in_child(interrupted) == 0
    before = read_tree(place)
    assert "target/.work/journal" in before
    in_private_namespace(partial(_unfinished, place / "target"))
    assert read_tree(place) == before
