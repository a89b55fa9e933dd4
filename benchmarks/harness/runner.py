"""One ``lfbench run``: prepare, check, sweep, repeat, memory (docs/benchmarks.md)."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness import verify
from benchmarks.harness.cache import empty, files_below, memory_limit
from benchmarks.harness.checks import Checking
from benchmarks.harness.digests import code_digest, fingerprint, stored
from benchmarks.harness.entries import Entry, counts_of, subject_module, uses_package
from benchmarks.harness.environments import HOME, PACKAGES, SAME
from benchmarks.harness.process import AbsentError, Memory, SubjectError, run
from benchmarks.harness.reasons import short
from benchmarks.harness.settings import options_of
from benchmarks.harness.sources import SourceError, opened
from benchmarks.harness.verify import UnlikelyError, WrongWorkError
from benchmarks.harness.work import Workload, count_samples, folder_bytes, image_files, source_files
from benchmarks.record import summary

# What a measured run may tell; a record has those that apply.
FIGURES = (
    "samples_s",
    "resume_s",
    "cpu_s_1000",
    "cpu_s",
    "first_batch_s",
    "waiting",
    "starved_steps",
    "latency_p50_us",
    "latency_p99_us",
)
# What the least of the repeats rests on.
MEASURED = ("measured_samples", "measured_s")
# A run counts as cold while no more of its files than this is in memory.
MOST_RESIDENT = 0.02
# Worker counts that are this near to the best after one try are tried more often.
SWEEP_NEAR, SWEEP_TRIES = 0.75, 3
# Code that peers' files are made with.
SUBJECT_CODE = ("benchmarks/subjects", "benchmarks/harness/work.py", "benchmarks/harness/multimodal.py")
# Looking for a source picture that cannot be read, after a failure, ends after so many seconds.
LOOK_SECONDS = 30.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run. ``workers``: counts to sweep instead of each subject's own; ``cores`` 0: those this process may use; ``step``: seconds
    the consumer of a paced workload takes for a batch."""

    repeats: int = 5
    seconds: float = 4.0
    cores: int = 0
    workers: tuple[int, ...] = ()
    timeout: float = 600.0
    seed: int = 0
    step: float = 0.0


class OtherError(Exception):
    """A subject does not offer the workload."""


