"""Whether a subject does the work: every key once, shapes and dtypes, pixels or the distribution of crops."""

from __future__ import annotations

import hashlib
import io
import math
import os
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.harness import multimodal
from benchmarks.harness.pictures import Source, distance
from benchmarks.harness.reference import nearness, reference
from benchmarks.harness.sources import opened
from benchmarks.harness.statistics import kolmogorov_smirnov_p
from benchmarks.harness.work import (
    REENCODED_PSNR,
    REENCODED_TOLERANCE,
    SIGNATURE,
    Workload,
    draw_crop,
    image_files,
    key_faults,
    resized,
    sequences,
    signatures,
)

RAMP_WIDTH, RAMP_HEIGHT, RAMPS = 512, 384, 512
PHOTO_WIDTH, PHOTO_HEIGHT, PHOTOS = 3000, 2000, 64
P_LIMIT = 0.001
# Source pixels that a crop could be moved by, at least, where its place is looked at.
LEAST_ROOM = 40
# Crops of two epochs whose sides and places differ by less than this many source pixels are the same; and the share of keys that may have
# the same ones. By chance, one in a million has.
SAME_CROP, MOST_AGAIN = 3.0, 0.05
# Mean difference of signatures from the reference's. Right subjects stay below a half, those that encode anew below one.
SIGNATURE_TOLERANCE, REENCODED_SIGNATURE = 1.0, 2.0
# Root mean square difference of a crop's cells from the nearest rectangle of the source; and the share of pictures for which the search
# may end in a wrong place.
FARTHEST, FAR_SHARE = 6.0, 0.05
# Places that are looked at before a crop is called far.
LOOK_CLOSELY = 80
# Pixels of a source's shorter side from which on cells of its smallest crops are some pixels wide.
SMALLEST = 100
# Shades of blue that tell the ramps apart; JPEG moves the mean of a crop by less than half a step.
SHADES, SHADE_STEP = 32, 8


class WrongWorkError(Exception):
    """A subject does something else than the workload. The message says what."""


class UnlikelyError(WrongWorkError):
    """What chance does in one of a thousand checks of a subject that does the work."""


def check_keys(work: Workload, answer: dict[str, Any], samples: int) -> None:
    """Every key exactly once an epoch, in the shapes and dtypes of the workload."""
    for epoch, keys in enumerate(answer["keys"]):
        # The last epoch may have been left early: its keys are looked at as far as they came.
        cut = bool(answer.get("cut")) and epoch == len(answer["keys"]) - 1
        faults = repeated(keys, samples) if cut else key_faults(keys, samples)
        if faults:
            raise WrongWorkError(f"epoch {epoch}: {faults}")
    if not work.arrays:
        return
    wanted = sorted([name, list(shape), dtype] for name, (shape, dtype) in work.arrays.items())
    found = sorted([name, list(shape), dtype] for name, shape, dtype in answer["kinds"])
    if found != wanted:
        raise WrongWorkError(f"arrays are {found}; the workload asks for {wanted}")


def repeated(keys: list[int], samples: int) -> str:
    """What is wrong with the beginning of an epoch; empty if nothing."""
    again = [key for key, count in Counter(keys).items() if count > 1]
    foreign = [key for key in keys if not 0 <= key < samples]
    if not again and not foreign:
        return "" if keys else "no key came"
    return f"{len(again)} keys come more than once, {len(foreign)} are unknown (first: {(again or foreign)[0]})"


