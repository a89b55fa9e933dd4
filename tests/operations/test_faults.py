"""Operations that are killed or meet a full disk leave their inputs whole and a result that is absent or can be finished, to the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _build import FIELDS, build, rows
from killkit import CountingFiles, KillingFiles, in_child, started, wait_until
from mounts import in_private_namespace, resize, tmpfs
from opskit import proved, tree

from lfdata.errors import DiskFullError, LfdataError
from lfdata.format.durable import Files
from shard_builder.fields import parse_field
from shard_builder.operations.build import BuildOptions
from shard_builder.operations.fields import add_field
from shard_builder.operations.filtering import filter_samples
from shard_builder.operations.merge import merge
from shard_builder.operations.salvage import salvage
from shard_builder.operations.selecting import ShardSizes
from shard_builder.operations.split import SplitOptions, split
from shard_builder.sinks.base import ExportOptions
from shard_builder.sinks.job import export

SMALL = BuildOptions(ShardSizes(shard_bytes=2_500, group_bytes=1_000), workers=1)
POINTS = 30  # at which each operation is killed, spread over its length
Operation = Callable[[Path, Path, Files], Any]
OPERATIONS: dict[str, Operation] = {
    "webdataset": lambda s, t, f: export(s, t, ExportOptions("webdataset", shard_bytes=8_000, workers=1), files=f),
    "parquet": lambda s, t, f: export(s, t, ExportOptions("parquet", shard_bytes=3_000, workers=1), files=f),
    "merge": lambda s, t, f: merge([s, s.with_name("other")], t, build=SMALL, duplicates="first", files=f),
    "split": lambda s, t, f: split(s, t, SplitOptions(("50", "50"), names=("a", "b")), build=SMALL, files=f),
    "filter": lambda s, t, f: filter_samples(s, t, "label != 1", build=SMALL, files=f),
    "salvage": lambda s, t, f: salvage(s, t, files=f),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    some = rows(12)
    build(root / "data", [some[:5], some[5:9], some[9:]], index=True)
    build(root / "other", [rows(4, 10)])
    return root / "data"


def finished(path: Path) -> bool:
    return (path / "manifest.json").exists() or (path / "export.json").exists()


@pytest.mark.fault
@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_any_operation_it_is_finished_by_the_same_call_to_the_same_bytes(
    source: Path, tmp_path: Path, name: str
) -> None:
    operation, before = OPERATIONS[name], tree(source)
    counting = CountingFiles()
    operation(source, tmp_path / "whole", counting)
    right = tree(tmp_path / "whole")
    rng = random.Random(name)
    assert counting.count > 20
    for at in range(0, counting.count, max(1, counting.count // POINTS)):
        target = tmp_path / f"at-{at}"
        assert in_child(lambda target=target, at=at: operation(source, target, KillingFiles(at, rng))) in (-9, 0)
        assert tree(source) == before
        if rng.random() < 0.3:  # and again
            in_child(lambda target=target, at=at: operation(source, target, KillingFiles(at // 2, rng)))
        operation(source, target, Files())
        assert tree(target) == right, f"killed at operation {at}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_half_way_nothing_is_finished_and_the_same_call_finishes_it(source: Path, tmp_path: Path, name: str) -> None:
    operation, before = OPERATIONS[name], tree(source)
    counting = CountingFiles()
    operation(source, tmp_path / "whole", counting)
    target = tmp_path / "killed"
    assert in_child(lambda: operation(source, target, KillingFiles(counting.count // 2, random.Random(1)))) == -9
    assert not finished(target) and tree(source) == before
    operation(source, target, Files())
    assert tree(target) == tree(tmp_path / "whole")


class Full(Files):
    """Writes fail for want of space from the n-th on."""

    def __init__(self, left: int) -> None:
        self.left = left

    def call(self, operation: str, path: Path, function: Any, **detail: Any) -> Any:
        if operation == "write":
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")
        return function()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_full_disk_is_a_typed_error_and_space_is_all_that_is_needed_to_go_on(source: Path, tmp_path: Path, name: str) -> None:
    operation = OPERATIONS[name]
    operation(source, tmp_path / "whole", Files())
    right = tree(tmp_path / "whole")
    for left in (0, 1, 2, 5, 9, 14):
        target = tmp_path / f"full-{left}"
        with pytest.raises(DiskFullError):
            operation(source, target, Full(left))
        assert not finished(target)
        assert not [item for item in target.rglob(".tmp-*") if ".work" not in item.parts]
        operation(source, target, Files())
        assert tree(target) == right


@pytest.mark.fault
@pytest.mark.parametrize("name", ["webdataset", "parquet", "filter"])
def test_a_small_file_system_fills_up_and_grows(tmp_path: Path, name: str) -> None:
    build(tmp_path / "data", [rows(40)])
    build(tmp_path / "other", [rows(4, 90)])
    operation = OPERATIONS[name]
    operation(tmp_path / "data", tmp_path / "whole", Files())
    right = tree(tmp_path / "whole")
    (tmp_path / "disk").mkdir()

    def inside() -> None:
        tmpfs(tmp_path / "disk", 60 << 10)
        with pytest.raises(DiskFullError):
            operation(tmp_path / "data", tmp_path / "disk" / "out", Files())
        resize(tmp_path / "disk", 64 << 20)
        operation(tmp_path / "data", tmp_path / "disk" / "out", Files())
        assert tree(tmp_path / "disk" / "out") == right

    in_private_namespace(inside)


@pytest.mark.fault
def test_add_field_killed_at_any_operation_keeps_the_old_fields_or_has_the_new_one(tmp_path: Path) -> None:
    fields = {name: FIELDS[name] for name in ("caption", "label")}
    some = [(key, {name: values[name] for name in fields}) for key, values in rows(6)]
    spec = parse_field("copy:text=caption")

    def made(path: Path, files: Files) -> None:
        build(path, [some[:3], some[3:]], fields, index=True)
        add_field(path, spec, workers=1, files=files)

    counting = CountingFiles()
    made(tmp_path / "data", counting)
    right = tree(tmp_path / "data")
    rng = random.Random(5)
    for at in range(0, counting.count, max(1, counting.count // POINTS)):
        path = tmp_path / f"at-{at}" / "data"
        assert in_child(lambda path=path, at=at: made(path, KillingFiles(at, rng))) in (-9, 0)
        try:
            add_field(path, spec, workers=1)
        except LfdataError as error:
            assert "--replace" in str(error)
        assert tree(path) == right, f"killed at operation {at}"


def test_a_killed_command_with_processes_leaves_no_process_and_is_finished_by_the_same_command(tmp_path: Path) -> None:
    build(tmp_path / "data", [rows(60)])
    arguments = (
        "export",
        tmp_path / "data",
        tmp_path / "out",
        "--format",
        "webdataset",
        "--shard-size",
        "40K",
        "--workers",
        "2",
    )
    with started(*arguments) as process:
        wait_until(lambda: list((tmp_path / "out").glob("data-*.tar")) or process.poll() is not None)
        process.kill()
        process.wait()
    with started(*arguments) as process:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    export(tmp_path / "data", tmp_path / "whole", ExportOptions("webdataset", shard_bytes=40 << 10, workers=1))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_results_of_every_operation_verify(source: Path, tmp_path: Path) -> None:
    for name in ("merge", "filter", "salvage"):
        OPERATIONS[name](source, tmp_path / name, Files())
        assert proved(tmp_path / name)
