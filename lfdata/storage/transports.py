"""One attempt at a range of an object, a class a kind of server. What is retried, and for how long, is :mod:`lfdata.storage.client`'s."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import dataclass
from typing import Any, Protocol

from lfdata.errors import ChangedError, LfdataError, RemoteError, StorageError
from lfdata.storage.urls import scrubbed, shown

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_TOTAL = re.compile(r"bytes \*/(\d+)")
_AGAIN = (408, 425, 429)
# What object stores call errors that pass; some come with a status of 400.
_AGAIN_CODES = ("SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "InternalError", "ServiceUnavailable", "Throttling")
_CHUNK = 1 << 18
# Where bodies cannot be streamed, a range is asked for in pieces, so that a failure costs one.
_PIECE = 1 << 20


class Again(Exception):
    """This attempt failed in a way that may pass; the text says how."""


@dataclass(slots=True)
class Progress:
    """Bytes of the buffer that are there, and what the server said of the object: its length and entity tag."""

    done: int = 0
    total: int | None = None
    tag: str = ""


class Transport(Protocol):
    """Fills what is missing of a buffer."""

    def attempt(self, url: str, start: int, buffer: memoryview, progress: Progress, seconds: float) -> None:
        """Fill ``buffer[progress.done:]``, which begins at ``start + progress.done`` of the object, within some seconds.

        An empty buffer asks for length and tag alone. Raises :class:`Again`, or the error that stands.
        """
        ...


def make(filesystem: Any, timeout: float) -> Transport:
    """The transport for a file system of fsspec's."""
    kind = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    if kind in ("http", "https"):
        return _Http(filesystem, timeout)
    if kind in ("s3", "s3a"):
        return _S3(filesystem)
    return _Plain(filesystem)


def refused(url: str, status: int, words: str = "") -> Exception:
    """What an answer that is no success means."""
    told = f"HTTP {status}" + (f" ({scrubbed(words)})" if words else "")
    name = shown(url)
    if status == 404:
        return StorageError(name, "read", errno.ENOENT, f"no such object ({told})")
    if status in (401, 403):
        return StorageError(
            name, "read", errno.EACCES, f"permission denied ({told}); credentials are taken from the environment"
        )
    if status == 412:
        return ChangedError(name, None, "the object was replaced while it was in use. Open the data set again")
    if status in _AGAIN or status >= 500 or words.partition(":")[0] in _AGAIN_CODES:
        return Again(told)
    return RemoteError(name, "read", None, told)


def check_range(url: str, header: str | None, first: int, stop: int, progress: Progress) -> None:
    """Whether the answer is the range that was asked for."""
    found = _RANGE.fullmatch(header or "")
    if found is None:
        raise Again(f"an answer without a valid Content-Range ({scrubbed(str(header))!r})")
    begin, last, progress.total = map(int, found.groups())
    if progress.total < stop:
        reason = f"the object has {progress.total} bytes, {stop} were expected"
        raise ChangedError(shown(url), None, reason)
    if (begin, last + 1) != (first, stop):
        raise Again(f"bytes {begin} to {last} were sent, {first} to {stop - 1} were asked for")


def same_tag(url: str, tag: str, progress: Progress) -> None:
    """Take the entity tag; one that is not what it was is another object."""
    if progress.tag and tag and tag != progress.tag:
        raise ChangedError(
            shown(url), None, "the object was replaced while it was in use (its entity tag changed). Open the data set again"
        )
    progress.tag = progress.tag or tag


def put(buffer: memoryview, data: Any, progress: Progress) -> None:
    """Take what arrived."""
    if progress.done + len(data) > len(buffer):
        raise Again(f"the body is longer than the {len(buffer)} bytes that were asked for")
    buffer[progress.done : progress.done + len(data)] = data
    progress.done += len(data)


