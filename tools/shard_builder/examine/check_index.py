"""The consolidated index says the same as the shards it stands for."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.errors import LfdataError
from lfdata.format.layout import SIZE_ROLES
from shard_builder.examine.damage import Damage, DamageList, code_of, reason_of
from shard_builder.examine.opened import DataSet
from shard_builder.examine.worker import Progress

STEP = 1 << 20


def index(data: DataSet, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``index``: ``shard`` (number): its part of every column of ``index.lfi`` against its own columns."""
    found = DamageList()
    number = task["shard"]
    name = data.index_path.name
    try:
        consolidated = data.open_index()
        shard = data.shard(number)
    except LfdataError as error:
        # A shard that cannot be opened is reported by the operation "file".
        if name in str(error):
            found.add(Damage(name, code_of(error), reason_of(error)))
        return {"damage": msgspec.to_builtins(found.listed)}
    for field in data.manifest.fields:
        for role in ("present", *SIZE_ROLES[field.kind]):
            progress.beat()
            try:
                ours, theirs = shard.file_of(field.name).column(field.name, role), consolidated.column(field.name, role)
            except LfdataError as error:
                if name in str(error):
                    found.add(Damage(name, code_of(error), reason_of(error), field=field.name))
                continue
            bad = _first_difference(ours, theirs, data.starts[number], data.manifest.shards[number].rows)
            if bad is not None:
                reason = f"column {role} is not that of {shard.name}; `shard-builder index` rebuilds it"
                found.add(
                    Damage(
                        name,
                        "index",
                        reason,
                        section="COLM",
                        shard=number,
                        row=bad,
                        index=data.starts[number] + bad,
                        field=field.name,
                    )
                )
    return {"damage": msgspec.to_builtins(found.listed)}


def _first_difference(ours: NDArray[Any] | None, theirs: NDArray[Any] | None, start: int, rows: int) -> int | None:
    """First row at which a shard's column and its part of the index differ; a missing column means present everywhere."""
    if not rows:
        return None
    ours = np.ones(rows, "u1") if ours is None else ours
    width = len(ours) // rows
    if theirs is None:
        theirs, start = np.ones(rows, "u1"), 0
    part = theirs[start * width : (start + rows) * width]
    if len(part) != len(ours) or part.dtype != ours.dtype:
        return 0
    for at in range(0, len(ours), STEP):
        # Bytes, not values: a NaN equals itself.
        mine = np.ascontiguousarray(ours[at : at + STEP]).view(np.uint8)
        other = np.ascontiguousarray(part[at : at + STEP]).view(np.uint8)
        if not np.array_equal(mine, other):
            return (at + int(np.argmax(mine != other)) // ours.dtype.itemsize) // width
    return None
