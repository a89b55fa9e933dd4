"""The state of a loader: where it is, and of what."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from lfdata.codecs.pil_versions import pil_report
from lfdata.codecs.pixels import native_report
from lfdata.errors import StateError
from lfdata.loader.spec import Spec, differences

STATE_VERSION = 1
MOST_NAMED = 8


def state_of(spec: Spec, accumulate: int, epoch: int, done: int, built: Mapping[str, str]) -> dict[str, Any]:
    """JSON-able, the same on every rank. ``done``: micro-batches of the epoch; ``built``: what decodes."""
    return {
        "version": STATE_VERSION,
        "epoch": epoch,
        "samples": done * spec.batch // accumulate,
        "batch_size": spec.batch,
        # Within a step they say which of its rows are consumed; between steps they do not matter.
        "world_size": spec.world,
        "accumulate": accumulate,
        "identity": spec.identity,
        "build": dict(built),
    }


def position_of(
    state: Mapping[str, Any], spec: Spec, accumulate: int, built: Mapping[str, str], allow_batch_change: bool
) -> tuple[int, int]:
    """Epoch and micro-batches done in it, by a state of a loader with such a spec.

    Raises:
        StateError: not a state, or one of other data, order, transforms, or batch size (see docs/loader.md).
    """
    if state.get("version") != STATE_VERSION:
        raise StateError(f"state version {state.get('version')!r}; this loader reads version {STATE_VERSION}")
    try:
        epoch, samples, batch, world, micro = (
            int(state[name]) for name in ("epoch", "samples", "batch_size", "world_size", "accumulate")
        )
        theirs, saved = dict(state["identity"]), dict(state["build"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"not a state of a Loader: {error!r}") from error
    if min(epoch, samples) < 0 or min(batch, world, micro) < 1:
        raise StateError(f"not a state of a Loader: epoch {epoch}, {samples} samples, batches of {batch}")
    if differing := differences(theirs, spec.identity):
        raise StateError(f"the state belongs to another loader: it differs in {', '.join(differing[:MOST_NAMED])}")
    if batch != spec.batch:
        if not allow_batch_change:
            raise StateError(
                f"the state's batch size is {batch}, this loader's {spec.batch}; allow_batch_change=True goes on from the same sample"
            )
        if spec.order.packing is not None or spec.order.buckets is not None:
            raise StateError("the batch size of packed or bucketed data cannot change within an epoch")
    now, then = (spec.world, accumulate, spec.batch), (world, micro, batch)
    if samples % batch and now != then and max(world, spec.world) > 1:
        raise StateError(
            f"the state is within a step, after {samples % batch} of {batch} samples: which ones depends on ranks and micro-batches "
            f"({world} and {micro} in the state, {spec.world} and {accumulate} here). Save it after a whole step"
        )
    done, rest = divmod(samples * accumulate, spec.batch)
    if rest:
        raise StateError(
            f"{samples} samples of the epoch are consumed: no whole number of batches of {spec.batch} "
            f"in {accumulate} micro-batches"
        )
    changed = [f"{name}: {saved.get(name)} then, {value} now" for name, value in built.items() if saved.get(name) != value]
    if changed:
        warnings.warn(
            f"the decoders have changed since the state was saved, pixels may differ slightly: {'; '.join(changed)}",
            stacklevel=3,
        )
    return epoch, done


@cache
def build() -> Mapping[str, str]:
    """What decodes: libraries and versions. Not the vector instructions, which change no pixel."""
    return {name: str(value) for name, value in native_report().items() if name not in ("why", "simd")} | {
        "pil": str(pil_report())
    }
