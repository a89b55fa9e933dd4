"""Geometry against plain Python, one picture and one step at a time; distributions; boxes of odd pictures; options."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lfdata import transforms as T
from lfdata.errors import OptionError
from lfdata.transforms.portable import exp, log


class Draws:
    """Uniform numbers from numpy, remembered by name."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n, self.rng, self.given = n, np.random.default_rng(seed), dict[str, NDArray[np.float64]]()

    def __call__(self, name: str, count: int) -> NDArray[np.float64]:
        if name not in self.given:
            self.given[name] = self.rng.random((self.n, count))
        return self.given[name]


class Reference:
    """One picture: the rectangle it is by now, in exact steps of pixels. ``left`` to ``right`` run in the picture's own direction."""

    def __init__(self, width: int, height: int) -> None:
        self.x = [0.0, float(width)]  # source x of the left and the right edge as seen now
        self.y = [0.0, float(height)]
        self.width, self.height = width, height

    def crop(self, x: int, y: int, width: int, height: int) -> None:
        (x0, x1), (y0, y1) = self.x, self.y
        self.x = [x0 + (x1 - x0) * at / self.width for at in (x, x + width)]
        self.y = [y0 + (y1 - y0) * at / self.height for at in (y, y + height)]
        self.width, self.height = width, height

    def run(self, op: T.Transform, u: list[float]) -> None:
        if isinstance(op, T.Resize):
            if op.mode == "exact":
                self.height, self.width = op.size
            elif self.width <= self.height:
                self.width, self.height = op.size, int(op.size * self.height / self.width)
            else:
                self.width, self.height = int(op.size * self.width / self.height), op.size
        elif isinstance(op, T.CenterCrop):
            h, w = op.size
            self.crop(round((self.width - w) / 2.0), round((self.height - h) / 2.0), w, h)
        elif isinstance(op, T.RandomCrop):
            h, w = op.size
            self.crop(int(u[0] * (self.width - w + 1)), int(u[1] * (self.height - h + 1)), w, h)
        elif isinstance(op, T.Crop):
            self.crop(op.x, op.y, op.width, op.height)
        elif isinstance(op, T.RandomHorizontalFlip):
            if u[0] < op.p:
                self.x.reverse()
        else:
            assert isinstance(op, T.RandomResizedCrop)
            self.crop(*resized_crop(self.width, self.height, op.scale, op.ratio, u))
            self.height, self.width = op.size

    def box(self) -> list[float]:
        return [min(self.x), self.y[0], max(self.x), self.y[1]]


def resized_crop(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], u: list[float]
) -> tuple[int, int, int, int]:
    for k in range(10):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * u[k])
        shape = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * u[10 + k])
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            return int(u[20] * (width - w + 1)), int(u[21] * (height - h + 1)), w, h
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = max(1, round(height * ratio[1]))
    return (width - w) // 2, (height - h) // 2, w, h


LISTS: list[list[Any]] = [
    [],
    [T.Resize(256), T.CenterCrop(224)],
    [T.Resize(256), T.RandomCrop((224, 200)), T.RandomHorizontalFlip()],
    [T.RandomResizedCrop(224), T.RandomHorizontalFlip()],
    [T.RandomHorizontalFlip(), T.RandomResizedCrop((64, 96), scale=(0.5, 1.0), ratio=(0.2, 5.0))],
    [T.RandomHorizontalFlip(1.0), T.Resize((100, 50)), T.Crop(3, 5, 40, 90), T.RandomHorizontalFlip(0.5), T.RandomCrop(17)],
    [T.Resize(64), T.RandomHorizontalFlip(1.0), T.CenterCrop(33), T.RandomResizedCrop(16), T.CenterCrop((5, 16))],
    [T.Resize(40), T.RandomHorizontalFlip()],
]


@pytest.mark.parametrize("ops", LISTS, ids=lambda ops: "+".join(type(op).__name__ for op in ops))
def test_folding_is_one_step_after_the_other(ops: list[Any]) -> None:
    rng = random.Random(1)
    sizes = [(rng.randint(1, 700), rng.randint(1, 700)) for _ in range(300)]
    sizes += [(1, 1), (1, 500), (500, 1), (2, 999), (224, 224), (256, 256), (333, 777)]
    draws = Draws(len(sizes))
    placed = T.place(ops, [w for w, _ in sizes], [h for _, h in sizes], draws)
    assert not placed.bad
    for row, (width, height) in enumerate(sizes):
        reference = Reference(width, height)
        for number, op in enumerate(ops):
            reference.run(op, draws.given[f"{number}/{type(op).__name__}"][row].tolist() if op.draws else [])
        assert placed.boxes[row] == pytest.approx(reference.box(), abs=1e-6)
        assert placed.flips[row] == (reference.x[0] > reference.x[1])
        assert placed.sizes[row].tolist() == [reference.height, reference.width]
        if placed.size is not None:
            assert (reference.height, reference.width) == placed.size
    assert (placed.size is None) == (not ops or ops == LISTS[-1])