def check_pixels(work: Workload, source: Path, kept: Path, reencodes: str = "") -> dict[str, float]:
    """Compare the kept pictures with the nearer of two references: worst mean absolute difference, median PSNR in dB. ``reencodes``: how
    the subject's format encodes pictures anew, for which the limits are wider."""
    files = image_files(source)
    tolerance, least = (REENCODED_TOLERANCE, REENCODED_PSNR) if reencodes else (work.tolerance, work.least_psnr)
    found = np.load(kept, allow_pickle=False)
    worst, psnr = 0.0, []
    for key, image in zip(found["keys"].tolist(), found["image"], strict=True):
        mean, decibels = nearness(image, files[key])
        if mean > tolerance:
            raise WrongWorkError(
                f"key {key} ({files[key].name}): mean absolute difference {mean:.1f} from the reference; {tolerance:g} is allowed"
            )
        worst = max(worst, mean)
        psnr.append(decibels)
    if not psnr:
        raise WrongWorkError("no picture to compare")
    middle = float(np.median(psnr))
    if middle < least:
        raise WrongWorkError(
            f"median PSNR {middle:.1f} dB of {len(psnr)} pictures to the reference; {least:g} dB are asked for"
        )
    return {"compared": len(psnr), "worst_mean_difference": worst, "median_psnr_db": middle}


def reference_signatures(source: Path, known: Path) -> NDArray[np.float16]:
    """Signatures of the reference of every key; kept in the file ``known``, since making them decodes the whole source."""
    if not known.exists():
        made = np.concatenate([signatures(reference(path)[None]) for path in image_files(source)])
        known.parent.mkdir(parents=True, exist_ok=True)
        half = known.with_name(f".{os.getpid()}.{known.name}")
        try:
            np.save(half, made)
            half.rename(known)
        except BaseException:
            half.unlink(missing_ok=True)
            raise
    found: NDArray[np.float16] = np.load(known, allow_pickle=False)
    return found


def check_signatures(source: Path, kept: Path, known: Path, reencodes: str = "") -> int:
    """Compare the signature of every picture that came with the reference's; gives how many."""
    found = np.load(kept, allow_pickle=False)
    keys = found["signature_keys"]
    if not len(keys):
        return 0
    wanted = reference_signatures(source, known)[keys]
    means = np.abs(found["signatures"].astype(np.float32) - wanted).mean((1, 2, 3))
    wrong = np.flatnonzero(means > (REENCODED_SIGNATURE if reencodes else SIGNATURE_TOLERANCE))
    if len(wrong):
        key = int(keys[wrong[0]])
        raise WrongWorkError(
            f"{len(wrong)} of {len(keys)} pictures are not those of their keys; first key {key} ({image_files(source)[key].name}): "
            f"the means of {SIGNATURE} x {SIGNATURE} cells differ by {means[wrong[0]]:.1f}"
        )
    return len(keys)


def check_built(work: Workload, source: Path, kept: Path) -> dict[str, float]:
    """Compare stored JPEGs with the source resized by PIL (antialiased bilinear): size, then mean absolute difference."""
    files = image_files(source)
    found = np.load(kept, allow_pickle=False)
    worst, end = 0.0, 0
    for key, stop in zip(found["keys"].tolist(), found["ends"].tolist(), strict=True):
        image: Any = Image.open(io.BytesIO(found["data"][end:stop].tobytes()))
        original = opened(files[key])
        wanted = original.resize(resized(*original.size), Image.Resampling.BILINEAR)
        # Rounding of the longer side is left to the subject.
        if image.format != "JPEG" or max(abs(a - b) for a, b in zip(image.size, wanted.size, strict=True)) > 1:
            raise WrongWorkError(
                f"key {key} ({files[key].name}): {image.format} of {image.size}; JPEG of {wanted.size} is asked for"
            )
        if image.size != wanted.size:
            wanted = original.resize(image.size, Image.Resampling.BILINEAR)
        mean = float(np.abs(np.asarray(image.convert("RGB"), np.float64) - np.asarray(wanted)).mean())
        if mean > work.tolerance:
            raise WrongWorkError(
                f"key {key} ({files[key].name}): mean absolute difference {mean:.1f}; {work.tolerance:g} is allowed"
            )
        worst, end = max(worst, mean), stop
    if not len(found["keys"]):
        raise WrongWorkError("no picture to compare")
    return {"compared": len(found["keys"]), "worst_mean_difference": worst}


