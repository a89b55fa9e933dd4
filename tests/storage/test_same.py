"""What comes out of a data set by URL is what comes out of a local one: values, batches, states, epochs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batchkit import NAMES, digest, digests
from serverkit import Fault, Proxy

import lfdata
import lfdata.transforms as T
from lfdata import Cache, Loader, ShardDataset
from lfdata.storage.remote import report

CROPS: dict[str, Any] = {"image": [T.RandomResizedCrop(32), T.RandomHorizontalFlip()], "label": None}


def stored(dataset: ShardDataset) -> list[Any]:
    """All stored bytes, columns and keys."""
    found: list[Any] = [dataset.keys(range(len(dataset)))]
    for value in dataset.read_many(range(len(dataset)), decode=False).values():
        found.append(value.tobytes() if isinstance(value, np.ndarray) else (value.values.tobytes(), value.offsets.tolist()))
    return found + [dataset.column(name).tobytes() for name in dataset.columns]


def url_of(proxy: Proxy, kind: str, name: str) -> str:
    return f"{proxy.url}/{name}" if kind == "web" else f"{ {'s3': 's3', 'gcs': 'gs'}[kind] }://data/{name}"


@pytest.fixture(params=["web", *(pytest.param(kind, marks=pytest.mark.service) for kind in ("s3", "gcs"))])
def server(request: pytest.FixtureRequest) -> tuple[str, Proxy]:
    """Each kind of server."""
    return request.param, request.getfixturevalue(request.param)


def test_all_that_is_stored_comes_out_of_every_server(root: Path, server: tuple[str, Proxy], cache: Cache) -> None:
    kind, proxy = server
    local = lfdata.open(root / "kinds")
    remote = lfdata.open(url_of(proxy, kind, "kinds"), cache=cache)
    assert stored(remote) == stored(local) and remote.schema == local.schema
    assert str(remote[7]) == str(local[7]) and remote.index_of(b"key-0-11") == 11
    asked = len(proxy.log)
    again = lfdata.open(url_of(proxy, kind, "kinds"), cache=cache)
    assert stored(again) == stored(local)
    # Where answers are not streamed, each is asked for its length first.
    most = 10 if kind == "gcs" else 4
    assert len(proxy.log) - asked <= most, "the manifest, and whether there is an index; all else is in the cache"


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_batches_and_states_are_those_of_the_local_data_set(root: Path, web: Proxy, cache: Cache, engine: str) -> None:
    options: dict[str, Any] = {"fields": CROPS, "engine": engine, "seed": 3}
    local = Loader(root / "pictures", 8, **options)
    remote = Loader(f"{web.url}/pictures", 8, cache=cache, **options)
    expected = digests(local, 2)
    found = [digest(batch) for _ in range(2) for batch in remote]
    assert found == expected
    state = remote.state_dict()
    assert state == local.state_dict() and web.url not in json.dumps(state) and str(web.port) not in json.dumps(state)
    assert remote.stats()["storage"]["fetched_bytes"] > 0
    remote.close()


@pytest.mark.service
@pytest.mark.parametrize("engine", ["process", "inline"])
def test_batches_out_of_google_cloud_storage_are_those_of_the_local_data_set(
    root: Path, gcs: Proxy, cache: Cache, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    expected = digests(Loader(root / "pictures", 8, CROPS, seed=5), 2)
    assert digests(Loader("gs://data/pictures", 8, CROPS, seed=5, cache=cache, engine=engine), 2) == expected
    gcs.rule = lambda asked: Fault(status=503) if asked.number % 3 == 1 else None
    fresh = Cache(cache.directory + "-2", cache.max_bytes, cache.block_bytes, cache.request_bytes, deadline=60.0, timeout=2.0)
    assert digests(Loader("gs://data/pictures", 8, CROPS, seed=5, cache=fresh, engine=engine), 2) == expected


@pytest.mark.service
def test_batches_out_of_s3_are_those_of_the_local_data_set(root: Path, s3: Proxy, cache: Cache) -> None:
    expected = digests(Loader(root / "pictures", 8, CROPS, shuffle="block", block=8, window=2), 2)
    assert digests(Loader("s3://data/pictures", 8, CROPS, shuffle="block", block=8, window=2, cache=cache), 2) == expected


def test_a_state_of_a_local_loader_goes_on_from_a_url_and_back(root: Path, web: Proxy, cache: Cache) -> None:
    places: list[Any] = [root / "kinds", f"{web.url}/kinds"]
    expected = digests(Loader(places[0], 5, seed=1))
    for first, then in ((0, 1), (1, 0)):
        loader = Loader(places[first], 5, seed=1, cache=cache if first else None)
        batches = iter(loader)
        found = [digest(next(batches)) for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        other = Loader(places[then], 5, seed=1, cache=cache if then else None)
        other.load_state_dict(state)
        assert found + digests(other) == expected


@pytest.mark.parametrize("options", [{"buckets": {"field": "ids", "window": 20}}, {"tail": "pad"}, {"mixture": {"block": 8}}])
def test_other_orders_are_the_same_too(root: Path, web: Proxy, cache: Cache, options: dict[str, Any]) -> None:
    mixed = "mixture" in options
    how: dict[str, Any] = {"fields": ["ids", "label"], **options}
    local, remote = root / "kinds", f"{web.url}/kinds"
    expected = digests(Loader([local, local] if mixed else local, 4, **how))
    assert digests(Loader([remote, local] if mixed else remote, 4, cache=cache, **how)) == expected


def test_packed_rows_are_the_same(root: Path, web: Proxy, cache: Cache) -> None:
    how: dict[str, Any] = {"fields": ["ids"], "packing": {"field": "ids", "window": 16, "capacity": 40}}
    assert digests(Loader(f"{web.url}/kinds", 3, cache=cache, **how), 2) == digests(Loader(root / "kinds", 3, **how), 2)


def test_a_cache_smaller_than_a_batch_gives_the_same_and_stays_within_its_bound(root: Path, web: Proxy, cache: Cache) -> None:
    small = Cache(cache.directory, max_bytes=16 << 16, block_bytes=1 << 16, request_bytes=1 << 16)
    dataset = lfdata.open(f"{web.url}/pictures", cache=small)
    assert sum(shard.bytes for shard in dataset.manifest.shards) > 20 << 16, "or nothing is given up"
    found, most = [], 0
    loader = Loader(f"{web.url}/pictures", 30, CROPS, cache=small)
    for _ in range(3):
        for batch in loader:
            found.append(digest(batch))
            most = max(most, taken(small))
    loader.close()
    assert found == digests(Loader(root / "pictures", 30, CROPS), 3)
    assert 0 < most <= small.max_bytes
    assert loader_counts(loader)["evicted"] > 0


def taken(cache: Cache) -> int:
    """Bytes of the files of a cache."""
    total = 0
    for path in (cache.path / "blocks").iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def loader_counts(loader: Loader) -> dict[str, int]:
    return report(source.store for source in loader.sources if source.store is not None)


def test_a_slow_disk_is_staged_by_path_and_by_file_url(root: Path, cache: Cache) -> None:
    local = lfdata.open(root / "kinds")
    for place in (root / "kinds", f"file://{root}/kinds"):
        staged = lfdata.open(place, cache=cache)
        assert staged.store is not None and stored(staged) == stored(local)
    assert lfdata.open(f"file://{root}/kinds").store is None, "a file URL without a cache is read in place"
    assert taken(cache) > 0


def test_a_data_set_by_url_is_pickled_as_its_url(root: Path, web: Proxy, cache: Cache) -> None:
    dataset = lfdata.open(f"{web.url}/kinds", ["label", "ids"], cache=cache)
    data = pickle.dumps(dataset)
    assert len(data) < 1000 and pickle.loads(data)[3].keys() == dataset[3].keys()
    assert NAMES[0] not in dataset[3]
