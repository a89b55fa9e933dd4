"""What the plan pass looks at of a LeRobot data set: where episodes lie in the data files, and the bytes of their videos."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import SampleError
from shard_builder.sources.files import read_file, refuse_pointer, show, size_inside
from shard_builder.sources.lerobot_meta import Episode, Meta
from shard_builder.sources.lerobot_parquet import ParquetFile, dense

INDEX = ("episode_index", "frame_index", "timestamp", "index", "task_index")


class DataFile:
    """The index columns of one data file, and where its episodes begin and end."""

    def __init__(self, path: str = "", file: ParquetFile | None = None) -> None:
        self.path, self.row_bytes = path, 0
        self.columns: dict[str, NDArray[Any]] = {}
        self.runs: dict[int, list[tuple[int, int]]] = {}
        if file is None:
            return
        self.row_bytes = file.size // max(1, file.rows)
        table = file.read(INDEX)
        for name in INDEX:
            values = dense(table.column(name).combine_chunks(), (1,))
            if values is None:
                raise SampleError("columns", f"column {name!r} has nulls, or more than one value a row", path=show(path))
            self.columns[name] = values.reshape(-1)
        episodes = self.columns["episode_index"]
        edges = np.flatnonzero(np.diff(episodes)) + 1
        bounds = [0, *edges.tolist(), len(episodes)]
        for start, stop in itertools.pairwise(bounds):
            if start < stop:
                self.runs.setdefault(int(episodes[start]), []).append((start, stop))

    def check(self, episode: Episode, tasks: dict[int, str] | None) -> int:
        """The first row of an episode that is as ``meta`` says. Raises :class:`SampleError`."""
        runs = self.runs.get(episode.index, [])
        found = sum(stop - start for start, stop in runs)
        if found != episode.length:
            raise SampleError("episode-length", f"the file has {found} rows of the episode; meta says {episode.length}")
        if len(runs) > 1:
            raise SampleError("episode-split", f"the episode's rows lie in {len(runs)} places of the file")
        if not runs:
            return 0
        start, stop = runs[0]
        part = {name: column[start:stop] for name, column in self.columns.items()}
        if not np.array_equal(part["frame_index"], np.arange(stop - start)):
            raise SampleError("frame-index", f"frame_index does not count from 0 to {stop - start - 1}")
        times = part["timestamp"]
        if not np.isfinite(times).all() or not (np.diff(times) > 0).all():
            raise SampleError("timestamp", "the timestamps are not finite and ascending")
        if tasks is not None and (lacking := sorted(set(np.unique(part["task_index"]).tolist()) - set(tasks))):
            raise SampleError("no-task", f"task_index {lacking[0]} is not in meta/tasks")
        return start


class VideoSizes:
    """Bytes of video a frame, by file; every file is looked at once."""

    def __init__(self, root: Path, meta: Meta, cameras: Sequence[str]) -> None:
        self._root, self._meta, self._cameras = root, meta, cameras
        self._frames: dict[str, int] = {}
        self._found: dict[str, int | SampleError] = {}
        if self._meta.new and self._cameras:
            for ordinal in range(len(self._meta)):
                episode = self._meta.episode(ordinal)
                for camera in self._cameras:
                    path = episode.videos[camera].path
                    self._frames[path] = self._frames.get(path, 0) + episode.length

    def of(self, episode: Episode) -> int:
        """Bytes of video a frame of an episode. Raises :class:`SampleError` for a file that is missing or a Git LFS pointer."""
        total = 0
        for camera in self._cameras:
            path = episode.videos[camera].path
            if not self._meta.new:
                total += self._size(path) // max(1, episode.length)
                continue
            if path not in self._found:
                try:
                    self._found[path] = self._size(path) // max(1, self._frames[path])
                except SampleError as error:
                    self._found[path] = error
            size = self._found[path]
            if isinstance(size, SampleError):
                raise SampleError(size.code, size.reason, path=size.path)
            total += size
        return total

    def _size(self, path: str) -> int:
        size = size_inside(self._root, path)
        if size < 1024:
            refuse_pointer(read_file(self._root, path, 1024), path)
        return size
