"""The summaries of a session: the chief writes them, and the methods of other ranks do nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy.typing as npt

from hvdkit import cluster
from hvdkit.checkpoint.files import RunPath
from hvdkit.supervisor.messages import agree_on_scalars
from hvdkit.supervisor.saved_state import Position, to_float
from hvdkit.supervisor.store_summaries import open_summaries
from hvdkit.supervisor.summaries import Summaries, numbers_in


class SessionSummaries:
    """Writes what a session passes at its current step; see :class:`Summaries`.

    Args:
        folder: the folder of event files.
        position: has the step.
        every: steps between writes of means over ranks; None to disable.

    Attributes:
        every: as passed.
    """

    def __init__(self, folder: RunPath, position: Position, every: int | None) -> None:
        self._folder = folder
        self._position = position
        self.every = every
        self._writer: Summaries | None = None

    def open(self) -> None:
        """Open the files on the chief, without what a lost run has written after the session's step."""
        if cluster.is_chief():
            self._writer = open_summaries(self._folder, resume_at=self._position.step)

    def scalars(self, **scalars: npt.ArrayLike) -> None:
        """Write the chief's scalars."""
        if self._writer is not None:
            self._writer.scalars(self._position.step, **scalars)

    def histogram(self, name: str, values: npt.ArrayLike) -> None:
        """Write a histogram of the chief's values."""
        if self._writer is not None:
            self._writer.histogram(self._position.step, name, values)

    def image(self, name: str, images: npt.ArrayLike) -> None:
        """Write the chief's images."""
        if self._writer is not None:
            self._writer.image(self._position.step, name, images)

    def write_means(self, scalars: Mapping[str, object], *, are_logs: bool = False) -> None:
        """Write the means of scalars over ranks, or of the numbers in Keras's logs. Every rank calls it."""

        def numbers() -> dict[str, float]:
            if are_logs:
                return numbers_in(scalars)
            return {name: to_float(name, value) for name, value in scalars.items()}

        ranks = agree_on_scalars(numbers)
        self.scalars(**{name: math.fsum(values[name] for values in ranks) / len(ranks) for name in ranks[0]})

    def flush(self) -> None:
        """Sync to disk: a run that resumes from a checkpoint must find the summaries of the steps before."""
        if self._writer is not None:
            self._writer.flush()

    def publish(self) -> None:
        """Make what was flushed visible to others."""
        if self._writer is not None:
            self._writer.publish()

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
