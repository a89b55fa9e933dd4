"""The state of a loader: where it is, and of what."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from lfdata.codecs.pil_versions import pil_report
from lfdata.codecs.pixels import native_report
from lfdata.errors import OptionError, StateError
from lfdata.loader.options import MOST_EPOCHS, MOST_WORLD, whole
from lfdata.loader.plan import Plan
from lfdata.loader.spec import Spec, differences
from lfdata.order.permutation import MAX_SAMPLES

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
    state: Mapping[str, Any], plan: Plan, accumulate: int, built: Mapping[str, str], allow_batch_change: bool
) -> tuple[int, int]:
    """Epoch and micro-batches done in it, by a state of a loader with such a plan.

    Raises:
        StateError: not a state, or one of other data, order, transforms, or batch size (see docs/loader.md).
    """
    spec = plan.spec
    if not isinstance(state, Mapping):
        raise StateError(f"not a state of a Loader (a mapping that state_dict() gave): {state!r:.200}")
    if isinstance(state.get("version"), bool) or state.get("version") != STATE_VERSION:
        raise StateError(f"state version {state.get('version')!r}; this loader reads version {STATE_VERSION}")
    try:
        epoch, samples = whole("epoch", state["epoch"], 0, MOST_EPOCHS), whole("samples", state["samples"], 0, MAX_SAMPLES)
        batch, micro = (whole(name, state[name], 1, MAX_SAMPLES) for name in ("batch_size", "accumulate"))
        world = whole("world_size", state["world_size"], 1, MOST_WORLD)
        theirs, saved = dict(state["identity"]), dict(state["build"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"not a state of a Loader: {error!r}") from error
    if differing := differences(theirs, spec.identity):
        raise StateError(f"the state belongs to another loader: it differs in {', '.join(differing[:MOST_NAMED])}")
    if batch != spec.batch and not allow_batch_change:
        raise StateError(
            f"the state's batch size is {batch}, this loader's {spec.batch}; allow_batch_change=True goes on from the same sample"
        )
    if batch != spec.batch and (spec.order.packing is not None or spec.order.buckets is not None):
        raise StateError(f"the batch size of packed or bucketed data cannot change: {batch} in the state, {spec.batch} here")
    warn_of_build(saved, built)
    try:
        end = plan.end(epoch, batch)
    except OptionError as error:
        raise StateError(f"not a state of this Loader: {error}") from error
    if samples > end:
        raise StateError(f"{samples} samples of epoch {epoch} are consumed in the state; in batches of {batch} it has {end}")
    if samples == end:
        # After the last batch of an epoch comes the first of the next, whatever its size.
        return min(epoch + 1, MOST_EPOCHS), 0
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
    return epoch, done


def parts_of(state: Mapping[str, Any], spec: Spec, accumulate: int, share: int, drawn: Sequence[str] = ()) -> int:
    """How many parts of the batch after a state's position are consumed, by a loader that cuts batches beyond ``share`` bytes (0: none),
    with those of what is drawn for the device.

    Raises:
        StateError: batches are cut elsewhere here.
    """
    if not state.get("parts"):
        return 0
    then = tuple(state.get(name) for name in ("share", "batch_size", "world_size", "accumulate"))
    if then != (share, spec.batch, spec.world, accumulate):
        raise StateError(
            "the state is between the parts of a batch that was beyond the budget; they are cut as there only with the same max_bytes, "
            f"batch size, ranks and accumulation (share, batch size, ranks, micro-batches are {then} in the state, "
            f"{(share, spec.batch, spec.world, accumulate)} here). Save it after a whole step"
        )
    if (found := state.get("drawn", [])) != list(drawn):
        raise StateError(
            "the state is between the parts of a batch that was beyond the budget; they are cut as there only with the same draws of "
            f"Images ({found} in the state, {list(drawn)} here). Load it into a DeviceLoader with those ops, or save it after a whole step"
        )
    try:
        return whole("parts", state["parts"], 1, MAX_SAMPLES)
    except ValueError as error:
        raise StateError(f"not a state of a Loader: {error!r}") from error


def warn_of_build(saved: Mapping[str, Any], built: Mapping[str, str]) -> None:
    """Other decoders than when a state was saved."""
    changed = [f"{name}: {saved.get(name)} then, {value} now" for name, value in built.items() if saved.get(name) != value]
    if changed:
        warnings.warn(
            f"the decoders have changed since the state was saved, pixels may differ slightly: {'; '.join(changed)}",
            stacklevel=4,
        )


@cache
def build() -> Mapping[str, str]:
    """What decodes: libraries and versions. Not the vector instructions, which change no pixel."""
    return {name: str(value) for name, value in native_report().items() if name not in ("why", "simd")} | {
        "pil": str(pil_report())
    }
