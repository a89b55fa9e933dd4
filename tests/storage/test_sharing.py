"""Several processes over one cache directory: each block fetched once, the bound kept, and nothing in the way after any of them was killed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from mounts import in_private_namespace, tmpfs
from serverkit import Fault, Proxy
from test_same import stored, taken

import lfdata
from lfdata import Cache
from lfdata.errors import StorageError
from lfdata.storage import blocks, remote
from lfdata.storage.blocks import UNKNOWN, BlockCache, Claim
from lfdata.storage.client import Counters

READER = """
import hashlib, sys
import msgspec
import lfdata
dataset = lfdata.open(sys.argv[1], cache=msgspec.json.decode(sys.argv[2], type=lfdata.Cache))
rows, digest = list(range(len(dataset))), hashlib.sha256()
for turn in range(int(sys.argv[3])):
    for row in rows[int(sys.argv[4]) :] + rows[: int(sys.argv[4])] if turn % 2 else rows:
        dataset.read_many([row], ["image"], decode=False)
digest.update(dataset.read_many(rows, ["image"], decode=False)["image"].values.tobytes())
print(digest.hexdigest())
"""


def reader(url: str, cache: Cache, turns: int = 1, first: int = 0) -> subprocess.Popen[str]:
    """A process that reads all pictures, one by one, from some row on in every other turn; it prints their digest."""
    line = [sys.executable, "-c", READER, url, msgspec.json.encode(cache).decode(), str(turns), str(first)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return text


@pytest.fixture(scope="module")
def expected(root: Path) -> str:
    """What a reader prints."""
    dataset = lfdata.open(root / "pictures")
    stored = dataset.read_many(range(len(dataset)), ["image"], decode=False)["image"].values.tobytes()
    return hashlib.sha256(stored).hexdigest() + "\n"


def blocks_asked(proxy: Proxy, size: int) -> Counter[tuple[str, int]]:
    """How often each block of the shards was asked for."""
    found: Counter[tuple[str, int]] = Counter()
    for one in proxy.log:
        if one.path.endswith(".lfd"):
            found.update((one.path, number) for number in range(one.first // size, one.last // size + 1))
    return found


def test_processes_that_read_the_same_fetch_each_block_once(web: Proxy, cache: Cache, expected: str) -> None:
    web.rule = lambda asked: Fault(wait=0.02)
    processes = [reader(f"{web.url}/pictures", cache) for _ in range(3)]
    assert [answer(process) for process in processes] == [expected] * 3
    asked = blocks_asked(web, cache.block_bytes)
    assert asked and set(asked.values()) == {1}


@pytest.mark.fault
def test_a_process_that_is_killed_while_it_fetches_leaves_a_usable_cache(web: Proxy, cache: Cache, expected: str) -> None:
    web.rule = lambda asked: Fault(rate=400_000.0) if asked.path.endswith(".lfd") else None
    folder = cache.path / "blocks"
    for _ in range(3):
        process = reader(f"{web.url}/pictures", cache)
        before = len(list(folder.glob("*"))) if folder.is_dir() else 0
        end = time.monotonic() + 60
        while not (folder.is_dir() and list(folder.glob("*.part")) and len(list(folder.glob("*"))) > before):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert list(folder.glob("*.part")), "it was killed while it fetched"
    web.rule = lambda asked: None
    assert answer(reader(f"{web.url}/pictures", cache)) == expected
    assert not list(folder.glob("*.part")), "parts of the dead are gone"
    check = BlockCache(cache.path, cache.max_bytes, Counters())
    assert check.bytes == taken(cache)
    check.close()


@pytest.mark.slow
def test_the_bound_is_kept_by_processes_that_are_killed_all_along(web: Proxy, cache: Cache, expected: str) -> None:
    small = msgspec.structs.replace(cache, max_bytes=16 << 16, request_bytes=1 << 16)
    url, most = f"{web.url}/pictures", 0
    processes = [reader(url, small, 6, 7 * n) for n in range(3)]
    end = time.monotonic() + 6
    while time.monotonic() < end:
        for number, process in enumerate(processes):
            most = max(most, taken(small) if (small.path / "blocks").is_dir() else 0)
            if process.poll() is not None or time.monotonic() % 1 < 0.01:
                process.kill()
                process.wait()
                processes[number] = reader(url, small, 6, 7 * number)
        time.sleep(0.005)
    for process in processes:
        process.kill()
        process.wait()
    assert answer(reader(url, small)) == expected
    assert 0 < max(most, taken(small)) <= small.max_bytes


@pytest.mark.fault
def test_a_process_that_is_stopped_is_not_waited_for(
    root: Path, web: Proxy, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PATIENCE", 0.3)
    web.rule = lambda asked: Fault(rate=50_000.0) if asked.path.endswith(".lfd") else None
    process = reader(f"{web.url}/pictures", cache)
    try:
        while not list(cache.path.glob("blocks/*.part")):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        web.rule = lambda asked: None
        assert stored(lfdata.open(f"{web.url}/pictures", cache=cache)) == stored(lfdata.open(root / "pictures"))
    finally:
        process.kill()
        process.wait()


def test_a_dead_claim_is_taken_over_and_counted_once(tmp_path: Path) -> None:
    from lfdata.storage.blockfile import Block

    block = Block(bytes(16), 1 << 16, 3, 1 << 16)
    first = BlockCache(tmp_path, 16 << 16, Counters())
    claim = first.claim(block, UNKNOWN)
    assert isinstance(claim, Claim) and first.bytes == block.file_bytes
    second = BlockCache(tmp_path, 16 << 16, Counters())
    assert not isinstance(second.claim(block, UNKNOWN), Claim)
    os.close(claim.descriptor)  # what the kernel does for a process that dies
    again = second.claim(block, UNKNOWN)
    assert isinstance(again, Claim) and second.bytes == block.file_bytes
    data = memoryview(bytearray(os.urandom(1 << 16)))
    assert second.commit(again, data)
    read = bytearray(1000)
    assert first.read(block, [(memoryview(read), 500)]) and read == data[500:1500]
    assert first.bytes == sum(path.stat().st_size for path in (tmp_path / "blocks").iterdir())


@pytest.mark.slow
def test_a_forked_child_reads_on(root: Path, web: Proxy, cache: Cache) -> None:
    from torch.utils.data import DataLoader

    dataset = lfdata.open(f"{web.url}/kinds", ["label", "ids"], cache=cache)
    local = lfdata.open(root / "kinds", ["label", "ids"])
    dataset[0]
    for how in ("fork", "spawn"):
        loaded = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context=how)
        assert [str(sample) for batch in loaded for sample in batch] == [str(local[n]) for n in range(len(local))]
    assert str(dataset[5]) == str(local[5])


def test_a_program_ends_though_a_server_does_not_answer(web: Proxy, cache: Cache) -> None:
    web.rule = lambda asked: Fault(wait=300.0) if asked.path.endswith(".lfd") and asked.number else None
    code = """
