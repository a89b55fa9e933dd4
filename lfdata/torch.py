"""An iterable data set for torch's DataLoader, in stored order.

Order, shuffling, resume and decoding into reserved memory are the loader's business; this is the plain way in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lfdata.dataset import ShardDataset
from lfdata.errors import OptionError
from lfdata.storage import Cache

# Samples read at a time: enough to join neighbouring reads, few enough to keep memory and latency low.
READ_SAMPLES = 32


class ShardIterableDataset(IterableDataset[Any]):
    """Every sample of a data set once, split over ranks and DataLoader workers by rows, so more workers than shards or samples are fine.

    With ``num_workers`` 0 or 1 the order is the data set's. Pickled as path and options only; works with fork, spawn and forkserver.

    Args:
        path: the data set.
        fields: names of the fields samples carry; all by default.
        transform: called with each sample (a dict, see :meth:`ShardDataset.__getitem__`) in the worker.
        cache: of a data set by URL, see :class:`ShardDataset`.
        rank, world_size: this process's share: rows ``len * rank // world_size`` to ``len * (rank + 1) // world_size``.
    """

    def __init__(
        self,
        path: str | Path,
        fields: Sequence[str] | None = None,
        *,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        cache: Cache | str | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= rank < world_size:
            raise OptionError(f"rank {rank} is not in 0 to {world_size - 1}")
        self.dataset = ShardDataset(path, fields, cache=cache)
        self.transform = transform
        self._first = len(self.dataset) * rank // world_size
        self._stop = len(self.dataset) * (rank + 1) // world_size

    def __len__(self) -> int:
        return self._stop - self._first

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        # Runs are dealt to the workers in turn; short data sets get short runs, so that every worker has its share.
        run = max(1, min(READ_SAMPLES, len(self) // workers))
        for start in range(self._first + worker * run, self._stop, workers * run):
            for sample in self.dataset.__getitems__(range(start, min(start + run, self._stop))):
                yield sample if self.transform is None else self.transform(sample)
