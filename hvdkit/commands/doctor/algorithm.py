"""Detects the algorithm of MPI's allreduce from the order of its additions.

    mpirun -np 4 python algorithm.py

A floating-point sum of four numbers depends on its association. Ranks allreduce random numbers, and rank 0 finds which
of the fifteen associations of four numbers gives each part of the result, bit for bit. A ring adds each part in rank
order, starting at a different rank; recursive doubling (or halving) adds pairs of pairs; a reduction to one rank adds
all parts in the same order.
As a script, it does not import TensorFlow, and prints one JSON line: bytes -> algorithm.

MPI's tool interface (MPI_T) does not provide this information. In Open MPI 4.1.8, coll_tuned_allreduce_algorithm is 0
both for its built-in rules and for those of a file, and none of its 1,117 control and 5 performance variables contains
the choice for a given size.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np

RANKS = 4
SIZES = (4096, 8 * 1024 * 1024)
_BLOCKS = 64


def main() -> None:
    """Allreduce each size, and print the algorithms that rank 0 detects."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    algorithms = {}
    for nbytes in SIZES:
        values = np.random.default_rng(world.rank).normal(size=nbytes // 4).astype(np.float32)
        result = np.empty_like(values)
        world.Allreduce(values, result)
        inputs = world.gather(values)
        if inputs is not None:  # on rank 0
            algorithms[nbytes] = detect_algorithm(inputs, result)
    if world.rank == 0:
        print("hvdkit-algorithm " + json.dumps(algorithms), flush=True)


def detect_algorithm(inputs: Sequence[np.ndarray], result: np.ndarray) -> str:
    """Return the name of the algorithm that computes ``result`` as the sum of ``inputs``.

    Args:
        inputs: four float32 arrays [n], by rank.
        result: float32 [n], their sum as computed by MPI.

    Returns:
        "ring", "recursive doubling" (or halving), "one rank after the other", "another", or "wrong" if the sum is
        wrong.

    Example:
        >>> x = [np.random.default_rng(r).normal(size=4096).astype(np.float32) for r in range(4)]
        >>> detect_algorithm(x, (x[0] + x[1]) + (x[2] + x[3]))
        'recursive doubling'
    """
    if not np.allclose(sum(x.astype(np.float64) for x in inputs), result, atol=1e-5):
        return "wrong"
    pairings = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2))
    pairs = [(inputs[a] + inputs[b]) + (inputs[c] + inputs[d]) for a, b, c, d in pairings]
    if any(np.array_equal(pair, result) for pair in pairs):
        return "recursive doubling"
    if any(np.array_equal(_chain(inputs, order), result) for order in itertools.permutations(range(RANKS))):
        return "one rank after the other"
    # In a ring, each part's sum starts at a different rank: part k at rank k+1.
    rings = [_chain(inputs, np.roll(range(RANKS), -start)) for start in range(RANKS)]
    starts = [
        {start for start, ring in enumerate(rings) if np.array_equal(ring[block], result[block])}
        for block in _blocks(result)
    ]
    return "ring" if all(starts) and len(set.union(*starts)) == RANKS else "another"


def _chain(inputs: Sequence[np.ndarray], order: Sequence[int] | np.ndarray) -> np.ndarray:
    total = inputs[order[0]]
    for rank in order[1:]:
        total = total + inputs[rank]
    return total


def _blocks(result: np.ndarray) -> list[slice]:
    """Return slices of the array that are small enough to lie within one part of a ring."""
    edges = np.linspace(0, len(result), _BLOCKS + 1).astype(int)
    return [slice(a + (b - a) // 4, b - (b - a) // 4) for a, b in itertools.pairwise(edges)]


if __name__ == "__main__":
    main()
