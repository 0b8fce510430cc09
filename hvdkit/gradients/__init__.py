"""Combine gradients over ranks."""

from hvdkit.gradients.average import average_gradients
from hvdkit.gradients.local_variables import register_local_variables
from hvdkit.gradients.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "DistributedGradientTape",
    "PartialDistributedGradientTape",
    "average_gradients",
    "register_local_variables",
]
