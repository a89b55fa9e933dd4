"""Negative control: with any one fsync, rename, order or check removed, the crash checker finds violations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from crashcheck import explore, wanted

from lfdata.format import container, durable
from lfdata.format.container import ContainerWriter
from lfdata.format.durable import Files, OutputFile
from shard_builder import journal
from shard_builder.target import Target

Patch = pytest.MonkeyPatch


def _without_fsync(patch: Patch, which: Callable[[str], bool]) -> None:
    sync = OutputFile.sync

    def selective(self: OutputFile) -> None:
        if not which(self.path.name):
            sync(self)

    patch.setattr(OutputFile, "sync", selective)


def _without_directory_sync(patch: Patch) -> None:
    patch.setattr(Files, "sync_directory", lambda _self, _path: None)


def _without_rename(patch: Patch, ending: str) -> None:
    """Files are written under their final names at once."""
    kept = durable.temporary_name

    def final(name: str) -> str:
        return name if name.endswith(ending) else kept(name)

    patch.setattr(durable, "temporary_name", final)
    patch.setattr(container, "temporary_name", final)


def _without_line_check(patch: Patch) -> None:
    patch.setattr(journal, "xxh3", lambda _text: 0)


def _announce_after_commit(patch: Patch) -> None:
    finish = ContainerWriter.finish

    def late(self: ContainerWriter, rows: int, meta: Any, dictionaries: Any = (), announce: Any = None) -> Any:
        written = finish(self, rows, meta, dictionaries)
        if announce is not None:
            announce(written)
        return written

    patch.setattr(ContainerWriter, "finish", late)


def _before_the_manifest(patch: Patch, what: Callable[[Files, Path], None]) -> None:
    write_file = Files.write_file

    def early(self: Files, path: Path, data: Any) -> None:
        if path.name == "manifest.json":
            what(self, path.parent)
        write_file(self, path, data)

    patch.setattr(Files, "write_file", early)


def _old_files_removed_early(patch: Patch) -> None:
    keep = {name for name in wanted(1) if name.endswith(".lfd")}
    _before_the_manifest(patch, lambda files, target: Target(target, files).remove_old(keep))


def _journal_removed_early(patch: Patch) -> None:
    _before_the_manifest(patch, lambda files, target: files.unlink(journal.journal_path(target)))


def _torn_tail_not_synced(patch: Patch) -> None:
    def resume(files: Files, target: Path, task: Any = None) -> Any:
        path = journal.journal_path(target, task)
        entries, size = journal.read(path)
        return journal.Journal(files, files.append(path, size)), entries

    patch.setattr(journal.Journal, "resume", staticmethod(resume))


REMOVED: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "fsync of shards": ("fresh", partial(_without_fsync, which=lambda name: name.endswith(".lfd"))),
    "fsync of the manifest": ("fresh", partial(_without_fsync, which=lambda name: name == ".tmp-manifest.json")),
    "fsync of the journal's first line": ("fresh", partial(_without_fsync, which=lambda name: name == ".tmp-journal")),
    "fsync of the journal's other lines": ("fresh", partial(_without_fsync, which=lambda name: name == "journal")),
    "fsync of directories": ("fresh", _without_directory_sync),
    "rename of shards": ("again", partial(_without_rename, ending=".lfd")),
    "rename of the manifest": ("overwrite", partial(_without_rename, ending="manifest.json")),
    "rename of the journal": ("fresh", partial(_without_rename, ending="journal")),
    "check of journal lines": ("fresh", _without_line_check),
    "journal before rename": ("fresh", _announce_after_commit),
    "manifest before removal": ("overwrite", _old_files_removed_early),
    "journal until the manifest": ("resume", _journal_removed_early),
    "fsync of a cut journal": ("torn", _torn_tail_not_synced),
}


@pytest.mark.parametrize("removed", REMOVED)
def test_removing_it_is_noticed(removed: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, remove = REMOVED[removed]
    wanted(0), wanted(1)
    remove(monkeypatch)
    assert explore(scenario, place, seed=3, each=16, resume_share=0.02, enough=1).findings
