"""Servers and disks that fail: what may pass is tried again, the rest is a named error, wrong bytes never come out."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batchkit import digests
from serverkit import CREDENTIALS, Asked, Fault, Proxy, WebServer, upload
from test_same import CROPS, stored, taken

import lfdata
from lfdata import Cache, Loader
from lfdata.errors import (
    ChangedError,
    CorruptError,
    FormatError,
    LfdataError,
    MissingExtraError,
    OptionError,
    RemoteError,
    StorageError,
)
from lfdata.storage.client import Client, Counters

SHARD = ".lfd"


def shards(fault: Callable[[Asked], Fault | None]) -> Callable[[Asked], Fault | None]:
    """A rule for GETs of shards alone."""
    return lambda asked: fault(asked) if asked.method == "GET" and asked.path.split("?")[0].endswith(SHARD) else None


def first_times(fault: Fault, times: int = 1) -> Callable[[Asked], Fault | None]:
    """A fault of the first requests for each shard."""
    return shards(lambda asked: fault if asked.number < times else None)


PASSING = {
    "503": Fault(status=503),
    "429": Fault(status=429),
    "reset at once": Fault(reset=True, cut=0),
    "reset in the body": Fault(reset=True, cut=1000),
    "cut at the end": Fault(cut=-1),
    "cut in the body": Fault(cut=20_000),
    "a body that is too long": Fault(more=b"x" * 10),
    "a body that is shorter than it says": Fault(headers={"Content-Length": "99999999"}, cut=5000),
    "another range": Fault(headers={"Content-Range": "bytes 7-65542/99999999"}),
    "no range": Fault(headers={"Content-Range": "nonsense"}),
    "stalled": Fault(wait=1.5),
    "a wrong byte": Fault(flip=11),
}


@pytest.fixture(params=["web", pytest.param("s3", marks=pytest.mark.service)])
def server(request: pytest.FixtureRequest) -> tuple[str, Proxy]:
    """A URL and the proxy before it."""
    proxy = request.getfixturevalue(request.param)
    return (f"{proxy.url}/pictures" if request.param == "web" else "s3://data/pictures"), proxy


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_is_tried_again_and_the_bytes_are_right(
    root: Path, server: tuple[str, Proxy], cache: Cache, name: str
) -> None:
    url, proxy = server
    proxy.rule = first_times(PASSING[name], 1 if name == "a wrong byte" else 2)
    dataset = lfdata.open(url, cache=cache)
    assert stored(dataset) == stored(lfdata.open(root / "pictures"))
    assert dataset.store is not None
    counts = dataset.store.counters.report()
    assert counts["retries"] + counts["damaged"] > 0


def test_a_cut_connection_goes_on_where_it_ended(web: Proxy, cache: Cache) -> None:
    proxy, client = web, Client(web.url, cache, Counters())
    name = next(
        Path(path).name for path in [shard.file for shard in lfdata.open(f"{web.url}/pictures", cache=cache).manifest.shards]
    )
    proxy.log.clear()
    proxy.rule = shards(lambda asked: Fault(cut=60_000) if asked.number < 3 else None)
    buffer = bytearray(200_000)
    client.fetch(f"{proxy.url}/pictures/{name}", 1000, memoryview(buffer), None, "")
    assert proxy.ranges(SHARD) == [(1000 + done, 200_999) for done in (0, 60_000, 120_000, 180_000)]


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(reset=True, cut=0), Fault(wait=2.0)])
def test_a_server_that_never_recovers_is_a_named_error_within_the_deadline(
    server: tuple[str, Proxy], cache: Cache, fault: Fault
) -> None:
    url, proxy = server
    dataset = lfdata.open(url, cache=msgspec.structs.replace(cache, deadline=6.0))
    proxy.rule = shards(lambda _asked: fault)
    with pytest.raises(RemoteError, match=r"attempts in 6 s failed; the last: ") as caught:
        dataset[0]
    assert SHARD in caught.value.path


@pytest.mark.parametrize(
    "status,kind,number",
    [
        (404, StorageError, errno.ENOENT),
        (403, StorageError, errno.EACCES),
        (401, StorageError, errno.EACCES),
        (400, RemoteError, None),
    ],
)
def test_refusals_are_named_at_once(web: Proxy, cache: Cache, status: int, kind: type, number: int | None) -> None:
    dataset = lfdata.open(f"{web.url}/pictures", cache=cache)
    web.log.clear()
    web.rule = shards(lambda _asked: Fault(status=status))
    with pytest.raises(kind) as caught:
        dataset[0]
    assert isinstance(caught.value, StorageError) and caught.value.errno == number and f"HTTP {status}" in str(caught.value)
    assert len(web.ranges(SHARD)) <= 2, "once ahead, once for itself: not again and again"


def test_no_data_set_is_no_manifest(server: tuple[str, Proxy], cache: Cache) -> None:
    with pytest.raises(FormatError, match="no manifest"):
        lfdata.open(f"{server[0]}-not", cache=cache)


@pytest.mark.parametrize("size", [0, 100, None])
def test_an_object_of_another_length_is_named(root: Path, tmp_path: Path, cache: Cache, size: int | None) -> None:
    shutil.copytree(root / "pictures", tmp_path / "set")
    server = WebServer(tmp_path)
    dataset = lfdata.open(f"http://127.0.0.1:{server.port}/set", cache=cache)
    for shard in dataset.manifest.shards:
        path = tmp_path / "set" / shard.file
        path.write_bytes(path.read_bytes()[:size] if size is not None else path.read_bytes() + bytes(4096))
    with pytest.raises(ChangedError, match="the object has"):
        dataset.read_many(range(len(dataset)))
    server.close()


@pytest.mark.parametrize("kind", ["web", pytest.param("s3", marks=pytest.mark.service)])
def test_an_object_that_is_replaced_under_a_reader_is_named(
    kind: str, root: Path, tmp_path: Path, cache: Cache, request: pytest.FixtureRequest
) -> None:
    """Of the same length, so that nothing but the tag tells."""
    folder = tmp_path / "replaced"
    shutil.copytree(root / "pictures", folder)
    server = WebServer(tmp_path) if kind == "web" else None
    if server is None:
        request.getfixturevalue("s3")
        port = request.getfixturevalue("s3_port")
        url = upload(port, folder, "replaced")
    else:
        url = f"http://127.0.0.1:{server.port}/replaced"
    dataset = lfdata.open(url, cache=msgspec.structs.replace(cache, request_bytes=1 << 16))
    dataset[0]
    for shard in dataset.manifest.shards:
        data = bytearray((folder / shard.file).read_bytes())
        data[4096:4200] = bytes(104)
        (folder / shard.file).write_bytes(data)
    if server is None:
        upload(port, folder, "replaced")
    with pytest.raises(ChangedError, match="replaced while it was in use"):
        dataset.read_many(range(len(dataset)))
    if server is not None:
        server.close()


def test_bytes_that_stay_wrong_are_corrupt_and_never_come_out(web: Proxy, cache: Cache) -> None:
    dataset = lfdata.open(f"{web.url}/pictures", cache=cache)
    dataset.keys(range(len(dataset)))
    web.rule = shards(lambda _asked: Fault(flip=5000))
    with pytest.raises(CorruptError, match="does not match its check"):
        dataset.read_many(range(len(dataset)), ["image"])
    web.rule = lambda _asked: None
    for path in (cache.path / "blocks").iterdir():
        path.unlink()
    assert len(dataset.read_many(range(len(dataset)), ["image"])["image"]) == len(dataset)


def test_a_wrong_block_that_was_kept_is_fetched_again(root: Path, web: Proxy, cache: Cache) -> None:
    """The server lied once, with the right headers, and what it sent was kept: the format's checks find it, now and in the next process."""
    lied: set[str] = set()

    def once(asked: Asked) -> Fault | None:
        if asked.path in lied or asked.first > 200_000:
            return None
        lied.add(asked.path)
        return Fault(flip=9000)

    web.rule = shards(once)
    dataset = lfdata.open(f"{web.url}/pictures", cache=cache)
    assert stored(dataset) == stored(lfdata.open(root / "pictures")) and lied


