"""Global batches as a dataset for Keras ``fit``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from hvdkit.errors import describe


def keras_dataset(
    open_at: Callable[[int], Iterator[Any]], position: Callable[[], tuple[int, int]], steps: int, spec: Any
) -> Any:
    """Return a ``tf.data.Dataset`` of ``steps`` elements, each pass over which goes on where the one before ended.

    Why not a ``keras.utils.PyDataset``: ``fit`` shuffles the order of its batches by default, with each process's own
    random state, so that ranks would train on rows of different global batches; and it calls ``on_epoch_end``
    before the first epoch as well as after each. It does neither to a ``tf.data.Dataset``. Where a pass starts
    is settled when it is asked for its first batch: Keras creates iterators that it never reads.

    Args:
        open_at: Returns an iterator over the batches ``(x, y, sample_weight)`` from a global step on.
        position: Returns how often the data have been restored, and the global step they are at. The first pass, and
            the first after a restore, starts there.
        steps: Batches in a pass.
        spec: The ``tf.TypeSpec`` structure of a batch ``(x, y)``.
    """
    import tensorflow as tf

    origin = position()
    passes = itertools.count()

    def one_pass() -> Iterator[Any]:
        nonlocal origin, passes
        if origin[0] != position()[0]:
            origin, passes = position(), itertools.count()
        start = origin[1] + next(passes) * steps
        read = 0
        for batch in itertools.islice(open_at(start), steps):
            read += 1
            yield _lists_to_tuples(batch)
        if read < steps:
            raise ValueError(
                describe("epochs", f"a pass that ends after step {start + read}", f"{steps} more steps",
                         "let GlobalBatches(epochs=) be at least the epochs of fit, or None")
            )  # fmt: skip

    spec = _lists_to_tuples(spec)
    rows = tf.nest.flatten(spec)[0].shape[0]
    signature = (*spec, tf.TensorSpec([rows], tf.float32))
    dataset = tf.data.Dataset.from_generator(one_pass, output_signature=signature)
    options = tf.data.Options()
    # There is nothing to tune, and an iterator that is dropped half read, when fit stops within an epoch, waits for
    # the tuner's thread: 10 s, at times two minutes.
    options.autotune.enabled = False
    return dataset.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2).with_options(options)


def _lists_to_tuples(structure: Any) -> Any:
    """tf.data takes a list for one tensor."""
    if isinstance(structure, dict):
        return {key: _lists_to_tuples(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_lists_to_tuples(value) for value in structure)
    return structure
