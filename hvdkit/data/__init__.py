"""Input data in a global order that does not depend on the number of ranks.

:class:`GlobalBatches` takes arrays, files or a ``tf.data.Dataset``, and yields each rank's rows of every global batch,
to a training loop, to Keras ``fit`` or to ``hk.fit``. ``files`` reads Parquet and other formats; :func:`mixture` mixes
sources. :class:`Concatenated` joins several memory-mapped files into one array
for it. Start reading with ``order.py``, which computes the examples in each row of a batch; then ``batches.py``.
"""

from hvdkit.data.arrays import Concatenated
from hvdkit.data.batches import GlobalBatches
from hvdkit.data.files import array_record, criteo, delimited, npy, parquet, tfrecord
from hvdkit.data.mixture import mixture

__all__ = [
    "Concatenated",
    "GlobalBatches",
    "array_record",
    "criteo",
    "delimited",
    "mixture",
    "npy",
    "parquet",
    "tfrecord",
]
