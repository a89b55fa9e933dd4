"""Rows of the shared manifest of odd files; tests that use them are skipped where the shared folder is not there."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

ODD = Path(__file__).parents[2].parent / "shared" / "data" / "odd"

needs_odd = pytest.mark.skipif(not (ODD / "manifest.tsv").is_file(), reason="the shared odd files are not on this machine")


def names(*suffixes: str) -> list[str]:
    """Manifest names with one of ``suffixes``, in the manifest's order; empty where there is no manifest."""
    manifest = ODD / "manifest.tsv"
    if not manifest.is_file():
        return []
    with manifest.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t")
        wanted = tuple(suffix.lower() for suffix in suffixes)
        return [row["file"] for row in rows if row["file"].lower().endswith(wanted)]
