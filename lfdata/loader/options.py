"""What may be asked of a loader: options checked, and brought to the plain values that travel to a decoder process."""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

import lfdata.transforms as T
from lfdata.errors import OptionError
from lfdata.order.mixture import EXHAUSTION, MAX_BLOCK
from lfdata.order.packing import MAX_WINDOW, TOO_LONG
from lfdata.order.permutation import MAX_SAMPLES

# Torch's own limit of a wait: it must fit into an int of milliseconds.
MOST_SECONDS = 1_000_000
MOST_WORLD = 1 << 20
MOST_THREADS = 4096
MOST_AHEAD = 1 << 16
# Some are looked ahead, and all are 64 bits in shared memory.
MOST_EPOCHS = (1 << 62) - 1
MOST_BYTES = (1 << 63) - 1
UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power for unit, base in (("B", 1000), ("iB", 1024)) for power, prefix in enumerate("KMGT", 1)
}
_MOST_WEIGHT = 1 << 63

Path_ = str | os.PathLike[str]


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number, whatever integer type it has. Raises :class:`OptionError`."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not low <= found <= high:
        raise OptionError(f"{name} is a whole number from {low} to {high}, not {value!r}")
    return found


def real(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """A number, whatever type it has: an int stays one. ``above``: more than ``low``. Raises :class:`OptionError`."""
    plain: Any = value.tolist() if isinstance(value, np.generic) else value
    found: float = math.nan
    if isinstance(plain, Real | Decimal) and not isinstance(plain, bool):
        with suppress(ArithmeticError):
            found = int(plain) if isinstance(plain, Integral) else float(plain)
    if (found > low if above else found >= low) and found <= high:
        return found
    raise OptionError(f"{name} is a number {'above' if above else 'from'} {low:g} up to {high:g}, not {value!r}")


def size(name: str, value: Any, low: int) -> int:
    """Bytes: a whole number, or text such as ``"1.5GiB"`` or ``"800MB"``. Raises :class:`OptionError`."""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d{1,19}(?:\.\d{1,19})?) ?([KMGT]i?B|B|)", value.strip(), re.ASCII)
        if found is None:
            raise OptionError(f"{name} is a number of bytes, such as 4_000_000_000, '4GB' or '3.5GiB', not {value!r}")
        value = int(Decimal(found[1]) * UNITS[found[2]])
    return whole(name, value, low, MOST_BYTES)


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some words. Raises :class:`OptionError`."""
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False. Raises :class:`OptionError`."""
    if not isinstance(value, bool | np.bool_):
        raise OptionError(f"{name} is True or False, not {value!r}")
    return bool(value)


def path(name: str, value: Any) -> str:
    """A path as text. Raises :class:`OptionError`."""
    if not isinstance(value, str | os.PathLike) or not isinstance(found := os.fspath(value), str) or "\0" in found:
        raise OptionError(f"{name} is a path, not {value!r}")
    return found


def several(name: str, value: Any, of: str) -> list[Any]:
    """The elements of a sequence that is no text. Raises :class:`OptionError`."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise OptionError(f"{name} is a sequence of {of}, not {value!r}")
    return list(value)


def sources(value: Any) -> list[Path_]:
    """Paths or URLs of the data sets."""
    paths = [value] if isinstance(value, str | os.PathLike) else several("source", value, "paths or URLs, or one of them")
    if not paths:
        raise OptionError("source is an empty sequence: give at least one data set")
    for one in paths:
        if not path("source", one):
            raise OptionError("source is empty text: give the directory or URL of a data set")
    return paths


def named(fields: Any, default: Sequence[str]) -> dict[str, list[Any]]:
    """The transforms of each field."""
    if fields is None:
        return {name: [] for name in default}
    wanted = "names of fields, or a mapping from names to lists of transforms"
    given = dict(fields) if isinstance(fields, Mapping) else [(name, None) for name in several("fields", fields, wanted)]
    found = {}
    for name, ops in given.items() if isinstance(given, dict) else given:
        if not isinstance(name, str):
            raise OptionError(f"fields holds {name!r}; it is {wanted}")
        found[name] = [] if ops is None else transforms(f"fields[{name!r}]", ops)
    return found


def transforms(name: str, given: Any) -> list[Any]:
    """A list of transforms, as :func:`lfdata.transforms.to_spec` writes them."""
    return T.to_spec(several(name, given, "transforms (lfdata.transforms)"))


def trace(value: Any) -> Path | None:
    """A file that can be written as far as that is known before anything is done."""
    if value is None:
        return None
    file = Path(path("trace", value))
    if not file.parent.is_dir():
        raise OptionError(f"trace is {os.fspath(file)!r}, but there is no directory {os.fspath(file.parent)!r}: make it first")
    if file.is_dir():
        raise OptionError(f"trace is {os.fspath(file)!r}, which is a directory; it is a file to be written")
    return file


# -- the order --------------------------------------------------------------------------------------------------------


def options(name: str, value: Any, allowed: Collection[str], needed: Collection[str] = ()) -> dict[str, Any] | None:
    """A mapping with some of these names, without those that are ``None``. Raises :class:`OptionError`."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} is a mapping with the options {', '.join(allowed)}, not {value!r}")
    if unknown := [option for option in value if option not in allowed]:
        near = difflib.get_close_matches(str(unknown[0]), allowed, 1, 0.5)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"{name}: there is no option {unknown[0]!r}; there are {', '.join(allowed)}{hint}")
    if missing := [option for option in needed if value.get(option) is None]:
        raise OptionError(f"{name} needs the option {missing[0]!r}; it has {list(value)}")
    if "field" in needed and not isinstance(value["field"], str):
        raise OptionError(f"{name}: field is the name of a field, not {value['field']!r}")
    return {option: found for option, found in value.items() if found is not None}


