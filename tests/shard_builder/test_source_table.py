"""Tables: rows with exact places, keys, values, references below the root, and every kind of bad row."""

from __future__ import annotations

import base64
import itertools
import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from _tars import load_all, scan, values
from _tars import write as write_file
from hypothesis import given, settings
from hypothesis import strategies as st

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import parse_field
from shard_builder.sources import open_source, source_from_config
from shard_builder.sources.base import BadRecord, Record

TEXT = [parse_field("t:text=t")]
BOM = b"\xef\xbb\xbf"


def write(folder: Path, data: bytes, name: str = "a.jsonl") -> str:
    return write_file(folder, data, name)


def rows(tmp_path: Path, data: bytes, name: str = "a.jsonl", **options: str) -> list[Record | BadRecord]:
    return list(open_source(write(tmp_path, data, name), fields=TEXT, **options).scan())


def texts(tmp_path: Path, data: bytes, name: str = "a.jsonl", **options: str) -> dict[bytes, object]:
    loaded = values(open_source(write(tmp_path, data, name), fields=TEXT, **options), tmp_path / "w")
    return {key: sample.get("t") for key, sample in loaded.items()}


# -- JSON lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", BOM])
@pytest.mark.parametrize("last", [b"", b"\n", b"\n\n \n"])
def test_line_ends_marks_empty_lines_and_a_last_line_without_an_end(
    tmp_path: Path, end: bytes, mark: bytes, last: bytes
) -> None:
    data = mark + end.join([b'{"t":"one"}', b"", b'  {"t":"two\\n2"} ', b"\t", '{"t":"drei\u2028é"}'.encode()]) + last
    assert texts(tmp_path, data) == {b"0" * 11 + b"%d" % n: t for n, t in enumerate(["one", "two\n2", "drei\u2028é"])}


def test_keys_come_from_a_column_or_from_row_numbers(tmp_path: Path) -> None:
    assert list(texts(tmp_path, b'{"id":7,"t":"x"}\n{"id":"b","t":"y"}\n')) == [b"7", b"b"]
    assert list(texts(tmp_path, b'{"id":7,"key":"k","t":"x"}\n')) == [b"k"]
    assert list(texts(tmp_path, b'{"id":7,"t":"x"}\n', key="#")) == [b"000000000000"]
    assert list(texts(tmp_path, b'{"id":7,"t":"x"}\n', key="t")) == [b"x"]
    assert list(texts(tmp_path, '{"key":"e\u0301","t":""}\n{"key":"é","t":""}'.encode())) == ["e\u0301".encode(), "é".encode()]
    with pytest.raises(SourceError, match=r"'id', 't'"):
        rows(tmp_path, b'{"id":7,"t":"x"}\n', key="name")


def test_a_row_without_a_usable_key_is_bad(tmp_path: Path) -> None:
    bad_keys = [b"null", b'""', b"true", b"1.5", b"[1]"]
    data = b'{"key":"a","t":"x"}\n{"t":"x"}\n' + b"".join(b'{"key":%s,"t":"x"}\n' % k for k in bad_keys)
    found = rows(tmp_path, data)
    assert [getattr(r, "code", "") for r in found] == ["", *["no-key"] * 6]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{bad", "json"),
        (b'{"t":NaN}', "json"),
        (b'{"t":"\xff"}', "json"),
        (b'{"t":"\\ud800"}', "json"),
        (b'{"t":1e999}', "json"),
        (b"[" * 100_000, "json"),
        (b"3", "json"),
        (b'["t"]', "json"),
        (b'{"t":1}{"t":2}', "json"),
        (b'{"t":"a","t":"b"}', "duplicate-key"),
        (b'{"t":"a","\\u0074":"b"}', "duplicate-key"),
        (b'{"a\\"b":1,"t":"x","a\\"b" :2}', "duplicate-key"),
        (b"\x1f\x8b", "json"),
    ],
)
def test_a_bad_line_is_a_bad_record_naming_line_and_place_and_the_rest_goes_on(tmp_path: Path, line: bytes, code: str) -> None:
    found = rows(tmp_path, b'{"t":"one"}\n' + line + b'\n{"t":"two"}\n')
    assert [type(r) for r in found] == [Record, BadRecord, Record]
    bad = found[1]
    assert isinstance(bad, BadRecord)
    assert (bad.code, bad.path) == (code, "a.jsonl:2")
    assert bad.reason.startswith("line 2 at byte 12: ")
    assert found[2].key == b"0" * 11 + b"2"


