"""The files of a source: a path, a pattern, several of these joined by ``::``, or a directory searched for endings."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from typing import Any

from lfdata.errors import SourceError
from shard_builder.sources.files import show
from shard_builder.sources.grouping import expand

_MAX_FILES = 10_000_000
_MAX_DEPTH = 64


class FileList:
    """Files in order: as given, patterns and directories in byte order of the paths.

    A directory is searched with all below it; names that begin with ``.`` or ``_`` are left out, and links to directories are not
    followed. Links to files are: whoever named the directory meant them.

    Attributes:
        root: the directory that the names are relative to.
        names: relative paths.

    Args:
        endings: in lower case, of the files that a directory is searched for.
        split: only files of this split: those with a directory of that name, or whose name begins with it and ``-``, ``_`` or ``.``.

    Raises:
        SourceError: nothing is there, or what is there is no regular file.
    """

    def __init__(self, location: str, endings: tuple[str, ...], split: str | None = None) -> None:
        paths: list[bytes] = []
        roots: list[bytes] = []
        for part in location.split("::"):
            found, root = _expand(part, endings)
            paths += found
            roots.append(root)
            if len(paths) > _MAX_FILES:
                raise SourceError(f"{location}: more than {_MAX_FILES} files")
        self.root = os.fsdecode(os.path.commonpath(roots))
        self.names = [os.path.relpath(os.fsdecode(path), self.root) for path in paths]
        if split is not None:
            self.names = [name for name in self.names if _in_split(name, split)]
            if not self.names:
                raise SourceError(
                    f"{location}: no file belongs to the split {split!r}; there is {show(os.path.basename(paths[0]))!r}"
                )
        twice = len(self.names) - len(set(self.names))
        if twice:
            raise SourceError(f"{location}: {twice} files are named more than once")

    def path(self, name: str) -> str:
        """The absolute path of one of :attr:`names`."""
        return os.path.join(self.root, name)

    def describe(self) -> dict[str, Any]:
        """How many files, the first and last name, and a digest of all names; no directories."""
        digest = hashlib.sha256(b"\0".join(map(os.fsencode, self.names))).hexdigest()
        first, last = show(self.names[0]), show(self.names[-1])
        return {"count": len(self.names), "first": first, "last": last, "names_sha256": digest}


def _in_split(name: str, split: str) -> bool:
    *folders, base = name.split("/")
    return split in folders or re.match(re.escape(split) + r"[-_.]", base) is not None


def _expand(part: str, endings: tuple[str, ...]) -> tuple[list[bytes], bytes]:
    """Files of one path or pattern, and the directory to name them from."""
    if not part or "\0" in part:
        raise SourceError(f"{part!r} is not a path")
    absolute = os.path.abspath(part)
    if os.path.isdir(absolute):
        found = _search(os.fsencode(absolute), endings, 0)
        if not found:
            raise SourceError(f"{part}: holds no file ending in {', '.join(endings)}")
        return found, os.fsencode(absolute)
    if os.path.lexists(absolute):
        names = [absolute]
    else:
        try:
            braced = list(expand(absolute)) if "{" in part else [absolute]
        except ValueError as error:
            raise SourceError(f"{part}: a pattern that cannot be expanded: {error}") from None
        names = []
        for name in braced:
            magic = glob.has_magic(name)
            found_here = sorted(glob.glob(name, recursive=True), key=os.fsencode) if magic else [name]
            names += [one for one in found_here if not (magic and os.path.isdir(one))]
        if not names:
            raise SourceError(f"{part}: no file fits the pattern")
    for name in names:
        _check_regular(name)
    common = os.path.commonpath([os.path.dirname(name) for name in names])
    return [os.fsencode(name) for name in names], os.fsencode(common)


def _check_regular(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise SourceError(f"{show(path)}: {(error.strerror or str(error)).lower()}") from error
    if not stat.S_ISREG(mode):
        raise SourceError(f"{show(path)}: not a regular file")


def _search(directory: bytes, endings: tuple[str, ...], depth: int) -> list[bytes]:
    if depth > _MAX_DEPTH:
        raise SourceError(f"{show(directory)}: directories nested more than {_MAX_DEPTH} deep")
    found: list[bytes] = []
    folders: list[bytes] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith((b".", b"_")):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.lower().endswith(tuple(map(str.encode, endings))):
                    _check_regular(os.fsdecode(entry.path))
                    found.append(entry.path)
    except OSError as error:
        raise SourceError(f"{show(directory)}: cannot be listed: {error.strerror}") from error
    for folder in folders:
        found += _search(folder, endings, depth + 1)
    return sorted(found)
