"""W4's source and its plain worker: one JPEG, one caption, one recording and one JSON annotation a sample.

Files of one stem: ``N.jpg`` (1024 x 1024), ``N.txt`` (caption), ``N.ogg`` (speech, any rate), ``N.json`` (captions in every language,
tags, geometry and colours of the picture); beside them ``tokenizer.json``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.work import MULTIMODAL_PARTS, NUMBERS, SAMPLE_RATE, SECONDS, SIDE, TOKENS, image_files


def parts_of(source: Path) -> list[dict[str, Path]]:
    """Files of every sample by part; a sample's key is its position here."""
    return [{part: path.with_suffix(f".{part}") for part in MULTIMODAL_PARTS} for path in image_files(source)]


def numbers(annotation: Mapping[str, Any]) -> list[float]:
    """What a model gets of an annotation: 12 numbers."""
    picture = annotation["picture"]
    values = [*picture["size"], *picture["box"], *picture["mean"], picture["opaque"]]
    return [*values, len(annotation["captions"]), len(annotation["tags"])]


def padded_tokens(ids: Any) -> NDArray[np.int32]:
    """The first 64 ids, zeros behind them."""
    out = np.zeros(TOKENS, np.int32)
    out[: min(TOKENS, len(ids))] = ids[:TOKENS]
    return out


def padded_audio(samples: Any) -> NDArray[np.int16]:
    """The first 5 s, silence behind them."""
    out = np.zeros(SAMPLE_RATE * SECONDS, np.int16)
    out[: min(len(out), len(samples))] = samples[: len(out)]
    return out


def with_libraries(
    source: Path, decode: Callable[[bytes], Any] | None = None
) -> Callable[[Mapping[str, bytes]], dict[str, Any]]:
    """The plain worker: stored bytes by part to arrays, each time anew, through PIL, a tokenizer, libsndfile, soxr and ``json``.

    Args:
        source: where ``tokenizer.json`` is.
        decode: JPEG bytes to (1024, 1024, 3); PIL by default.
    """
    import soundfile
    import soxr
    from PIL import Image
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))

    def picture(data: bytes) -> Any:
        image: Any = Image.open(io.BytesIO(data)).convert("RGB")
        if image.size != (SIDE, SIDE):
            image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return np.asarray(image)

    def one(parts: Mapping[str, bytes]) -> dict[str, Any]:
        samples, rate = soundfile.read(io.BytesIO(parts["ogg"]), dtype="float32", always_2d=True)
        mono = samples.mean(1)
        if rate != SAMPLE_RATE:
            mono = soxr.resample(mono, rate, SAMPLE_RATE)
        pcm = np.clip(np.rint(mono * 32768), -32768, 32767).astype(np.int16)
        return {
            "image": (decode or picture)(parts["jpg"]),
            "tokens": padded_tokens(tokenizer.encode(parts["txt"].decode()).ids),
            "audio": padded_audio(pcm),
            "annotation": np.array(numbers(json.loads(parts["json"])), np.float32),
        }

    return one


def annotation(value: Any) -> Any:
    """Numbers of an annotation as an array: float32, (NUMBERS,)."""
    return np.array(numbers(value), np.float32)


def collate(samples: list[tuple[int, dict[str, Any]]]) -> tuple[Any, dict[str, Any]]:
    """A batch as torch tensors."""
    import torch

    keys = torch.tensor([key for key, _ in samples])
    return keys, {name: torch.from_numpy(np.stack([arrays[name] for _, arrays in samples])) for name in samples[0][1]}


def write_sample(target: Path, number: int, stamp: Path, captions: Mapping[str, str], language: str, speech: Path) -> None:
    """One sample from a stamp: the picture on white, brought to 1024 x 1024; the rest as it is."""
    from PIL import Image

    image: Any = Image.open(stamp).convert("RGBA")
    alpha = np.asarray(image)[:, :, 3]
    box = image.getchannel("A").getbbox() or (0, 0, *image.size)
    flat: Any = Image.new("RGBA", image.size, "white")
    flat.alpha_composite(image)
    flat = flat.convert("RGB")
    picture = {
        "size": list(image.size),
        "box": list(box),
        "mean": np.asarray(flat).reshape(-1, 3).mean(0).round(3).tolist(),
        "opaque": round(float((alpha > 127).mean()), 4),
    }
    tags = stamp.with_suffix(".dat")
    annotation = {
        "name": stamp.stem,
        "path": list(stamp.parts[-4:-1]),
        "language": language,
        "captions": dict(captions),
        "tags": tags.read_text(errors="replace").split() if tags.exists() else [],
        "picture": picture,
    }
    stem = target / f"{number:06d}"
    flat.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(stem.with_suffix(".jpg"), quality=90)
    stem.with_suffix(".txt").write_text(captions[language])
    stem.with_suffix(".json").write_text(json.dumps(annotation, ensure_ascii=False, indent=1))
    stem.with_suffix(".ogg").write_bytes(speech.read_bytes())
    assert len(numbers(annotation)) == NUMBERS
