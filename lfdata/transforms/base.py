"""What every transform is: a frozen record that says what it draws and what comes out of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError

Uniform = Callable[[str, int], NDArray[np.float64]]
"""(operation name, count) -> draws in [0, 1), float64 (n, count), for the n samples at hand."""

WHERE, VALUES, USER, BATCH = range(4)  # stages, in the order in which they may follow each other


@dataclass(frozen=True, slots=True)
class Declared:
    """What a value looks like: its dtype's name and its shape, ``None`` for a length that is not known ahead."""

    shape: tuple[int | None, ...]
    dtype: str

    @property
    def nbytes(self) -> int | None:
        """Bytes of one value, ``None`` where they are not known ahead."""
        known = [length for length in self.shape if length is not None]
        return math.prod(known) * np.dtype(self.dtype).itemsize if len(known) == len(self.shape) else None


class Transform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="transform"):
    """Base of all transforms. Equal ones are equal values; :func:`lfdata.transforms.to_spec` makes them JSON-able."""

    kinds: ClassVar[tuple[str, ...]] = ()  # kinds of field it is for; none: all
    stage: ClassVar[int] = USER

    @property
    def draws(self) -> int:
        """Uniform numbers it needs for one sample: always the same number."""
        return 0

    def declare(self, before: Declared) -> Declared:
        """What comes out when ``before`` goes in. Raises :class:`OptionError` for what it cannot take."""
        return before


def operation(place: int, transform: Transform) -> str:
    """Name under which a transform draws: ``place`` is its position in the field's list, so that the same class twice draws differently."""
    return f"{place}/{type(transform).__name__}"


def declared(transforms: Sequence[Transform], kind: str, before: Declared) -> Declared:
    """What comes out of a field's list of transforms.

    Args:
        kind: of the field: ``image``, ``audio``, ``tokens``, ...
        before: what the decoder gives, as (None, None, 3) and uint8 for colour pictures of any size.

    Raises:
        OptionError: a transform that is not for this kind of field, stands in the wrong place or cannot take what comes before it.
    """
    stage = WHERE
    for place, transform in enumerate(transforms):
        name = type(transform).__name__
        if transform.kinds and kind not in transform.kinds:
            raise OptionError(f"{name} (number {place}) is for fields of kind {' or '.join(transform.kinds)}, not {kind}")
        if transform.stage < stage:
            raise OptionError(
                f"{name} (number {place}) comes too late: first geometry or windows, then pixels or gain, then Map, "
                f"then MixUp, CutMix or Mosaic"
            )
        stage = transform.stage
        before = transform.declare(before)
    return before


def refuse(transform: Transform, option: str, value: object, wanted: str) -> OptionError:
    """The error for an option that makes no sense."""
    return OptionError(f"{type(transform).__name__}: {option} is {value!r}; it must be {wanted}")


def put(transform: Transform, option: str, value: Any) -> None:
    """Store the plain form of an option, while the transform is made."""
    msgspec.structs.force_setattr(transform, option, value)


def put_int(transform: Transform, option: str, low: int, high: int) -> None:
    """Check an integer option and store it as int."""
    put(transform, option, _int(transform, option, getattr(transform, option), low, high))


def put_float(transform: Transform, option: str, low: float, high: float, *, above: bool = False) -> None:
    """Check a number and store it as float; ``above``: ``low`` itself is refused."""
    put(transform, option, _float(transform, option, getattr(transform, option), low, high, above))


def put_choice(transform: Transform, option: str, choices: Sequence[object]) -> None:
    """Check an option that is one of a few values."""
    value = getattr(transform, option)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise refuse(transform, option, value, " or ".join(repr(choice) for choice in choices))


def put_size(transform: Transform, option: str = "size") -> None:
    """Store a size as (height, width); a number is a square."""
    value = getattr(transform, option)
    parts = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(parts) != 2:
        raise refuse(transform, option, value, "a number of pixels or (height, width)")
    put(transform, option, tuple(_int(transform, option, part, 1, 1 << 20) for part in parts))


def put_range(transform: Transform, option: str, low: float, high: float, *, above: bool = False) -> None:
    """Store a range as (smallest, largest), two floats."""
    value = getattr(transform, option)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise refuse(transform, option, value, "a pair (smallest, largest)")
    first, last = (_float(transform, option, part, low, high, above) for part in value)
    if first > last:
        raise refuse(transform, option, value, "a pair (smallest, largest), in this order")
    put(transform, option, (first, last))


def _int(transform: Transform, option: str, value: Any, low: int, high: int) -> int:
    wanted = f"an integer from {low} to {high}"
    if isinstance(value, bool):
        raise refuse(transform, option, value, wanted)
    try:
        found = operator.index(value)
    except TypeError:
        raise refuse(transform, option, value, wanted) from None
    if not low <= found <= high:
        raise refuse(transform, option, value, wanted)
    return found


def _float(transform: Transform, option: str, value: Any, low: float, high: float, above: bool) -> float:
    wanted = f"a number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
    if isinstance(value, bool | str | bytes):
        raise refuse(transform, option, value, wanted)
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise refuse(transform, option, value, wanted) from None
    if not low <= found <= high or (above and found == low):
        raise refuse(transform, option, value, wanted)
    return found
