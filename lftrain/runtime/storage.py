"""Files of a checkpoint: tensors planned by torch.distributed.checkpoint, bytes and directory of our own. Nothing is pickled.

``rank-0.bin`` holds tensors one after the other, ``manifest.json`` where each lies, with its XXH3; ``state.json`` is the rest. A manifest
is one line of JSON and one with the XXH3 of the first.
"""

# The interfaces of torch.distributed.checkpoint hand in more than is needed here.
# ruff: noqa: ARG002, ARG003

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from lfdata.format.durable import Files
from lftrain.errors import CheckpointError, DamagedCheckpointError

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "rank-0.bin"
VERSION = 1
ALIGN = 64
MOST_STEPS = 1 << 62
PART = 1 << 24  # bytes read at once
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


class Place(msgspec.Struct, frozen=True):
    """Where a piece of a tensor lies: its offset and size within the tensor, and file, byte, bytes and check."""

    offsets: list[int]
    sizes: list[int]
    file: str
    byte: int
    bytes: int
    xxh3: str


class Stored(msgspec.Struct, frozen=True):
    """A tensor: dtype, shape, pieces."""

    dtype: str
    shape: list[int]
    pieces: list[Place]


class Manifest(msgspec.Struct, frozen=True):
    """Of one checkpoint. ``files``: bytes and XXH3 of every file but this."""

    version: int
    step: int
    tensors: dict[str, Stored]
    files: dict[str, tuple[int, str]]


class Writer(StorageWriter):
    """Writes tensors into a directory that exists. The manifest is :attr:`manifest` after the save; the caller commits."""

    def __init__(self, folder: Path, step: int, files: Files) -> None:
        self._folder, self._step, self._files = folder, step, files
        self._written: dict[str, tuple[int, str]] = {}
        self.manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the directory is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """All tensors of the plan, made durable. Raises :class:`CheckpointError` for what is no tensor."""
        results = []
        whole = xxhash.xxh3_64()
        output = self._files.create(self._folder / TENSORS)
        try:
            for item in plan.items:
                value = planner.resolve_data(item)
                if not isinstance(value, torch.Tensor):
                    raise CheckpointError(f"{item.index.fqn}: only tensors are stored here")
                data = _bytes(value)
                padding = bytes(-output.position % ALIGN)
                output.write(padding)
                whole.update(padding)
                shape = tuple(value.shape)
                offset = tuple(item.index.offset or (0,) * len(shape))
                place = Place(list(offset), list(shape), TENSORS, output.position, data.nbytes, xxhash.xxh3_64_hexdigest(data))
                output.write(data)
                whole.update(data)
                results.append(WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=place))
            output.sync()
            self._written[TENSORS] = (output.position, whole.hexdigest())
        finally:
            output.close()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The manifest from what was written."""
        places: dict[str, list[Place]] = {}
        for one in results:
            for result in one:
                places.setdefault(result.index.fqn, []).append(result.storage_data)
        tensors = {}
        for name, meta in metadata.state_dict_metadata.items():
            assert isinstance(meta, TensorStorageMetadata)
            dtype = str(meta.properties.dtype).removeprefix("torch.")
            tensors[name] = Stored(dtype, list(meta.size), places[name])
        self.manifest = Manifest(VERSION, self._step, tensors, dict(self._written))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any."""
        return True


class Reader(StorageReader):
    """Reads tensors of a checkpoint, checking each."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest as torch.distributed.checkpoint wants it."""
        tensors: dict[str, Any] = {}
        data = {}
        for name, stored in self._manifest.tensors.items():
            pieces = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in stored.pieces]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype_of(stored)), torch.Size(stored.shape), pieces)
            for one in stored.pieces:
                data[MetadataIndex(name, one.offsets)] = one
        return Metadata(state_dict_metadata=tensors, storage_data=data)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps the places."""
        self._places: dict[MetadataIndex, Place] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """All tensors of the plan. Raises :class:`DamagedCheckpointError` for bytes that do not match."""
        for item in plan.items:
            place = self._places[item.storage_index]
            name = item.storage_index.fqn
            data = read(self._folder, name, place)
            kind = dtype_of(self._manifest.tensors[name])
            piece = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
            piece = piece.view(place.sizes)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dimension, start, length)
            target = planner.resolve_tensor(item)
            target.detach().copy_(piece)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any."""
        return True


def dtype_of(stored: Stored) -> torch.dtype:
    """As torch's."""
    return _DTYPES[stored.dtype]


def read(folder: Path, name: str, place: Place) -> bytearray:
    """The bytes of a piece, checked."""
    path = folder / place.file
    data = bytearray(place.bytes)
    try:
        with open(path, "rb") as file:
            file.seek(place.byte)
            got = file.readinto(data)
    except OSError as error:
        raise DamagedCheckpointError(path, place.byte, f"tensor {name!r} cannot be read: {error.strerror or error}") from error
    if got != place.bytes:
        raise DamagedCheckpointError(path, place.byte, f"tensor {name!r}: the file ends after {got} of {place.bytes} bytes")
    if xxhash.xxh3_64_hexdigest(data) != place.xxh3:
        raise DamagedCheckpointError(path, place.byte, f"tensor {name!r} is damaged: its bytes do not match their check")
    return data


