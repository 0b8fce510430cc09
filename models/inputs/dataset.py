"""The return type of all loaders in this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .distortion import Distortion


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set in two parts, the same on every rank.

    Images are uint8 ``[n, 32, 32, 3]`` (an array, or rows read on access) with int32 labels ``[n]``;
    tables are float32 ``[n, features]`` with float32 targets ``[n, 1]``.
    """

    name: str
    """Name for log lines."""
    x_train: Any
    """Inputs to train on."""
    y_train: Any
    """Their labels or targets."""
    x_test: Any
    """Held-out inputs."""
    y_test: Any
    """Their labels or targets."""
    classes: int | None = None
    """Number of classes; None for a regression."""
    distortion: Distortion | None = None
    """How training images may be distorted without changing their class; None for tables."""
    shuffle: Literal["full"] = "full"
    """How ``hk.data.GlobalBatches`` shuffles the examples."""

    @property
    def train(self) -> Any:
        """Inputs and labels to train on."""
        return self.x_train, self.y_train

    @property
    def test(self) -> Any:
        """Held-out inputs and labels."""
        return self.x_test, self.y_test

    @property
    def examples(self) -> tuple[int, int]:
        """Number of examples to train on, and of held-out ones."""
        return len(self.y_train), len(self.y_test)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an input."""
        return self.x_train.shape[1:]
