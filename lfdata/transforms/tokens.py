"""Sequences of tokens brought to one length."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError
from lfdata.transforms.base import WHERE, Declared, Transform, Uniform, operation, put_choice, put_int

Ints = NDArray[np.int64]


class Tokens(Transform, frozen=True):
    """``length`` tokens of a sequence.

    Args:
        pad: token that fills up a shorter one.
        side: where it is filled up: ``right`` or ``left``.
        truncate: what a longer one loses: its ``tail``, its ``head``, or both ends at ``random``.
    """

    kinds: ClassVar[tuple[str, ...]] = ("tokens",)
    stage: ClassVar[int] = WHERE

    length: int
    pad: int = 0
    side: str = "right"
    truncate: str = "tail"

    def __post_init__(self) -> None:
        put_int(self, "length", 1, 1 << 40)
        put_int(self, "pad", -(1 << 63), (1 << 63) - 1)
        put_choice(self, "side", ("right", "left"))
        put_choice(self, "truncate", ("tail", "head", "random"))

    @property
    def draws(self) -> int:
        """One if random."""
        return int(self.truncate == "random")

    def declare(self, before: Declared) -> Declared:
        """``length`` tokens of the dtype as before."""
        if len(before.shape) != 1 or np.dtype(before.dtype).kind not in "iu":
            raise OptionError(f"Tokens takes a row of integers, not {before.dtype} of shape {before.shape}")
        limits = np.iinfo(before.dtype)
        if not limits.min <= self.pad <= limits.max:
            raise OptionError(f"Tokens: pad is {self.pad}; the field's {before.dtype} holds {limits.min} to {limits.max}")
        return Declared((self.length,), before.dtype)

    def place(self, lengths: Any, uniform: Uniform, place: int = 0) -> tuple[Ints, Ints]:
        """First token and number of tokens to read.

        Args:
            lengths: tokens of the ``n`` sequences.
            uniform: gives the draws.
            place: position in the field's list.

        Returns:
            Starts and counts, int64 (n,).
        """
        given: Ints = np.asarray(lengths, np.int64)
        counts = np.minimum(given, self.length)
        room = given - counts
        if self.truncate == "tail":
            return np.zeros_like(given), counts
        if self.truncate == "head":
            return room, counts
        starts = (uniform(operation(place, self), 1)[:, 0] * (room + 1)).astype(np.int64)
        return np.minimum(starts, room), counts
