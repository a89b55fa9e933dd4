"""``shard-builder show``: the sheet shows the pixels, names every fault instead of stopping, and never obeys the data."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path

import _build
import msgspec
import numpy as np
import pytest
import zstandard
from click.testing import CliRunner
from PIL import Image, features

from lfdata.codecs.base import Encoded
from lfdata.errors import KeyMissingError, OptionError, StorageError
from shard_builder.examine.opened import DataSet
from shard_builder.examine.sample import load
from shard_builder.examine.tiles import FAULT, PAPER, Font, caption, picture_tile, wave_tile
from shard_builder.verbs.show import GAP, command, contact_sheet, show_sample

HOSTILE = b"../../etc/\x1b[31mpasswd\n\xff\xe2\x80\xae"


def pixels(png: bytes) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def cell(sheet: np.ndarray, column: int, row: int, tile: int, height: int) -> np.ndarray:  # type: ignore[type-arg]
    y, x = GAP + row * height, GAP + column * (tile + GAP)
    return sheet[y : y + tile, x : x + tile]


# -- contact sheet ------------------------------------------------------------------------------------------------------------


def test_tiles_hold_the_pictures_in_order_and_captions_differ(tmp_path: Path) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
    rows = [
        (f"k{n}".encode(), {"image": _build.png(np.full((30, 30, 3), colour, np.uint8)), "caption": f"caption {n}"})
        for n, colour in enumerate(colours)
    ]
    _build.build(tmp_path, [rows[:3], rows[3:]])
    png, faults = contact_sheet(tmp_path, tile=64, columns=2)
    sheet = pixels(png)
    assert faults == [] and sheet.shape[1] == 2 * (64 + GAP) + GAP
    height = (sheet.shape[0] - GAP) // 2
    for number, colour in enumerate(colours):
        assert (cell(sheet, number % 2, number // 2, 64, height) == colour).all()
    below = [sheet[GAP + 64 : height, GAP + n * (64 + GAP) : GAP + n * (64 + GAP) + 64] for n in range(2)]
    assert all((part < 100).all(axis=2).any() for part in below) and (below[0] != below[1]).any()
    again, _ = contact_sheet(tmp_path, [3, 0], tile=64, columns=2)
    assert (cell(pixels(again), 0, 0, 64, height) == colours[3]).all()
    assert (cell(pixels(again), 1, 0, 64, height) == colours[0]).all()


def test_a_bad_sample_is_a_red_tile_and_the_rest_is_drawn(tmp_path: Path) -> None:
    sizes = {"width": 20, "height": 12, "channels": 3, "codec": 3, "bits": 8}
    rows = [*_build.rows(2), (b"bad", {"image": Encoded(b"no picture", sizes)}), *_build.rows(1, 2)]
    manifest = _build.build(tmp_path, [rows, _build.rows(1, 9)])
    (tmp_path / manifest.shards[1].file).unlink()
    png, faults = contact_sheet(tmp_path, tile=64, columns=5)
    sheet = pixels(png)
    corners = [tuple(cell(sheet, n, 0, 64, 0)[-1, -1]) for n in range(5)]
    assert [corner == FAULT for corner in corners] == [False, False, True, False, True]
    assert [(f["index"], f["file"], f["row"], f["key"]) for f in faults] == [
        (2, manifest.shards[0].file, 2, "bad"),
        (4, manifest.shards[1].file, 0, None),
    ]
    assert "missing" in faults[1]["reason"] and "[" in faults[0]["reason"]


def test_samples_without_pictures_and_hostile_text_are_drawn(tmp_path: Path) -> None:
    rows = [
        (b"text", {"caption": "words " * 500}),
        (b"bidi", {"caption": "\u202eevil \x1b[2J \u65e5\u672c \u0416 \U0001f600 \x00"}),
        (b"sound", {"sound": _build.tone(5000, channels=2)}),
        (b"json", {"about": {"a": [1, 2], "b": {"c": None}, "d": "x" * 10_000}}),
        (b"list", {"about": [1, 2, 3]}),
        (b"tokens", {"ids": list(range(900))}),
        (b"array", {"vector": np.array([1, np.nan], np.float32)}),
        (b"bytes", {"blob": bytes(range(256))}),
        (b"label", {"label": 7}),
        (HOSTILE, {}),
    ]
    _build.build(tmp_path, [rows])
    png, faults = contact_sheet(tmp_path, tile=96, columns=10)
    sheet = pixels(png)
    assert faults == []
    inked = [bool((cell(sheet, n, 0, 96, 0) != PAPER).any()) for n in range(10)]
    assert all(inked)
    for size in (32, 300):
        assert contact_sheet(tmp_path, tile=size)[1] == []


@pytest.mark.parametrize("shards", [[], [[]]])
def test_an_empty_data_set_gives_a_sheet_that_says_so(tmp_path: Path, shards: list[list[_build.Row]]) -> None:
    _build.build(tmp_path, shards)
    png, faults = contact_sheet(tmp_path)
    assert faults == [] and (pixels(png) < 100).any()


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(2)])
    with pytest.raises(OptionError, match="no sample 2"):
        contact_sheet(tmp_path, [2])
    with pytest.raises(OptionError, match="too large"):
        contact_sheet(tmp_path, [0] * 5000, tile=512)
    with pytest.raises(OptionError, match="no field"):
        contact_sheet(tmp_path, field="nope")
    with pytest.raises(OptionError, match="directory"):
        contact_sheet(tmp_path / manifest.shards[0].file)


# -- tiles ------------------------------------------------------------------------------------------------------------------


def test_sixteen_bits_are_stretched_and_alpha_lets_the_board_show() -> None:
    deep = np.array([[1000, 1500], [1250, 2000]], np.uint16)[..., None]
    tile = np.asarray(picture_tile(deep, 2))
    assert tile[0, 0].tolist() == [0, 0, 0] and tile[1, 1].tolist() == [255, 255, 255]
    assert tile[0, 1].tolist() == [128, 128, 128]
    clear = np.zeros((64, 64, 4), np.uint8)
    tile = np.asarray(picture_tile(clear, 64))
    assert {tuple(colour) for colour in tile.reshape(-1, 3).tolist()} == {(255, 255, 255), (208, 208, 208)}
    solid = np.zeros((64, 64, 2), np.uint8)
    solid[..., 1] = 255
    assert not np.asarray(picture_tile(solid, 64)).any()


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5000, 3), (5000, 1, 4), (3, 2, 2)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_every_shape_fits_its_tile(shape: tuple[int, ...], dtype: type) -> None:
    assert picture_tile(np.ones(shape, dtype), 48).size == (48, 48)


def test_a_waveform_follows_the_samples() -> None:
    samples = np.zeros((1000, 1), np.int16)
    samples[500:] = 16384
    tile = np.asarray(wave_tile(samples, 100))
    inked = [np.flatnonzero((tile[:, x] != PAPER).any(axis=1)).tolist() for x in (10, 90)]
    assert inked[0] and inked[1] and min(inked[0]) == 50 and min(inked[1]) == 25
    assert wave_tile(samples[:0], 50).size == (50, 50)
    assert wave_tile(np.zeros((3, 600), np.int16), 50).size == (50, 50)


def test_lines_fit_and_control_characters_become_visible() -> None:
    font = Font(12)
    lines = font.wrap("one two \u202e three\x1b[0m " + "x" * 500, 80, 4)
    assert len(lines) == 4 and lines[-1].endswith("\u2026") and "\x1b" not in "".join(lines) and "\\u202e" in "".join(lines)
    assert all(font.font.getlength(line) <= 80 for line in lines)
    assert font.wrap("", 80, 3) == []
    assert all(len(line) == 1 for line in font.wrap("abc", 1, 5))


def test_the_font_of_pil_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _build.build(tmp_path, [[(b"k", {"caption": "h\u00e9 \u65e5\u672c"})]])
    monkeypatch.setattr("shard_builder.examine.tiles._SYSTEM_FONTS", ())
    assert contact_sheet(tmp_path)[1] == []
    monkeypatch.setattr(features, "check", lambda _: False)
    assert contact_sheet(tmp_path)[1] == []
    assert Font(12).safe("\u65e5") == "\\u65e5"


def test_captions_prefer_text_then_label_then_any_scalar_then_key(tmp_path: Path) -> None:
    fields = {"size": ("scalar", {"dtype": "int8"}), "class_id": ("scalar", {"dtype": "int8"}), "words": ("text", {})}
    rows = [
        (b"a", {"words": "hello", "class_id": 1}),
        (b"b", {"words": " ", "size": 2, "class_id": 3}),
        (b"c", {"size": 4}),
        (HOSTILE, {}),
    ]
    _build.build(tmp_path, [rows], fields)
    data = DataSet.open(tmp_path)
    assert [caption(load(data, n)) for n in range(3)] == ["hello", "class_id: 3", "size: 4"]
    assert caption(load(data, 3)).isprintable() and "\\x1b" in caption(load(data, 3))


# -- one sample -------------------------------------------------------------------------------------------------------------


def test_one_sample_by_index_and_key(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(3), [(HOSTILE, _build.row(9))]])
    run = CliRunner().invoke(command, [str(tmp_path), "--key", "key/0001", "--json"])
    about = json.loads(run.output)
    fields = about["fields"]
    assert run.exit_code == 0 and (about["index"], about["row"], about["file"]) == (1, 1, manifest.shards[0].file)
    assert fields["image"]["shape"] == [12, 20, 3] and fields["image"]["sizes"]["codec"] == "png"
    assert fields["caption"]["value"] == "picture number 1" and fields["about"]["value"] == {"number": 1, "tags": ["a", "b"]}
    assert fields["sound"]["seconds"] == 201 / 8000 and 0.4 < fields["sound"]["peak"] < 0.51
    assert (fields["ids"]["count"], fields["ids"]["first"]) == (3, [1, 1, 2])
    assert (fields["vector"]["shape"], fields["vector"]["max"]) == ([2], 1.0) and fields["label"]["value"] == 1
    assert show_sample(tmp_path, key=HOSTILE).index == 3 and show_sample(tmp_path, -1).key == HOSTILE
    run = CliRunner().invoke(command, [str(tmp_path), "--sample", "3"])
    assert run.exit_code == 0 and all(line.isprintable() for line in run.output.splitlines())
    with pytest.raises(KeyMissingError):
        show_sample(tmp_path, key="nope")
    with pytest.raises(OptionError):
        show_sample(tmp_path, 4)
    with pytest.raises(OptionError):
        show_sample(tmp_path, 0, "key/0001")


def test_extracted_files_hold_the_values_and_have_safe_names(tmp_path: Path) -> None:
    fields = {**_build.FIELDS, "../../x": ("bytes", {})}
    values = _build.row(5) | {"../../x": b"evil"}
    _build.build(tmp_path / "set", [[(HOSTILE, values)]], fields)
    out = tmp_path / "deep" / "out"
    run = CliRunner().invoke(command, [str(tmp_path / "set"), "--sample", "0", "--extract", str(out)])
    assert run.exit_code == 0, run.output
    names = {path.name for path in out.iterdir()}
    assert names == {f"sample-0-{n:03d}.{e}" for n, e in enumerate(["png", "txt", "wav", "json", "npy", "bin", "bin"])} | {
        "sample-0-008.bin",
        "sample-0.json",
    }
    assert {path.name for path in tmp_path.iterdir()} == {"set", "deep"}
    assert (out / "sample-0-001.txt").read_text() == "picture number 5" and (out / "sample-0-008.bin").read_bytes() == b"evil"
    assert (np.asarray(Image.open(out / "sample-0-000.png")) == np.asarray(Image.open(io.BytesIO(_build.picture(5))))).all()
    with wave.open(str(out / "sample-0-002.wav")) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (8000, 205)
        assert sound.readframes(205) == _build.tone(205)[0].tobytes()
    assert json.loads((out / "sample-0-003.json").read_bytes()) == {"number": 5, "tags": ["a", "b"]}
    assert np.load(out / "sample-0-004.npy", allow_pickle=False).tolist() == [0, 1, 2]
    assert np.fromfile(out / "sample-0-005.bin", "<u2").tolist() == [5, 1, 2]
    assert json.loads((out / "sample-0.json").read_bytes())["fields"]["../../x"]["file"] == "sample-0-008.bin"
    run = CliRunner().invoke(command, [str(tmp_path / "set"), "--sample", "0", "--extract", str(out)])
    assert isinstance(run.exception, OptionError) and "exists" in str(run.exception)


def test_a_damaged_value_of_one_sample_is_told_and_the_others_shown(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1)])
    _build.flip(tmp_path / manifest.shards[0].file, 4100)
    run = CliRunner().invoke(command, [str(tmp_path), "--sample", "0"])
    assert run.exit_code == 1 and "BAD: " in run.output and "picture number 0" in run.output


def test_a_value_that_json_cannot_say_is_shown_all_the_same(tmp_path: Path) -> None:
    packed = msgspec.msgpack.encode({(1, 2): [{3: [[[["deep\x1b"]]]]}]})
    encoded = Encoded(zstandard.ZstdCompressor().compress(packed), {"raw_bytes": len(packed)})
    _build.build(tmp_path / "set", [[(b"k", {"about": encoded})]])
    for extra in ((), ("--json",)):
        run = CliRunner().invoke(command, [str(tmp_path / "set"), "--sample", "0", *extra])
        assert run.exit_code == 0 and "\x1b" not in run.output and "deep" in run.output
    assert contact_sheet(tmp_path / "set")[1] == []
    run = CliRunner().invoke(command, [str(tmp_path / "set"), "--sample", "0", "--extract", str(tmp_path / "out")])
    assert run.exit_code == 0 and {path.name for path in (tmp_path / "out").iterdir()} == {"sample-0-003.zst", "sample-0.json"}
    (tmp_path / "file").write_bytes(b"")
    run = CliRunner().invoke(command, [str(tmp_path / "set"), "--sample", "0", "--extract", str(tmp_path / "file" / "x")])
    assert isinstance(run.exception, StorageError)


def test_the_command_writes_the_sheet_and_lists_faults(tmp_path: Path) -> None:
    sizes = {"width": 1, "height": 1, "channels": 3, "codec": 3, "bits": 8}
    _build.build(tmp_path / "set", [[*_build.rows(3), (b"bad", {"image": Encoded(b"junk", sizes)})]])
    output = tmp_path / "sheet.png"
    arguments = [str(tmp_path / "set"), "-o", str(output), "--tile", "32"]
    run = CliRunner().invoke(command, [*arguments, "--indices", "0,1-2"])
    assert run.exit_code == 0 and Image.open(output).size[0] == 2 * (32 + GAP) + GAP
    run = CliRunner().invoke(command, [*arguments, "--json", "--start", "2"])
    assert run.exit_code == 1 and [bad["key"] for bad in json.loads(run.output)["bad"]] == ["bad"]
    assert CliRunner().invoke(command, [*arguments, "--indices", "1-x"]).exit_code == 2
    assert {path.name for path in tmp_path.iterdir()} == {"set", "sheet.png"}


def test_a_data_set_without_samples_gives_a_sheet_that_says_so(tmp_path: Path) -> None:
    _build.build(tmp_path / "set", [])
    answer = CliRunner().invoke(command, [str(tmp_path / "set"), "-o", str(tmp_path / "sheet.png")])
    assert answer.exit_code == 0 and "no samples" in answer.output
    assert Image.open(tmp_path / "sheet.png").size[0] > 0
    for more in (["--sample", "0"], ["--indices", "0"], ["--start", "3"]):
        asked = CliRunner().invoke(command, [str(tmp_path / "set"), "-o", str(tmp_path / "other.png"), *more])
        assert "the data set has no samples" in str(asked.exception)
    assert not (tmp_path / "other.png").exists()
