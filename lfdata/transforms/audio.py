"""Recordings: which frames are read, and how loud they are. Samples are int16 (frames, channels)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError
from lfdata.transforms.base import (
    VALUES,
    WHERE,
    Declared,
    Transform,
    Uniform,
    operation,
    put_choice,
    put_float,
    put_int,
    refuse,
)
from lfdata.transforms.portable import LN10, exp

Ints = NDArray[np.int64]

_CHUNK = 1 << 16  # samples made louder at a time


class AudioWindow(Transform, frozen=True):
    """``frames`` frames of a recording: from its start, or from a ``random`` place. A shorter one is followed by ``pad``."""

    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    stage: ClassVar[int] = WHERE

    frames: int
    random: bool = False
    pad: int = 0

    def __post_init__(self) -> None:
        put_int(self, "frames", 1, 1 << 40)
        put_choice(self, "random", (True, False))
        put_int(self, "pad", -32768, 32767)

    @property
    def draws(self) -> int:
        """One if random."""
        return int(self.random)

    def declare(self, before: Declared) -> Declared:
        """``frames`` frames, channels as before."""
        if not before.shape or before.dtype != "int16":
            raise OptionError(f"AudioWindow takes int16 frames, not {before.dtype} of shape {before.shape}")
        return Declared((self.frames, *before.shape[1:]), before.dtype)

    def window(self, lengths: Any, uniform: Uniform, place: int = 0) -> tuple[Ints, Ints]:
        """First frame and number of frames to read.

        Args:
            lengths: frames of the ``n`` recordings.
            uniform: gives the draws.
            place: position in the field's list.

        Returns:
            Starts and counts, int64 (n,); what a count lacks is padded at the end.
        """
        given: Ints = np.asarray(lengths, np.int64)
        counts = np.minimum(given, self.frames)
        if not self.random:
            return np.zeros_like(given), counts
        room = given - counts
        starts = (uniform(operation(place, self), 1)[:, 0] * (room + 1)).astype(np.int64)
        return np.minimum(starts, room), counts


class Gain(Transform, frozen=True):
    """Louder or quieter by decibels drawn evenly between two. Draws: one."""

    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    stage: ClassVar[int] = VALUES

    low_db: float = -6.0
    high_db: float = 6.0

    def __post_init__(self) -> None:
        put_float(self, "low_db", -120.0, 120.0)
        put_float(self, "high_db", -120.0, 120.0)
        if self.low_db > self.high_db:
            raise refuse(self, "low_db", self.low_db, f"at most high_db, which is {self.high_db}")

    @property
    def draws(self) -> int:
        """One."""
        return 1

    def declare(self, before: Declared) -> Declared:
        """As before."""
        if before.dtype != "int16":
            raise OptionError(f"Gain takes int16, not {before.dtype}")
        return before

    def apply(self, samples: NDArray[np.int16], u: NDArray[np.float64]) -> None:
        """Change int16 samples of any shape in place: rounded to the nearest, held at -32768 and 32767. ``u``: float64 (1,)."""
        if samples.dtype != np.int16:
            raise ValueError(f"Gain takes int16, not {samples.dtype}")
        factor = float(exp((self.low_db + float(u[0]) * (self.high_db - self.low_db)) * (LN10 / 20.0)))
        if factor == 1.0:
            return
        rows = max(1, _CHUNK // max(1, samples[:1].size))
        for start in range(0, len(samples), rows):
            part = samples[start : start + rows]
            louder = part * np.float64(factor)
            np.rint(louder, out=louder)
            part[...] = np.clip(louder, -32768, 32767, out=louder)