class Runner:
    """Runs one workload over one source."""

    def __init__(self, work: Workload, source: Path, options: Options, say: Say) -> None:
        self.work, self.source, self.options, self.say = work, source.resolve(), options, say
        self.cores = options.cores or len(os.sched_getaffinity(0))
        self.samples = count_samples(work, self.source)
        self.digest = fingerprint(work, self.source)
        self.content = fingerprint(work, self.source, times=False)
        self.rounds = 0
        self._unreadable: str | None = None

    def _request(self, entry: Entry, mode: str, **more: Any) -> dict[str, Any]:
        base = {"workload": self.work.name, "mode": mode, "source": str(self.source), "prepared": str(entry.prepared)}
        return base | {"cores": self.cores, "seed": self.options.seed, "workers": 0} | more

    def prepare(self, entry: Entry) -> None:
        """Build or find the subject's format, and fill in the worker counts to sweep."""
        if self.work.work not in subject_module(entry.subject).WORK:
            raise OtherError(f"it has no way to do {self.work.name}")
        entry.title = subject_module(entry.subject).TITLE
        probe = run(entry.subject, self._request(entry, "probe"), 120)
        entry.result["workers_swept"] = counts_of(probe["workers"], self.options.workers)
        entry.result["import_s"] = probe["import_s"]
        entry.result["versions"] = probe["versions"]
        entry.result["options"] = options_of(subject_module(entry.subject))
        if reencodes := getattr(subject_module(entry.subject), "REENCODES", ""):
            entry.result["reencodes"] = reencodes
        if self.work.measure == "build":
            entry.result["prepare"] = {"seconds": 0.0, "bytes": 0}
        else:
            entry.prepared, entry.result["prepare"] = self._prepared(entry, self.source, self.digest)

    def _prepared(self, entry: Entry, source: Path, digest: str) -> tuple[Path, dict[str, Any]]:
        module = subject_module(entry.subject)
        # A peer's files depend on how its subject writes them, on what subjects share, and on its libraries; this package's on its own code.
        own = uses_package(entry.subject)
        versions = {} if own else entry.result.get("versions", {})
        parts = [code_digest(own, () if own else SUBJECT_CODE), msgspec.json.encode(versions, order="sorted").decode()]
        code = hashlib.sha256("".join(parts).encode()).hexdigest()[:8]
        place = HOME / "prepared" / f"{module.FORMAT}-{self.work.form}-{digest}-{code}"
        known = place / "prepared.json"
        if not known.exists():
            shutil.rmtree(place, ignore_errors=True)
            (place / "data").mkdir(parents=True)
            self.say(f"{entry.label}: preparing {module.FORMAT}")
            request = self._request(entry, "prepare") | {"source": str(source), "prepared": str(place / "data")}
            try:
                seconds = run(entry.subject, request, self.options.timeout)["seconds"]
                size = folder_bytes(place / "data") or sum(path.stat().st_size for path in source_files(self.work, source))
                stored(known, {"seconds": seconds, "bytes": size})
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
        return place / "data", msgspec.json.decode(known.read_bytes())

    def check(self, entry: Entry) -> None:
        """Raise :class:`WrongWorkError` unless the subject does the work with its largest number of workers."""
        self._check_with(entry, max(entry.result["workers_swept"]))
        if self.work.measure == "resume":
            self._save_state(entry)

    def _check_with(self, entry: Entry, workers: int) -> None:
        """The same code over the same data is checked once."""
        known = HOME / "checked" / f"{self._check_digest(entry, workers)}.json"
        if known.exists():
            entry.result["check"] = msgspec.json.decode(known.read_bytes())
        else:
            self._check(entry, workers)
            stored(known, entry.result["check"])

    def _check_digest(self, entry: Entry, workers: int) -> str:
        """What a check depends on: the work, the source, the subjects' and the harness's code, versions, and the number of workers."""
        digest = hashlib.sha256(code_digest(uses_package(entry.subject)).encode())
        parts = [entry.subject, self.work.work, self.digest, entry.result["versions"], workers]
        digest.update(msgspec.json.encode(parts, order="sorted"))
        return digest.hexdigest()[:32]

    def _checking(self, entry: Entry) -> Checking:
        reencodes = getattr(subject_module(entry.subject), "REENCODES", "")
        return Checking(self.work, self.source, self.samples, self.digest, reencodes)

    def _check(self, entry: Entry, workers: int) -> None:
        checking = self._checking(entry)

        def answer(more: dict[str, Any]) -> dict[str, Any]:
            request = self._request(entry, "check", workers=workers) | more
            return run(entry.subject, request, self.options.timeout)

        def prepared(source: Path) -> Path:
            return self._prepared(entry, source, fingerprint(self.work, source))[0]

        def unlikely(error: UnlikelyError) -> None:
            self.say(f"{entry.label}: {error}; once more with another seed")

        with self._scratch() as scratch:
            entry.result["check"] = checking.run(answer, scratch, prepared, self.options.seed, unlikely)

    def _save_state(self, entry: Entry) -> None:
        """Consume nine tenths of an epoch, keep the state, and see whether the rest of the epoch follows from it."""
        entry.position = int(0.9 * -(-self.samples // self.work.batch))
        entry.state = HOME / "states" / f"{os.getpid()}-{entry.label.replace('#', '-')}.json"
        entry.state.parent.mkdir(parents=True, exist_ok=True)
        workers = max(entry.result["workers_swept"])
        request = self._request(entry, "state", position=entry.position, output=str(entry.state), workers=workers)
        before = run(entry.subject, request, self.options.timeout)
        after = self._resume(entry, workers, self.options.seed, rest=True)
        entry.result["loads_state"] = before["loads_state"]
        entry.result["epoch"] = verify.check_resumed(before["keys"], after["keys"], self.samples)
        entry.result["state_bytes"] = entry.state.stat().st_size

    def _resume(
        self, entry: Entry, workers: int, seed: int, rest: bool = False, memory: Memory | None = None
    ) -> dict[str, Any]:
        more = {"position": entry.position, "state": str(entry.state), "rest": rest}
        return run(
            entry.subject,
            self._request(entry, "measure", workers=workers, seed=seed, **more),
            self.options.timeout,
            memory,
            entry.slowed,
        )

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        (HOME / "scratch").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=HOME / "scratch") as name:
            yield Path(name)

    def memcpy(self) -> dict[str, float]:
        """Samples/s of copying one batch's arrays from memory to memory on one thread: no loader that fills a buffer is faster."""
        arrays = [np.zeros((self.work.batch, *shape), dtype) for shape, dtype in self.work.arrays.values()]
        copies = [np.empty_like(array) for array in arrays]
        rates = []
        for _ in range(21):
            begin = time.perf_counter()
            for array, copied in zip(arrays, copies, strict=True):
                np.copyto(copied, array)
            rates.append(self.work.batch / (time.perf_counter() - begin))
        return summary(rates[1:])

    def measure(self, entry: Entry, workers: int, seed: int = 0, memory: Memory | None = None) -> dict[str, Any]:
        """One measured run."""
        if self.work.measure == "resume":
            # The state belongs to one seed and one number of workers.
            return self._resume(entry, max(entry.result["workers_swept"]), self.options.seed, memory=memory)
        more = {"seconds": self.options.seconds, "step": self.options.step, "samples": self.samples}
        request = self._request(entry, "measure", workers=workers, seed=seed, **more)
        if self.work.measure == "build":
            with self._scratch() as scratch:
                request["prepared"] = str(scratch / "built")
                answer = run(entry.subject, request, self.options.timeout, memory, entry.slowed)
                entry.result["prepare"]["bytes"] = answer["bytes"]
                return answer
        if self.work.measure == "cold":
            found = emptied(files_below(entry.prepared) or source_files(self.work, self.source))
            most = entry.result.get("cold", {}).get("resident", 0.0)
            entry.result["cold"] = found | {"resident": max(most, found["resident"])}
        if not self.work.arrays:
            return run(entry.subject, request, self.options.timeout, memory, entry.slowed)
        checking = self._checking(entry)
        with self._scratch() as scratch:
            kept = scratch / "picked.npz"
            # Not where memory is measured: what is kept would count.
            request |= {"picked": 0 if memory else checking.picked, "output": str(kept)}
            answer = run(entry.subject, request, self.options.timeout, memory, entry.slowed)
            if wrong := answer.get("wrong_keys"):
                raise SubjectError(wrong)
            if kept.exists():
                checking.measured(kept)
        return answer

    def sweep(self, entry: Entry) -> int:
        """Try the worker counts; the best stays in the result."""
        counts = entry.result["workers_swept"]
        if self.work.measure == "resume":
            counts = [max(counts)]
        tries: dict[int, list[float]] = {}
        failures: dict[int, SubjectError] = {}
        for workers in counts:
            try:
                tries[workers] = [self._tried(entry, workers)]
            except AbsentError:
                raise
            except SubjectError as error:
                failures[workers] = error
                self.say(f"{entry.label} with {workers} workers: {short(str(error))}")
        if not tries:
            raise failures[counts[0]]
        best = max(values[0] for values in tries.values())
        near = [workers for workers, values in tries.items() if values[0] >= SWEEP_NEAR * best]
        for _ in range(SWEEP_TRIES - 1 if len(near) > 1 else 0):
            for workers in near:
                tries[workers].append(self._tried(entry, workers))
        entry.result["sweep"] = {str(workers): median(values) for workers, values in tries.items()}
        entry.result["sweep"] |= {str(workers): short(str(error)) for workers, error in failures.items()}
        chosen: int = max(near, key=lambda workers: median(tries[workers]))
        entry.result["workers"] = chosen
        if chosen != max(counts):
            self._check_with(entry, chosen)
        return chosen

    def _tried(self, entry: Entry, workers: int) -> float:
        value: float = self.measure(entry, workers)[self.work.metric]
        return value

    def all(self, entries: Sequence[Entry]) -> None:
        """Everything, filling in the entries. A subject that is absent, fails or does other work is left out and says why."""
        for entry in entries:
            for step in (self.prepare, self.check, self.sweep):
                self._guard(entry, step)
        for number in range(self.options.repeats):
            measured: dict[str, dict[str, Any]] = {}
            for entry in [entry for entry in entries if entry.status == "ok"][:: 1 if number % 2 == 0 else -1]:

                def once(
                    entry: Entry, seed: int = self.options.seed + number, found: dict[str, dict[str, Any]] = measured
                ) -> None:
                    found[entry.label] = self.measure(entry, entry.result["workers"], seed)

                self._guard(entry, once)
            # A round counts when it is whole, so that rounds stay paired whenever the run is interrupted.
            for entry in entries:
                if entry.label in measured:
                    entry.repeats.append(measured[entry.label])
            self.rounds = number + 1
            self.say(f"round {self.rounds} of {self.options.repeats}")
        for entry in entries:
            if entry.status == "ok":
                self._guard(entry, self._watch)

    def _watch(self, entry: Entry) -> None:
        memory = Memory()
        try:
            self.measure(entry, entry.result["workers"], memory=memory)
        except SubjectError as error:
            # What was measured stands.
            self.say(f"{entry.label}: memory was not measured: {short(str(error))}")
            return
        entry.result["memory_mib"] = {
            "anonymous_shared": memory.anonymous_shared,
            "file": memory.file,
            "samples": memory.samples,
        }

    def finish(self, entries: Sequence[Entry]) -> None:
        """Sum up what was measured, after :meth:`all` or where that was interrupted."""
        for entry in entries:
            if entry.repeats:
                # Of one that failed later, too: it stays failed, but what it did is in the record.
                self._sum_up(entry, entry.repeats)
            elif entry.status == "ok":
                entry.status, entry.reason = "interrupted", "the run was interrupted before its first round ended"

    def _sum_up(self, entry: Entry, repeats: list[dict[str, Any]]) -> None:
        for name in FIGURES:
            values = [answer[name] for answer in repeats if name in answer]
            if values:
                entry.result[name] = summary(values) | {"repeats": values}
        least = {name: min((answer[name] for answer in repeats if name in answer), default=None) for name in MEASURED}
        if None not in least.values():
            entry.result["measured"] = {name.partition("_")[2]: value for name, value in least.items()}
        entry.result["bytes_sample"] = entry.result["prepare"]["bytes"] / self.samples

    def _guard(self, entry: Entry, step: Callable[[Entry], Any]) -> None:
        if entry.status != "ok":
            return
        began = time.monotonic()
        try:
            step(entry)
        except AbsentError as error:
            known = SAME.get(entry.subject, entry.subject) in PACKAGES and "no GPU" not in str(error)
            hint = f"; `lfbench environment {SAME.get(entry.subject, entry.subject).rstrip('_')}` installs it" if known else ""
            entry.status, entry.reason = "absent", f"{error}{hint}"
        except OtherError as error:
            entry.status, entry.reason = "not offered", str(error)
        except WrongWorkError as error:
            entry.status, entry.reason = "other work", str(error)
        except SubjectError as error:
            entry.status, entry.reason = "failed", f"{error}{self._broken_source()}"
        except Exception as error:
            # A check that meets what it cannot read must not cost the other subjects their results.
            entry.status, entry.reason = "failed", f"{type(error).__name__}: {error}"
        if entry.status != "ok":
            self.say(f"{entry.label}: {entry.status} after {time.monotonic() - began:.0f} s: {short(entry.reason)}")

    def _broken_source(self) -> str:
        """What to add to a failure: the first source picture that cannot be read, if there is one."""
        if self._unreadable is None:
            self._unreadable = ""
            if self.work.source != "tokens":
                self.say("looking for a source picture that cannot be read")
                deadline = time.monotonic() + LOOK_SECONDS
                for path in image_files(self.source):
                    if time.monotonic() > deadline:
                        break
                    try:
                        opened(path, jpeg=True)
                    except SourceError as error:
                        self._unreadable = f"\nsource: {error}"
                        break
        return self._unreadable


def emptied(files: Sequence[Path]) -> dict[str, Any]:
    """Empty the page cache of files; how, and what stayed. Where much of it stays, the files must be larger than memory.

    Raises:
        SubjectError: neither is the case.
    """
    how, resident = empty(files)
    found: dict[str, Any] = {"how": how, "resident": resident}
    if resident > MOST_RESIDENT:
        limit, size = memory_limit(), sum(path.stat().st_size for path in files)
        if size <= limit:
            raise SubjectError(
                f"{resident:.0%} of the files' pages stay in memory ({how}), and all of their {size >> 20} MiB fit into this process's "
                f"memory limit of {limit >> 20} MiB; run as root, use more data, or set a limit (systemd-run --scope -p MemoryMax=...)"
            )
        found = {"how": "larger than memory", "resident": resident, "limit_mib": limit >> 20, "files_mib": size >> 20}
    return found
