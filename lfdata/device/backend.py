"""Streams, events and memory of a device, as far as the device path needs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from lfdata.errors import DeviceError, LimitError, OptionError

log = logging.getLogger("lfdata")
Pair = tuple[torch.Tensor, torch.Tensor]


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has come there."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class Backend(Protocol):
    """A device with a stream of its own for copies. The consumer's streams are whatever was current when it asked."""

    device: torch.device

    def memory(self, size: int) -> torch.Tensor:
        """uint8 (size,) on the device, for the stream of copies. Raises :class:`LimitError`."""
        ...

    def lend(self, memory: torch.Tensor, size: int) -> tuple[torch.Tensor, object]:
        """The first ``size`` bytes as a tensor with a storage of its own, and its owner: who lives as long as any view of it."""
        ...

    def copy(self, pairs: Sequence[Pair], work: Callable[[], None] | None = None) -> None:
        """Copy on the stream of copies: (target on the device, source on the host), and have work done there then. Sources must stay as they
        are until that is done."""
        ...

    def record(self) -> Event:
        """Where the stream of copies is."""
        ...

    def wait(self, event: Event) -> None:
        """The stream of copies waits."""
        ...

    def consumer(self) -> Any:
        """The stream that is current."""
        ...

    def note(self, consumer: Any, timed: bool = False) -> Event:
        """Where a consumer's stream is."""
        ...

    def hold(self, consumer: Any, event: Event) -> None:
        """A consumer's stream waits."""
        ...

    def used(self, memory: torch.Tensor, consumer: Any) -> None:
        """A consumer's stream works on memory: if it is freed, not before that is done."""
        ...

    def seconds(self, before: Event, after: Event) -> float:
        """Between two timed events that have come."""
        ...

    def finish(self) -> None:
        """Wait for all copies."""
        ...

    def register(self, address: int, size: int) -> str:
        """Lock host memory for copies; why that was refused, if it was."""
        ...

    def unregister(self, address: int) -> None:
        """Undo that."""
        ...


class _Owner:
    """Says where memory is; torch keeps it as long as the storage it makes of it."""

    def __init__(self, memory: torch.Tensor, size: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


class CudaBackend:
    """CUDA through torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Before the consumer's kernels: what it does is short, and awaited.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def memory(self, size: int) -> torch.Tensor:
        try:
            # Whatever mode the consumer is in when the ring is made or grows: others write here later.
            with torch.inference_mode(False), torch.cuda.stream(self._stream):
                return torch.empty(size, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            reason = f"{size:,} bytes for a batch are not there. Lower ahead or max_bytes of the DeviceLoader, or batch_size"
            raise LimitError(f"GPU memory ({self.device})", None, reason) from error

    def lend(self, memory: torch.Tensor, size: int) -> tuple[torch.Tensor, object]:
        owner = _Owner(memory, size)
        return torch.as_tensor(owner, device=self.device), owner

    def copy(self, pairs: Sequence[Pair], work: Callable[[], None] | None = None) -> None:
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            if work is not None:
                work()

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)  # type: ignore[arg-type]

    def consumer(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def note(self, consumer: Any, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(consumer)
        return event

    def hold(self, consumer: Any, event: Event) -> None:
        consumer.wait_event(event)

    def used(self, memory: torch.Tensor, consumer: Any) -> None:
        memory.record_stream(consumer)

    def seconds(self, before: Event, after: Event) -> float:
        return float(before.elapsed_time(after)) / 1e3  # type: ignore[attr-defined]

    def finish(self) -> None:
        self._stream.synchronize()

    def register(self, address: int, size: int) -> str:
        with torch.cuda.device(self.device):
            why = _why(torch.cuda.cudart().cudaHostRegister(address, size, 0))
            if why:
                self._forget_error()
            return why

    def _forget_error(self) -> None:
        """CUDA gives the error of a call once more to whoever launches the next kernel: let that be this one."""
        try:
            torch.ones(1, device=self.device)
        except RuntimeError:
            torch.ones(1, device=self.device)

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.device):
            if why := _why(torch.cuda.cudart().cudaHostUnregister(address)):
                self._forget_error()
                log.warning("host memory stays page-locked: %s", why)


def _why(result: Any) -> str:
    """What a call of CUDA says, if it failed."""
    code, cudart = int(result), torch.cuda.cudart()
    return f"{cudart.cudaGetErrorString(cudart.cudaError(code))} (CUDA error {code})" if code else ""


def backend_of(device: torch.device | str) -> Backend | None:
    """``None``: the CPU, to which nothing is copied.

    Raises:
        OptionError, DeviceError: a kind of device that is not known; a GPU that is not there.
    """
    try:
        if not isinstance(device, torch.device | str | int) or isinstance(device, bool):
            raise TypeError("the name of a device is wanted, 'cuda' or 'cpu'")
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device {device!r}: {error}") from error
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise OptionError(f"device {str(device)!r}; there are cpu and cuda")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device {str(device)!r} was asked for, and torch {torch.__version__} finds no GPU. Use device='cpu', or look with nvidia-smi"
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise DeviceError(f"device {str(device)!r} was asked for; there are {torch.cuda.device_count()} GPUs, from cuda:0 on")
    return CudaBackend(device)
