"""Records, the split of a step, the terminal's line, traces, evaluation, the doctor."""

from __future__ import annotations

import io
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit
from click.testing import CliRunner

from lfdata.errors import MissingExtraError
from lftrain import MetricsOptions
from lftrain.cli import main
from lftrain.health.doctor import examine, render
from lftrain.health.live import Live
from lftrain.health.meter import PARTS, Meter
from lftrain.health.records import Records
from lftrain.options import OptimizerOptions
from lftrain.runtime.rates import Rates, schedule


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def test_the_parts_of_a_step_add_up_and_name_who_waits(points: Path, tmp_path: Path) -> None:
    class Slow(trainkit.Batches):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                time.sleep(0.02)
                yield batch

    batches = [{"x": torch.randn(4, 4), "y": torch.randn(4)} for _ in range(8)]
    model = trainkit.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainkit.Runtime(model, trainkit.loss, Slow(batches), optimizer, trainkit.options(tmp_path, 8)).run()
    found = lines(tmp_path, "step")
    assert len(found) == 8
    for line in found:
        assert set(line["ms"]) <= set(PARTS)
        assert line["ms"]["data"] >= 19
        assert sum(line["ms"].values()) <= line["step_ms"] * 1.05
    assert {"data", "forward", "backward", "optimizer"} <= set(found[0]["ms"])


def test_a_run_says_what_it_ran_on(points: Path, tmp_path: Path) -> None:
    trainkit.make_runtime(points, trainkit.options(tmp_path, 1)).run()
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["options"]["run"]["seed"] == 3
    assert found["environment"]["torch"] == str(torch.__version__) and found["environment"]["packages"]["numpy"]


def test_a_mark_counts_for_what_came_before_it() -> None:
    meter = Meter(torch.device("cpu"))
    meter.begin()
    time.sleep(0.02)
    meter.mark("data")
    meter.mark("forward")
    meter.end()
    (found,) = meter.take()
    assert found["data"] >= 19 and found["forward"] < found["data"]
    assert meter.take() == []


def test_held_out_loss_does_not_disturb_the_run(points: Path, tmp_path: Path) -> None:
    plain = trainkit.make_runtime(points, trainkit.options(tmp_path / "plain", 6))
    plain.run()
    held = trainkit.Batches([{"x": torch.randn(4, 4), "y": torch.randn(4)} for _ in range(3)])
    watched = trainkit.make_runtime(points, trainkit.options(tmp_path / "held", 6), held_out=held, held_out_every=2)
    result = watched.run()
    assert trainkit.bits(plain.model) == trainkit.bits(watched.model)
    found = lines(tmp_path / "held", "held_out")
    assert [line["step"] for line in found] == [2, 4, 6]
    assert result.held_out == found[-1]["loss"]
    model = watched.model.eval()
    wanted = sum(float(trainkit.loss(model, batch)[0]) for batch in held.batches) / 3
    assert result.held_out == pytest.approx(wanted, rel=1e-5)


def test_a_trace_is_one_that_viewers_read(points: Path, tmp_path: Path) -> None:
    metrics = MetricsOptions(every=1, live="off", trace_first=2, trace_steps=2)
    trainkit.make_runtime(points, trainkit.options(tmp_path, 6, metrics=metrics)).run()
    found = json.loads((tmp_path / "trace-0.json").read_text())
    assert any("aten::" in event.get("name", "") for event in found["traceEvents"])


