"""Bad samples: stop, replace, mask; limits; every event names what and where."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest
from batchkit import BAD_HOW, digest, digests, epoch_of, indices, same, write_numbers

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader, ShardDataset
from lfdata.errors import BadSamplesError, CorruptError, FormatError, OptionError, SampleError, StorageError

FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(16)], "label": None}
BAD = set(range(3, 48, 7))
ENGINES = [{"engine": "inline"}, {"engine": "thread"}, {"engine": "process"}]


@pytest.mark.parametrize("options", ENGINES, ids=lambda options: options["engine"])
def test_stop_names_the_sample_and_the_batches_before_it_come_first(
    damaged: Path, options: dict[str, Any], decoders_alone: None
) -> None:
    order = indices(Loader(damaged, 4, ["label"], engine="inline"))
    first = next(place for place, index in enumerate(order) if index in BAD)
    seen: list[int] = []
    with pytest.raises(SampleError) as caught:
        for batch in Loader(damaged, 4, FIELDS, **options):
            seen += batch["__index__"].tolist()
    assert seen == order[: first // 4 * 4]
    data, index = ShardDataset(damaged), order[first]
    assert caught.value.key == b"p%d" % index and caught.value.field == "image"
    for word in (data.shard_name(index), f"index {index}", f"p{index}", "image", caught.value.reason, str(damaged)):
        assert word in str(caught.value)


@pytest.mark.parametrize("options", ENGINES, ids=lambda options: options["engine"])
@pytest.mark.parametrize("at", [1, 50])
def test_batches_before_it_come_first_where_many_share_a_slot(
    tmp_path: Path, options: dict[str, Any], at: int, decoders_alone: None
) -> None:
    """The slot has 25 steps; the damage is on disk, and the error the format's own."""
    path = write_numbers(tmp_path / "d", 103, lengths=[5] * 103)
    batchkit.spoil(path, [at], "ids")
    loader = Loader(path, 4, ["ids"], shuffle="sequential", tail="pad", **options)
    seen: list[int] = []
    with pytest.raises(CorruptError) as caught:
        for batch in loader:
            seen += batch["__index__"].tolist()
    assert seen == list(range(at // 4 * 4))
    for word in (ShardDataset(path).shard_name(at), f"index {at},", f"0-{at}'", "'ids'"):
        assert word in str(caught.value)


def test_packed_rows_before_a_bad_one_come_first(tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "packing": {"field": "ids", "window": 16, "capacity": 12},
        "shuffle": "sequential",
        "engine": "inline",
    }
    path = write_numbers(tmp_path / "d", 96, lengths=[1 + number % 7 for number in range(96)])
    whole = [digest(batch) for batch in Loader(path, 2, ["ids"], **how)]
    (index,) = batchkit.spoil(path, [70], "ids")
    seen = []
    with pytest.raises(CorruptError, match="index 70,"):
        for batch in Loader(path, 2, ["ids"], **how):
            seen.append(digest(batch))
            assert index not in batch["__index__"].tolist()
    assert 10 < len(seen) < len(whole) and seen == whole[: len(seen)]


def test_packed_samples_are_masked_in_place(tmp_path: Path) -> None:
    how: dict[str, Any] = {"packing": {"field": "ids", "window": 16, "capacity": 12}, "engine": "inline"}
    path = write_numbers(tmp_path / "d", 96, lengths=[1 + number % 7 for number in range(96)])
    whole = list(Loader(path, 2, ["ids"], **how))
    bad = batchkit.spoil(path, [5, 70, 71], "ids")
    for policy in ("mask", "replace"):
        loader = Loader(path, 2, ["ids"], bad_samples=policy, **BAD_HOW, **how)
        for batch, clean in zip(batchkit.poisoned(loader), whole, strict=True):
            hit = np.isin(clean["ids"].numpy() // 1000, bad) & (clean["ids.segment"].numpy() > 0)
            assert np.array_equal(batch["ids"].numpy(), np.where(hit, 0, clean["ids"].numpy()))
            assert np.array_equal(batch["ids.segment"].numpy(), np.where(hit, 0, clean["ids.segment"].numpy()))
            assert batch["__mask__"].all() and batch["__index__"].tolist() == clean["__index__"].tolist()
        events = loader.stats()["events"]
        assert sorted(event.index for event in events) == bad and {event.action for event in events} == {"masked"}
        for event in events:
            batch = whole[event.step]
            assert event.index in batch["__index__"][slice(*batch["__index__.offsets"][event.row : event.row + 2])].tolist()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_replacements_are_the_same_on_any_rank(damaged: Path, world: int) -> None:
    def loaders(count: int) -> list[Loader]:
        how: dict[str, Any] = {"bad_samples": "replace", "engine": "inline", **BAD_HOW}
        return [Loader(damaged, 8, FIELDS, rank=rank, world_size=count, **how) for rank in range(count)]

    expected, mine = epoch_of(loaders(1)), loaders(world)
    found = epoch_of(mine)
    assert all(map(same, found, expected)) and not BAD & set(indices(found))
    plain = [int(index) for batch in Loader(damaged, 8, ["label"], engine="inline") for index in batch["__index__"]]
    for before, after in zip(plain, indices(found), strict=True):
        assert after == before or before in BAD
    events = [event for loader in mine for event in loader.stats()["events"]]
    assert {event.index for event in events} == BAD & set(plain) and {event.action for event in events} == {"replaced"}
    data = ShardDataset(damaged)
    for event in events:
        assert (event.shard, event.key) == (data.shard_name(event.index), b"p%d" % event.index)
        assert event.field == "image" and event.reason and event.path == str(damaged.resolve())


def test_replacements_come_from_the_same_source(damaged: Path, pictures: Path) -> None:
    how: dict[str, Any] = {"mixture": {"weights": [1, 1], "block": 8}, "engine": "inline"}
    found = list(Loader([pictures, damaged], 8, FIELDS, bad_samples="replace", **BAD_HOW, **how))
    plain = list(Loader([pictures, damaged], 8, ["label"], **how))
    for batch, clean in zip(found, plain, strict=True):
        assert batch["__source__"].tolist() == clean["__source__"].tolist()
        assert not any(
            source == 1 and index in BAD for source, index in zip(batch["__source__"], batch["__index__"], strict=True)
        )


def test_replacements_after_a_resume(damaged: Path) -> None:
    how: dict[str, Any] = {"bad_samples": "replace", "engine": "inline", **BAD_HOW}
    whole = digests(Loader(damaged, 8, FIELDS, **how))
    loader = Loader(damaged, 8, FIELDS, **how)
    list(itertools.islice(loader, 3))
    again = Loader(damaged, 8, FIELDS, **how)
    again.load_state_dict(loader.state_dict())
    assert digests(again) == whole[3:]


@pytest.mark.parametrize("tail", ["drop_last", "pad"])
def test_masked_rows_are_in_their_place(damaged: Path, tail: str) -> None:
    loader = Loader(damaged, 9, FIELDS, bad_samples="mask", tail=tail, engine="inline", **BAD_HOW)
    seen = []
    for batch in loader:
        for index, mask in zip(batch["__index__"].tolist(), batch["__mask__"].tolist(), strict=True):
            assert not (mask and index in BAD)
            seen.append(index)
    assert set(seen) == set(range(48)) or tail == "drop_last"


@pytest.mark.parametrize("policy", ["replace", "mask"])
@pytest.mark.parametrize("limit", [{"most_bad": 3, "most_bad_rate": 1.0}, {"most_bad": 100, "most_bad_rate": 0.003}])
@pytest.mark.parametrize("fields", [FIELDS, {"label": [T.Map("mapkit:refuses_sevens", (1,), "int64")]}], ids=["slow", "many"])
def test_limits_by_count_and_by_rate(damaged: Path, policy: str, limit: dict[str, Any], fields: Any) -> None:
    """The rate counts a thousand rows at least: 3 bad ones are 0.3 %. The batch with the fourth is the first that does not come."""
    free = Loader(damaged, 2, fields, bad_samples=policy, engine="inline", **BAD_HOW)
    list(free)
    fourth = free.stats()["events"][3]
    seen, loader = 0, Loader(damaged, 2, fields, bad_samples=policy, engine="inline", **limit)
    with pytest.raises(BadSamplesError, match=f"bad samples in {2 * fourth.step + 2} rows.*") as caught:
        for _ in loader:
            seen += 1
    assert seen == fourth.step and loader.stats()["bad"] >= 4
    last = loader.stats()["events"][-1]
    for word in (last.path, last.shard, f"index {last.index}", f"p{last.index}", last.reason, "most_bad", "most_bad_rate"):
        assert word in str(caught.value)


def test_where_every_sample_is_bad(tmp_path: Path) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 6, bad=range(6))
    with pytest.raises(SampleError, match="replacements in turn were bad"):
        list(Loader(path, 2, FIELDS, bad_samples="replace", engine="inline", **BAD_HOW))
    for batch in batchkit.poisoned(Loader(path, 2, FIELDS, bad_samples="mask", engine="inline", **BAD_HOW)):
        assert not batch["__mask__"].any() and not batch["image"].any() and not batch["label"].any()


@pytest.mark.parametrize(
    "fields",
    [
        {"image": [T.CenterCrop(16)]},
        {"image": None},
        {"ids": [T.Tokens(6)]},
        {"ids": None},
        {"sound": [T.AudioWindow(60)]},
        {"sound": None},
        {"box": None},
        {"points": None},
        {"caption": None},
        {"about": None},
        {"box": [T.Map("mapkit:double", (1,), "float64")]},
    ],
    ids=lambda fields: "".join(fields) + ("-fixed" if next(iter(fields.values())) else ""),
)
@pytest.mark.parametrize("policy", ["stop", "mask"])
def test_bytes_that_do_not_match_their_check_are_a_bad_sample(tmp_path: Path, fields: dict[str, Any], policy: str) -> None:
    """In a batch of one, where nothing else can be read, and among others."""
    path = batchkit.write_all_kinds(tmp_path / "d", 9, complete=True, shards=1)
    (field,) = fields
    batchkit.spoil(path, [7], field)
    for size in (1, 3):
        loader = batchkit.poisoned(
            Loader(path, size, fields, shuffle="sequential", bad_samples=policy, engine="inline", **BAD_HOW)
        )
        if policy == "stop":
            seen = []
            with pytest.raises(FormatError, match=f"index 7, key b'key-0-7', field '{field}'"):
                for batch in loader:
                    seen += batch["__index__"].tolist()
            assert seen == list(range(7 // size * size))
        else:
            masks = [mask for batch in loader for mask in batch["__mask__"].tolist()]
            assert masks == [True] * 7 + [False, True]
            (event,) = loader.stats()["events"]
            assert (event.index, event.key, event.field, event.action) == (7, b"key-0-7", field, "masked")


def test_a_file_that_cannot_be_read_stops_whatever_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 12)
    tried: list[Any] = []

    def fails(self: Any, *args: Any, **options: Any) -> Any:
        tried.append(args)
        raise StorageError(path, "read", 5, "Input/output error")

    monkeypatch.setattr("lfdata.loader.rows.RETRY_SECONDS", 0.001)
    loader = Loader(path, 4, FIELDS, bad_samples="mask", engine="inline", **BAD_HOW)
    monkeypatch.setattr(ShardDataset, "read_many", fails)
    with pytest.raises(StorageError, match="Input/output error"):
        list(loader)
    # The fourth is for the name of the sample.
    assert len(tried) == 4


def test_a_read_that_fails_once_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = batchkit.write_all_kinds(tmp_path / "d", 12, complete=True)
    fields: dict[str, Any] = {"image": [T.CenterCrop(16)], "sound": [T.AudioWindow(60)], "label": None, "ids": None}
    expected = digests(Loader(path, 4, fields, engine="inline"))
    failed: dict[str, int] = {}

    def flaky(name: str) -> Any:
        real = getattr(ShardDataset, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            failed[name] = failed.get(name, 0) + 1
            if failed[name] % 3:
                raise StorageError(path, "read", 5, "Input/output error")
            return real(self, *args, **options)

        return call

    monkeypatch.setattr("lfdata.loader.rows.RETRY_SECONDS", 0.001)
    loader = Loader(path, 4, fields, engine="inline")
    for name in ("read_many", "read_audio", "sizes"):
        monkeypatch.setattr(ShardDataset, name, flaky(name))
    assert digests(loader) == expected and failed.keys() == {"read_many", "read_audio", "sizes"}


@pytest.mark.parametrize("options", ENGINES, ids=lambda options: options["engine"])
@pytest.mark.parametrize(
    ("function", "raised"), [("exits_on_five", "SystemExit: 3"), ("interrupts_on_five", "KeyboardInterrupt")]
)
def test_a_function_that_would_end_the_program_fails_for_its_sample(
    tmp_path: Path, options: dict[str, Any], function: str, raised: str
) -> None:
    path = write_numbers(tmp_path / "d", 12)
    fields = {"label": [T.Map(f"mapkit:{function}", (1,), "int64")]}
    loader = Loader(path, 2, fields, shuffle="sequential", **options)
    seen: list[int] = []
    with pytest.raises(SampleError, match=f"index 5: key '0-5': field 'label': mapkit:{function} raised {raised}"):
        for batch in loader:
            seen += batch["__index__"].tolist()
    assert seen == [0, 1, 2, 3]
    loader = Loader(path, 2, fields, shuffle="sequential", bad_samples="mask", **options, **BAD_HOW)
    assert sum(int(batch["__mask__"].sum()) for batch in loader) == 11
    (event,) = loader.stats()["events"]
    assert (event.index, event.key, event.field) == (5, b"0-5", "label") and raised in event.reason
    loader.close()


@pytest.mark.parametrize("options", ENGINES, ids=lambda options: options["engine"])
@pytest.mark.parametrize(
    ("function", "gave"),
    [("one_more_on_five", r"int64 of shape \(2,\)"), ("narrower_on_five", r"int32 of shape \(1,\)")],
)
def test_a_function_that_breaks_what_was_declared(tmp_path: Path, options: dict[str, Any], function: str, gave: str) -> None:
    """The error names data set, shard, index, key and field; the batches before it come, and by policy the rest."""
    path = write_numbers(tmp_path / "d", 12)
    fields = {"label": [T.Map(f"mapkit:{function}", (1,), "int64")]}
    shard = ShardDataset(path).shard_name(5)
    told = (
        rf"{path}/{shard}, index 5: key '0-5': field 'label': mapkit:{function} gave {gave}; declared is int64 of shape \(1,\)"
    )
    for wrapped in (False, True):
        loader: Any = Loader(path, 2, fields, shuffle="sequential", **options)
        loader = DeviceLoader(loader, "cpu") if wrapped else loader
        seen: list[int] = []
        with pytest.raises(SampleError, match=told):
            for batch in loader:
                assert batch["label"][:, 0].tolist() == batch["__index__"].tolist()
                seen += batch["__index__"].tolist()
        assert seen == [0, 1, 2, 3]
        loader.close()
    loader = Loader(path, 2, fields, shuffle="sequential", bad_samples="mask", **options, **BAD_HOW)
    good = [(batch["label"][:, 0][batch["__mask__"]].tolist()) for batch in loader]
    assert list(itertools.chain(*good)) == [number for number in range(12) if number != 5]
    (event,) = loader.stats()["events"]
    assert (event.index, event.key, event.field) == (5, b"0-5", "label")
    loader.close()


def test_a_function_of_pictures_that_breaks_what_was_declared(pictures: Path) -> None:
    fields = {"image": [T.CenterCrop(8), T.Map("mapkit:cut", (8, 8, 3), "uint8")]}
    told = (
        r"index 0: key 'p0': field 'image': mapkit:cut gave uint8 of shape \(7, 8, 3\); declared is uint8 of shape \(8, 8, 3\)"
    )
    with pytest.raises(SampleError, match=told):
        list(Loader(pictures, 8, fields, shuffle="sequential", engine="thread"))


def test_a_function_of_pictures_that_would_end_the_program(pictures: Path) -> None:
    fields = {"image": [T.CenterCrop(8), T.Map("mapkit:exits_on_pictures", (8, 8, 3), "uint8")]}
    with pytest.raises(SampleError, match=r"index .*: key 'p.*': field 'image': .* raised SystemExit: \(8, 8, 3\)"):
        list(Loader(pictures, 8, fields, engine="inline"))


def test_ctrl_c_during_a_function_still_interrupts(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "d", 12)
    fields = {"label": [T.Map("mapkit:is_interrupted_on_five", (1,), "int64")]}
    loader = Loader(path, 2, fields, shuffle="sequential", engine="inline", bad_samples="mask", **BAD_HOW)
    # A job in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not loader.stats()["events"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_module_that_ends_the_program_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: Path) -> None:
    (tmp_path / "exitkit.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match="exitkit:f cannot be imported: SystemExit: 3"):
        Loader(numbers, 8, {"label": [T.Map("exitkit:f", (1,), "int64")]})
