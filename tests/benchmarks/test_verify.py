"""The harness finds out when a subject does other work."""

from __future__ import annotations

import hashlib
import io
import os
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multimodalkit import write_source
from PIL import Image

from benchmarks.harness import cache, multimodal, runner, verify
from benchmarks.harness.process import SubjectError
from benchmarks.harness.verify import WrongWorkError
from benchmarks.harness.work import WORKLOADS, draw_crop, image_files, limited, unusable

W1, W2 = WORKLOADS["W1"], WORKLOADS["W2"]
KINDS = [("image", (224, 224, 3), "uint8")]


def test_every_key_once() -> None:
    verify.check_keys(W2, {"keys": [[2, 0, 1], [0, 1, 2]], "kinds": KINDS}, 3)
    # A second epoch that was left early has what came of it.
    verify.check_keys(W2, {"keys": [[2, 0, 1], [0, 1]], "kinds": KINDS, "cut": True}, 3)
    for keys in ([0, 0], [7], []):
        with pytest.raises(WrongWorkError, match="epoch 1: "):
            verify.check_keys(W2, {"keys": [[2, 0, 1], keys], "kinds": KINDS, "cut": True}, 3)
    for keys, words in [
        ([[0, 1]], "1 are missing"),
        ([[]], "3 are missing"),
        ([[0, 1, 2, 2]], r"1 come more than once \(first: 2\)"),
        ([[0, 1, 2, 7]], r"1 are unknown \(first: 7\)"),
        ([[0, 1, 2], []], "epoch 1: of 3 keys 3 are missing"),
    ]:
        with pytest.raises(WrongWorkError, match=words):
            verify.check_keys(W2, {"keys": keys, "kinds": KINDS}, 3)


@pytest.mark.parametrize(
    "kind", [("image", (3, 224, 224), "uint8"), ("image", (224, 224, 3), "float32"), ("picture", (224, 224, 3), "uint8")]
)
def test_shapes_and_dtypes(kind: Any) -> None:
    with pytest.raises(WrongWorkError, match="the workload asks for"):
        verify.check_keys(W2, {"keys": [[0]], "kinds": [kind]}, 1)


def _picture(path: Path, seed: int) -> None:
    small = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(small).resize((512, 384), Image.Resampling.BICUBIC).save(path, quality=92)


def test_pixels_are_compared_with_the_reference(tmp_path: Path) -> None:
    for number in range(3):
        _picture(tmp_path / f"{number}.jpg", number)
    files = image_files(tmp_path)
    right = np.stack([verify.reference(path) for path in files])
    assert right.shape == (3, 224, 224, 3)
    np.savez(tmp_path / "kept.npz", keys=np.arange(3), image=right)
    assert verify.check_pixels(W2, tmp_path, tmp_path / "kept.npz")["worst_mean_difference"] == 0
    # Rows for other keys, a crop two pixels off, another colour order.
    for wrong in (right[[1, 0, 2]], np.roll(right, 2, 2), right[..., ::-1]):
        np.savez(tmp_path / "kept.npz", keys=np.arange(3), image=wrong)
        with pytest.raises(WrongWorkError, match=r"key 0 \(0.jpg\): mean absolute difference"):
            verify.check_pixels(W2, tmp_path, tmp_path / "kept.npz")
    np.savez(tmp_path / "kept.npz", keys=np.arange(0), image=right[:0])
    with pytest.raises(WrongWorkError, match="no picture"):
        verify.check_pixels(W2, tmp_path, tmp_path / "kept.npz")


