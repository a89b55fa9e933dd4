"""What is asked of a decoder, and what it answers."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

import lfdata.errors as errors
from lfdata.errors import (
    DecoderError,
    FormatError,
    LfdataError,
    SampleError,
    StorageError,
    printable,
    shortened,
    text_of,
)

# Number of the answer with which a decoder says that it is ready, or why it cannot be. Jobs count from 1.
STARTED = 0
MOST_TRACE = 20_000


class Event(msgspec.Struct, frozen=True):
    """A bad sample: where it is, why, and what was done."""

    epoch: int
    step: int
    row: int
    path: str
    shard: str
    index: int
    key: bytes
    field: str
    reason: str
    action: str

    @property
    def place(self) -> str:
        """Where, for people; without a field where it is not known (a crash)."""
        field = f", field {self.field!r}" if self.field else ""
        return f"{self.path}/{self.shard}, index {self.index}, key {self.key!r}{field}"


class Failure(msgspec.Struct, frozen=True):
    """An error of a job, as it travels to the loader: its class, what it is made of, and the traceback of one that is not ours."""

    kind: str
    args: tuple[Any, ...]
    step: int
    trace: str = ""

    @classmethod
    def of(cls, error: Exception, step: int) -> Failure:
        """From an exception."""
        kind = type(error).__name__
        if isinstance(error, SampleError):
            # A user's function: where it failed.
            trace = trace_of(error.__cause__) if error.__cause__ is not None else ""
            return cls(kind, (error.code, shortened(error.reason), error.field, error.key, printable(error.path)), step, trace)
        if isinstance(error, FormatError):
            return cls(kind, (printable(error.file), error.offset, shortened(error.reason)), step)
        if isinstance(error, StorageError):
            return cls(kind, (printable(error.path), error.operation, error.errno, shortened(error.reason)), step)
        if isinstance(error, LfdataError):
            return cls(kind, (text_of(error),), step)
        return cls(kind, (text_of(error),), step, trace_of(error))

    def error(self) -> Exception:
        """The exception again; what is not ours becomes a :class:`DecoderError` with its traceback."""
        if self.kind == "SampleError":
            code, reason, field, key, path = self.args
            made_sample = SampleError(code, reason, field=field, key=key, path=path)
            if self.trace:
                made_sample.add_note(self.trace)
            return made_sample
        if self.trace:
            return DecoderError(f"step {self.step}: {self.kind}: {self.args[0]}\n{self.trace}")
        kind: Any = getattr(errors, self.kind)
        made: Exception = kind(*self.args)
        return made


def trace_of(error: BaseException) -> str:
    """The traceback of an exception."""
    return shortened("".join(traceback.format_exception(error)), MOST_TRACE)


class Job(msgspec.Struct, frozen=True):
    """Steps of an epoch to be put into a slot.

    Attributes:
        number: says which answer belongs to it.
        crashed: samples (source, index) that ended a decoder: bad, whatever they hold.
        alone: while it is done nothing else is, in its process: there was a crash before, and the next must have one cause.
        careful: a decoder crashed over this job: try every sample alone first, so that it is known which one did it.
        rows: of a single step, some of the rank's rows (first, one past the last); ``None``: all of all steps.
        part: which part of its batch that is, and how many it has.
    """

    number: int
    epoch: int
    first: int
    steps: int
    slot: int
    crashed: tuple[tuple[int, int], ...] = ()
    alone: bool = False
    careful: bool = False
    rows: tuple[int, int] | None = None
    part: tuple[int, int] = (0, 1)


class Done(msgspec.Struct, frozen=True):
    """A slot is full: steps done, elements of each ragged array in it, and events.

    Fewer steps than the job has: a bad sample in the next one stops the run, and the steps before it come first. ``spans``: stages, with begin
    (``time.perf_counter``, which all processes share), seconds and lane; ``seconds``: that lanes of ``process`` worked on it
    (``decoding``: those of all native threads together), which has had ``faults`` page faults (without reading from disk) by then;
    ``storage``: what the process has asked of servers and of the cache by then; ``at``: where each array begins, in the order of the
    producer's parts, if that differs from slot to slot.
    """

    number: int
    steps: int
    used: dict[str, int] = {}
    events: tuple[Event, ...] = ()
    failure: Failure | None = None
    spans: tuple[tuple[int, float, float, int], ...] = ()
    seconds: float = 0.0
    decoding: float = 0.0
    process: int = 0
    faults: int = 0
    storage: dict[str, int] = {}
    at: tuple[int, ...] = ()
