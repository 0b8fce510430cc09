"""Input data in a global order that does not depend on the number of ranks.

:class:`GlobalBatches` partitions each global batch over the ranks; :class:`Concatenated` joins several memory-mapped
files into one array for it.
"""

from hvdkit.data.arrays import Concatenated
from hvdkit.data.batches import GlobalBatches

__all__ = ["Concatenated", "GlobalBatches"]
