"""Frames of a video file by their time, for requests that mostly go forward: each frame is decoded once, and none is kept but two.

PyAV does the decoding, with one thread (parallelism is between workers).
"""

from __future__ import annotations

import bisect
import importlib
from array import array
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import MissingExtraError, SampleError

_DEEP_GREY = "gray16le"
# As of pictures: above every camera.
MAX_PIXELS = 200_000_000
_KEYFRAMES_BACK = 3
_WORTH_A_SEEK = 8


def av_library() -> Any:
    """PyAV. Raises :class:`MissingExtraError`."""
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise MissingExtraError(f"videos need PyAV: pip install 'lfdata[video]' ({error})") from error


def video_versions() -> dict[str, str]:
    """What shapes the pixels of a frame: PyAV and the libraries in it."""
    av = av_library()
    libraries = vars(av)["library_versions"]
    versions = {name: ".".join(map(str, libraries[name])) for name in ("libavcodec", "libavformat", "libswscale")}
    return {"av": str(av.__version__), **versions}


class VideoFile:
    """The first video stream of a file.

    Args:
        path: the file.
        name: how messages call it.

    Raises:
        SampleError: ``video``: not a video, damaged, or of a codec that PyAV lacks.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._av = av_library()
        self._path = path
        self._container: Any = None
        self._frames: Iterator[Any] = iter(())
        # The frames on either side of the last request; ``_later`` is None at the end of the file.
        self._earlier: Any = None
        self._later: Any = None
        # Where decoding failed: presentation time of the last good frame, and why.
        self._failed: tuple[int, str] | None = None
        self._open()
        self._base: Fraction = self._stream.time_base
        entries = list(self._stream.index_entries)
        self._times = array("q", sorted(entry.timestamp for entry in entries))
        self._keyframes = array("q", sorted(entry.timestamp for entry in entries if entry.is_keyframe))

    def close(self) -> None:
        """Close the file."""
        if self._container is not None:
            self._container.close()
            self._container = None
        self._frames, self._earlier, self._later = iter(()), None, None

    def frame(self, seconds: float, tolerance: float) -> NDArray[Any]:
        """Pixels of the frame nearest to a time: uint8 (height, width, 3) RGB; uint16 (height, width) for 16-bit grey.

        Raises:
            SampleError: ``no-frame``: none lies within ``tolerance`` seconds. ``video``: it cannot be decoded. ``pixel-format``.
        """
        wanted = seconds / float(self._base)
        self._go(wanted)
        frames = [frame for frame in (self._earlier, self._later) if frame is not None]
        nearest = min(frames, key=lambda frame: abs(frame.pts - wanted), default=None)
        if nearest is None:
            raise SampleError("no-frame", f"no frame at {seconds:.6f} s, nor any near it", path=self.name)
        off = abs(nearest.pts - wanted) * float(self._base)
        if off > tolerance:
            found = nearest.pts * float(self._base)
            reason = f"no frame at {seconds:.6f} s: the nearest is at {found:.6f} s, and the tolerance is {tolerance:g} s"
            raise SampleError("no-frame", reason, path=self.name)
        return self._pixels(nearest)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            # A name with a colon must not be taken for a protocol.
            self._container = self._av.open(f"file:{self._path}", mode="r")
            streams = self._container.streams.video
            if not streams:
                raise SampleError("video", "the file has no video stream", path=self.name)
            self._stream = streams[0]
            context = self._stream.codec_context
            if context is None or self._stream.time_base is None:
                raise SampleError(
                    "video", "the video is of a codec without a decoder here, or has no time base", path=self.name
                )
            if context.width * context.height > MAX_PIXELS:
                reason = f"a video of {context.width}x{context.height}; the limit is {MAX_PIXELS} pixels"
                raise SampleError("pixel-limit", reason, path=self.name)
            context.thread_count = 1
            # A damaged frame is an error, not a picture patched up from its neighbours.
            context.options = {"err_detect": "explode"}
            self._frames = self._decoded()
        except SampleError:
            self.close()
            raise
        except (self._av.FFmpegError, OSError, ValueError, RuntimeError) as error:
            self.close()
            raise self._bad("cannot be opened", error) from error

    def _bad(self, what: str, error: Exception) -> SampleError:
        text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
        return SampleError("video", f"the video {what}: {text}", path=self.name)

    def _decoded(self) -> Iterator[Any]:
        for frame in self._container.decode(self._stream):
            if frame.pts is None:
                raise SampleError("video", "a frame without a presentation time", path=self.name)
            if frame.is_corrupt:
                raise SampleError("video", f"the frame at {frame.time:.6f} s is damaged", path=self.name)
            yield frame

    def _go(self, wanted: float) -> None:
        """Make the frames on either side of a time the current ones: by decoding on, or from a keyframe where that is nearer."""
        keyframe = bisect.bisect_right(self._keyframes, wanted) - 1
        if self._failed is not None and self._failed[0] < wanted:
            last, reason = self._failed
            # Whatever follows in that run of frames fails again; only a later keyframe is worth a try.
            if keyframe < 0 or self._keyframes[keyframe] <= last:
                raise SampleError("video", reason, path=self.name)
        now = self._later or self._earlier
        behind = self._earlier is not None and wanted < self._earlier.pts
        if now is None or behind or self._far(now.pts, keyframe):
            self._seek(wanted, keyframe)
        while self._later is not None and self._later.pts < wanted:
            self._step()

    def _far(self, now: int, keyframe: int) -> bool:
        """Whether going to a keyframe spares more frames than a seek is worth."""
        if keyframe < 0:
            return False
        return (
            bisect.bisect_left(self._times, self._keyframes[keyframe]) - bisect.bisect_right(self._times, now) > _WORTH_A_SEEK
        )

    def _seek(self, wanted: float, keyframe: int) -> None:
        """To a keyframe before a time. The index has decoding times, which precede presentation, and frames that lean on an earlier
        run are lost after a seek: where the first frame comes too late, one keyframe earlier, and once more."""
        for number in range(keyframe, keyframe - _KEYFRAMES_BACK, -1):
            if self._container is None:
                self._open()
            self._earlier = self._later = None
            try:
                at = self._keyframes[number] if number > 0 else min([0, *self._keyframes])
                self._container.seek(at, stream=self._stream, backward=True, any_frame=False)
            except (self._av.FFmpegError, OSError, ValueError) as error:
                self.close()
                raise self._bad("cannot be searched", error) from error
            self._frames = self._decoded()
            self._step()
            if number <= 0 or (self._later is not None and self._later.pts <= wanted):
                return

    def _step(self) -> None:
        last = self._later
        try:
            self._later = next(self._frames, None)
        except (self._av.FFmpegError, OSError, ValueError, SampleError) as error:
            reason = error if isinstance(error, SampleError) else self._bad("cannot be decoded", error)
            if last is not None:
                self._failed = (last.pts, reason.reason)
            self.close()
            raise reason from error
        if last is not None:
            self._earlier = last

    def _pixels(self, frame: Any) -> NDArray[Any]:
        layout = frame.format
        deep = max(component.bits for component in layout.components) > 8
        if layout.name == _DEEP_GREY:
            return np.asarray(frame.to_ndarray(), np.uint16)
        if deep and len(layout.components) == 1:
            reason = f"frames of {layout.name}: grey video of more than 8 bits is read as {_DEEP_GREY} only"
            raise SampleError("pixel-format", reason, path=self.name)
        try:
            return np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
        except (self._av.FFmpegError, ValueError) as error:
            raise SampleError("pixel-format", f"frames of {layout.name} do not become RGB: {error}", path=self.name) from error
