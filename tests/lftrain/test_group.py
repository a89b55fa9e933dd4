"""The group of ranks, as far as one process shows it."""

from __future__ import annotations

import _thread
import ctypes
import hashlib
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import runkit
import torch

from lftrain import DdpOptions, RunOptions
from lftrain.comm.ddp import Parallel
from lftrain.comm.group import Group, join
from lftrain.comm.powersgd import PowerSgd
from lftrain.errors import ConfigError

# About a second of hashing.
ROUNDS = 3_000_000


def test_leaving_waits_for_threads_that_still_want_the_interpreter() -> None:
    """gloo frees a collective's tensors in threads of its own; when the interpreter ends under one, the process aborts."""
    group = Group(0, 2, 0, torch.device("cpu"))
    done: list[str] = []
    lent = [torch.zeros(1)]
    group._lent.append(weakref.ref(lent[0]))

    def hold() -> None:
        time.sleep(0.1)
        lent.clear()
        time.sleep(0.05)
        done.append("thread")

    # A thread that Python's threading does not know, as gloo's are.
    _thread.start_new_thread(hold, ())
    group.leave()
    assert done == ["thread"]


@pytest.mark.skipif(sys.platform != "linux", reason="states of threads are known on Linux only")
def test_leaving_waits_for_a_thread_of_gloo_that_was_not_given_a_processor_yet() -> None:
    group, done = Group(0, 2, 0, torch.device("cpu")), []

    def spin() -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(15, b"pt_gloo_runloop", 0, 0, 0)
        begun.set()
        # Without the interpreter's lock, as gloo's do.
        hashlib.pbkdf2_hmac("sha256", b"lfdata", b"salt", ROUNDS)
        done.append("thread")

    begun = threading.Event()
    thread = threading.Thread(target=spin)
    thread.start()
    begun.wait(10)
    group.leave()
    assert done == ["thread"]
    thread.join()


@pytest.mark.parametrize(
    ("there", "local", "told"),
    [
        (0, 0, r'run\.device is "cuda" and torch sees no GPU: set run\.device = "cpu" or "auto"'),
        (2, 2, r'rank 2 of this machine has no GPU: there are 2\. Start fewer ranks, or set run\.device = "cpu"'),
    ],
)
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, there: int, local: int, told: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    with pytest.raises(ConfigError, match=told):
        join(RunOptions(folder="none", steps=1, device="cuda"))
    assert join(RunOptions(folder="none", steps=1, device="cpu")).device.type == "cpu"
    if not there:
        assert join(RunOptions(folder="none", steps=1, device="auto")).device.type == "cpu"


OWN = """
import sys
import torch.distributed as dist
import trainkit, torch
from lftrain import Runtime
rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = trainkit.make_model(dropout=0.0)
batches = [{"x": torch.ones(4, 4), "y": torch.zeros(4)} for _ in range(3)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
result = Runtime(model, trainkit.loss, trainkit.Batches(batches), optimizer, trainkit.options(folder, 3)).run()
print("done", result.step)
"""


@pytest.mark.slow
def test_a_group_that_was_not_made_from_the_environment(tmp_path: Path) -> None:
    environment = {name: value for name, value in runkit.environment().items() if not name.startswith("MASTER_")}
    words = [sys.executable, "-c", OWN]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "store"), str(tmp_path / "run")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for one in ranks:
        out, errors = one.communicate(timeout=120)
        assert one.returncode == 0 and "done 3" in out, errors[-3000:]


def test_hooks_that_do_not_go_together_are_refused() -> None:
    group = Group(0, 1, 0, torch.device("cpu"))
    with pytest.raises(ConfigError, match="find_unused"):
        Parallel(torch.nn.Linear(2, 2), group, DdpOptions(hook="powersgd", find_unused=True))


def test_the_state_of_powersgd_stays_that_of_its_step() -> None:
    """It is written to a checkpoint while the next steps change the factors in place."""
    hook = PowerSgd(DdpOptions(hook="powersgd"), lambda _: None)
    hook._buckets[0] = ["weight"]
    kept = hook._state
    kept.error_dict[0], kept.p_memory_dict[0], kept.q_memory_dict[0] = torch.ones(6), torch.ones(2), torch.ones(3)
    _, tensors = hook.state(Group(0, 1, 0, torch.device("cpu")))
    for factor in (kept.p_memory_dict[0], kept.q_memory_dict[0]):
        factor.zero_()
    assert sorted(tensors) == ["error.0.0", "p.0", "q.0"]
    assert all(bool((one == 1).all()) for one in tensors.values())
