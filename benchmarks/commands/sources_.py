"""``lfbench sources``: the same pictures out of every kind of source, on one processor, against a bare loop over decode, resize and encode.

Megatron has tokens; its bare loop writes documents as 16-bit ids.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.commands.convert_ import CASES, timed
from benchmarks.harness.source_makers import BARE_TOKENS, DOCUMENTS, MAKERS, linked
from benchmarks.record import REPEATS, interleave, ratio, save, summary

# The processor a command may use, then the command.
_PINNED = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"


TOKENS = "bare tokens"


@click.command("sources")
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Folder of JPEG files."
)
@click.option("--limit", default=1000, show_default=True, help="Pictures used.")
@click.option("--case", type=click.Choice(tuple(CASES)), default="jpeg q90 256", show_default=True)
@click.option("--source", "sources", multiple=True, type=click.Choice(tuple(MAKERS)), help="Sources measured (default: all).")
@click.option("--repeats", default=REPEATS, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def command(data: Path, limit: int, case: str, sources: tuple[str, ...], repeats: int, output: Path | None) -> None:
    """Samples/s of `shard-builder convert` out of each kind of source, on one processor, beside a bare loop on one processor."""
    pictures = sorted(path for path in data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file())[:limit]
    options = ",".join(f"{name}={value}" for name, value in CASES[case].items())
    if not pictures:
        raise click.ClickException(f"{data}: no JPEG files")
    runs: dict[str, Callable[[], float]] = {}
    cpu: dict[str, list[float]] = {}
    absent: dict[str, str] = {}

    def pinned(name: str, line: list[str]) -> Callable[[], float]:
        cpu[name] = []
        core = str(min(os.sched_getaffinity(0)))

        def once() -> float:
            wall, used = timed([[sys.executable, "-c", _PINNED, core, *line]])
            cpu[name].append(used)
            return len(pictures) * (DOCUMENTS if name in ("megatron", TOKENS) else 1) / wall

        return once

    with tempfile.TemporaryDirectory() as scratch:
        for name in sources or MAKERS:
            folder = Path(scratch, name)
            folder.mkdir()
            try:
                source, *more = MAKERS[name](pictures, folder)
            except ModuleNotFoundError as error:
                absent[name] = str(error)
                continue
            more = [f"{one},{options}" if one.startswith("image:image=") else one for one in more]
            if name == "megatron":
                line = [sys.executable, "-c", BARE_TOKENS, f"{source}.bin", str(Path(scratch, "bare-tokens"))]
                runs[TOKENS] = pinned(TOKENS, line)
            line = [sys.executable, "-m", "shard_builder.cli", "convert", source, str(Path(scratch, f"{name}-out")), *more]
            runs[name] = pinned(name, [*line, "--workers", "1", "--quiet", "--overwrite"])
        bare = Path(scratch, "bare")
        linked(pictures, bare)
        runs["bare"] = pinned(
            "bare", [sys.executable, "-m", "benchmarks.commands.convert_", str(bare), case, "0", "1", str(len(pictures))]
        )
        rates = interleave(runs, repeats)
    bare_of = {name: TOKENS if name in ("megatron", TOKENS) else "bare" for name in rates}
    results: dict[str, Any] = {name: {"status": "absent", "reason": reason} for name, reason in absent.items()}
    for name, values in rates.items():
        results[name] = {
            "samples_s": summary(values) | {"repeats": values},
            "over_bare": ratio(values, rates[bare_of[name]]),
            "cpu_seconds": cpu[name],
            "cpu_over_bare": ratio(cpu[name], cpu[bare_of[name]]),
        }
        found = results[name]["over_bare"]
        click.echo(
            f"{name:14} {found['median']:.2f} of the bare loop's rate [{found['min']:.2f}, {found['max']:.2f}]"
            f"  {results[name]['samples_s']['median']:.1f}/s  CPU {results[name]['cpu_over_bare']['median']:.2f}"
        )
    for name, reason in absent.items():
        click.echo(f"{name:14} absent: {reason}")
    path = save("sources", {"data": data.name, "pictures": len(pictures), "case": case, "repeats": repeats}, results, output)
    click.echo(f"record: {path}")
