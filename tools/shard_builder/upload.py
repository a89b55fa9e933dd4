"""Targets by URL: looked at before any work, sent at the end, the manifest last (docs/remote.md)."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path

from lfdata.errors import CorruptError, FormatError, OptionError, StorageError, TargetExistsError
from lfdata.format.layout import MAX_MANIFEST_BYTES
from lfdata.format.meta import INDEX, MANIFEST, parse_manifest, read_manifest
from lfdata.storage import Cache
from lfdata.storage import urls as locations
from lfdata.storage.client import Client, Counters
from shard_builder.stores import PART_BYTES, RANGE_BYTES, bucket_of, system_of, tried
from shard_builder.target import ERRORS, SHARD_SUFFIX

_WEB, _S3 = ("http", "https"), ("s3", "s3a")
# What is written, and removed, to see whether a store takes anything.
_PROBE = ".lfdata-probe"


class Upload:
    """A target by URL."""

    def __init__(self, url: str) -> None:
        self.url = locations.checked(url)
        self.name = locations.shown(self.url)
        if locations.protocol(self.url) in _WEB:
            raise OptionError(f"{self.name}: nothing can be written to a web server; use a store such as s3://")
        self._system = system_of(self.url)
        self._client = Client(self.url, Cache(), Counters())

    def conversion(self) -> str | None:
        """Conversion id of the data set that is there; ``""`` for one without, ``None`` if there is none."""
        try:
            data = self._client.read_all(locations.below(self.url, MANIFEST), MAX_MANIFEST_BYTES)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        try:
            found = parse_manifest(f"{self.name}/{MANIFEST}", data).provenance.get("conversion", "")
        except FormatError:
            return ""
        return found if isinstance(found, str) else ""

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Before any work is done: a data set that is there, a bucket that is not, or one that takes nothing.

        Raises:
            TargetExistsError, StorageError: with what to do.
        """
        if not overwrite and not resume and self.conversion() is not None:
            raise TargetExistsError(f"{self.name}: already holds a data set; use --overwrite to replace it")
        try:
            tried(self._probe, self.url)
        except StorageError as error:
            bucket = bucket_of(self.url)
            if error.errno == errno.ENOENT:
                reason = f"there is no {bucket}: make the bucket first, or look at its name and the endpoint in the environment"
            elif error.errno == errno.EACCES:
                reason = f"nothing may be written there: {error.reason}. Nothing was converted"
            else:
                raise
            raise StorageError(self.name, "open the target", error.errno, reason) from None

    def _probe(self) -> None:
        """The least that needs the bucket and the right to write into it."""
        if locations.protocol(self.url) in _S3:
            # An upload that is given up leaves nothing, and needs no right to delete.
            bucket, key, _ = self._system.split_path(locations.below(self.url, MANIFEST))
            begun = self._system.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
            self._system.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=begun["UploadId"])
            return
        probe = locations.below(self.url, _PROBE)
        self._system.pipe_file(probe, b"")
        self._system.rm_file(probe)

    def send(self, directory: Path, *, overwrite: bool, progress: Callable[[str], None]) -> list[str]:
        """A finished data set, the manifest last. Gives the names of files there that belong to no data set now.

        Raises:
            TargetExistsError: another data set is there. CorruptError: what arrived is not what was sent. StorageError.
        """
        manifest = read_manifest(directory)
        there = self.conversion()
        if there is not None and there != manifest.provenance.get("conversion") and not overwrite:
            raise TargetExistsError(f"{self.name}: holds another data set; use --overwrite to replace it")
        names = [part.file for shard in manifest.shards for part in shard.files]
        others = [name for name in (INDEX, ERRORS) if (directory / name).exists()]
        for name in [*names, *others, MANIFEST]:
            progress(name)
            self._send(directory / name, locations.below(self.url, name))
        if ERRORS not in others:
            self._remove(ERRORS)
        kept = {*names, *others, MANIFEST}
        listed = tried(lambda: self._system.ls(self.url, detail=False, refresh=True), self.url)
        found = (str(path).rstrip("/").rpartition("/")[2] for path in listed)
        return sorted(name for name in found if name.endswith(SHARD_SUFFIX) and name not in kept)

    def _remove(self, name: str) -> None:
        try:
            self._system.rm_file(locations.below(self.url, name))
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"{self.name}/{name}", "remove", error.errno, type(error).__name__) from None

    def _send(self, path: Path, url: str) -> None:
        size = path.stat().st_size
        if not self._arrived(path, url, size):
            options = {"chunksize": PART_BYTES} if locations.protocol(url) in _S3 else {}
            tried(lambda: self._system.put_file(str(path), url, **options), url)
            if not self._arrived(path, url, size, read_back=True):
                raise CorruptError(
                    locations.shown(url), None, "what the store holds is not what was sent. Run it again with --resume"
                )

    def _arrived(self, path: Path, url: str, size: int, *, read_back: bool = False) -> bool:
        """Whether the store holds the file: by length and MD5; where its tag is none, by reading it back, if asked to."""
        try:
            found, tag = self._client.stat(url)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        if found != size:
            return False
        if tag.strip('"') in _tags(path, size):
            return True
        if not read_back:
            return False
        theirs = hashlib.sha256()
        for start in range(0, size, RANGE_BYTES):
            data = memoryview(bytearray(min(RANGE_BYTES, size - start)))
            self._client.fetch(url, start, data, size, tag)
            theirs.update(data)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest() == theirs.digest()


def _tags(path: Path, size: int) -> tuple[str, str]:
    """Entity tags that S3 gives a file sent whole, and in parts."""
    whole, parts, count = hashlib.md5(usedforsecurity=False), hashlib.md5(usedforsecurity=False), 0
    with open(path, "rb") as file:
        for start in range(0, size, PART_BYTES):
            data = file.read(min(PART_BYTES, size - start))
            whole.update(data)
            parts.update(hashlib.md5(data, usedforsecurity=False).digest())
            count += 1
    return whole.hexdigest(), f"{parts.hexdigest()}-{count}"
