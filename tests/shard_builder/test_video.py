"""Frames of videos by time: the same whatever was asked for before, and never one that is not there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lfdata.errors import SampleError
from shard_builder.sources.video import VideoFile

av: Any = pytest.importorskip("av", exc_type=ImportError)

FPS, FRAMES = 20, 60
CODECS = {
    "h264, B-frames, one keyframe": ("libx264", {"bf": "3", "g": "250", "crf": "10"}),
    "h264, a keyframe every 7": ("libx264", {"bf": "2", "g": "7", "crf": "10"}),
    "hevc, open groups": (
        "libx265",
        {"crf": "10", "x265-params": "keyint=12:min-keyint=12:open-gop=1:bframes=3:log-level=none"},
    ),
    "av1, a keyframe every 2": ("libsvtav1", {"g": "2", "crf": "20", "preset": "12"}),
}


def picture(number: int) -> np.ndarray[Any, Any]:
    """Grey of a brightness that is its number."""
    pixels = np.full((64, 64, 3), 20 + 3 * number, np.uint8)
    pixels[:, : 1 + number] = 200 - number
    return pixels


def write(path: Path, codec: str, options: dict[str, str], frames: int = FRAMES) -> Path:
    """A video of :func:`picture`."""
    with av.open(str(path), "w", options={"movflags": "faststart"}) as output:
        stream = output.add_stream(codec, FPS, options=options)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")):
                output.mux(packet)
        for packet in stream.encode():
            output.mux(packet)
    return path


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each codec."""
    top = tmp_path_factory.mktemp("videos")
    return {name: write(top / f"{at}.mp4", *how) for at, (name, how) in enumerate(CODECS.items())}


def bare(path: Path) -> list[np.ndarray[Any, Any]]:
    """All frames, by PyAV alone."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("name", CODECS)
def test_any_order_of_requests_gives_the_frames_of_a_straight_run(videos: dict[str, Path], name: str) -> None:
    frames = bare(videos[name])
    assert len(frames) == FRAMES and abs(int(frames[30][32, 60, 0]) - 110) < 12
    order = list(range(FRAMES)) + [random.Random(1).randrange(FRAMES) for _ in range(60)] + list(range(0, FRAMES, 17))
    file = VideoFile(videos[name], name)
    for number in order:
        # A timestamp as float32 has it.
        np.testing.assert_array_equal(file.frame(float(np.float32(number / FPS)), 1e-4), frames[number], err_msg=str(number))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("seconds", [-0.05, 0.024, 1.026, FRAMES / FPS, 1e9])
def test_a_time_without_a_frame_is_an_error_that_says_what_is_near(videos: dict[str, Path], name: str, seconds: float) -> None:
    file = VideoFile(videos[name], "some.mp4")
    with pytest.raises(SampleError, match=f"no frame at {seconds:.6f} s") as caught:
        file.frame(seconds, 1e-4)
    assert (caught.value.code, caught.value.path) == ("no-frame", "some.mp4")
    np.testing.assert_array_equal(file.frame(0.5, 1e-4), bare(videos[name])[10])


def test_the_nearest_frame_within_the_tolerance_is_taken(videos: dict[str, Path]) -> None:
    name = next(iter(CODECS))
    frames = bare(videos[name])
    file = VideoFile(videos[name], name)
    np.testing.assert_array_equal(file.frame(0.524, 0.025), frames[10])
    np.testing.assert_array_equal(file.frame(0.526, 0.025), frames[11])


@pytest.mark.parametrize("name", CODECS)
def test_a_cut_video_gives_the_frames_before_the_cut_and_then_errors(
    videos: dict[str, Path], name: str, tmp_path: Path
) -> None:
    """With its index at the front, as LeRobot writes it; never another picture in the place of a lost one."""
    data = videos[name].read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) - (len(data) - data.index(b"mdat")) // 2])
    frames = bare(videos[name])
    file = VideoFile(tmp_path / "cut.mp4", name)
    good = bad = 0
    for number in range(FRAMES):
        try:
            found = file.frame(number / FPS, 1e-4)
        except SampleError as error:
            assert error.code in ("no-frame", "video")
            bad += 1
        else:
            np.testing.assert_array_equal(found, frames[number])
            good += 1
    assert good > 5 and bad > 5


@pytest.mark.parametrize("name", CODECS)
def test_flipped_bytes_are_an_error_or_other_pixels_but_never_a_crash(
    videos: dict[str, Path], name: str, tmp_path: Path
) -> None:
    data = bytearray(videos[name].read_bytes())
    rng = random.Random(name)
    for round_ in range(12):
        spoilt = bytearray(data)
        for _ in range(8):
            spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        path = tmp_path / f"{round_}.mp4"
        path.write_bytes(spoilt)
        try:
            file = VideoFile(path, name)
        except SampleError as error:
            assert error.code == "video"
            continue
        for number in (0, 30, 31, 59, 5):
            try:
                assert file.frame(number / FPS, 1e-4).dtype == np.uint8
            except SampleError as error:
                assert error.code in ("no-frame", "video", "pixel-format")


@pytest.mark.parametrize("data", [b"", b"not a video at all", b"\0" * 4096])
def test_what_is_no_video_is_a_named_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd:name.mp4").write_bytes(data)
    with pytest.raises(SampleError, match=r"the video cannot be opened") as caught:
        VideoFile(tmp_path / "odd:name.mp4", "odd")
    assert caught.value.code == "video"


def test_a_sound_file_has_no_video_stream(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "sound.mp4"), "w") as output:
        stream = output.add_stream("aac", 8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        for packet in [*stream.encode(frame), *stream.encode()]:
            output.mux(packet)
    with pytest.raises(SampleError, match="no video stream"):
        VideoFile(tmp_path / "sound.mp4", "sound.mp4")
