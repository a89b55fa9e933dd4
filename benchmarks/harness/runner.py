"""One ``lfbench run``: prepare, check, sweep, repeat, memory (docs/benchmarks.md)."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness import verify
from benchmarks.harness.environments import HOME
from benchmarks.harness.process import AbsentError, Memory, SubjectError, run
from benchmarks.harness.statistics import verdict
from benchmarks.harness.verify import WrongWorkError
from benchmarks.harness.work import Workload, count_samples, image_files, source_files
from benchmarks.record import summary

SUBJECTS = (
    "lfdata_reader",
    "bare_calls",
    "torch_memmap",
    "torch_pil",
    "torch_simplejpeg",
    "webdataset_",
    "streaming_",
    "litdata_",
    "spdl_",
    "dali_cpu",
    "grain_",
    "ffcv_",
)
COMPARED = 64
Say = Callable[[str], None]


@dataclass(slots=True)
class Entry:
    """One subject of a run. ``label`` tells two runs of one subject apart."""

    label: str
    subject: str
    title: str = ""
    status: str = "ok"
    reason: str = ""
    delay: float = 0.0
    prepared: Path = Path()
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run. ``workers``: counts to sweep instead of each subject's own; ``cores`` 0: those this process may use."""

    repeats: int = 5
    seconds: float = 4.0
    cores: int = 0
    workers: tuple[int, ...] = ()
    timeout: float = 600.0
    seed: int = 0


class OtherError(Exception):
    """A subject does not offer the workload."""


def subject_module(name: str) -> Any:
    """A subject's module; importing it imports no peer."""
    return importlib.import_module(f"benchmarks.subjects.{name}")


