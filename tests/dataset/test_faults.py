"""Files that change under a reader, few descriptors, threads and forks: a typed error or right data, and the process lives."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from shardkit import AUDIO_PARAMS, Part, add_index, audio, plain, save_manifest, scalar, tokens, write_dataset

from lfdata.dataset import ShardDataset
from lfdata.errors import ChangedError, FormatError, LfdataError, StorageError, TruncatedError
from lfdata.format.meta import FieldMeta, Manifest

REPO = Path(__file__).parents[2]
FIELDS = [
    FieldMeta("blob", "bytes", {}),
    FieldMeta("snd", "audio", AUDIO_PARAMS),
    FieldMeta("ids", "tokens", {"dtype": "uint16", "vocab": 60_000}),
    FieldMeta("n", "scalar", {"dtype": "int32"}),
]


def make(root: Path, shards: int = 2, rows: int = 6, word: str = "one", name: str = "set") -> Manifest:
    """A data set whose every value tells its generation and row."""
    parts = []
    for s in range(shards):
        values = []
        for r in range(rows):
            n = s * rows + r
            sample = {
                "blob": plain(f"{word}-{n}-".encode() * 300),
                "snd": audio(np.full((200, 1), n, np.int16)),
                "ids": tokens([n % 100] * 5, "uint16"),
                "n": scalar(n, "int32"),
            }
            values.append((f"{word}{n}".encode(), sample))
        parts.append(Part(values))
    return write_dataset(root, FIELDS, parts, name=name)


def in_process(code: str, *arguments: object, files: int = 0) -> str:
    """Run code in a fresh interpreter; a signal or a traceback fails the test. Returns what it printed."""
    limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, cwd=REPO, preexec_fn=limit, env=os.environ | {"PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


TRUNCATE = """
    import os, sys
    from lfdata.dataset import ShardDataset
    from lfdata.errors import FormatError
    root, file, length, budget, warm = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "warm"
    ds = ShardDataset(root, index_cache_bytes=budget, max_descriptors=2)
    assert ds[0]["n"] == 0 and ds.read_audio(0, "snd", 0, 10).shape == (10, 1)
    if warm:
        list(ds), ds.column("n"), ds.index_of(b"one5")
    os.truncate(file, length)
    calls = {
        "item": lambda: ds[1], "many": lambda: ds.read_many([0, 5, 3]), "raw": lambda: ds.read_many([2], decode=False),
        "keys": lambda: ds.keys([4]), "index_of": lambda: ds.index_of(b"one4"), "audio": lambda: ds.read_audio(3, "snd", 70, 140),
        "column": lambda: ds.column("n"), "present": lambda: ds.present("blob"), "tokens": lambda: ds.tokens("ids", 0),
        "iterate": lambda: list(ds),
    }
    for name, call in calls.items():
        try:
            call()
        except FormatError as error:
            assert os.path.basename(file) in str(error), error
            print(name, "error")
        else:
            print(name, "data")
