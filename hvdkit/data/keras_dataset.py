"""Global batches as a dataset for Keras ``fit``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from hvdkit.errors import describe

# TensorFlow takes 0.2 ms to get something from a Python generator. So small batches come several at once, of about
# so many bytes, and are cut apart by TensorFlow, without Python.
_BYTES_AT_ONCE, _MOST_AT_ONCE = 2**20, 16


def batches_at_once(spec: Any) -> int:
    """Return how many batches to hand over to TensorFlow at once, of a ``tf.TypeSpec`` structure of dense tensors."""
    import tensorflow as tf

    size = sum(s.shape.num_elements() * s.dtype.size for s in tf.nest.flatten(_lists_to_tuples(spec)))
    return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // max(1, size)))


def keras_dataset(
    open_at: Callable[[int], Iterator[tuple[int, Any]]],
    position: Callable[[], tuple[int, int]],
    steps: int,
    spec: Any,
    *,
    at_once: int,
) -> Any:
    """Return a ``tf.data.Dataset`` of ``steps`` elements, each pass over which goes on where the one before ended.

    Why not a ``keras.utils.PyDataset``: ``fit`` shuffles the order of its batches by default, with each process's own
    random state, so that ranks would train on rows of different global batches; and it calls ``on_epoch_end``
    before the first epoch as well as after each. It does neither to a ``tf.data.Dataset``. Where a pass starts
    is settled when it is asked for its first batch: Keras creates iterators that it never reads.

    Args:
        open_at: Returns an iterator from a global step on over numbers of batches, at most ``at_once``, and the batches
            ``(x, y, sample_weight)``, with an axis for them in front where ``at_once`` is not 1.
        position: Returns how often the data have been restored, and the global step they are at. The first pass, and
            the first after a restore, starts there.
        steps: Batches in a pass.
        spec: The ``tf.TypeSpec`` structure of a batch ``(x, y)``.
        at_once: How many batches may come at once.
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
        for number, batches in open_at(start):
            yield _lists_to_tuples(batches)
            read += number
            if read == steps:
                return
        raise ValueError(
                describe("epochs", f"a pass that ends after step {start + read}", f"{steps} more steps",
                         "let GlobalBatches(epochs=) be at least the epochs of fit, or None")
            )  # fmt: skip

    spec = _lists_to_tuples(spec)
    rows = tf.nest.flatten(spec)[0].shape[0]
    spec = (*spec, tf.TensorSpec([rows], tf.float32))
    made = spec
    if at_once > 1:
        made = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), spec)
    dataset = tf.data.Dataset.from_generator(one_pass, output_signature=made)
    if at_once > 1:
        dataset = dataset.prefetch(1).flat_map(lambda *several: tf.data.Dataset.from_tensor_slices(several))
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