class _Streamed:
    """Runs a coroutine in fsspec's event loop, within some seconds."""

    def __init__(self, filesystem: Any) -> None:
        self.filesystem = filesystem

    async def _get(self, url: str, start: int, buffer: memoryview, progress: Progress) -> None:
        raise NotImplementedError

    def _means(self, url: str, error: BaseException) -> Exception:
        raise NotImplementedError

    def attempt(self, url: str, start: int, buffer: memoryview, progress: Progress, seconds: float) -> None:
        """See :class:`Transport`."""
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        try:
            sync(self.filesystem.loop, self._get, url, start, buffer, progress, timeout=seconds)
        except (LfdataError, Again):
            raise
        except (TimeoutError, FSTimeoutError):
            raise Again("no answer in time") from None
        except Exception as error:
            # Its words and those of its causes may hold what must not be shown.
            raise self._means(url, error) from None
        if buffer and progress.done < len(buffer):
            raise Again(f"the body ended after {progress.done} of {len(buffer)} bytes")


class _Http(_Streamed):
    def __init__(self, filesystem: Any, timeout: float) -> None:
        super().__init__(filesystem)
        self._timeout = timeout

    async def _get(self, url: str, start: int, buffer: memoryview, progress: Progress) -> None:
        import aiohttp
        import yarl

        session = await self.filesystem.set_session()
        first, stop = start + progress.done, start + max(1, len(buffer))
        headers = {"Range": f"bytes={first}-{stop - 1}", "Accept-Encoding": "identity"}
        if progress.tag.startswith('"'):
            headers["If-Match"] = progress.tag
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=self._timeout)
        # A signature is over the very text of a query.
        address = yarl.URL(url, encoded=True) if "?" in url else self.filesystem.encode_url(url)
        async with session.get(address, headers=headers, timeout=timeout) as answer:
            if answer.status == 416 and (found := _TOTAL.fullmatch(answer.headers.get("Content-Range", ""))):
                progress.total = int(found[1])
                if buffer:
                    raise ChangedError(shown(url), None, f"the object has {progress.total} bytes, {stop} were expected")
                return
            if answer.status == 200:
                self._whole(url, answer, first, buffer, progress)
            elif answer.status == 206:
                check_range(url, answer.headers.get("Content-Range"), first, stop, progress)
            else:
                raise refused(url, answer.status)
            same_tag(url, answer.headers.get("ETag") or answer.headers.get("Last-Modified", ""), progress)
            if buffer:
                async for chunk in answer.content.iter_any():
                    put(buffer, chunk, progress)

    def _whole(self, url: str, answer: Any, first: int, buffer: memoryview, progress: Progress) -> None:
        """A server that does not know ranges will do where all of an object is wanted."""
        length = answer.headers.get("Content-Length", "")
        progress.total = int(length) if length.isdigit() else None
        if buffer and (first or (progress.total is not None and progress.total > len(buffer))):
            raise RemoteError(shown(url), "read", None, "the server does not answer ranges (HTTP 200 instead of 206)")
        if buffer and progress.total is not None and progress.total < len(buffer):
            raise ChangedError(shown(url), None, f"the object has {progress.total} bytes, {len(buffer)} were expected")

    def _means(self, url: str, error: BaseException) -> Exception:
        import aiohttp

        if isinstance(error, aiohttp.InvalidURL | aiohttp.TooManyRedirects):
            return RemoteError(shown(url), "read", None, type(error).__name__)
        if isinstance(error, aiohttp.ClientError | OSError):
            return Again(f"{type(error).__name__}: {scrubbed(str(error))}")
        return RemoteError(shown(url), "read", None, f"{type(error).__name__}: {scrubbed(str(error))}")


