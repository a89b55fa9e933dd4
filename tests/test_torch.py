"""The iterable data set in torch's DataLoader: every sample once, whatever the workers, their start method or their number."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lfdata import ShardDataset, ShardIterableDataset
from lfdata.errors import KeyMissingError, OptionError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

GOLDEN = Path(__file__).parent / "golden" / "v1.0"
SETS = sorted(path.name for path in GOLDEN.iterdir() if (path / "manifest.json").exists())


def keys(samples: Any) -> list[bytes]:
    """The single samples' keys, in the order they came."""
    return [sample["__key__"] for sample in samples]


def same(sample: Any) -> Any:
    """Collates nothing: torch itself cannot turn a uint64 scalar into a tensor."""
    return sample


def load(dataset: ShardIterableDataset, workers: int, method: str | None = None) -> list[bytes]:
    """Keys of one pass through a DataLoader that leaves samples as they are."""
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method, collate_fn=same)
    return keys(loader)


@pytest.mark.parametrize("name", SETS)
def test_without_or_with_one_worker_the_order_is_the_data_sets(name: str) -> None:
    stored = keys(ShardDataset(GOLDEN / name))
    assert load(ShardIterableDataset(GOLDEN / name), 0) == stored
    assert load(ShardIterableDataset(GOLDEN / name), 1, "fork") == stored


@pytest.mark.parametrize(("workers", "method"), [(2, "fork"), (3, "spawn"), (2, "forkserver")])
def test_every_sample_comes_once(workers: int, method: str) -> None:
    stored = keys(ShardDataset(GOLDEN / "mixed"))
    assert sorted(load(ShardIterableDataset(GOLDEN / "mixed"), workers, method)) == sorted(stored)


def test_more_workers_than_samples() -> None:
    dataset = ShardIterableDataset(GOLDEN / "mixed")
    dataset._stop = dataset._first + 3  # a short share, as a high rank of many has
    assert len(load(dataset, 5, "fork")) == 3


@pytest.mark.parametrize("world", [1, 2, 3, 7, 1000])
def test_ranks_share_every_sample_once(world: int) -> None:
    stored = keys(ShardDataset(GOLDEN / "mixed"))
    shares = [ShardIterableDataset(GOLDEN / "mixed", rank=rank, world_size=world) for rank in range(world)]
    assert [key for share in shares if len(share) for key in keys(share)] == stored
    assert sum(map(len, shares)) == len(stored)


def test_fields_and_transform() -> None:
    name = ShardDataset(GOLDEN / "mixed").fields[0]
    dataset = ShardIterableDataset(GOLDEN / "mixed", [name], transform=sorted)
    assert all(sample == sorted(["__key__", name]) for sample in dataset)
    with pytest.raises(KeyMissingError, match="no field 'nothing'"):
        ShardIterableDataset(GOLDEN / "mixed", ["nothing"])
    with pytest.raises(OptionError, match="rank 2 is not in 0 to 1"):
        ShardIterableDataset(GOLDEN / "mixed", rank=2, world_size=2)


def test_pickled_as_path_and_options_even_after_use() -> None:
    dataset = ShardIterableDataset(GOLDEN / "mixed")
    before = len(pickle.dumps(dataset))
    stored = keys(dataset)
    assert len(pickle.dumps(dataset)) == before < 1000
    assert keys(pickle.loads(pickle.dumps(dataset))) == stored


def test_map_style_in_a_data_loader() -> None:
    dataset = ShardDataset(GOLDEN / "mixed")
    loader: Any = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, collate_fn=list)  # type: ignore[arg-type]
    assert sorted(key for batch in loader for key in keys(batch)) == sorted(keys(dataset))


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, lfdata; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0
