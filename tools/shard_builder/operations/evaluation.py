"""What a parsed ``--where`` expression does with columns: numbers, texts, and truth with a third value for what is absent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
KEY_TESTS: dict[str, Callable[[bytes, bytes], bool]] = {
    "startswith": bytes.startswith,
    "endswith": bytes.endswith,
    "contains": bytes.__contains__,
}
_LARGE = float(1 << 63)


class Columns(Protocol):
    """What an expression is evaluated over: some rows of a data set."""

    rows: int

    def column(self, name: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Values of a column and where they are present. Raises :class:`lfdata.errors.KeyMissingError`."""
        ...

    def present(self, field: str) -> NDArray[np.bool_]:
        """Where a field is present. Raises :class:`lfdata.errors.KeyMissingError`."""
        ...

    def keys(self) -> list[bytes]:
        """The keys."""
        ...


@dataclass(frozen=True, slots=True)
class Value:
    """Numbers, or the key; ``known`` says where they are there (``None``: everywhere)."""

    data: Any
    known: NDArray[np.bool_] | None = None
    key: bool = False


@dataclass(frozen=True, slots=True)
class Truth:
    """Where it is true, and where it is false; elsewhere it is unknown."""

    true: NDArray[np.bool_]
    false: NDArray[np.bool_]


Node = Callable[[Columns], Any]


def constant(value: int | float | bytes) -> Node:
    """A number or a text."""
    return lambda _columns: Value(value)


def _both(a: NDArray[np.bool_] | None, b: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    return b if a is None else a if b is None else a & b


def _numbers(value: Value) -> Any:
    """Operands of arithmetic: int64 or float64, so that 32-bit columns do not wrap."""
    if value.key or isinstance(value.data, bytes):
        raise OptionError("--where: a text or key is no number")
    if isinstance(value.data, int | float):
        return value.data
    data = value.data
    if data.dtype.kind == "f":
        return data.astype(np.float64)
    if data.dtype == np.uint64 and data.size and int(data.max()) >= 1 << 63:
        raise OptionError("--where: a number of 2^63 or more in arithmetic; compare the column as it is")
    return data.astype(np.int64)


def arithmetic(first: Node, rest: Sequence[tuple[str, Node]]) -> Node:
    """Numbers joined by signs, from the left. 64-bit integers that would wrap are refused."""

    def node(columns: Columns) -> Value:
        found: Value = first(columns)
        for sign, other in rest:
            found = _joined(sign, found, other(columns))
        return found

    return node if rest else first


def _joined(sign: str, a: Value, b: Value) -> Value:
    x, y = _numbers(a), _numbers(b)
    known = _both(a.known, b.known)
    if sign in "/%":
        zero = np.asarray(y) == 0
        if (zero if known is None else zero & known).any():
            raise OptionError(f"--where: a division by zero (in {sign!r})")
        y = np.where(zero, 1, y)
    with np.errstate(all="ignore"):
        if sign == "/":
            return Value(np.asarray(x, np.float64) / y, known)
        _refuse_overflow(sign, x, y, known)
        function = {"+": np.add, "-": np.subtract, "*": np.multiply, "%": np.mod}[sign]
        return Value(function(x, y), known)


def _refuse_overflow(sign: str, x: Any, y: Any, known: NDArray[np.bool_] | None) -> None:
    if sign == "%" or any(np.asarray(item).dtype.kind == "f" for item in (x, y)):
        return
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    size = np.abs(a * b) if sign == "*" else np.abs(a) + np.abs(b)
    beyond = size >= _LARGE
    if (beyond if known is None else beyond & known).any():
        raise OptionError(
            "--where: a result of 2^63 or more; write one of the numbers with a point, such as 2.0, for floating point"
        )


def compare(sign: str, left: Node, right: Node) -> Node:
    """Two values compared."""

    def node(columns: Columns) -> Truth:
        a, b = left(columns), right(columns)
        texts = [value.key or isinstance(value.data, bytes) for value in (a, b)]
        if any(texts):
            if not all(texts) or sign not in ("==", "!=", "<", "<=", ">", ">="):
                raise OptionError("--where: a key is compared with a text in quotes, a number with numbers")
            found = _compare_texts(sign, a, b, columns.rows)
        else:
            found = np.broadcast_to(COMPARE[sign](a.data, b.data), (columns.rows,))
        known = _both(a.known, b.known)
        return Truth(found if known is None else found & known, ~found if known is None else ~found & known)

    return node


def _compare_texts(sign: str, a: Value, b: Value, rows: int) -> NDArray[np.bool_]:
    lefts = a.data if a.key else [a.data] * rows
    rights = b.data if b.key else [b.data] * rows
    tests: dict[str, Callable[[bytes, bytes], bool]] = {
        "==": bytes.__eq__,
        "!=": bytes.__ne__,
        "<": bytes.__lt__,
        "<=": bytes.__le__,
        ">": bytes.__gt__,
        ">=": bytes.__ge__,
    }
    return np.fromiter((tests[sign](x, y) for x, y in zip(lefts, rights, strict=True)), bool, rows)


def key_test(word: str, left: Node, text: bytes) -> Node:
    """A test of the key."""

    def node(columns: Columns) -> Truth:
        value = left(columns)
        if not value.key:
            raise OptionError(f"--where: {word} is for key")
        found = np.fromiter((KEY_TESTS[word](key, text) for key in value.data), bool, columns.rows)
        return Truth(found, ~found)

    return node


def either(nodes: Sequence[Node]) -> Node:
    """``or``."""

    def node(columns: Columns) -> Truth:
        found: Truth = nodes[0](columns)
        for other in nodes[1:]:
            more = other(columns)
            found = Truth(found.true | more.true, found.false & more.false)
        return found

    return node


def both(nodes: Sequence[Node]) -> Node:
    """``and``."""

    def node(columns: Columns) -> Truth:
        found: Truth = nodes[0](columns)
        for other in nodes[1:]:
            more = other(columns)
            found = Truth(found.true & more.true, found.false | more.false)
        return found

    return node


def inverse(inner: Node) -> Node:
    """``not``."""

    def node(columns: Columns) -> Truth:
        found = inner(columns)
        return Truth(found.false, found.true)

    return node
