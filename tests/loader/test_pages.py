"""Pages of the slots: huge where the system says so and slots have room for them, and there before they are filled within a budget."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from pathlib import Path
from typing import Any

import batchkit
import loaderkit
import numpy as np
import pytest

import lfdata.transforms as T
from lfdata import Loader
from lfdata.loader import pages
from lfdata.loader.slots import PAGE, Slots

HUGE = 1 << 21
# More than a huge page a slot.
LARGE: dict[str, Any] = {"image": [T.RandomResizedCrop(448)], "label": None}


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel would say: huge pages of 2 MiB, for who asks."""
    monkeypatch.setattr(pages, "SYSTEM", tmp_path / "thp")
    (tmp_path / "thp").mkdir()
    (tmp_path / "thp" / "hpage_pmd_size").write_text(f"{HUGE}\n")
    _say(tmp_path / "thp", "advise")
    return tmp_path / "thp"


def _say(folder: Path, word: str) -> None:
    words = ["always", "within_size", "advise", "never", "deny", "force"]
    folder.mkdir(exist_ok=True)
    (folder / "shmem_enabled").write_text(" ".join(f"[{one}]" if one == word else one for one in words) + "\n")


def _asked(slots: Slots) -> bool:
    """Whether the kernel has been asked for huge pages in the mapping."""
    at = f"{slots.memory().ctypes.data:x}-"
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    (mapping,) = (part for part in parts if part.startswith(at))
    return "hg" in next(line for line in mapping.splitlines() if line.startswith("VmFlags:")).split()


@pytest.mark.parametrize(
    ("word", "size", "asked", "huge"),
    [
        ("advise", HUGE, True, True),
        ("advise", HUGE - PAGE, False, False),
        ("always", HUGE, False, True),
        ("within_size", 3 * HUGE, False, True),
        ("force", HUGE, False, True),
        ("never", HUGE, False, False),
        ("deny", HUGE, False, False),
    ],
)
def test_huge_pages_are_asked_for_where_they_can_be_had(system: Path, word: str, size: int, asked: bool, huge: bool) -> None:
    _say(system, word)
    slots = Slots(3, size)
    assert (_asked(slots), slots.huge) == (asked, huge)
    # Nothing else depends on it.
    assert slots.size == size and slots.memory().nbytes == PAGE + 3 * size
    slots.close()


def test_the_setting_of_the_size_comes_before_the_general_one(system: Path) -> None:
    own = system / f"hugepages-{HUGE // 1024}kB"
    for word, huge in (("never", False), ("always", True), ("advise", True)):
        _say(own, word)
        slots = Slots(1, HUGE)
        assert slots.huge == huge and _asked(slots) == (word == "advise")
        slots.close()
    (own / "shmem_enabled").write_text("always [inherit] within_size advise never\n")
    _say(system, "never")
    assert not Slots(1, HUGE).huge


@pytest.mark.parametrize("broken", ["hpage_pmd_size", "shmem_enabled"])
@pytest.mark.parametrize("content", [None, "", "odd\n", "[]"])
def test_a_system_that_does_not_say(system: Path, broken: str, content: str | None) -> None:
    if content is None:
        (system / broken).unlink()
    else:
        (system / broken).write_text(content)
    slots = Slots(1, HUGE)
    assert not slots.huge and not _asked(slots)
    slots.close()


def test_a_kernel_that_refuses(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 0x7FFF)
    slots = Slots(1, HUGE)
    assert not slots.huge
    slots.close()


def test_a_loader_says_which_and_gives_the_same(system: Path, tmp_path: Path) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 16)
    found = {}
    for word in ("advise", "never"):
        _say(system, word)
        loader = Loader(path, 8, LARGE, engine="inline", threads=1)
        assert loader.stats()["pages"] == "normal", "there are no slots yet"
        digests = [batchkit.digest(batch) for batch in loader]
        found[word] = (loader.stats()["pages"], loader.stats()["slot_bytes"], digests)
        loader.close()
    assert found["advise"][0] == "huge" and found["never"][0] == "normal" and found["advise"][1:] == found["never"][1:]
    _say(system, "advise")
    small = Loader(path, 8, {"label": None}, engine="inline")
    list(small)
    assert small.stats()["pages"] == "normal" and not _asked(small._pipelines[0].slots)
    small.close()


# -- there before they are filled -----------------------------------------------------------------------------------------


def _there(slots: Slots) -> int:
    return os.fstat(slots.descriptor).st_blocks * 512


def test_touching_has_all_memory_there_and_changes_nothing() -> None:
    slots = Slots(3, 5 * PAGE)
    memory = slots.memory()
    memory[PAGE + 5 * PAGE + 7] = 9
    assert _there(slots) <= 2 * PAGE
    slots.touch()
    assert PAGE + 15 * PAGE >= _there(slots) >= 15 * PAGE
    assert memory[PAGE + 5 * PAGE + 7] == 9 and memory.sum(dtype=np.int64) == 9
    slots.close()


def test_memory_that_cannot_be_touched_is_left() -> None:
    memory = np.zeros(4 * PAGE, np.uint8)
    assert not pages.touch((memory.ctypes.data // PAGE) * PAGE + 1, PAGE), "no address of a page"


@pytest.mark.parametrize("budget", [None, "16MiB"])
def test_slots_within_a_budget_are_there_before_they_are_filled(tmp_path: Path, budget: str | None) -> None:
    """And those that are reserved for a bound are not: their memory comes as they are filled."""
    data, gate = loaderkit.dataset(tmp_path), loaderkit.gate(tmp_path)
    try:
        # The second batch is not made, so no slot after it is filled.
        gate.write_text(f"wait {loaderkit.BATCH}")
        with contextlib.closing(loaderkit.loader(data, prefetch=5, max_bytes=budget)) as loader:
            batches = iter(loader)
            found, slots = [next(batches)], loader._pipelines[0].slots
            whole, deadline = slots.count * slots.size, time.monotonic() + 30
            assert slots.count == 6
            if budget is None:
                assert _there(slots) <= PAGE + 2 * slots.size
            else:
                while _there(slots) < whole and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert PAGE + whole >= _there(slots) >= whole
            gate.unlink()
            found += batches
            assert loaderkit.whole(found) == loaderkit.expected()
    finally:
        gate.unlink(missing_ok=True)
        del os.environ[loaderkit.GATE]


def test_decoders_run_where_the_trainer_is_bound_to(tmp_path: Path) -> None:
    """So what they touch first lies at its node."""
    path, cores = batchkit.write_pictures(tmp_path / "d", 8), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(cores)})
        loader = Loader(path, 8, LARGE, engine="process", threads=1)
        next(batches := iter(loader))
        (decoder,) = loader._pipelines[0]._engine.processes  # type: ignore[attr-defined]
        assert os.sched_getaffinity(decoder) == {max(cores)}
        batches.close()
        loader.close()
    finally:
        os.sched_setaffinity(0, cores)
