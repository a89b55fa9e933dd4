"""Processes, threads, slots and engines decide when and where a batch is made, never what is in it; and nothing stale comes out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest
from batchkit import digest, digests, poisoned

import lfdata.transforms as T
from lfdata import Loader

FIELDS: dict[str, Any] = {
    "image": [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4)],
    "picture": None,
    "ids": [T.Tokens(8, truncate="random")],
    "sound": None,
    "box": None,
    "points": None,
    "label": None,
    "caption": None,
    "about": None,
}
pytestmark = pytest.mark.usefixtures("decoders_alone")
ENGINES = [
    {"engine": "inline", "threads": 3},
    {"engine": "thread", "threads": 1, "prefetch": 4},
    {"engine": "thread", "threads": 3, "prefetch": 1},
    {"engine": "process", "processes": 1, "threads": 1, "prefetch": 4},
    {"engine": "process", "processes": 3, "threads": 3, "prefetch": 1},
]


def name(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


@pytest.fixture(scope="module")
def expected(kinds: Path) -> list[str]:
    return digests(Loader(kinds, 6, FIELDS, tail="pad", engine="inline", threads=1), epochs=2)


@pytest.mark.parametrize("options", ENGINES, ids=name)
def test_the_same_bytes_from_every_engine(kinds: Path, expected: list[str], options: dict[str, Any]) -> None:
    assert digests(poisoned(Loader(kinds, 6, FIELDS, tail="pad", **options)), epochs=2) == expected


@pytest.mark.parametrize("options", ENGINES, ids=name)
def test_the_same_bytes_for_small_rows_of_which_many_steps_share_a_slot(numbers: Path, options: dict[str, Any]) -> None:
    plain = Loader(numbers, 4, engine="inline")
    assert plain.stats()["steps_a_slot"] > 8
    assert digests(poisoned(Loader(numbers, 4, **options)), epochs=2) == digests(plain, epochs=2)


@pytest.mark.parametrize("options", ENGINES[::2], ids=name)
def test_the_same_packed_rows(numbers: Path, more_numbers: Path, options: dict[str, Any]) -> None:
    how: dict[str, Any] = {"mixture": {"block": 16}, "packing": {"field": "ids", "window": 32, "capacity": 9}, "tail": "pad"}
    sources = [numbers, more_numbers]
    plain = digests(Loader(sources, 4, ["ids"], engine="inline", **how), epochs=2)
    assert digests(poisoned(Loader(sources, 4, ["ids"], **how, **options)), epochs=2) == plain


@pytest.mark.parametrize("policy", ["mask", "replace"])
@pytest.mark.parametrize("options", ENGINES[::2], ids=name)
def test_nothing_stale_where_one_in_seven_fails(damaged: Path, policy: str, options: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"image": [T.CenterCrop(32)], "label": None}
    how: dict[str, Any] = {"bad_samples": policy, "most_bad_rate": 1.0}
    found = []
    loader = poisoned(Loader(damaged, 8, fields, **how, **options))
    for batch in loader:
        found.append(digest(batch))
        for index, mask, label, image in zip(*(batch[key] for key in ("__index__", "__mask__", "label", "image")), strict=True):
            bad = int(index) % 7 == 3
            assert bool(mask) != bad
            if bad:
                assert not image.any() and int(label) == 0
            else:
                expected = batchkit.pixels(1000 + int(index), 40, 40 + int(index) % 3).mean()
                assert int(label) == int(index) and abs(image.numpy().mean() - expected) < 40
    loader.close()
    assert found == digests(Loader(damaged, 8, fields, engine="inline", threads=1, **how))


@pytest.mark.parametrize("policy", ["mask", "replace"])
def test_ragged_rows_that_fail_are_empty(sets: Path, policy: str) -> None:
    """A row that fails in one field has nothing in any other, and its neighbours are whole."""
    root = batchkit.write_all_kinds(sets / f"spoilt-{policy}", complete=True)
    bad = set(batchkit.spoil(root, range(3, 40, 7), "about"))
    whole = batchkit.write_all_kinds(sets / f"whole-{policy}", complete=True)
    ragged = ("picture", "ids", "sound", "points", "caption", "blob", "about")
    how: dict[str, Any] = {"engine": "inline", "tail": "pad" if policy == "mask" else "drop_last"}
    clean = Loader(whole, 6, ["label", *ragged], **how)
    masked = poisoned(Loader(root, 6, ["label", *ragged], bad_samples=policy, most_bad_rate=1.0, **how))
    seen = set()
    for batch, other in zip(masked, clean, strict=True):
        assert batch["__index__"].tolist() == other["__index__"].tolist()
        for number, index in enumerate(batch["__index__"].tolist()):
            assert bool(batch["__mask__"][number]) == (bool(other["__mask__"][number]) and index not in bad)
            seen |= {index} & bad
            for name in ragged:
                cut = [slice(*one[f"{name}.offsets"][number : number + 2].tolist()) for one in (batch, other)]
                mine, theirs = batch[name][cut[0]].numpy(), other[name][cut[1]].numpy()
                assert len(mine) == 0 if index in bad else np.array_equal(mine, theirs)
                if f"{name}.shapes" in batch and index in bad:
                    assert not batch[f"{name}.shapes"][number].any()
        assert all(int(batch[f"{name}.offsets"][-1]) == len(batch[name]) for name in ragged)
    assert (seen == bad if policy == "mask" else 3 < len(seen) <= len(bad)) and {
        event.field for event in masked.stats()["events"]
    } == {"about"}


def test_callables_of_the_user_give_the_same_in_every_process(complete: Path) -> None:
    fields = {"label": [T.Map("mapkit:noisy", (2,), "float64", random=True)], "box": [T.Map("mapkit:double", (1,), "float64")]}
    plain = digests(Loader(complete, 8, fields, engine="inline"))
    assert digests(Loader(complete, 8, fields, engine="process", processes=3)) == plain


def test_modules_are_found_as_they_are_here(numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a directory with a colon in its name; what Python passes over is passed over."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "colonkit.py").write_text("import numpy\n\ndef seven(value):\n    return numpy.array([7])\n")
    monkeypatch.setattr(sys, "path", [tmp_path, None, b"x", str(folder), *sys.path])
    loader = Loader(numbers, 8, {"label": [T.Map("colonkit:seven", (1,), "int64")]}, engine="process")
    assert next(iter(loader))["label"].tolist() == [[7]] * 8
    loader.close()
