"""What a record says of a subject's settings is what its source says."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.harness.entries import SUBJECTS, subject_module
from benchmarks.harness.environments import ALONE, OWN_PILLOW, PACKAGES
from benchmarks.harness.settings import options_of


@pytest.mark.parametrize(
    ("subject", "wanted"),
    [
        ("lfdata_loader", ["Loader(", "tail='pad'", "threads=settings.workers"]),
        (
            "torch_simplejpeg",
            [
                "DataLoader(dataset, work.batch, shuffle=True",
                "StatefulDataLoader(dataset",
                "simplejpeg.decode_jpeg(data, 'RGB')",
                "persistent_workers=settings.workers > 0",
                "INTER_AREA",
            ],
        ),
        ("streaming_", ["Decoded(batch_size=work.batch, shuffle=True", "num_workers=settings.workers"]),
        ("litdata_", ["StreamingDataset(", "drop_last=False"]),
        ("dali_cpu", ["random_area=[0.08, 1.0]", "LastBatchPolicy.PARTIAL"]),
        ("grain_", ["grain.ReadOptions(num_threads=THREADS"]),
        ("ffcv_", ["os_cache=True", "jpeg_quality=90"]),
        ("lfdata_loader", ["T.RandomResizedCrop(224)", "T.RandomHorizontalFlip()", "T.Tokens(SEQUENCE)"]),
        ("lfdata_reader", ["self.dataset.read_many(indices, decode=False)"]),
        ("spdl_", ["concurrency=settings.workers", ".add_sink(3)", "spdl.io.demux_image(path)"]),
        ("spdl_simplejpeg", [".add_sink(3)", "simplejpeg.decode_jpeg(data, 'RGB')"]),
        ("torch_memmap", ["DataLoader(dataset, work.batch"]),
        ("streaming_", ["StreamingDataLoader(decoded(", "batch_size=workload.batch", "shuffle_seed=settings.seed)"]),
        ("ffcv_", ["write(Pictures(source, small=True), target", "num_workers=workers", "RandomHorizontalFlip()"]),
        ("litdata_", ["chunk_size=CHUNK * BLOCK", "chunk_bytes='64MB'"]),
        ("webdataset_", [".shuffle(1000)"]),
    ],
)
def test_calls_into_libraries_are_told(subject: str, wanted: list[str]) -> None:
    calls = "\n".join(options_of(subject_module(subject))["calls"])
    assert all(text in calls for text in wanted), calls


def test_no_class_is_told_by_the_name_of_a_variable() -> None:
    for name in SUBJECTS:
        assert not [call for call in options_of(subject_module(name))["calls"] if call.startswith("kind(")], name


def test_every_subject_has_settings_that_do_not_depend_on_the_machine() -> None:
    for name in SUBJECTS:
        found = options_of(subject_module(name))
        assert found == options_of(subject_module(name)) and str(Path.cwd()) not in str(found)
    assert "DataLoader" not in str(options_of(subject_module("dali_cpu"))), "what another subject does is not its setting"


def test_a_setting_that_changes_changes_what_is_told(tmp_path: Path) -> None:
    def told(text: str) -> list[str]:
        path = tmp_path / "subject.py"
        path.write_text(text)
        module = ModuleType(f"subject_{len(text)}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        calls: list[str] = options_of(module)["calls"]
        del sys.modules[module.__name__]
        return calls

    text = "import os\nimport peer\ndef batches(work):\n    os.makedirs(name='x')\n    return peer.Loader(work, threads=2)\n"
    assert told(text) == ["peer.Loader(work, threads=2)"]
    assert told(text.replace("work, threads=2", "7")) == ["peer.Loader(7)"]
    assert told(text.replace("peer.Loader(work, threads=2)", "peer.one(1).two(2)")) == ["peer.one(1).two(2)"]
    given = """
import peer
class Own:
    def __init__(self):
        self.made = peer.Data(1)
    def get(self, i: int):
        return self.made.read(i, 2)
def build(kind, work):
    return kind(work, 5)
def batches():
    return build(peer.Loader, Own()), build(kind=peer.Other, work=1)
"""
    assert set(told(given)) == {"peer.Data(1)", "self.made.read(i, 2)", "peer.Loader(work, 5)", "peer.Other(work, 5)"}
    assert told(text.replace("threads=2", "threads=16")) == ["peer.Loader(work, threads=16)"]


def test_every_peer_has_a_dependency_group_of_the_versions_that_its_environment_gets() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    groups = tomllib.loads(text)["project"]["optional-dependencies"]
    pinned = {one.partition(";")[0] for name, group in groups.items() if name.startswith("bench-") for one in group}
    common = {"simplejpeg", "opencv-python-headless"}
    for subject, packages in PACKAGES.items():
        if subject not in (*ALONE, *OWN_PILLOW):
            assert pinned >= {one for one in packages if one.partition("==")[0] not in common}, subject
