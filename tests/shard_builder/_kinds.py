"""A small good source of every kind that reads other formats, for what must hold for all of them."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import zstandard
from _build import picture
from _tars import scan
from PIL import Image

from lfdata.errors import SampleError
from shard_builder.fields import parse_field
from shard_builder.sources import open_source, source_from_config

FIXTURES = Path(__file__).resolve().parent / "fixtures"
COUNT = 60


@dataclass
class Made:
    """A source on disk: where, of which kind (``None``: guessed), fields (``None``: guessed) and options."""

    location: str
    kind: str | None = None
    fields: list[str] | None = None
    options: dict[str, str] = field(default_factory=dict)

    def open(self) -> Any:
        """The source."""
        fields = None if self.fields is None else [parse_field(text) for text in self.fields]
        return open_source(self.location, kind=self.kind, fields=fields, **self.options)


def source(kind: str | None, location: Path | str, *fields: str, **options: str) -> Any:
    """A source; ``fields`` as on the command line, guessed if there are none."""
    return open_source(str(location), kind=kind, fields=[parse_field(text) for text in fields] or None, **options)


def first_fault(opened: Any, work: Path) -> tuple[str, str]:
    """Code and path of the first bad sample: found by the scan, or by loading the first record."""
    records, bad = scan(opened)
    if bad:
        return bad[0].code, bad[0].path
    with pytest.raises(SampleError) as caught:
        source_from_config(opened.config(), work).load(records[0].locator)
    return caught.value.code, caught.value.path


def table(count: int = COUNT, first: int = 0) -> pa.Table:
    """Rows with a picture, a text, numbers and nested values."""
    numbers = range(first, first + count)
    return pa.table(
        {
            "id": [f"k{n:04d}" for n in numbers],
            "image": [{"bytes": picture(n), "path": None} if n % 7 else None for n in numbers],
            "text": [f"row {n} ü" for n in numbers],
            "label": pa.array([n % 5 for n in numbers], pa.int8()),
            "boxes": [[{"x": n, "y": [1.5, n]}] * (n % 3) for n in numbers],
            "vector": pa.array([np.arange(n % 4, dtype=np.float32) for n in numbers], pa.list_(pa.float32())),
        }
    )


TABLE_FIELDS = [
    "image:image=image,codec=png",
    "text:text=text",
    "label:scalar=label,dtype=int8",
    "boxes:json=boxes",
    "vector:array=vector,dtype=float32,ndim=1",
]


def parquet(folder: Path) -> Made:
    """Two files of several row groups."""
    for number in range(2):
        rows = table(COUNT // 2, number * COUNT // 2)
        pq.write_table(rows, folder / f"part-{number}.parquet", row_group_size=7, write_page_checksum=True)
    return Made(str(folder), fields=TABLE_FIELDS)


def stream(rows: pa.Table, path: Path, batch: int = 7) -> Path:
    """An Arrow stream."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=batch)
    return path


def arrow(folder: Path) -> Made:
    """One stream of several batches."""
    return Made(str(stream(table(), folder / "a.arrow")), fields=TABLE_FIELDS)


def coco_documents(folder: Path, count: int = COUNT) -> None:
    """A COCO directory: polygons, run lengths of both forms, keypoints and captions of one split."""
    (folder / "annotations").mkdir(parents=True)
    (folder / "val").mkdir()
    images: list[Any] = []
    about: dict[str, list[Any]] = {"instances": [], "person_keypoints": [], "captions": []}
    for n in range(count):
        name = f"{n:06d}.png"
        (folder / "val" / name).write_bytes(picture(n))
        images.append({"id": 1000 - n, "file_name": name, "height": 12, "width": 20})
        shapes: list[Any] = [
            [[1.5, 1, 9, 1.25, 9, 9, 1, 8]],
            {"size": [12, 20], "counts": [n, 30, 10, 200 - n]},
            {"size": [12, 20], "counts": _compressed(n)},
        ]
        for k in range(n % 4):
            one = {
                "id": n * 10 + k,
                "image_id": 1000 - n,
                "category_id": 1 + k % 2,
                "iscrowd": int(k > 0),
                "bbox": [1.5, 1, 8, 8.25],
            }
            about["instances"].append(one | {"segmentation": shapes[k], "area": 10.5 + k})
            if one["category_id"] == 1:
                points = {"keypoints": [3, 4, 2, 0, 0, 0], "num_keypoints": 1}
                about["person_keypoints"].append(about["instances"][-1] | points)
        about["captions"] += [
            {"id": n * 10 + k, "image_id": 1000 - n, "caption": f"caption {k} of {n} é"} for k in range(n % 3)
        ]
    person = {"id": 1, "name": "person", "supercategory": "person"}
    categories = {
        "instances": [person, {"id": 2, "name": "thing", "supercategory": "things"}],
        "person_keypoints": [person | {"keypoints": ["nose", "eye"], "skeleton": [[1, 2]]}],
    }
    for name, entries in about.items():
        found = {"info": {"year": 2024}, "images": images, "annotations": entries}
        found |= {"categories": categories[name]} if name in categories else {}
        (folder / "annotations" / f"{name}_val.json").write_text(json.dumps(found))


