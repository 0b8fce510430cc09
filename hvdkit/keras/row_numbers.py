"""Find steps that take rows of their batch by number, such as the positives in ``anchors, positives = x[0], x[1]``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from hvdkit.errors import HvdkitError, describe, see

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Tensors

_COPIES = {"Cast", "Identity"}


@contextlib.contextmanager
def refusing_rows_by_number(step: str, data: Tensors) -> Iterator[None]:
    """Raise HvdkitError if the step traced in this context takes another row of its batch than the first by its number.

    Each rank has other rows at that place. The first row is often taken where all rows are equal. In eager mode it does
    nothing.
    """
    tensors = [x for x in tf.nest.flatten(data) if tf.inside_function() and isinstance(x, tf.Tensor)]
    try:
        yield
    except ValueError as error:  # of a share whose number of rows is known
        found = re.search(r"slice index (-?\d+) of dimension 0 out of bounds", str(error))
        if found and tensors:
            raise _refusal(step, tensors, int(found[1])) from error
        raise
    for x in tensors:
        if number := next((number for number in _numbers_of(x) if number != 0), None):
            raise _refusal(step, [x], number)


def _refusal(step: str, tensors: list[tf.Tensor], number: int) -> HvdkitError:
    shapes = ", ".join(f"[{', '.join(map(str, ['rows', *x.shape[1:]]))}]" for x in tensors)
    got = f"a tensor {shapes}, of which the step takes row {number} by its number"
    remedy = (
        "put what belongs together on another axis, or pass the tensor to every rank with "
        "hk.data.divide(dataset, 'whole'); loss_scope='rows' accepts the step"
    )
    page = see("pitfalls#a-step-takes-rows-by-their-number")
    return HvdkitError(describe(f"batch of {step}", got, "one example in each row", f"{remedy}; {page}"))


def _numbers_of(x: tf.Tensor) -> Iterator[int]:
    """Yield the constant numbers by which rows of a tensor, or of its copies, are taken."""
    for op in x.consumers():
        if op.type in _COPIES:
            yield from _numbers_of(op.outputs[0])
        elif op.type == "StridedSlice" and op.inputs[0] is x and op.get_attr("shrink_axis_mask") & 1:
            begin = tf.get_static_value(op.inputs[1])
            if begin is not None:
                yield int(begin[0])
