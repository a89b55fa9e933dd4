"""What the doing of one job shares: who does it, the status of its rows, and how a bad one stops it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lfdata.loader.jobs import Job
from lfdata.loader.slots import EPOCH, JOB, PHASE, STEP, STEPS
from lfdata.loader.spans import Spans

POISON, OK, MASKED = 0xA5, 1, 0
"""Status of a row: not decoded yet, decoded, left out."""


class BadRow(Exception):
    """A bad sample stops the run: which row of the job, and the error to report."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(row, error)
        self.row, self.error = row, error


@dataclass(slots=True)
class Lane:
    """Who does a job at the moment: where it tells what it is doing, the threads it may use, where its time goes."""

    tell: NDArray[np.int64]
    threads: int
    spans: Spans
    job: Job

    def move(self, tell: NDArray[np.int64], number: int) -> None:
        """Another lane goes on with it."""
        self.tell, self.spans.lane = tell, number
        tell[EPOCH], tell[STEP], tell[STEPS], tell[JOB] = self.job.epoch, self.job.first, self.job.steps, self.job.number

    def phase(self, phase: int) -> None:
        """Tell what is being done."""
        self.tell[PHASE] = phase