def test_names_that_only_look_doubled_are_fine(tmp_path: Path) -> None:
    data = b'{"t":"t","o":{"t":1,"o":[{"t":2}]}}\n{"t":"a \\"t\\": b"}\n{"t":"back\\\\", "u":"\\n"}\n'
    assert list(texts(tmp_path, data).values()) == ["t", 'a "t": b', "back\\"]


def test_long_lines_are_bounded_and_the_next_row_is_found(tmp_path: Path) -> None:
    data = b'{"t":"' + b"x" * 5000 + b'"}\n{"t":"two"}\n{"t":"' + b"y" * 5000
    found = rows(tmp_path, data, max_line_bytes="1k")
    assert [getattr(r, "code", "") for r in found] == ["line-too-long", "", "line-too-long"]
    assert list(texts(tmp_path, data, max_line_bytes="1k").values()) == ["two"]


def test_a_line_of_backslashes_or_quotes_takes_no_quadratic_time(tmp_path: Path) -> None:
    start = time.monotonic()
    size = 1 << 21
    rows(tmp_path, b'{"t":"' + b"\\\\" * size + b'"}\n{"t":"' + b"\\n" * size + b'"}\n')
    rows(tmp_path, b't,u\n"' + b'""' * size + b'",x\n"' + b"\n" * (size // 8), "a.csv")
    assert time.monotonic() - start < 20


def test_null_and_missing_columns_leave_a_field_absent_and_one_in_no_row_is_an_error(tmp_path: Path) -> None:
    data = b'{"t":"x"}\n{"t":null}\n{}\n{"t":""}\n{"t":0}\n'
    assert list(texts(tmp_path, data).values()) == ["x", None, None, "", 0]
    with pytest.raises(SourceError, match=r"no row has the column 't'.*'u', 'v'"):
        rows(tmp_path, b'{"u":1,"v":2}\n')
    assert rows(tmp_path, b"") == []


def test_structured_values_reach_the_codec_as_their_own_text(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"key":"k","m":{"b": 1.0, "a":[1e2]},"s":"text","t":"x","n":null}')
    fields = [parse_field(text) for text in ("m:json=m", "s:json=s", "t:text=t", "rest:json=*", "n:json=n")]
    assert values(open_source(path, fields=fields), tmp_path / "w")[b"k"] == {
        "m": b'{"b": 1.0, "a":[1e2]}',
        "s": b'"text"',
        "t": "x",
        "rest": b"{}",
    }
    rest = values(open_source(path, fields=[parse_field("all:json=*")]), tmp_path / "w")[b"k"]["all"]
    assert json.loads(rest) == {"m": {"b": 1.0, "a": [100.0]}, "s": "text", "t": "x", "n": None}


def test_base64_and_bytes(tmp_path: Path) -> None:
    blob = bytes(range(256))
    lines = [base64.b64encode(blob).decode(), "%%%", "AAA", "é", 3]
    path = write(tmp_path, b"".join(msgspec.json.encode({"b": line, "t": "é"}) + b"\n" for line in lines))
    source = open_source(path, fields=[parse_field("b:image=b@base64"), parse_field("t:bytes=t")])
    records, _ = scan(source)
    assert source.load(records[0].locator).values == {"b": blob, "t": "é".encode()}
    for record in records[1:]:
        with pytest.raises(SampleError) as caught:
            source.load(record.locator)
        assert (caught.value.code, caught.value.field) == ("base64", "b")


# -- references ---------------------------------------------------------------------------------------------------------


def test_references_are_relative_to_the_table_or_to_a_root(tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics" / "é 1.png").write_bytes(b"picture")
    path = write(tmp_path / "lists", '{"i":"pics/é 1.png"}\n'.encode())
    fields = [parse_field("i:image=i")]
    assert scan(open_source(path, fields=fields))[1][0].code == "missing-file"
    source = open_source(path, fields=fields, root=str(tmp_path))
    (record,) = scan(source)[0]
    assert record.size == len('{"i":"pics/é 1.png"}\n'.encode()) + len(b"picture")
    assert load_all(source, tmp_path / "w")[record.key].values == {"i": b"picture"}
    assert str(tmp_path) not in str(source.describe())


def test_no_reference_leads_outside_hangs_or_is_taken_for_data(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "out").symlink_to("../secret")
    (root / "loop").symlink_to("loop")
    (root / "dir").mkdir()
    os.mkfifo(root / "fifo")
    cases: list[tuple[object, str]] = [
        ("../secret", "outside-root"),
        ("dir/../../secret", "outside-root"),
        (str(tmp_path / "secret"), "outside-root"),
        ("a\0b", "outside-root"),
        ("", "outside-root"),
        ("out", "outside-root"),
        ("loop", "unreadable"),
        ("none", "missing-file"),
        ("dir", "not-a-file"),
        ("fifo", "not-a-file"),
        (["x"], "not-a-path"),
        (7, "not-a-path"),
    ]
    data = b"".join(msgspec.json.encode({"key": f"k{n}", "i": value}) + b"\n" for n, (value, _) in enumerate(cases))
    records, bad = scan(open_source(write(root, data), fields=[parse_field("i:image=i")]))
    assert not records
    assert [b.code for b in bad] == [code for _, code in cases]
    assert [b.key for b in bad] == [b"k%d" % n for n in range(len(cases))]
    assert "'i'" in bad[0].reason
    assert bad[7].path == "a.jsonl:8: none"


def test_a_file_that_goes_between_scan_and_load_is_an_error_with_field_and_path(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"x")
    source = open_source(write(tmp_path, b'{"i":"1.png"}\n'), fields=[parse_field("i:image=i")])
    (record,) = scan(source)[0]
    (tmp_path / "1.png").unlink()
    with pytest.raises(SampleError) as caught:
        source.load(record.locator)
    assert (caught.value.code, caught.value.field, caught.value.path) == ("missing-file", "i", "a.jsonl:1: 1.png")


def test_a_row_that_changes_after_the_scan_is_never_taken_for_the_one_that_was_scanned(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"t":"one"}\n{"t":"two"}\n')
    source = open_source(path, fields=TEXT)
    before = scan(source)[0]
    Path(path).write_bytes(b'{"t":"one"}\n{"t":"owt"}\n')
    assert source.load(before[0].locator).values == {"t": "one"}
    with pytest.raises(SampleError) as caught:
        source.load(before[1].locator)
    assert caught.value.code == "changed"
    assert scan(open_source(path, fields=TEXT))[0] != before
    os.truncate(path, 5)
    with pytest.raises(SampleError):
        source.load(before[0].locator)


# -- CSV ----------------------------------------------------------------------------------------------------------------


def test_quoted_newlines_quotes_and_commas_stay_in_their_record(tmp_path: Path) -> None:
    cells = ["plain", "a\n\n\nb", 'say "hi"', "x,y", "\r\n", "\u2028\x0b\x1e", "é" * 100_000, " spaced ", '"']
    data = b"id,t\r\n" + "".join(f'{n},"{c.replace(chr(34), chr(34) * 2)}"\r\n' for n, c in enumerate(cells)).encode()
    assert list(texts(tmp_path, BOM + data, "a.csv").values()) == cells
    records = [r for r in rows(tmp_path, data, "a.csv") if isinstance(r, Record)]
    ends = [msgspec.msgpack.decode(r.locator)[:2] for r in records]
    assert ends[0][0] == len(b"id,t\r\n")
    assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert sum(ends[-1]) == len(data)


@given(
    st.lists(
        st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=9), min_size=2, max_size=2), max_size=9
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_csv_module_writes_comes_back(cells: list[list[str]]) -> None:
    import csv
    import io
    import tempfile

    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["a", "t"])
    writer.writerows(cells)
    with tempfile.TemporaryDirectory() as folder:
        found = texts(Path(folder), out.getvalue().encode(), "a.csv", empty="keep")
    assert list(found.values()) == [row[1] for row in cells]


def test_bad_records_of_csv_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    data = b'id,t\n1,one\n2\n3,"x"y\n4,\xff\n\n5,"\xff\n"\n6,six\n7,seven,7\n8,"never closed\n9,nine\n'
    found = rows(tmp_path, data, "a.csv")
    assert [getattr(r, "code", "") for r in found] == ["", "columns", "csv", "utf8", "utf8", "", "columns", "csv"]
    assert [r.path for r in found if isinstance(r, BadRecord)] == [f"a.csv:{n}" for n in (3, 4, 5, 7, 10, 11)]
    assert list(texts(tmp_path, data, "a.csv")) == [b"1", b"6"]


def test_a_quote_that_is_never_closed_is_bounded(tmp_path: Path) -> None:
    data = b'id,t\n1,"' + b"x,y\n" * 5000 + b"2,two\n"
    found = rows(tmp_path, data, "a.csv", max_line_bytes="1k")
    assert getattr(found[0], "code", "") == "line-too-long"


def test_empty_cells_are_absent_unless_kept(tmp_path: Path) -> None:
    data = b"id,t\n1,\n2,x\n"
    assert texts(tmp_path, data, "a.csv") == {b"1": None, b"2": "x"}
    assert texts(tmp_path, data, "a.csv", empty="keep") == {b"1": "", b"2": "x"}


def test_tabs_other_delimiters_and_files_without_quotes(tmp_path: Path) -> None:
    assert texts(tmp_path, b'id\tt\n1\t"a,b"\n', "a.tsv") == {b"1": "a,b"}
    assert texts(tmp_path, b'id\tt\n1\t"a\n', "a.tsv", quotes="no") == {b"1": '"a'}
    assert texts(tmp_path, b"id;t\n1;a,b\n", "a.csv", delimiter=";") == {b"1": "a,b"}
    assert texts(tmp_path, b"id|t\n1|x\n", "a.txt", kind="table", format="csv", delimiter="|") == {b"1": "x"}


def test_the_rest_of_a_csv_row_is_a_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, b"id,t,u,v\n1,x,2,\n", "a.csv")
    source = open_source(path, fields=[*TEXT, parse_field("m:json=*")])
    assert values(source, tmp_path / "w")[b"1"] == {"t": "x", "m": {"u": "2"}}


def test_headers_that_name_a_column_twice_or_lack_a_declared_one_are_refused_at_once(tmp_path: Path) -> None:
    for data, says in (
        (b"t,t\n1,2\n", "more than once"),
        (b"a,b\n1,2\n", "'a', 'b'"),
        (b"t,\xff\n", "header"),
        (b't,"x\n', "header"),
    ):
        with pytest.raises(SourceError, match=says):
            open_source(write(tmp_path, data, "a.csv"), fields=TEXT)


# -- the table as a whole -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x1f\x8b\x08", "gzip"),
        (b"PK\3\4", "zip"),
        ('{"t":1}'.encode("utf-16"), "UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ],
)
def test_files_that_are_something_else_are_named(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        open_source(write(tmp_path, data, "a.jsonl"), fields=TEXT)


def test_missing_tables_pipes_and_directories_are_source_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.jsonl")
    (tmp_path / "d.csv").mkdir()
    for name in ("f.jsonl", "d.csv", "none.tsv"):
        with pytest.raises(SourceError, match=name):
            open_source(str(tmp_path / name), kind="table", fields=TEXT)
    with pytest.raises(SourceError, match="root"):
        rows(tmp_path, b'{"t":1}', root=str(tmp_path / "nowhere"))


def test_fields_must_be_declared_and_the_message_lists_the_columns(tmp_path: Path) -> None:
    for data, name in ((b'{"a":1,"b":2}\n', "a.jsonl"), (b"a,b\n1,2\n", "a.csv")):
        with pytest.raises(OptionError, match="'a', 'b'"):
            open_source(write(tmp_path, data, name))
    path = write(tmp_path, b'{"a":1}\n')
    for text in ("x:text=*", "x:json=*@file"):
        with pytest.raises(OptionError, match="json"):
            open_source(path, fields=[parse_field(text)])
    with pytest.raises(OptionError, match="jsonl"):
        open_source(write(tmp_path, b"", "a.dat"), kind="table", fields=TEXT)


def test_a_worker_rebuilds_the_same_source_from_a_message(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"name":"n","t":"x"}\n')
    source = open_source(path, fields=TEXT, key="name", max_file_bytes="1M")
    config = msgspec.msgpack.decode(msgspec.msgpack.encode(source.config()))
    again = source_from_config(config, tmp_path)
    assert list(again.scan()) == list(source.scan())
    assert again.describe() == source.describe()


def test_json_of_the_odd_files_as_rows(tmp_path: Path, shared_data: Path) -> None:
    odd = shared_data / "odd"

    def codes(name: str) -> list[str]:
        source = open_source(write(tmp_path, (odd / name).read_bytes()), fields=[parse_field("m:json=*")])
        return [getattr(r, "code", "") for r in source.scan()]

    assert codes("jsontestsuite__n_number_NaN.json") == ["json"]
    assert codes("jsontestsuite__i_structure_UTF-8_BOM_empty_object.json") == [""]
    assert codes("jsontestsuite__i_string_invalid_lonely_surrogate.json") == ["json"]
    naughty = json.loads((odd / "big-list-of-naughty-strings__blns.json").read_bytes())
    lines = b"".join(json.dumps({"t": text}, ensure_ascii=n % 2 == 0).encode() + b"\n" for n, text in enumerate(naughty))
    assert list(texts(tmp_path, lines).values()) == naughty
