"""The loader inside torch's DataLoader or torchdata's StatefulDataLoader, for trainers that insist on one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lfdata.errors import OptionError, StateError
from lfdata.loader.given import this_rank
from lfdata.loader.loader import Loader
from lfdata.loader.options import MOST_EPOCHS, default_threads, path, whole
from lfdata.loader.trace import Trace, beside

Batch = dict[str, torch.Tensor]


class LoaderDataset(IterableDataset[Batch]):
    """The batches of a :class:`lfdata.Loader`, in its order, out of the workers of a DataLoader with ``batch_size=None``.

    Worker w of n makes steps w, w + n, ... by itself; DataLoader takes from the workers in turn, which is the loader's order. Inside
    torchdata's ``StatefulDataLoader`` its state continues at the same step with the same number of workers. The epoch does not go on by
    itself: call :meth:`set_epoch` before each, as with torch's ``DistributedSampler``. :class:`lfdata.Loader` alone is faster.

    Args:
        source, batch_size, options: those of :class:`lfdata.Loader`, but for ``engine``, ``processes`` and ``prefetch``: the workers are
            the engine. ``threads`` and ``max_bytes`` are of each worker; by default these share the rank's cores. ``trace`` is of the
            last iteration begun, of several workers in files of their own: ``trace-worker1.json``.

    Raises:
        OptionError: options that make no sense; those about data raise when the iteration begins.
    """

    def __init__(self, source: Any, batch_size: int, fields: Any = None, **options: Any) -> None:
        super().__init__()
        if taken := sorted({"engine", "processes", "prefetch"} & set(options)):
            raise OptionError(
                f"{', '.join(taken)}: the DataLoader's workers do the work; give it num_workers and prefetch_factor"
            )
        rank, world = this_rank(options.pop("rank", None), options.pop("world_size", None))
        # Known here: a worker may not see the process group.
        self._options = {
            **options,
            "source": source,
            "batch_size": batch_size,
            "fields": fields,
            "rank": rank,
            "world_size": world,
        }
        # In shared memory, so that workers that stay for several epochs see it.
        self._epoch: torch.Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        # Of the iteration begun last in this process, which may be under way.
        self._traced: weakref.ref[Trace] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_traced": None}

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration gives."""
        self._epoch.fill_(whole("epoch", epoch, 0, MOST_EPOCHS))

    def __len__(self) -> int:
        """Batches of the epoch, of all workers."""
        return self._length(Loader(**{**self._options, "trace": None}, engine="inline"))

    def _length(self, loader: Loader) -> int:
        loader.set_epoch(int(self._epoch))
        return len(loader)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        inner = {"accumulate": self._options.get("accumulate", 1) > 1, "over='split'": self._options.get("over") == "split"}
        if workers > 1 and any(inner.values()):
            what = next(name for name, wanted in inner.items() if wanted)
            raise OptionError(f"{what} with several workers: batches of a step would come out of order; use one worker")
        options = dict(self._options)
        if options.get("threads") is None:
            options["threads"] = max(1, default_threads(options["world_size"]) // workers)
        if options.get("trace") is not None and workers > 1:
            options["trace"] = beside(path("trace", options["trace"]), f"worker{worker}")
        if self._traced is not None and (before := self._traced()) is not None:
            before.close()
        loader = Loader(**options, engine="inline", _steps=(worker, workers))
        self._traced = None if loader._trace is None else weakref.ref(loader._trace)
        loader.set_epoch(int(self._epoch))
        return Steps(loader, worker, workers)


class Steps(Iterator[Batch]):
    """A worker's batches of one epoch, with the state that StatefulDataLoader asks for."""

    def __init__(self, loader: Loader, worker: int, workers: int) -> None:
        self._loader, self._worker, self._workers = loader, worker, workers
        self._batches: Iterator[Batch] | None = None
        self._last: dict[str, Any] | None = None

    def __next__(self) -> Batch:
        if self._last is not None:
            raise StopIteration
        if self._batches is None:
            self._batches = iter(self._loader)
        epoch = self._loader.epoch
        try:
            return next(self._batches)
        except StopIteration:
            # The loader stands before its next epoch now; this iteration is still at the end of its own.
            self._last = self._loader.end_of(epoch)
            self._loader.close()
            raise

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`lfdata.Loader.state_dict`; ``samples`` are of the worker's own steps."""
        return {
            "worker": self._worker,
            "workers": self._workers,
            "loader": self._loader.state_dict() if self._last is None else self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same worker of as many. Raises :class:`StateError`."""
        if not isinstance(state, Mapping) or not isinstance(state.get("loader"), Mapping):
            raise StateError(f"not a state of a LoaderDataset: {state!r:.200}")
        theirs = state.get("worker"), state.get("workers")
        if theirs != (self._worker, self._workers):
            raise StateError(
                f"the state is of worker {theirs[0]} of {theirs[1]}, this is worker {self._worker} of {self._workers}; "
                "the number of workers must stay (lfdata.Loader alone has no such limit)"
            )
        self._loader.load_state_dict(state["loader"])
        self._batches = self._last = None
        if self._loader.epoch != state["loader"]["epoch"]:
            # The end of an epoch: this iteration has nothing left.
            self._last = dict(state["loader"])
