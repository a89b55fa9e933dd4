"""SPDL: a pipeline of threads over a folder of files; FFmpeg decodes, crops and scales in one filter graph, without the GIL.

It reads files, and has neither a format of its own nor a state to resume from. FFmpeg comes from the system: SPDL needs its shared
libraries, libavfilter and libavdevice among them, of one major version 4 to 9.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload, centre, draw_crop, image_files, resized, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import SIDE, anywhere

TITLE = "SPDL (FFmpeg)"
IMPORTS = ("torch", "spdl.pipeline", "spdl.io", "spdl.io.utils")
FORMAT = "files"
WORK = ("crop", "centre", "native")
prepare = torch_pil.prepare
RGB = "format=pix_fmts=rgb24"
SCALE = f"flags=bilinear,{RGB}"
"""Bilinear of FFmpeg is antialiased when it scales down; it makes RGB in the same pass."""


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads that decode; at least one."""
    return sweep(cores)


def versions() -> dict[str, str]:
    """FFmpeg's libraries, as they are found."""
    import spdl.io.utils

    found = spdl.io.utils.get_ffmpeg_versions()
    return {
        name: ".".join(map(str, version)) if isinstance(version, tuple | list) else str(version)
        for name, version in found.items()
    }


class Files:
    """Keys and paths in another order at every pass, which is an epoch."""

    def __init__(self, source: Path, seed: int) -> None:
        self.items = [(key, str(path)) for key, path in enumerate(image_files(source))]
        self.rng = random.Random(seed)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        self.rng.shuffle(self.items)
        yield from self.items


def graph(work: Workload, rng: random.Random, width: int, height: int) -> str:
    """FFmpeg's filters for one picture."""
    if work.work == "native":
        x, y = anywhere(rng, width, height)
        return f"crop={SIDE}:{SIDE}:{x}:{y}:exact=1,{RGB}"
    if work.work == "crop":
        x, y, w, h = draw_crop(rng, width, height)
        # exact: not rounded to whole chroma samples.
        return f"crop={w}:{h}:{x}:{y}:exact=1,scale=224:224:{SCALE}{',hflip' if rng.random() < 0.5 else ''}"
    w, h = resized(width, height)
    x, y = centre(w, h)
    return f"scale={w}:{h}:{SCALE},crop=224:224:{x}:{y}"


def decoder(work: Workload, seed: int) -> Callable[[tuple[int, str]], tuple[int, Any]]:
    """Key and path to key and frame."""
    import spdl.io

    rng = random.Random(seed)

    def one(item: tuple[int, str]) -> tuple[int, Any]:
        key, path = item
        packets = spdl.io.demux_image(path)
        codec = packets.codec
        return key, spdl.io.decode_packets(packets, filter_desc=graph(work, rng, codec.width, codec.height))

    return one


def collate(samples: list[tuple[int, Any]]) -> Batch:
    """Frames copied into one buffer, seen as a tensor: as SPDL's guide to good pipelines has it."""
    import spdl.io

    keys = [key for key, _ in samples]
    return Batch(keys, {"image": spdl.io.to_torch(spdl.io.convert_frames([frame for _, frame in samples]))})


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end, from one pipeline that is kept between them. A picture that fails ends it."""
    import spdl.io.utils

    spdl.io.utils.get_ffmpeg_versions()  # says at once when FFmpeg is missing
    return pipeline(workload, settings, decoder(workload, settings.seed), collate)


def pipeline(
    workload: Workload, settings: Settings, decode: Callable[[Any], Any], together: Callable[[Any], Batch]
) -> Iterator[Iterator[Batch]]:
    """Threads that decode, with three batches ahead."""
    from spdl.pipeline import PipelineBuilder

    builder: Any = (
        PipelineBuilder()
        .add_source(Files(settings.source, settings.seed), continuous=True)
        .pipe(decode, concurrency=settings.workers)
        .aggregate(workload.batch)
        .pipe(together)
        .add_sink(3)
    )
    running: Any = builder.build(num_threads=settings.workers, max_failures=0)
    with running.auto_stop():
        while True:
            yield iter(running)
