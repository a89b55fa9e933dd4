"""Any schema and any rows come back as they went in, through every way of reading (properties)."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from independent_reader import DataSetReader
from shardkit import AUDIO_PARAMS, Part, Side, array, audio, plain, raw_image, scalar, tokens, write_dataset

from lfdata.codecs.base import Encoded
from lfdata.codecs.registry import make_decoder, make_encoder
from lfdata.dataset import ShardDataset
from lfdata.errors import KeyMissingError, OptionError
from lfdata.format.meta import FieldMeta
from lfdata.format.verify import verify_file

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
VOCAB = {"uint8": 256, "uint16": 65_536, "uint32": 2**32, "uint64": 2**63}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder where fsync costs nothing, if there is such a place."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


@dataclass
class Column:
    """A field and a strategy of (value, value as stored)."""

    meta: FieldMeta
    values: st.SearchStrategy[tuple[Any, Encoded]]


def same(one: Any, other: Any) -> bool:
    """Equality of decoded values, to the bit."""
    if isinstance(other, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(other, tuple):
        return same(one.samples, other[0]) and one.rate == other[1]
    if isinstance(other, np.generic):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return type(one) is type(other) and bool(one == other)


@st.composite
def columns(draw: st.DrawFn) -> Column:
    """A random field."""
    name = draw(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda s: not s.startswith("__"))
    )
    kind = draw(st.sampled_from(["image", "tokens", "audio", "json", "array", "text", "bytes", "scalar"]))
    match kind:
        case "text":
            return Column(FieldMeta(name, kind, {}), st.text(max_size=60).map(lambda v: (v, plain(v.encode()))))
        case "bytes":
            sizes = st.binary(max_size=80) | st.integers(0, 3).map(lambda n: bytes([n]) * (n * 3000))
            return Column(FieldMeta(name, kind, {}), sizes.map(lambda v: (v, plain(v))))
        case "json":
            encoder = make_encoder("json", {})
            # A stored null and an absent value are both None in a sample: only presence tells them apart.
            values = JSON.filter(lambda v: v is not None)
            return Column(FieldMeta(name, kind, encoder.params), values.map(lambda v: (v, encoder.encode(json.dumps(v)))))
        case "tokens":
            dtype = draw(st.sampled_from(list(VOCAB)))
            ids = hnp.arrays(dtype, st.integers(0, 40), elements=st.integers(0, VOCAB[dtype] - 1))
            params = {"dtype": dtype, "vocab": VOCAB[dtype]}
            return Column(FieldMeta(name, kind, params), ids.map(lambda v: (v, tokens(v.tolist(), dtype))))
        case "audio":
            shapes = st.tuples(st.integers(0, 300), st.integers(1, 3))
            samples = hnp.arrays("int16", shapes, elements=st.integers(-(2**15), 2**15 - 1), fill=st.just(0))
            return Column(FieldMeta(name, kind, AUDIO_PARAMS), samples.map(lambda v: ((v, 8000), audio(v))))
        case "image":
            pixels = hnp.arrays(st.sampled_from(["uint8", "uint16"]), hnp.array_shapes(min_dims=3, max_dims=3, max_side=4))
            params = make_encoder("image", {"codec": "raw"}).params
            return Column(FieldMeta(name, kind, params), pixels.map(lambda v: (v, raw_image(v))))
        case "array":
            dtype, ndim = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 4))
            values = hnp.arrays(dtype, hnp.array_shapes(min_dims=ndim, max_dims=ndim, min_side=0, max_side=4))
            return Column(FieldMeta(name, kind, {"dtype": dtype, "ndim": ndim}), values.map(lambda v: (v, array(v))))
    dtype = draw(st.sampled_from(DTYPES))
    numbers = hnp.from_dtype(np.dtype(dtype)).map(lambda v: (np.dtype(dtype).type(v), scalar(v, dtype)))
    return Column(FieldMeta(name, kind, {"dtype": dtype}), numbers)


@dataclass
class Case:
    """A data set to be written: fields, rows by shard, sidecar rows by shard."""

    fields: list[FieldMeta]
    shards: list[list[tuple[bytes, dict[str, tuple[Any, Encoded]]]]]
    side_fields: list[FieldMeta]
    sides: list[list[dict[str, tuple[Any, Encoded]]]]
    group_bytes: int
    with_index: bool

    def write(self, root: Path) -> None:
        """To disk."""
        parts = []
        for rows, side in zip(self.shards, self.sides, strict=True):
            sidecars = [Side(self.side_fields, [stored(values) for values in side])] if self.side_fields else []
            parts.append(Part([(key, stored(values)) for key, values in rows], sidecars))
        write_dataset(root, self.fields, parts, group_bytes=self.group_bytes, with_index=self.with_index)

    def expected(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Key and value of every field by row, sidecars on top."""
        names = list(dict.fromkeys(f.name for f in [*self.fields, *self.side_fields]))
        replaced = {f.name for f in self.side_fields}
        result = []
        for rows, side in zip(self.shards, self.sides, strict=True):
            for number, (key, values) in enumerate(rows):
                mine = {n: v for n, v in values.items() if n not in replaced} | (side[number] if self.side_fields else {})
                result.append((key, {n: mine[n][0] if n in mine else None for n in names}))
        return result