def mixture(value: Any, count: int) -> dict[str, Any] | None:
    """Options of :class:`lfdata.order.mixture.Mixture` for so many sources."""
    found = options("mixture", value, ("weights", "temperature", "block", "exhaustion", "n"))
    if found is None:
        return None
    if "weights" in found:
        found["weights"] = weights(found["weights"], count)
    if "temperature" in found:
        found["temperature"] = real("mixture: temperature", found["temperature"], 0, math.inf, above=True)
    if "block" in found:
        found["block"] = whole("mixture: block", found["block"], 1, MAX_BLOCK)
    if "exhaustion" in found:
        choice("mixture: exhaustion", found["exhaustion"], EXHAUSTION)
    if "n" in found:
        found["n"] = whole("mixture: n", found["n"], 1, MAX_SAMPLES)
    return found


def weights(value: Any, count: int) -> list[float]:
    """Ints and floats as they are; where there are fractions, the same shares as integers."""
    given = several("mixture: weights", value.tolist() if hasattr(value, "tolist") else value, "numbers above 0")
    plain = [one.tolist() if hasattr(one, "tolist") else one for one in given]
    if len(plain) != count:
        raise OptionError(f"mixture: {len(plain)} weights for {count} sources: give each one")
    checked = [real("mixture: each of weights", one, 0, _MOST_WEIGHT, above=True) for one in plain]
    if not any(isinstance(one, Decimal) or type(one) is Fraction for one in plain):
        return checked
    exact = [Fraction(one) if isinstance(one, Decimal | Fraction | int) else Fraction(repr(float(one))) for one in plain]
    common = math.lcm(*(one.denominator for one in exact))
    parts = [int(one * common) for one in exact]
    parts = [part // math.gcd(*parts) for part in parts]
    if max(parts) >= _MOST_WEIGHT:
        raise OptionError(f"mixture: weights {given!r}: as whole numbers they are 2^63 or more; round them")
    return list(parts)


def buckets(value: Any) -> dict[str, Any] | None:
    """Options of :class:`lfdata.order.packing.Buckets`, and the field."""
    found = options("buckets", value, ("field", "window"), ("field", "window"))
    if found is not None:
        found["window"] = whole("buckets: window", found["window"], 1, MAX_WINDOW)
    return found


def packing(value: Any) -> dict[str, Any] | None:
    """Options of :class:`lfdata.order.packing.Packing`, and the field."""
    names = ("field", "window", "capacity", "too_long", "max_samples_per_row", "cache")
    found = options("packing", value, names, names[:3])
    if found is None:
        return None
    found["window"] = whole("packing: window", found["window"], 1, MAX_WINDOW)
    found["capacity"] = whole("packing: capacity", found["capacity"], 1, (1 << 31) - 1)
    if "too_long" in found:
        choice("packing: too_long", found["too_long"], TOO_LONG)
    if "max_samples_per_row" in found:
        found["max_samples_per_row"] = whole("packing: max_samples_per_row", found["max_samples_per_row"], 1, MAX_WINDOW)
    if "cache" in found:
        found["cache"] = path("packing: cache", found["cache"])
    return found


# -- this process -----------------------------------------------------------------------------------------------------


def from_environment(name: str, default: int, low: int) -> int:
    """A number that a launcher sets. Raises :class:`OptionError`."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or not low <= int(text) <= MOST_WORLD:
        raise OptionError(f"the environment variable {name} is {text!r}; it is a whole number from {low} to {MOST_WORLD}")
    return int(text)


def default_threads(world: int) -> int:
    """Cores of this process, shared with the other ranks of the node."""
    local = from_environment("LOCAL_WORLD_SIZE", 1, 1) if world > 1 else 1
    return max(1, len(os.sched_getaffinity(0)) // local)


def this_node(rank: int, world: int) -> tuple[int, int]:
    """The first of the ranks of this node and their number, as torchrun says; this rank alone where nobody does."""
    try:
        local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return rank, 1
    first = rank - local
    return (first, count) if local >= 0 and count > local and first >= 0 and first + count <= world else (rank, 1)
