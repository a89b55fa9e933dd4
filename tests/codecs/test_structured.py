"""Structured values come back equal; bad JSON, bombs and damage are named errors within bounded memory."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import pickle
import random
import resource
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from nonimage_odd import ODD, names, needs_odd

from lfdata.codecs.dictionary import dictionary_id, train_dictionary
from lfdata.codecs.structured import JsonDecoder, JsonEncoder
from lfdata.errors import OptionError, SampleError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=5),
    max_leaves=20,
)


def roundtrip(raw: object, **options: str) -> object:
    encoder = JsonEncoder(options)
    encoded = encoder.encode(raw)
    return JsonDecoder(encoder.params).decode(encoded.payload, encoded.sizes)


def code(raw: object, **options: str) -> str:
    with pytest.raises(SampleError) as caught:
        JsonEncoder(options).encode(raw)
    return caught.value.code


def decode_code(payload: bytes, raw_bytes: int, **kwargs: int) -> str:
    with pytest.raises(SampleError) as caught:
        JsonDecoder(JsonEncoder({}).params, **kwargs).decode(payload, {"raw_bytes": raw_bytes})
    return caught.value.code


def annotations(count: int, seed: int = 0) -> list[dict[str, object]]:
    source = random.Random(seed)
    words = ["man", "dog", "red", "car", "street", "holding"]
    return [
        {
            "image_id": source.randrange(10**6),
            "caption": " ".join(source.choice(words) for _ in range(10)),
            "boxes": [{"bbox": [source.random() * 640 for _ in range(4)], "label": source.choice(words)} for _ in range(3)],
        }
        for _ in range(count)
    ]


@given(VALUES)
def test_objects_and_their_json_text_come_back_equal(value: object) -> None:
    if not isinstance(value, str):
        assert roundtrip(value) == value
    assert roundtrip(json.dumps(value)) == value
    assert roundtrip(json.dumps(value, ensure_ascii=False).encode()) == value


def test_key_order_of_the_source_is_kept() -> None:
    assert list(roundtrip('{"b":1,"a":2,"0":3}')) == ["b", "a", "0"]  # type: ignore[call-overload]


def test_types_survive() -> None:
    value = roundtrip('{"i": 1, "f": 1.0, "t": true, "n": null, "z": -0.0}')
    assert [type(v) for v in value.values()] == [int, float, bool, type(None), float]  # type: ignore[attr-defined]
    assert math.copysign(1, value["z"]) == -1  # type: ignore[index]


def test_same_value_gives_the_same_bytes() -> None:
    value = annotations(1)[0]
    assert JsonEncoder({}).encode(value).payload == JsonEncoder({}).encode(json.dumps(value)).payload


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        ("NaN", "nan"),
        ('{"a": -Infinity}', "nan"),
        ("[1e999]", "nan"),
        ("", "empty"),
        (" \n", "empty"),
        (b"", "empty"),
        ("{", "json"),
        ("[1,]", "json"),
        ("{'a': 1}", "json"),
        ('{"a": 1} x', "json"),
        ('"tab\there"', "json"),
        ("01", "json"),
        ("[1 2]", "json"),
        ("\x00", "json"),
        (b'"\xff"', "utf8"),
        ('"\\ud800"', "surrogate"),
        ('{"\\udc00": 1}', "surrogate"),
        ("18446744073709551616", "range"),
        ("-9223372036854775809", "range"),
        ("9" * 10000, "range"),
        ('{"a": 1, "a": 2}', "duplicate-key"),
        ('[{"b": {"a": 1, "a": 1}}]', "duplicate-key"),
        ("[" * 65 + "]" * 65, "depth"),
        ("[" * 100_000 + "]" * 100_000, "depth"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "depth"),
        ("[" * 100_000, "depth"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 1\n", "lfs-pointer"),
    ],
)
def test_bad_json_is_refused_by_name(raw: object, want: str) -> None:
    assert code(raw) == want


def test_depth_limit_is_exact_and_adjustable() -> None:
    assert roundtrip("[" * 64 + "]" * 64)
    assert code("[[1]]", max_depth="1") == "depth"
    assert roundtrip("[" * 500 + "]" * 500, max_depth="500")
    with pytest.raises(OptionError):
        JsonEncoder({"max_depth": "501"})


def test_cycles_and_shared_bombs_end() -> None:
    cycle: list[object] = []
    cycle.extend([cycle, cycle])
    assert code(cycle) == "depth"
    laugh: object = "ha"
    for _ in range(30):
        laugh = [laugh] * 10
    assert code(laugh, max_raw="1000000") == "size-limit"


def test_duplicate_keys_by_option() -> None:
    assert roundtrip('{"a": 1, "b": 0, "a": 2}', duplicates="first") == {"a": 1, "b": 0}
    assert roundtrip('{"a": 1, "b": 0, "a": 2}', duplicates="last") == {"a": 2, "b": 0}


def test_nan_in_objects_is_kept_only_by_option_and_in_text_never() -> None:
    assert code({"a": float("nan")}) == "nan"
    assert math.isnan(roundtrip({"a": float("nan")}, nan="keep")["a"])  # type: ignore[index]
    assert code('{"a": NaN}', nan="keep") == "nan"


@pytest.mark.parametrize(
    "value", [b"x", {1: 2}, {"a": {1}}, datetime.datetime.now(), object(), 1j, {None: 1}, [bytearray(b"")]]
)
def test_values_that_json_does_not_have_are_refused(value: object) -> None:
    assert code([value]) == "type"


def test_a_byte_order_mark_is_accepted() -> None:
    assert roundtrip(b'\xef\xbb\xbf{"a":1}') == {"a": 1}


@needs_odd
@pytest.mark.parametrize("name", names(".json"))
def test_odd_json_files(name: str) -> None:
    raw = (ODD / name).read_bytes()
    if "n_number_NaN" in name:
        assert code(raw) == "nan"
    elif "BOM_empty_object" in name:
        assert roundtrip(raw) == {}
    elif "lonely_surrogate" in name:
        assert code(raw) == "surrogate"
    elif "blns" in name:
        assert roundtrip(raw) == json.loads(raw)
    elif "meta_info" in name:
        assert code(raw) == "empty"
    else:
        pytest.fail(f"no expectation for {name}: add one")


def test_size_limits_hold() -> None:
    assert code(json.dumps("x" * 100), max_raw="50") == "size-limit"
    assert code(["x" * 100], max_raw="50") == "size-limit"


def test_dictionary_is_deterministic_and_used() -> None:
    packer = JsonEncoder({})
    samples = [packer.pack(value) for value in annotations(2000)]
    dictionary = train_dictionary(samples, 16384)
    assert dictionary is not None and dictionary == train_dictionary(samples, 16384)
    assert len(dictionary) <= 16384 and dictionary_id(dictionary) != 0
    encoder = JsonEncoder({}, dictionary)
    assert encoder.params["dictionary"]["id"] == dictionary_id(dictionary)
    fresh = annotations(100, seed=1)
    plain = sum(len(packer.encode(value).payload) for value in fresh)
    small = sum(len(encoder.encode(value).payload) for value in fresh)
    assert small < 0.8 * plain
    decoder = JsonDecoder(encoder.params, dictionary)
    for value in fresh:
        encoded = encoder.encode(value)
        assert decoder.decode(encoded.payload, encoded.sizes) == value
    with pytest.raises(OptionError):
        JsonDecoder(encoder.params, None)
    with pytest.raises(OptionError):
        JsonDecoder(encoder.params, dictionary[:-1])


def test_dictionary_training_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    packer = JsonEncoder({})
    samples = [packer.pack(value) for value in annotations(300)]
    (tmp_path / "samples").write_bytes(msgspec.msgpack.encode(samples))
    script = (
        "import sys, hashlib, msgspec; from lfdata.codecs.dictionary import train_dictionary\n"
        "samples = msgspec.msgpack.decode(open(sys.argv[1], 'rb').read())\n"
        "print(hashlib.sha256(train_dictionary(samples)).hexdigest())"
    )
    run = [sys.executable, "-c", script, str(tmp_path / "samples")]
    root = Path(__file__).parents[2]
    outputs = {subprocess.run(run, capture_output=True, text=True, check=True, cwd=root).stdout for _ in range(2)}
    assert len(outputs) == 1


@pytest.mark.parametrize("samples", [[], [b"x" * 100] * 7, [b""] * 1000, [b"ab"] * 1000, [b"abcdefgh"] * 8])
def test_too_little_data_gives_no_dictionary(samples: list[bytes]) -> None:
    assert train_dictionary(samples) is None


def frame(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xdd\x00\x00\xff\xff" * 60 + bytes(70000),
        b"\x91" * 200_000 + b"\x01",
        b"\x81\xa1a" * 200_000 + b"\x01",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xd7\xff" + bytes(8),
        b"\xc7\x0c\xff" + bytes(12),
        b"\x92\x01\xd6\xff\x00\x00\x00\x00",
        b"\xd4\x05\x00",
        b"\xc1",
        b"\x01\x02",
        b"",
        b"\xa1\xff",
    ],
)
def test_hostile_messagepack_is_a_named_error_in_bounded_memory(raw: bytes) -> None:
    tracemalloc.start()
    try:
        assert decode_code(frame(raw), len(raw)) in ("corrupt", "depth", "type")
        assert tracemalloc.get_traced_memory()[1] < 96 << 20
    finally:
        tracemalloc.stop()


def test_zstd_bombs_are_refused_before_allocation() -> None:
    bomb = frame(bytes(300 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decode_code(bomb, 300 << 20) == "size-limit"
    assert decode_code(bomb, 10) == "corrupt"
    lying = bytes.fromhex("28b52ffda0") + (60 << 20).to_bytes(4, "little") + bytes.fromhex("010000")
    assert decode_code(lying, 60 << 20) == "corrupt"
    assert decode_code(frame(bytes(1 << 20)), 1 << 20, limit=1000) == "size-limit"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_bomb_of_empty_lists_is_refused() -> None:
    raw = b"\xdd" + (40 << 20).to_bytes(4, "big") + b"\x90" * (40 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decode_code(frame(raw), len(raw)) == "size-limit"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_frames_that_disagree_with_the_index_are_corrupt() -> None:
    good = JsonEncoder({}).encode({"a": 1})
    payload, size = bytes(good.payload), good.sizes["raw_bytes"]
    assert decode_code(payload, size + 1) == "corrupt"
    assert decode_code(payload + payload, size) == "corrupt"
    assert decode_code(payload + b"x", size) == "corrupt"
    assert decode_code(payload[:-1], size) == "corrupt"
    assert decode_code(b"", size) == "corrupt"
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x01")
    assert decode_code(streamed, 1) == "corrupt"


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_payload_raises_only_our_errors(at: int, flip: int) -> None:
    encoder = JsonEncoder({})
    encoded = encoder.encode(annotations(1)[0])
    payload = bytearray(encoded.payload)
    payload[at % len(payload)] ^= flip
    with contextlib.suppress(SampleError):
        JsonDecoder(encoder.params).decode(payload, encoded.sizes)


def test_one_decoder_serves_many_threads_and_survives_pickling() -> None:
    values = annotations(200)
    samples = [JsonEncoder({}).pack(value) for value in values]
    dictionary = train_dictionary(samples)
    encoder = pickle.loads(pickle.dumps(JsonEncoder({"level": "3"}, dictionary)))
    encoded = [encoder.encode(value) for value in values]
    decoder = pickle.loads(pickle.dumps(JsonDecoder(encoder.params, dictionary)))
    wrong: list[int] = []

    def work() -> None:
        for _ in range(10):
            wrong.extend(i for i, e in enumerate(encoded) if decoder.decode(e.payload, e.sizes) != values[i])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_bad_options_list_the_valid_ones() -> None:
    for options in ({"level": "0"}, {"level": "x"}, {"duplicates": "merge"}, {"nan": "yes"}, {"compress": "1"}):
        with pytest.raises(OptionError, match=r"valid|expected"):
            JsonEncoder(options)
    with pytest.raises(OptionError):
        JsonDecoder({"serialization": "json"})
