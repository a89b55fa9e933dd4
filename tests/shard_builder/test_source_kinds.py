"""From a location to a data set: kinds and fields are guessed, and what the reader gives back is what the source held."""

from __future__ import annotations

import ast
import gzip
import itertools
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from _build import picture
from tarkit import header, source, tar_bytes, write

import lfdata
from lfdata.codecs.registry import make_encoder
from lfdata.errors import OptionError, SourceError
from shard_builder.convert import convert
from shard_builder.fields import parse_field
from shard_builder.options import ConvertOptions
from shard_builder.sources import guess_kind, open_source
from shard_builder.sources.guess import OPAQUE, guess_fields, guess_notes
from shard_builder.sources.image_folder import COLUMNS


def empty(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.tar", "webdataset"),
        ("a.TAR.GZ", "webdataset"),
        ("a.tgz", "webdataset"),
        ("a-{00..12}.tar", "webdataset"),
        ("x{1,2}/part", "webdataset"),
        ("a.tar::b.tar.gz", "webdataset"),
        ("t.jsonl", "table"),
        ("t.NDJSON", "table"),
        ("t.csv", "table"),
        ("t.tsv", "table"),
        ("t.parquet", "parquet"),
        ("t-*.PARQUET", "parquet"),
        ("t-{0..3}.parquet::u.pq", "parquet"),
        ("t.arrow", "arrow"),
        ("t.h5", "hdf5"),
        ("t-*.HDF5", "hdf5"),
    ],
)
def test_kind_by_name(name: str, kind: str) -> None:
    assert guess_kind(name) == kind


def test_kind_of_what_exists(tmp_path: Path) -> None:
    empty(tmp_path / "tars" / "b.tgz")
    empty(tmp_path / "pictures, {2}::x" / "cat.jpg")
    empty(tmp_path / "table.xlsx")
    assert guess_kind(str(tmp_path / "tars")) == "webdataset"
    assert guess_kind(str(tmp_path / "pictures, {2}::x")) == "image-folder"
    with pytest.raises(SourceError, match=r"\.jsonl.*\.tar"):
        guess_kind(str(tmp_path / "table.xlsx"))
    with pytest.raises(SourceError, match="no such file"):
        guess_kind(str(tmp_path / "nothing"))
    with pytest.raises(OptionError, match="webdataset"):
        open_source(str(tmp_path / "tars"), kind="tar")


def test_every_guessed_field_has_an_encoder() -> None:
    endings = [
        "jpg",
        "png",
        "seg.png",
        "x.tif",
        "wav",
        "flac",
        "txt",
        "a.txt",
        "json",
        "m.json",
        "cls",
        "__hidden",
        "7z",
        "a.b.c",
        *OPAQUE,
    ]
    fields = guess_fields([endings])
    assert len(fields) == len(endings)
    for spec in fields:
        make_encoder(spec.kind, spec.options)
        # The guess could as well have been written by hand.
        options = "".join(f",{name}={value}" for name, value in spec.options.items())
        assert parse_field(f'{spec.name}:{spec.kind}="{spec.column}"{options}').name == spec.name
    assert fields == guess_fields([list(reversed(endings))])


def test_possible_masks_are_guessed_lossless_and_pickles_stay_bytes() -> None:
    beside = {spec.name: spec.options.get("codec", "webp") for spec in guess_fields([["jpg", "png", "seg.bmp", "b.jpg"]])}
    assert beside == {"jpg": "webp", "png": "keep", "seg_bmp": "png", "b_jpg": "webp"}
    alone = guess_fields([["jpg"], ["png"]])
    assert [(spec.name, spec.column, spec.options) for spec in alone] == [("image", "jpg;png", {})]
    opaque = guess_fields([["npy", "pyd", "a.pth", "bin"]])
    assert {spec.kind for spec in opaque} == {"bytes"}
    assert [note.split()[1] for note in guess_notes(opaque)] == [".a.pth", ".npy", ".pyd"]


def samples(count: int) -> list[tuple[str, bytes]]:
    """Members of realistic samples; the mask is a PNG beside a picture."""
    members = []
    for n in range(count):
        key = f"part.{n % 2}/sample {n:03d} é"
        members += [
            (f"{key}.png", picture(n)),
            (f"{key}.txt", f"caption {n} ü".encode()),
            (f"{key}.json", json.dumps({"n": n, "tags": ["a", None]}).encode()),
            (f"{key}.cls", b"%d\n" % (n - 3)),
            (f"{key}.vec.npy", b"not numbers %d" % n),
        ]
        if n % 3:
            members.pop()
    return members


def options(workers: int = 1) -> ConvertOptions:
    return ConvertOptions(workers=workers, shard_bytes=1 << 20)


def check(target: Path, count: int) -> None:
    data = lfdata.open(target)
    assert len(data) == count
    for n in range(count):
        sample = data[n]
        assert sample["text"] == f"caption {n} ü"
        assert sample["json"] == {"n": n, "tags": ["a", None]}
        assert int(sample["cls"]) == n - 3
        assert sample["image"].shape == (12, 20, 3)
        assert (sample.get("vec_npy") is not None) == (n % 3 == 0)


