"""Power cuts: in every state the disk may be in, the data set is the old one, the new one or none, and resume completes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from crashcheck import explore

SCENARIOS = ("fresh", "overwrite", "again", "resume", "torn")


@pytest.mark.parametrize("name", SCENARIOS)
def test_some_crash_states(name: str, place: Path) -> None:
    checker = explore(name, place, seed=1, each=2, resume_share=0.08)
    assert checker.findings == []
    assert checker.states > 50
    assert checker.resumed > 5


@pytest.mark.fault
@pytest.mark.parametrize("name", SCENARIOS)
def test_many_crash_states(name: str, place: Path) -> None:
    checker = explore(name, place, seed=2, each=14, resume_share=0.05)
    assert checker.findings == []
    assert checker.states >= 2000