def _compressed(n: int) -> str:
    from pycocotools import mask as masks

    pixels = (np.random.default_rng(n).random((12, 20)) < 0.3).astype(np.uint8)
    return str(masks.encode(np.asfortranarray(pixels))["counts"].decode())


def coco(folder: Path) -> Made:
    """A COCO directory."""
    coco_documents(folder / "coco")
    return Made(str(folder / "coco"))


def mds_shard(samples: list[list[bytes]], fixed: list[bool]) -> bytes:
    """The bytes of an MDS shard, written by hand. ``fixed``: columns whose size is not stored."""
    bodies = []
    for sample in samples:
        sizes = [len(value) for value, known in zip(sample, fixed, strict=True) if not known]
        bodies.append(np.array(sizes, "<u4").tobytes() + b"".join(sample))
    about = b'{"hand": "made"}'
    head = 4 + 4 * (len(bodies) + 1) + len(about)
    offsets = np.cumsum([head, *map(len, bodies)]).astype("<u4")
    return np.array([len(bodies)], "<u4").tobytes() + offsets.tobytes() + about + b"".join(bodies)


def mds_entry(name: str, data: bytes, samples: int, columns: dict[str, tuple[str, int | None]], **more: Any) -> dict[str, Any]:
    """A shard's entry of the index. ``columns``: encoding and fixed size by name."""
    return {
        "column_names": list(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()],
        "compression": None,
        "format": "mds",
        "hashes": ["sha1"],
        "raw_data": {"basename": name, "bytes": len(data), "hashes": {"sha1": hashlib.sha1(data).hexdigest()}},
        "samples": samples,
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": None,
    } | more