"""


@pytest.mark.parametrize("warm", ["warm", "cold"])
@pytest.mark.parametrize("budget", [1, 1 << 20])
@pytest.mark.parametrize("part", [0, 4096, 0.3, 0.6, 0.9])
def test_a_shard_truncated_under_a_reader(tmp_path: Path, part: float, budget: int, warm: str) -> None:
    entry = make(tmp_path, shards=1).shards[0]
    length = int(entry.bytes * part) if part < 1 else int(part)
    printed = in_process(TRUNCATE, tmp_path, tmp_path / entry.file, length, budget, warm)
    found = dict(line.split() for line in printed.splitlines())
    assert len(found) == 10
    # Mapped columns would be fatal, so they are refused; everything is when nothing is held and nothing is left.
    assert found["column"] == found["tokens"] == "error"
    if part == 0:
        assert found["item"] == found["many"] == found["iterate"] == found["raw"] == "error"


def test_truncated_shards_of_several_give_errors_for_columns(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    add_index(tmp_path, manifest)
    data = ShardDataset(tmp_path)
    assert data.column("n").tolist() == list(range(12))
    os.truncate(tmp_path / "index.lfi", 5000)
    with pytest.raises(TruncatedError):
        data.column("n")
    fresh = ShardDataset(tmp_path)  # a damaged index is not used
    os.truncate(tmp_path / manifest.shards[1].file, 9000)
    with pytest.raises((TruncatedError, ChangedError)):
        fresh.column("n")
    with pytest.raises((TruncatedError, ChangedError)):
        fresh[7]
    assert fresh[0]["n"] == 0


def replace(root: Path, manifest: Manifest, other: Path) -> None:
    """Put the files of another generation in the place of all shards, as an overwriting run would."""
    for mine, theirs in zip(manifest.shards, sorted(other.glob("*.lfd")), strict=True):
        os.replace(theirs, root / mine.file)


@pytest.mark.parametrize("descriptors", [1, 8])
@pytest.mark.parametrize("touched", [0, 1, 12])
def test_replaced_shards_give_one_generation(tmp_path: Path, descriptors: int, touched: int) -> None:
    """Same names, same sizes, same ids even: what was not read yet is refused or of the old generation, never a mixture."""
    manifest = make(tmp_path / "a", word="one")
    make(tmp_path / "b", word="two")
    data = ShardDataset(tmp_path / "a", max_descriptors=descriptors)
    for row in range(touched):
        assert data[row]["__key__"].startswith(b"one")
    replace(tmp_path / "a", manifest, tmp_path / "b")
    for row in range(12):
        try:
            sample = data[row]
        except FormatError:
            continue
        assert sample["blob"].startswith(sample["__key__"][:3]), "key of one generation, payload of another"
    shards = {row // 6: word for row in range(12) if (word := generation(data, row))}
    assert all(shards[s] == "one" for s in shards if touched > s * 6), "an open shard went over to the new generation"


def generation(data: ShardDataset, row: int) -> str:
    """The word in a sample, or nothing if it is refused."""
    try:
        return data[row]["blob"][:3].decode()
    except FormatError:
        return ""


def test_another_data_set_under_the_same_names_is_refused(tmp_path: Path) -> None:
    manifest = make(tmp_path / "a", name="one")
    make(tmp_path / "b", name="two")
    data = ShardDataset(tmp_path / "a", max_descriptors=1)
    assert data[0]["n"] == 0
    replace(tmp_path / "a", manifest, tmp_path / "b")
    with pytest.raises(ChangedError):
        data[11]
    data.close()
    with pytest.raises(ChangedError):
        data[0]


def test_close_forgets_what_was_read(tmp_path: Path) -> None:
    """After close() a rewritten data set is read, not remembered."""
    manifest = make(tmp_path / "a", word="one")
    make(tmp_path / "b", word="two")
    data = ShardDataset(tmp_path / "a")
    assert list(data)[3]["__key__"] == b"one3"
    replace(tmp_path / "a", manifest, tmp_path / "b")
    data.close()
    assert [s["__key__"] for s in data] == [b"two%d" % n for n in range(12)]


def test_missing_shards_and_manifests(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    (tmp_path / manifest.shards[1].file).unlink()
    data = ShardDataset(tmp_path)
    assert data[0]["n"] == 0
    with pytest.raises(StorageError, match="missing"):
        data[6]
    (tmp_path / manifest.shards[1].file).symlink_to("/dev/zero")
    with pytest.raises(LfdataError):
        data[6]
    os.remove(tmp_path / manifest.shards[1].file)
    os.mkfifo(tmp_path / manifest.shards[1].file)  # must not wait for a writer
    with pytest.raises(LfdataError):
        data[6]
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FormatError, match="manifest"):
        ShardDataset(tmp_path)


def test_300_shards_with_64_descriptors(tmp_path: Path) -> None:
    small = [FieldMeta("blob", "bytes", {}), FieldMeta("n", "scalar", {"dtype": "int32"})]
    parts = [Part([(b"%d" % s, {"blob": plain(b"x%d" % s), "n": scalar(s, "int32")})]) for s in range(300)]
    write_dataset(tmp_path, small, parts)
    printed = in_process(
        """
        import os, sys
        from lfdata.dataset import ShardDataset
        ds = ShardDataset(sys.argv[1], max_descriptors=int(sys.argv[2]))
        for _ in range(2):
            assert [s["n"] for s in ds] == list(range(300))
            assert ds.column("n").tolist() == list(range(300))
            assert ds.index_of(b"299") == 299
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        assert ds.read_many(range(299, -1, -1))["blob"][0] == b"x299"
        print(len(os.listdir("/proc/self/fd")))
        """,
        tmp_path, 1000, files=64,
    )  # fmt: skip
    assert int(printed) < 64


def test_pickle_is_small_and_comes_back(tmp_path: Path) -> None:
    sizes = []
    for shards in (1, 40):
        make(tmp_path / str(shards), shards=shards, rows=2)
        data = ShardDataset(tmp_path / str(shards), fields=["n", "blob"], index_cache_bytes=12345, max_descriptors=3)
        list(data)
        text = pickle.dumps(data)
        sizes.append(len(text))
        again = pickle.loads(text)
        assert again.fields == ("n", "blob") and len(again) == len(data) and again[-1] == data[-1]
        assert again._options[:2] == (12345, 3)
    assert abs(sizes[0] - sizes[1]) <= 1 and sizes[0] < 400


def check_all(data: ShardDataset, seed: int, seconds: float, stop: Callable[[], bool] = lambda: False) -> int:
    """Read random rows for a while; every value is checked."""
    rng, begun, count = np.random.default_rng(seed), time.monotonic(), 0
    while time.monotonic() - begun < seconds and not stop():
        rows = rng.integers(0, len(data), 5).tolist()
        found = data.read_many(rows)
        assert found["n"] == rows and [a.samples[3, 0] for a in found["snd"]] == rows
        assert all(blob.startswith(b"one-%d-" % row) for blob, row in zip(found["blob"], rows, strict=True))
        assert found["__key__"] == [b"one%d" % row for row in rows]
        assert data.index_of(b"one%d" % rows[0]) == rows[0] and data.column("n")[rows[1]] == rows[1]
        count += 1
    return count


@pytest.mark.parametrize("descriptors", [1, 3, 64])
def test_eight_threads(tmp_path: Path, descriptors: int) -> None:
    make(tmp_path, shards=6)
    data = ShardDataset(tmp_path, max_descriptors=descriptors, index_cache_bytes=1 << 18)
    counts, errors = [], []

    def work(seed: int) -> None:
        try:
            counts.append(check_all(data, seed, 0.6))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and len(counts) == 8 and min(counts) > 0


FORK = """
    import os, sys, threading, warnings
    import numpy.random  # imported lazily by numpy: in a thread, its lock could be held at a fork for ever
    sys.path[:0] = [sys.argv[2], sys.argv[3]]
    warnings.simplefilter("ignore", DeprecationWarning)
    from lfdata.dataset import ShardDataset
    from test_faults import check_all
    ds = ShardDataset(sys.argv[1], max_descriptors=2, index_cache_bytes=1 << 18)
    done, failed = threading.Event(), []
    def work(seed):
        try:
            check_all(ds, seed, 30, done.is_set)
        except BaseException as error:
            failed.append(repr(error))
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    [t.start() for t in threads]
    for number in range(25):
        child = os.fork()
        if child == 0:
            try:
                ok = check_all(ds, number, 0.05) > 0 and ShardDataset(sys.argv[1])[1]["n"] == 1
                os._exit(0 if ok else 2)
            except BaseException:
                import traceback; traceback.print_exc(); sys.stderr.flush()
                os._exit(3)
        assert os.waitpid(child, 0)[1] == 0, "the child failed"
    done.set()
    [t.join() for t in threads]
    assert not failed, failed
    print("fine")
