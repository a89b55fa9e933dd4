"""``shard-builder inspect``: what it prints is what was written; nothing hostile reaches the terminal; no payload is needed."""

from __future__ import annotations

import json
from pathlib import Path

import _build
import pytest
from click.testing import CliRunner

from lfdata.errors import CorruptError, FormatError, LfdataError
from lfdata.format.files import LocalFile
from lfdata.format.meta import INDEX
from lfdata.format.reader import ShardFile
from shard_builder.verbs.inspect import command, inspect


def test_a_data_set_is_described_by_its_manifest(tmp_path: Path) -> None:
    sidecars = {n: ("score", ("text", {}), ["a", "b", "c"][: n + 2]) for n in range(2)}
    manifest = _build.build(tmp_path, [_build.rows(2), _build.rows(3, 2)], index=True, sidecars=sidecars)
    result = inspect(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.lfd"))
    assert (result["type"], result["rows"]) == ("data set", 5)
    assert [field["name"] for field in result["fields"]] == [*_build.FIELDS, "score"]
    assert result["fields"][5]["params"]["dtype"] == "uint16"
    assert result["bytes"]["manifest_says"] == result["bytes"]["on_disk"] == size and result["bytes_a_sample"] == size / 5
    assert result["statistics"]["sound"]["frames"] == {"min": 200, "max": 204, "sum": 1010}
    assert result["provenance"]["library"]["numpy"] and result["provenance"]["source"] == {"type": "test"}
    assert [(shard["first"], shard["stop"], shard["missing"]) for shard in result["shards"]] == [(0, 2, []), (2, 5, [])]
    assert result["shards"][0]["sidecars"][0]["fields"] == ("score",)
    assert result["index"]["state"] == "present" and result["bytes"]["index"] == (tmp_path / INDEX).stat().st_size
    run = CliRunner().invoke(command, [str(tmp_path)])
    assert run.exit_code == 0 and all(shard.file in run.output for shard in manifest.shards) and "caption (text)" in run.output


def test_the_state_of_the_index(tmp_path: Path) -> None:
    _build.build(tmp_path / "a", [_build.rows(1)], index=True)
    _build.build(tmp_path / "b", [_build.rows(2)])
    assert inspect(tmp_path / "b")["index"]["state"] == "absent"
    (tmp_path / "b" / INDEX).write_bytes((tmp_path / "a" / INDEX).read_bytes())
    assert inspect(tmp_path / "b")["index"]["state"] == "foreign"
    _build.flip(tmp_path / "a" / INDEX, 4)
    assert inspect(tmp_path / "a")["index"]["state"] == "damaged"


def test_missing_shards_are_named(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1), _build.rows(1, 1)])
    (tmp_path / manifest.shards[1].file).unlink()
    run = CliRunner().invoke(command, [str(tmp_path)])
    assert run.exit_code == 0 and f"MISSING: {manifest.shards[1].file}" in run.output and "ON DISK" in run.output


@pytest.mark.parametrize("shards", [[], [[]], [[(b"only", {})]]], ids=["no shards", "no rows", "absent everywhere"])
def test_small_data_sets(tmp_path: Path, shards: list[list[_build.Row]]) -> None:
    _build.build(tmp_path, shards)
    result = json.loads(CliRunner().invoke(command, [str(tmp_path), "--json"]).output)
    assert result["rows"] == sum(map(len, shards)) and (result["bytes_a_sample"] is None) == (result["rows"] == 0)
    assert CliRunner().invoke(command, [str(tmp_path)]).exit_code == 0


def test_single_files_of_each_kind(tmp_path: Path) -> None:
    _build.build(tmp_path, [_build.rows(2)], index=True, sidecars={0: ("score", ("text", {}), ["a", "b"])})
    base, side = sorted(tmp_path.glob("*.lfd"), key=lambda path: "+" in path.name)
    for path, kind in ((base, "base shard"), (side, "sidecar"), (tmp_path / INDEX, "consolidated index")):
        result = inspect(path)
        opened = ShardFile(LocalFile(path))
        assert (result["type"], result["header"]["rows"], result["header"]["bytes"]) == (kind, 2, path.stat().st_size)
        assert [(s["type"], s["offset"], s["bytes"]) for s in result["sections"]] == [
            (entry.type.decode(), entry.offset, entry.length) for entry in opened.entries
        ]
        run = CliRunner().invoke(command, [str(path)])
        assert run.exit_code == 0 and kind in run.output and opened.identity.shard_id.hex() in run.output
        json.loads(CliRunner().invoke(command, [str(path), "--json"]).output)
    assert inspect(side)["meta"]["fields"][0]["name"] == "score"


def test_hostile_names_are_made_visible(tmp_path: Path) -> None:
    fields = {"na\x1b[31mme\u202e": ("text", {})}
    manifest = _build.build(tmp_path, [[(b"k", {"na\x1b[31mme\u202e": "x"})]], fields)
    for path in (tmp_path, tmp_path / manifest.shards[0].file):
        output = CliRunner().invoke(command, [str(path)]).output
        assert all(line.isprintable() for line in output.splitlines()) and "\\x1b" in output


def test_what_cannot_be_read_is_a_typed_error(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1)])
    path = tmp_path / manifest.shards[0].file
    _build.flip(path, 20)
    with pytest.raises(CorruptError):
        inspect(path)
    with pytest.raises(LfdataError, match="no such file"):
        inspect(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="no manifest"):
        inspect(tmp_path / "empty")
