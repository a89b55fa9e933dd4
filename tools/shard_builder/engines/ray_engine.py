"""A conversion on a Ray cluster: Ray decides where tasks run, and runs them again where a worker or a node is lost.

All nodes must see the source and the target under the same paths, and have this package. What a task has committed before it was lost
stays; the journal on the shared file system tells its successor where to go on (docs/scale.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import LfdataError, OptionError, SourceError
from shard_builder.convert import convert
from shard_builder.finish import finish
from shard_builder.journal import work_directory
from shard_builder.options import ConvertOptions, Task
from shard_builder.sources import source_from_config
from shard_builder.sources.base import Source
from shard_builder.target import BusyError

# A task that was lost with its worker or node is run again so often.
RETRIES = 5
# Another process has the lock of a task for so long at most: one on a node that is being given up.
LOCK_SECONDS = 30.0


def run_task(request: bytes) -> bytes:
    """One task, on whatever node Ray runs it. Errors are told as text: their classes need not be known to Ray."""
    asked = msgspec.msgpack.decode(request)
    task = Task(*asked["task"])
    options = ConvertOptions(**asked["options"], task=task)
    target = Path(asked["target"])
    source = source_from_config(asked["source"], work_directory(target, task))
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            convert(source, target, options)
        except BusyError as error:
            if time.monotonic() < deadline:
                time.sleep(1.0)
                continue
            return _failure(error)
        except LfdataError as error:
            return _failure(error)
        return msgspec.msgpack.encode({})


def _failure(error: LfdataError) -> bytes:
    return msgspec.msgpack.encode({"error": f"{type(error).__name__}: {error}", "node": os.uname().nodename})


def convert_on_ray(
    source: Source,
    target: str | Path,
    options: ConvertOptions,
    *,
    address: str = "auto",
    tasks: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Convert on a cluster that is there; gives samples and shards of the finished data set.

    Args:
        address: of the cluster; ``auto`` finds the one this machine belongs to.
        tasks: parts to make; by default as many as the cluster can run at a time. Each takes ``options.workers`` of its processors (1 by
            default).
        progress: is called with tasks done and tasks in all.

    Raises:
        OptionError: Ray is not installed, there is no cluster, or options that need one process.
        SourceError: a task failed; those that were done stay done.
    """
    if options.overwrite or options.task is not None:
        raise OptionError("an engine makes tasks of its own, in a target that they can go on with: no overwrite, no task")
    ray = _ray()
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except ConnectionError as error:
        raise OptionError(
            f"no Ray cluster at {address!r}: {error}. Start one with `ray start --head`, or use --task"
        ) from error
    workers = max(1, options.workers)
    count = tasks or max(1, int(ray.cluster_resources().get("CPU", 1)) // workers)
    given = asdict(replace(options, workers=workers, resume=True))
    del given["task"]
    request = {"source": source.config(), "target": str(Path(target).absolute()), "options": given}
    remote = ray.remote(num_cpus=workers, max_retries=RETRIES)(run_task)
    waiting = {remote.remote(msgspec.msgpack.encode(request | {"task": [number, count]})): number for number in range(count)}
    try:
        _await(ray, waiting, count, progress or (lambda _done, _total: None))
    except BaseException:
        for reference in waiting:
            ray.cancel(reference, force=True)
        raise
    return finish(target, allow_empty=options.allow_empty, max_errors=options.max_errors)


def _await(ray: Any, waiting: dict[Any, int], count: int, progress: Callable[[int, int], None]) -> None:
    left = list(waiting)
    progress(0, count)
    while left:
        (reference,), left = ray.wait(left, num_returns=1)
        number = waiting[reference]
        try:
            answer = msgspec.msgpack.decode(ray.get(reference))
        except ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[0]
            raise SourceError(f"task {number}/{count} was lost {RETRIES} times and more: {first}") from error
        if "error" in answer:
            raise SourceError(f"task {number}/{count} on {answer['node']}: {answer['error']}")
        progress(count - len(left), count)


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise OptionError("Ray is not installed: pip install 'lfdata[ray]'") from error
    return ray
