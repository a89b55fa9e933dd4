"""The file of a loader's trace: whole JSON whatever happens, and one loader's alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lfdata import Loader, LoaderDataset
from lfdata.errors import OptionError, StorageError
from lfdata.loader.trace import Trace

TAKEN = "trace.json', which another loader is writing"
# A loader whose trace grows, a millisecond a batch; it says when an epoch of 48 batches is over.
BUSY = """
import sys, time, lfdata
loader = lfdata.NumpyLoader(sys.argv[1], 1, ["label"], engine="inline", trace=sys.argv[2])
loader._producer.steps = 1
while True:
    for batch in loader:
        time.sleep(0.001)
    print("there", flush=True)
"""


def _events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


@contextmanager
def _busy(data: Path, trace: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", BUSY, str(data), str(trace)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()


def test_a_killed_run_leaves_json_and_no_lock(pictures: Path, tmp_path: Path) -> None:
    trace, rng = tmp_path / "trace.json", random.Random(0)
    for _ in range(5):
        with _busy(pictures, trace):
            time.sleep(0.05 + 0.05 * rng.random())
        names = [event["name"] for event in _events(trace)]
        assert names[:2] == ["process_name", "thread_name"] and names.count("wait") >= 48
    Loader(pictures, 8, ["label"], trace=trace).close()
    assert len(_events(trace)) == 2, "the killed run's events are still there"


def test_the_trace_of_a_loader_in_another_process_is_refused(pictures: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with _busy(pictures, trace), pytest.raises(OptionError, match=TAKEN):
        Loader(pictures, 8, ["label"], trace=trace)
    assert len(_events(trace)) > 2


def test_the_trace_of_another_loader_is_refused_until_that_is_closed_or_gone(pictures: Path, tmp_path: Path) -> None:
    trace, link = tmp_path / "trace.json", tmp_path / "link.json"
    first = Loader(pictures, 8, ["label"], engine="inline", trace=trace)
    first._producer.steps = 1
    assert sum(1 for _ in first) == 6
    link.symlink_to(trace)
    before = _events(trace)
    with pytest.raises(OptionError, match=TAKEN):
        Loader(pictures, 8, ["label"], trace=trace)
    with pytest.raises(OptionError, match="link.json"):
        Loader(pictures, 8, ["label"], trace=link)
    assert _events(trace) == before
    assert sum(1 for _ in first) == 6
    assert sum(event["name"] == "wait" for event in _events(trace)) == 12
    first.close()
    second = Loader(pictures, 8, ["label"], trace=trace)
    del second
    Loader(pictures, 8, ["label"], trace=trace).close()


def test_a_loader_that_cannot_be_made_does_not_keep_the_file(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="equal micro-batches") as kept:
        Loader(pictures, 8, ["label"], accumulate=3, trace=tmp_path / "trace.json")
    Loader(pictures, 8, ["label"], trace=tmp_path / "trace.json").close()
    assert kept.value.__traceback__ is not None


def test_a_child_of_a_loader_that_is_closed_does_not_keep_the_lock(pictures: Path, tmp_path: Path) -> None:
    """Nor while it is just being forked."""
    trace, (end, told) = tmp_path / "trace.json", os.pipe()
    loader = Loader(pictures, 8, ["label"], engine="inline", trace=trace)
    child = os.fork()
    if not child:
        os.close(told)
        os.read(end, 1)
        os._exit(0)
    try:
        loader.close()
        Loader(pictures, 8, ["label"], trace=trace).close()
    finally:
        os.close(told)
        os.close(end)
        os.waitpid(child, 0)


def test_a_child_of_a_killed_trainer_does_not_keep_the_lock(pictures: Path, tmp_path: Path) -> None:
    code = """
import os, sys, time, lfdata
loader = lfdata.NumpyLoader(sys.argv[1], 8, ["label"], engine="inline", trace=sys.argv[2])
if not os.fork():
    print("there", flush=True)
    sys.stdin.read()
    print("gone", flush=True)
    os._exit(0)
