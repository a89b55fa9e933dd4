"""Which block is given up: the one whose next use is furthest away, as the order says."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serverkit import Proxy

import lfdata
from lfdata import Cache, Loader
from lfdata.loader.ahead import Ahead
from lfdata.storage.blockfile import Block, parse
from lfdata.storage.blocks import NEVER, UNKNOWN, BlockCache, Claim, Refusal
from lfdata.storage.client import Counters
from lfdata.storage.future import Future

SIZE = 1 << 16


def block(number: int) -> Block:
    return Block(bytes(16), SIZE, number, 100)


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=30),
    st.lists(st.integers(1, 7), min_size=1, max_size=10),
    st.integers(0, 30),
)
def test_the_next_use_is_the_first_from_the_present_on(steps: list[list[int]], cuts: list[int], now: int) -> None:
    future, at = Future(), 0
    base = future.object(bytes(16))
    for cut in cuts:
        part = steps[at : at + cut]
        if part:
            ids = np.array([base | number for step in part for number in step], np.int64)
            times = np.array([at + n for n, step in enumerate(part) for _ in step], np.int64)
            future.add(at, at + len(part), ids, times)
        at += len(part)
    future.go(now)
    known = steps[:at]
    expected = [next((n for n in range(now, len(known)) if number in known[n]), NEVER) for number in range(6)]
    assert future([block(number) for number in range(6)]).tolist() == expected
    assert future([Block(b"x" * 16, SIZE, 0, 100)]).tolist() == [UNKNOWN]


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 40), st.binary(min_size=16, max_size=16))
def test_a_blocks_name_says_which_it_is(length: int, number: int, identity: bytes) -> None:
    made = Block(identity, 1 << 20, number, length)
    assert parse(made.name) == made
    assert parse(made.name + "x") is None and parse(made.name.upper() + "-") is None


def optimum(accesses: Sequence[int], room: int) -> int:
    """Misses of the offline optimum: what is fetched takes the place of what is needed last."""
    held: set[int] = set()
    misses = 0
    for at, number in enumerate(accesses):
        if number in held:
            continue
        misses += 1
        if len(held) == room:
            rest = accesses[at + 1 :]
            held.remove(max(held, key=lambda one: rest.index(one) if one in rest else len(accesses)))
        held.add(number)
    return misses


def least_recent(accesses: Sequence[int], room: int) -> int:
    held: list[int] = []
    misses = 0
    for number in accesses:
        if number in held:
            held.remove(number)
        else:
            misses += 1
            held = held[-(room - 1) :]
        held.append(number)
    return misses


def test_the_cache_misses_about_as_often_as_the_offline_optimum(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    accesses = np.concatenate([rng.permutation(64) for _ in range(8)]).tolist()
    future = Future()
    base = future.object(bytes(16))
    future.add(0, len(accesses), base | np.array(accesses, np.int64), np.arange(len(accesses)))
    room, data, misses = 32, memoryview(bytearray(100)), 0
    cache = BlockCache(tmp_path, room * block(0).file_bytes, Counters(), future)
    for now, number in enumerate(accesses):
        future.go(now)
        if not cache.read(block(number), [(memoryview(bytearray(10)), 0)]):
            misses += 1
            claim = cache.claim(block(number), UNKNOWN)
            assert isinstance(claim, Claim) and cache.commit(claim, data)
            assert cache.bytes <= cache.max_bytes
    best = optimum(accesses, room)
    assert best <= misses <= 1.05 * best < least_recent(accesses, room)


def test_nothing_that_is_needed_sooner_is_given_up_for_what_is_fetched_ahead(tmp_path: Path) -> None:
    future = Future()
    base = future.object(bytes(16))
    future.add(0, 100, base | np.arange(100), np.arange(100))
    cache = BlockCache(tmp_path, 10 * block(0).file_bytes, Counters(), future)
    future.go(0)
    for number in range(20, 30):
        claim = cache.claim(block(number), number)
        assert isinstance(claim, Claim) and cache.commit(claim, memoryview(bytearray(100)))
    assert cache.claim(block(40), 40) is Refusal.FULL
    claim = cache.claim(block(5), 5)
    assert isinstance(claim, Claim)
    assert sorted(parse(path.name).number for path in (tmp_path / "blocks").iterdir() if parse(path.name)) == list(
        range(20, 29)
    )
    cache.abandon(claim)


def test_blocks_that_nobody_knows_go_first_when_they_are_stale_and_last_otherwise(tmp_path: Path) -> None:
    future = Future()
    base = future.object(bytes(16))
    future.add(0, 10, base | np.arange(10), np.arange(10))
    future.go(0)
    cache = BlockCache(tmp_path, 8 * block(0).file_bytes, Counters(), future)
    strange = [Block(b"s" * 16, SIZE, number, 100) for number in range(2)]
    for one in [*strange, *(block(number) for number in range(6))]:
        claim = cache.claim(one, UNKNOWN)
        assert isinstance(claim, Claim) and cache.commit(claim, memoryview(bytearray(100)))
    os.utime(tmp_path / "blocks" / strange[0].name, (0, 0))
    for number, gone in ((6, strange[0]), (7, block(6)), (8, block(7))):
        claim = cache.claim(block(number), UNKNOWN)
        assert isinstance(claim, Claim) and not cache.has(gone)
        cache.abandon(claim)
        cache.commit(claim_again(cache, number), memoryview(bytearray(100)))
    assert cache.has(strange[1])


def claim_again(cache: BlockCache, number: int) -> Claim:
    claim = cache.claim(block(number), UNKNOWN)
    assert isinstance(claim, Claim)
    return claim


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_knows_what_all_ranks_of_the_node_will_read(
    root: Path, web: Proxy, cache: Cache, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    loader = Loader(f"{web.url}/pictures", 6, ["image"], cache=cache, rank=0, world_size=2, engine="inline")
    ahead = loader._producer._ahead
    assert isinstance(ahead, Ahead)
    work, dataset = ahead._work, lfdata.open(root / "pictures")
    steps = len(loader)
    for file, blocks, when, mine in work._accesses(0, 0, steps):
        shard = next(n for n, entry in enumerate(dataset.manifest.shards) if entry.file == file.file)
        for rank in range(ranks):
            other = Loader(root / "pictures", 6, ["image"], rank=rank, world_size=2)
            for step in range(steps):
                indices = other._producer.plan.work(0, step, 1).samples.index
                located = {
                    number
                    for found, _, offsets, lengths in dataset.locate("image", indices)
                    if found.name.endswith(file.file)
                    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
                    for number in range(offset // cache.block_bytes, (offset + length - 1) // cache.block_bytes + 1)
                }
                seen = set(blocks[(when == step) & (mine if rank == 0 else ~mine)].tolist())
                assert located == seen, (shard, rank, step)
    loader.close()


def test_the_next_steps_are_there_before_they_are_asked_for(web: Proxy, cache: Cache) -> None:
    loader = Loader(f"{web.url}/pictures", 4, ["image"], cache=cache, engine="inline")
    batches = iter(loader)
    next(batches)
    store = loader.sources[0].store
    assert store is not None
    total, end = sum(shard.bytes for shard in loader.sources[0].manifest.shards), time.monotonic() + 60
    while store.cache.bytes < total and time.monotonic() < end:
        time.sleep(0.01)
    web.log.clear()
    for _ in batches:
        pass
    assert not web.ranges(".lfd"), "all was fetched ahead"
    loader.close()
