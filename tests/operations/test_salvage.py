"""repair --salvage: what is whole is saved exactly, what is lost is listed, the damaged source is not touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from _build import build, flip, rows
from opskit import assert_same, samples, tree

import lfdata
from lfdata.errors import FormatError, LfdataError, OptionError, TargetExistsError
from lfdata.format.files import LocalFile
from lfdata.format.reader import ShardFile
from shard_builder.operations.salvage import LOST, salvage


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, list[dict[str, Any]], Path]:
    """A data set of three shards, its samples, and the file of the middle one."""
    side = {1: ("caption", ("text", {}), [f"new {number}" for number in range(8)])}
    manifest = build(tmp_path / "data", [rows(5), rows(8, 5), rows(4, 13)], index=True, sidecars=side)
    return tmp_path / "data", samples(tmp_path / "data"), tmp_path / "data" / manifest.shards[1].file


def lost(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (path / LOST).read_bytes().splitlines()]


def payload_of(path: Path, field: str, row: int) -> int:
    offsets, _, _ = ShardFile(LocalFile(path)).locate(field, np.array([row]))
    return int(offsets[0])


def test_a_damaged_value_costs_its_sample_and_no_other(
    damaged: tuple[Path, list[dict[str, Any]], Path], tmp_path: Path
) -> None:
    data, before, path = damaged
    flip(path, payload_of(path, "image", 3) + 5)
    flip(path, payload_of(path, "blob", 6))
    was = tree(data)
    made = salvage(data, tmp_path / "saved")
    assert (made.rows, made.lost, made.whole, made.rewritten, made.gone) == (15, 2, 2, 1, 0)
    assert_same([item for number, item in enumerate(before) if number not in (8, 11)], samples(tmp_path / "saved"))
    assert [(item["index"], item["row"], item["key"]) for item in lost(tmp_path / "saved")] == [
        (8, 3, "key/0008"),
        (11, 6, "key/0011"),
    ]
    assert "image" in lost(tmp_path / "saved")[0]["reason"] and tree(data) == was


@pytest.mark.parametrize("where", ["header", "trailer", "cut trailer", "no trailer", "appended"])
def test_a_header_or_trailer_that_is_damaged_or_gone_costs_nothing(
    damaged: tuple[Path, list[dict[str, Any]], Path], tmp_path: Path, where: str
) -> None:
    data, before, path = damaged
    whole = path.read_bytes()
    changed = {
        "header": b"\0" * 4096 + whole[4096:],
        "trailer": whole[:-100] + b"\xff" * 50 + whole[-50:],
        "cut trailer": whole[:-37],
        "no trailer": whole[:-128],
        "appended": whole + b"more" * 100,
    }
    path.write_bytes(changed[where])
    made = salvage(data, tmp_path / "saved")
    assert (made.lost, made.rewritten) == (0, 1) and lost(tmp_path / "saved") == []
    assert_same(before, samples(tmp_path / "saved"))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.95])
def test_of_a_cut_shard_exactly_the_samples_that_lie_before_the_cut_are_saved(tmp_path: Path, share: float) -> None:
    manifest = build(tmp_path / "data", [rows(5), rows(60, 5), rows(4, 65)], index=True)
    data = tmp_path / "data"
    before, path = samples(data), data / manifest.shards[1].file
    cut = int(path.stat().st_size * share)
    whole, shard = range(60), ShardFile(LocalFile(path))
    for field in shard.fields:
        if field.kind not in ("scalar", "tokens"):
            offsets, lengths, _ = shard.locate(field.name, np.arange(60))
            whole = [row for row in whole if offsets[row] + lengths[row] <= cut]
    with open(path, "r+b") as file:
        file.truncate(cut)
    made = salvage(data, tmp_path / "saved")
    assert (made.rows, made.lost, made.whole) == (9 + len(whole), 60 - len(whole), 2)
    assert share < 0.2 or len(whole) > 0
    assert share > 0.5 or len(whole) < 60
    assert_same([*before[:5], *(before[5 + row] for row in whole), *before[65:]], samples(tmp_path / "saved"))
    assert [item["row"] for item in lost(tmp_path / "saved")] == sorted({*range(60)} - {*whole})
    assert all("ends before byte" in item["reason"] for item in lost(tmp_path / "saved"))


def test_a_shard_whose_end_is_zeros_keeps_its_length_and_loses_what_is_zero(
    damaged: tuple[Path, list[dict[str, Any]], Path], tmp_path: Path
) -> None:
    data, before, path = damaged
    whole = path.read_bytes()
    start = payload_of(path, "blob", 0)
    path.write_bytes(whole[:start] + bytes(len(whole) - start))
    made = salvage(data, tmp_path / "saved")
    assert (made.rows, made.lost) == (9, 8)
    path.write_bytes(whole)
    end = ShardFile(LocalFile(path)).groups[-1].end
    path.write_bytes(whole[:end] + bytes(len(whole) - end))
    made = salvage(data, tmp_path / "saved-2")
    assert (made.rows, made.lost) == (17, 0)
    assert_same(before, samples(tmp_path / "saved-2"))


def test_tokens_behind_a_cut_are_lost_unless_they_are_small_beside_the_rest(tmp_path: Path) -> None:
    fields: dict[str, tuple[str, dict[str, str]]] = {"ids": ("tokens", {"vocab": "1000"})}
    values = [(b"%d" % n, {"ids": [n] * 500}) for n in range(100)]
    manifest = build(tmp_path / "data", [values], fields, index=True)
    before, path = samples(tmp_path / "data"), tmp_path / "data" / manifest.shards[0].file
    with open(path, "r+b") as file:
        file.truncate(4096 + 1000 * 40 + 3)
    made = salvage(tmp_path / "data", tmp_path / "saved")
    assert (made.rows, made.lost) == (40, 60)
    assert_same(before[:40], samples(tmp_path / "saved"))


@pytest.mark.parametrize("how", ["no index", "damaged copy", "another data set's index"])
def test_a_cut_shard_without_a_good_copy_of_its_index_is_lost_as_a_whole(
    damaged: tuple[Path, list[dict[str, Any]], Path], tmp_path: Path, how: str
) -> None:
    data, before, path = damaged
    index = data / "index.lfi"
    if how == "no index":
        index.unlink()
    elif how == "damaged copy":
        copied = next(entry for entry in ShardFile(LocalFile(index)).entries if entry.type == b"COPY")
        for at in range(copied.offset + 60, copied.end, 50):
            flip(index, at)
    else:
        build(tmp_path / "other", [rows(5, 100), rows(8, 105), rows(4, 113)], index=True)
        index.write_bytes((tmp_path / "other" / "index.lfi").read_bytes())
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.8)])
    made = salvage(data, tmp_path / "saved")
    assert (made.rows, made.lost, made.gone) == (9, 8, 1)
    assert [(item["file"], item["rows"], item["index"]) for item in lost(tmp_path / "saved")] == [(path.name, 8, 5)]
    assert_same([*before[:5], *before[13:]], samples(tmp_path / "saved"))


def test_a_cut_sidecar_costs_only_what_it_lost(damaged: tuple[Path, list[dict[str, Any]], Path], tmp_path: Path) -> None:
    data, before, path = damaged
    side = next(data.glob(f"{path.stem}+*.lfd"))
    cut = payload_of(side, "caption", 3)
    side.write_bytes(side.read_bytes()[:cut])
    made = salvage(data, tmp_path / "saved")
    assert (made.rows, made.lost) == (12, 5)
    assert_same([*before[:8], *before[13:]], samples(tmp_path / "saved"))


def test_a_missing_shard_is_named(damaged: tuple[Path, list[dict[str, Any]], Path], tmp_path: Path) -> None:
    data, before, path = damaged
    path.unlink()
    salvage(data, tmp_path / "saved")
    assert "missing" in lost(tmp_path / "saved")[0]["reason"]
    assert_same([*before[:5], *before[13:]], samples(tmp_path / "saved"))


def test_a_damaged_block_of_the_index_costs_the_samples_it_describes(tmp_path: Path) -> None:
    count = 9000  # locators of more than one block
    fields: dict[str, tuple[str, dict[str, str]]] = {"text": ("text", {})}
    manifest = build(tmp_path / "data", [[(b"%d" % n, {"text": f"text {n}"}) for n in range(count)]], fields)
    path = tmp_path / "data" / manifest.shards[0].file
    shard = ShardFile(LocalFile(path))
    entry = shard.section(b"LOCR", 0)
    flip(path, entry.offset + 65536 + 20)
    made = salvage(tmp_path / "data", tmp_path / "saved")
    first, last = 65536 // 16, min(2 * 65536 // 16, count) - 1
    assert (made.rows, made.lost) == (count - (last - first + 1), last - first + 1)
    assert [item["row"] for item in lost(tmp_path / "saved")] == list(range(first, last + 1))
    assert [item["text"] for item in samples(tmp_path / "saved")] == [
        f"text {n}" for n in range(count) if not first <= n <= last
    ]


def test_every_byte_damaged_in_turn_never_gives_a_wrong_value(tmp_path: Path) -> None:
    fields: dict[str, tuple[str, dict[str, str]]] = {"text": ("text", {}), "n": ("scalar", {"dtype": "int32"})}
    values = [(b"key-%d" % n, {"text": f"text {n}", "n": n}) for n in range(4)]
    manifest = build(tmp_path / "data", [values], fields)
    path = tmp_path / "data" / manifest.shards[0].file
    whole = path.read_bytes()
    right = {item["__key__"]: repr(item) for item in lfdata.open(tmp_path / "data")}
    shard = ShardFile(LocalFile(path))
    places = [at for entry in shard.entries for at in range(entry.offset, entry.end, 23)]
    places += [*range(0, 64, 9), *range(shard.trailer.directory_offset, len(whole), 29)]
    for number, at in enumerate(places):
        flip(path, at)
        target = tmp_path / f"saved-{number}"
        try:
            salvage(tmp_path / "data", target)
        except LfdataError:
            assert not (target / "manifest.json").exists()
        else:
            for item in lfdata.open(target):
                assert repr(item) == right[item["__key__"]], f"byte {at}"
        path.write_bytes(whole)


def test_nothing_whole_no_manifest_and_a_taken_target_are_refused(
    damaged: tuple[Path, list[dict[str, Any]], Path], tmp_path: Path
) -> None:
    data, _, _ = damaged
    with pytest.raises(OptionError):
        salvage(data, data)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    with pytest.raises(TargetExistsError):
        salvage(data, tmp_path / "taken")
    for path in data.glob("*.lfd"):
        path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(FormatError, match="nothing is whole"):
        salvage(data, tmp_path / "saved")
    assert not list((tmp_path / "saved").iterdir())


def test_no_and_one_sample(tmp_path: Path) -> None:
    for count in (0, 1):
        build(tmp_path / str(count), [rows(count)])
        assert salvage(tmp_path / str(count), tmp_path / f"saved-{count}").rows == count
        assert_same(samples(tmp_path / str(count)), samples(tmp_path / f"saved-{count}"))