def test_tokens_are_compared_with_the_source(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 1000, 5 * 2048 + 9, dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", ids)
    rows = ids[: 5 * 2048].reshape(5, 2048)
    signed = {"signature_keys": np.arange(5), "signatures": [zlib.crc32(row) for row in rows]}
    np.savez(tmp_path / "kept.npz", keys=[3, 0], tokens=rows[[3, 0]], **signed)
    assert verify.check_tokens(tmp_path, tmp_path / "kept.npz") == {"compared": 2, "compared_signatures": 5}
    swapped = signed | {"signature_keys": [0, 2, 1, 3, 4]}
    np.savez(tmp_path / "kept.npz", keys=[3, 0], tokens=rows[[3, 0]], **swapped)
    with pytest.raises(WrongWorkError, match="key 2: other ids"):
        verify.check_tokens(tmp_path, tmp_path / "kept.npz")
    wrong = rows[[3, 0]].copy()
    wrong[1, 7] += 1
    np.savez(tmp_path / "kept.npz", keys=[3, 0], tokens=wrong, **signed)
    with pytest.raises(WrongWorkError, match="key 0: 1 of 2048 ids"):
        verify.check_tokens(tmp_path, tmp_path / "kept.npz")


@pytest.fixture(scope="module")
def ramp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ramps") / "pictures"
    verify.write_ramps(folder)
    files = image_files(folder)
    assert len(files) == verify.RAMPS
    return Image.open(files[0]).convert("RGB")


@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.BOX, Image.Resampling.NEAREST])
def test_a_crop_is_read_off_a_ramp(ramp: Any, resample: Any) -> None:
    for x, y, w, h in [(0, 0, 512, 384), (10, 20, 150, 130), (200, 100, 260, 200), (3, 5, 380, 290)]:
        image = ramp.crop((x, y, x + w, y + h)).resize((224, 224), resample)
        width, height, flipped, left, top = verify.rectangle(np.asarray(image))
        assert (width, height, flipped) == (pytest.approx(w, rel=0.02), pytest.approx(h, rel=0.02), False)
        assert (left, top) == (pytest.approx(x, abs=3), pytest.approx(y, abs=3))
        assert verify.rectangle(np.asarray(image)[:, ::-1])[2:] == (
            True,
            pytest.approx(left, abs=1e-6),
            pytest.approx(top, abs=1e-6),
        )


# Of one shade, so that one ramp does for all; each comes in several epochs.
KEYS = np.array([key for key in range(512 * 32) if verify.shade(key) == verify.shade(0)])


def _crops(ramp: Any, path: Path, draw: Any, flip: float = 0.5, count: int = 600) -> Path:
    rng = random.Random(7)
    images = []
    for _ in range(count):
        x, y, w, h = draw(rng)
        image = np.asarray(ramp.crop((x, y, x + w, y + h)).resize((224, 224), Image.Resampling.BILINEAR))
        images.append(image[:, ::-1] if rng.random() < flip else image)
    np.savez(path, image=np.stack(images), keys=KEYS[np.arange(count) % len(KEYS)])
    return path


def _narrow(rng: random.Random) -> tuple[int, int, int, int]:
    while True:
        x, y, w, h = draw_crop(rng, 512, 384)
        if w * h >= 0.25 * 512 * 384:  # scale=(0.25, 1) rather than (0.08, 1)
            return x, y, w, h


def _square(rng: random.Random) -> tuple[int, int, int, int]:
    x, y, w, h = draw_crop(rng, 512, 384)
    side = min(round((w * h) ** 0.5), 384)
    return min(x, 512 - side), min(y, 384 - side), side, side


