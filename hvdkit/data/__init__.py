"""Input data in a global order that does not depend on the number of ranks.

``hk.data.GlobalBatches`` takes arrays, files or a ``tf.data.Dataset``, and yields each rank's rows of every global
batch, to a training loop, to Keras ``fit`` or to ``hk.fit``. ``hk.data.parquet`` and others read files,
``hk.data.mixture`` mixes sources, ``hk.data.Concatenated`` joins several memory-mapped files into one array, and
``hk.data.divide`` declares how ``hk.fit`` divides the tensors of a batch.
Start reading with ``order.py`` and ``batch_plan.py``, which compute the examples in each row of a batch; then
``reader.py``, which reads them, and ``batches.py``.
"""

from hvdkit.data.arrays import Concatenated
from hvdkit.data.batches import GlobalBatches
from hvdkit.data.division import divide
from hvdkit.data.files import array_record, criteo, delimited, npy, parquet, tfrecord
from hvdkit.data.mixtures import mixture

__all__ = [
    "Concatenated",
    "GlobalBatches",
    "array_record",
    "criteo",
    "delimited",
    "divide",
    "mixture",
    "npy",
    "parquet",
    "tfrecord",
]
