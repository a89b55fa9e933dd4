"""``shard-builder verify``: intact data sets pass; every kind of damage is found, named and survived."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import _build
import pytest
from click.testing import CliRunner

from lfdata.codecs.base import Encoded
from lfdata.errors import CorruptError, FormatError, StorageError
from lfdata.format.durable import Files
from lfdata.format.files import LocalFile
from lfdata.format.index import write_index
from lfdata.format.meta import INDEX, MANIFEST, Manifest, ShardEntry, encode_manifest
from lfdata.format.reader import ShardFile
from shard_builder.examine.check_keys import ranges
from shard_builder.examine.damage import MAX_LISTED, Damage, DamageList
from shard_builder.examine.opened import DataSet
from shard_builder.verbs.verify import VerifyReport, _payload_tasks, command, verify

GOLDEN = Path(__file__).parents[1] / "golden" / "v1.0"
TEXT = {"caption": ("text", {})}


def faults(report: VerifyReport, code: str | None = None) -> list[Damage]:
    return [item for item in report.damage if item.level == "damage" and code in (None, item.code)]


def warnings(report: VerifyReport) -> list[Damage]:
    return [item for item in report.damage if item.level == "warning"]


def entry(manifest: Manifest, number: int, **changes: object) -> ShardEntry:
    shard = manifest.shards[number]
    return ShardEntry(**({name: getattr(shard, name) for name in shard.__struct_fields__} | changes))


def save(root: Path, manifest: Manifest) -> None:
    (root / MANIFEST).write_bytes(encode_manifest(manifest))


# -- intact ---------------------------------------------------------------------------------------------------------------


def test_every_kind_sidecars_and_index_are_intact(tmp_path: Path) -> None:
    sidecars = {0: ("score", ("text", {}), ["a", "b", "c"]), 1: ("score", ("text", {}), ["d"])}
    _build.build(tmp_path, [_build.rows(3), _build.rows(1, 3)], index=True, sidecars=sidecars)
    report = verify(tmp_path, workers=2)
    assert (report.intact, report.damage) == (True, [])
    # 7 payload fields of 4 rows, and the sidecars' text; 4 shard files and the index.
    assert (report.values, report.rows, report.files) == (7 * 4 + 4, 4, 5)
    assert report.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.lfd"))


@pytest.mark.parametrize(
    "shards",
    [[], [[]], [[], _build.rows(1)], [[(b"only", {})]], [[(b"a", {}), (b"b", {})], [(b"", {})]]],
    ids=["no shards", "no rows", "an empty shard first", "one sample", "absent everywhere"],
)
def test_small_data_sets_are_intact(tmp_path: Path, shards: list[list[_build.Row]]) -> None:
    _build.build(tmp_path, shards, index=True)
    assert verify(tmp_path, workers=1).damage == []


def test_single_files_of_each_kind(tmp_path: Path) -> None:
    _build.build(tmp_path, [_build.rows(2)], index=True, sidecars={0: ("score", ("text", {}), ["a", "b"])})
    base, side = sorted(tmp_path.glob("*.lfd"), key=lambda path: "+" in path.name)
    for path, values in ((base, 14), (side, 2), (tmp_path / INDEX, 0)):
        report = verify(path, workers=1)
        assert (report.damage, report.values) == ([], values), path.name


@pytest.mark.parametrize(
    "directory", sorted(path.parent for path in GOLDEN.glob("*/manifest.json")), ids=lambda path: path.name
)
def test_golden_data_sets_are_intact(directory: Path) -> None:
    report = verify(directory, workers=1)
    assert report.damage == [] and report.files > 0


# -- damage ---------------------------------------------------------------------------------------------------------------


def test_a_damaged_payload_is_named_by_file_offset_row_index_key_and_field(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(2), _build.rows(3, 2)])
    path = tmp_path / manifest.shards[1].file
    shard = ShardFile(LocalFile(path))
    offset = int(shard.locate("caption", _array(1))[0][0])
    _build.flip(path, offset + 2)
    _build.reseal(tmp_path, manifest)
    report = verify(tmp_path, workers=1)
    (found,) = [item for item in faults(report) if item.row is not None]
    assert (found.file, found.shard, found.section, found.offset) == (path.name, 1, "GRUP", offset)
    assert (found.row, found.index, found.key, found.field) == (1, 3, "key/0003", "caption")
    assert all(word in found.line() for word in (path.name, "row 1", "index 3", "'key/0003'", "caption", str(offset)))
    # The group's own check tells of it too; nothing else does.
    assert {item.section for item in faults(report)} == {"GRUP"} and report.damaged == 2


def test_a_flip_in_every_section_is_found_without_the_digest(tmp_path: Path) -> None:
    names = ["GRUP", "TOKN", "LOCR", "COLM", "KEYS", "KOFF", "KHSH", "KROW", "META", "BSUM", "header", "trailer", "padding"]
    manifest = _build.build(tmp_path, [_build.rows(2, 2 * number) for number in range(len(names))])
    for name, shard in zip(names, manifest.shards, strict=True):
        path = tmp_path / shard.file
        sections = {section.type.decode(): section for section in ShardFile(LocalFile(path)).entries if section.length}
        places = {kind: section.offset + section.length // 2 for kind, section in sections.items()}
        places |= {"header": 100, "trailer": shard.bytes - 60, "padding": sections["META"].offset - 1}
        assert set(places) == set(names)
        _build.flip(path, places[name])
    _build.reseal(tmp_path, manifest)
    deep, quick = verify(tmp_path, workers=1), verify(tmp_path, workers=1, quick=True)
    assert {item.file for item in faults(deep)} == {shard.file for shard in manifest.shards}
    # Without payloads, only the row group is not looked at.
    assert {item.file for item in faults(quick)} == {shard.file for shard in manifest.shards[1:]}
    assert quick.values == quick.bytes == 0


def test_a_wrong_digest_alone_is_damage_and_quick_does_not_read_for_it(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1)])
    manifest.shards = (entry(manifest, 0, sha256="0" * 64),)
    save(tmp_path, manifest)
    (found,) = verify(tmp_path, workers=1).damage
    assert found.code == "digest" and "0000" in found.reason
    assert verify(tmp_path, workers=1, quick=True).intact


def test_missing_truncated_and_extended_shards(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1), _build.rows(1, 1), _build.rows(1, 2), _build.rows(1, 3)])
    missing, short, long, _ = (tmp_path / shard.file for shard in manifest.shards)
    missing.unlink()
    short.write_bytes(short.read_bytes()[:-1000])
    long.write_bytes(long.read_bytes() + b"\0" * 64)
    report = verify(tmp_path, workers=1)
    assert {item.file for item in faults(report)} == {missing.name, short.name, long.name}
    assert [item.file for item in faults(report, "missing")] == [missing.name]
    assert {item.file for item in faults(report, "truncated")} == {short.name}
    assert report.values == 7  # the intact shard was still checked


def test_files_that_do_not_belong_are_warnings(tmp_path: Path) -> None:
    _build.build(tmp_path, [_build.rows(1)])
    (tmp_path / "other\x1b.lfd").write_bytes(b"x")
    (tmp_path / ".tmp-s.lfd").write_bytes(b"x")
    report = verify(tmp_path, workers=1)
    assert report.intact and {(item.file, item.code) for item in warnings(report)} == {
        ("other\\x1b.lfd", "unknown-file"),
        (".tmp-s.lfd", "leftover"),
    }


def test_swapped_files_and_wrong_order(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1), _build.rows(1, 1)])
    first, second = (tmp_path / shard.file for shard in manifest.shards)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert {item.code for item in faults(verify(tmp_path, workers=1, quick=True))} >= {"changed"}
    other = tmp_path / "other"
    manifest = _build.build(other, [_build.rows(1), _build.rows(1, 1)])
    manifest.shards = (manifest.shards[1], manifest.shards[0])
    save(other, manifest)
    assert {item.code for item in faults(verify(other, workers=1, quick=True))} == {"order"}


def test_a_key_in_two_shards_is_found_and_named(tmp_path: Path) -> None:
    hostile = b"evil\x1b[2J\xff\n"
    rows = [[(b"a", {"caption": "x"}), (hostile, {})], [(b"b", {}), (b"c", {}), (hostile, {})]]
    manifest = _build.build(tmp_path, rows, TEXT)
    report = verify(tmp_path, workers=1)
    (found,) = faults(report, "duplicate-key")
    assert (found.file, found.row, found.index) == (manifest.shards[1].file, 2, 4)
    assert "index 1" in found.reason and manifest.shards[0].file in found.reason
    assert found.key == "evil\\x1b[2J\\xff\\n" and found.line().isprintable()


def test_ranges_of_hashes_cover_all_without_overlap() -> None:
    for rows in (0, 1, 999_999, 1_000_001, 123_456_789):
        found = ranges(rows)
        assert found[0][0] == 0 and found[-1][1] == (1 << 64) - 1
        assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(found))


# -- decoding -------------------------------------------------------------------------------------------------------------


def test_payloads_with_good_checks_that_do_not_decode(tmp_path: Path) -> None:
    sizes = {"width": 20, "height": 12, "channels": 3, "codec": 3, "bits": 8}
    rows = _build.rows(2)
    rows.append((b"bad image", {"image": Encoded(b"no picture at all", sizes)}))
    rows.append((b"other size", {"image": Encoded(_build.picture(1, 21), sizes)}))
    rows.append((b"bad text", {"caption": Encoded(b"\xff\xfe")}))
    _build.build(tmp_path, [rows])
    report = verify(tmp_path, workers=1)
    assert [(item.row, item.key, item.field) for item in faults(report)] == [
        (2, "bad image", "image"),
        (3, "other size", "image"),
        (4, "bad text", "caption"),
    ]
    assert [item.code for item in faults(report)][1:] == ["size-mismatch", "utf8"]
    assert verify(tmp_path, workers=1, quick=True).intact


def test_a_decoder_that_dies_or_hangs_is_damage_at_its_value_and_the_rest_is_checked(tmp_path: Path) -> None:
    words = ["fine"] * 20
    words[3], words[11], words[12] = "CRASH", "HANG", "CRASH"
    fields = {"caption": ("text", {}), "second": ("text", {})}
    rows = [(f"k{number}".encode(), {"caption": word, "second": "fine"}) for number, word in enumerate(words)]
    rows.append((b"both", {"caption": "CRASH", "second": "CRASH"}))
    rows.append((b"bad", {"caption": Encoded(b"\xff")}))
    _build.build(tmp_path, [rows], fields)
    report = verify(tmp_path, workers=2, timeout=2.5, worker_module="_hostile_worker")
    assert [(item.row, item.key, item.field, item.code) for item in faults(report)] == [
        (3, "k3", "caption", "crash"),
        (11, "k11", "caption", "timeout"),
        (12, "k12", "caption", "crash"),
        (20, "both", "caption", "crash"),
        (20, "both", "second", "crash"),
        (21, "bad", "caption", "utf8"),
    ]
    assert "SIGSEGV" in faults(report, "crash")[0].reason


def test_one_shard_is_split_over_workers(tmp_path: Path) -> None:
    _build.build(tmp_path, [[(f"{n}".encode(), {"caption": "x"}) for n in range(3000)]], TEXT)
    tasks = [task for task in _payload_tasks(DataSet.open(tmp_path), quick=False) if task["op"] == "rows"]
    assert len(tasks) > 2
    assert [task["start"] for task in tasks] == [0, *(task["stop"] for task in tasks[:-1])] and tasks[-1]["stop"] == 3000
    assert verify(tmp_path, workers=2).values == 3000


# -- consolidated index -----------------------------------------------------------------------------------------------------


def test_an_index_with_other_values_is_damage(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(2), _build.rows(2, 2)])
    shards = [ShardFile(LocalFile(tmp_path / shard.file)) for shard in manifest.shards]

    def column(number: int, field: str, role: str):  # type: ignore[no-untyped-def]
        data = shards[number].column(field, role)
        if (number, field, role) == (1, "label", "value"):
            data = data.copy()
            data[1] += 7
        return data

    write_index(tmp_path / INDEX, manifest, column, lambda number: shards[number].key_hashes(), Files())
    (found,) = faults(verify(tmp_path, workers=1, quick=True))
    assert (found.file, found.code, found.field, found.row, found.index) == (INDEX, "index", "label", 1, 3)


def test_a_foreign_index_is_a_warning_and_a_damaged_one_damage(tmp_path: Path) -> None:
    _build.build(tmp_path / "other", [_build.rows(3)], index=True)
    _build.build(tmp_path / "set", [_build.rows(2)], index=True)
    index = tmp_path / "set" / INDEX
    good = index.read_bytes()
    os.replace(tmp_path / "other" / INDEX, index)
    report = verify(tmp_path / "set", workers=1, quick=True)
    assert report.intact and [item.file for item in warnings(report)] == [INDEX]
    index.write_bytes(good)
    _build.flip(index, ShardFile(LocalFile(index)).entries[0].offset)
    assert {item.file for item in faults(verify(tmp_path / "set", workers=1, quick=True))} == {INDEX}


# -- command --------------------------------------------------------------------------------------------------------------


def test_exit_status_and_json(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1)])
    run = CliRunner().invoke(command, [str(tmp_path), "--json", "--workers", "1"])
    assert run.exit_code == 0 and json.loads(run.output)["intact"] is True
    _build.flip(tmp_path / manifest.shards[0].file, 4100)
    run = CliRunner().invoke(command, [str(tmp_path), "--json", "--workers", "1"])
    result = json.loads(run.output)
    assert run.exit_code == 1 and result["intact"] is False
    assert any(item.get("key") == "key/0000" and item["field"] == "image" for item in result["damage"])
    run = CliRunner().invoke(command, [str(tmp_path), "--workers", "1"])
    assert run.exit_code == 1 and "DAMAGED" in run.output and "key/0000" in run.output
    assert CliRunner().invoke(command, [str(tmp_path / "nowhere")]).exit_code == 2
    (tmp_path / "empty").mkdir()
    assert CliRunner().invoke(command, [str(tmp_path / "empty")]).exit_code == 2


def test_the_exit_status_of_the_program(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1)])
    _build.flip(tmp_path / manifest.shards[0].file, 40)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for path, status in ((tmp_path, 1), (tmp_path / "nowhere", 2)):
        arguments = [sys.executable, "-m", "shard_builder.cli", "verify", "--quick", str(path)]
        assert subprocess.run(arguments, env=environment, capture_output=True, check=False).returncode == status


def test_a_damaged_manifest_is_damage_and_the_shards_are_still_checked(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1)])
    text = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).write_bytes(text.replace(b'"rows": 1', b'"rows": 2'))
    report = verify(tmp_path, workers=1)
    assert [item.file for item in faults(report)] == [MANIFEST] and report.files == 1
    _build.flip(tmp_path / manifest.shards[0].file, 40)
    assert {item.file for item in faults(verify(tmp_path, workers=1))} == {MANIFEST, manifest.shards[0].file}


def test_what_cannot_be_opened_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        verify(tmp_path / "nowhere")
    with pytest.raises(FormatError, match="no manifest"):
        verify(tmp_path)


def test_a_single_file_that_is_no_shard_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.lfd"
    path.write_bytes(os.urandom(5000))
    (found,) = verify(path, workers=1).damage
    assert found.file == "x.lfd" and found.offset == 0
    path = path.rename(tmp_path / "x.bin")
    with pytest.raises(CorruptError, match="x.bin: byte 0: neither a data set nor a file of this format"):
        verify(path, workers=1)


def _array(*numbers: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.array(numbers, np.int64)


def test_rows_that_a_manifest_only_claims_are_not_planned_for(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1)])
    manifest.shards = (entry(manifest, 0, rows=1 << 39),)
    manifest.rows = 1 << 39
    save(tmp_path, manifest)
    report = verify(tmp_path, workers=1)
    assert [item.code for item in faults(report)] == ["changed"] and report.values == 0


def test_damage_is_joined_counted_and_bounded() -> None:
    found = DamageList()
    for row in range(5):
        found.add(Damage("f", "corrupt", "index block", offset=1, row=row))
    found.add(Damage("f", "corrupt", "index block", offset=1, row=2))
    found.add(Damage("f", "corrupt", "index block", offset=1, section="COLM", field="x"))
    assert found.damaged == 1 and found.listed[0].section == "COLM" and found.listed[0].field == "x"
    assert [(item.row, item.rows) for item in found.listed] == [(0, 5)] and "rows 0 to 4" in found.listed[0].line()
    for row in range(0, 4 * MAX_LISTED, 2):
        found.add(Damage("g", "corrupt", "x", row=row))
    assert len(found.listed) == MAX_LISTED and found.unlisted == found.damaged - MAX_LISTED > 0
