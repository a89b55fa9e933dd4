"""A log of what the durable layer did, and the states a disk may be in if the machine dies at any point of it.

The model is stricter than any file system: of a file's writes since its last fsync any may be lost, whole or by sectors, in any order;
of a directory's changes since its last fsync any may be lost, in any order; fsync of a file says nothing of its name.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lfdata.format.durable import Files, OutputFile

T = TypeVar("T")
SECTORS = (512, 4096)
State = dict[str, bytes | None]
"""Path below the root -> contents, or ``None`` for a directory."""


@dataclass(slots=True)
class Op:
    """One operation that succeeded; ``ack`` marks a commit that has returned."""

    kind: str
    path: str
    offset: int = 0
    data: bytes = b""
    target: str = ""


class LoggingFiles(Files):
    """Writes as the real layer does and keeps the log of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Op] = []

    def relative(self, path: Path) -> str:
        return os.path.relpath(path, self.root)

    def call(self, operation: str, path: Path, function: Callable[[], T], **detail: Any) -> T:
        result = function()
        op = Op(operation, self.relative(path))
        if operation == "write":
            op.offset, op.data = detail["offset"], bytes(detail["data"][:result])
        elif operation == "rename":
            op.target = self.relative(detail["target"])
        elif operation == "truncate":
            op.offset = detail["size"]
        self.log.append(op)
        return result

    def commit(self, output: OutputFile, final: Path) -> None:
        super().commit(output, final)
        self.log.append(Op("ack", self.relative(final)))


@dataclass(slots=True, eq=False)
class Inode:
    """A file: what is safely on the disk, and what was done to it since."""

    durable: bytes = b""
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)

    def now(self) -> bytes:
        return _apply(self.durable, self.pending)

    def sync(self) -> None:
        self.durable, self.pending = self.now(), []

    def after_crash(self, rng: random.Random) -> bytes:
        if not self.pending:
            return self.durable
        mode = rng.choice(("none", "all", "some", "torn", "torn", "sectors"))
        if mode == "none":
            return self.durable
        if mode == "all":
            return self.now()
        if mode == "some":
            return _apply(self.durable, [op for op in self.pending if rng.random() < 0.5])
        if mode == "torn":
            kept = self.pending[: rng.randint(1, len(self.pending))]
            kind, offset, data = kept[-1]
            sector = rng.choice(SECTORS)
            ends = list(range((offset // sector + 1) * sector, offset + len(data), sector))
            if kind == "write" and ends:
                data = data[: rng.choice(ends) - offset]
            return _apply(self.durable, [*kept[:-1], (kind, offset, data)])
        return _apply(self.durable, [part for op in self.pending for part in _sectors(op, rng)])


def _sectors(op: tuple[str, int, bytes], rng: random.Random) -> Iterator[tuple[str, int, bytes]]:
    """The sectors of a write that reached the disk; the file's length did, so that the others are zeros."""
    kind, offset, data = op
    if kind != "write":
        if rng.random() < 0.5:
            yield op
        return
    sector = rng.choice(SECTORS)
    at = 0
    while at < len(data):
        size = min(sector - (offset + at) % sector, len(data) - at)
        if rng.random() < 0.6:
            yield "write", offset + at, data[at : at + size]
        at += size
    yield "extend", offset + len(data), b""


def _apply(data: bytes, operations: list[tuple[str, int, bytes]]) -> bytes:
    out = bytearray(data)
    for kind, offset, part in operations:
        if kind == "truncate":
            del out[offset:]
        if len(out) < offset:
            out += bytes(offset - len(out))
        if kind == "write":
            out[offset : offset + len(part)] = part
    return bytes(out)


@dataclass(slots=True, eq=False)
class Directory:
    """A directory: names safely on the disk, and changes since."""

    durable: dict[str, Inode | Directory] = field(default_factory=dict)
    pending: list[dict[str, Inode | Directory | None]] = field(default_factory=list)

    def names(self, kept: list[dict[str, Inode | Directory | None]]) -> dict[str, Inode | Directory]:
        out = dict(self.durable)
        for change in kept:
            for name, node in change.items():
                if node is None:
                    out.pop(name, None)
                else:
                    out[name] = node
        return out

    def after_crash(self, rng: random.Random) -> dict[str, Inode | Directory]:
        mode = rng.choice(("none", "all", "first", "some"))
        if mode == "none":
            return self.names([])
        if mode == "first":
            return self.names(self.pending[: rng.randint(0, len(self.pending))])
        return self.names([change for change in self.pending if mode == "all" or rng.random() < 0.5])


class Disk:
    """Replays a log. ``tree``: what was on the disk before, path by path."""

    def __init__(self, tree: State) -> None:
        self.root = Directory()
        self._live: dict[str, Inode | Directory] = {".": self.root}
        for path in sorted(tree):
            contents = tree[path]
            node: Inode | Directory = Directory() if contents is None else Inode(contents)
            self._parent(path).durable[os.path.basename(path)] = node
            self._live[path] = node

    def _parent(self, path: str) -> Directory:
        parent = self._live[os.path.dirname(path) or "."]
        assert isinstance(parent, Directory)
        return parent

    def _change(self, path: str, node: Inode | Directory | None) -> None:
        self._parent(path).pending.append({os.path.basename(path): node})
        if node is None:
            self._live.pop(path, None)
        else:
            self._live[path] = node

    def step(self, op: Op) -> None:
        """Do one operation."""
        node = self._live.get(op.path)
        if op.kind == "create":
            self._change(op.path, Inode())
        elif op.kind == "mkdir":
            self._change(op.path, Directory())
        elif op.kind in ("unlink", "rmdir"):
            if node is not None:
                self._change(op.path, None)
        elif op.kind == "rename":
            assert node is not None
            assert os.path.dirname(op.path) == os.path.dirname(op.target)
            self._parent(op.path).pending.append({os.path.basename(op.path): None, os.path.basename(op.target): node})
            self._live[op.target] = self._live.pop(op.path)
        elif op.kind == "syncdir":
            if isinstance(node, Directory):
                node.durable, node.pending = node.names(node.pending), []
        elif isinstance(node, Inode):  # files without a name any more are of no interest
            if op.kind in ("write", "truncate"):
                node.pending.append((op.kind, op.offset, op.data))
            elif op.kind == "fsync":
                node.sync()

    def after_crash(self, rng: random.Random) -> State:
        """One legal state."""
        state: State = {}
        self._collect(self.root, "", state, rng)
        return state

    def _collect(self, directory: Directory, prefix: str, state: State, rng: random.Random) -> None:
        for name, node in directory.after_crash(rng).items():
            path = prefix + name
            if isinstance(node, Directory):
                state[path] = None
                self._collect(node, path + "/", state, rng)
            else:
                state[path] = node.after_crash(rng)


def read_tree(root: Path) -> State:
    """A directory tree as a state."""
    state: State = {}
    for folder, folders, names in os.walk(root):
        for name in folders:
            state[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in names:
            path = Path(folder, name)
            state[os.path.relpath(path, root)] = path.read_bytes()
    return state


def write_tree(root: Path, state: State) -> None:
    """A state as a directory tree."""
    root.mkdir(parents=True)
    for path in sorted(state):
        contents = state[path]
        if contents is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(contents)
