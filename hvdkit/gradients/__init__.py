"""Gradients combined over ranks."""

from hvdkit.gradients.average import average_gradients
from hvdkit.gradients.tape import DistributedGradientTape

__all__ = ["DistributedGradientTape", "average_gradients"]
