"""JPEG structure: headers, completeness, premature ends, restart rows that equal the full decode, lossless transcoding."""

from __future__ import annotations

import re
import shutil
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from image_samples import options, photo, save

from lfdata.codecs import jpeg
from lfdata.codecs.image import ImageDecoder, make_image_encoder
from lfdata.errors import OptionError, SampleError

needs_jpegtran = pytest.mark.skipif(shutil.which("jpegtran") is None, reason="jpegtran (libjpeg-turbo-progs) is not installed")


@pytest.mark.parametrize(("subsampling", "mcu"), [("4:2:0", (16, 16)), ("4:2:2", (16, 8)), ("4:4:4", (8, 8))])
def test_header_is_read(subsampling: str, mcu: tuple[int, int]) -> None:
    info = jpeg.parse(save(photo(101, 67), "JPEG", subsampling=subsampling))
    assert (info.width, info.height, len(info.components), info.bits) == (101, 67, 3, 8)
    assert info.mcu == mcu
    assert not info.progressive
    assert jpeg.parse(save(photo(), "JPEG", progressive=True)).progressive


@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_every_cut_is_truncated(how: dict[str, object]) -> None:
    data = save(photo(40, 24), "JPEG", **how)
    encoder = make_image_encoder({"codec": "keep"})
    assert encoder.encode(data).payload == data
    for end in range(2, len(data)):
        with pytest.raises(SampleError) as caught:
            encoder.encode(data[:end])
        assert caught.value.code in ("truncated", "not-image"), end
        assert "truncated" in str(caught.value) or end < 3


@pytest.mark.parametrize("how", [{"subsampling": "4:2:0"}, {"subsampling": "4:4:4"}, {"restart_marker_rows": 1}])
def test_an_end_marker_that_comes_early_is_truncation_not_grey(how: dict[str, object]) -> None:
    data = save(photo(160, 120), "JPEG", quality=85, **how)
    start, end = jpeg.parse(data).scan_offset, len(data) - 2
    encoder = make_image_encoder({"codec": "keep"})
    for part in (0.1, 0.5, 0.9, 0.97):
        cut = start + int((end - start) * part)
        cut -= data[cut - 1] == 0xFF
        lying = data[:cut] + b"\xff\xd9"
        with Image.open(BytesIO(lying)) as image:
            image.load()  # PIL sees nothing wrong
        with pytest.raises(SampleError, match="truncated"):
            encoder.encode(lying)


def test_a_progressive_picture_without_its_last_scans_is_truncated() -> None:
    data = save(photo(160, 120), "JPEG", progressive=True)
    scans = [m.start() for m in re.finditer(rb"\xff\xda", data)]
    assert len(scans) > 4
    for start in scans[1:]:
        with pytest.raises(SampleError, match="truncated"):
            jpeg.check_complete(data[:start] + b"\xff\xd9", jpeg.parse(data))


