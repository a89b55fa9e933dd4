"""Batches of numpy arrays in place of tensors."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader, NumpyLoader
from lfdata.errors import OptionError

SCRIPT = """
import sys
from lfdata import NumpyLoader
count = sum(len(batch["__index__"]) for batch in NumpyLoader(sys.argv[1], 8, tail="pad"))
print(count, "torch" in sys.modules)
"""


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_arrays_are_what_tensors_hold(complete: Path, engine: str) -> None:
    fields: dict[str, Any] = {"image": None, "tokens": None, "label": None}
    options: dict[str, Any] = {"seed": 4, "tail": "pad", "accumulate": 2}
    fields = {name: ops for name, ops in fields.items() if name in Loader(complete, 4, engine="inline").sources[0].schema}
    with_torch = list(Loader(complete, 8, fields, engine="inline", **options))
    arrays = list(NumpyLoader(complete, 8, fields, engine=engine, **options))
    assert len(arrays) == len(with_torch) > 2
    for one, other in zip(arrays, with_torch, strict=True):
        assert one.keys() == other.keys()
        for name, array in one.items():
            assert type(array) is np.ndarray and array.dtype == other[name].numpy().dtype
            np.testing.assert_array_equal(array, other[name].numpy())


def test_arrays_that_are_kept_do_not_change(pictures: Path) -> None:
    fields: dict[str, Any] = {"image": [T.RandomResizedCrop(16)]}
    kept = list(NumpyLoader(pictures, 4, fields, engine="thread"))
    copies = [{name: array.copy() for name, array in batch.items()} for batch in kept]
    gc.collect()
    list(NumpyLoader(pictures, 4, fields, engine="thread"))
    for one, other in zip(kept, copies, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])


def test_torch_is_not_imported(pictures: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(pictures)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["48", "False"], done.stdout + done.stderr


def test_what_needs_tensors_says_so(pictures: Path) -> None:
    with pytest.raises(OptionError, match="NumpyLoader gives arrays of numpy; a DeviceLoader takes the tensors of a Loader"):
        DeviceLoader(NumpyLoader(pictures, 4), "cpu")
