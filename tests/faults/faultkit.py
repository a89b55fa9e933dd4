"""What the fault tests share: a source without files, a converter without processes, and exact comparison of data sets."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import lfdata
import shard_builder.sources
from lfdata.errors import SampleError
from lfdata.format.durable import Files
from lfdata.format.meta import read_manifest
from lfdata.format.verify import verify_file
from shard_builder import convert as convert_module
from shard_builder import pool as pool_module
from shard_builder import wire
from shard_builder.convert import Summary, convert
from shard_builder.options import ConvertOptions
from shard_builder.pool import Chunk, Result
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.worker import Worker

KIND = "test-synthetic"
shard_builder.sources.KINDS.setdefault(KIND, ("faultkit", "Synthetic"))

FIELDS = (
    FieldSpec("about", "json", "about"),
    FieldSpec("blob", "bytes", "blob"),
    FieldSpec("ids", "tokens", "ids", "inline", {"vocab": "70000"}),
    FieldSpec("label", "scalar", "label", "inline", {"dtype": "int64"}),
)
SMALL = ConvertOptions(segment_rows=40, shard_bytes=14_000, group_bytes=2_000, workers=1)
RECORDS = 100
COMPARED = (".lfd", "manifest.json", "index.lfi", "errors.jsonl")


class Synthetic:
    """Samples made from their numbers. ``plan``: records, seed, what is bad (number: how), and sizes."""

    kind = KIND

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        self.plan: dict[str, Any] = json.loads(location)
        self.fields: Sequence[FieldSpec] = tuple(fields or FIELDS)
        self.options = options
        self.bad = {int(number): how for number, how in self.plan.get("bad", {}).items()}

    def describe(self) -> dict[str, Any]:
        return {"seed": self.plan.get("seed", 0)}

    def notes(self) -> dict[str, Any]:
        return {}

    def config(self) -> dict[str, Any]:
        fields = [{name: getattr(spec, name) for name in spec.__struct_fields__} for spec in self.fields]
        return {"kind": KIND, "location": json.dumps(self.plan), "fields": fields, "options": self.options}

    def key(self, number: int) -> bytes:
        keys: dict[str, str] = self.plan.get("keys", {})
        return keys.get(str(number), f"sample/{number:08d}").encode("utf-8", "surrogateescape")

    def scan(self) -> Iterator[Record | BadRecord]:
        size = self.plan.get("size", 120)
        every = self.plan.get("bad_every")
        for number in range(self.plan["records"]):
            if self.bad.get(number) == "scan" or (every and number % every == 0):
                yield BadRecord(self.key(number), f"file-{number}", "test-scan", "found bad while scanning")
            else:
                yield Record(self.key(number), b"%d" % number, size, number // self.plan.get("unit", 1 << 60))

    def stage(self, unit: int, directory: Path) -> None:
        del unit, directory

    def unstage(self, unit: int, directory: Path) -> None:
        del unit, directory

    def place(self, locator: bytes) -> str:
        return f"file-{int(locator)}"

    def load(self, locator: bytes) -> RawSample:
        number = int(locator)
        path = f"file-{number}"
        self._fail(self.bad.get(number), path)
        if "tiny" in self.plan:
            return RawSample({"label": number}, path)
        seed = self.plan.get("seed", 0)
        noise = hashlib.sha256(f"{seed} {number % 7}".encode()).digest()
        values = {
            "about": {"number": number, "words": [f"word{(number * 7 + k) % 50}" for k in range(12)], "seed": seed},
            "blob": noise * (4 + number % 3),
            "ids": [(number * 31 + k) % 70000 for k in range(number % 20)],
            "label": number - 50,
        }
        if number % 11 == 0:
            del values["ids"]
        return RawSample(values, path)

    def _fail(self, how: str | None, path: str) -> None:
        """Misbehave as asked. ``once`` variants leave a mark beside which the next try is good."""
        if how is None or how == "scan":
            return
        if ":" in how:
            how, mark = how.split(":", 1)
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if how == "load":
            raise SampleError("test-load", "cannot be loaded", path=path)
        if how == "error":
            raise RuntimeError("a defect of a codec")
        if how == "exit":
            os._exit(7)
        if how == "hang":
            while True:
                time.sleep(1000)
        os.kill(os.getpid(), getattr(signal, how))


def synthetic(records: int = RECORDS, seed: int = 0, bad: Mapping[int, str] | None = None, **more: Any) -> Synthetic:
    """A source of ``records`` samples."""
    plan = {"records": records, "seed": seed, "bad": {str(k): v for k, v in (bad or {}).items()}} | more
    fields = [spec for spec in FIELDS if spec.name == "label"] if "tiny" in more else FIELDS
    return Synthetic(json.dumps(plan), fields)


class InProcessPool:
    """The pool's interface without processes: the same worker code, called directly."""

    def __init__(self, count: int, setup: dict[str, Any], timeout: float) -> None:
        del count, timeout
        self._worker = Worker(setup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def set_up(self, setup: dict[str, Any]) -> None:
        self._worker = Worker(setup)

    def run(self, chunks: Iterator[Chunk], mode: str = "encode") -> Iterator[Result]:
        for chunk in chunks:
            heads, payloads = self._worker.process(list(chunk), mode)
            decoded = wire.msgspec.msgpack.decode(wire.msgspec.msgpack.encode(heads))
            yield Result(decoded, memoryview(b"".join(payloads)))


def run(
    target: Path, source: Synthetic | None = None, options: ConvertOptions = SMALL, files: Files | None = None, **changes: Any
) -> Summary:
    """Convert in this process. ``changes``: options by name."""
    kept = convert_module.Pool
    convert_module.Pool = InProcessPool  # type: ignore[misc, assignment]
    try:
        return convert(source or synthetic(), target, with_options(options, **changes), files=files)
    finally:
        convert_module.Pool = kept  # type: ignore[misc]


def with_options(options: ConvertOptions, **changes: Any) -> ConvertOptions:
    """Options with some changed."""
    names = options.__dataclass_fields__
    return ConvertOptions(**{name: changes.get(name, getattr(options, name)) for name in names})


def digests(target: Path) -> dict[str, str]:
    """SHA-256 of every file that the same conversion must make the same."""
    return {
        name: hashlib.sha256((target / name).read_bytes()).hexdigest()
        for name in sorted(os.listdir(target))
        if name.endswith(COMPARED)
    }


def leftovers(target: Path) -> list[str]:
    """What a finished target must not hold."""
    return [name for name in os.listdir(target) if name.startswith(".")]


def values(target: Path) -> list[dict[str, Any]]:
    """Every sample, decoded and checked."""
    return list(lfdata.open(target))


def verified(target: Path) -> None:
    """Every byte of every shard, padding included, and the digests of the manifest."""
    for shard in read_manifest(target).shards:
        found = list(verify_file(target / shard.file, sha256=shard.sha256))
        assert not found, found


def finish(
    target: Path, source: Synthetic | None = None, options: ConvertOptions = SMALL, files: Files | None = None
) -> Summary:
    """Do what a user does after a failure: resume, or start over where nothing was begun and an old data set is in the way."""
    begun = (target / ".work" / "journal").exists() or not (target / "manifest.json").exists()
    return run(target, source, options, files, resume=begun, overwrite=not begun)


def readable(target: Path) -> str:
    """Digest of the manifest that a reader sees, after reading everything it names; ``""`` if there is no data set."""
    if not (target / "manifest.json").exists():
        return ""
    values(target)
    return hashlib.sha256((target / "manifest.json").read_bytes()).hexdigest()


def expected_digests(source: Synthetic, options: ConvertOptions = SMALL) -> dict[str, str]:
    """Digests after an uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder, "target"), source, options)
        return digests(Path(folder, "target"))


_WORKER = "import sys; sys.path += sys.argv[2:]; import faultkit; from shard_builder.worker import main; main(int(sys.argv[1]))"


def worker_command(descriptor: int) -> list[str]:
    """Command line of a real worker process that knows the synthetic source."""
    tests = Path(__file__).resolve().parent
    return [sys.executable, "-c", _WORKER, str(descriptor), str(tests), str(tests.parents[1]), str(tests.parents[1] / "tools")]


def run_processes(target: Path, source: Synthetic, options: ConvertOptions, **more: Any) -> Summary:
    """Convert with real worker processes."""
    kept = pool_module.worker_command
    pool_module.worker_command = worker_command
    try:
        return convert(source, target, options, **more)
    finally:
        pool_module.worker_command = kept


def reported(target: Path) -> list[dict[str, Any]]:
    """The entries of ``errors.jsonl``."""
    return [json.loads(line) for line in (target / "errors.jsonl").read_text().splitlines()]