def check_digests(source: Path, answer: dict[str, Any]) -> dict[str, float]:
    """What was read must be the source's files, byte for byte."""
    files = image_files(source)
    for key, digest in answer["digests"].items():
        if hashlib.sha256(files[int(key)].read_bytes()).hexdigest() != digest:
            raise WrongWorkError(f"key {key} ({files[int(key)].name}): other bytes than the source's")
    if not answer["digests"]:
        raise WrongWorkError("nothing to compare")
    return {"compared": len(answer["digests"])}


def check_multimodal(work: Workload, source: Path, kept: Path) -> dict[str, float]:
    """Compare with the plain worker: ids and annotation equal, picture within the tolerance, speech within 1 % of its level."""
    plain, parts = multimodal.with_libraries(source), multimodal.parts_of(source)
    found = np.load(kept, allow_pickle=False)
    worst_picture = worst_audio = 0.0
    for row, key in enumerate(found["keys"].tolist()):
        wanted = plain({part: path.read_bytes() for part, path in parts[key].items()})
        where = f"key {key} ({parts[key]['jpg'].name})"
        for name in ("tokens", "annotation"):
            if not np.array_equal(found[name][row], wanted[name]):
                raise WrongWorkError(f"{where}: {name} differ from the plain worker's")
        picture = float(np.abs(found["image"][row].astype(np.float64) - wanted["image"]).mean())
        level = max(1.0, float(np.sqrt((wanted["audio"].astype(np.float64) ** 2).mean())))
        audio = float(np.sqrt(((found["audio"][row].astype(np.float64) - wanted["audio"]) ** 2).mean())) / level
        if picture > work.tolerance or audio > 0.01:
            raise WrongWorkError(f"{where}: picture differs by {picture:.2f}, speech by {audio:.1%} of its level")
        worst_picture, worst_audio = max(worst_picture, picture), max(worst_audio, audio)
    if not len(found["keys"]):
        raise WrongWorkError("no sample to compare")
    return {"compared": len(found["keys"]), "worst_mean_difference": worst_picture, "worst_audio_difference": worst_audio}


def check_resumed(before: list[int], after: list[int], samples: int) -> dict[str, Any]:
    """Keys of the whole epoch: those up to the state, and those after resuming. What is lost or doubled is told, not refused."""
    counts = Counter(before + after)
    return {
        "missing": samples - sum(0 <= key < samples for key in counts),
        "again": sum(count > 1 for count in counts.values()),
    }


def check_tokens(source: Path, kept: Path) -> dict[str, float]:
    """The kept sequences must be those of the source, id for id, and all others by their CRC-32."""
    wanted, found = sequences(source), np.load(kept, allow_pickle=False)
    for key, row in zip(found["keys"].tolist(), found["tokens"], strict=True):
        if not np.array_equal(wanted[key], row):
            raise WrongWorkError(f"key {key}: {int((wanted[key] != row).sum())} of {row.size} ids differ from the source")
    if not len(found["keys"]):
        raise WrongWorkError("no sequence to compare")
    for key, code in zip(found["signature_keys"].tolist(), found["signatures"].tolist(), strict=True):
        if zlib.crc32(wanted[key].tobytes()) != code:
            raise WrongWorkError(f"key {key}: other ids than the source's")
    return {"compared": len(found["keys"]), "compared_signatures": len(found["signature_keys"])}


