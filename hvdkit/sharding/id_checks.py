"""Invalid ids and weights: detected on one rank, raised on all ranks before anything is updated.

If only one rank raised, the others would wait forever. So the fault is sent with the ids, as a header of three 32-bit
words, and every rank raises the same error in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.errors import describe

# Number of the failed check (1 for the first, 0: valid), and the value in two halves, as ids may be sent in 32 bits.
FAULT_CODE_LENGTH = 3
_REFUSED = -1  # instead of the number of a check


class Check(NamedTuple):
    """A check of one feature's values, with the texts of its error message.

    Attributes:
        values: ``[n]`` integers, or None.
        invalid: whether each value is invalid, ``[n]`` bool; None if there is nothing to check. All ranks list the same
            checks, in the same order.
        what: the argument, "ids" or "weights".
        where: where the values are used, e.g. ``"feature 'user' of table 'users'"``.
        expected: the expected values.
        remedy: the suggested fix.
    """

    values: tf.Tensor | None
    invalid: tf.Tensor | None
    what: str
    where: str
    expected: str
    remedy: str


class Fault(NamedTuple):
    """The first invalid value on this rank.

    Attributes:
        code: ``[3]`` int32: number of the failed check (0: valid), low and high half of the value.
        texts: the ``what``, ``where``, ``expected`` and ``remedy`` of each check.
    """

    code: tf.Tensor
    texts: tuple[tuple[str, str, str, str], ...]


def as_ids(ids: npt.ArrayLike | tf.Tensor, name: str) -> tf.Tensor:
    """Return ``ids`` as a tensor of int32, int64 or uint64. Raises TypeError if they are not integers."""
    tensor = tf.convert_to_tensor(ids) if tf.is_tensor(ids) or np.size(ids) else tf.zeros(np.shape(ids), tf.int64)
    if not tensor.dtype.is_integer:
        raise TypeError(
            describe(f"ids of {name!r}", tensor.dtype.name, "integers", "cast them with tf.cast(ids, 'int64')")
        )
    return tensor if tensor.dtype in (tf.int32, tf.int64, tf.uint64) else tf.cast(tensor, tf.int64)


def range_check(ids: tf.Tensor, rows: int, where: str, remedy: str = "check the data") -> Check:
    """Return the check that ids ``[n]`` are valid for a table with ``rows`` rows."""
    return Check(ids, is_out_of_range(ids, rows), "ids", where, f"0 to {rows - 1}", remedy)


def find_fault(checks: Sequence[Check]) -> Fault:
    """Return the first invalid value on this rank."""
    texts = tuple(check[2:] for check in checks)
    present = [(number, check) for number, check in enumerate(checks, 1) if check.invalid is not None]
    if not present:
        return Fault(tf.zeros([FAULT_CODE_LENGTH], tf.int32), texts)
    invalid_values = tf.concat([check.invalid for _, check in present], 0)

    def first_fault() -> tf.Tensor:
        ends = tf.cumsum(tf.stack([tf.size(check.values) for _, check in present]))
        first = tf.argmax(invalid_values, output_type=tf.int32)
        number = tf.gather([number for number, _ in present], tf.searchsorted(ends, first[None], side="right"))
        value = tf.concat([tf.cast(check.values, tf.int64) for _, check in present], 0)[first]
        return tf.concat([number, tf.bitcast(value, tf.int32)], 0)

    code = tf.cond(tf.reduce_any(invalid_values), first_fault, lambda: tf.zeros([FAULT_CODE_LENGTH], tf.int32))
    return Fault(tf.ensure_shape(code, [FAULT_CODE_LENGTH]), texts)


def refusal() -> Fault:
    """Return the fault that a rank sends if it has rejected its inputs, so that other ranks do not wait."""
    return Fault(tf.constant([_REFUSED, 0, 0], tf.int32), ())


def is_out_of_range(ids: tf.Tensor, rows: int) -> tf.Tensor:
    """Return True for each id that is out of range for a table with ``rows`` rows."""
    if rows > ids.dtype.max:  # all non-negative ids are in range
        return ids < 0
    return tf.logical_or(ids < 0, ids >= tf.constant(rows, ids.dtype))


def raise_everywhere(codes: tf.Tensor, fault: Fault) -> list[tf.Operation]:
    """Raise if any rank has a fault; inside a graph, return the op that raises.

    Args:
        codes: the codes of all ranks' faults, ``[N, 3]``.
        fault: this rank's fault, for the texts.
    """
    if tf.executing_eagerly():
        for rank, (number, *value) in enumerate(codes.numpy()):
            if number == _REFUSED or number > len(fault.texts):
                raise ValueError(f"lookup: rank {rank} rejected its inputs; see that rank's error")
            if number:
                what, where, expected, remedy = fault.texts[number - 1]
                got = np.array(value, np.int32).view(np.int64)[0]
                raise ValueError(describe(what, f"{got} in {where} on rank {rank}", expected, remedy))
        return []
    if not fault.texts:
        return []

    def stop() -> tf.Tensor:
        with tf.control_dependencies([tf.raw_ops.Assert(condition=False, data=[_graph_message(codes, fault)])]):
            return tf.constant(False)

    return [tf.cond(tf.reduce_any(codes[:, 0] > 0), stop, lambda: tf.constant(True)).op]


def _graph_message(codes: tf.Tensor, fault: Fault) -> tf.Tensor:
    rank = tf.argmax(codes[:, 0] > 0, output_type=tf.int32)
    number = codes[rank, 0] - 1
    value = tf.bitcast(codes[rank, 1:], tf.int64)
    # TensorFlow would escape quotes with backslashes.
    texts = [tf.gather([text.replace("'", "") for text in column], number) for column in zip(*fault.texts, strict=True)]
    value = tf.strings.as_string(value)
    on = tf.strings.as_string(rank)
    what, where, expected, remedy = texts
    return tf.strings.join(
        [what, ": got ", value, " in ", where, " on rank ", on, ", expected ", expected, "; ", remedy]
    )
