"""``lfbench convert``: building shards from image files against a bare loop over the same decode, resize and encode."""

from __future__ import annotations

import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.record import REPEATS, interleave, ratio, save, summary

CASES = {
    "webp q80 256": {"codec": "webp", "quality": "80", "shorter": "256"},
    "jpeg q90 256": {"codec": "jpeg", "quality": "90", "shorter": "256"},
    "webp q80 full size": {"codec": "webp", "quality": "80"},
}


def bare(paths: list[str], options: dict[str, str]) -> int:
    """What any converter must do to each picture, and nothing else; returns the bytes made."""
    from PIL import Image

    total = 0
    for path in paths:
        with open(path, "rb") as file:
            image: Image.Image = Image.open(io.BytesIO(file.read()))
            image.load()
        if image.mode != "RGB":
            image = image.convert("RGB")
        if "shorter" in options:
            scale = int(options["shorter"]) / min(image.size)
            if scale < 1:
                image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
        out = io.BytesIO()
        if options["codec"] == "webp":
            image.save(out, "WEBP", quality=int(options["quality"]), method=4)
        else:
            image.save(out, "JPEG", quality=int(options["quality"]), subsampling="4:2:0")
        total += len(out.getvalue())
    return total


def timed(commands: list[list[str]]) -> tuple[float, float]:
    """Wall and CPU seconds of processes run side by side."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for command in commands]
    for process in running:
        _, text = process.communicate()
        if process.returncode:
            raise click.ClickException(f"{process.args!r} failed: {text.decode(errors='replace')[-500:]}")
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _bare_commands(folder: Path, count: int, case: str, limit: int) -> list[list[str]]:
    return [[sys.executable, "-m", __name__, str(folder), case, str(n), str(count), str(limit)] for n in range(count)]


def _files(folder: Path, limit: int) -> list[str]:
    names = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png") and p.is_file())
    return [str(name) for name in names[:limit]]


def _copy(folder: Path, limit: int, into: Path) -> Path:
    """The pictures that are used, as hard links or copies, so that both subjects see the same folder."""
    target = into / "pictures"
    target.mkdir()
    for number, name in enumerate(_files(folder, limit)):
        place = target / f"{number:06d}{Path(name).suffix}"
        try:
            os.link(name, place)
        except OSError:
            shutil.copyfile(name, place)
    return target


@click.command("convert")
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Folder of JPEG or PNG files."
)
@click.option("--limit", default=600, show_default=True, help="Pictures used.")
@click.option("--case", "cases", multiple=True, type=click.Choice(tuple(CASES)), help="Cases measured (default: all).")
@click.option("--repeats", default=REPEATS, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def command(data: Path, limit: int, cases: tuple[str, ...], repeats: int, output: Path | None) -> None:
    """Images/s of `shard-builder convert` with 1 and 2 workers beside a bare loop in as many processes."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        pictures = _copy(data, limit, Path(scratch))
        count = len(_files(pictures, limit))
        for case in cases or CASES:
            options = CASES[case]
            for workers in (1, 2):
                results[f"{case}, {workers} process{'es' if workers > 1 else ''}"] = _case(
                    pictures, count, case, options, workers, repeats
                )
    for name, found in results.items():
        click.echo(
            f"{name:32} ratio {found['rate_ratio']['median']:.2f} [{found['rate_ratio']['min']:.2f}, {found['rate_ratio']['max']:.2f}]"
            f"  ours {found['ours_images_s']['median']:.1f}/s  bare {found['bare_images_s']['median']:.1f}/s"
            f"  CPU ratio {found['cpu_ratio']['median']:.2f}"
        )
    path = save("convert", {"data": data.name, "pictures": count, "repeats": repeats}, results, output)
    click.echo(f"record: {path}")


def _case(pictures: Path, count: int, case: str, options: dict[str, str], workers: int, repeats: int) -> dict[str, Any]:
    target = pictures.parent / "target"
    field = "image:image=image," + ",".join(f"{name}={value}" for name, value in options.items())
    ours = [sys.executable, "-m", "shard_builder.cli", "convert", str(pictures), str(target)]
    ours += ["--kind", "image-folder", "--field", field, "--workers", str(workers), "--quiet", "--overwrite"]
    cpu: dict[str, list[float]] = {"ours": [], "bare": []}

    def run(name: str, commands: list[list[str]]) -> Callable[[], float]:
        def once() -> float:
            wall, used = timed(commands)
            cpu[name].append(used)
            return count / wall

        return once

    rates = interleave(
        {"ours": run("ours", [ours]), "bare": run("bare", _bare_commands(pictures, workers, case, count))}, repeats
    )
    shutil.rmtree(target)
    return {
        "ours_images_s": summary(rates["ours"]) | {"repeats": rates["ours"]},
        "bare_images_s": summary(rates["bare"]) | {"repeats": rates["bare"]},
        "rate_ratio": ratio(rates["ours"], rates["bare"]),
        "cpu_ratio": ratio(cpu["bare"], cpu["ours"]),
        "cpu_seconds": cpu,
    }


def _share(arguments: list[str]) -> None:
    folder, case, number, count, limit = arguments
    bare(_files(Path(folder), int(limit))[int(number) :: int(count)], CASES[case])


if __name__ == "__main__":
    _share(sys.argv[1:])
