"""The source ``lerobot``: frames are what LeRobot's own library reads, in every version of the format, and whoever converts them."""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _lerobot import FIXTURES, LENGTHS, STEP, VERSIONS, copy, edit_json, expected, loaded, opened, scanned
from faultkit import digests
from killkit import KillingFiles, in_child

import lfdata
from lfdata.errors import OptionError
from shard_builder.convert import convert
from shard_builder.fields import parse_field
from shard_builder.options import ConvertOptions
from shard_builder.sources import guess_kind, open_source
from shard_builder.sources import video as video_module

CAMERAS = ("observation.images.top", "observation.images.wrist", "observation.images.still")
OPTIONS = ConvertOptions(workers=1, shard_rows=5, segment_rows=11)


@pytest.fixture(scope="module")
def quick() -> Iterator[Path]:
    """A folder where fsync costs nothing, if there is such a place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def sets(quick: Path) -> dict[str, Path]:
    """Every version converted without loss, by one worker."""
    top = quick / "sets"
    for version in VERSIONS:
        convert(opened(FIXTURES / version, images="codec=png"), top / version, OPTIONS)
    return {version: top / version for version in VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_value_is_what_the_library_reads(sets: dict[str, Path], version: str) -> None:
    rows = list(lfdata.open(sets[version]))
    assert len(rows) == sum(LENGTHS)
    for name, values in expected(version).items():
        if name.startswith("window/"):
            continue
        found = np.stack([np.asarray(row[name]) for row in rows])
        found = found[:, ::STEP, ::STEP] if name in CAMERAS else found
        # The library narrows float64 to float32 on its way to torch; what is stored keeps its width.
        np.testing.assert_array_equal(found.astype(values.dtype), values, err_msg=name)


@pytest.mark.parametrize("version", VERSIONS)
def test_windows_are_what_the_library_gives_for_delta_timestamps(sets: dict[str, Path], version: str) -> None:
    deltas = {"observation.state": [-2, -1, 0], "action": range(6), "next.reward": [-1, 0, 20], CAMERAS[0]: [-3, 0]}
    data, values = lfdata.open(sets[version]), expected(version)
    found = data.windows(deltas).read(range(len(data)))
    for name in deltas:
        np.testing.assert_array_equal(found[f"{name}_is_pad"], values[f"window/{name}_is_pad"])
        if name != CAMERAS[0]:
            np.testing.assert_array_equal(found[name], values[f"window/{name}"])
    row, (before, now) = 8, found[CAMERAS[0]][8]
    # Frame 1 of the second episode: three before it lies the first, as padding.
    np.testing.assert_array_equal(before[::STEP, ::STEP], values[CAMERAS[0]][7])
    np.testing.assert_array_equal(now[::STEP, ::STEP], values[CAMERAS[0]][row])


def test_the_examples_of_the_document_run(sets: dict[str, Path]) -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "windows.md"
    examples = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    shapes = []
    for text in examples:
        names: dict[str, Any] = {"path": sets["v3.0"]}
        exec(compile(text, str(document), "exec"), names)
        shapes.append({name: tuple(value.shape) for name, value in names["batch"].items()})
    assert shapes[0]["action"] == (3, 16, 4) and shapes[0]["action_is_pad"] == (3, 16)
    assert shapes[1]["observation.images.top"] == (2, 2, 48, 48, 3) and shapes[1]["action_is_pad"] == (2, 16)


@pytest.mark.parametrize("version", VERSIONS)
def test_dtypes_and_shapes_are_those_that_are_declared(sets: dict[str, Path], version: str) -> None:
    row = lfdata.open(sets[version])[3]
    features = json.loads((FIXTURES / version / "meta/info.json").read_text())["features"]
    for name, feature in features.items():
        if feature["dtype"] in ("image", "video"):
            assert row[name].dtype == np.uint8 and row[name].shape == tuple(feature["shape"])
        elif feature["dtype"] != "string":
            shape = () if feature["shape"] == [1] else tuple(feature["shape"])
            assert np.asarray(row[name]).dtype == feature["dtype"] and np.asarray(row[name]).shape == shape, name


@pytest.mark.parametrize("version", VERSIONS)
def test_keys_and_columns_say_where_each_episode_begins(sets: dict[str, Path], version: str) -> None:
    data = lfdata.open(sets[version])
    frames = [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]
    assert data.keys(range(len(data))) == [b"%06d/%06d" % one for one in frames]
    assert list(zip(data.column("episode_index").tolist(), data.column("frame_index").tolist(), strict=True)) == frames


@pytest.mark.parametrize("version", VERSIONS)
def test_the_notes_keep_what_belongs_to_the_whole_set(tmp_path: Path, version: str) -> None:
    root = copy(version, tmp_path / "set")
    modality = {
        "state": {"arm": {"start": 0, "end": 5}, "hand": {"start": 5, "end": 6}},
        "video": {"top": {"original_key": CAMERAS[0]}},
    }
    (root / "meta/modality.json").write_text(json.dumps(modality))
    (root / "meta/stats.json").write_text('{"action": {"mean": [0.5, NaN, 1.0, 2.0]}}')
    notes = opened(root).notes()["lerobot"]
    assert notes["modality"] == modality
    assert notes["statistics"] == {"action": {"mean": [0.5, None, 1.0, 2.0]}}
    assert (notes["fps"], notes["episodes"], notes["frames"]) == (10, 3, 24)
    assert notes["tasks"] == {"0": "Pick up the red cube.", "1": "Öffne die Schublade — langsam."}
    assert notes["features"]["observation.state"]["names"] == [f"joint{n}" for n in range(6)]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_statistics_are_those_of_all_values(version: str) -> None:
    """v3.0 has them in one file, v2.1 episode by episode."""
    statistics, values = opened(FIXTURES / version).notes()["lerobot"]["statistics"], expected(version)
    for name in ("observation.state", "action", "next.reward"):
        column = values[name].reshape(24, -1).astype(np.float64)
        for what, wanted in (("mean", column.mean(0)), ("std", column.std(0)), ("min", column.min(0)), ("max", column.max(0))):
            np.testing.assert_allclose(statistics[name][what], wanted, rtol=1e-5, atol=1e-6)
        assert statistics[name]["count"] == [24]


@pytest.mark.parametrize("line", ["{}", '{"stats": 3}', '{"stats": {"a": {"min": [0]}}}', "[", '{"stats": {"a": 1}}'])
def test_statistics_that_are_none_are_left_out_with_a_warning(tmp_path: Path, line: str) -> None:
    root = copy("v2.1", tmp_path / "set")
    (root / "meta/episodes_stats.jsonl").write_text(line)
    notes = opened(root).notes()
    assert "statistics" not in notes["lerobot"] and "episodes_stats.jsonl is left out" in notes["warnings"][0]


def test_notes_that_are_no_json_are_left_out_with_a_warning(tmp_path: Path) -> None:
    root = copy("v3.0", tmp_path / "set")
    (root / "meta/modality.json").write_text('{"state": ')
    notes = opened(root).notes()
    assert "modality" not in notes["lerobot"]
    assert any("meta/modality.json" in warning for warning in notes["warnings"])


def test_a_set_of_v20_is_read_like_one_of_v21(tmp_path: Path) -> None:
    """They differ in where statistics are: v2.0 has one file for all episodes."""
    root = copy("v2.1", tmp_path / "set")
    edit_json(root / "meta/info.json", lambda info: info.update(codebase_version="v2.0"))
    (root / "meta/episodes_stats.jsonl").rename(root / "meta/stats.json")
    mine, theirs = loaded(opened(root)), loaded(opened(FIXTURES / "v2.1"))
    for one, other in zip(mine, theirs, strict=True):
        for name, value in other.values.items():
            np.testing.assert_array_equal(one.values[name], value)


def test_the_kind_is_told_by_meta_info(tmp_path: Path) -> None:
    assert guess_kind(str(FIXTURES / "v3.0")) == "lerobot"
    (tmp_path / "meta").mkdir()
    assert guess_kind(str(tmp_path)) == "image-folder"


@pytest.mark.parametrize("version", VERSIONS)
def test_two_workers_make_the_same_bytes(sets: dict[str, Path], quick: Path, version: str) -> None:
    two = ConvertOptions(workers=2, shard_rows=5, segment_rows=11)
    convert(opened(FIXTURES / version, images="codec=png"), quick / f"two-{version}", two)
    assert digests(quick / f"two-{version}") == digests(sets[version])


def test_killed_anywhere_and_resumed_the_bytes_are_the_same(sets: dict[str, Path], quick: Path) -> None:
    resumed = ConvertOptions(workers=1, shard_rows=5, segment_rows=11, resume=True)
    for at in (12, 75):
        target = quick / f"at{at}"
        source = opened(FIXTURES / "v3.0", images="codec=png")
        assert (
            in_child(
                lambda at=at, target=target, source=source: convert(
                    source, target, OPTIONS, files=KillingFiles(at, random.Random(at))
                )
            )
            == -9
        )  # type: ignore[misc]
        convert(opened(FIXTURES / "v3.0", images="codec=png"), target, resumed)
        assert digests(target) == digests(sets["v3.0"])


def test_declared_fields_take_features_and_task_as_columns(tmp_path: Path) -> None:
    fields = [
        parse_field('top:image="observation.images.top",codec=jpeg,exact=32x24'),
        parse_field('state:array="observation.state",dtype=float64,ndim=1'),
        parse_field("what:bytes=task"),
    ]
    convert(open_source(str(FIXTURES / "v2.1"), fields=fields), tmp_path / "out", ConvertOptions(workers=1))
    data = lfdata.open(tmp_path / "out")
    row, values = data[9], expected("v2.1")
    assert row["top"].shape == (24, 32, 3)
    np.testing.assert_array_equal(row["state"], values["observation.state"][9].astype(np.float64))
    assert row["what"].decode() == values["task"][9]


def test_the_task_can_be_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", exc_type=ImportError)
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"Pick": 0, "up": 1, "the": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    fields = [parse_field(f'ids:tokens=task,tokenizer="{tmp_path / "words.json"}"')]
    convert(open_source(str(FIXTURES / "v3.0"), fields=fields), tmp_path / "out", ConvertOptions(workers=1))
    assert lfdata.open(tmp_path / "out")[0]["ids"].tolist() == [0, 1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"images": "codec"}, None, "images="),
        ({"tolerance": "soon"}, None, "tolerance="),
        ({"tolerance": "-1"}, None, "tolerance="),
        ({"pictures": "1"}, None, "unknown option"),
        ({}, ["a:array=nothing,dtype=int8,ndim=1"], "observation.state"),
        ({"images": "codec=png"}, ["a:text=task"], "--field"),
    ],
)
def test_options_that_make_no_sense_say_what_would(options: dict[str, str], fields: list[str] | None, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        open_source(str(FIXTURES / "v3.0"), fields=[parse_field(one) for one in fields] if fields else None, **options)


def test_each_frame_of_a_video_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several episodes share a file in v3.0: neither is one opened for each of them, nor a frame searched for."""
    counts: dict[str, int] = {"opened": 0, "frames": 0}
    whole = video_module.VideoFile._decoded

    def counted(self: Any) -> Any:
        counts["opened"] += 1
        for frame in whole(self):
            counts["frames"] += 1
            yield frame

    monkeypatch.setattr(video_module.VideoFile, "_decoded", counted)
    assert len(loaded(opened(FIXTURES / "v3.0"))) == 24
    assert counts == {"opened": 2, "frames": 2 * 24}


def test_no_absolute_path_is_kept(sets: dict[str, Path]) -> None:
    for version, target in sets.items():
        about = (target / "manifest.json").read_bytes()
        assert os.fsencode(FIXTURES) not in about and version.encode() in about


def test_sizes_add_up_to_no_more_than_the_source(tmp_path: Path) -> None:
    for version in VERSIONS:
        good, bad = scanned(opened(FIXTURES / version))
        whole = sum(path.stat().st_size for path in (FIXTURES / version).rglob("*") if path.is_file())
        assert not bad and 0 < sum(record.size for record in good) <= whole
