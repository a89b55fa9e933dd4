"""Whether every sample has a field."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lfdata.dataset.dataset import ShardDataset


def has_absent(source: ShardDataset, name: str) -> bool:
    """Whether some sample lacks the field."""
    stored = source.manifest.statistics.get(name, {})
    present = stored.get("present") if isinstance(stored, dict) else None
    if isinstance(present, int):
        return present < len(source)
    return not bool(source.present(name).all())
