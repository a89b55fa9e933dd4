"""Options and states that make no sense are refused by name, and numbers of any type are taken."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lfdata import Loader, LoaderDataset
from lfdata import transforms as T
from lfdata.errors import LfdataError, LimitError, OptionError, StateError
from lfdata.loader.options import MOST_EPOCHS

HUGE = 1 << 70
DOUBLE = "mapkit:double"
PACKING = {"field": "ids", "window": 16, "capacity": 8}
BUCKETS = {"field": "ids", "window": 16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": 5}, "fields is a sequence of names of fields, .*, not 5"),
        ({"fields": "label"}, "fields is .*, not 'label'"),
        ({"fields": [5]}, "fields holds 5"),
        ({"fields": {"label": 5}}, r"fields\['label'\] is a sequence of transforms .*, not 5"),
        ({"fields": {"ids": T.Tokens(8)}}, r"fields\['ids'\] is a sequence of transforms"),
        ({"batch_transforms": 5}, "batch_transforms is a sequence of transforms"),
        ({"batch_transforms": T.MixUp()}, "batch_transforms is a sequence of transforms"),
        ({"batch_transforms": None}, "batch_transforms is .*, not None"),
        ({"batch_size": HUGE}, f"batch_size is a whole number from 1 to 281474976710656, not {HUGE}"),
        ({"batch_size": True}, "batch_size is a whole number .*, not True"),
        ({"block": HUGE}, "block is a whole number"),
        ({"window": 0}, "window is a whole number from 1 to .*, not 0"),
        ({"seed": -1}, "seed is a whole number from 0 to 18446744073709551615, not -1"),
        ({"threads": HUGE}, "threads is a whole number from 1 to"),
        ({"prefetch": 0}, "prefetch is a whole number from 1 to"),
        ({"processes": 1000}, "processes is a whole number from 1 to"),
        ({"accumulate": 3}, "8 rows of a rank are not 3 equal micro-batches"),
        ({"accumulate": 0}, "accumulate is a whole number from 1 to"),
        ({"most_bad": -1}, "most_bad is a whole number from 0 to"),
        ({"most_bad_rate": "x"}, "most_bad_rate is a number from 0 up to 1, not 'x'"),
        ({"most_bad_rate": 2}, "most_bad_rate is a number from 0 up to 1, not 2"),
        ({"stall_seconds": math.nan}, "stall_seconds is a number above 0 up to 1e.06, not nan"),
        ({"stall_seconds": -1}, "stall_seconds is a number above 0"),
        ({"stall_seconds": math.inf}, "stall_seconds is a number above 0"),
        ({"stall_seconds": None}, "stall_seconds is a number above 0"),
        ({"shuffle": True}, "shuffle is one of 'sequential', 'full', 'block', not True"),
        ({"tail": []}, r"tail is one of 'drop_last', 'pad', not \[\]"),
        ({"engine": "fast"}, "engine is one of .*, not 'fast'"),
        ({"bad_samples": 5}, "bad_samples is one of"),
        ({"native": "x"}, "native is True or False, not 'x'"),
        ({"isolate": 1}, "isolate is True or False, not 1"),
        ({"static": None}, "static is True or False, not None"),
        ({"feedback": 5}, "feedback 5"),
        ({"rank": 1.0, "world_size": 2}, "rank is a whole number from 0 to 1, not 1.0"),
        ({"rank": 2, "world_size": 2}, "rank is a whole number from 0 to 1, not 2"),
        ({"rank": 0, "world_size": HUGE}, "world_size is a whole number from 1 to 1048576"),
        ({"where": 5}, "where is a sequence of filters, .*, not 5"),
        ({"where": [True] * 103}, "where holds 103 filters for 1 sources"),
        ({"cache": 5}, "cache is 5; it is a Cache or a directory"),
        ({"trace": 5}, "trace is a path, not 5"),
        ({"source": 5}, "source is a sequence of paths or URLs, or one of them, not 5"),
        ({"source": []}, "source is an empty sequence"),
        ({"source": ""}, "source is empty text"),
        ({"source": "a\0b"}, "source is a path, not"),
        ({"mixture": 5}, "mixture is a mapping .*, not 5"),
        ({"mixture": {"seed": 3}}, "mixture: there is no option 'seed'; there are weights, temperature, block, exhaustion, n"),
        ({"mixture": {1: 2}}, "mixture: there is no option 1"),
        ({"mixture": {"weights": 5}}, "mixture: weights is a sequence of numbers above 0, not 5"),
        ({"mixture": {"weights": ["a"]}}, "mixture: each of weights is a number above 0 .*, not 'a'"),
        ({"mixture": {"weights": [True]}}, "mixture: each of weights .*, not True"),
        ({"mixture": {"weights": [1j]}}, "mixture: each of weights"),
        ({"mixture": {"weights": [10**400]}}, "mixture: each of weights"),
        ({"mixture": {"weights": [Fraction(10**400, 3)]}}, "mixture: each of weights"),
        ({"mixture": {"weights": [Decimal("nan")]}}, "mixture: each of weights"),
        ({"mixture": {"weights": [1, 2]}}, "mixture: 2 weights for 1 sources"),
        ({"mixture": {"temperature": 1j}}, "mixture: temperature is a number above 0"),
        ({"mixture": {"block": 1.5}}, "mixture: block is a whole number"),
        ({"mixture": {"n": 10.5}}, "mixture: n is a whole number"),
        ({"mixture": {"exhaustion": []}}, "mixture: exhaustion is one of"),
        ({"buckets": 5}, "buckets is a mapping"),
        ({"buckets": {"window": 16}}, "buckets needs the option 'field'"),
        ({"buckets": BUCKETS | {"group": 8}}, "buckets: there is no option 'group'"),
        ({"buckets": BUCKETS | {"window": 16.0}}, "buckets: window is a whole number"),
        ({"buckets": BUCKETS | {"field": []}}, "buckets: field is the name of a field"),
        ({"buckets": BUCKETS | {"field": "label"}}, "buckets: field is 'label', which is scalar in .*: ids"),
        ({"buckets": BUCKETS | {"field": "none"}}, "buckets: field is 'none', which is absent in"),
        ({"packing": PACKING | {"field": "label"}}, "packing: field is 'label', which is scalar in .*: ids"),
        ({"packing": PACKING | {"capacity": 8.5}}, "packing: capacity is a whole number"),
        ({"packing": PACKING | {"digest": "x"}}, "packing: there is no option 'digest'"),
        ({"packing": PACKING | {"cache": 5}}, "packing: cache is a path, not 5"),
        ({"packing": PACKING | {"cache": b"x"}}, "packing: cache is a path"),
        ({"fields": {"ids": [T.Tokens(8, pad=-1)]}}, "Tokens: pad is -1; the field's uint32 holds 0 to 4294967295"),
        ({"fields": {"ids": [T.Tokens(8, pad=1 << 32)]}}, "Tokens: pad is 4294967296"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(numbers: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Loader(**{"source": numbers, "batch_size": 8, "engine": "inline"} | options)


def test_pictures_have_no_tokens_to_pack(pictures: Path) -> None:
    with pytest.raises(OptionError, match="packing: field is 'image', which is image in .*: the data set has none"):
        Loader(pictures, 8, ["image"], packing=PACKING | {"field": "image"})


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble", "S4", "f8,f8", "x,(", None, 5, {"names": 5}])
def test_a_dtype_that_torch_does_not_have_is_refused(dtype: Any) -> None:
    with pytest.raises(OptionError, match="Map: dtype is .* a dtype that torch has too: bool, uint8"):
        T.Map(DOUBLE, (1,), dtype)


@pytest.mark.parametrize("shape", [(1 << 62, 8), (1,) * 40, (-1,), (1.5,)])
def test_a_shape_that_no_array_can_have_is_refused(shape: Any) -> None:
    with pytest.raises(OptionError, match="Map: shape is"):
        T.Map(DOUBLE, shape, "float64")


def test_what_does_not_fit_into_memory_is_told_with_its_size(numbers: Path) -> None:
    loader = Loader(numbers, 1 << 48, {"label": [T.Map(DOUBLE, (1 << 40, 1 << 40), "float64")]}, tail="pad", engine="inline")
    with pytest.raises(LimitError, match="do not fit"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"weights": [np.float64(1), np.float32(2)]}, {"weights": [1.0, 2.0]}),
        ({"weights": np.array([1, 2])}, {"weights": [1, 2]}),
        ({"weights": [Fraction(1, 3), 1]}, {"weights": [1, 3]}),
        ({"weights": [Decimal("0.1"), 0.3]}, {"weights": [1, 3]}),
        ({"weights": (1, 2), "block": np.int16(16), "n": np.int64(100)}, {"weights": [1, 2], "block": 16, "n": 100}),
        ({"temperature": Fraction(3, 2)}, {"temperature": 1.5}),
        ({"temperature": np.float32(2)}, {"temperature": 2.0}),
    ],
)
def test_numbers_of_any_type_mix_sources(
    numbers: Path, more_numbers: Path, given: dict[str, Any], plain: dict[str, Any]
) -> None:
    one = Loader([numbers, more_numbers], 8, ["label"], mixture=given)
    other = Loader([numbers, more_numbers], 8, ["label"], mixture=plain)
    assert one.state_dict() == other.state_dict()
    assert [b["__index__"].tolist() for b in one] == [b["__index__"].tolist() for b in other]


def test_numbers_of_any_type_reach_the_decoder_process(numbers: Path, tmp_path: Path) -> None:
    options = {"rank": np.int64(0), "world_size": np.int8(1), "most_bad_rate": Fraction(1, 2), "stall_seconds": np.float32(50)}
    packing = PACKING | {"capacity": np.int64(8), "cache": tmp_path / "counts"}
    loader = Loader(numbers, 4, ["ids"], packing=packing, engine="process", isolate=True, **options)  # type: ignore[arg-type]
    assert sum(1 for _ in loader) == len(loader) > 0 and any((tmp_path / "counts").iterdir())
    loader.close()


def test_blocks_larger_than_the_data_are_a_full_shuffle_of_one_block(numbers: Path) -> None:
    found = []
    for block, window in ((1 << 48, 1 << 48), (103, 1)):
        loader = Loader(numbers, 8, ["label"], shuffle="block", block=block, window=window, tail="pad")
        found.append([batch["__index__"].tolist() for batch in loader])
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("RANK", "2"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-1")])
def test_a_launcher_that_sets_nonsense_is_named(numbers: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"environment variable {name} is"):
        Loader(numbers, 8)


def test_half_of_what_a_launcher_sets_is_refused(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for make in (Loader, LoaderDataset):
        with pytest.raises(OptionError, match="WORLD_SIZE is 4 and RANK is not set"):
            make(numbers, 8)
    assert len(Loader(numbers, 8, rank=1, world_size=2)) == 12
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "rank 0 of 1" in repr(Loader(numbers, 8))


@pytest.mark.parametrize(("below", "message"), [("none/trace.json", "there is no directory .*none"), ("", "is a directory")])
def test_a_trace_that_cannot_be_is_told_before_anything_is_done(tmp_path: Path, below: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Loader(tmp_path / "no data set", 8, trace=tmp_path / below)
    assert not list(tmp_path.iterdir())


WRONG = [math.inf, math.nan, HUGE, -1, "8", 8.5, True, None, []]


@pytest.mark.parametrize("name", ["epoch", "samples", "batch_size", "world_size", "accumulate"])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_state_with_a_number_that_is_none_is_refused(numbers: Path, name: str, value: Any) -> None:
    loader = Loader(numbers, 8, ["label"])
    with pytest.raises(StateError, match=name):
        loader.load_state_dict(loader.state_dict() | {name: value})


def test_a_state_of_another_version_or_with_more_in_it_is_refused(numbers: Path) -> None:
    loader = Loader(numbers, 8, ["label"])
    state = loader.state_dict()
    for version in (True, 2, None, "1"):
        with pytest.raises(StateError, match=f"state version {version!r}"):
            loader.load_state_dict(state | {"version": version})
    with pytest.raises(StateError, match=r"it differs in 'more' \(in the state, unknown here\)"):
        loader.load_state_dict(state | {"identity": state["identity"] | {"more": "1"}})


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_the_last_epoch_can_be_iterated(numbers: Path, engine: str) -> None:
    last = MOST_EPOCHS
    loader = Loader(numbers, 8, ["label"], engine=engine)
    loader.set_epoch(last)
    assert sum(1 for _ in loader) == 12
    loader.set_epoch(last)
    assert loader.end_of(last)["epoch"] == last and loader.forecast(30) is not None
    for one in (Loader(numbers, 8), LoaderDataset(numbers, 8)):
        with pytest.raises(OptionError, match="epoch is a whole number from 0"):
            one.set_epoch(last + 1)
    loader.close()


def test_a_loader_is_neither_pickled_nor_copied(numbers: Path) -> None:
    for what in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(LfdataError, match="make it in the process that uses it"):
            what(Loader(numbers, 8))  # type: ignore[operator]


@pytest.mark.parametrize("state", [None, 5, "x", [], {}])
def test_what_is_no_mapping_is_no_state(numbers: Path, state: Any) -> None:
    with pytest.raises(StateError, match="state"):
        Loader(numbers, 8, ["label"]).load_state_dict(state)
    for inside in (state, {"worker": 0, "workers": 1, "loader": state}):
        with pytest.raises(StateError, match="state"):
            iter(LoaderDataset(numbers, 8, ["label"])).load_state_dict(inside)  # type: ignore[attr-defined]


def test_more_samples_than_an_epoch_has_are_no_state(numbers: Path) -> None:
    loader = Loader(numbers, 8, ["label"])
    with pytest.raises(StateError, match=r"104 samples of epoch 0 are consumed in the state; in batches of 8 it has 96"):
        loader.load_state_dict(loader.state_dict() | {"samples": 104})


@pytest.mark.parametrize("value", [-1, 1 << 63, 1.5, "x", True])
@pytest.mark.parametrize(
    "call",
    [
        lambda path: Loader(path, 8).set_epoch,
        lambda path: Loader(path, 8).end_of,
        lambda path: LoaderDataset(path, 8).set_epoch,
        lambda path: Loader(path, 8).forecast,
    ],
)
def test_numbers_that_methods_take(numbers: Path, value: Any, call: Callable[[Path], Callable[[Any], Any]]) -> None:
    with pytest.raises(OptionError, match=r"(epoch|batches) is a whole number from 0 to"):
        call(numbers)(value)