"""


def test_fork_while_threads_read(tmp_path: Path) -> None:
    """Children go on reading: no lock stays held, no descriptor is mixed up; a deadlock is the time limit of the test."""
    make(tmp_path, shards=5)
    assert in_process(FORK, tmp_path, Path(__file__).parent, REPO / "tests" / "format").strip() == "fine"


IMPORTING = """
    import os, signal, sys, threading, time
    from importlib.abc import MetaPathFinder
    from lfdata.dataset import ShardDataset
    ds, begun = ShardDataset(sys.argv[1]), threading.Event()
    class Slow(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "lfdata.codecs.raw":
                begun.set()
                time.sleep(0.5)
    assert "lfdata.codecs.raw" not in sys.modules
    sys.meta_path.insert(0, Slow())
    thread = threading.Thread(target=lambda: ds.read_many([0], ["blob"]))
    thread.start()
    begun.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if len(ds.read_many([1], ["blob"])["blob"]) == 1 else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0, "the child waits for a lock that nobody holds"
    print("fine")
"""


def test_fork_while_a_thread_imports_a_codec(tmp_path: Path) -> None:
    make(tmp_path, shards=1)
    assert in_process(IMPORTING, tmp_path).strip() == "fine"


def test_a_child_after_fork_leaves_the_parents_descriptors_alone(tmp_path: Path) -> None:
    make(tmp_path, shards=3)
    data = ShardDataset(tmp_path, max_descriptors=2)
    list(data)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        data.close()
        os._exit(0 if data[17]["n"] == 17 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [s["n"] for s in data] == list(range(18))


def test_read_only_files_are_only_read(tmp_path: Path) -> None:
    make(tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    for path in tmp_path.iterdir():
        path.chmod(0o444)
    tmp_path.chmod(0o555)
    list(ShardDataset(tmp_path))
    tmp_path.chmod(0o755)
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_shards_that_disagree_with_the_manifest(tmp_path: Path) -> None:
    """A schema of other types than the shards': refused, never cast."""
    manifest = make(tmp_path)
    for number, field in ((3, FieldMeta("n", "scalar", {"dtype": "int8"})), (0, FieldMeta("blob", "text", {}))):
        fields = tuple(field if n == number else f for n, f in enumerate(manifest.fields))
        save_manifest(tmp_path, Manifest(manifest.rows, fields, manifest.shards))
        for read in (lambda d: d[0], lambda d: d.column("n"), lambda d: d.read_many([1], ["n"], decode=False)):
            with pytest.raises(FormatError, match="manifest says"):
                read(ShardDataset(tmp_path))


UNGUARDED = """
    import sys
    from importlib.abc import MetaPathFinder
    from lfdata.dataset import ShardDataset
    from lfdata.format.forking import importing
    found = []
    class Watch(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if not importing._is_owned():
                found.append(name)
    ds = ShardDataset(sys.argv[1])
    sys.meta_path.insert(0, Watch())
    list(ds), ds.read_many([3, 3, 0], decode=False), ds.keys([1]), [ds.column(c) for c in ds.columns], ds.index_of(ds[5]["__key__"])
    print(*found)
"""


@pytest.mark.parametrize("name", ["mixed", "numeric", "large"])
def test_reading_imports_nothing_that_a_fork_could_tear(name: str) -> None:
    """A module half imported in a thread at a fork stays locked in the child: what reading imports, it imports under the guard."""
    assert in_process(UNGUARDED, REPO / "tests" / "golden" / "v1.0" / name).split() == []


def test_a_forgotten_data_set_keeps_no_descriptors(tmp_path: Path) -> None:
    make(tmp_path, shards=4)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        data = ShardDataset(tmp_path)
        assert len(list(data)) == 24
        assert len(os.listdir("/proc/self/fd")) > before
        del data
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
