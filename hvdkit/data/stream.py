"""A ``tf.data.Dataset`` of single examples as a source.

Every rank reads the same stream and keeps its rows of each global batch; the expensive part of the input (``map_fn``)
runs only on the rows kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.data import order
from hvdkit.data.aligned import Nest
from hvdkit.errors import describe

if TYPE_CHECKING:
    import tensorflow as tf


class StreamSource:
    """The examples of a deterministic ``tf.data.Dataset``, in order or shuffled through a buffer.

    Attributes:
        examples: The dataset's cardinality, or None if it is unknown or infinite.
    """

    def __init__(self, dataset: tf.data.Dataset, *, map_fn: Callable[..., object] | None):
        import tensorflow as tf

        options = tf.data.Options()
        options.deterministic = True  # the user's parallel reads and maps keep their order
        self._dataset = dataset.with_options(options)
        self.map_fn = map_fn
        self._mapped = dataset if map_fn is None else dataset.map(map_fn)
        self.structure = self._mapped.element_spec
        cardinality = int(dataset.cardinality())
        if cardinality == 0:
            raise ValueError(
                describe("arrays_or_source", "an empty tf.data.Dataset", "at least one example", "check how it is read")
            )
        self.examples = cardinality if cardinality > 0 else None

    def open(
        self, epoch: int, step: int, rank_rows: order.RankRows, shuffle: order.Shuffle, remainder: order.Remainder
    ) -> Iterator[tuple[Nest, int, int]]:
        """Yield the rank's rows of each global batch of the epoch from ``step`` on, and its number of real examples.

        Filler rows repeat the examples of the same batch, starting with the first. Without filler, the third value is a
        digest of the batch's first example before ``map_fn``, used to compare the ranks' streams; otherwise 0.
        """
        import tensorflow as tf

        from hvdkit.collectives.digests import hash_of

        def keep_rows(*window: Nest) -> tf.data.Dataset:
            columns = window if isinstance(self._dataset.element_spec, tuple) else window[0]
            count = tf.nest.flatten(columns)[0].cardinality()
            rows = tf.data.Dataset.zip(columns)
            digest = tf.zeros([], tf.int64) if rank_rows.with_filler else hash_of(rows.take(1).get_single_element())
            kept = rows.repeat().skip(rank_rows.first(count)).take(rank_rows.max_rows)
            return tf.data.Dataset.zip((kept, tf.data.Dataset.from_tensors((count, digest)).repeat()))

        stream = self._ordered(epoch, shuffle).skip(step * rank_rows.batch_size)
        stream = stream.window(rank_rows.batch_size, drop_remainder=remainder == "drop").flat_map(keep_rows)
        if self.map_fn is not None:
            stream = stream.map(self._map_example, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        for batch, (counts, digests) in stream.batch(rank_rows.max_rows).prefetch(1):
            count = int(counts[0])
            first, last = rank_rows.rows(count)
            yield _first_rows(batch, last - first, rank_rows.max_rows), count, int(digests[0])

    def batch_spec(self, rows: int | None) -> Nest:
        """Return the ``tf.TypeSpec`` structure of a batch of ``rows`` rows; None for any number."""
        return self._mapped.batch(rows or 1, drop_remainder=rows is not None).element_spec

    def identity(self, shuffle: order.Shuffle) -> dict[str, object]:
        """Return nothing more: seed and sizes determine the order."""
        return {}

    def fingerprint(self) -> dict[str, object]:
        """Return the number and type of the examples, and a digest of the first two."""
        from hvdkit.collectives.digests import hash_of

        digest = int(hash_of(list(self._dataset.take(2))))
        return {"examples": self.examples, "arrays": {"dataset": str(self._dataset.element_spec)}, "rows": digest}

    def _ordered(self, epoch: int, shuffle: order.Shuffle) -> tf.data.Dataset:
        if shuffle.seed is None:
            return self._dataset
        import tensorflow as tf

        shuffle_seed = int(np.random.SeedSequence([shuffle.seed, epoch]).generate_state(1, np.uint64)[0]) >> 1

        def shuffled(_: tf.Tensor) -> tf.data.Dataset:
            # tf.data also uses the global seed, which a script may have set differently on each rank. Inside this
            # function it is the seed of the function's graph, which is fixed here.
            tf.random.set_seed(0)
            return self._dataset.shuffle(shuffle.buffer, seed=shuffle_seed, reshuffle_each_iteration=False)

        return tf.data.Dataset.from_tensors(0).flat_map(shuffled)

    def _map_example(self, example: Nest, count_and_digest: Nest) -> tuple[Nest, Nest]:
        assert self.map_fn is not None
        mapped = self.map_fn(*example) if isinstance(example, tuple) else self.map_fn(example)
        return mapped, count_and_digest


def _first_rows(batch: Nest, rows: int, max_rows: int) -> Nest:
    """Return the first ``rows`` of the ``max_rows`` rows of every tensor of a batch."""
    import tensorflow as tf

    def first(x: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> tf.Tensor | tf.RaggedTensor | tf.SparseTensor:
        if isinstance(x, tf.SparseTensor):
            return tf.sparse.slice(x, [0] * len(x.shape), tf.concat([[rows], x.dense_shape[1:]], 0))
        return x[:rows]

    return batch if rows == max_rows else tf.nest.map_structure(first, batch)
