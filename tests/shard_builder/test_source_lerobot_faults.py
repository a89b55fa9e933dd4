"""The source ``lerobot`` on data sets that are broken: errors name the file and what is wrong; nothing wrong becomes a sample."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _lerobot import FIXTURES, VERSIONS, copy, edit_json, edit_parquet, loaded, opened, pa, scanned, with_column

import lfdata
from lfdata.errors import MissingExtraError, SampleError, SourceError
from shard_builder.convert import convert
from shard_builder.options import ConvertOptions

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456\n"
TOP = "observation.images.top"
DATA = {"v2.1": "data/chunk-000/episode_000001.parquet", "v3.0": "data/chunk-000/file-000.parquet"}
VIDEO = {"v2.1": f"videos/chunk-000/{TOP}/episode_000001.mp4", "v3.0": f"videos/{TOP}/chunk-000/file-000.mp4"}


def info(**changes: Any) -> Callable[[Path], None]:
    """Changes of ``info.json``."""
    return lambda root: edit_json(root / "meta/info.json", lambda value: value.update(changes))


def text(path: str, content: str) -> Callable[[Path], None]:
    """Another content of a file."""
    return lambda root: (root / path).write_text(content) and None


@pytest.mark.parametrize(
    ("version", "spoil", "message"),
    [
        ("v3.0", text("meta/info.json", ""), r"info.json: the file is empty; .*fetch it again"),
        (
            "v3.0",
            text("meta/info.json", "[]"),
            r"info.json: holds a list where an object describes the data set .*fetch it again",
        ),
        ("v3.0", text("meta/info.json", "null"), r"info.json: holds null where .*fetch it again"),
        ("v3.0", text("meta/info.json", '"v3.0"'), r"info.json: holds a text where .*fetch it again"),
        ("v3.0", text("meta/info.json", "3"), r"info.json: holds a number where .*fetch it again"),
        ("v3.0", text("meta/info.json", "{}"), r"info.json: holds an empty object, .*fetch it again"),
        ("v3.0", text("meta/info.json", '{"fps": 10}'), r"info.json: holds an object without codebase_version.*fetch it again"),
        ("v3.0", text("meta/info.json", '{"codebase_version": 3}'), r"info.json: codebase_version is 3, not a text"),
        ("v3.0", text("meta/info.json", "not json"), r"info.json: not JSON: .*fetch it again"),
        ("v3.0", text("meta/info.json", '{"codebase_version": "v3.0", "fps": 1'), r"info.json: .*truncated"),
        ("v3.0", text("meta/info.json", '{"codebase_version": "v3.0"}'), r"info.json: .*missing required field"),
        ("v3.0", text("meta/info.json", POINTER), r"info.json: .*git lfs pull"),
        ("v3.0", info(codebase_version="v1.6"), r"v1.6.* not read; upgrade"),
        ("v3.0", info(codebase_version="v4.0"), r"'v4.0'; this version reads v2.0, v2.1, v3.0"),
        ("v3.0", info(codebase_version=""), r"codebase_version ''"),
        ("v3.0", info(fps=0), r"fps above 0"),
        ("v3.0", info(features={}), r"needs features"),
        ("v3.0", info(total_frames=25), r"total_frames is 25, but meta/episodes makes it 24"),
        ("v2.1", info(total_episodes=4), r"total_episodes is 4, but meta/episodes.jsonl makes it 3"),
        ("v2.1", info(video_path=None), r"no video_path"),
        ("v2.1", info(data_path="data/{episode_index.__class__}.parquet"), r"cannot be used: \{episode_index.__class__\}"),
        ("v2.1", info(data_path="data/{episode_index:>999999999}.parquet"), r"cannot be used"),
        ("v2.1", info(data_path="data/{0}.parquet"), r"cannot be used"),
        ("v2.1", info(data_path="data/{episode_index.parquet"), r"cannot be used"),
        (
            "v2.1",
            text("meta/episodes.jsonl", '{"episode_index": 0, "length": 7}\n{"episode_index": "one"}\n'),
            r"episodes.jsonl: line 2",
        ),
        ("v2.1", text("meta/episodes.jsonl", '{"episode_index": 0, "length": 7}\n' * 2), r"episode 0 is listed twice"),
        ("v2.1", text("meta/episodes.jsonl", '{"episode_index": 0, "length": -7}\n'), r"negative"),
        ("v2.1", text("meta/tasks.jsonl", '{"task_index": 0, "task": 1}'), r"tasks.jsonl: line 1"),
        ("v2.1", lambda root: (root / "meta/tasks.jsonl").unlink(), r"tasks.jsonl: no such file"),
        ("v3.0", text("meta/tasks.parquet", "PAR1 not"), r"tasks.parquet: not a Parquet file"),
        ("v3.0", text("meta/episodes/chunk-000/file-000.parquet", POINTER), r"file-000.parquet: .*git lfs pull"),
        ("v3.0", lambda root: (root / "meta/episodes/chunk-000/file-000.parquet").unlink(), r"meta/episodes: no parquet files"),
        (
            "v3.0",
            lambda root: edit_parquet(root / "meta/episodes/chunk-000/file-000.parquet", lambda t: t.drop_columns(["length"])),
            r"no column 'length'",
        ),
        (
            "v3.0",
            lambda root: edit_parquet(
                root / "meta/episodes/chunk-000/file-000.parquet",
                lambda t: with_column(t, f"videos/{TOP}/from_timestamp", pa.array([0.0, None, 1.9])),
            ),
            r"from_timestamp.* nulls",
        ),
    ],
)
def test_meta_that_cannot_be_trusted_is_refused_with_its_file(
    tmp_path: Path, version: str, spoil: Callable[[Path], Any], message: str
) -> None:
    root = copy(version, tmp_path / "set")
    spoil(root)
    with pytest.raises(SourceError, match=message):
        scanned(opened(root))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["action"]), r"no column 'action'; it has"),
        (lambda t: t.drop_columns(["timestamp"]), r"no column 'timestamp'"),
        (lambda t: with_column(t, "action", pa.array(["x"] * len(t))), r"column 'action' .*string, not float32"),
        (lambda t: with_column(t, "action", pa.array([1.0] * len(t), pa.float32())), r"column 'action' .*lists 0 deep"),
        (lambda t: with_column(t, "next.done", pa.array([1] * len(t))), r"column 'next.done' .*int64, not bool"),
        (lambda t: with_column(t, "note", pa.array([1] * len(t))), r"column 'note' .*not text"),
        (lambda t: with_column(t, "observation.images.still", pa.array(["a"] * len(t))), r"not pictures"),
    ],
)
def test_a_parquet_file_of_another_schema_is_refused_by_column(
    tmp_path: Path, version: str, change: Callable[[Any], Any], message: str
) -> None:
    root = copy(version, tmp_path / "set")
    edit_parquet(root / DATA[version], change)
    with pytest.raises(SourceError, match=DATA[version] + ".*" + message):
        scanned(opened(root))


def test_rows_of_an_episode_that_meta_does_not_list_are_refused(tmp_path: Path) -> None:
    root = copy("v3.0", tmp_path / "set")
    edit_parquet(root / DATA["v3.0"], lambda t: with_column(t, "episode_index", pa.array([0] * 7 + [9] * 12 + [2] * 5)))
    with pytest.raises(SourceError, match="has rows of episode 9"):
        scanned(opened(root))


def _length(root: Path) -> None:
    path = root / "meta/episodes.jsonl"
    path.write_text(path.read_text().replace('"length": 12', '"length": 11'))
    edit_json(root / "meta/info.json", lambda value: value.update(total_frames=23))


@pytest.mark.parametrize(
    ("spoil", "code", "place"),
    [
        (lambda root: (root / DATA["v2.1"]).unlink(), "missing-file", DATA["v2.1"]),
        (text(DATA["v2.1"], POINTER), "lfs-pointer", DATA["v2.1"]),
        (text(DATA["v2.1"], "PAR1"), "parquet", DATA["v2.1"]),
        (lambda root: (root / VIDEO["v2.1"]).unlink(), "missing-file", VIDEO["v2.1"]),
        (text(VIDEO["v2.1"], POINTER), "lfs-pointer", VIDEO["v2.1"]),
        (lambda root: ((root / VIDEO["v2.1"]).unlink(), os.mkfifo(root / VIDEO["v2.1"])), "not-a-file", VIDEO["v2.1"]),
        (_length, "episode-length", DATA["v2.1"]),
        (
            lambda root: edit_parquet(root / DATA["v2.1"], lambda t: with_column(t, "frame_index", pa.array([5] * 12))),
            "frame-index",
            DATA["v2.1"],
        ),
        (
            lambda root: edit_parquet(
                root / DATA["v2.1"], lambda t: with_column(t, "timestamp", pa.array([0.5] * 12, pa.float32()))
            ),
            "timestamp",
            DATA["v2.1"],
        ),
        (
            lambda root: edit_parquet(root / DATA["v2.1"], lambda t: with_column(t, "task_index", pa.array([7] * 12))),
            "no-task",
            DATA["v2.1"],
        ),
        (
            lambda root: edit_parquet(
                root / DATA["v2.1"], lambda t: with_column(t, "index", pa.array([None] * 12, pa.int64()))
            ),
            "columns",
            DATA["v2.1"],
        ),
    ],
)
def test_an_episode_that_is_broken_is_one_bad_sample_and_the_others_stay(
    tmp_path: Path, spoil: Callable[[Path], Any], code: str, place: str
) -> None:
    root = copy("v2.1", tmp_path / "set")
    spoil(root)
    good, bad = scanned(opened(root))
    assert [(one.key, one.code) for one in bad] == [(b"000001", code)] and place in bad[0].path
    assert len(good) == 12 and not any(one.key.startswith(b"000001") for one in good)


def test_an_episode_in_two_places_of_a_file_is_bad(tmp_path: Path) -> None:
    root = copy("v3.0", tmp_path / "set")
    episodes = [0] * 7 + [1] * 6 + [2] * 5 + [1] * 6
    edit_parquet(root / DATA["v3.0"], lambda t: with_column(t, "episode_index", pa.array(episodes)))
    _, bad = scanned(opened(root))
    assert (b"000001", "episode-split") in [(one.key, one.code) for one in bad]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_timestamp_without_a_frame_is_a_bad_sample_and_the_rest_is_converted(tmp_path: Path, version: str) -> None:
    root = copy(version, tmp_path / "set")

    def late(table: Any) -> Any:
        times = table.column("timestamp").to_numpy().copy()
        times[3] += np.float32(0.04)
        return with_column(table, "timestamp", pa.array(times))

    edit_parquet(root / DATA[version], late)
    skip = ConvertOptions(workers=1, on_error="skip")
    summary = convert(opened(root), tmp_path / "out", skip)
    assert (summary.samples, summary.errors) == (23, 1)
    (entry,) = [json.loads(line) for line in (tmp_path / "out/errors.jsonl").read_text().splitlines()]
    episode = 1 if version == "v2.1" else 0
    assert (entry["code"], entry["key"]) == ("no-frame", f"{episode:06d}/000003")
    assert VIDEO[version] in entry["path"] and "tolerance" in entry["reason"]
    with pytest.raises(SampleError, match="no-frame"):
        loaded(opened(root))
    assert len(loaded(opened(root, tolerance="0.05"))) == 24


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cut_video_gives_named_errors_for_the_frames_it_lost(tmp_path: Path, version: str) -> None:
    root = copy(version, tmp_path / "set")
    data = (root / VIDEO[version]).read_bytes()
    (root / VIDEO[version]).write_bytes(data[: data.index(b"mdat") + 200])
    source = opened(root)
    good, _ = scanned(source)
    codes = []
    for record in good:
        try:
            source.load(record.locator)
        except SampleError as error:
            codes.append(error.code)
            assert error.field == TOP and VIDEO[version] in error.path
    assert codes and set(codes) <= {"video", "no-frame"}
    assert len(codes) < len(good) or version == "v3.0"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([[1.0, 2.0, 3.0]] + [[1.0, 2.0, 3.0, 4.0]] * 11, "shape"),
        ([[1.0, None, 3.0, 4.0]] + [[1.0, 2.0, 3.0, 4.0]] * 11, "shape"),
    ],
)
def test_a_value_of_another_shape_is_a_bad_sample(tmp_path: Path, values: list[Any], code: str) -> None:
    root = copy("v2.1", tmp_path / "set")
    edit_parquet(root / DATA["v2.1"], lambda t: with_column(t, "action", pa.array(values, pa.list_(pa.float32()))))
    source = opened(root)
    good, _ = scanned(source)
    with pytest.raises(SampleError, match="action") as caught:
        source.load(good[7].locator)
    assert caught.value.code == code and "row 0" in caught.value.path
    assert source.load(good[8].locator).values["action"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("version", VERSIONS)
def test_single_numbers_may_be_lists_of_one(tmp_path: Path, version: str) -> None:
    """Written by other tools than the library."""
    root = copy(version, tmp_path / "set")

    def listed(table: Any) -> Any:
        for name in ("timestamp", "frame_index", "episode_index", "task_index", "next.reward", "next.done"):
            table = with_column(table, name, pa.array([[value] for value in table.column(name).to_pylist()]))
        return table

    wanted = loaded(opened(root))
    edit_parquet(root / DATA[version], listed)
    source = opened(root, tolerance="1e-3")
    scalars = ("timestamp", "frame_index", "task_index", "next.reward", "next.done", "task")
    for one, other in zip(loaded(source), wanted, strict=True):
        for name in scalars:
            assert one.values[name] == other.values[name] and np.ndim(one.values[name]) == 0, name


def test_a_null_value_leaves_the_field_absent(tmp_path: Path) -> None:
    root = copy("v2.1", tmp_path / "set")
    values = [None] + [[1.0, 2.0, 3.0, 4.0]] * 11
    edit_parquet(root / DATA["v2.1"], lambda t: with_column(t, "action", pa.array(values, pa.list_(pa.float32()))))
    rows = loaded(opened(root))
    assert "action" not in rows[7].values and "action" in rows[8].values


def test_wider_floats_than_declared_are_rounded_as_the_library_does(tmp_path: Path) -> None:
    root = copy("v2.1", tmp_path / "set")
    values = pa.array([[0.1, 0.2, 0.3, 0.4]] * 12, pa.list_(pa.float64()))
    edit_parquet(root / DATA["v2.1"], lambda t: with_column(t, "action", values))
    found = loaded(opened(root))[7].values["action"]
    assert found.dtype == np.float32 and found.tolist() == np.array([0.1, 0.2, 0.3, 0.4], np.float32).tolist()


def test_files_that_change_after_the_scan_are_noticed(tmp_path: Path) -> None:
    root = copy("v3.0", tmp_path / "set")
    source = opened(root)
    good, _ = scanned(source)
    edit_parquet(root / DATA["v3.0"], lambda t: t.slice(1))
    with pytest.raises(SampleError, match="another one than when it was scanned"):
        source.load(good[0].locator)
    with pytest.raises(SampleError, match="fewer rows"):
        source.load(good[-1].locator)


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    root = copy("v2.1", tmp_path / "set")
    edit_json(root / "meta/info.json", lambda value: value.update(video_path="../{video_key}/{episode_index}.mp4"))
    good, bad = scanned(opened(root))
    assert not good and {one.code for one in bad} == {"outside-root"}


def test_without_its_libraries_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"lfdata\[video\]"):
        opened(FIXTURES / "v3.0")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"lfdata\[arrow\]"):
        opened(FIXTURES / "v3.0")


def test_the_first_bad_sample_stops_a_conversion_by_default(tmp_path: Path) -> None:
    root = copy("v2.1", tmp_path / "set")
    (root / VIDEO["v2.1"]).unlink()
    with pytest.raises(lfdata.errors.LfdataError, match="missing-file"):
        convert(opened(root), tmp_path / "out", ConvertOptions(workers=1))
