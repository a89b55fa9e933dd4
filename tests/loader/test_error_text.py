"""Errors whose text is not text, or is endless, cost what any bad sample costs, with every engine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import batchkit
import pytest

import lfdata.transforms as T
from lfdata import Loader
from lfdata.errors import CorruptError, SampleError

ENGINES = ["inline", "thread", "process"]
FIELDS: dict[str, Any] = {"label": [T.Map("mapkit:raises_odd", (1,), "int64")]}
TOLD = {
    "surrogate": r"mapkit:raises_odd raised ValueError: bad \\udcff name",
    "none": r"mapkit:raises_odd raised NoText: \(no text: its __str__ raised RuntimeError\)",
    "long": r"mapkit:raises_odd raised ValueError: z{1000} \.\.\. \(998000 characters left out\) \.\.\. z{1000}",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", TOLD)
def test_of_a_function(numbers: Path, monkeypatch: pytest.MonkeyPatch, what: str, engine: str) -> None:
    monkeypatch.setenv("ODD", what)
    options: dict[str, Any] = {"shuffle": "sequential", "engine": engine}
    with pytest.raises(SampleError, match=r"index 5: key '0-5': field 'label': ") as caught:
        list(Loader(numbers, 4, FIELDS, **options))
    assert re.search(TOLD[what], str(caught.value)) is not None and len(str(caught.value)) < 3000
    assert all(len(note) < 30_000 for note in caught.value.__notes__)
    loader = Loader(numbers, 4, FIELDS, bad_samples="mask", most_bad_rate=1.0, **options)
    masked = [int(index) for batch in loader for index in batch["__index__"][~batch["__mask__"]]]
    (event,) = loader.stats()["events"]
    assert masked == [event.index] == [5] and event.key == b"0-5" and len(event.reason) < 2100
    loader.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_of_damage_below_a_name_that_is_not_utf_8(tmp_path: Path, engine: str) -> None:
    path = tmp_path / os.fsdecode(b"d\xff")
    batchkit.write_numbers(path, 40, lengths=[5] * 40)
    batchkit.spoil(path, [6], "ids")
    options: dict[str, Any] = {"shuffle": "sequential", "engine": engine, "isolate": True}
    with pytest.raises(CorruptError, match=r"d\\udcff.*index 6, key b'0-6'"):
        list(Loader(path, 4, ["ids"], **options))
    loader = Loader(path, 4, ["ids"], bad_samples="mask", most_bad_rate=1.0, **options)
    assert sum(int((~batch["__mask__"]).sum()) for batch in loader) == 1
    (event,) = loader.stats()["events"]
    assert event.index == 6 and event.path.endswith(r"d\udcff")
    loader.close()