def fingerprint(work: Workload, source: Path) -> str:
    """Digest of a source folder: names, sizes and times of its files."""
    digest = hashlib.sha256()
    for path in source_files(work, source):
        found = path.stat()
        digest.update(f"{path.relative_to(source)}\0{found.st_size}\0{found.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Runner:
    """Runs one workload over one source."""

    def __init__(self, work: Workload, source: Path, options: Options, say: Say) -> None:
        self.work, self.source, self.options, self.say = work, source.resolve(), options, say
        self.cores = options.cores or len(os.sched_getaffinity(0))
        self.samples = count_samples(work, self.source)
        self.digest = fingerprint(work, self.source)

    def _request(self, entry: Entry, mode: str, **more: Any) -> dict[str, Any]:
        base = {"workload": self.work.name, "mode": mode, "source": str(self.source), "prepared": str(entry.prepared)}
        return base | {"cores": self.cores, "seed": self.options.seed, "workers": 0} | more

    def prepare(self, entry: Entry) -> None:
        """Build or find the subject's format, and fill in the worker counts to sweep."""
        if self.work.name not in subject_module(entry.subject).WORKLOADS:
            raise OtherError(f"it has no way to do {self.work.name}")
        probe = run(entry.subject, self._request(entry, "probe"), 120)
        entry.result["workers_swept"] = list(self.options.workers or probe["workers"])
        entry.result["import_s"] = probe["import_s"]
        entry.prepared, entry.result["prepare"] = self._prepared(entry, self.source, self.digest)

    def _prepared(self, entry: Entry, source: Path, digest: str) -> tuple[Path, dict[str, Any]]:
        module = subject_module(entry.subject)
        entry.title = module.TITLE
        code = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:8]
        place = HOME / "prepared" / f"{module.FORMAT}-{self.work.name}-{digest}-{code}"
        stored = place / "prepared.json"
        if not stored.exists():
            shutil.rmtree(place, ignore_errors=True)
            (place / "data").mkdir(parents=True)
            self.say(f"{entry.label}: preparing {module.FORMAT}")
            request = self._request(entry, "prepare") | {"source": str(source), "prepared": str(place / "data")}
            seconds = run(entry.subject, request, self.options.timeout)["seconds"]
            size = folder_bytes(place / "data") or sum(path.stat().st_size for path in source_files(self.work, source))
            stored.write_bytes(msgspec.json.encode({"seconds": seconds, "bytes": size}))
        return place / "data", msgspec.json.decode(stored.read_bytes())

    def check(self, entry: Entry) -> None:
        """Raise :class:`WrongWorkError` unless the subject does the work."""
        workers = max(entry.result["workers_swept"])
        kept = HOME / "checks" / f"{os.getpid()}.npz"
        kept.parent.mkdir(parents=True, exist_ok=True)
        more = {"workers": workers, "epochs": 1, "output": str(kept)}
        try:
            answer = run(
                entry.subject,
                self._request(entry, "check", samples=self.samples, wanted=0 if self.work.random else COMPARED, **more),
                self.options.timeout,
            )
            verify.check_keys(self.work, answer, self.samples)
            if self.work.source == "tokens":
                entry.result["check"] = verify.check_tokens(self.source, kept)
                return
            if not self.work.random:
                entry.result["check"] = verify.check_pixels(self.work, self.source, kept)
                return
            ramps = HOME / "ramps"
            if len(image_files(ramps)) != verify.RAMPS:
                shutil.rmtree(ramps, ignore_errors=True)
                verify.write_ramps(ramps)
            prepared, _ = self._prepared(entry, ramps, fingerprint(self.work, ramps))
            request = self._request(entry, "check", samples=verify.RAMPS, wanted=2 * verify.RAMPS, **more)
            answer = run(
                entry.subject, request | {"source": str(ramps), "prepared": str(prepared), "epochs": 2}, self.options.timeout
            )
            verify.check_keys(self.work, answer, verify.RAMPS)
            entry.result["check"] = verify.check_crops(kept)
        finally:
            kept.unlink(missing_ok=True)

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
        request = self._request(entry, "measure", seconds=self.options.seconds, delay=entry.delay)
        return run(entry.subject, request | {"workers": workers, "seed": seed}, self.options.timeout, memory)

    def sweep(self, entry: Entry) -> int:
        """Try the worker counts; the best stays in the result."""
        found = {workers: self.measure(entry, workers) for workers in entry.result["workers_swept"]}
        entry.result["sweep"] = {str(workers): answer["samples_s"] for workers, answer in found.items()}
        best: int = max(found, key=lambda workers: found[workers]["samples_s"])
        entry.result["workers"] = best
        return best

    def all(self, entries: Sequence[Entry]) -> None:
        """Everything, filling in the entries. A subject that is absent, fails or does other work is left out and says why."""
        for entry in entries:
            for step in (self.prepare, self.check, self.sweep):
                self._guard(entry, step)
        repeats: dict[str, list[dict[str, Any]]] = {entry.label: [] for entry in entries}
        for number in range(self.options.repeats):
            order = [entry for entry in entries if entry.status == "ok"][:: 1 if number % 2 == 0 else -1]
            for entry in order:

                def once(entry: Entry, seed: int = self.options.seed + number) -> None:
                    repeats[entry.label].append(self.measure(entry, entry.result["workers"], seed))

                self._guard(entry, once)
            self.say(f"round {number + 1} of {self.options.repeats}")
        for entry in entries:
            if entry.status == "ok":
                self._guard(entry, lambda e: self._finish(e, repeats[e.label]))

    def _finish(self, entry: Entry, repeats: list[dict[str, Any]]) -> None:
        memory = Memory()
        self.measure(entry, entry.result["workers"], memory=memory)
        entry.result["memory_mib"] = {
            "anonymous_shared": memory.anonymous_shared,
            "file": memory.file,
            "samples": memory.samples,
        }
        for name in ("samples_s", "cpu_s_1000", "first_batch_s"):
            values = [answer[name] for answer in repeats]
            entry.result[name] = summary(values) | {"repeats": values}
        entry.result["bytes_sample"] = entry.result["prepare"]["bytes"] / self.samples

    def _guard(self, entry: Entry, step: Callable[[Entry], Any]) -> None:
        if entry.status != "ok":
            return
        began = time.monotonic()
        try:
            step(entry)
        except AbsentError as error:
            entry.status, entry.reason = "absent", f"{error}; `lfbench environment {entry.subject}` installs it"
        except OtherError as error:
            entry.status, entry.reason = "not offered", str(error)
        except WrongWorkError as error:
            entry.status, entry.reason = "other work", str(error)
        except SubjectError as error:
            entry.status, entry.reason = "failed", str(error)
        if entry.status != "ok":
            self.say(f"{entry.label}: {entry.status} after {time.monotonic() - began:.0f} s: {entry.reason.splitlines()[-1]}")


def entries_of(names: Sequence[str], slow: float = 0.0) -> list[Entry]:
    """Entries for subject names; a name given again gets a number. ``slow`` delays the last one by seconds a sample."""
    entries: list[Entry] = []
    for name in names:
        again = sum(entry.subject == name for entry in entries)
        entries.append(Entry(f"{name}#{again + 1}" if again else name, name))
    if slow:
        entries[-1].delay = slow
    return entries


def as_record(entries: Sequence[Entry]) -> dict[str, Any]:
    """Results for the record, with ratios to the first subject that ran."""
    first = next((entry for entry in entries if entry.status == "ok"), None)
    results: dict[str, Any] = {}
    for entry in entries:
        about = {"subject": entry.subject, "title": entry.title, "status": entry.status, "reason": entry.reason}
        results[entry.label] = about | {"planted_delay_s": entry.delay} | entry.result
        if entry.status == "ok" and first is not None and entry is not first:
            ratio, p, differs = verdict(first.result["samples_s"]["repeats"], entry.result["samples_s"]["repeats"])
            results[entry.label]["first_over_this"] = {"of": first.label, "ratio": ratio, "p": p, "differs": differs}
    return results
