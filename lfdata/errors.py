"""Every error the package raises on purpose. Each message names what failed, where, and what to do."""

from __future__ import annotations

# Characters of somebody else's message, which may hold a whole picture; and of one of ours with such a message in it.
MOST_TEXT, MOST_REASON = 2000, 4000


def printable(text: str) -> str:
    """Text that can be encoded, whatever it has: file names that are not UTF-8 come with lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str, most: int = MOST_REASON) -> str:
    """Printable text of about ``most`` characters: of longer text, its beginning and its end."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... ({len(text) - most} characters left out) ... {text[-most // 2 :]}"
    return printable(text)


def text_of(error: BaseException) -> str:
    """The text of any exception, also of one that fails to give it."""
    try:
        return shortened(str(error), MOST_TEXT)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        return f"(no text: its __str__ raised {type(failure).__name__})"


class LfdataError(Exception):
    """Base class: catching it catches every error this package raises on purpose."""


class FormatError(LfdataError):
    """A shard, index or manifest that cannot be trusted.

    Attributes:
        file: path or URL of the file.
        offset: byte offset at which the fault was found, or ``None`` where no single offset applies.
        reason: what is wrong, without file and offset.
    """

    def __init__(self, file: object, offset: int | None, reason: str) -> None:
        self.file = str(file)
        self.offset = offset
        self.reason = reason
        where = f"{self.file}: byte {offset}" if offset is not None else self.file
        super().__init__(f"{where}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.file, self.offset, self.reason)


class CorruptError(FormatError):
    """Bytes that do not match their checksum or break a rule of the format."""


class TruncatedError(FormatError):
    """A file shorter than it says it is."""


class VersionError(FormatError):
    """A file written by a newer major version, or one that needs a feature this reader lacks."""


class LimitError(FormatError):
    """A value beyond a limit of the reader: refused before anything is allocated."""


class BudgetError(LimitError):
    """An epoch needs more than ``Loader(max_bytes=)`` allows: told before its first step, on every rank alike."""


class ChangedError(FormatError):
    """A file replaced or modified under a running reader."""


class StorageError(LfdataError):
    """An operating-system failure on a file: ``path``, ``operation`` and ``errno`` say which."""

    def __init__(self, path: object, operation: str, errno_: int | None, reason: str) -> None:
        self.path = str(path)
        self.operation = operation
        self.errno = errno_
        self.reason = reason
        super().__init__(f"{self.path}: {operation} failed: {reason}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.path, self.operation, self.errno, self.reason)


class DiskFullError(StorageError):
    """No space, quota or file-size limit left for a write."""


class RemoteError(StorageError):
    """A server that failed until the deadline, or refused; it was tried again already where that makes sense."""


class TargetExistsError(LfdataError):
    """The target already holds a data set, or another writer holds its lock."""


class SourceError(LfdataError):
    """A source that cannot be read at all (missing, empty, malformed as a whole)."""


class SampleError(LfdataError):
    """One bad sample: the run goes on or stops by policy.

    ``code`` is a short stable identifier for reports (``"truncated"``, ``"pixel-limit"``, ``"lfs-pointer"``, ...); ``reason``
    is for people. Whoever knows them fills in ``field``, ``key`` and ``path`` on the way up.
    """

    def __init__(self, code: str, reason: str, *, field: str = "", key: bytes = b"", path: str = "") -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason
        self.field = field
        self.key = key
        self.path = path

    def __str__(self) -> str:
        parts = []
        if self.path:
            parts.append(self.path)
        if self.key:
            parts.append(f"key {self.key.decode('utf-8', 'backslashreplace')!r}")
        if self.field:
            parts.append(f"field {self.field!r}")
        return ": ".join([*parts, f"{self.reason} [{self.code}]"])


class OptionError(LfdataError, ValueError):
    """An option or combination of options that makes no sense; the message says what would."""


class KeyMissingError(LfdataError, KeyError):
    """A key, field or column that the data set does not have."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class DeviceError(LfdataError):
    """A GPU that was asked for and is not there."""


class DecoderError(LfdataError):
    """A decoder process of the loader died, hangs, or met an error of its own; the message says which steps and shards were in work."""


class BadSamplesError(LfdataError):
    """More bad samples than the loader's limits allow; the message names the last one and the limit."""


class StateError(LfdataError, ValueError):
    """A loader state that belongs to other data, another order or other options; the message names what differs."""


class MissingExtraError(LfdataError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""
