"""The same pictures (for Megatron, documents) as a source of every kind, for ``lfbench sources``."""

from __future__ import annotations

import csv
import json
import os
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.harness.environments import interpreter

Maker = Callable[[list[Path], Path], list[str]]
"""Writes a source of pictures into an empty folder; gives the arguments of ``convert`` but target and field options."""


def linked(pictures: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in pictures:
        try:
            os.link(path, folder / path.name)
        except OSError:
            shutil.copyfile(path, folder / path.name)


def _size(path: Path) -> tuple[int, int]:
    from PIL import Image

    with Image.open(path) as picture:
        width, height = picture.size
        return width, height


def image_folder(pictures: list[Path], folder: Path) -> list[str]:
    """A directory."""
    linked(pictures, folder / "pictures")
    return [str(folder / "pictures"), "--kind", "image-folder", "--field", "image:image=image"]


def table(pictures: list[Path], folder: Path) -> list[str]:
    """A CSV file with paths."""
    linked(pictures, folder / "files")
    with open(folder / "rows.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["key", "path"])
        rows.writerows([path.stem, f"files/{path.name}"] for path in pictures)
    return [str(folder / "rows.csv"), "--field", "image:image=path", "-s", "key=key"]


def webdataset(pictures: list[Path], folder: Path) -> list[str]:
    """One tar."""
    with tarfile.open(folder / "data.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for path in pictures:
            archive.add(path, f"{path.stem}.jpg")
    return [str(folder / "data.tar"), "--field", "image:image=jpg"]


def parquet(pictures: list[Path], folder: Path) -> list[str]:
    """Structs of bytes and path, 100 rows a group, as Hugging Face writes them."""
    import pyarrow
    import pyarrow.parquet

    image = [{"bytes": path.read_bytes(), "path": path.name} for path in pictures]
    written = pyarrow.table({"key": [path.stem for path in pictures], "image": image})
    pyarrow.parquet.write_table(written, folder / "data.parquet", row_group_size=100)
    return [str(folder / "data.parquet"), "--field", "image:image=image"]


def hdf5(pictures: list[Path], folder: Path) -> list[str]:
    """The files' bytes, as rows of different lengths."""
    import h5py
    import numpy as np

    with h5py.File(folder / "data.h5", "w") as file:
        rows = file.create_dataset("image", (len(pictures),), h5py.vlen_dtype(np.uint8))
        for number, path in enumerate(pictures):
            rows[number] = np.frombuffer(path.read_bytes(), np.uint8)
    return [str(folder / "data.h5"), "--field", "image:image=image"]


def coco(pictures: list[Path], folder: Path) -> list[str]:
    """Images with three boxes each; the annotations are not converted."""
    linked(pictures, folder / "val")
    (folder / "annotations").mkdir()
    images, annotations = [], []
    for number, path in enumerate(pictures):
        width, height = _size(path)
        images.append({"id": number, "file_name": path.name, "width": width, "height": height})
        annotations += [
            {"id": 3 * number + k, "image_id": number, "category_id": 1, "bbox": [k, k, 20, 20], "area": 400, "iscrowd": 0}
            for k in range(3)
        ]
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "annotations" / "instances_val.json").write_text(json.dumps(document))
    return [str(folder), "--kind", "coco", "-s", "split=val", "--field", "image:image=image"]


def yolo(pictures: list[Path], folder: Path) -> list[str]:
    """Images with three boxes each; the labels are not converted."""
    linked(pictures, folder / "images" / "val")
    (folder / "labels" / "val").mkdir(parents=True)
    for path in pictures:
        (folder / "labels" / "val" / f"{path.stem}.txt").write_text("0 0.5 0.5 0.2 0.2\n" * 3)
    (folder / "data.yaml").write_text("path: .\nval: images/val\nnames: [thing]\n")
    return [str(folder / "data.yaml"), "--kind", "yolo", "--field", "image:image=image"]


def voc(pictures: list[Path], folder: Path) -> list[str]:
    """Images with one object each; the annotations are not converted."""
    linked(pictures, folder / "JPEGImages")
    (folder / "Annotations").mkdir()
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    for path in pictures:
        width, height = _size(path)
        box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>20</xmax><ymax>20</ymax></bndbox>"
        (folder / "Annotations" / f"{path.stem}.xml").write_text(
            f"<annotation><filename>{escape(path.name)}</filename><size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
            f"<object><name>thing</name>{box}</object></annotation>"
        )
    (folder / "ImageSets" / "Main" / "val.txt").write_text("".join(f"{path.stem}\n" for path in pictures))
    return [str(folder), "--kind", "voc", "-s", "set=val", "--field", "image:image=image"]


_MDS = """
import sys
from streaming import MDSWriter
with MDSWriter(out=sys.argv[1], columns={"key": "str", "image": "bytes"}) as out:
    for path in sys.argv[2:]:
        out.write({"key": path, "image": open(path, "rb").read()})
"""


def mds(pictures: list[Path], folder: Path) -> list[str]:
    """Written by mosaicml-streaming, in its environment (``lfbench environment streaming``)."""
    command = [interpreter("streaming_"), "-c", _MDS, str(folder / "mds"), *map(str, pictures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModuleNotFoundError(done.stderr.strip().splitlines()[-1])
    return [str(folder / "mds"), "--field", "image:image=image", "-s", "key=#"]


def arrow(pictures: list[Path], folder: Path) -> list[str]:
    """An Arrow stream with 100 rows a batch, as a data set that Hugging Face saves has it."""
    import pyarrow

    image = [{"bytes": path.read_bytes(), "path": path.name} for path in pictures]
    written = pyarrow.table({"key": [path.stem for path in pictures], "image": image})
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, written.schema) as writer:
        writer.write_table(written, max_chunksize=100)
    return [str(folder / "data.arrow"), "--kind", "arrow", "--field", "image:image=image"]


def lerobot(pictures: list[Path], folder: Path) -> list[str]:
    """v2.1 with a camera of images: one episode, of the pictures that are as large as the first one."""
    import pyarrow
    import pyarrow.parquet

    width, height = _size(pictures[0])
    if any(_size(path) != (width, height) for path in pictures):
        raise ModuleNotFoundError("a camera has pictures of one size; these differ")
    frames = range(len(pictures))
    numbers = {
        "timestamp": "float32",
        "frame_index": "int64",
        "episode_index": "int64",
        "index": "int64",
        "task_index": "int64",
    }
    features: dict[str, Any] = {
        "image": {"dtype": "image", "shape": [height, width, 3], "names": ["height", "width", "channels"]}
    }
    features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in numbers.items()}
    info = {
        "codebase_version": "v2.1",
        "total_episodes": 1,
        "total_frames": len(pictures),
        "total_tasks": 1,
        "chunks_size": 1000,
        "fps": 10,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "features": features,
    }
    (folder / "meta").mkdir()
    (folder / "data" / "chunk-000").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    (folder / "meta" / "episodes.jsonl").write_text(
        json.dumps({"episode_index": 0, "tasks": ["t"], "length": len(pictures)}) + "\n"
    )
    (folder / "meta" / "tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "t"}) + "\n")
    zeros, counted = pyarrow.array([0] * len(pictures), pyarrow.int64()), pyarrow.array(frames, pyarrow.int64())
    columns = {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in pictures],
        "timestamp": pyarrow.array([number / 10 for number in frames], pyarrow.float32()),
        "frame_index": counted,
        "episode_index": zeros,
        "index": counted,
        "task_index": zeros,
    }
    place = folder / "data" / "chunk-000" / "episode_000000.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), place, row_group_size=100)
    return [str(folder), "--kind", "lerobot", "--field", "image:image=image"]


def megatron(pictures: list[Path], folder: Path) -> list[str]:
    """Documents of 2,048 ids, :data:`DOCUMENTS` a picture. Their bare loop is :data:`BARE_TOKENS`."""
    import numpy as np

    count, length = DOCUMENTS * len(pictures), 2048
    np.random.default_rng(0).integers(0, 50_000, count * length, dtype=np.int32).tofile(folder / "text.bin")
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, count, count + 1)
    index += np.full(count, length, "<i4").tobytes() + (np.arange(count) * length * 4).astype("<i8").tobytes()
    (folder / "text.idx").write_bytes(index + np.arange(count + 1).astype("<i8").tobytes())
    return [str(folder / "text"), "--kind", "megatron", "--field", "tokens:tokens=tokens,vocab=50304"]


# Enough that the start of a process counts for as little as with pictures.
DOCUMENTS = 40

BARE_TOKENS = """
import sys
import numpy as np
ids = np.memmap(sys.argv[1], np.int32, "r")
with open(sys.argv[2], "wb") as out:
    for at in range(0, len(ids), 2048):
        out.write(ids[at : at + 2048].astype(np.uint16).tobytes())
"""
"""What storing documents as 16-bit ids takes at the least."""

MAKERS: dict[str, Maker] = {
    "image-folder": image_folder,
    "table": table,
    "webdataset": webdataset,
    "parquet": parquet,
    "arrow": arrow,
    "hdf5": hdf5,
    "mds": mds,
    "coco": coco,
    "yolo": yolo,
    "voc": voc,
    "lerobot": lerobot,
    "megatron": megatron,
}
