"""The tutorials' PartitionedVariable: a matrix in four parts, each computed on and updated by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import hvdkit as hk  # before TensorFlow: a launched rank loads it and MPI in the order that works

# isort: split
import numpy as np
import tensorflow as tf
from console import say

PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Part p of four becomes (p + 2) times itself plus p + 1, again and again; the result is compared with NumPy's."""

    rows: int = 1000
    """Rows of the matrix, and its columns."""
    rounds: int = 100
    """How often every part is updated."""
    every: int = 10
    """Print the matrix every so many rounds."""
    partition: Literal["div", "mod"] = "div"
    """Contiguous rows on each rank, or every N-th row."""
    dtype: Literal["float64", "float32"] = "float64"
    """The last part grows to 5^100: float32 overflows on the way, and says so."""


def run(config: Config) -> np.ndarray | None:
    """Update all parts on their ranks; return the whole on the chief.

    The four parts are the tutorials', whatever the number of ranks: each rank updates the rows that it holds.

    Raises:
        NonFiniteError: on every rank, where values overflow; it names the round and a rank.
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
    """Raise on every rank where some rank's rows have overflowed."""
    finite = hk.allgather_object(bool(tf.reduce_all(tf.math.is_finite(matrix.local))))
    if not all(finite):
        raise hk.NonFiniteError(
            f"matrix: not finite on rank {finite.index(False)} by round {number}; {matrix.dtype.name} ends at "
            f"{matrix.dtype.max:.0e}: use fewer rounds, or --dtype float64"
        )