def damage_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        damage_bytes,
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
    ],
)
def test_damaged_cache_files_are_fetched_again(root: Path, web: Proxy, cache: Cache, damage: Callable[[Path], Any]) -> None:
    dataset = lfdata.open(f"{web.url}/pictures", cache=cache)
    expected = stored(dataset)
    for path in (cache.path / "blocks").iterdir():
        damage(path)
    again = lfdata.open(f"{web.url}/pictures", cache=cache)
    assert stored(again) == expected == stored(lfdata.open(root / "pictures"))
    assert again.store is not None and again.store.counters.report()["damaged"] > 0


def test_blocks_under_each_others_names_are_fetched_again(web: Proxy, cache: Cache) -> None:
    dataset = lfdata.open(f"{web.url}/pictures", cache=cache)
    expected = stored(dataset)
    paths = sorted((cache.path / "blocks").iterdir())
    same = [path for path in paths if path.stat().st_size == paths[0].stat().st_size]
    first, second = same[0].read_bytes(), same[1].read_bytes()
    same[0].write_bytes(second)
    same[1].write_bytes(first)
    assert stored(lfdata.open(f"{web.url}/pictures", cache=cache)) == expected


def test_a_run_stops_with_the_named_error_whatever_the_policy(web: Proxy, cache: Cache) -> None:
    loader = Loader(f"{web.url}/pictures", 4, CROPS, bad_samples="mask", cache=msgspec.structs.replace(cache, deadline=1.0))
    web.rule = shards(lambda _asked: Fault(status=500))
    for path in (cache.path / "blocks").iterdir():
        path.unlink()
    with pytest.raises(RemoteError, match="HTTP 500"):
        for _ in loader:
            pass
    loader.close()