def mds_directory(folder: Path, entries: list[dict[str, Any]]) -> Path:
    """An index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}))
    return folder


def mds(folder: Path) -> Made:
    """Three shards, the middle one compressed."""
    columns = {"id": ("int", 8), "image": ("png", None), "text": ("str", None)}
    entries = []
    for number in range(3):
        rows = range(number * 20, number * 20 + 20)
        data = mds_shard([[np.int64(n).tobytes(), picture(n), f"row {n}".encode()] for n in rows], [True, False, False])
        name = f"shard.{number:05d}.mds"
        more: dict[str, Any] = {}
        if number == 1:
            packed = zstandard.compress(data)
            (folder / f"{name}.zstd").write_bytes(packed)
            zipped = {"basename": f"{name}.zstd", "bytes": len(packed), "hashes": {"xxh64": xxhash.xxh64_hexdigest(packed)}}
            more = {"compression": "zstd:3", "zip_data": zipped}
        else:
            (folder / name).write_bytes(data)
        entries.append(mds_entry(name, data, 20, columns, **more))
    return Made(str(mds_directory(folder, entries)))


def hdf5(folder: Path) -> Made:
    """Chunked, compressed data sets."""
    with h5py.File(folder / "a.h5", "w") as file:
        file["names"] = [f"n{n:03d}" for n in range(COUNT)]
        pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 12, 20, 3), np.uint8)
        file.create_dataset("images", data=pixels, chunks=(7, 5, 20, 3), compression="gzip", fletcher32=True)
        file.create_dataset("x", data=np.arange(COUNT * 3, dtype=np.float32).reshape(COUNT, 3), chunks=(16, 2))
        file["text"] = [f"text {n} é" for n in range(COUNT)]
    fields = ["image:image=images,codec=png", "x:array=x,dtype=float32,ndim=1", "text:text=text"]
    return Made(str(folder / "a.h5"), fields=fields, options={"key": "names"})


def yolo(folder: Path) -> Made:
    """Two splits, one a directory and one a list."""
    for n in range(COUNT):
        split = "train" if n % 2 else "val"
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        (folder / "images" / split / f"{n:03d}.png").write_bytes(picture(n))
        if n % 5:
            lines = [f"{k % 3} 0.5 0.25 0.125 {k / 7:.6f}\n" for k in range(n % 4)]
            (folder / "labels" / split / f"{n:03d}.txt").write_text("".join(lines))
    (folder / "val.txt").write_text("".join(f"./images/val/{n:03d}.png\n" for n in range(0, COUNT, 2)))
    (folder / "data.yaml").write_text("path: .\ntrain: images/train\nval: val.txt\nnames: {0: cat, 1: dog, 2: bird}\n")
    return Made(str(folder))


def voc_annotation(name: str, objects: str = "", size: str = "") -> str:
    """An annotation."""
    return f"<annotation><folder>V</folder><filename>{name}</filename>{size}{objects}</annotation>"


def voc_object(name: str, box: tuple[float, float, float, float], more: str = "") -> str:
    """An object of an annotation."""
    corners = "".join(f"<{tag}>{value}</{tag}>" for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    return f"<object><name>{name}</name><difficult>0</difficult><bndbox>{corners}</bndbox>{more}</object>"


def voc(folder: Path) -> Made:
    """A VOC directory with masks for some."""
    for name in ("Annotations", "JPEGImages", "ImageSets/Main", "SegmentationClass"):
        (folder / name).mkdir(parents=True)
    names = [f"2007_{n:06d}" for n in range(COUNT)]
    for n, name in enumerate(names):
        (folder / "JPEGImages" / f"{name}.png").write_bytes(picture(n))
        objects = "".join(voc_object("cat", (1, 2, 3 + k, 4.5)) for k in range(n % 3))
        (folder / "Annotations" / f"{name}.xml").write_text(voc_annotation(f"{name}.png", objects))
        if n % 4 == 0:
            mask = (np.random.default_rng(n).random((12, 20)) * 5).astype(np.uint8)
            (folder / "SegmentationClass" / f"{name}.png").write_bytes(png_bytes(mask))
    (folder / "ImageSets" / "Main" / "all.txt").write_text("\n".join(reversed(names)) + "\n")
    return Made(str(folder), options={"set": "all"})


def megatron_index(
    lengths: list[int], documents: list[int], code: int = 8, modes: list[int] | None = None, places: list[int] | None = None
) -> bytes:
    """An index, written by hand. ``documents``: first sequences, and the end."""
    width = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}[code]
    if places is None:
        places = np.cumsum([0, *lengths])[:-1].tolist()
        places = [place * width for place in places]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    parts = [np.array(lengths, "<i4"), np.array(places, "<i8"), np.array(documents, "<i8"), np.array(modes or [], "i1")]
    return head + b"".join(part.tobytes() for part in parts)


def megatron(folder: Path) -> Made:
    """Documents of several sequences."""
    lengths = [(n * 7) % 23 for n in range(COUNT * 2)]
    ids = (np.arange(sum(lengths)) * 37 % 50_000).astype("<u2")
    (folder / "t.bin").write_bytes(ids.tobytes())
    (folder / "t.idx").write_bytes(megatron_index(lengths, list(range(0, COUNT * 2 + 1, 2))))
    return Made(str(folder / "t"))


MAKERS: dict[str, Callable[[Path], Made]] = {
    "parquet": parquet,
    "arrow": arrow,
    "coco": coco,
    "mds": mds,
    "hdf5": hdf5,
    "yolo": yolo,
    "voc": voc,
    "megatron": megatron,
}


def png_bytes(indices: np.ndarray[Any, Any]) -> bytes:
    """A mask as a PNG with a palette."""
    out = io.BytesIO()
    image = Image.fromarray(indices, "L").convert("P")
    image.putpalette([n % 256 for n in range(768)])
    image.putdata(indices.ravel().tolist())
    image.save(out, "PNG")
    return out.getvalue()
