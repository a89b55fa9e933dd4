"""Sources by URL: copied to a local directory first (docs/remote.md)."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import SourceError, StorageError
from lfdata.format.durable import storage_error
from lfdata.storage import Cache, is_url
from lfdata.storage import urls as locations
from lfdata.storage.client import Client, Counters
from shard_builder.sources.grouping import expand
from shard_builder.stores import RANGE_BYTES, system_of, tried

# Requests of a copy under way at a time.
THREADS = 8
_WEB = ("http", "https")
# Stores whose URLs begin with a bucket, which may be the source itself.
_BUCKETS = ("s3", "s3a", "gs", "gcs")
_STAGED = "staged"


def stage_source(location: str, options: Mapping[str, str], work: Path) -> tuple[str, dict[str, str]]:
    """A location by URL as a local one below ``work``, and the options with a local ``root``. Local ones stay as they are.

    What was copied before and is unchanged is not copied again. Raises :class:`SourceError`: there is nothing; :class:`StorageError`.
    """
    changed = dict(options)
    if is_url(root := changed.get("root", "")):
        changed["root"] = str(_Stage(work / "root").everything(root))
    parts = location.split("::")
    if not any(map(is_url, parts)):
        return location, changed
    stage = _Stage(work / "source")
    found: list[str] = []
    for part in parts:
        for number, url in enumerate(_expanded(part)):
            found.append(str(stage.one(url, f"{len(found):06d}-{number}") if is_url(url) else url))
    return "::".join(found), changed


def _expanded(pattern: str) -> list[str]:
    if "{" not in pattern:
        return [pattern]
    try:
        return list(expand(pattern))
    except ValueError as error:
        raise SourceError(f"{locations.shown(pattern)}: a pattern that cannot be expanded: {error}") from None


class _Stage:
    """Copies of objects below a directory, with what is known of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._list = directory / _STAGED
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._known = _lines(self._list)
        except OSError as error:
            raise storage_error(directory, "mkdir", error) from error

    def one(self, url: str, folder: str) -> Path:
        """An object as ``folder/NAME``; a folder of objects as ``folder/``."""
        url = locations.checked(url, query=True)
        client = Client(url, Cache(), Counters())
        name = locations.shown(url).rpartition("/")[2]
        if locations.protocol(url) in _BUCKETS and "/" not in url.partition("://")[2]:
            return self._folder(url, folder, client)
        try:
            size, tag = client.stat(url)
        except StorageError as error:
            if error.errno != errno.ENOENT or locations.protocol(url) in _WEB:
                raise SourceError(f"{locations.shown(url)}: {error.reason}") from error
            return self._folder(url, folder, client)
        return self._copy(client, url, size, tag, f"{folder}/{_safe(name)}")

    def everything(self, url: str) -> Path:
        """All objects below a URL."""
        url = locations.checked(url)
        return self._folder(url, "all", Client(url, Cache(), Counters()))

    def _folder(self, url: str, folder: str, client: Client) -> Path:
        if locations.protocol(url) in _WEB:
            raise SourceError(f"{locations.shown(url)}: a web server does not list what it has; name the files")
        system = system_of(url)
        top = str(system._strip_protocol(url)).rstrip("/")
        found = tried(lambda: system.find(top, detail=True), url)
        if not found:
            raise SourceError(f"{locations.shown(url)}: no such object, and nothing below it")
        for path in sorted(found):
            relative = path[len(top) :].lstrip("/")
            if not relative or path.endswith("/"):
                continue
            address = locations.below(url, relative)
            size, tag = client.stat(address)
            self._copy(client, address, size, tag, f"{folder}/{_safe(relative)}")
        return self._directory / folder

    def _copy(self, client: Client, url: str, size: int, tag: str, name: str) -> Path:
        path = self._directory / name
        entry = {"name": name, "size": size, "tag": tag}
        if tag and self._known.get(name) == entry and path.is_file() and path.stat().st_size == size:
            return path
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as file:
                os.ftruncate(file.fileno(), size)
                self._fill(client, url, size, tag, file.fileno())
            os.rename(part, path)
            self._known[name] = entry
            with open(self._list, "ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            raise storage_error(path, "write", error) from error
        return path

    def _fill(self, client: Client, url: str, size: int, tag: str, descriptor: int) -> None:
        def range_of(start: int) -> None:
            data = memoryview(bytearray(min(RANGE_BYTES, size - start)))
            client.fetch(url, start, data, size, tag)
            at = 0
            while at < len(data):
                at += os.pwrite(descriptor, data[at:], start + at)

        with ThreadPoolExecutor(THREADS) as pool:
            try:
                for _ in pool.map(range_of, range(0, size, RANGE_BYTES)):
                    pass
            except BaseException:
                # Ctrl-C, or one that failed: the others do not try until their deadline.
                client.give_up()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _lines(path: Path) -> dict[str, dict[str, Any]]:
    """What a list of copies says; lines that a killed run has cut are nothing."""
    known = {}
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                entry = msgspec.json.decode(line)
                known[entry["name"]] = entry
            except (msgspec.DecodeError, KeyError, TypeError):
                continue
    return known


def _safe(name: str) -> str:
    """A name from a server as a path below a directory. Raises :class:`SourceError`."""
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") or part == _STAGED for part in parts):
        raise SourceError(f"the object {name[:200]!r} has a name that cannot be a file's")
    return name
