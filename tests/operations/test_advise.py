"""advise: figures are measured on the data given, words follow from figures, and a slow storage or small files change the words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from _build import build, rows
from killkit import ROOT
from opskit import run
from PIL import Image

from lfdata.errors import OptionError
from shard_builder.fields import load_mapping
from shard_builder.operations.advise import AdviceOptions, advise, recommend
from shard_builder.operations.storage import list_files, measure
from shard_builder.sources import open_source
from shard_builder.sources.base import FieldSpec

QUICK = AdviceOptions(samples=3, seconds=0.2)
SAMPLE = ROOT / "samples" / "dataset"


def figures(rate: float, *, files: int = 10, size: int = 10**8, latency: float = 0.1, **fields: Any) -> tuple[Any, Any]:
    storage = {
        "sequential": {"mb_per_s": rate, "bytes": 10**9},
        "random": {"reads": 9, "median_ms": latency, "p95_ms": latency},
        "small_files": {"files": 9, "files_per_s": 10.0, "mb_per_s": 0.1},
    }
    return storage, {"files": files, "bytes": size, "records": 100_000, "records_counted": True, "fields": fields}


def way(codec: str, size: int, decode: float, samples: int = 5) -> dict[str, Any]:
    return {"options": {"codec": codec}, "samples": samples, "bytes": size, "decode_ms": decode, "encode_ms": 1.0}


def picture(*ways: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "image", "candidates": list(ways)}


@pytest.mark.parametrize(
    ("rate", "cores", "codec", "limit"),
    [(10, 64, "webp", "storage"), (10_000, 2, "jpeg", "decoding"), (10_000, 64, "jpeg", "storage")],
)
def test_a_slow_storage_asks_for_few_bytes_and_a_fast_one_for_quick_decoding(
    rate: float, cores: int, codec: str, limit: str
) -> None:
    storage, data = figures(rate, image=picture(way("jpeg", 900_000, 1.0), way("webp", 300_000, 7.0)))
    found = recommend(storage, data, cores)["codec of image"]
    assert (found["value"], found["limit"]) == (f"codec={codec}", limit)


def test_of_equally_fast_ones_the_smaller_is_taken_and_one_that_refuses_pictures_is_not() -> None:
    storage, data = figures(1000, image=picture(way("keep", 10, 0.1, samples=4), way("jpeg", 200, 1.0), way("webp", 100, 1.05)))
    assert recommend(storage, data, 4)["codec of image"]["value"] == "codec=webp"


def test_many_small_files_are_sharded_and_numbers_on_fast_storage_may_stay_hdf5() -> None:
    array = {"kind": "array", "bytes": 4000}
    assert "100,000 files" in recommend(*figures(100, files=100_000, size=10**9, a=array), 4)["layout"]["why"]
    assert "HDF5" in recommend(*figures(2000, a=array), 4)["layout"]["value"]
    assert recommend(*figures(2000, latency=8.0, a=array), 4)["layout"]["value"] == "shards"
    assert recommend(*figures(2000, image=picture(way("keep", 10, 1.0))), 4)["layout"]["value"] == "shards"


def test_groups_grow_with_latency_and_staging_is_advised_where_the_storage_starves_the_cores() -> None:
    image = picture(way("keep", 1_000_000, 5.0))
    slow, fast = (recommend(*figures(rate, latency=latency, image=image), 16) for rate, latency in ((20, 9.0), (4000, 0.05)))
    assert slow["group size"]["bytes"] == 2 << 20 and slow["staging"]["value"] == "yes" and slow["workers"]["value"] == 1
    assert fast["staging"]["value"] == "no" and fast["workers"]["value"] == 16
    assert recommend(*figures(200, latency=9.0, image=image), 16)["group size"]["bytes"] == 32 << 20


def test_storage_that_could_not_be_measured_is_said_so() -> None:
    storage, data = figures(1, image=picture(way("keep", 1000, 5.0)))
    found = recommend({**storage, "sequential": None, "random": None, "small_files": None}, data, 4)
    assert found["codec of image"]["limit"] == "decoding" and "could not be measured" in found["workers"]["why"]


def test_a_codec_that_loses_detail_is_said_to() -> None:
    for codec, said in (("jpeg", True), ("keep", False)):
        storage, data = figures(1, image=picture(way("keep", 1000, 5.0), way(codec, 500, 1.0)))
        found = recommend(storage, data, 4)["codec of image"]
        assert found["value"].startswith(f"codec={codec}") and ("loses detail" in found["why"]) is said


def test_a_source_and_its_shards_are_measured(tmp_path: Path) -> None:
    source = open_source(str(SAMPLE / "samples.jsonl"), fields=load_mapping(SAMPLE / "fields.toml"))
    found = advise(SAMPLE, source, QUICK)
    assert found["data"]["records"] == 53 and found["data"]["files"] > 50
    candidates = found["data"]["fields"]["image"]["candidates"]
    assert [item["options"]["codec"] for item in candidates] == ["keep", "jpeg", "webp"]
    assert all(item["samples"] == 3 and item["bytes"] > 100 and item["decode_ms"] > 0 for item in candidates)
    build(tmp_path / "data", [rows(6)])
    found = advise(tmp_path / "data", None, QUICK)
    assert (
        found["data"]["fields"]["blob"]["bytes"] == 5
        and found["recommendation"]["layout"]["why"] == "the data are shards already"
    )
    small = advise(SAMPLE, source, AdviceOptions(samples=3, seconds=0.2, side=64))["data"]["fields"]["image"]["candidates"]
    assert small[1]["pixels"] < candidates[1]["pixels"]


def test_masks_are_tried_without_loss_only(tmp_path: Path) -> None:
    for number in range(4):
        labels = np.zeros((40, 60), np.uint8)
        labels[number * 5 : number * 5 + 9, 7:30] = number + 1
        Image.fromarray(labels).save(tmp_path / f"{number}.png")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"key": "{n}", "file": "{n}.png"}}\n' for n in range(4)))
    fields = [FieldSpec("labels", "image", "file", "file", {"role": "mask"})]
    source = open_source(str(tmp_path / "rows.jsonl"), kind="table", fields=fields, key="key")
    found = advise(tmp_path, source, QUICK)
    ways = [item["options"] for item in found["data"]["fields"]["labels"]["candidates"]]
    assert ways == [{"codec": codec, "role": "mask"} for codec in ("keep", "png", "webp")]
    assert "role=mask" in found["recommendation"]["codec of labels"]["value"]
    assert "loses detail" not in found["recommendation"]["codec of labels"]["why"]


def test_files_are_counted_chosen_evenly_and_read(tmp_path: Path) -> None:
    for number in range(700):
        (tmp_path / f"{number:03d}").write_bytes(b"x" * (number + 1))
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    listing = list_files(tmp_path)
    assert (listing.files, listing.complete) == (701, True) and listing.largest is not None and listing.some is not None
    assert listing.largest[0].size == 3 << 20 and max(int(Path(item.path).name) for item in listing.some) > 600
    assert not list_files(tmp_path, 100).complete
    found = measure(listing, 0.5)
    assert found["sequential"]["bytes"] >= 3 << 20 and found["random"]["reads"] > 0 and found["small_files"]["files"] > 100
    nothing = measure(list_files(tmp_path / "000"), 0.2)
    assert nothing["random"] is None


def test_no_samples_and_senseless_options_are_refused(tmp_path: Path) -> None:
    build(tmp_path / "data", [[]])
    with pytest.raises(OptionError, match="no sample"):
        advise(tmp_path / "data", None, QUICK)
    for bad in ({"samples": 0}, {"seconds": 0.0}, {"side": 0}, {"cores": -1}):
        with pytest.raises(OptionError):
            AdviceOptions(**bad)


def test_the_command_prints_json_and_text(tmp_path: Path) -> None:
    build(tmp_path / "data", [rows(4)])
    found = msgspec.json.decode(run(tmp_path, "advise", "data", "--samples", "2", "--seconds", "0.2", "--json"))
    assert set(found) == {"cores", "storage", "data", "recommendation"} and found["data"]["records"] == 4
    assert "recommended:" in run(tmp_path, "advise", "data", "--samples", "2", "--seconds", "0.2")
