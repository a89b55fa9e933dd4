"""Helpers shared by the codecs: reading textual options, and checks every kind owes its input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lfdata.codecs.base import Buffer
from lfdata.errors import OptionError, SampleError

_LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
_LFS_MAX_BYTES = 1024  # the Git LFS specification keeps pointer files below this


class OptionReader:
    """Reads a field's ``key=value`` options, refusing names and values that mean nothing.

    Args:
        kind: the codec's kind, for messages.
        options: the options as given.
        valid: every valid name with a short description of its values.

    Raises:
        OptionError: an unknown name; the message lists the valid ones.
    """

    def __init__(self, kind: str, options: Mapping[str, str], valid: Mapping[str, str]) -> None:
        self._kind = kind
        self._options = dict(options)
        self._valid = valid
        unknown = sorted(set(self._options) - set(valid))
        if unknown:
            raise OptionError(f"{kind}: unknown option {', '.join(map(repr, unknown))}; valid options: {self._listing()}")

    def _listing(self) -> str:
        return ", ".join(f"{name}={values}" for name, values in self._valid.items()) or "none"

    def bad(self, name: str, why: str = "") -> OptionError:
        """The error for a bad value of option ``name``."""
        detail = f" ({why})" if why else ""
        return OptionError(
            f"{self._kind}: {name}={self._options.get(name)!r} is not valid{detail}; expected {name}={self._valid[name]}"
        )

    def __contains__(self, name: str) -> bool:
        return name in self._options

    def text(self, name: str) -> str | None:
        """The option's text, or ``None`` when it is not given."""
        return self._options.get(name)

    def choice(self, name: str, choices: Iterable[str], default: str) -> str:
        """One of ``choices``."""
        value = self._options.get(name, default)
        if value not in tuple(choices):
            raise self.bad(name)
        return value

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A decimal integer in ``[low, high]``, or ``default`` when the option is not given."""
        value = self._options.get(name)
        if value is None:
            return default
        if not (value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 20):
            raise self.bad(name, "not a decimal integer")
        number = int(value)
        if not low <= number <= high:
            raise self.bad(name, f"outside {low} to {high}")
        return number


def as_bytes(raw: object, what: str) -> bytes:
    """``raw`` as bytes when it is bytes-like; a ``SampleError`` of code ``type`` otherwise."""
    if isinstance(raw, bytes):
        return raw
    if isinstance(raw, bytearray | memoryview):
        return bytes(raw)
    raise SampleError("type", f"{what} expected, got {type(raw).__name__}")


def refuse_lfs_pointer(raw: Buffer) -> None:
    """Refuse a Git LFS pointer, the little text file that stands where the real data should be."""
    if len(raw) < _LFS_MAX_BYTES:
        head = bytes(raw)
        if head.startswith(_LFS_PREFIX) and b"\noid sha256:" in head:
            raise SampleError("lfs-pointer", "this is a Git LFS pointer, not the data: run git lfs pull")


def check_max_bytes(length: int, limit: int | None) -> None:
    """Refuse a value of ``length`` bytes when ``limit`` (the option ``max_bytes``) is smaller."""
    if limit is not None and length > limit:
        raise SampleError("size-limit", f"{length} bytes are more than max_bytes={limit}")


def encode_utf8(text: str) -> bytes:
    """``text`` in UTF-8; a lone surrogate is a ``SampleError`` naming its character offset."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        unit = ord(text[error.start])
        raise SampleError(
            "surrogate", f"lone surrogate U+{unit:04X} at character {error.start} cannot be stored as UTF-8"
        ) from None
