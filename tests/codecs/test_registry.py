"""Every kind is found by name; what is stored in a schema is enough to decode; unknown names list the valid ones."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lfdata.codecs.base import KINDS
from lfdata.codecs.registry import library_versions, make_decoder, make_encoder
from lfdata.errors import OptionError

SAMPLES: dict[str, tuple[dict[str, str], Any, Any]] = {
    "tokens": ({"vocab": "1000"}, [1, 2, 3], np.array([1, 2, 3], np.uint16)),
    "audio": ({}, (np.array([1, -2, 3], np.int16), 8000), (np.array([[1], [-2], [3]], np.int16), 8000)),
    "json": ({}, '{"a": [1, null]}', {"a": [1, None]}),
    "array": ({"dtype": "float32", "shape": "2x2"}, [[1, 2], [3, 4]], np.array([[1, 2], [3, 4]], np.float32)),
    "text": ({}, "h\u00e9", "h\u00e9"),
    "bytes": ({"max_bytes": "10"}, b"\0\xff", b"\0\xff"),
    "scalar": ({"dtype": "int16"}, "-7", np.int16(-7)),
}


def same(left: Any, right: Any) -> bool:
    if isinstance(right, tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(right, np.ndarray | np.generic):
        return left.dtype == right.dtype and bool(np.array_equal(left, right))
    return type(left) is type(right) and left == right


def test_every_kind_but_image_is_covered_here() -> None:
    assert set(SAMPLES) | {"image"} == set(KINDS)


@pytest.mark.parametrize("kind", SAMPLES)
def test_params_survive_json_and_are_all_a_decoder_needs(kind: str) -> None:
    options, raw, want = SAMPLES[kind]
    encoder = pickle.loads(pickle.dumps(make_encoder(kind, options)))
    assert encoder.kind == kind
    encoded = encoder.encode(raw)
    decoder = pickle.loads(pickle.dumps(make_decoder(kind, json.loads(json.dumps(encoder.params)))))
    assert same(decoder.decode(encoded.payload, encoded.sizes), want)
    assert same(decoder.decode(memoryview(bytes(encoded.payload)), encoded.sizes), want)


@pytest.mark.parametrize("kind", SAMPLES)
def test_unknown_options_list_the_valid_ones(kind: str) -> None:
    with pytest.raises(OptionError, match=rf"{kind}: unknown option 'colour'.*valid options: \w+="):
        make_encoder(kind, {**SAMPLES[kind][0], "colour": "red"})


def test_unknown_kinds_list_the_valid_ones() -> None:
    for make in (lambda: make_encoder("video", {}), lambda: make_decoder("video", {})):
        with pytest.raises(OptionError, match="image, tokens, audio"):
            make()


def test_image_is_reached_through_the_registry() -> None:
    encoder = make_encoder("image", {})
    assert encoder.kind == "image"
    assert make_decoder("image", json.loads(json.dumps(encoder.params)))


def test_decoding_imports_no_encoding_library() -> None:
    script = (
        "import sys; from lfdata.codecs.registry import make_decoder\n"
        "make_decoder('audio', {}); make_decoder('tokens', {'vocab': 5, 'dtype': 'uint8'}); make_decoder('text', {})\n"
        "print(sorted({'soundfile', 'soxr', 'tokenizers', 'tiktoken', 'PIL'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "[]"


def test_versions_of_what_determines_bytes_are_known() -> None:
    versions = library_versions(KINDS)
    assert {"numpy", "msgspec", "zstandard", "zstd"} <= set(versions)
    assert all(isinstance(value, str) and value for value in versions.values())