def test_tensorboard_without_the_extra_names_it(points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    chosen = trainkit.options(tmp_path, 1, metrics=MetricsOptions(tensorboard=True, live="off"))
    with pytest.raises(MissingExtraError, match=r"lfdata\[tensorboard\]"):
        trainkit.make_runtime(points, chosen)


def test_tensorboard_has_the_scalars_of_logged_steps(points: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    chosen = trainkit.options(tmp_path, 2, metrics=MetricsOptions(every=1, tensorboard=True, live="off"))
    trainkit.make_runtime(points, chosen).run()
    (file,) = (tmp_path / "tensorboard").glob("*tfevents*")
    written = file.read_bytes()
    assert all(name in written for name in (b"step/loss", b"step/ms/forward", b"step/samples_per_s"))


@pytest.mark.parametrize("limit", [64, 4096])
def test_a_full_disk_ends_tensorboard_and_trace_and_not_the_run(
    points: Path, tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboardX")
    metrics = MetricsOptions(every=1, tensorboard=True, live="off", trace_first=2, trace_steps=2)
    runtime = trainkit.make_runtime(points, trainkit.options(tmp_path, 300, metrics=metrics))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    runtime.advance(1)  # with room for slots of the loader
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        runtime.advance(299)
        runtime.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert runtime.step == 300
    told = " ".join(one.message for one in caplog.records)
    assert "TensorBoard's file cannot be written" in told and "trace" in told


def test_the_line_in_the_terminal() -> None:
    stream = io.StringIO()
    live = Live("on", 100, stream)
    live.show(
        40, {"loss": 1.23456, "lr": 1e-3, "samples_per_s": 1234.5, "ms": {"data": 1.0, "forward": 3.0}, "step_ms": 1000.0}
    )
    assert stream.getvalue() == (
        "step 40/100  loss 1.235  lr 0.001  1,234 samples/s  4.0 ms (data 25%, forward 75%)  left 0:01:00\n"
    )
    hidden = io.StringIO()
    Live("auto", 100, hidden).show(1, {})
    assert hidden.getvalue() == ""


def test_rates_are_a_function_of_the_step() -> None:
    options = OptimizerOptions(lr=0.5, warmup=10, final=0.1)
    factor = schedule(options, 110)
    assert factor(0) == 0.1 and factor(9) == 1.0 and factor(10) == 1.0
    assert factor(109) == pytest.approx(0.1) and factor(59) == pytest.approx(0.55, abs=0.01)
    assert schedule(OptimizerOptions(schedule="constant", warmup=0), 5)(4) == 1.0
    model = trainkit.make_model()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.1}], lr=0.5)
    assert Rates(optimizer, factor).set(0) == pytest.approx(0.05)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.05), pytest.approx(0.01)]


def test_the_doctor_says_what_there_is() -> None:
    found = examine()
    text = render(found)
    assert found["machine"]["cores"] >= 1 and found["torch"]["version"] == str(torch.__version__)
    for word in ("machine", "torch", "/dev/shm", "pictures", "extras"):
        assert word in text
    json.dumps(found)


def test_the_doctor_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from lftrain.health import doctor

    monkeypatch.setattr(
        doctor, "_memory", lambda: {"ram": 1 << 33, "shm": 1 << 26, "shm_free": 1, "memlock": 1 << 16, "files": 1024}
    )
    monkeypatch.setattr(doctor, "_EXTRAS", {"yaml": "no_such_module"})
    text = render(examine())
    assert "mount -o remount,size=8G /dev/shm" in text and "pip install 'lfdata[yaml]'" in text


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[run]\nfolder = 'x'\nstpes = 3\n")
    done = CliRunner().invoke(main, ["run", str(path)])
    assert done.exit_code == 1 and "did you mean 'steps'" in done.output
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert json.loads(done.stdout)["torch"]["version"]


def test_lines_that_a_full_disk_does_not_take_are_lost_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And those after them are there again."""
    records = Records(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    records.write("step", 1, text="a" * 100)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))
    try:
        for step in range(2, 6):
            records.write("step", step, text="b" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    records.write("step", 6)
    records.close()
    assert [line["step"] for line in lines(tmp_path, "step")] == [1, 2, 6]
    assert len([one for one in caplog.records if "lines are lost" in one.message]) == 1


def test_half_a_line_of_a_run_that_was_killed_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"step","st')
    records = Records(tmp_path)
    records.write("start", 3)
    records.write("step", 4)
    records.close()
    torn, *others = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert torn == '{"kind":"step","st' and [json.loads(line)["step"] for line in others] == [3, 4]


def test_a_terminal_that_is_gone_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    live = Live("on", 10, Gone())
    live.show(1, {"loss": 1.0})
    live.close()
