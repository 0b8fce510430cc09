"""The summaries of a session: the chief writes them, and the methods of other ranks do nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdkit import cluster
from hvdkit.checkpoint.files import RunPath
from hvdkit.supervisor.messages import agree_on_scalars
from hvdkit.supervisor.saved_state import to_float
from hvdkit.supervisor.store_summaries import open_summaries
from hvdkit.supervisor.summaries import Summaries

if TYPE_CHECKING:
    import numpy.typing as npt


class SummarizedSession:
    """The part of :class:`hvdkit.Supervisor` that writes summaries.

    Args:
        logdir: the run's folder.

    Attributes:
        logdir: as passed.
    """

    def __init__(self, logdir: RunPath) -> None:
        self.logdir = logdir
        self._summaries: Summaries | None = None

    @property
    def global_step(self) -> int:
        """Number of steps trained, over all runs."""
        raise NotImplementedError

    def summary(self, **scalars: Any) -> None:
        """Write the chief's scalars at the current step; other ranks do nothing.

        Args:
            **scalars: numbers or scalar tensors by tag.

        Examples:
            >>> import tempfile
            >>> import numpy as np
            >>> import tensorflow as tf
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> with hk.Supervisor(hk.broadcast_object(tempfile.mkdtemp()), variables=[tf.Variable(0.0)]) as sv:
            ...     sv.step()
            ...     sv.summary(accuracy=0.75)
        """
        if self._summaries is not None:
            self._summaries.scalars(self.global_step, **scalars)

    def histogram(self, name: str, values: npt.ArrayLike) -> None:
        """Write a histogram of the chief's values at the current step; other ranks do nothing.

        Args:
            name: the tag.
            values: numbers of any shape.

        Examples:
            >>> import tempfile
            >>> import numpy as np
            >>> import tensorflow as tf
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> with hk.Supervisor(hk.broadcast_object(tempfile.mkdtemp()), variables=[tf.Variable(0.0)]) as sv:
            ...     sv.step()
            ...     sv.histogram("weights", np.random.randn(64, 10))
        """
        if self._summaries is not None:
            self._summaries.histogram(self.global_step, name, values)

    def image(self, name: str, images: npt.ArrayLike) -> None:
        """Write the chief's images at the current step; other ranks do nothing.

        Args:
            name: the tag.
            images: ``[n, height, width, channels]``, uint8 or floats 0 to 1.

        Examples:
            >>> import tempfile
            >>> import numpy as np
            >>> import tensorflow as tf
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> with hk.Supervisor(hk.broadcast_object(tempfile.mkdtemp()), variables=[tf.Variable(0.0)]) as sv:
            ...     sv.step()
            ...     sv.image("inputs", np.random.rand(4, 28, 28, 1))
        """
        if self._summaries is not None:
            self._summaries.image(self.global_step, name, images)

    def _open_summaries(self) -> None:
        if cluster.is_chief():
            self._summaries = open_summaries(self.logdir / "summaries", resume_at=self.global_step)

    def _write_means(self, scalars: Mapping[str, Any]) -> None:
        """Write the means over ranks. Every rank calls it."""
        ranks = agree_on_scalars(lambda: {name: to_float(name, value) for name, value in scalars.items()})
        self.summary(**{name: math.fsum(values[name] for values in ranks) / len(ranks) for name in scalars})
