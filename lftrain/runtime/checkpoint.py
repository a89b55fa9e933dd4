"""Checkpoints of a run: written atomically and in the background, verified, and the newest sound one found again."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from lfdata.errors import StorageError
from lfdata.format.durable import Files, storage_error
from lftrain.comm.group import Group
from lftrain.errors import CheckpointError, ConfigError, DamagedCheckpointError
from lftrain.options import CheckpointOptions
from lftrain.runtime.state import Tensors, stage, unwrapped
from lftrain.runtime.storage import MANIFEST, STATE, Manifest, Writer, encode_manifest, read_file, read_manifest, verify

# It is meant: rank 0 writes what all hold alike.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

LATEST, LOCK = "latest", "lock"
Event = Callable[..., None]


class Checkpoints:
    """The checkpoints of a run's folder. Every rank makes one and calls the same methods; rank 0 writes.

    Args:
        folder: of the run. event: called as ``event(name, message, **values)`` on rank 0 for what people should know.
        files: the file layer, which tests replace.
    """

    def __init__(
        self, folder: Path, options: CheckpointOptions, group: Group, event: Event, files: Files | None = None
    ) -> None:
        self.root = folder / "checkpoints"
        self._options, self._group, self._event = options, group, event
        self._files = files or Files()
        self._buffers: Tensors = {}
        self._thread: threading.Thread | None = None
        self._error = ""
        self._failures = 0
        self._pending = False
        self._lock: int | None = None
        self.last = -1  # step of the last one that was begun or loaded
        refused = self._open() if group.rank == 0 else ""
        if refused := group.gather_json(refused)[0]:
            raise CheckpointError(refused)

    def save(self, step: int, tensors: Tensors, state: dict[str, Any], ready: Tensors | None = None) -> None:
        """Begin a checkpoint; waits for the one before.

        Args:
            step: steps that are done. tensors: of model and optimiser. state: the rest of it, JSON-able, this rank's under ``"own"``.
            ready: more tensors, on the host, that nobody changes.

        Raises:
            CheckpointError: ``failures`` in a row have failed.
        """
        self.wait()
        owns = self._group.gather_json(state.pop("own", None))
        self.last, self._pending = step, True
        if self._group.rank != 0:
            return
        copies = {**stage(tensors, self._buffers), **(ready or {})}
        content = msgspec.json.encode({**state, "own": owns, "step": step})
        self._thread = threading.Thread(target=self._try, args=(step, copies, content), name="checkpoint")
        self._thread.start()
        if not self._options.asynchronous:
            self._thread.join()

    def finish(self) -> None:
        """After the last :meth:`save`: raises :class:`CheckpointError` unless what it was given is kept."""
        if error := self.wait():
            raise CheckpointError(
                f"the last checkpoint could not be written: {error}. With room for it, the same command goes on from there"
            )

    def wait(self) -> str:
        """Until nothing is being written; what went wrong, on all ranks, or "". Raises :class:`CheckpointError` for the last of too many."""
        if not self._pending:
            return ""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._pending = False
        error = self._group.gather_json(self._error)[0]
        self._error = ""
        self._failures = self._failures + 1 if error else 0
        if self._failures >= self._options.failures:
            raise CheckpointError(f"{self._failures} checkpoints in a row have failed. The last: {error}")
        return str(error)

    def candidates(self) -> list[Path]:
        """Whole checkpoints, newest first. Raises :class:`ConfigError` for what ``resume`` forbids."""
        found = sorted(_steps(self.root), reverse=True)
        if found and self._options.resume == "never":
            raise ConfigError(
                f'{self.root} holds checkpoints and checkpoint.resume is "never": use another run.folder, or remove them'
            )
        if not found and self._options.resume == "must":
            raise CheckpointError(f'{self.root} holds no checkpoint and checkpoint.resume is "must"')
        return found

    def only_damaged(self) -> str:
        """What was set aside by an earlier run, if nothing else is there: beginning anew in its place would be a surprise."""
        found = sorted(path.name for path in self.root.glob("damaged-*")) if self.root.is_dir() else []
        here = str(self.root / found[-1]) if found and not any(_steps(self.root)) else ""
        return str(self._group.gather_json(here)[0])

    def read(self, path: Path) -> tuple[Manifest, dict[str, Any]]:
        """Manifest and plain state of a checkpoint, checked. Raises :class:`DamagedCheckpointError`."""
        manifest = read_manifest(path)
        content = read_file(path / STATE)
        if manifest.files.get(STATE) != (len(content), xxhash.xxh3_64_hexdigest(content)):
            raise DamagedCheckpointError(path / STATE, None, "its bytes do not match their check")
        return manifest, msgspec.json.decode(content)

    def set_aside(self, path: Path, reason: str) -> None:
        """A damaged checkpoint gets out of the way, under a name that says so; nothing of it is lost."""
        if self._group.rank == 0:
            target = path.with_name(f"damaged-{path.name}")
            if target.exists():
                self._remove(target)
            self._rename(path, target)
            self._event(
                "damaged checkpoint", f"{reason}. It is {target} now, and the one before is used", path=str(target), shared=True
            )

    def close(self) -> None:
        """Wait for the thread, without a word to other ranks, and let go of the folder."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def _open(self) -> str:
        """Make the folder, lock it and remove what was left unfinished. Returns why not."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in self.root.iterdir():
                if path.name.startswith(".tmp-"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        except BlockingIOError:
            return f"{self.root}: another run is writing here: wait for its end, or use another run.folder"
        except OSError as error:
            return f"{self.root}: {error.strerror or error}"
        return ""

    def _try(self, step: int, tensors: Tensors, content: bytes) -> None:
        temporary = self.root / f".tmp-{_name(step)}"
        try:
            self._write(step, temporary, tensors, content)
        except (StorageError, OSError) as error:
            number = error.errno
            path = error.path if isinstance(error, StorageError) else error.filename
            self._error = (
                f"checkpoint of step {step}: {path}: {os.strerror(number) if number else error}; the one before is untouched"
            )
        except (CheckpointError, DamagedCheckpointError, RuntimeError, MemoryError) as error:
            self._error = f"checkpoint of step {step}: {error}"
        if self._error:
            shutil.rmtree(temporary, ignore_errors=True)
            self._event("checkpoint failed", self._error, step=step, shared=True)

    def _write(self, step: int, temporary: Path, tensors: Tensors, content: bytes) -> None:
        files, final = self._files, self.root / _name(step)
        shutil.rmtree(temporary, ignore_errors=True)
        files.make_directory(temporary)
        writer = Writer(temporary, step, files)
        try:
            save(dict(tensors), storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise unwrapped(error) from error
        assert writer.manifest is not None
        self._file(temporary / STATE, content)
        whole = {**writer.manifest.files, STATE: (len(content), xxhash.xxh3_64_hexdigest(content))}
        self._file(temporary / MANIFEST, encode_manifest(msgspec.structs.replace(writer.manifest, files=whole)))
        files.sync_directory(temporary)
        if final.exists():
            # Of an earlier life of this run, and damaged, or it would have gone on from there.
            self._remove(final)
        self._rename(temporary, final)
        if self._options.verify:
            verify(final)
        files.write_file(self.root / LATEST, final.name.encode() + b"\n")
        for path in sorted(_steps(self.root))[: -self._options.keep]:
            if path != final:
                self._remove(path)
        self._event("checkpoint", f"step {step} is kept in {final}", step=step, shared=True)

    def _file(self, path: Path, data: bytes) -> None:
        output = self._files.create(path)
        try:
            output.write(data)
            output.sync()
        finally:
            output.close()

    def _rename(self, path: Path, target: Path) -> None:
        try:
            self._files.call("rename", path, lambda: os.rename(path, target), target=target)
        except OSError as error:
            raise storage_error(path, "rename", error) from error
        self._files.sync_directory(self.root)

    def _remove(self, path: Path) -> None:
        """Out of sight first: half of a checkpoint is never seen under its name."""
        hidden = path.with_name(f".tmp-old-{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        self._rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _steps(root: Path) -> Iterator[Path]:
    """Directories that have been renamed into place."""
    if root.is_dir():
        yield from (path for path in root.iterdir() if path.name.startswith("step-") and path.name[5:].isdigit())
