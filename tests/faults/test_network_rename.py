"""Renames as network file systems do them: done but reported as failed, not done, visible late. A commit is idempotent."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faultkit import SMALL, digests, expected_digests, finish, leftovers, readable, run, synthetic, with_options

from lfdata.errors import StorageError
from lfdata.format import durable
from lfdata.format.durable import Files

OPTIONS = with_options(SMALL, segment_rows=25, shard_bytes=9_000)


class NetworkFiles(Files):
    """``happens``: whether the rename is done; then ``error`` is reported, or success if ``None``."""

    def __init__(self, happens: bool, error: int | None, ending: str = "") -> None:
        self.happens, self.error, self.ending = happens, error, ending

    def call(self, operation: str, path: Path, function: Callable[[], Any], **detail: Any) -> Any:
        if operation != "rename" or not str(detail["target"]).endswith(self.ending):
            return function()
        result = function() if self.happens else None
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error), str(path))
        return result


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_VISIBILITY_WAITS", (0.001, 0.01))


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_done_but_reported_as_failed(error: int, place: Path) -> None:
    run(place / "target", synthetic(60), OPTIONS, NetworkFiles(True, error))
    assert digests(place / "target") == expected_digests(synthetic(60), OPTIONS)
    assert leftovers(place / "target") == []


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE, errno.EIO, errno.EPERM, None])
@pytest.mark.parametrize("ending", [".lfd", "journal", "manifest.json"])
def test_not_done(error: int | None, ending: str, place: Path) -> None:
    target = place / "target"
    with pytest.raises(StorageError, match="rename"):
        run(target, synthetic(60), OPTIONS, NetworkFiles(False, error, ending))
    assert readable(target) == ""
    finish(target, synthetic(60), OPTIONS)
    assert digests(target) == expected_digests(synthetic(60), OPTIONS)


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE])
def test_not_done_over_an_old_file(error: int, place: Path) -> None:
    """The old file under the final name is not taken for the new one."""
    target = place / "target"
    run(target, synthetic(60), OPTIONS)
    old = readable(target)
    with pytest.raises(StorageError, match="rename"):
        run(target, synthetic(60, 1), OPTIONS, NetworkFiles(False, error, "manifest.json"), overwrite=True)
    assert readable(target) == old
    finish(target, synthetic(60, 1), OPTIONS)
    assert digests(target) == expected_digests(synthetic(60, 1), OPTIONS)


def test_visible_late(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name appears a little after the rename has returned; the commit waits for it."""
    monkeypatch.setattr(durable, "_VISIBILITY_WAITS", (0.01, 0.05, 5.0))
    timers: list[threading.Timer] = []

    class Late(Files):
        def call(self, operation: str, path: Path, function: Callable[[], Any], **detail: Any) -> Any:
            if operation != "rename":
                return function()
            timers.append(threading.Timer(0.02, os.rename, (path, detail["target"])))
            timers[-1].start()
            return None

    Late().write_file(place / "late", b"contents")
    timers[0].join()
    assert (place / "late").read_bytes() == b"contents"


def test_never_visible_is_no_commit(place: Path) -> None:
    with pytest.raises(StorageError, match="did not appear"):
        NetworkFiles(False, None).write_file(place / "never", b"contents")
    assert os.listdir(place) == []


def test_without_the_identity_check_a_lost_rename_would_pass(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the check is what finds it."""
    monkeypatch.setattr(durable, "_became", lambda _final, _identity: True)
    NetworkFiles(False, errno.ENOENT).write_file(place / "never", b"contents")
    assert not (place / "never").exists()