def check_real(work: Workload, source: Path, kept: Path) -> dict[str, float]:
    """Random crops of the source itself: each must lie somewhere in the picture of its key, as far as the means of its cells tell. Of pictures
    under :data:`SMALLEST` they tell nothing: those are passed over, and counted."""
    found, files = np.load(kept, allow_pickle=False), image_files(source)
    keys = found["keys"].tolist()
    if not keys:
        raise WrongWorkError("no picture to compare")
    native = float(found["image"].shape[1]) if work.work == "native" else None
    far: list[tuple[int, float]] = []
    distances: list[float] = []
    for key, image in zip(keys, found["image"], strict=True):
        here = Source(files[key], native)
        if min(here.full) < SMALLEST:
            continue
        away = distance(here, image)
        distances.append(away if away <= FARTHEST else distance(here, image, LOOK_CLOSELY))
        if distances[-1] > FARTHEST:
            far.append((key, distances[-1]))
        if len(far) > max(1, FAR_SHARE * len(keys)):
            key, away = far[0]
            raise WrongWorkError(
                f"{len(far)} of {len(distances)} pictures are no crops of their source; first key {key} ({files[key].name}): "
                f"the nearest crop differs by {away:.1f}"
            )
    result: dict[str, float] = {"real_crops": len(distances), "too_small": len(keys) - len(distances), "far": len(far)}
    return result | ({"median_distance": float(np.median(distances))} if distances else {})


def shade(key: int) -> int:
    """The blue of a ramp: one of 32, so that a picture under a wrong key is seen 31 times out of 32."""
    return SHADE_STEP // 2 + SHADE_STEP * (hashlib.sha256(b"%d" % key).digest()[0] % SHADES)


def write_ramps(folder: Path, width: int = RAMP_WIDTH, height: int = RAMP_HEIGHT, count: int = RAMPS) -> None:
    """Pictures whose red is the x coordinate and whose green is the y coordinate, so that a crop tells where it comes from; the blue tells
    the key. All of them, or none."""
    half = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        _write_ramps(half, width, height, count)
        half.rename(folder)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise


def _write_ramps(folder: Path, width: int, height: int, count: int) -> None:
    folder.mkdir(parents=True)
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    made: dict[int, bytes] = {}
    for key in range(count):
        blue = shade(key)
        if blue not in made:
            pixels = np.stack([x, y, np.full_like(x, blue)], 2).round().astype(np.uint8)
            out = io.BytesIO()
            Image.fromarray(pixels).save(out, "JPEG", quality=98, subsampling=0)
            made[blue] = out.getvalue()
        (folder / f"{key:06d}.jpg").write_bytes(made[blue])