time.sleep(60)
"""
    words = [sys.executable, "-c", code, str(pictures), str(tmp_path / "trace.json")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.kill()
        process.wait()
        Loader(pictures, 8, ["label"], trace=tmp_path / "trace.json").close()
        process.stdin.close()
        assert process.stdout.readline() == "gone\n", "the child had ended"


def test_ranks_write_their_own(pictures: Path, tmp_path: Path) -> None:
    ranks = [Loader(pictures, 8, ["label"], rank=rank, world_size=2, trace=tmp_path / "trace.json") for rank in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-0.json", "trace-1.json"]
    with pytest.raises(OptionError, match="trace-1.json"):
        Loader(pictures, 8, ["label"], rank=1, world_size=2, trace=tmp_path / "trace.json")
    for loader in ranks:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_of_a_dataset_write_their_own(pictures: Path, tmp_path: Path, workers: int) -> None:
    dataset = LoaderDataset(pictures, 8, ["label"], trace=tmp_path / "trace.json")
    how: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=workers, **how)
    kept = iter(loader)
    next(kept)
    for _ in range(2):
        # While the iteration before is not over.
        assert sum(1 for _ in loader) == len(dataset) == 6
    names = ["trace-worker0.json", "trace-worker1.json"] if workers == 2 else ["trace.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    waits = [sum(event["name"] == "wait" for event in _events(tmp_path / name)) for name in names]
    assert all(waits), waits


def test_a_forked_child_that_ends_leaves_the_trace_alone(pictures: Path, tmp_path: Path) -> None:
    code = f"""
import os, sys
from lfdata import Loader, transforms as T
loader = Loader({str(pictures)!r}, 8, {{"image": [T.CenterCrop(8)]}}, engine="inline", trace="trace.json")
loader._producer.steps = 1
batches = iter(loader)
next(batches)
if not os.fork():
    sys.exit()
os.wait()
for _ in batches:
    pass
loader.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert sum(event["name"] == "wait" for event in _events(tmp_path / "trace.json")) == 6


def test_a_full_disk_ends_the_trace_and_not_training(pictures: Path, tmp_path: Path) -> None:
    """Some bytes of an event still fit. It is told once, and the file is whole JSON with what came before."""
    code = """
import logging, resource, signal, sys, lfdata
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
loader = lfdata.NumpyLoader(sys.argv[1], 8, ["label"], engine=sys.argv[3], trace=sys.argv[2])
loader._producer.steps = 1
whole, batches = resource.getrlimit(resource.RLIMIT_FSIZE), iter(loader)
# The slots are there.
next(batches)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, whole[1]))
print(1 + sum(1 for _ in batches) + sum(1 for _ in range(3) for _ in loader))
resource.setrlimit(resource.RLIMIT_FSIZE, whole)
print(sum(1 for _ in loader))
loader.close()
"""
    for engine in ("inline", "thread"):
        trace = tmp_path / f"{engine}.json"
        words = [sys.executable, "-c", code, str(pictures), str(trace), engine]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        assert said[1:] == ["24", "6"]
        assert said[0].startswith(f"WARNING {trace}: write failed: File too large: ")
        steps = [(event["args"]["epoch"], event["args"]["step"]) for event in _events(trace) if event["name"] == "wait"]
        assert 3 < len(steps) < 24 and steps == [(number // 6, number % 6) for number in range(len(steps))]


def test_an_event_that_is_broken_off_is_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(tmp_path / "trace.json")
    put = Trace._put

    def broken_off(self: Trace, data: bytes) -> None:
        monkeypatch.undo()
        put(self, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trace, "_put", broken_off)
    with pytest.raises(KeyboardInterrupt):
        trace.waited(0.0, 1.0, 1000, 1000, 1, (0, 0))
    assert len(_events(tmp_path / "trace.json")) == 2
    trace.waited(0.0, 1.0, 0, 7, 1, (0, 0))
    assert [event["args"]["step"] for event in _events(tmp_path / "trace.json") if event["name"] == "wait"] == [7]
    trace.close()
    trace.waited(0.0, 1.0, 0, 8, 1, (0, 0))
    assert len(_events(tmp_path / "trace.json")) == 5


def test_what_is_no_file_is_refused(pictures: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StorageError, match="pipe: open failed"):
        Loader(pictures, 8, ["label"], trace=pipe)
    with pytest.raises(OptionError, match="'/dev/null', which is no regular file"):
        Loader(pictures, 8, ["label"], trace="/dev/null")
