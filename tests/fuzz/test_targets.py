"""The fuzz targets with seeded mutations, always; and under atheris where it is installed."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from targets import TARGETS, seeds

HERE = Path(__file__).parent
RUNS = {"header": 3000, "directory": 3000, "index": 400, "manifest": 3000}


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut out, doubled or put in."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        at = rng.randrange(len(out) + 1)
        what = rng.randrange(4)
        if what == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif what == 1:
            del out[at : at + rng.randrange(1, 80)]
        elif what == 2:
            out[at:at] = out[at : at + rng.randrange(1, 80)]
        else:
            out[at : at + 8] = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(8, "little")
    return bytes(out)


@pytest.mark.parametrize("name", TARGETS)
def test_seeded_mutations(name: str) -> None:
    rng = random.Random(name)
    corpus = seeds(name)
    for case in range(RUNS[name]):
        data = mutated(rng, rng.choice(corpus)) if rng.random() < 0.9 else rng.randbytes(rng.randrange(300))
        try:
            TARGETS[name](data)
        except Exception as error:
            error.add_note(f"target {name}, case {case}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_atheris(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: it has wheels for few Python versions; pip install atheris to run this")
    for number, data in enumerate(seeds(name)):
        (tmp_path / f"seed{number}").write_bytes(data)
    command = [
        sys.executable,
        str(HERE / "targets.py"),
        name,
        "-max_total_time=20",
        "-rss_limit_mb=2048",
        "-timeout=10",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
