"""Memory is reserved once: after the first steps no process of the loader asks the kernel for any."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "loader"))
import batchkit

from lfdata.codecs.pixels import native_module

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
    pytest.mark.skipif(native_module is None, reason="lfdata.codecs._pixels is not built"),
]
CALLS = ("mmap", "munmap", "mremap", "brk", "memfd_create", "clone", "clone3")
WARM, STEPS = 300, 1000
# What the allocator of the C library and Python's do now and then; once in ten steps would be a hundred.
FEW = 8
SCRIPT = f"""
import os, sys
import lfdata
from lfdata import transforms as T

path, fields, keep = sys.argv[1], sys.argv[2], sys.argv[3] == "keep"
fields = {{"image": [T.RandomResizedCrop(48), T.RandomHorizontalFlip()], "label": None}} if fields == "image" else {{"ids": None}}
loader = lfdata.Loader(path, 8, fields, threads=2, isolate=True)
kept, steps = [], 0
while True:
    for batch in loader:
        steps += 1
        if keep:
            kept.append({{name: array.clone() for name, array in batch.items()}})
        if steps in ({WARM}, {WARM + STEPS}):
            os.sched_yield()  # seen in the trace: steady state begins, and ends
        if steps == {WARM + STEPS}:
            os._exit(0)
"""


def _called(path: Path, trace: Path, fields: str, keep: str = "") -> Counter[str]:
    """Calls for memory in steady state, of all threads of all processes."""
    command = ["strace", "-f", "-qq", "-e", f"trace={','.join(CALLS)},sched_yield", "-o", str(trace), sys.executable]
    subprocess.run([*command, "-c", SCRIPT, str(path), fields, keep], check=True, timeout=240)
    found, marks = Counter[str](), 0
    for line in trace.read_text().splitlines():
        if (call := re.match(r"\d+\s+(\w+)\(", line)) is None:
            continue
        marks += call[1] == "sched_yield"
        if marks == 1 and call[1] in CALLS:
            found[call[1]] += 1
    assert marks == 2
    return found


@pytest.mark.parametrize("fields", ["image", "tokens"])
def test_a_thousand_steps_ask_for_no_memory(tmp_path: Path, fields: str) -> None:
    data = tmp_path / "data"
    if fields == "image":
        batchkit.write_pictures(data, 200, size=120)
    else:
        batchkit.write_numbers(data, 4000)
    found = _called(data, tmp_path / "trace", fields)
    assert found.total() <= FEW, found
    # The negative control: a consumer that keeps copies of its batches is seen.
    assert _called(data, tmp_path / "control", fields, "keep").total() > FEW