def test_boxes_lie_within_pictures_of_every_size() -> None:
    sizes = (
        [(w, h) for w in range(1, 40) for h in range(1, 40)]
        + [(1, n) for n in range(1, 3000, 7)]
        + [(n, 1) for n in range(1, 3000, 7)]
    )
    width, height = (np.array(side) for side in zip(*sizes, strict=True))
    for ops in LISTS:
        placed = T.place(ops, width, height, Draws(len(sizes), 5))
        x0, y0, x1, y1 = placed.boxes.T
        assert (x0 >= 0).all() and (y0 >= 0).all() and (x1 <= width).all() and (y1 <= height).all()
        assert (x0 < x1).all() and (y0 < y1).all() and (placed.sizes >= 1).all()


def test_crops_at_native_resolution_are_whole_pixels() -> None:
    width, height = np.arange(30, 130), np.arange(129, 29, -1)
    for ops in (
        [T.RandomCrop(30)],
        [T.CenterCrop((30, 29))],
        [T.RandomHorizontalFlip(1.0), T.RandomCrop(30)],
        [T.RandomResizedCrop(8)],
    ):
        boxes = T.place(ops, width, height, Draws(100)).boxes
        assert (boxes == np.rint(boxes)).all()


def test_a_resize_alone_keeps_the_whole_picture_exactly() -> None:
    side = np.arange(1, 2000)
    boxes = T.place([T.Resize(97), T.Resize((13, 7)), T.Crop(0, 0, 7, 13)], side, side[::-1], Draws(len(side))).boxes
    assert (boxes == np.stack([side * 0, side * 0, side, side[::-1]], axis=1)).all()


def test_random_crop_reaches_every_place_equally() -> None:
    n = 40_000
    boxes = T.place([T.RandomCrop((5, 4))], np.full(n, 7), np.full(n, 7), Draws(n)).boxes
    counts = np.bincount((boxes[:, 1] * 4 + boxes[:, 0]).astype(int), minlength=12)
    assert counts.min() > n / 12 * 0.9 and counts.max() < n / 12 * 1.1 and len(counts) == 12


def distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Kolmogorov and Smirnov's, between two samples."""
    both = np.concatenate([a, b])
    return float(
        np.abs(np.searchsorted(np.sort(a), both, "right") / len(a) - np.searchsorted(np.sort(b), both, "right") / len(b)).max()
    )


@pytest.mark.parametrize("size", [(640, 480), (300, 900), (50, 1000)])
def test_areas_and_shapes_are_distributed_as_documented(size: tuple[int, int]) -> None:
    n, rng = 6000, random.Random(2)
    boxes = T.place([T.RandomResizedCrop(224)], [size[0]] * n, [size[1]] * n, Draws(n, 3)).boxes
    sides = np.array(
        [resized_crop(*size, (0.08, 1.0), (3 / 4, 4 / 3), [rng.random() for _ in range(22)])[2:] for _ in range(n)]
    )
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    limit = 1.95 * math.sqrt(2 / n)  # one in a thousand
    assert distance(w * h, sides[:, 0] * sides[:, 1]) < limit
    assert distance(w / h, sides[:, 0] / sides[:, 1]) < limit


def test_a_crop_larger_than_its_picture_is_told_for_that_picture() -> None:
    placed = T.place([T.CenterCrop((30, 20)), T.RandomHorizontalFlip()], [20, 19, 50], [30, 300, 29], Draws(3))
    assert placed.bad == {
        1: "a crop of 20 x 30 does not fit into a picture of 19 x 300",
        2: "a crop of 20 x 30 does not fit into a picture of 50 x 29",
    }
    assert placed.boxes.tolist() == [[0, 0, 20, 30], [0, 0, 19, 300], [0, 0, 50, 29]]
    assert placed.sizes.tolist() == [[30, 20]] * 3
    bad = T.place([T.Crop(5, 5, 10, 10), T.RandomCrop(11)], [15, 14], [15, 15], Draws(2)).bad
    assert bad == {
        0: "a crop of 11 x 11 does not fit into a picture of 10 x 10",
        1: "a crop of 10 x 10 at (5, 5) does not fit into a picture of 14 x 15",
    }


