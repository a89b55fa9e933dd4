"""The tables of vectors in docs/order.md."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "order.md"


def table(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its title and rule."""
    lines = DOCUMENT.read_text().split(f"\n### {heading}\n", 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip().strip("|").split("|")])
    return rows


def digest(values: Any) -> str:
    """SHA-256 of numbers as little-endian 64-bit integers."""
    return hashlib.sha256(np.asarray(values, "<i8").tobytes()).hexdigest()