class _S3(_Streamed):
    async def _get(self, url: str, start: int, buffer: memoryview, progress: Progress) -> None:
        bucket, key, _ = self.filesystem.split_path(url)
        client = await self.filesystem.set_session()
        first, stop = start + progress.done, start + max(1, len(buffer))
        wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={first}-{stop - 1}"}
        if progress.tag:
            wanted["IfMatch"] = progress.tag
        try:
            answer = await client.get_object(**wanted)
        except Exception as error:
            status, code = _status(error)
            if status == 416 or code == "InvalidRange":
                # Of the length nothing is said here: ask for it.
                progress.total = await self._length(client, bucket, key)
                if buffer:
                    reason = f"the object has {progress.total} bytes, {stop} were expected"
                    raise ChangedError(shown(url), None, reason) from None
                return
            raise
        async with answer["Body"] as body:
            check_range(url, answer.get("ContentRange"), first, stop, progress)
            same_tag(url, answer.get("ETag", ""), progress)
            while buffer and (chunk := await body.read(_CHUNK)):
                put(buffer, chunk, progress)

    async def _length(self, client: Any, bucket: str, key: str) -> int:
        head = await client.head_object(Bucket=bucket, Key=key)
        return int(head["ContentLength"])

    def _means(self, url: str, error: BaseException) -> Exception:
        import aiohttp
        from botocore import exceptions

        status, code = _status(error)
        if status:
            return refused(url, status, code)
        if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
            reason = "no credentials in the environment (a public bucket needs FSSPEC_S3_ANON=true)"
            return StorageError(shown(url), "read", errno.EACCES, reason)
        told = f"{type(error).__name__}: {scrubbed(str(error))}"
        passing = (
            exceptions.HTTPClientError
            | exceptions.ConnectionError
            | exceptions.IncompleteReadError
            | exceptions.ResponseStreamingError
        )
        if isinstance(error, passing | aiohttp.ClientError | OSError):
            return Again(told)
        return RemoteError(shown(url), "read", None, told)


def _status(error: BaseException) -> tuple[int, str]:
    """HTTP status and code of an error of botocore's; zero of others."""
    answer = getattr(error, "response", None)
    if not isinstance(answer, dict):
        return 0, ""
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status or 0), str(answer.get("Error", {}).get("Code", ""))


class _Plain:
    """Any other file system, through ``cat_file`` and ``info``; within the time given where it is an asynchronous one."""

    def __init__(self, filesystem: Any) -> None:
        self.filesystem = filesystem

    def _call(self, name: str, until: float, *arguments: Any, **options: Any) -> Any:
        system = self.filesystem
        if not getattr(system, "async_impl", False):
            return getattr(system, name)(*arguments, **options)
        from fsspec.asyn import sync

        left = max(0.05, until - time.monotonic())
        return sync(system.loop, getattr(system, f"_{name}"), *arguments, timeout=left, **options)

    def attempt(self, url: str, start: int, buffer: memoryview, progress: Progress, seconds: float) -> None:
        """See :class:`Transport`. Whether the object is the same is asked whenever an attempt begins."""
        until = time.monotonic() + seconds
        try:
            found = self._call("info", until, url)
            if found.get("type") == "directory":
                raise StorageError(shown(url), "read", errno.ENOENT, "no such object: a folder is there")
            progress.total = int(found["size"])
            tag = found.get("ETag") or found.get("etag") or found.get("generation") or found.get("mtime") or ""
            same_tag(url, str(tag), progress)
            if progress.total < start + len(buffer):
                reason = f"the object has {progress.total} bytes, {start + len(buffer)} were expected"
                raise ChangedError(shown(url), None, reason)
            while progress.done < len(buffer):
                first = start + progress.done
                stop = min(first + _PIECE, start + len(buffer))
                data = self._call("cat_file", until, url, start=first, end=stop)
                if len(data) != stop - first:
                    raise Again(f"{len(data)} bytes were sent, {stop - first} were asked for")
                put(buffer, data, progress)
        except (LfdataError, Again):
            raise
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            number = error.errno or (errno.EACCES if isinstance(error, PermissionError) else errno.ENOENT)
            raise StorageError(shown(url), "read", number, os.strerror(number)) from None
        except Exception as error:
            raise Again(f"{type(error).__name__}: {scrubbed(str(error))}") from None