def test_the_same_class_twice_draws_twice_and_rows_do_not_depend_on_each_other() -> None:
    ops = [T.RandomCrop(50), T.RandomCrop(20)]
    draws = Draws(9)
    together = T.place(ops, [100] * 9, [90] * 9, draws, first=4)
    assert list(draws.given) == ["4/RandomCrop", "5/RandomCrop"]
    for row in range(9):
        alone = T.place(ops, [100], [90], lambda name, count, row=row: draws(name, count)[row : row + 1], first=4)
        assert (alone.boxes[0] == together.boxes[row]).all()
    assert T.place(ops, [], [], Draws(0)).boxes.shape == (0, 4)
    assert T.place([T.RandomResizedCrop(3)], [], [], Draws(0)).boxes.shape == (0, 4)


def test_placing_is_quick() -> None:
    draws, width, height = Draws(64), np.full(64, 500), np.full(64, 375)
    for ops in LISTS[1:4]:
        times = []
        for _ in range(60):
            start = time.perf_counter()
            T.place(ops, width, height, draws)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.001  # some 0.1 ms; others use the machine


def test_sizes_and_declarations() -> None:
    before = T.Declared((None, None, 3), "uint8")
    assert T.output_size([T.Resize(5)]) is None
    assert T.output_size([T.CenterCrop(5), T.Resize(7), T.RandomHorizontalFlip()]) is None
    assert T.output_size([T.Resize(5), T.Resize((4, 6)), T.RandomHorizontalFlip()]) == (4, 6)
    assert T.declared([T.Resize(5), T.Crop(1, 2, 3, 4)], "image", before) == T.Declared((4, 3, 3), "uint8")
    assert T.declared([T.Resize(5), T.RandomHorizontalFlip()], "image", before).nbytes is None
    assert T.declared([T.RandomResizedCrop(5), T.RandomGrayscale()], "image", before).nbytes == 75


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: T.Resize(0), "Resize: size is 0; it must be an integer from 1 to 1048576"),
        (lambda: T.Resize((3, 4), "shorter"), "Resize: size (3, 4) with mode 'shorter'; give one number, or mode 'exact'"),
        (lambda: T.Resize(3, "longer"), "Resize: mode is 'longer'; it must be 'shorter' or 'exact'"),
        (lambda: T.CenterCrop((1, 2, 3)), "CenterCrop: size is (1, 2, 3); it must be a number of pixels or (height, width)"),
        (lambda: T.RandomCrop(2.5), "RandomCrop: size is 2.5; it must be an integer from 1 to 1048576"),
        (lambda: T.RandomCrop(True), "RandomCrop: size is True; it must be an integer from 1 to 1048576"),
        (lambda: T.Crop(-1, 0, 3, 3), "Crop: x is -1; it must be an integer from 0 to 1048576"),
        (
            lambda: T.RandomResizedCrop(4, scale=(0, 1)),
            "RandomResizedCrop: scale is 0; it must be a number above 0 and at most 1",
        ),
        (lambda: T.RandomResizedCrop(4, scale=(0.5, 0.2)), "a pair (smallest, largest), in this order"),
        (lambda: T.RandomResizedCrop(4, ratio=1), "RandomResizedCrop: ratio is 1; it must be a pair (smallest, largest)"),
        (lambda: T.RandomHorizontalFlip(1.5), "RandomHorizontalFlip: p is 1.5; it must be a number from 0 to 1"),
        (lambda: T.RandomHorizontalFlip(math.nan), "RandomHorizontalFlip: p is nan"),
        (lambda: T.RandomHorizontalFlip("1"), "RandomHorizontalFlip: p is '1'"),
    ],
)
def test_senseless_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert message in str(caught.value)


def test_portable_functions_are_those_of_math() -> None:
    x = np.linspace(-40, 40, 20_001)
    assert np.abs(exp(x) / [math.exp(v) for v in x] - 1).max() < 1e-15
    y = np.random.default_rng(0).random(20_000) * 4 + 1e-9
    assert np.abs(log(y) - [math.log(v) for v in y]).max() < 4e-15
    assert (
        exp(0.0) == 1
        and log(1.0) == 0
        and exp(-1e9) == 0
        and log(0.0) == -math.inf
        and log(5e-324) == pytest.approx(-744.4400719)
    )
