"""A callable of the user's, known by its import name, with a declared result."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError, SampleError
from lfdata.transforms.base import Declared, Transform, put, put_choice, refuse

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class Map(Transform, frozen=True):
    """Calls a function of yours with each value; it returns an array of the declared shape and dtype.

    With ``random`` it is called with a second argument, a :class:`numpy.random.Generator` that belongs to the sample. A function
    that draws from anywhere else gives other bytes after a resume.

    Args:
        function: ``"module:name"``, or a function that can be imported from a module. It must be importable in the decoder's process.
        shape: of its result.
        dtype: of its result: a number type.
        random: whether it takes a generator. Draws: two, which seed the generator.

    Raises:
        OptionError: a lambda, a function within a function, one of the script itself (``__main__``), a bound method, a partial.
    """

    function: Any
    shape: tuple[int, ...]
    dtype: str
    random: bool = False

    def __post_init__(self) -> None:
        put(self, "function", _reference(self, self.function))
        shape = self.shape if isinstance(self.shape, tuple | list) else (self.shape,)
        if not all(type(length) is int and length >= 0 for length in shape):
            raise refuse(self, "shape", self.shape, "a tuple of lengths, known ahead")
        put(self, "shape", tuple(shape))
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            raise refuse(self, "dtype", self.dtype, "a dtype of numbers") from None
        if dtype.kind not in "biufc":
            raise refuse(self, "dtype", self.dtype, "a dtype of numbers")
        put(self, "dtype", dtype.name)
        put_choice(self, "random", (True, False))

    @property
    def draws(self) -> int:
        """Two if random."""
        return 2 if self.random else 0

    def declare(self, before: Declared) -> Declared:
        """The declared shape and dtype, whatever went in."""
        del before
        return Declared(self.shape, self.dtype)

    def resolve(self) -> Callable[..., Any]:
        """The function. Raises :class:`OptionError` if it cannot be imported here."""
        return _import(self.function)

    def apply(self, value: Any, u: NDArray[np.float64]) -> NDArray[Any]:
        """Call the function.

        Args:
            value: what the decoder or the transform before gives.
            u: float64 (draws,).

        Raises:
            SampleError: ``user``: the function raised; ``user-result``: its result is not as declared.
        """
        function = self.resolve()
        try:
            found = np.asarray(function(value, generator(u)) if self.random else function(value))
        except Exception as error:
            raise SampleError("user", f"{self.function} raised {type(error).__name__}: {error}") from error
        if found.shape != self.shape or found.dtype != self.dtype:
            reason = (
                f"{self.function} gave {found.dtype} of shape {found.shape}; declared is {self.dtype} of shape {self.shape}"
            )
            raise SampleError("user-result", reason)
        return found


def generator(u: NDArray[np.float64]) -> np.random.Generator:
    """A generator (Philox) that two draws seed."""
    first, second = (int(value * 2.0**53) for value in u[:2])
    return np.random.Generator(np.random.Philox(key=first << 64 | second))


def _reference(op: Map, function: Any) -> str:
    if isinstance(function, str):
        if not _NAME.fullmatch(function):
            raise refuse(op, "function", function, '"module:name"')
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or not isinstance(module, str) or not isinstance(name, str):
        raise refuse(op, "function", function, 'a function of a module, or "module:name"')
    if "<lambda>" in name or "<locals>" in name:
        raise OptionError(
            f"Map: {module}:{name} has no name that another process could import; define it with def at the top of a module"
        )
    if module == "__main__":
        raise OptionError(
            f"Map: {name} is defined in the script itself, which another process cannot import; move it into a module"
        )
    try:
        same = _import(f"{module}:{name}") is function
    except OptionError:
        same = False
    if not same:
        raise OptionError(
            f"Map: importing {module}:{name} does not give {function!r}; give a function that its module has under its name"
        )
    return f"{module}:{name}"


@lru_cache(maxsize=256)
def _import(reference: str) -> Callable[..., Any]:
    module, _, name = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"Map: {reference} cannot be imported: {error}") from error
    if not callable(found):
        raise OptionError(f"Map: {reference} is not a function")
    return found  # type: ignore[no-any-return]
