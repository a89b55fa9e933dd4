"""Runs a subject's process, and watches its memory from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.environments import interpreter

REPO = Path(__file__).resolve().parents[2]
SAMPLE_SECONDS = 0.1
# How often a subject that is to be slower is stopped for a moment.
STOP_EVERY_SECONDS, LOOK_EVERY_SECONDS = 0.05, 0.5
# Letters of what a subject's process prints when it fails. What it started says why before its own traceback.
_TAIL = 6000


class SubjectError(Exception):
    """A subject's process failed. The message says how."""


class AbsentError(SubjectError):
    """A subject's library is not installed."""


@dataclass(slots=True)
class Memory:
    """Peak of anonymous + shared memory in MiB, and what of files was mapped at that moment."""

    anonymous_shared: float = 0.0
    file: float = 0.0
    samples: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def watch(self, session: int) -> None:
        """Sample all processes of a session until :meth:`stop`."""
        while not self._stop.wait(SAMPLE_SECONDS):
            mine, files = proportional(session)
            self.samples += 1
            if mine > self.anonymous_shared:
                self.anonymous_shared, self.file = mine, files

    def stop(self) -> None:
        """End :meth:`watch`."""
        self._stop.set()


def proportional(session: int) -> tuple[float, float]:
    """Proportional set size of a session's processes in MiB: anonymous + shared memory, and files."""
    mine = files = 0
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):
            if int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            for line in Path(f"/proc/{entry}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in ("Pss_Anon", "Pss_Shmem"):
                    mine += int(rest.split()[0])
                elif name == "Pss_File":
                    files += int(rest.split()[0])
    return mine / 1024, files / 1024


class Brake:
    """Keeps a session's processes stopped for a share of the time, wherever their time goes: a slowdown of known size."""

    def __init__(self, session: int, share: float) -> None:
        self._session, self._share, self._end = session, share, threading.Event()
        self._thread = threading.Thread(target=self._brake)
        self._thread.start()

    def _brake(self) -> None:
        stopped = looked = 0.0
        began = time.monotonic()
        groups: set[int] = set()
        while not self._end.wait(STOP_EVERY_SECONDS):
            if time.monotonic() - looked > LOOK_EVERY_SECONDS:
                groups, looked = process_groups(self._session), time.monotonic()
            # By the clock, so that late wake-ups do not add up.
            wanted = (time.monotonic() - began) * self._share - stopped
            if wanted <= 0:
                continue
            held = time.monotonic()
            signal_groups(groups, signal.SIGSTOP)
            time.sleep(wanted / (1 - self._share))
            signal_groups(groups, signal.SIGCONT)
            stopped += time.monotonic() - held

    def release(self) -> None:
        """Let them run."""
        self._end.set()
        self._thread.join()


def process_groups(session: int) -> set[int]:
    """Process groups of a session: a subject's workers may have one of their own."""
    found = {session}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    found.add(int(fields[2]))
    return found


def signal_groups(groups: set[int], number: int) -> None:
    """A signal for all of them that are still there."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, number)


def run(
    subject: str, request: dict[str, Any], timeout: float, memory: Memory | None = None, slowed: float = 0.0
) -> dict[str, Any]:
    """One request in a fresh process, which is kept stopped for the share ``slowed`` of the time.

    Raises:
        AbsentError: a module the subject needs is not installed in its environment.
        SubjectError: it failed, or took longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file, errors = Path(scratch) / "request.json", Path(scratch) / "stderr"
        file.write_text(json.dumps(request | {"subject": subject}))
        path = os.pathsep.join([str(REPO), str(REPO / "tools"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        with open(errors, "wb") as stderr:
            process = subprocess.Popen(
                [interpreter(subject), "-m", "benchmarks.harness.child", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
                cwd=scratch,
                start_new_session=True,
            )
        watcher = threading.Thread(target=memory.watch, args=(process.pid,)) if memory else None
        if watcher:
            watcher.start()
        brake = Brake(process.pid, slowed) if slowed else None
        try:
            # One line, not the end of the stream: workers left over hold it open.
            answer = _first_line(process, timeout)
        finally:
            if brake:
                brake.release()
            if memory and watcher:
                memory.stop()
                watcher.join()
            signal_groups(process_groups(process.pid), signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        text = errors.read_text(errors="replace").strip()
    last = text.splitlines()[-1] if text else "no message"
    if "ModuleNotFoundError" in last or "ImportError" in last:
        raise AbsentError(last)
    raise SubjectError(f"exit status {process.returncode}: {text[-_TAIL:]}")


def _first_line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
    assert process.stdout is not None
    lines: list[bytes] = []
    out = process.stdout
    reader = threading.Thread(target=lambda: lines.append(out.readline()), daemon=True)
    reader.start()
    deadline = time.monotonic() + timeout
    while reader.is_alive() and time.monotonic() < deadline:
        reader.join(min(LOOK_EVERY_SECONDS, max(0.0, deadline - time.monotonic())))
        if reader.is_alive() and process.poll() is not None:
            # It is gone, and workers it left hold its end of the pipe: nothing more will come.
            signal_groups(process_groups(process.pid), signal.SIGKILL)
            reader.join(10)
            return lines[0] if lines else b""
    if reader.is_alive():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(10)
        raise SubjectError(f"no answer within {timeout:g} s")
    if not lines[0]:
        deadline = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    return lines[0]
