"""The decoder dies, hangs, or does not start: an error within seconds that says who, how, and what was in work; nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from killkit import environment, gone, wait_until
from loaderkit import busy, decoders, engine_of, expected, gate, loader, nothing_left, numbers, whole
from loaderkit import dataset as make_dataset

import lfdata.loader.decoder as decoder_module
import lfdata.loader.engine as engines
import lfdata.loader.serve as serve
from lfdata import Loader
from lfdata.errors import DecoderError, FormatError, SampleError

SOON = 5.0


@pytest.fixture
def dataset(place: Path) -> Path:
    return make_dataset(place)


def until_busy(one: Any, door: Path, first: int, what: str = "wait") -> tuple[Any, list[int]]:
    """Iterate with samples from ``first`` on held up, until the decoder is at them. Gives the iterator and the decoders."""
    door.write_text(f"{what} {first}")
    batches = iter(one)
    assert [numbers(next(batches)) for _ in range(first // 10)] == expected()[: first // 10]
    wait_until(lambda: busy(one))
    return batches, decoders(one)


_LONG = [pytest.param(signal.SIGTERM, marks=pytest.mark.fault)]


@pytest.mark.parametrize("number", [signal.SIGKILL, *_LONG])
def test_a_killed_decoder_is_reported(dataset: Path, place: Path, monkeypatch: Any, number: signal.Signals) -> None:
    door = gate(place, monkeypatch)
    with nothing_left():
        one = loader(dataset)
        batches, (pid,) = until_busy(one, door, 50)
        os.kill(pid, number)
        began = time.monotonic()
        with pytest.raises(DecoderError) as caught:
            next(batches)
        assert time.monotonic() - began < SOON
        assert f"process {pid}" in str(caught.value) and number.name in str(caught.value)
        assert "decoding epoch 0, step 5 from s0000" in str(caught.value)
        assert gone([pid])
        # The loader can be used again, and begins with a new decoder.
        door.unlink()
        one.set_epoch(0)
        assert whole(one) == expected()
        del one, batches, caught


@pytest.mark.fault
def test_what_was_finished_before_the_death_comes_first(dataset: Path) -> None:
    with nothing_left():
        one = loader(dataset, prefetch=4)
        batches = iter(one)
        assert numbers(next(batches)) == expected()[0]
        time.sleep(0.3)
        (pid,) = decoders(one)
        os.kill(pid, signal.SIGKILL)
        found = []
        with pytest.raises(DecoderError, match=rf"process {pid}\) was killed by SIGKILL"):
            for batch in batches:
                found.append(numbers(batch))
                del batch
        assert found == expected(1)[: len(found)]
        del one, batches, found


@pytest.mark.fault
def test_one_of_three_decoders(dataset: Path, place: Path, monkeypatch: Any) -> None:
    door = gate(place, monkeypatch)
    with nothing_left():
        one = loader(dataset, processes=3)
        _batches, pids = until_busy(one, door, 30)
        os.kill(pids[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(DecoderError, match=f"process {pids[1]}"):
            next(_batches)
        assert time.monotonic() - began < SOON
        assert gone(pids)
        del one, _batches


def test_a_function_that_ends_its_process(dataset: Path, place: Path, monkeypatch: Any) -> None:
    gate(place, monkeypatch).write_text("leave 20")
    with nothing_left():
        one = loader(dataset)
        found = []
        with pytest.raises(DecoderError, match=r"exited with 7; in work: .*step [23]"):
            for batch in one:
                found.append(numbers(batch))
        assert found == expected()[: len(found)]
        del one, batch


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_a_function_that_calls_exit(dataset: Path, place: Path, monkeypatch: Any, engine: str) -> None:
    gate(place, monkeypatch).write_text("exit 20")
    with nothing_left():
        one = loader(dataset, engine=engine)
        with pytest.raises(SampleError, match=r"key 'sample/00000020': field 'about': .* raised SystemExit: 3"):
            whole(one)
        del one


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_an_exception_of_a_function(dataset: Path, place: Path, monkeypatch: Any, engine: str) -> None:
    gate(place, monkeypatch).write_text("raise 33")
    with nothing_left():
        one = loader(dataset, engine=engine)
        found = []
        with pytest.raises(Exception, match="sample 33 is not liked") as caught:
            for batch in one:
                found.append(numbers(batch))
        assert found == expected()[:3]
        for what in ("loaderkit:gated", "ZeroDivisionError", "field 'about'", "sample/00000033", "s0000"):
            assert what in str(caught.value)
        assert not one._pipelines
        del one, batch, caught


def test_the_stderr_of_the_decoder_is_the_trainers(dataset: Path, place: Path, monkeypatch: Any, capfd: Any) -> None:
    gate(place, monkeypatch).write_text("talk 0")
    one = loader(dataset)
    whole(one)
    one.close()
    assert set(capfd.readouterr().err.splitlines()) == {"a word of the decoder"}


@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.fault)])
def test_a_stopped_decoder_is_reported(dataset: Path, place: Path, monkeypatch: Any, processes: int) -> None:
    door = gate(place, monkeypatch)
    with nothing_left():
        one = loader(dataset, processes=processes)
        batches, pids = until_busy(one, door, 50)
        engine_of(one)._stall = 1.0
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(DecoderError, match=r"no batch for 1 s .*process \d+.*step [5-9] from s0000.*stall_seconds"):
            next(batches)
        assert 0.9 < time.monotonic() - began < SOON
        assert gone(pids)
        del one, batches


@pytest.mark.fault
def test_a_stopped_decoder_does_not_hold_up_close(dataset: Path) -> None:
    with nothing_left():
        one = loader(dataset)
        batches = iter(one)
        next(batches)
        (pid,) = decoders(one)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        one.close()
        assert time.monotonic() - began < 1.0
        assert gone([pid])
        assert list(batches) == []
        del one, batches


def test_a_decoder_stopped_while_it_starts(dataset: Path, monkeypatch: Any) -> None:
    class Stopped(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(decoder_module.subprocess, "Popen", Stopped)
    monkeypatch.setattr(engines, "START_SECONDS", 1.0)
    with nothing_left():
        # Without functions of the user's the trainer does the work meanwhile, and then tells.
        one = Loader(dataset, 1, ["blob", "label"], shuffle="sequential", engine="process", stall_seconds=0.5)
        began, steps = time.monotonic(), 0
        with pytest.raises(DecoderError, match=r"process \d+\) was started 1 s ago and is not ready"):
            while time.monotonic() - began < SOON:
                steps += sum(1 for _ in one)
        assert steps
        two = loader(dataset, stall_seconds=0.5)
        with pytest.raises(DecoderError, match=r"process \d+\) was started 1 s ago and is not ready"):
            whole(two)
        del one, two


def test_a_hanging_function_in_a_thread(dataset: Path, place: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(serve, "END_SECONDS", 0.5)
    door = gate(place, monkeypatch)
    with nothing_left():
        one = loader(dataset, engine="thread", stall_seconds=2.0)
        door.write_text("wait 50")
        began, found = time.monotonic(), []
        with pytest.raises(DecoderError, match=r"no batch for 2 s; in work: .*step 5 from s0000"):
            for batch in one:
                found.append(numbers(batch))
        assert time.monotonic() - began < SOON
        assert found == expected()[:5]
        door.unlink()
        wait_until(lambda: len(os.listdir("/proc/self/task")) == threads)
        del one, batch


@pytest.fixture(autouse=True)
def _threads() -> None:
    global threads
    threads = len(os.listdir("/proc/self/task"))


threads = 0


@pytest.mark.parametrize("engine", ["process", "thread"])
def test_close_does_not_wait_for_work_that_nobody_wants(dataset: Path, engine: str) -> None:
    with nothing_left():
        one = loader(dataset, "slow", engine=engine, prefetch=8)
        batches = iter(one)
        next(batches)
        began = time.monotonic()
        del batches
        # Eight batches of a tenth of a second each were asked for; two are in work.
        assert time.monotonic() - began < 0.5
        del one


# -- starting ---------------------------------------------------------------------------------------------------------------


def fails(dataset: Path, kind: type[Exception], match: str) -> None:
    with nothing_left():
        one = loader(dataset)
        began = time.monotonic()
        with pytest.raises(kind, match=match):
            whole(one)
        assert time.monotonic() - began < 2 * SOON
        del one


def test_no_program_to_start(dataset: Path, place: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(decoder_module.sys, "executable", str(place / "no-python"))
    fails(dataset, DecoderError, "cannot be started: .*no-python")


def test_a_program_that_is_no_decoder(dataset: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(decoder_module.sys, "executable", "/bin/false")
    fails(dataset, DecoderError, "exited with 1; in work: nothing")


def test_a_bad_spec(dataset: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(engines.specs, "encode", lambda spec: b"\xc1rubbish")
    fails(dataset, DecoderError, "DecodeError")


@pytest.mark.fault
def test_a_bad_hello(dataset: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(engines, "pack", lambda hello: b"\xc1rubbish")
    fails(dataset, DecoderError, "DecodeError")


def test_missing_descriptors(dataset: Path, monkeypatch: Any, capfd: Any) -> None:
    popen = subprocess.Popen
    monkeypatch.setattr(decoder_module.subprocess, "Popen", lambda *a, **o: popen(*a, **o | {"pass_fds": ()}))
    fails(dataset, DecoderError, "exited with 1")
    assert "Bad file descriptor" in capfd.readouterr().err


@pytest.mark.fault
def test_a_data_set_that_went_away(dataset: Path) -> None:
    with nothing_left():
        one = loader(dataset)
        (dataset / "manifest.json").unlink()
        with pytest.raises(FormatError, match="manifest"):
            whole(one)
        del one


@pytest.mark.fault
def test_the_decoder_by_hand() -> None:
    command = [sys.executable, "-m", "lfdata.loader.serve", "97", "98", "99", "0"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "Bad file descriptor" in ended.stderr


@pytest.mark.fault
def test_a_module_in_the_working_directory_hides_none(dataset: Path, place: Path, monkeypatch: Any) -> None:
    (place / "queue.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(place)
    one = loader(dataset)
    assert whole(one) == expected()
    one.close()


def test_a_spec_larger_than_the_socket_takes(dataset: Path, monkeypatch: Any) -> None:
    """As with a selection among a hundred million samples: starting does not wait for the decoder to read it."""
    encode, decode = engines.specs.encode, "import lfdata.loader.spec as s; d = s.decode; s.decode = lambda b: d(b[1 << 24:])"
    monkeypatch.setattr(engines.specs, "encode", lambda spec: bytes(1 << 24) + encode(spec))
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        code = f"import sys; {decode}; from lfdata.loader.serve import main; main(sys.argv[1:])"
        return popen([command[0], "-P", "-c", code, *command[4:]], **options)

    monkeypatch.setattr(decoder_module.subprocess, "Popen", start)
    with nothing_left():
        one = loader(dataset)
        assert whole(one) == expected()
        one.close()
        del one


def test_most_decoders_leave_room_for_the_callers_lane() -> None:
    from lfdata.loader.slots import LANE_BYTES, LANES, PAGE

    assert (engines.MOST_DECODERS * LANES + 1) * LANE_BYTES <= PAGE


@pytest.mark.fault
def test_an_answer_that_cannot_travel(dataset: Path, place: Path, monkeypatch: Any) -> None:
    """A message with a lone surrogate (a file's name that is not UTF-8) is told in its place, not lost."""
    popen = subprocess.Popen
    patch = (
        "import lfdata.loader.task as t; from lfdata.loader.jobs import Failure; "
        "t.Task.advance = lambda self, lane: t.Done(self.job.number, 0, failure=Failure('FormatError', ('\\udcff', 1, 'x'), 0))"
    )

    def start(command: list[str], **options: Any) -> Any:
        code = f"import sys; {patch}; from lfdata.loader.serve import main; main(sys.argv[1:])"
        return popen([command[0], "-P", "-c", code, *command[4:]], **options)

    monkeypatch.setattr(decoder_module.subprocess, "Popen", start)
    fails(dataset, DecoderError, "UnicodeEncodeError")


def test_shards_of_torn_numbers(dataset: Path) -> None:
    one = loader(dataset, engine="inline")
    assert "s0000" in decoder_module.shards(one._producer, 0, 0, 3)
    assert "shards unknown" in decoder_module.shards(one._producer, 0, 1 << 70, 1)
