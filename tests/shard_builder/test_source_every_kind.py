"""What holds for every source that reads another format: workers and kills never change a byte, and absent extras are named."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest
from _kinds import MAKERS
from faultkit import digests, leftovers, run, with_options
from killkit import KillingFiles, in_child

from lfdata.errors import MissingExtraError
from shard_builder.convert import convert
from shard_builder.options import ConvertOptions
from shard_builder.sources import KINDS, LIBRARIES, guess_kind, open_source

SMALL = ConvertOptions(segment_rows=25, shard_bytes=6_000, shard_rows=10, group_bytes=2_000, workers=1)


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_kills_resumes_and_real_workers_give_the_bytes_of_an_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    made = MAKERS[kind](tmp_path / "source")
    if made.kind is None:
        assert guess_kind(made.location) == kind
    run(tmp_path / "whole", made.open(), SMALL)
    wanted = digests(tmp_path / "whole")
    assert sum(name.endswith(".lfd") for name in wanted) > 3
    rng = random.Random(kind)
    target = tmp_path / "killed"
    kills = 0
    for attempt in range(4):
        files = KillingFiles(rng.randrange(20, 160), rng)
        begun = attempt > 0 and target.exists()
        status = in_child(lambda f=files, b=begun: run(target, made.open(), SMALL, f, resume=b))
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
        if status == 0:
            break
    assert kills > 0
    run(target, made.open(), SMALL, resume=True)
    assert digests(target) == wanted
    assert leftovers(target) == []
    convert(made.open(), tmp_path / "two", with_options(SMALL, workers=2))
    assert digests(tmp_path / "two") == wanted


@pytest.mark.parametrize("kind", sorted(LIBRARIES))
def test_an_absent_library_is_named_with_its_extra(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, extra = LIBRARIES[kind]
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"lfdata\[{extra}\]"):
        open_source(str(tmp_path), kind=kind)
    assert kind in KINDS