def plain(folder: Path) -> str:
    return str(write(folder / "t.tar", samples(12)))


def compressed(folder: Path) -> str:
    path = folder / "t.tar.gz"
    path.write_bytes(gzip.compress(tar_bytes(samples(12))))
    return str(path)


def mixed(folder: Path) -> str:
    members = samples(12)
    cuts = [next(n for n, (name, _) in enumerate(members) if f"sample {k:03d}" in name) for k in (0, 5, 9)] + [len(members)]
    for number, (first, stop) in enumerate(itertools.pairwise(cuts)):
        data = tar_bytes(members[first:stop])
        (folder / f"t-{number}.tar").write_bytes(gzip.compress(data) if number == 1 else data)
    return f"{folder}/t-{{0..2}}.tar"


@pytest.mark.parametrize("make", [plain, compressed, mixed])
def test_guessed_tars_come_back_from_shards(tmp_path: Path, make: Callable[[Path], str]) -> None:
    location = make(tmp_path)
    summary = convert(open_source(location), tmp_path / "out", options())
    assert (summary.samples, summary.errors) == (12, 0)
    check(tmp_path / "out", 12)
    assert not (tmp_path / "out" / ".work").exists()


def test_tars_give_the_same_bytes_for_any_number_of_workers(tmp_path: Path) -> None:
    location = mixed(tmp_path)
    digests = []
    for name, workers in (("one", 1), ("two", 2)):
        convert(open_source(location), tmp_path / name, options(workers))
        digests.append([path.read_bytes() for path in sorted((tmp_path / name).glob("*.lfd"))])
    assert digests[0] == digests[1]
    assert digests[0]


def test_bad_samples_of_a_tar_are_skipped_and_listed(tmp_path: Path) -> None:
    members = [*samples(3), ("x.txt", b"1"), ("y.txt", b"2"), ("x.cls", b"3"), ("z.cls", b"no number"), ("z.txt", b"z")]
    path = tmp_path / "t.tar"
    path.write_bytes(tar_bytes(members) + b"garbage")
    opened = open_source(str(path))
    summary = convert(opened, tmp_path / "out", ConvertOptions(workers=1, on_error="skip"))
    assert summary.samples == 4
    errors = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert [error["code"] for error in errors] == ["interleaved", "interleaved", "parse", "trailing-data"]
    assert all("t.tar" in error["path"] for error in errors)
    data = lfdata.open(tmp_path / "out")
    assert [data[n]["text"] for n in range(4)] == ["caption 0 ü", "caption 1 ü", "caption 2 ü", "2"]


def test_an_array_declared_by_hand(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    path = write(tmp_path / "t.tar", [("k.npy", (tmp_path / "v.npy").read_bytes())])
    declared = [parse_field("v:array=npy,dtype=float32,ndim=2")]
    convert(source(path, declared), tmp_path / "out", options())
    data = lfdata.open(tmp_path / "out")
    assert data[0]["v"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_tar_of_nothing_but_links_is_no_empty_data_set(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", [header("k.a", tarfile.SYMTYPE, "/etc/passwd")])
    with pytest.raises(SourceError, match="link"):
        open_source(str(path))
    with pytest.raises(SourceError, match="link"):
        convert(source(path, [parse_field("a:bytes=a")]), tmp_path / "out", options())


def codes_of(tree: ast.AST) -> set[str]:
    """Codes of errors in a module: arguments of what makes them, and the first of a pair given to ``problem``."""
    place = {"SampleError": 0, "TarFault": 0, "NoEnd": 0, "BadRecord": 2, "_bad": 2}
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            found += node.args[place[name] :][:1] if name in place else []
        elif isinstance(node, ast.Assign) and any(getattr(target, "attr", "") == "problem" for target in node.targets):
            found += [pair.elts[0] for pair in ast.walk(node.value) if isinstance(pair, ast.Tuple)]
    return {node.value for node in found if isinstance(node, ast.Constant)}


def test_the_document_names_every_code_option_and_column() -> None:
    root = Path(__file__).resolve().parents[2]
    text = re.sub(r"```.*?```", "", (root / "docs" / "sources.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    named = set(re.findall(r"`([^`]+)`", text))
    codes: set[str] = set()
    options: set[str] = set()
    for path in sorted((root / "tools" / "shard_builder" / "sources").glob("*.py")):
        code = path.read_text(encoding="utf-8")
        codes |= codes_of(ast.parse(code))
        for table in re.findall(r"^_VALID = \{\n(.*?)^\}", code, re.MULTILINE | re.DOTALL):
            options |= set(re.findall(r'^    "([a-z_]+)":', table, re.MULTILINE))
    assert {"interleaved", "sparse", "json", "depth", "too-many-members"} <= codes
    assert {"key_split", "links", "root"} <= options
    misuse = {"row", "unstaged"}  # only a wrong caller sees these
    assert (codes | options | set(COLUMNS)) - named - misuse == set()