def test_scans_are_limited() -> None:
    data = save(photo(16, 16), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    many = data[:last] + data[last:-2] * 200 + b"\xff\xd9"
    with pytest.raises(SampleError, match="scans"):
        make_image_encoder({}).encode(many)


def test_a_header_that_claims_more_than_the_bytes_can_hold_is_refused_before_decoding() -> None:
    data = bytearray(save(photo(64, 64), "JPEG"))
    at = jpeg.parse(bytes(data)).sof_offset
    data[at + 5 : at + 9] = (14000).to_bytes(2, "big") * 2
    with pytest.raises(SampleError, match="cannot hold 14000x14000"):
        make_image_encoder({}).encode(bytes(data))


@pytest.mark.parametrize("width", [1, 15, 16, 100])
@pytest.mark.parametrize("height", [1, 8, 16, 17, 145])
def test_row_offsets_point_behind_restart_markers(width: int, height: int) -> None:
    encoded = make_image_encoder(options("codec=jpeg,restart=rows")).encode(photo(width, height))
    data, aux = bytes(encoded.payload), encoded.aux
    assert aux is not None
    assert aux.dtype == np.uint64
    assert len(aux) == -(-height // 16)
    assert [data[int(o) - 2 : int(o)] for o in aux[1:]] == [bytes((0xFF, 0xD0 + i % 8)) for i in range(len(aux) - 1)]


@pytest.mark.parametrize("subsampling", ["420", "444"])
@pytest.mark.parametrize("grey", [False, True])
def test_decoded_rows_equal_the_full_decode_exactly(subsampling: str, grey: bool) -> None:
    pixels = photo(70, 187)
    encoder = make_image_encoder(options(f"codec=jpeg,restart=rows,subsampling={subsampling}"))
    encoded = encoder.encode(pixels[:, :, 0] if grey else pixels)
    decoder = ImageDecoder(encoder.params)
    full = decoder.decode(encoded.payload, encoded.sizes)
    assert full.shape == (187, 70, 1 if grey else 3)
    for y0 in range(0, 187, 5):
        for y1 in sorted({y0 + 1, min(187, y0 + 8), min(187, y0 + 33), 187}):
            rows = decoder.decode_rows(encoded.payload, encoded.sizes, encoded.aux, y0, y1)
            assert np.array_equal(rows, full[y0:y1]), (y0, y1)
    assert rows.flags.writeable
    assert rows.flags.owndata


def test_only_the_rows_asked_for_are_read() -> None:
    encoder = make_image_encoder(options("codec=jpeg,restart=rows"))
    encoded = encoder.encode(photo(64, 320))
    decoder = ImageDecoder(encoder.params)
    wanted = decoder.decode(encoded.payload, encoded.sizes)[160:176]
    aux = [int(o) for o in encoded.aux]
    damaged = bytearray(encoded.payload)
    damaged[aux[0] : aux[8] - 2] = b"\0" * (aux[8] - 2 - aux[0])
    damaged[aux[13] : -2] = b"\0" * (len(damaged) - 2 - aux[13])
    assert np.array_equal(decoder.decode_rows(bytes(damaged), encoded.sizes, encoded.aux, 160, 176), wanted)


def test_bad_row_requests_and_hostile_offsets_are_named_errors() -> None:
    encoder = make_image_encoder(options("codec=jpeg,restart=rows"))
    encoded = encoder.encode(photo(64, 96))
    decoder = ImageDecoder(encoder.params)
    for y0, y1 in ((-1, 4), (4, 4), (90, 97), (5, 2)):
        with pytest.raises(OptionError, match="rows"):
            decoder.decode_rows(encoded.payload, encoded.sizes, encoded.aux, y0, y1)
    for place, true in enumerate(encoded.aux):
        for lie in (0, 1, int(true) - 1, int(true) + 1, len(encoded.payload), 2**63 - 1, 2**63, 2**64 - 1):
            aux = encoded.aux.copy()
            aux[place] = lie
            with pytest.raises(SampleError):
                decoder.decode_rows(encoded.payload, encoded.sizes, aux, 0, 96)
    with pytest.raises(SampleError):
        decoder.decode_rows(encoded.payload, encoded.sizes, encoded.aux[:-1], 0, 96)
    plain = make_image_encoder(options("codec=jpeg"))
    other = plain.encode(photo(64, 96))
    with pytest.raises(OptionError, match="restart=rows"):
        ImageDecoder(plain.params).decode_rows(other.payload, other.sizes, encoded.aux, 0, 8)


def test_offsets_are_refused_for_other_jpegs() -> None:
    for how in ({}, {"progressive": True}, {"restart_marker_blocks": 2}):
        with pytest.raises(SampleError, match="restart"):
            jpeg.row_offsets(save(photo(64, 64), "JPEG", **how))


@needs_jpegtran
def test_progressive_is_transcoded_without_loss() -> None:
    data = save(photo(90, 70), "JPEG", progressive=True, exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0")
    encoder = make_image_encoder(options("codec=keep,transcode=yes"))
    encoded = encoder.encode(data)
    assert not jpeg.parse(bytes(encoded.payload)).progressive
    assert (encoded.sizes["width"], encoded.sizes["height"]) == (70, 90)  # the orientation survives
    kept = make_image_encoder(options("codec=keep"))
    same = kept.encode(data)
    assert same.payload == data
    before, after = ImageDecoder(kept.params).decode(data, same.sizes), ImageDecoder(encoder.params).decode(*_both(encoded))
    assert np.array_equal(before, after)
    assert "jpegtran" in encoder.params
    baseline = save(photo(), "JPEG")
    assert encoder.encode(baseline).payload == baseline


@needs_jpegtran
def test_kept_files_get_restart_markers_without_loss() -> None:
    encoder, kept = make_image_encoder(options("codec=keep,restart=rows")), make_image_encoder(options("codec=keep"))
    for how in ({}, {"progressive": True}, {"subsampling": "4:4:4"}, {"restart_marker_blocks": 3}):
        data = save(photo(90, 70), "JPEG", **how)
        encoded = encoder.encode(data)
        assert encoded.aux is not None and np.array_equal(encoded.aux, jpeg.row_offsets(bytes(encoded.payload)))
        decoder = ImageDecoder(encoder.params)
        whole = ImageDecoder(kept.params).decode(data, kept.encode(data).sizes)
        assert np.array_equal(decoder.decode(*_both(encoded)), whole)
        assert np.array_equal(decoder.decode_rows(*_both(encoded), encoded.aux, 37, 55), whole[37:55])
    other = save(photo(90, 70), "PNG")
    assert (encoder.encode(other).payload, encoder.encode(other).aux) == (other, None)
    assert "jpegtran" in encoder.params and "jpegtran" not in kept.params


@needs_jpegtran
def test_kept_files_get_restart_markers_within_rows_without_loss() -> None:
    encoder, kept = make_image_encoder(options("codec=keep,restart=blocks")), make_image_encoder(options("codec=keep"))
    for how in ({}, {"progressive": True}, {"subsampling": "4:4:4"}, {"restart_marker_blocks": 3}):
        data = save(photo(410, 70), "JPEG", **how)
        encoded = encoder.encode(data)
        info = jpeg.parse(bytes(encoded.payload))
        assert encoded.aux is None and info.restart_interval == jpeg.restart_group(info.mcu_columns) < info.mcu_columns
        whole = ImageDecoder(kept.params).decode(data, kept.encode(data).sizes)
        decoder = ImageDecoder(encoder.params)
        assert np.array_equal(decoder.decode(*_both(encoded)), whole)
        with pytest.raises(OptionError, match="restart=rows"):
            decoder.decode_rows(*_both(encoded), [], 0, 9)


@pytest.mark.parametrize(
    ("columns", "group"), [(1, 1), (2, 2), (22, 2), (23, 23), (24, 3), (32, 4), (63, 7), (250, 25), (251, 251)]
)
def test_groups_of_a_row_are_equal_and_about_eight(columns: int, group: int) -> None:
    assert jpeg.restart_group(columns) == group


@needs_jpegtran
@pytest.mark.parametrize("turn", range(1, 9))
def test_rows_of_turned_files_are_those_of_the_upright_picture(turn: int) -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0" + bytes([turn, 0, 0, 0]) + bytes(4)
    encoder = make_image_encoder(options("codec=keep,restart=rows"))
    encoded = encoder.encode(save(photo(90, 70), "JPEG", exif=exif))
    assert encoded.aux is not None
    decoder = ImageDecoder(encoder.params)
    whole = decoder.decode(*_both(encoded))
    for first, last in ((0, len(whole)), (0, 9), (37, 55), (len(whole) - 1, len(whole))):
        assert np.array_equal(decoder.decode_rows(*_both(encoded), encoded.aux, first, last), whole[first:last])


def _both(encoded: object) -> tuple[bytes, dict[str, int]]:
    return encoded.payload, encoded.sizes  # type: ignore[attr-defined]


def test_transcoding_without_the_tool_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(OptionError, match="libjpeg-turbo-progs"):
        make_image_encoder(options("codec=keep,transcode=yes"))
    with pytest.raises(OptionError, match="libjpeg-turbo-progs"):
        make_image_encoder(options("codec=keep,restart=rows"))