@pytest.mark.service
def test_nothing_secret_is_in_errors_reprs_states_or_the_cache(s3: Proxy, cache: Cache) -> None:
    secrets = [CREDENTIALS["AWS_SECRET_ACCESS_KEY"], CREDENTIALS["AWS_ACCESS_KEY_ID"], "hunter2", "SIGNED"]
    said: list[str] = []
    for url in ("https://user:hunter2@host/set", "https://host/set?X-Amz-Signature=SIGNED", "s3://user:hunter2@bucket/set"):
        with pytest.raises(OptionError) as caught:
            lfdata.open(url, cache=cache)
        said += traceback.format_exception(caught.value)
    # What the source code says in a traceback is the test's, not the package's.
    said = [line for line in said if "lfdata.open" not in line and "for url in" not in line]
    dataset = lfdata.open("s3://data/pictures", cache=cache)
    loader = Loader("s3://data/pictures", 4, cache=cache)
    said += [repr(dataset), repr(dataset.store), repr(loader), json.dumps(loader.state_dict()), repr(cache)]
    for fault in (Fault(status=403), Fault(status=503), Fault(reset=True, cut=0)):
        s3.rule = shards(lambda _asked, fault=fault: fault)
        with pytest.raises(StorageError) as failed:
            lfdata.open("s3://data/pictures", cache=msgspec.structs.replace(cache, deadline=1.0))[0]
        said += traceback.format_exception(failed.value)
    for path in cache.path.rglob("*"):
        said.append(path.name)
    text = "\n".join(said)
    assert not [secret for secret in secrets if secret in text]
    raw = b"".join(path.read_bytes() for path in cache.path.rglob("*") if path.is_file())
    assert b"data/pictures" not in raw


@pytest.mark.parametrize("url,kind", [("nothing://host/set", OptionError), ("s3:///set", OptionError)])
def test_urls_that_make_no_sense_are_named(url: str, kind: type, cache: Cache) -> None:
    with pytest.raises(kind):
        lfdata.open(url, cache=cache)


def test_without_the_extra_the_error_names_it(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["fsspec"] = None
import lfdata
try:
    lfdata.open("s3://bucket/set", cache=sys.argv[1])
except lfdata.errors.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "pip install 'lfdata[remote]'" in done.stdout
    assert issubclass(MissingExtraError, LfdataError)


@pytest.mark.parametrize(
    "options",
    [{"block_bytes": 1000}, {"max_bytes": 1 << 20}, {"threads": 0}, {"deadline": 0.0}, {"timeout": 500.0}, {"ahead_bytes": -1}],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Cache("somewhere", **options)


def test_a_cache_directory_that_cannot_be_made_is_named(tmp_path: Path, web: Proxy) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="open the cache"):
        lfdata.open(f"{web.url}/kinds", cache=tmp_path / "file" / "cache")


def test_blocks_that_the_disk_refuses_are_used_and_not_kept(
    root: Path, web: Proxy, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lfdata.storage import blockfile

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blockfile, "write", full)
    dataset = lfdata.open(f"{web.url}/pictures", cache=cache)
    assert stored(dataset) == stored(lfdata.open(root / "pictures"))
    assert dataset.store is not None and dataset.store.counters.report()["unkept"] > 0
    assert taken(cache) == 0 and dataset.store.cache.bytes == 0


def test_the_decoder_reads_through_the_cache_with_retries(root: Path, web: Proxy, cache: Cache) -> None:
    web.rule = first_times(Fault(cut=3000), 2)
    loader = Loader(f"{web.url}/pictures", 8, CROPS, cache=cache, engine="process")
    assert digests(loader) == digests(Loader(root / "pictures", 8, CROPS))


@pytest.mark.parametrize("how", ["missing", "denied", "a folder", "empty"])
def test_files_of_a_staged_disk_are_named_too(root: Path, tmp_path: Path, cache: Cache, how: str) -> None:
    folder = tmp_path / "set"
    shutil.copytree(root / "pictures", folder)
    path = folder / lfdata.open(folder).manifest.shards[0].file
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(b"" if how == "empty" else b"x")
    if how == "denied":
        if os.geteuid() == 0:
            pytest.skip("permissions do not stop root")
        path.chmod(0)
    dataset = lfdata.open(folder, cache=cache)
    with pytest.raises((ChangedError, StorageError)) as caught:
        dataset[0]
    assert path.name in str(caught.value)
    assert isinstance(caught.value, ChangedError) == (how == "empty")
