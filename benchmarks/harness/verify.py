"""Whether a subject does the work: every key once, shapes and dtypes, pixels or the distribution of crops."""

from __future__ import annotations

import hashlib
import io
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.harness import multimodal
from benchmarks.harness.sources import opened
from benchmarks.harness.statistics import kolmogorov_smirnov_p
from benchmarks.harness.work import Workload, centre, draw_crop, image_files, resized, sequences

RAMP_WIDTH, RAMP_HEIGHT, RAMPS = 512, 384, 512
PHOTO_WIDTH, PHOTO_HEIGHT, PHOTOS = 3000, 2000, 64
P_LIMIT = 0.001
# Shades of blue that tell the ramps apart; JPEG moves the mean of a crop by less than half a step.
SHADES, SHADE_STEP = 32, 8


class WrongWorkError(Exception):
    """A subject does something else than the workload. The message says what."""


def check_keys(work: Workload, answer: dict[str, Any], samples: int) -> None:
    """Every key exactly once an epoch, in the shapes and dtypes of the workload."""
    for epoch, keys in enumerate(answer["keys"]):
        counts = Counter(keys)
        missing = samples - sum(0 <= key < samples for key in counts)
        again = [key for key, count in counts.items() if count > 1]
        foreign = [key for key in counts if not 0 <= key < samples]
        if missing or again or foreign:
            raise WrongWorkError(
                f"epoch {epoch}: of {samples} keys {missing} are missing, {len(again)} come more than once"
                + (f" (first: {again[0]})" if again else "")
                + (f", {len(foreign)} are unknown (first: {foreign[0]})" if foreign else "")
            )
    if not work.arrays:
        return
    wanted = sorted([name, list(shape), dtype] for name, (shape, dtype) in work.arrays.items())
    found = sorted([name, list(shape), dtype] for name, shape, dtype in answer["kinds"])
    if found != wanted:
        raise WrongWorkError(f"arrays are {found}; the workload asks for {wanted}")


def reference(path: Path) -> NDArray[np.uint8]:
    """W2's picture: full decode, antialiased bilinear resize, centre crop."""
    image = opened(path)
    image = image.resize(resized(*image.size), Image.Resampling.BILINEAR)
    x, y = centre(*image.size)
    return np.asarray(image.crop((x, y, x + 224, y + 224)))


def check_pixels(work: Workload, source: Path, kept: Path) -> dict[str, float]:
    """Compare the kept pictures with the reference: worst mean absolute difference, median PSNR in dB."""
    files = image_files(source)
    found = np.load(kept, allow_pickle=False)
    worst, psnr = 0.0, []
    for key, image in zip(found["keys"].tolist(), found["image"], strict=True):
        difference = image.astype(np.float64) - reference(files[key])
        mean = float(np.abs(difference).mean())
        if mean > work.tolerance:
            raise WrongWorkError(
                f"key {key} ({files[key].name}): mean absolute difference {mean:.1f} from the reference; "
                f"{work.tolerance:g} is allowed"
            )
        worst = max(worst, mean)
        psnr.append(10 * math.log10(255**2 / max(1e-9, float((difference**2).mean()))))
    if not psnr:
        raise WrongWorkError("no picture to compare")
    return {"compared": len(psnr), "worst_mean_difference": worst, "median_psnr_db": float(np.median(psnr))}


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
    """The kept sequences must be those of the source, id for id."""
    wanted, found = sequences(source), np.load(kept, allow_pickle=False)
    for key, row in zip(found["keys"].tolist(), found["tokens"], strict=True):
        if not np.array_equal(wanted[key], row):
            raise WrongWorkError(f"key {key}: {int((wanted[key] != row).sum())} of {row.size} ids differ from the source")
    if not len(found["keys"]):
        raise WrongWorkError("no sequence to compare")
    return {"compared": len(found["keys"])}


def shade(key: int) -> int:
    """The blue of a ramp: one of 32, so that a picture under a wrong key is seen 31 times out of 32."""
    return SHADE_STEP // 2 + SHADE_STEP * (hashlib.sha256(b"%d" % key).digest()[0] % SHADES)


def write_ramps(folder: Path, width: int = RAMP_WIDTH, height: int = RAMP_HEIGHT, count: int = RAMPS) -> None:
    """Pictures whose red is the x coordinate and whose green is the y coordinate, so that a crop tells where it comes from; the blue tells
    the key."""
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


def rectangle(image: NDArray[np.uint8]) -> tuple[float, float, bool]:
    """Width and height in source pixels of the crop of a ramp picture, and whether it was flipped."""
    size = len(image)
    at = np.arange(size)
    inner = slice(size // 8, size - size // 8)  # edges are extrapolated by some filters
    x = np.polyfit(at[inner], image[:, inner, 0].mean(0), 1)[0] * size * (RAMP_WIDTH - 1) / 255
    y = np.polyfit(at[inner], image[inner, :, 1].mean(1), 1)[0] * size * (RAMP_HEIGHT - 1) / 255
    return abs(x), abs(y), bool(x < 0)


def check_crops(kept: Path) -> dict[str, float]:
    """Compare the crops of the ramp pictures with the stated distribution."""
    found = np.load(kept, allow_pickle=False)
    images = found["image"]
    check_shades(found["keys"].tolist(), images)
    crops = [rectangle(image) for image in images]
    rng = random.Random(0)
    drawn = [draw_crop(rng, RAMP_WIDTH, RAMP_HEIGHT)[2:] for _ in range(20 * len(crops))]
    flips = sum(flipped for _, _, flipped in crops) / len(crops)
    result = {
        "crops": len(crops),
        "area_p": kolmogorov_smirnov_p([math.log(w * h) for w, h, _ in crops], [math.log(w * h) for w, h in drawn]),
        "aspect_p": kolmogorov_smirnov_p([math.log(w / h) for w, h, _ in crops], [math.log(w / h) for w, h in drawn]),
        "flips": flips,
    }
    for name in ("area_p", "aspect_p"):
        if result[name] < P_LIMIT:
            raise WrongWorkError(
                f"the distribution of crop {name[:-2]}s is not the stated one (Kolmogorov-Smirnov p {result[name]:.1g})"
            )
    # Four standard deviations of a fair coin.
    if abs(flips - 0.5) > 2 / math.sqrt(len(crops)):
        raise WrongWorkError(f"{flips:.0%} of the pictures were flipped; half should be")
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
    rng = np.random.default_rng(0)
    result: dict[str, float] = {"crops": len(places)}
    for axis, extent in enumerate((PHOTO_WIDTH, PHOTO_HEIGHT)):
        drawn = rng.uniform(0, extent - 224, 20 * len(places)).tolist()
        p = kolmogorov_smirnov_p([place[axis] for place in places], drawn)
        if p < P_LIMIT:
            raise WrongWorkError(f"crops are not spread evenly over the photo's {'xy'[axis]} (Kolmogorov-Smirnov p {p:.1g})")
        result[f"{'xy'[axis]}_p"] = p
    return result
