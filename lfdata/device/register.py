"""The loader's slots, page-locked for copies."""

from __future__ import annotations

import resource
import warnings
import weakref
from typing import Any

from lfdata.device.backend import Backend
from lfdata.loader.slots import PAGE, Slots


class RegistrationWarning(UserWarning):
    """Host memory could not be locked: copies to the GPU are slower, and take the consumer's time."""


class Registered:
    """The mapping of some slots, known to the driver until :meth:`release`, or as long as this lives.

    Attributes:
        refused: why it is not, if it is not.
    """

    def __init__(self, backend: Backend, slots: Slots) -> None:
        self.slots, self._memory = slots, slots.memory()
        self._address, self.size = self._memory.ctypes.data, self._memory.nbytes
        self.refused = backend.register(self._address, self.size)
        # It holds the memory, which must not be unmapped before.
        self._end = None if self.refused else weakref.finalize(self, _undo, backend, self._address, self._memory)
        if self.refused:
            warnings.warn(self._advice(), RegistrationWarning, stacklevel=2)

    def _advice(self) -> str:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
        return (
            f"the loader's slots ({self.size:,} bytes) cannot be page-locked: {self.refused}. Copies to the GPU are made from pageable memory, "
            f"several times slower. The limit of locked memory (ulimit -l) is {limit}: raise it (docker: --ulimit memlock=-1; systemd: "
            "LimitMEMLOCK=infinity), or lower batch_size or prefetch"
        )

    def slot_of(self, address: int) -> int | None:
        """The number of the slot in which an address lies; ``None``: in none."""
        at = address - self._address - PAGE
        return at // self.slots.size if 0 <= at < self.slots.count * self.slots.size else None

    def release(self) -> None:
        """Undo the registration. Copies must be done."""
        if self._end is not None:
            self._end()


def _undo(backend: Backend, address: int, memory: Any) -> None:
    backend.finish()
    backend.unregister(address)
    del memory
