"""The tutorials' PartitionedVariable: a matrix in four parts, each computed and updated separately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import hvdkit as hk  # before TensorFlow: a launched rank must load it and MPI in this order

# isort: split
import numpy as np
import tensorflow as tf
from console import say

PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Multiply part p of four by p + 2 and add p + 1, repeatedly; compare the result with NumPy's."""

    rows: int = 1000
    """Number of rows, and of columns, of the matrix."""
    rounds: int = 100
    """Number of updates of every part."""
    every: int = 10
    """Number of rounds between printing the matrix."""
    partition: Literal["div", "mod"] = "div"
    """Contiguous rows on each rank, or every N-th row."""
    dtype: Literal["float64", "float32"] = "float64"
    """The last part grows to 5^100: float32 overflows, which is an error."""


def run(config: Config) -> np.ndarray | None:
    """Update all parts on their ranks; return the whole matrix on the chief.

    The four parts do not depend on the number of ranks: each rank updates the rows that it owns.

    Raises:
        NonFiniteError: on every rank, if values overflow; the message names the round and a rank.
    """
    matrix = hk.PartitionedVariable(
        (config.rows, config.rows), config.dtype, "ones", partition=config.partition, name="matrix"
    )
    part = tf.constant([PARTS * row // config.rows for row in matrix.local_rows], config.dtype)[:, None]
    expected = np.ones((config.rows, config.rows), config.dtype)
    whole_part = (PARTS * np.arange(config.rows) // config.rows)[:, None].astype(config.dtype)
    whole = None
    for number in range(1, config.rounds + 1):
        matrix.apply(lambda rows: rows * (part + 2) + (part + 1))
        if hk.is_chief():
            with np.errstate(over="ignore"):
                expected = expected * (whole_part + 2) + (whole_part + 1)
        if number % config.every == 0 or number == config.rounds:
            check_finite(matrix, number)
            whole = matrix.gather(root=0)
            if hk.is_chief():
                say(f"round {number}\n{np.array2string(whole, threshold=20, precision=6)}")
    if hk.is_chief() and whole is not None:
        same = "equal, bit for bit" if (whole == expected).all() else "NOT equal"
        say(f"{hk.size()} ranks and NumPy: {same}")
        if not (whole == expected).all():
            raise AssertionError(f"largest difference {np.abs(whole - expected).max()}")
    return whole


def check_finite(matrix: hk.PartitionedVariable, number: int) -> None:
    """Raise an error on every rank if any rank's rows have overflowed."""
    finite = hk.allgather_object(bool(tf.reduce_all(tf.math.is_finite(matrix.local))))
    if not all(finite):
        raise hk.NonFiniteError(
            f"matrix: not finite on rank {finite.index(False)} by round {number}; {matrix.dtype.name} overflows at "
            f"{matrix.dtype.max:.0e}: use fewer rounds, or --dtype float64"
        )
