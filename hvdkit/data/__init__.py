"""Data whose global order does not depend on the number of ranks.

:class:`GlobalBatches` cuts each global batch into the ranks' rows; :class:`Concatenated` joins several
memory-mapped files into one array for it.
"""

from hvdkit.data.arrays import Concatenated
from hvdkit.data.batches import GlobalBatches

__all__ = ["Concatenated", "GlobalBatches"]
