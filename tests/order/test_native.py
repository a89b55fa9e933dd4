"""The native permutation and the plain one are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lfdata.order import permutation
from lfdata.order.permutation import MAX_SAMPLES, Permutation


@pytest.mark.skipif(permutation.native is None, reason="the native module is not built")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 1000, 20_350, (1 << 31) + 11, MAX_SAMPLES])
def test_native_and_plain_agree(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(n)
    positions = np.arange(n) if n <= 20_350 else rng.integers(0, n, 3000)
    native = Permutation(n, 0x1234567890ABCDEF ^ n)
    found, back = native(positions), native.inverse(positions)
    assert np.array_equal(native.inverse(found), positions)
    monkeypatch.setattr(permutation, "native", None)
    plain = Permutation(n, 0x1234567890ABCDEF ^ n)
    assert np.array_equal(plain(positions), found) and np.array_equal(plain.inverse(positions), back)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("positions", [[0, 7], [-1], [[1, 2], [3, 9]]])
def test_positions_outside(positions: Any, built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not built:
        monkeypatch.setattr(permutation, "native", None)
    with pytest.raises(IndexError, match=r"position (7|-1|9) of 7"):
        Permutation(7, 1)(positions)
    assert Permutation(0, 1)([]).shape == (0,)
    grid = Permutation(7, 1)(np.arange(6).reshape(2, 3)[:, ::2])
    assert grid.shape == (2, 2) and sorted(grid.ravel().tolist()) == sorted(set(grid.ravel().tolist()))


@pytest.mark.skipif(permutation.native is None, reason="the native module is not built")
def test_what_does_not_fit_is_refused() -> None:
    native: Any = permutation.native
    two, keys = np.arange(2), np.zeros(10, np.uint64)
    for arguments in [
        (two, 9, 2, 2, keys, np.empty(2, np.int64), False),  # the grid is too small
        (two, 4, 2, 2, keys[:9], np.empty(2, np.int64), False),
        (two, 4, 2, 2, keys, np.empty(1, np.int64), False),
        (two, 4, 0, 2, keys, np.empty(2, np.int64), False),
        (two, 1 << 49, 1 << 25, 1 << 25, keys, np.empty(2, np.int64), False),
    ]:
        with pytest.raises(ValueError, match="must"):
            native.permute(*arguments)