def stored(values: dict[str, tuple[Any, Encoded]]) -> dict[str, Encoded]:
    """Only what the writer takes."""
    return {name: value for name, (_, value) in values.items()}


@st.composite
def rows_of(draw: st.DrawFn, made: list[Column], count: int) -> list[dict[str, tuple[Any, Encoded]]]:
    """Rows of some columns, absent values and repeated ones included."""
    pools = [draw(st.lists(column.values, min_size=1, max_size=4)) for column in made]
    rows = []
    for _ in range(count):
        values = {}
        for column, pool in zip(made, pools, strict=True):
            pick = draw(st.integers(-1, len(pool) - 1))
            if pick >= 0:
                values[column.meta.name] = pool[pick]
        rows.append(values)
    return rows


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A random data set."""
    made = draw(st.lists(columns(), max_size=5, unique_by=lambda c: c.meta.name))
    side = draw(st.lists(columns(), max_size=2, unique_by=lambda c: c.meta.name))
    if made and side and draw(st.booleans()):
        side[0] = Column(FieldMeta(made[0].meta.name, made[0].meta.kind, made[0].meta.params), made[0].values)
        side = side[:1] + [c for c in side[1:] if c.meta.name != side[0].meta.name]
    # A sidecar may replace a field by one of another kind: the manifest's schema is the sidecar's then.
    counts = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    total = sum(counts)
    key = st.binary(max_size=12) | st.text(max_size=6).map(lambda s: s.encode("utf-8", "surrogatepass"))
    keys = draw(st.lists(key, min_size=total, max_size=total, unique=True))
    shards, sides, at = [], [], 0
    for count in counts:
        values = draw(rows_of(made, count))
        shards.append(list(zip(keys[at : at + count], values, strict=True)))
        sides.append(draw(rows_of(side, count)))
        at += count
    group_bytes = draw(st.sampled_from([1, 64, 1000, 1 << 20]))
    return Case([c.meta for c in made], shards, [c.meta for c in side], sides, group_bytes, draw(st.booleans()))


# Without shrinking: a failure must not take minutes; the case is derived from the test's name and can be shrunk by hand.
SETTINGS = settings(
    phases=[Phase.generate],
    deadline=None,
    max_examples=60,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)


@SETTINGS
@given(cases())
def test_what_goes_in_comes_out(case: Case) -> None:
    with folder_in_memory() as folder:
        case.write(Path(folder))
        data, expected = ShardDataset(folder), case.expected()
        assert len(data) == len(expected) and (data.index() is not None) == case.with_index
        samples = list(data)
        for row, (key, values) in enumerate(expected):
            assert samples[row].pop("__key__") == key and samples[row].keys() == values.keys()
            for name, value in values.items():
                found = samples[row][name]
                assert found is None if value is None else same(found, value), (row, name)
                if isinstance(found, np.ndarray):
                    assert found.flags.writeable and found.flags.owndata
            assert data.index_of(key) == row
        check_columns(data, expected)
        for file in Path(folder).glob("*.lf?"):
            assert list(verify_file(file, decoders=make_decoder)) == []


def check_columns(data: ShardDataset, expected: list[tuple[bytes, dict[str, Any]]]) -> None:
    """Dense columns against the rows."""
    for name, field in data.schema.items():
        values = [row[name] for _, row in expected]
        assert data.present(name).tolist() == [value is not None for value in values]
        if field.kind == "scalar":
            column = data.column(name)
            dtype = np.dtype(field.params["dtype"])
            assert column.dtype == dtype and not column.flags.writeable
            assert column.tobytes() == np.array([dtype.type(0) if v is None else v for v in values], dtype).tobytes()
        elif field.kind == "array":
            dims = data.column(f"{name}.dims")
            assert dims.shape == (len(data), field.params["ndim"]) and dims.dtype == np.uint64
            assert [tuple(d) for d in dims.tolist()] == [(0,) * field.params["ndim"] if v is None else v.shape for v in values]
        elif field.kind == "tokens":
            assert data.column(f"{name}.tokens").tolist() == [0 if v is None else len(v) for v in values]


@SETTINGS
@given(cases(), st.data())
def test_read_many_in_any_order(case: Case, choice: st.DataObject) -> None:
    with folder_in_memory() as folder:
        case.write(Path(folder))
        data, expected = ShardDataset(folder, index_cache_bytes=choice.draw(st.sampled_from([1, 1 << 20]))), case.expected()
        rows = len(data)
        picks = choice.draw(st.lists(st.integers(-rows, rows - 1), max_size=12)) if rows else []
        names = choice.draw(st.lists(st.sampled_from(list(data.schema)), max_size=3)) if data.schema else []
        found, raw = data.read_many(picks, names), data.read_many(np.array(picks, np.int64), names, decode=False)
        assert found["__key__"] == [expected[pick][0] for pick in picks] == data.keys(picks)
        assert set(found) == {*names, "__key__"} and set(raw) == set(names)
        for name in names:
            for place, pick in enumerate(picks):
                value = expected[pick][1][name]
                assert found[name][place] is None if value is None else same(found[name][place], value)
                if data.schema[name].kind in ("text", "bytes") and value is not None:
                    assert raw[name][place].tobytes() == (value.encode() if isinstance(value, str) else value)


@settings(SETTINGS, max_examples=40)
@given(cases())
def test_two_writes_are_byte_identical_and_both_readers_agree(case: Case) -> None:
    with folder_in_memory() as one, folder_in_memory() as other:
        case.write(Path(one))
        case.write(Path(other))
        names = sorted(p.name for p in Path(one).iterdir())
        assert names == sorted(p.name for p in Path(other).iterdir())
        for name in names:
            assert (Path(one) / name).read_bytes() == (Path(other) / name).read_bytes()
        theirs = list(DataSetReader(Path(one)).samples())
        for (key, values), sample in zip(case.expected(), theirs, strict=True):
            assert sample.pop("__key__") == key and sample.keys() == values.keys()
            assert all((sample[n] is None) == (values[n] is None) for n in values)


KEYS = [b"", "caf\u00e9".encode(), "cafe\u0301".encode(), b"\xff\xfe\0", b"a/b", b"a", b"A", b"k" * 65_535, "世界".encode()]


@pytest.mark.parametrize("with_index", [False, True])
def test_keys_are_bytes_and_never_normalised(tmp_path: Path, with_index: bool) -> None:
    rows = [(key, {"n": scalar(number, "int32")}) for number, key in enumerate(KEYS)]
    write_dataset(
        tmp_path, [FieldMeta("n", "scalar", {"dtype": "int32"})], [Part(rows[:4]), Part(rows[4:])], with_index=with_index
    )
    data = ShardDataset(tmp_path)
    assert data.keys(range(len(KEYS))) == KEYS and data.keys([8, 0, 7, 7, -1]) == [KEYS[8], b"", KEYS[7], KEYS[7], KEYS[8]]
    assert [data.index_of(key) for key in KEYS] == list(range(len(KEYS)))
    assert data.index_of("caf\u00e9") == 1 and data.index_of("cafe\u0301") == 2 and data.index_of("\udcff\udcfe\0") == 3
    for missing in (b"b", b"k" * 65_534, "CAFÉ", b"\0"):
        with pytest.raises(KeyMissingError):
            data.index_of(missing)


def test_indices_that_make_no_sense(tmp_path: Path) -> None:
    write_dataset(
        tmp_path,
        [FieldMeta("n", "scalar", {"dtype": "int32"})],
        [Part([(b"%d" % n, {"n": scalar(n, "int32")}) for n in range(3)])],
    )
    data = ShardDataset(tmp_path)
    for index in (3, -4, 2**63, 2**64 - 1, 2**70, -(2**70)):
        with pytest.raises(IndexError):
            data[index]
    for many in (np.array([2**64 - 1], np.uint64), [0, 3], [-4]):
        with pytest.raises(IndexError):
            data.read_many(many)
    for many in ([2**63, -1], np.array([0, 2**70], object), [-(2**63), 2**63]):
        with pytest.raises(IndexError):
            data.read_many(many)
    for fine in (np.array([0, -1], object), [np.uint64(0), -1], np.array([2, 1, 0])[::-2], (0, 2)):
        assert data.read_many(fine)["n"] == [0, 2]
    assert data.read_many(np.array([], object))["n"] == []
    for wrong in ([0.5], ["a"], [[0]], 5, [True], [None], [[0], [1, 2]], np.array([True], object), {0: 1}):
        with pytest.raises(OptionError):
            data.read_many(wrong)
    keys: list[Any] = [3, None, ["k"]]
    for key in keys:
        with pytest.raises(OptionError, match="a key is bytes or str"):
            data.index_of(key)
    wrong_options: list[dict[str, Any]] = [{"max_descriptors": 0}, {"max_descriptors": -1}, {"read_threads": 0}]
    for options in wrong_options:
        with pytest.raises(OptionError, match="at least 1"):
            ShardDataset(tmp_path, **options)
    with pytest.raises(TypeError):
        data["0"]  # type: ignore[index]
    with pytest.raises(KeyMissingError):
        data.read_many([0], ["m"])
    with pytest.raises(OptionError):
        data.read_many([0], "n")
    assert data.read_many([])["n"] == [] and data[np.int8(-1)]["n"] == 2


def test_an_empty_data_set(tmp_path: Path) -> None:
    fields = [
        FieldMeta("n", "scalar", {"dtype": "int32"}),
        FieldMeta("a", "array", {"dtype": "int8", "ndim": 3}),
        FieldMeta("t", "tokens", {"dtype": "uint8", "vocab": 5}),
    ]
    for number, parts in enumerate(([], [Part([])], [Part([]), Part([])])):
        for with_index in (False, True):
            root = tmp_path / f"{number}{with_index}"
            write_dataset(root, fields, parts, with_index=with_index)
            data = ShardDataset(root)
            if not parts:
                assert data.schema.keys() == {"n", "a", "t"}
            assert list(data) == [] and data.column("n").shape == (0,) and data.column("a.dims").shape == (0, 3)
            assert data.present("t").tolist() == [] and data.read_many([])["t"] == []
