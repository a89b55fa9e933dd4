"""Conversions from and to URLs (docs/remote.md): sources are copied first, targets built locally and sent, the manifest last."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from lfdata.errors import StorageError, TargetExistsError
from lfdata.format.durable import storage_error
from lfdata.format.meta import MANIFEST
from lfdata.storage import Cache, is_url
from lfdata.storage import urls as locations
from shard_builder.journal import journal_path
from shard_builder.staging import stage_source
from shard_builder.target import QUARANTINE
from shard_builder.upload import Upload


def work_directory(source: str, target: str, given: Path | None) -> Path:
    """Where a conversion with URLs works: as given, or a place of its own for these two locations, the same each time."""
    if given is not None:
        return given
    # Without queries: a URL that is signed anew leads to the same place.
    told = "\0".join(locations.shown(part) for part in (*source.split("::"), target))
    name = hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return Cache().path / "convert" / name


def convert_by_url(
    source: str,
    target: str,
    options: Mapping[str, str],
    given: Mapping[str, Any],
    run: Callable[[str, Path, dict[str, str]], None],
) -> None:
    """A conversion whose source or target is a URL. ``run``: does it with a local source, target and options.

    Args:
        given: options of the command: work, resume, overwrite, quiet.
    """
    work = work_directory(source, target, given["work"])
    with _alone(work):
        _convert(source, target, options, given, run, work)


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """The work directory for this process. Raises :class:`TargetExistsError`: another one uses it."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(work, "open", error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TargetExistsError(f"{work}: another process works here; wait for it, or choose another --work") from error
        yield
    finally:
        os.close(descriptor)


def _convert(
    source: str,
    target: str,
    options: Mapping[str, str],
    given: Mapping[str, Any],
    run: Callable[[str, Path, dict[str, str]], None],
    work: Path,
) -> None:
    local = locations.local_path(locations.checked(target)) if is_url(target) else Path(target)
    upload = Upload(target) if local is None else None
    if upload is not None:
        upload.check(resume=given["resume"], overwrite=given["overwrite"])
    place = work / "target" if local is None else local
    if upload is not None and not given["resume"] and not given["overwrite"]:
        _refuse_begun(upload.name, place)
    staged, changed = stage_source(source, options, work)
    run(staged, place, changed)

    def say(text: str) -> None:
        if not given["quiet"]:
            click.echo(text, err=True)

    if upload is not None:
        for name in _sent(upload, place, given["overwrite"], say):
            say(f"{upload.name}/{name}: belongs to no data set any more")
        say(f"{upload.name}: complete")
    for kept in _clear(work, sent=upload is not None):
        say(f"{kept}: bad samples, which stay here")


def _refuse_begun(name: str, place: Path) -> None:
    """What an earlier run has made and not sent."""
    if (place / MANIFEST).exists():
        what = "is converted and not all sent; --resume sends what is missing"
    elif journal_path(place).exists():
        what = "is begun; --resume goes on"
    else:
        return
    raise TargetExistsError(f"{name}: this conversion {what}, --overwrite starts again (it lies in {place})")


def _sent(upload: Upload, place: Path, overwrite: bool, say: Callable[[str], None]) -> list[str]:
    try:
        return upload.send(place, overwrite=overwrite, progress=lambda name: say(f"sending {name}"))
    except StorageError as error:
        advice = f"All is converted, in {place}: the same command with --resume sends what is missing"
        raise type(error)(error.path, error.operation, error.errno, f"{error.reason}. {advice}") from error


def _clear(work: Path, *, sent: bool) -> Iterator[Path]:
    """Remove copies and what was sent; gives what stays: bad samples that were kept."""
    kept = work / "target" / QUARANTINE
    for name in ("source", "root", *(["target"] if sent else [])):
        if name == "target" and kept.is_dir():
            yield kept
            continue
        shutil.rmtree(work / name, ignore_errors=True)
    if work.is_dir() and not os.listdir(work):
        work.rmdir()
