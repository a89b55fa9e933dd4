"""Recipes: what is made of unpacked packages, without the network."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.harness import data
from benchmarks.harness.data import Recipe, RecipeError


def _photo(path: Path, width: int, height: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height)).save(path, quality=80)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    unpacked = tmp_path / "unpacked" / "some-photos"
    _photo(unpacked / "usr/big one.jpg", 3200, 2000)
    _photo(unpacked / "usr/large.JPG", 1300, 900)
    _photo(unpacked / "usr/small.jpg", 400, 300)
    (unpacked / "usr/link.jpg").symlink_to("large.JPG")
    monkeypatch.setitem(data.RECIPES, "tiles", Recipe("tiles", "none", ("some-photos",), data._tiles))
    monkeypatch.setitem(data.RECIPES, "photos", Recipe("photos", "none", ("some-photos",), data._photos))
    return tmp_path


@pytest.mark.skipif(shutil.which("jpegtran") is None, reason="jpegtran is not installed (libjpeg-turbo-progs)")
def test_tiles_are_cut_without_loss(home: Path) -> None:
    folder = data.fetch("tiles", home, lambda _: None)
    sizes = {Image.open(path).size for path in folder.iterdir()}
    assert sizes == {(512, 384)} and len(list(folder.iterdir())) == 6 * 5 + 2 * 2
    whole = np.asarray(Image.open(home / "unpacked/some-photos/usr/large.JPG"))
    tile = np.asarray(Image.open(folder / "usr_large_512_384.jpg"))
    # Chroma is interpolated over the tile's edge, so only the inside is the same to the bit.
    assert np.array_equal(tile[8:-8, 8:-8], whole[384 + 8 : 768 - 8, 512 + 8 : 1024 - 8])
    marker = folder / "usr_large_0_0.jpg"
    marker.write_bytes(b"")
    assert data.fetch("tiles", home, lambda _: None) == folder and marker.read_bytes() == b"", "made twice"


def test_photos_are_those_of_six_megapixels(home: Path) -> None:
    assert [path.name for path in data.fetch("photos", home, lambda _: None).iterdir()] == ["usr_big_one.jpg"]


def test_a_recipe_that_fails_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Path, target: Path) -> None:
        (target / "half").write_bytes(b"")
        raise RecipeError("no")

    monkeypatch.setitem(data.RECIPES, "photos", Recipe("photos", "none", ("some-photos",), broken))
    with pytest.raises(RecipeError):
        data.fetch("photos", home, lambda _: None)
    assert not (home / "data" / "photos").exists()
    monkeypatch.setitem(data.RECIPES, "photos", Recipe("photos", "none", ("no-such-package-here",), data._photos))
    with pytest.raises(RecipeError, match="no-such-package-here|not installed"):
        data.fetch("photos", home, lambda _: None)


def test_tokens_are_those_of_the_text(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    for number, package in enumerate(("one", "two")):
        page = home / "unpacked" / package / f"{number}.html"
        page.parent.mkdir(parents=True)
        page.write_text(f"<html><script>var x = '<p>';</script><p class='a'>Snow &amp; {package} {'word ' * 200}é</p></html>")
    monkeypatch.setitem(data.RECIPES, "tokens", Recipe("tokens", "none", ("one", "two"), data._tokens))
    folder = data.fetch("tokens", home, lambda _: None)
    ids = np.load(folder / "tokens.npy")
    assert ids.dtype == np.uint16
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids.tolist())
    assert "Snow & one" in text and "Snow & two" in text and text.count("é") == 2 and "<" not in text and "var" not in text
