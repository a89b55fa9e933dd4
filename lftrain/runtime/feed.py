"""Where a step's micro-batches come from: epoch after epoch of a loader, on the device, ahead on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lfdata import DeviceLoader, Loader
from lfdata.errors import OptionError
from lftrain.errors import ConfigError

Batch = dict[str, torch.Tensor]
# Which samples a batch holds, as lfdata.Loader says; and where their values begin.
_SAMPLES, _OFFSETS = ("__index__", "__source__"), ".offsets"
# And which part of a batch it is, row by row: the number of the part, and parts there are.
_PART = "__part__"


class LoaderLike(Protocol):
    """What the runtime needs of a loader; ``lfdata.Loader`` is one."""

    def __iter__(self) -> Iterator[Batch]:
        """One epoch, from a loaded state on if one was loaded."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the batch just yielded counts as consumed."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        ...


@dataclass
class Step:
    """The micro-batches of one step, and where the loader is after them.

    Attributes:
        batches: on the device. host: the same before they were copied there (on CPU the same tensors); of a loader that says which samples
            they are, on a GPU only that, so that the loader's memory is free again.
        state: of the loader, once this step's batches are consumed.
        epoch: of its last batch, counted from 0 where the loader does not say.
        copied: when the copies are done; ``None`` where nothing was copied.
    """

    batches: list[Batch]
    host: list[Batch]
    state: dict[str, Any]
    epoch: int
    copied: torch.cuda.Event | None = None


class Feed:
    """Steps without end: after an epoch comes the next. ``accumulate`` batches of the loader are a step; one that comes in parts
    (``Loader(over="split")``) counts once, with all of them.

    ``ahead``: batches of a :class:`lfdata.Loader` that are copied to a GPU ahead; 0: as those of other loaders are, a step ahead by way of
    torch's pinned memory.
    """

    def __init__(self, loader: LoaderLike, accumulate: int, device: torch.device, ahead: int = 0) -> None:
        self._own = None
        if device.type == "cuda" and ahead and isinstance(loader, Loader):
            loader = self._own = DeviceLoader(loader, device, ahead=ahead, hold=accumulate)
        self._loader, self._accumulate, self._device = loader, accumulate, device
        self._epoch: Iterator[Batch] | None = None
        self._number = 0
        self._ahead: Step | None = None
        self._failed: Exception | None = None
        moved = device.type == "cuda" and not isinstance(loader, DeviceLoader)
        self._side = torch.cuda.Stream(device) if moved else None

    def next(self) -> Step:
        """The next step; waits for the loader. On a GPU its copies may still be under way: see :meth:`arrive`. Raises what making it raises."""
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error
        step, self._ahead = self._ahead, None
        return step if step is not None else self._take()

    def arrive(self, step: Step) -> None:
        """The current stream waits for a step's copies."""
        if step.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(step.copied)
            for batch in step.batches:
                for value in batch.values():
                    value.record_stream(stream)

    def peek(self) -> Step:
        """The step that :meth:`next` will give."""
        if self._ahead is None:
            self._ahead = self._take()
        return self._ahead

    def look_ahead(self) -> None:
        """Take and copy the step after, while the device works on this one. Does nothing on CPU, where that would only hold memory, and for a
        :class:`lfdata.DeviceLoader`, which does it itself. An error in it is raised by :meth:`next`, in its turn."""
        if self._side is not None and self._ahead is None and self._failed is None:
            try:
                self._ahead = self._take()
            except Exception as error:
                self._failed = error

    def load_state_dict(self, state: Mapping[str, Any], allow_batch_change: bool = False) -> None:
        """Go on from a step's ``state``; if that is allowed, of a :class:`lfdata.Loader` with another batch size."""
        self._epoch, self._ahead, self._failed = None, None, None
        if isinstance(self._loader, Loader | DeviceLoader):
            self._loader.load_state_dict(state, allow_batch_change=allow_batch_change)
        elif allow_batch_change:
            raise ConfigError(
                f"checkpoint.allow_batch_change is an option of lfdata.Loader, and the loader is a {type(self._loader).__name__}"
            )
        else:
            self._loader.load_state_dict(state)
        self._number = int(state.get("epoch", 0))

    def close(self) -> None:
        """Leave the loader's iteration, free what was made here."""
        self._epoch, self._ahead = None, None
        if self._own is not None:
            self._own.close()

    def _take(self) -> Step:
        host, batches = [], []
        for _ in range(self._accumulate):
            while True:
                batches.append(self._batch())
                host.append(self._loader.rows if isinstance(self._loader, DeviceLoader) else batches[-1])
                if _ends(host[-1]):
                    break
        state = self._loader.state_dict()
        epoch = getattr(self._loader, "epoch", self._number)
        if self._side is None:
            return Step(batches, host, state, epoch)
        with torch.cuda.stream(self._side):
            batches = [
                {name: value.pin_memory().to(self._device, non_blocking=True) for name, value in batch.items()}
                for batch in host
            ]
            copied = torch.cuda.Event()
            copied.record(self._side)
        return Step(batches, [_samples(batch) for batch in host], state, epoch, copied)

    def _batch(self) -> Batch:
        # A state at the very end of an epoch may give an empty one first.
        for _ in range(3):
            if self._epoch is None:
                self._epoch = iter(self._loader)
            batch = next(self._epoch, None)
            if batch is not None:
                return batch
            self._epoch = None
            self._number += 1
        raise OptionError("the loader gives no batch in a whole epoch: the data set has fewer samples than data.batch_size")


def _ends(rows: Batch) -> bool:
    """Whether a batch is whole, or the last of its parts."""
    if _PART not in rows:
        return True
    number, parts = rows[_PART][0].tolist()
    return bool(number + 1 == parts)


def _samples(batch: Batch) -> Batch:
    """What is asked of a batch after it was copied."""
    if "__index__" not in batch:
        return batch
    return {name: value.clone() for name, value in batch.items() if name in _SAMPLES or name.endswith(_OFFSETS)}
