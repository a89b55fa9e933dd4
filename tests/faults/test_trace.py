"""strace agrees with the log of the durable layer: nothing that changes the target bypasses it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from killkit import environment

CALLS = "openat,open,creat,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,truncate,ftruncate,fsync,fdatasync,sync_file_range,\
write,pwrite64,writev,pwritev,pwritev2,link,linkat,symlink,symlinkat,fallocate,copy_file_range,sendfile,chmod,fchmod,fchmodat,utimensat"
SAME = {"openat": "open", "create": "open", "syncdir": "fsync", "ftruncate": "truncate"}
LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")
HERE = Path(__file__).resolve().parent

Event = tuple[str, str]


def _source(folder: Path) -> Path:
    folder.mkdir()
    lines = []
    for number in range(50):
        (folder / f"{number}.bin").write_bytes(bytes([number]) * 400)
        file = f"{number}.bin" if number != 13 else "missing.bin"
        lines.append(json.dumps({"file": file, "ids": [number, 1], "about": {"number": number, "words": ["a", "b"] * 5}}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def _traced(place: Path, *modes: str) -> tuple[list[Event], list[Event], list[str]]:
    """The layer's log, the system calls of the converter, and those of other processes."""
    trace, log, target = place / "trace", place / "log", place / "target"
    script = [sys.executable, str(HERE / "traced.py"), str(place / "source" / "rows.jsonl"), str(target), str(log), *modes]
    command = ["strace", "-f", "-y", "-s", "0", "-e", f"trace={CALLS}", "-o", str(trace), *script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    logged = [event for line in log.read_text().splitlines() for event in _logged(*json.loads(line))]
    calls = list(_calls(trace, target))
    first = calls[0][0]
    return logged, [event for pid, event in calls if pid == first], [f"{pid} {event}" for pid, event in calls if pid != first]


def _logged(kind: str, path: str, target: str) -> Iterator[Event]:
    if kind == "rename":
        yield "rename", f"{path} -> {target}"
    elif kind not in ("ack", "close"):
        yield SAME.get(kind, kind), path


def _calls(trace: Path, target: Path) -> Iterator[tuple[str, Event]]:
    """What was done under the target, by process; reading is left out."""
    parent = str(target.parent) + "/"
    for line in trace.read_text().splitlines():
        found = LINE.match(line)
        if found is None:
            continue
        pid, call, rest = found.groups()
        if call in ("openat", "open") and not re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC", rest):
            continue
        paths = [path.removesuffix(" (deleted)") for path in re.findall(r'[<"](/[^">]*)[">]', rest.split(") = ")[0])]
        paths = [
            path
            for path in paths
            if path == str(target) or path.startswith(f"{target}/") or (call == "fsync" and path + "/" == parent)
        ]
        if paths:
            yield pid, (SAME.get(call, call), " -> ".join(os.path.relpath(path, target.parent) for path in paths))


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_strace_agrees_with_the_log(place: Path) -> None:
    _source(place / "source")
    for modes in ((), ("overwrite",), ("overwrite", "bypass")):
        logged, called, others = _traced(place, *modes)
        assert others == [], "a process other than the converter wrote to the target"
        assert len(logged) > 100
        assert {kind for kind, _ in logged} >= {"open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "truncate"}
        # The negative control: a write that bypasses the layer is seen.
        assert (called == logged) == ("bypass" not in modes)
