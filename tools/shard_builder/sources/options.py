"""Options of sources: text from the command line, or plain values from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lfdata.errors import OptionError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_YES = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


class SourceOptions:
    """The options given to one source.

    Args:
        kind: the kind of source, for messages.
        given: options by name; values are text, or anything whose ``str`` is that text.
        valid: every valid name with a short description of its values.

    Raises:
        OptionError: an unknown name; the message lists the valid ones.
    """

    def __init__(self, kind: str, given: Mapping[str, Any], valid: Mapping[str, str]) -> None:
        self._kind = kind
        self.given = {name: str(value) for name, value in sorted(given.items()) if value is not None}
        self._valid = valid
        unknown = sorted(set(self.given) - set(valid))
        if unknown:
            listing = ", ".join(f"{name}={values}" for name, values in valid.items())
            raise OptionError(f"{kind}: unknown option {unknown[0]!r}; valid options: {listing}")

    def bad(self, name: str) -> OptionError:
        """The error for a bad value of option ``name``."""
        return OptionError(f"{self._kind}: {name}={self.given[name]!r} is not valid; expected {name}={self._valid[name]}")

    def text(self, name: str, default: str | None = None) -> str | None:
        """The option's text."""
        return self.given.get(name, default)

    def choice(self, name: str, choices: Iterable[str], default: str) -> str:
        """One of ``choices``."""
        value = self.given.get(name, default)
        if value not in tuple(choices):
            raise self.bad(name)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """``yes`` or ``no``."""
        value = self.given.get(name)
        if value is None:
            return default
        if value.lower() not in _YES:
            raise self.bad(name)
        return _YES[value.lower()]

    def size(self, name: str, default: int, largest: int = 1 << 50) -> int:
        """A positive number of bytes, such as ``64M`` (powers of 1,024)."""
        value = self.given.get(name)
        if value is None:
            return default
        short = value.strip().lower().removesuffix("ib").removesuffix("b")
        unit = short[-1:] if short[-1:].isalpha() else ""
        digits = short.removesuffix(unit)
        if unit not in _UNITS or not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise self.bad(name)
        size = int(digits) * _UNITS[unit]
        if not 1 <= size <= largest:
            raise self.bad(name)
        return size
