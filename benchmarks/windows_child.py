"""One subject of ``lfbench windows`` in a process of its own: run as a script with one JSON argument, answers with a JSON line.

It imports what its subject needs and nothing else of this package: LeRobot has an environment of its own.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any


def lerobot_dataset(task: dict[str, Any]) -> Any:
    """LeRobot's own class, with windows in seconds."""
    seconds = {name: [delta / task["fps"] for delta in deltas] for name, deltas in task["deltas"].items()}
    module = importlib.import_module("lerobot.datasets.lerobot_dataset")
    return module.LeRobotDataset("local/set", root=task["path"], delta_timestamps=seconds)


def lerobot_batches(task: dict[str, Any]) -> Iterator[Any]:
    """Shuffled batches without end, as LeRobot's training script makes them."""
    data = importlib.import_module("torch.utils.data")
    workers = task["workers"]
    loader = data.DataLoader(
        lerobot_dataset(task),
        batch_size=task["batch"],
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        prefetch_factor=2 if workers else None,
        persistent_workers=workers > 0,
    )
    while True:
        yield from loader


def lfdata_batches(task: dict[str, Any]) -> Iterator[Any]:
    """The same from shards."""
    lfdata, transforms = importlib.import_module("lfdata"), importlib.import_module("lfdata.transforms")
    fields = {}
    for name, deltas in task["deltas"].items():
        size = task["sizes"].get(name)
        fields[name] = [transforms.Window(deltas), *([transforms.CenterCrop(tuple(size))] if size else [])]
    loader = lfdata.Loader(task["path"], task["batch"], fields, threads=task["workers"] or None)
    while True:
        yield from loader


def timed(task: dict[str, Any]) -> dict[str, float]:
    """Windows a second once the first batches are there, and seconds to the first."""
    began = time.perf_counter()
    batches = {"lerobot": lerobot_batches, "lfdata": lfdata_batches}[task["subject"]](task)
    next(batches)
    first = time.perf_counter() - began
    for _ in itertools.islice(batches, task["warm"]):
        pass
    start = time.perf_counter()
    rows = 0
    for batch in itertools.islice(batches, task["batches"]):
        rows += len(batch[next(iter(task["deltas"]))])
    return {"windows_s": rows / (time.perf_counter() - start), "first_batch_s": first}


def values(task: dict[str, Any]) -> dict[str, float]:
    """Windows of some rows as ``.npz``: what the other subject's are compared with. Pictures as uint8 (rows, T, height, width, channels)."""
    numpy = importlib.import_module("numpy")
    found: dict[str, Any] = {}
    if task["subject"] == "lfdata":
        data = importlib.import_module("lfdata").open(task["path"])
        found = {name.replace("/", "|"): value for name, value in data.windows(task["deltas"]).read(task["rows"]).items()}
    else:
        rows = [lerobot_dataset(task)[row] for row in task["rows"]]
        for name in itertools.chain(task["deltas"], (f"{given}_is_pad" for given in task["deltas"])):
            stacked = numpy.stack([row[name].numpy() for row in rows])
            if name in task["sizes"]:
                # A window of one picture comes without its axis.
                shape = (len(rows), len(task["deltas"][name]), *stacked.shape[-3:])
                stacked = numpy.rint(stacked.reshape(shape) * 255).astype("uint8").transpose(0, 1, 3, 4, 2)
            found[name.replace("/", "|")] = stacked
    numpy.savez(task["output"], **found)
    return {}


def make(task: dict[str, Any]) -> dict[str, float]:
    """Record a data set with LeRobot itself: two cameras as video, a state of 6, actions of 4, at 10 frames a second."""
    numpy = importlib.import_module("numpy")
    module = importlib.import_module("lerobot.datasets.lerobot_dataset")
    side, random = task["side"], numpy.random.default_rng(0)
    cameras = ("observation.images.top", "observation.images.wrist")
    features: dict[str, Any] = {
        name: {"dtype": "video", "shape": (side, side, 3), "names": ["height", "width", "channels"]} for name in cameras
    }
    features["observation.state"] = {"dtype": "float32", "shape": (6,), "names": None}
    features["action"] = {"dtype": "float32", "shape": (4,), "names": None}
    made = module.LeRobotDataset.create("local/set", 10, features, root=task["path"], robot_type="none", use_videos=True)
    y, x = numpy.mgrid[0:side, 0:side] / side
    for number in range(task["episodes"] * task["frames"]):
        frame: dict[str, Any] = {"task": "move"}
        for camera, name in enumerate(cameras):
            phase = number * 0.1 + camera
            waves = [numpy.sin(9 * x + phase), numpy.cos(7 * y - phase), numpy.sin(5 * (x + y) + phase)]
            frame[name] = numpy.stack([(wave * 100 + 128).clip(0, 255).astype("uint8") for wave in waves], axis=2)
        frame["observation.state"] = random.standard_normal(6).astype("float32")
        frame["action"] = random.standard_normal(4).astype("float32")
        made.add_frame(frame)
        if (number + 1) % task["frames"] == 0:
            made.save_episode()
    made.finalize()
    return {}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"time": timed, "values": values, "make": make}[asked["mode"]](asked)))