import sys
import msgspec
import lfdata
loader = lfdata.Loader(sys.argv[1], 4, ["label"], cache=msgspec.json.decode(sys.argv[2], type=lfdata.Cache), engine="thread")
try:
    next(iter(loader))
except lfdata.errors.LfdataError as error:
    print(type(error).__name__)
"""
    patient = msgspec.structs.replace(cache, deadline=200.0, timeout=200.0, threads=4)
    line = [sys.executable, "-c", code, f"{web.url}/pictures", msgspec.json.encode(patient).decode()]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode is not None


def test_a_cache_that_is_removed_under_its_reader_is_made_again(root: Path, web: Proxy, cache: Cache) -> None:
    dataset = lfdata.open(f"{web.url}/pictures", cache=cache)
    expected = stored(lfdata.open(root / "pictures"))
    assert stored(dataset) == expected
    shutil.rmtree(cache.path)
    assert stored(dataset) == expected
    (cache.path / "usage").write_bytes(b"nonsense that is long enough")
    assert stored(lfdata.open(f"{web.url}/pictures", cache=cache)) == expected
    check = BlockCache(cache.path, cache.max_bytes, Counters())
    assert check.bytes == taken(cache) > 0


@pytest.mark.fault
@pytest.mark.parametrize("room", [1 << 12, 100_000, 400_000])
def test_a_full_disk_costs_the_cache_and_nothing_else(root: Path, tmp_path: Path, cache: Cache, room: int) -> None:
    expected = stored(lfdata.open(root / "pictures"))
    full = msgspec.structs.replace(cache, directory=str(tmp_path / "full"))
    (tmp_path / "full").mkdir()

    def inside() -> None:
        tmpfs(tmp_path / "full", room)
        try:
            dataset = lfdata.open(f"file://{root}/pictures", cache=full)
        except StorageError as error:
            assert room < 1 << 14 and "open the cache" in str(error)
            return
        assert stored(dataset) == expected
        assert dataset.store is not None and dataset.store.counters.report()["unkept"] > 0

    in_private_namespace(inside)


def test_a_process_that_is_stopped_with_the_lock_costs_the_cache_and_no_more(
    root: Path, web: Proxy, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_LOCK_SECONDS", 0.2)
    dataset = lfdata.open(f"{web.url}/pictures", cache=cache)
    with open(cache.path / "usage", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert stored(dataset) == stored(lfdata.open(root / "pictures"))
        assert dataset.store is not None and dataset.store.counters.report()["unkept"] > 0
        other = lfdata.open(f"{web.url}/kinds", cache=cache)
        assert stored(other) == stored(lfdata.open(root / "kinds"))
    # It goes on.
    assert stored(lfdata.open(f"{web.url}/kinds", cache=cache)) == stored(lfdata.open(root / "kinds")) and taken(cache) > 0
