"""A callable of the user's, known by its import name, with a declared result."""

from __future__ import annotations

import importlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError, SampleError, text_of
from lfdata.transforms.base import Declared, Transform, put, put_choice, refuse

DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
# numpy 1 has arrays of up to 32 dimensions, and a batch has some more than a row.
MOST_DIMENSIONS, LONGEST = 28, 1 << 40
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
        if len(shape) > MOST_DIMENSIONS or not all(type(length) is int and 0 <= length <= LONGEST for length in shape):
            wanted = f"a tuple of up to {MOST_DIMENSIONS} lengths, 0 to {LONGEST}, known ahead"
            raise refuse(self, "shape", self.shape, wanted)
        put(self, "shape", tuple(shape))
        try:
            dtype = "" if self.dtype is None else np.dtype(self.dtype).name
        except (TypeError, ValueError, SyntaxError):
            dtype = ""
        if dtype not in DTYPES:
            raise refuse(self, "dtype", self.dtype, f"a dtype that torch has too: {', '.join(DTYPES)}")
        put(self, "dtype", dtype)
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
        except BaseException as error:
            # Whatever it raises is the sample's failure, sys.exit() too; only Ctrl-C is meant for somebody else.
            if isinstance(error, KeyboardInterrupt) and ctrl_c():
                raise
            raise SampleError("user", f"{self.function} raised {type(error).__name__}: {text_of(error)}") from error
        if found.shape != self.shape or found.dtype != self.dtype:
            reason = (
                f"{self.function} gave {found.dtype} of shape {found.shape}; declared is {self.dtype} of shape {self.shape}"
            )
            raise SampleError("user-result", reason)
        return found


# Whether Ctrl-C came while functions of the user's were called in the main thread; ``None``: nobody looks.
_came: bool | None = None


@contextmanager
def watching_for_ctrl_c() -> Iterator[None]:
    """Around calls of functions: tells Ctrl-C from a KeyboardInterrupt that one of them raises by itself."""
    global _came
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None or _came is not None:
        yield
        return
    if not callable(handler):
        # Ignored, as for a job in the background, or the end of the process: no exception comes of it.
        _came = False
        try:
            yield
        finally:
            _came = None
        return

    def noted(number: int, frame: FrameType | None) -> Any:
        global _came
        _came = True
        return handler(number, frame)

    try:
        _came = False
        signal.signal(signal.SIGINT, noted)
        yield
    finally:
        _came = None
        if signal.getsignal(signal.SIGINT) is noted:
            signal.signal(signal.SIGINT, handler)


def ctrl_c() -> bool:
    """Whether a KeyboardInterrupt in this thread may be the user's: signals reach the main thread only."""
    return threading.current_thread() is threading.main_thread() and _came is not False


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
    except (Exception, SystemExit) as error:
        raise OptionError(f"Map: {reference} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise OptionError(f"Map: {reference} is not a function")
    return found  # type: ignore[no-any-return]
