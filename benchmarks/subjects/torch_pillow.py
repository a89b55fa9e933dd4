"""torch's DataLoader over a folder of files, decoded and resized by plain pillow: what most people have. Elsewhere PIL may be pillow-simd,
which decodes as fast and resizes several times faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.work import Batch, Settings, Workload
from benchmarks.subjects import torch_pil

TITLE = "torch DataLoader + plain pillow"
IMPORTS = torch_pil.IMPORTS
FORMAT = "files"
WORK = ("crop", "centre", "native", "multimodal")
workers = torch_pil.workers
prepare = torch_pil.prepare
resumable = torch_pil.resumable


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    import PIL

    if "post" in PIL.__version__:
        raise ImportError(f"PIL {PIL.__version__} is pillow-simd: plain pillow needs an environment of its own")
    return torch_pil.batches(workload, prepared, settings)
