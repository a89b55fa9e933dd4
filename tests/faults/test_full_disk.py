"""A full disk and a file-size limit at every size: a clear error, nothing half-visible, resume byte-identical once there is room."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from faultkit import SMALL, digests, expected_digests, finish, leftovers, readable, run, synthetic, verified, with_options
from killkit import command, environment, in_child
from mounts import in_private_namespace, resize, tmpfs

from lfdata.errors import DiskFullError, StorageError
from lfdata.format import durable
from lfdata.format.durable import Files, OutputFile
from shard_builder.journal import read

OPTIONS = with_options(SMALL, segment_rows=25, shard_bytes=9_000)
PAGE = os.sysconf("SC_PAGESIZE")
LARGE = 64 << 20


def source(seed: int = 0):  # type: ignore[no-untyped-def]
    return synthetic(60, seed)


def _full(place: Path, wanted: dict[str, str], sizes: range, overwrite: bool) -> None:
    disk = place / "disk"
    disk.mkdir(exist_ok=True)
    tmpfs(disk, LARGE)
    target = disk / "target"
    full = 0
    old = {}
    for size in sizes:
        if overwrite:
            run(target, source(1), OPTIONS)
            old = digests(target)
        found = os.statvfs(disk)
        resize(disk, (found.f_blocks - found.f_bfree) * found.f_frsize + size * PAGE)
        try:
            run(target, source(), OPTIONS, overwrite=overwrite)
        except DiskFullError as error:
            full += 1
            assert "resume" in str(error)
            seen = readable(target)
            assert seen in ({old["manifest.json"], wanted["manifest.json"]} if overwrite else {"", wanted["manifest.json"]})
        resize(disk, LARGE)
        finish(target, source(), OPTIONS)
        assert digests(target) == wanted
        assert leftovers(target) == []
        verified(target)
        shutil.rmtree(target)
    assert full >= len(sizes) // 2, "the disk was hardly ever full"


@pytest.mark.parametrize("overwrite", [False, True])
def test_full_at_some_sizes(overwrite: bool, place: Path) -> None:
    wanted = expected_digests(source(), OPTIONS)
    in_private_namespace(partial(_full, place, wanted, range(1, 40, 6), overwrite))


@pytest.mark.fault
@pytest.mark.parametrize("overwrite", [False, True])
def test_full_at_every_size(overwrite: bool, place: Path) -> None:
    wanted = expected_digests(source(), OPTIONS)
    in_private_namespace(partial(_full, place, wanted, range(1, 48), overwrite))


def _limited(target: Path, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(DiskFullError, match="resume"):
        run(target, source(), OPTIONS)


@pytest.mark.parametrize("limit", [1, 700, 4096, 5000, 9000, 16384])
def test_file_size_limit(limit: int, place: Path) -> None:
    """Python ignores SIGXFSZ, so that the limit shows as short writes and EFBIG."""
    target = place / "target"
    assert in_child(partial(_limited, target, limit)) == 0
    assert readable(target) == ""
    finish(target, source(), OPTIONS)
    assert digests(target) == expected_digests(source(), OPTIONS)


def _command_on_full_disk(place: Path) -> None:
    disk = place / "disk"
    disk.mkdir()
    rows = place / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"key": str(n), "text": f"{n} " * 400}) for n in range(300)))
    tmpfs(disk, 256 << 10)
    arguments = command(
        "convert", rows, disk / "target", "--field", "t:text=text", "--quiet", "--workers", "1", "--shard-size", "40K"
    )
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert "No space left on device" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (disk / "target" / "manifest.json").exists()
    resize(disk, LARGE)
    done = subprocess.run([*arguments, "--resume"], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    run_again = [*arguments[:5], str(place / "whole"), *arguments[6:]]
    subprocess.run(run_again, env=environment(), check=True)
    assert digests(disk / "target") == digests(place / "whole")


def test_the_command_on_a_full_disk(place: Path) -> None:
    in_private_namespace(partial(_command_on_full_disk, place))


# -- fsync -------------------------------------------------------------------------------------------------------------


class UnsyncableFiles(Files):
    """The fsync of one file fails, once; what came after it is listed."""

    def __init__(self, ending: str, skip: int) -> None:
        self.ending, self.skip = ending, skip
        self.failed = ""
        self.after: list[tuple[str, str]] = []

    def call(self, operation, path, function, **detail):  # type: ignore[no-untyped-def]
        del detail
        if self.failed:
            self.after.append((operation, path.name))
        elif operation == "fsync" and path.name.endswith(self.ending):
            self.skip -= 1
            if self.skip < 0:
                self.failed = path.name
                raise OSError(5, "Input/output error")
        return function()


@pytest.mark.parametrize(("ending", "skip"), [(".lfd", 0), (".lfd", 2), ("journal", 2), ("manifest.json", 0), ("index.lfi", 0)])
def test_fsync_that_fails_once_is_not_a_commit(ending: str, skip: int, place: Path) -> None:
    target = place / "target"
    files = UnsyncableFiles(ending, skip)
    with pytest.raises(StorageError, match="fsync"):
        run(target, source(), OPTIONS, files)
    assert ("fsync", files.failed) not in files.after, "a failed fsync was tried again"
    assert not any(operation == "rename" for operation, _ in files.after)
    final = files.failed.removeprefix(".tmp-")
    if final != "journal":
        assert not (target / final).exists(), "the file is visible although it may not be on the disk"
    lines, _ = read(target / ".work" / "journal")
    there = [line for line in lines if "shard" in line and (target / line["shard"]["file"]).exists()]
    summary = finish(target, source(), OPTIONS)
    assert summary.resumed_shards == len(there)
    assert digests(target) == expected_digests(source(), OPTIONS)


def test_fsync_of_a_directory_that_fails_once_stops_the_run(place: Path) -> None:
    class Files_(Files):
        failed = False

        def sync_directory(self, path: Path) -> None:
            if path.name == "target" and any(path.glob("*.lfd")) and not self.failed:
                self.failed = True
                raise durable.storage_error(path, "syncdir", OSError(5, "Input/output error"))
            super().sync_directory(path)

    target = place / "target"
    with pytest.raises(StorageError, match="syncdir"):
        run(target, source(), OPTIONS, Files_())
    assert readable(target) == ""
    finish(target, source(), OPTIONS)
    assert digests(target) == expected_digests(source(), OPTIONS)


def test_a_file_is_synced_once(place: Path) -> None:
    calls: list[Path] = []

    class Counting(Files):
        def call(self, operation, path, function, **detail):  # type: ignore[no-untyped-def]
            del detail
            if operation == "fsync":
                calls.append(path)
            return function()

    files = Counting()
    output: OutputFile = files.create(place / ".tmp-a")
    output.write(b"a" * 10)
    files.commit(output, place / "a")
    assert calls == [place / ".tmp-a"]
