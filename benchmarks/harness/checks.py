"""One check of a subject: what it is asked to do, and what its answer is compared with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import verify
from benchmarks.harness.environments import HOME
from benchmarks.harness.orders import check_orders
from benchmarks.harness.verify import UnlikelyError, WrongWorkError
from benchmarks.harness.work import Workload, image_files

COMPARED, MULTIMODAL_COMPARED, REAL_CROPS = 64, 16, 40
PICKED, PICKED_CROPS = 12, 4
"""Rows of each measured run that are compared; random crops take long to look for."""
ALL_COMPARED = 500
"""Of up to so many deterministic pictures all are compared with the reference; of more, all by their signature."""
LATER = 4096
"""Samples of the second epoch that are looked at, at most."""
Answer = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Checking:
    """A workload over a source of some samples, known by a digest. ``reencodes``: see :func:`verify.check_pixels`."""

    work: Workload
    source: Path
    samples: int
    digest: str
    reencodes: str = ""

    def run(
        self,
        ask: Answer,
        scratch: Path,
        prepared: Callable[[Path], Path],
        seed: int,
        unlikely: Callable[[UnlikelyError], None],
    ) -> dict[str, float]:
        """What was compared, and how near it came.

        Args:
            ask: gives the answer of the subject's process to a request.
            scratch: an empty directory.
            prepared: the subject's format made of another source.
            unlikely: is told of what chance may have done, before a second try.

        Raises:
            WrongWorkError: the subject does other work.
        """
        kept = scratch / "kept.npz"
        request: dict[str, Any] = {"samples": self.samples, "wanted": self._wanted(), "output": str(kept), "epochs": 1}
        if self.work.measure == "build":
            request["prepared"] = str(scratch / "built")
        elif self.work.measure != "reads":
            request |= {"epochs": 2, "later": LATER, "signatures": self._signed()}
        answer = ask(request)
        if self.work.measure == "reads":
            return verify.check_digests(self.source, answer)
        verify.check_keys(self.work, answer, self.samples)
        if self.work.measure != "build":
            check_orders(answer["keys"])
        if not self.work.random:
            return self._deterministic(kept)
        real = verify.check_real(self.work, self.source, kept)
        return real | self._ramps(ask, kept, prepared, seed, unlikely)

    @property
    def picked(self) -> int:
        """Rows of a measured run to look at."""
        return PICKED_CROPS if self.work.random else PICKED

    def measured(self, kept: Path) -> None:
        """Look at rows that came while the clock ran.

        Raises:
            WrongWorkError: they are not those of the workload.
        """
        try:
            if self.work.random:
                verify.check_real(self.work, self.source, kept)
            elif self.work.work == "centre":
                verify.check_pixels(self.work, self.source, kept, self.reencodes)
            else:
                self._deterministic(kept)
        except WrongWorkError as error:
            raise WrongWorkError(f"in a measured run: {error}") from error

    def _wanted(self) -> list[int]:
        """Keys to compare of the first epoch, and of the second."""
        if self.work.work == "multimodal":
            return [MULTIMODAL_COMPARED]
        if self.work.work == "centre" and self.samples <= ALL_COMPARED:
            return [self.samples, COMPARED]
        return [REAL_CROPS, REAL_CROPS // 4] if self.work.random else [COMPARED]

    def _signed(self) -> bool:
        return self.work.work == "tokens" or (self.work.work == "centre" and self.samples > ALL_COMPARED)

    def _deterministic(self, kept: Path) -> dict[str, float]:
        match self.work.work:
            case "tokens":
                return verify.check_tokens(self.source, kept)
            case "multimodal":
                return verify.check_multimodal(self.work, self.source, kept)
            case "build":
                return verify.check_built(self.work, self.source, kept)
        found = verify.check_pixels(self.work, self.source, kept, self.reencodes)
        known = HOME / "references" / f"{self.digest}.npy"
        return found | {"compared_signatures": verify.check_signatures(self.source, kept, known, self.reencodes)}

    def _ramps(
        self,
        ask: Answer,
        kept: Path,
        prepared: Callable[[Path], Path],
        seed: int,
        unlikely: Callable[[UnlikelyError], None],
    ) -> dict[str, float]:
        """Some epochs over pictures whose crops can be told."""
        native = self.work.work == "native"
        photos = (verify.PHOTO_WIDTH, verify.PHOTO_HEIGHT, verify.PHOTOS)
        size = photos if native else (verify.RAMP_WIDTH, verify.RAMP_HEIGHT, verify.RAMPS)
        ramps = HOME / f"ramps-{size[0]}-blue"
        if len(image_files(ramps)) != size[2]:
            shutil.rmtree(ramps, ignore_errors=True)
            verify.write_ramps(ramps, *size)
        request = {"samples": size[2], "wanted": [2 * size[2]], "output": str(kept)}
        request |= {"source": str(ramps), "prepared": str(prepared(ramps)), "epochs": -(-(512 if native else 1024) // size[2])}
        last: UnlikelyError | None = None
        for tried in (seed, seed + 1):
            answer = ask(request | {"seed": tried})
            verify.check_keys(self.work, answer, size[2])
            check_orders(answer["keys"])
            try:
                return verify.check_native(kept) if native else verify.check_crops(kept)
            except UnlikelyError as error:
                # Right ones are refused too, once in some hundred runs.
                last = error
                unlikely(error)
        assert last is not None
        raise last