def test_distributions_of_crops(ramp: Any, tmp_path: Path) -> None:
    found = verify.check_crops(_crops(ramp, tmp_path / "right.npz", lambda rng: draw_crop(rng, 512, 384)))
    assert found["crops"] == 600
    for name, draw, flip, words in [
        ("narrow", _narrow, 0.5, "crop areas"),
        ("square", _square, 0.5, "crop (aspects|areas)"),
        ("top left", lambda rng: (0, 0, *draw_crop(rng, 512, 384)[2:]), 0.5, "crop lefts"),
        ("top", lambda rng: (draw_crop(rng, 512, 384)[0] // 4, 0, *draw_crop(rng, 512, 384)[2:]), 0.5, "crop (lefts|tops)"),
        ("never flipped", lambda rng: draw_crop(rng, 512, 384), 0.0, "flipped"),
    ]:
        with pytest.raises(WrongWorkError, match=words):
            verify.check_crops(_crops(ramp, tmp_path / f"{name}.npz", draw, flip))


def test_crops_that_come_again_in_the_next_epoch_are_refused(ramp: Any, tmp_path: Path) -> None:
    found = np.load(_crops(ramp, tmp_path / "once.npz", lambda rng: draw_crop(rng, 512, 384), count=300))
    replayed = {name: np.concatenate([found[name]] * 2) for name in ("keys", "image")}
    np.savez(tmp_path / "twice.npz", **replayed)
    with pytest.raises(WrongWorkError, match="300 of 300 pictures came with the crop of the epoch before"):
        verify.check_crops(tmp_path / "twice.npz")
    # One in twenty may, whatever the reason; a flip of the same crop is another one.
    verify.check_other_crops([*range(20), *range(20)], [(float(n), 9.0) for n in [*range(0, 100, 5), *range(195, 95, -5)]])
    crops = [(100.0, 90.0, 5.0, 7.0, 0.0), (100.0, 90.0, 5.0, 7.0, 99.0)]
    verify.check_other_crops([3, 3], crops)
    with pytest.raises(WrongWorkError, match="1 of 1"):
        verify.check_other_crops([3, 3], [crops[0], crops[0]])


def test_every_ramp_comes_under_its_own_key(tmp_path: Path) -> None:
    verify.write_ramps(tmp_path / "ramps", 64, 48, 64)
    images = np.stack([np.asarray(Image.open(path).resize((56, 56))) for path in image_files(tmp_path / "ramps")])
    verify.check_shades(list(range(64)), images)
    verify.check_shades([], images[:0])
    with pytest.raises(WrongWorkError, match="another key's picture"):
        verify.check_shades(list(range(64)), np.roll(images, 1, 0))
    swapped = next(key for key in range(1, 64) if verify.shade(key) != verify.shade(0))
    with pytest.raises(WrongWorkError, match="key 0 came"):
        verify.check_shades([0, swapped], images[[swapped, 0]])


def test_built_pictures_are_of_the_size_and_the_source(tmp_path: Path) -> None:
    work = WORKLOADS["W5"]
    _picture(tmp_path / "0.jpg", 0)

    def kept(image: Any, kind: str = "JPEG") -> Path:
        out = io.BytesIO()
        image.save(out, kind, quality=90)
        data = np.frombuffer(out.getvalue(), np.uint8)
        np.savez(tmp_path / "kept.npz", keys=np.array([0]), ends=np.array([len(data)]), data=data)
        return tmp_path / "kept.npz"

    right = Image.open(tmp_path / "0.jpg").resize((341, 256), Image.Resampling.BILINEAR)
    assert verify.check_built(work, tmp_path, kept(right))["worst_mean_difference"] < 3
    for wrong, kind, words in [
        (right.resize((300, 256)), "JPEG", r"JPEG of \(300, 256\); JPEG of \(341, 256\)"),
        (right, "WEBP", "WEBP of"),
        (right.transpose(Image.Transpose.FLIP_LEFT_RIGHT), "JPEG", "mean absolute difference"),
    ]:
        with pytest.raises(WrongWorkError, match=words):
            verify.check_built(work, tmp_path, kept(wrong, kind))


def test_read_bytes_are_the_sources(tmp_path: Path) -> None:
    (tmp_path / "0.jpg").write_bytes(b"some bytes")
    right = hashlib.sha256(b"some bytes").hexdigest()
    assert verify.check_digests(tmp_path, {"digests": {"0": right}}) == {"compared": 1}
    with pytest.raises(WrongWorkError, match=r"key 0 \(0.jpg\): other bytes"):
        verify.check_digests(tmp_path, {"digests": {"0": right[::-1]}})
    with pytest.raises(WrongWorkError, match="nothing to compare"):
        verify.check_digests(tmp_path, {"digests": {}})


def test_multimodal_samples_are_the_plain_workers(tmp_path: Path) -> None:
    for module in ("tokenizers", "soxr"):
        pytest.importorskip(module)
    source = write_source(tmp_path)
    plain = multimodal.with_libraries(source)
    right = [plain({part: path.read_bytes() for part, path in parts.items()}) for parts in multimodal.parts_of(source)]
    stacked = {name: np.stack([sample[name] for sample in right]) for name in right[0]}
    assert stacked["annotation"][0, 0] == 160 and stacked["tokens"].any() and np.abs(stacked["audio"]).max() > 5000
    work, kept = WORKLOADS["W4"], tmp_path / "kept.npz"
    np.savez(kept, keys=np.arange(3), **stacked)
    assert verify.check_multimodal(work, source, kept)["worst_audio_difference"] == 0
    for name, wrong, words in [
        ("tokens", stacked["tokens"][::-1], "key 0.*tokens differ"),
        ("annotation", stacked["annotation"] + 1, "key 0.*annotation differ"),
        ("audio", np.roll(stacked["audio"], 8, 1), "key 0.*speech by"),
        ("image", stacked["image"][:, ::-1], "key 0.*picture differs by"),
    ]:
        np.savez(kept, keys=np.arange(3), **(stacked | {name: wrong}))
        with pytest.raises(WrongWorkError, match=words):
            verify.check_multimodal(work, source, kept)


def test_what_is_lost_or_doubled_over_a_resume() -> None:
    assert verify.check_resumed([0, 1, 2], [3, 4], 5) == {"missing": 0, "again": 0}
    assert verify.check_resumed([0, 1, 2], [2, 4], 5) == {"missing": 1, "again": 1}


def test_native_crops_lie_anywhere_and_keep_their_scale(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    verify.write_ramps(tmp_path / "ramps", verify.PHOTO_WIDTH, verify.PHOTO_HEIGHT, 1)
    photo = np.asarray(Image.open(tmp_path / "ramps" / "000000.jpg"))

    def kept(size: int, left: Any) -> Path:
        crops = []
        for _ in range(400):
            x, y = left(photo.shape[1] - size), int(rng.integers(0, photo.shape[0] - size + 1))
            crops.append(np.asarray(Image.fromarray(photo[y : y + size, x : x + size]).resize((224, 224))))
        np.savez(tmp_path / "kept.npz", image=np.stack(crops), keys=KEYS[:400])
        return tmp_path / "kept.npz"

    assert verify.check_native(kept(224, lambda room: int(rng.integers(0, room + 1))))["crops"] == 400
    with pytest.raises(WrongWorkError, match=r"a pixel of the crop is 2\.0"):
        verify.check_native(kept(448, lambda room: int(rng.integers(0, room + 1))))
    with pytest.raises(WrongWorkError, match="not spread evenly over the photo's x"):
        verify.check_native(kept(224, lambda room: int(rng.integers(0, room // 2))))


def test_the_page_cache_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 << 20))
    os.sync()
    path.read_bytes()
    assert cache._resident(path) == (2048, 2048)
    how, resident = cache.empty([path])
    assert how in ("drop_caches", "fadvise")
    if resident:
        pytest.skip(f"this file system keeps {resident:.0%} of a file in memory")
    assert cache._resident(path)[0] == 0


def test_files_that_stay_in_memory_must_be_larger_than_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(runner, "empty", lambda files: ("fadvise", 0.5))
    with pytest.raises(SubjectError, match="50% of the files' pages stay in memory .* memory limit of"):
        runner.emptied([tmp_path / "file"])
    monkeypatch.setattr(runner, "memory_limit", lambda: 2 << 20)
    found = runner.emptied([tmp_path / "file"])
    assert found == {"how": "larger than memory", "resident": 0.5, "limit_mib": 2, "files_mib": 3}
    assert 64 << 20 < cache.memory_limit() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    assert unusable(WORKLOADS["W4"], source) == ""
    (source / "tokenizer.json").unlink()
    next(source.glob("*.ogg")).unlink()
    assert "2 files are missing that belong to a sample, tokenizer.json first" in unusable(WORKLOADS["W4"], source)
    assert "one batch of 64 or less" in unusable(WORKLOADS["W8"], source)


def test_a_part_of_a_source_is_spread_over_it(tmp_path: Path) -> None:
    source = write_source(tmp_path / "whole")
    names = [path.name for path in image_files(source)]
    part = limited(WORKLOADS["W4"], source, 2, tmp_path / "parts")
    assert [path.name for path in image_files(part)] == [names[0], names[len(names) // 2]]
    assert unusable(WORKLOADS["W4"], part) == ""
    assert len(image_files(limited(WORKLOADS["W2"], source, 99, tmp_path / "parts"))) == len(names)
    (tmp_path / "links").mkdir()
    for name in names:
        (tmp_path / "links" / name).symlink_to(Path("..") / "whole" / "source" / name)
    linked = limited(WORKLOADS["W2"], tmp_path / "links", 2, tmp_path / "parts")
    assert [path.read_bytes()[:2] for path in image_files(linked)] == [b"\xff\xd8"] * 2


def test_tokens_that_are_no_flat_array_of_uint16_are_named(tmp_path: Path) -> None:
    path, w3 = tmp_path / "tokens.npy", WORKLOADS["W3"]
    assert unusable(w3, tmp_path) == "no tokens.npy in it"
    for content, words in [
        (np.zeros(9, np.uint16), "9 ids, not one sequence"),
        (np.zeros(9000, np.int32), "int32"),
        (np.zeros((3, 4096), np.uint16), r"shape (3, 4096)"),
        (np.zeros((), np.uint16), r"shape ()"),
    ]:
        np.save(path, content)
        assert words in unusable(w3, tmp_path)
    path.write_bytes(b"no array")
    assert "cannot be read" in unusable(w3, tmp_path)
    np.save(path, np.zeros(4096, np.uint16))
    assert unusable(w3, tmp_path) == ""