def read_tensor(folder: Path, manifest: Manifest, name: str) -> torch.Tensor:
    """One tensor, in one piece, aligned. Raises :class:`DamagedCheckpointError`."""
    stored = manifest.tensors.get(name)
    if stored is None or len(stored.pieces) != 1:
        raise DamagedCheckpointError(folder / MANIFEST, None, f"has no tensor {name!r} in one piece")
    data = read(folder, name, stored.pieces[0])
    kind = dtype_of(stored)
    # A copy lies as torch lays its tensors: the last bit of a matrix product may depend on where its factors begin.
    return (torch.frombuffer(data, dtype=kind).clone() if data else torch.empty(0, dtype=kind)).view(stored.shape)


def read_file(path: Path) -> bytes:
    """A whole file. Raises :class:`DamagedCheckpointError`."""
    try:
        if not path.is_file():
            raise DamagedCheckpointError(path, None, "is not there, or no file")
        return path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(path, None, f"cannot be read: {error.strerror or error}") from error


def encode_manifest(manifest: Manifest) -> bytes:
    """As stored."""
    text = msgspec.json.encode(manifest)
    return text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Of a checkpoint. Raises :class:`DamagedCheckpointError`."""
    path = folder / MANIFEST
    try:
        text, check, end = read_file(path).split(b"\n")
    except ValueError as error:
        raise DamagedCheckpointError(path, None, "not a whole manifest, or more than one") from error
    if end or xxhash.xxh3_64_hexdigest(text).encode() != check:
        raise DamagedCheckpointError(path, None, "its bytes do not match their check")
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise DamagedCheckpointError(path, None, f"not a manifest: {error}") from error
    if manifest.version != VERSION:
        raise DamagedCheckpointError(path, None, f"version {manifest.version}; this reads version {VERSION}")
    if unknown := sorted({stored.dtype for stored in manifest.tensors.values()} - set(_DTYPES)):
        raise DamagedCheckpointError(path, None, f"this torch has no dtype {unknown[0]!r}")
    names = {place.file for stored in manifest.tensors.values() for place in stored.pieces} | set(manifest.files)
    if odd := next((name for name in names if "/" in name or name.startswith(".")), None):
        raise DamagedCheckpointError(path, None, f"names a file outside of the checkpoint: {odd!r}")
    if not 0 <= manifest.step < MOST_STEPS:
        raise DamagedCheckpointError(path, None, f"step {manifest.step}")
    for name, stored in manifest.tensors.items():
        if not all(_fits(place, stored, manifest) for place in stored.pieces):
            raise DamagedCheckpointError(path, None, f"tensor {name!r} cannot be where it is said to be")
    for name, (size, _) in manifest.files.items():
        if (found := _size(folder / name)) != size:
            raise DamagedCheckpointError(folder / name, None, f"has {found} bytes, and {size} were written")
    return manifest


def _size(path: Path) -> int:
    """Of a file. Raises :class:`DamagedCheckpointError`: it is not there, or none."""
    try:
        if not path.is_file():
            raise DamagedCheckpointError(path, None, "is not there, or no file")
        return path.stat().st_size
    except OSError as error:
        raise DamagedCheckpointError(path, None, f"cannot be looked at: {error.strerror or error}") from error


def _fits(place: Place, stored: Stored, manifest: Manifest) -> bool:
    """Whether a piece is as large as its numbers, and in its file."""
    size, _ = manifest.files.get(place.file, (0, ""))
    whole = min(place.sizes, default=0) >= 0 and math.prod(place.sizes) * dtype_of(stored).itemsize == place.bytes
    return whole and 0 <= place.byte <= place.byte + place.bytes <= size


def verify(folder: Path) -> Manifest:
    """Read a whole checkpoint back, from the disk if the system lets go of its copies. Raises :class:`DamagedCheckpointError`."""
    manifest = read_manifest(folder)
    for name, (size, check) in manifest.files.items():
        path = folder / name
        digest, got = xxhash.xxh3_64(), 0
        try:
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while part := file.read(PART):
                    digest.update(part)
                    got += len(part)
        except OSError as error:
            raise DamagedCheckpointError(path, None, f"cannot be read: {error.strerror or error}") from error
        if got != size:
            raise DamagedCheckpointError(path, None, f"{got} bytes; {size} were written")
        if digest.hexdigest() != check:
            raise DamagedCheckpointError(path, None, "its bytes do not match their check")
    return manifest


def _bytes(value: torch.Tensor) -> memoryview:
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