def check_shades(keys: list[int], images: NDArray[np.uint8]) -> None:
    """Every ramp must come under its own key."""
    inner = slice(images.shape[1] // 8, -(images.shape[1] // 8))
    blue = images[:, inner, inner, 2].mean((1, 2)) if len(images) else np.zeros(0)
    for key, found in zip(keys, blue.tolist(), strict=True):
        if abs(found - shade(key)) > SHADE_STEP / 2:
            raise WrongWorkError(
                f"key {key} came with another key's picture: the blue is {found:.1f}; {shade(key)} was written"
            )


def rectangle(image: NDArray[np.uint8]) -> tuple[float, float, bool, float, float]:
    """Width and height in source pixels of the crop of a ramp picture, whether it was flipped, and where it lies: left and top."""
    size = len(image)
    at = np.arange(size)
    inner = slice(size // 8, size - size // 8)  # edges are extrapolated by some filters
    along = np.polyfit(at[inner], image[:, inner, 0].mean(0), 1) * (RAMP_WIDTH - 1) / 255
    down = np.polyfit(at[inner], image[inner, :, 1].mean(1), 1) * (RAMP_HEIGHT - 1) / 255
    # The coordinate of a pixel is that of its centre; an output pixel lies half a pixel from the edge, too.
    left = min(np.polyval(along, -0.5), np.polyval(along, size - 0.5)) + 0.5
    top = np.polyval(down, -0.5) + 0.5
    return abs(along[0]) * size, abs(down[0]) * size, bool(along[0] < 0), float(left), float(top)


def check_other_crops(keys: Sequence[int], crops: Sequence[tuple[float, ...]]) -> None:
    """Crops of a later epoch must not be those of an epoch before, key by key. A crop is what :func:`rectangle` tells, or a place."""
    known: dict[int, tuple[float, ...]] = {}
    again = pairs = 0
    for key, crop in zip(keys, crops, strict=True):
        if key in known:
            pairs += 1
            again += all(abs(a - b) < SAME_CROP for a, b in zip(crop, known[key], strict=True))
        known[key] = crop
    if pairs and again > MOST_AGAIN * pairs:
        raise WrongWorkError(f"{again} of {pairs} pictures came with the crop of the epoch before: crops are to be drawn anew")


def check_crops(kept: Path) -> dict[str, float]:
    """Compare the crops of the ramp pictures with the stated distribution."""
    found = np.load(kept, allow_pickle=False)
    images = found["image"]
    check_shades(found["keys"].tolist(), images)
    crops = [rectangle(image) for image in images]
    # A flip counts as another place.
    check_other_crops(found["keys"].tolist(), [(w, h, left, top, 99.0 * flip) for w, h, flip, left, top in crops])
    rng = random.Random(0)
    drawn = [draw_crop(rng, RAMP_WIDTH, RAMP_HEIGHT)[2:] for _ in range(20 * len(crops))]
    flips = sum(flipped for _, _, flipped, _, _ in crops) / len(crops)
    result = {
        "crops": len(crops),
        "area_p": kolmogorov_smirnov_p([math.log(w * h) for w, h, *_ in crops], [math.log(w * h) for w, h in drawn]),
        "aspect_p": kolmogorov_smirnov_p([math.log(w / h) for w, h, *_ in crops], [math.log(w / h) for w, h in drawn]),
        "flips": flips,
    }
    for name, extent, sides in (("left", RAMP_WIDTH, 0), ("top", RAMP_HEIGHT, 1)):
        # Of those that have room: as a share of it, anywhere with the same probability.
        room = [(crop[3 + sides], extent - crop[sides]) for crop in crops if extent - crop[sides] >= LEAST_ROOM]
        result[f"{name}_p"] = kolmogorov_smirnov_p(
            [at / free for at, free in room], [(n + 0.5) / (20 * len(room)) for n in range(20 * len(room))]
        )
    for name in ("area_p", "aspect_p", "left_p", "top_p"):
        if result[name] < P_LIMIT:
            raise UnlikelyError(
                f"the distribution of crop {name[:-2]}s is not the stated one (Kolmogorov-Smirnov p {result[name]:.1g})"
            )
    # Four standard deviations of a fair coin.
    if abs(flips - 0.5) > 2 / math.sqrt(len(crops)):
        raise UnlikelyError(f"{flips:.0%} of the pictures were flipped; half should be")
    return result


def check_native(kept: Path) -> dict[str, float]:
    """Crops of the large ramp pictures: of native size, and anywhere with the same probability."""
    found = np.load(kept, allow_pickle=False)
    check_shades(found["keys"].tolist(), found["image"])
    images = found["image"].astype(np.float64)
    places: list[list[float]] = []
    for image in images:
        place = []
        for pixels, axis, extent in ((image[:, :, 0], 0, PHOTO_WIDTH), (image[:, :, 1], 1, PHOTO_HEIGHT)):
            line = pixels.mean(axis)
            slope, _ = np.polyfit(np.arange(len(line)), line, 1)
            scale = slope * (extent - 1) / 255
            if not 0.85 < scale < 1.15:
                raise WrongWorkError(f"a pixel of the crop is {scale:.2f} pixels of the photo; it should be one")
            place.append(line.mean() * (extent - 1) / 255 - (len(line) - 1) / 2)
        places.append(place)
    check_other_crops(found["keys"].tolist(), [tuple(place) for place in places])
    rng = np.random.default_rng(0)
    result: dict[str, float] = {"crops": len(places)}
    for axis, extent in enumerate((PHOTO_WIDTH, PHOTO_HEIGHT)):
        drawn = rng.uniform(0, extent - 224, 20 * len(places)).tolist()
        p = kolmogorov_smirnov_p([place[axis] for place in places], drawn)
        if p < P_LIMIT:
            raise UnlikelyError(f"crops are not spread evenly over the photo's {'xy'[axis]} (Kolmogorov-Smirnov p {p:.1g})")
        result[f"{'xy'[axis]}_p"] = p
    return result
