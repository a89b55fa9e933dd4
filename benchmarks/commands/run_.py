"""``lfbench run``: one workload, several subjects, checked and measured beside each other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from benchmarks.harness.entries import SUBJECTS, as_record, entries_of, subject_module
from benchmarks.harness.environments import HOME
from benchmarks.harness.report import table
from benchmarks.harness.runner import Options, Runner
from benchmarks.harness.sources import small_photo, upright
from benchmarks.harness.work import LARGE_PHOTO, WORKLOADS, Workload, limited, unusable
from benchmarks.record import REPEATS, RecordError, made, moment, writable, write


def unused(folder: Path, name: str) -> Path:
    """A file for a record that overwrites no other."""
    path, number = folder / f"{name}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.json"
    return path


@contextmanager
def _named(what: str) -> Iterator[None]:
    """A failure of the disk as one line."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"{what}: {error.strerror or error}; make room, or set LFBENCH_HOME to another directory"
        ) from error


def offering(work: Workload) -> list[str]:
    """Subjects that have a way to do a workload."""
    return [name for name in SUBJECTS if work.work in subject_module(name).WORK]


def _names(context: click.Context, _: click.Parameter, text: str | None) -> list[str]:
    # By default those that offer the workload; one that is named and does not is in the record as such.
    names = [name.strip() for name in text.split(",")] if text else offering(WORKLOADS[context.params["workload"]])
    known = {name.rstrip("_"): name for name in SUBJECTS} | {name: name for name in SUBJECTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"no subject {unknown[0]!r}; there are {', '.join(name.rstrip('_') for name in SUBJECTS)}")
    return [known[name] for name in names]


def _counts(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: numbers with commas, such as 1,2,4") from error
    if any(count < 0 for count in counts):
        raise click.BadParameter(f"{text!r}: a number of workers is 0 or more")
    return counts


@click.command("run")
@click.argument("workload", type=click.Choice(tuple(WORKLOADS)), is_eager=True)
@click.option(
    "--subjects", callback=_names, help="Names with commas (default: all); the first is what the others are compared with."
)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder of JPEG files (W3: with tokens.npy, W4: of samples as in `lfbench data stamps`).",
)
@click.option("--repeats", default=2 * REPEATS, show_default=True, type=click.IntRange(1))
@click.option(
    "--seconds",
    default=4.0,
    show_default=True,
    type=click.FloatRange(0, 3600),
    help="Least time a repeat is measured, in whole epochs.",
)
@click.option("--workers", callback=_counts, help="Worker counts to sweep, such as 1,2 (default: each subject's own).")
@click.option(
    "--step",
    default=0.16,
    show_default=True,
    type=click.FloatRange(0, 3600),
    help="Seconds the consumer of W9 takes for a batch.",
)
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Seconds after which a process is given up on.",
)
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--slow",
    default=0.0,
    type=click.FloatRange(0, 0.9),
    help="Keep the last subject's processes stopped for this share of the time (0.1: a tenth), to see that it is found.",
)
@click.option("--limit", type=click.IntRange(1), help="Use that many samples of the folder, spread over it.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The record (default: bench-data/records).")
def command(
    workload: str,
    subjects: list[str],
    data: Path,
    repeats: int,
    seconds: float,
    workers: tuple[int, ...],
    step: float,
    timeout: float,
    seed: int,
    slow: float,
    limit: int | None,
    output: Path | None,
) -> None:
    """Measure SUBJECTS doing WORKLOAD on the samples of a folder. docs/benchmarks.md says how."""
    work = WORKLOADS[workload]
    if reason := unusable(work, data) or (small_photo(data, LARGE_PHOTO) if work.work == "native" else ""):
        raise click.UsageError(f"{data}: {reason}")
    if HOME.resolve().is_relative_to(data.resolve()):
        raise click.UsageError(
            f"{data} holds {HOME}, where the harness keeps its own pictures: give the folder of the samples alone"
        )
    name = f"{workload}-{data.resolve().name}"
    if limit is not None:
        if work.source == "tokens":
            raise click.UsageError("--limit: tokens are one file; give a folder with a smaller one")
        with _named(f"{HOME / 'limited'}: the part of the data set could not be made"):
            data = limited(work, data, limit, HOME / "limited")
        if reason := unusable(work, data):
            raise click.UsageError(f"--limit {limit}: {reason}")
    place = output or unused(HOME / "records", name)
    if reason := writable(place):
        raise click.UsageError(f"--output: {reason}")
    if max(seconds, step if work.measure == "paced" else 0.0) >= timeout:
        raise click.UsageError(f"--timeout {timeout:g} ends a run before it has been measured for {seconds:g} s")
    began = moment()
    with _named(f"{HOME / 'upright'}: the upright pictures could not be made"):
        data = upright(work, data, HOME / "upright", lambda text: click.echo(text, err=True))
    options = Options(repeats=repeats, seconds=seconds, workers=workers, seed=seed, step=step, timeout=timeout)
    runner = Runner(work, data, options, lambda text: click.echo(text, err=True))
    floor = runner.memcpy() if runner.work.arrays else None
    entries = entries_of(subjects, slow)
    interrupted = False
    # What ends a job politely keeps the rounds that are whole, as Ctrl-C does.
    before = (
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if threading.current_thread() is threading.main_thread()
        else None
    )
    try:
        runner.all(entries)
    except KeyboardInterrupt:
        interrupted = True
        if not runner.rounds:
            click.echo("interrupted before the first round ended: no record", err=True)
            raise click.exceptions.Exit(130) from None
        click.echo("interrupted: what was measured goes into the record", err=True)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    runner.finish(entries)
    about = {
        "workload": workload,
        "title": work.title,
        "data": name.partition("-")[2],
        "data_digest": runner.content,
        "samples": runner.samples,
        "repeats": runner.rounds,
        "seconds": seconds,
        "cores": runner.cores,
        "seed": seed,
        "workers": list(workers),
        "step": step if runner.work.measure == "paced" else None,
        "metric": runner.work.metric,
        "floor_memcpy_samples_s": floor,
        "interrupted": interrupted,
        "limit": limit,
        "not_run": [subject_module(other).TITLE for other in offering(work) if other not in subjects],
    }
    record = made(name, about, as_record(entries, runner.work.metric), began)
    # First the table: where the record cannot be written, the figures are not lost.
    click.echo(table(record))
    try:
        click.echo(f"record: {write(record, place)}")
    except RecordError as error:
        raise click.ClickException(str(error)) from error
    if interrupted:
        raise click.exceptions.Exit(130)
    if all(entry.status != "ok" for entry in entries):
        raise click.ClickException("no subject ran")
