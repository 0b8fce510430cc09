"""A shuffle for files that are read in blocks: blocks are permuted, then rows within windows of them.

A Parquet file is read by row groups, and other files fastest in long runs. A full shuffle would read a block for each
row, and a shuffle of the global batches' rows would make every rank read every block. So the epoch's rows are divided
into lanes:

    n   examples             B   examples in a global batch          b   examples in a short last batch, n mod B
    S   full batches, n // B              L   lanes, 1 <= L <= B

1. The blocks, in pseudo-random order, form one sequence of n examples.
2. Lane l has rows ``[l*B//L, (l+1)*B//L)`` of every global batch. Its examples are a contiguous part of the sequence:
   in a batch of c rows of this lane, ``S*c`` examples, and those of its rows that are less than b.
3. The examples of a lane are read in order, in windows of w examples. Each window is shuffled. The first window of a
   lane is shorter, by another part of w in each lane, so that lanes need their next blocks at different steps.

A rank r of N has rows ``[r*B//N, (r+1)*B//N)``, so if N divides L, it reads whole lanes, that is n/N examples of the
epoch and at most two blocks more per lane. The order itself does not depend on N. A batch has examples of L windows,
from L places of the sequence.

The sequences of all epochs, one after the other, are the passes over the source. In a mixture
(:mod:`hvdkit.data.mixtures`), an epoch may have a part of a pass, or several.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache, partial

import numpy as np

from hvdkit.data.order import shuffled_indices

_KEPT_PASSES = 4


class Lanes:
    """The lanes of an epoch: maps positions ``[0, n)``, in steps of B, to lanes and places in the sequence.

    Args:
        examples: n.
        batch_size: B.
        lanes: L.

    Attributes:
        starts: int64 ``[lanes + 1]``: the first place of each lane, and n.

    Example:
        >>> lane, place = Lanes(8, batch_size=4, lanes=2)(np.arange(8))
        >>> lane.tolist(), place.tolist()
        ([0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 4, 5, 2, 3, 6, 7])
    """

    def __init__(self, examples: int, batch_size: int, lanes: int):
        self._batch_size = batch_size
        steps, short = divmod(examples, batch_size)
        self._first_rows = np.arange(lanes + 1) * batch_size // lanes
        self.starts = steps * self._first_rows + np.minimum(short, self._first_rows)

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lane and the place of each position, int64 of the shape of ``positions``."""
        step, row = np.divmod(positions, self._batch_size)
        lane = np.searchsorted(self._first_rows, row, side="right") - 1
        first = self._first_rows[lane]
        return lane, self.starts[lane] + step * (self._first_rows[lane + 1] - first) + row - first


class BlockOrder:
    """The order of a source's blocks and rows in an epoch: maps places in the sequences of all passes to examples.

    Takes 24 bytes per block, and 8 bytes for each row of the windows that this rank reads.

    Args:
        block_starts: int64 ``[blocks + 1]``: the first example of each block, and n.
        lane_starts: int64 ``[lanes + 1]``: the first place of each lane, and the end of the last.
        window: w, in examples of a lane; at least 1.
        seed: An integer >= 0; None keeps the order of blocks and rows.

    Example:
        >>> lanes = Lanes(8, batch_size=4, lanes=2)
        >>> order = BlockOrder(np.array([0, 4, 8]), lanes.starts, window=2, seed=0)
        >>> order(*lanes(np.arange(8))).reshape(2, 4).tolist()  # each lane has a block, and two rows of each batch
        [[0, 1, 4, 6], [2, 3, 5, 7]]
    """

    def __init__(self, block_starts: np.ndarray, lane_starts: np.ndarray, window: int, seed: int | None):
        self._block_starts = block_starts
        self._lane_starts = lane_starts
        self._window = window
        self._seed = seed
        # What the first window of each lane lacks: multiples of the golden ratio, which are spread evenly.
        self._missing = np.array([(lane * 0x9E3779B9 % 2**32) * window >> 32 for lane in range(len(lane_starts) - 1)])
        self._pass = lru_cache(_KEPT_PASSES)(partial(_blocks_in_pass, block_starts, seed))
        self._windows: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def __call__(self, lanes: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the example at each place of a lane, int64 of the shape of ``places``."""
        lane = np.ravel(lanes)
        place = np.ravel(places)
        window = (place - self._lane_starts[lane] + self._missing[lane]) // self._window
        changes = np.flatnonzero((np.diff(lane) != 0) | (np.diff(window) != 0)) + 1
        examples = np.empty(place.shape, np.int64)
        for start, stop in zip([0, *changes], [*changes, len(place)], strict=True):
            if start < stop:
                first, of_window = self._window_of(int(lane[start]), int(window[start]))
                examples[start:stop] = of_window[place[start:stop] - first]
        return examples.reshape(np.shape(places))

    def _window_of(self, lane: int, window: int) -> tuple[int, np.ndarray]:
        """Return the first place of a window, and its examples in their order."""
        lane_start, lane_end = map(int, self._lane_starts[lane : lane + 2])
        start = lane_start - int(self._missing[lane]) + window * self._window
        first = max(start, lane_start)
        end = min(start + self._window, lane_end)
        examples = self._windows.get((lane, window))
        if examples is None:
            examples = self._in_sequence(first, end)
            if self._seed is not None:
                key = (self._seed, 1, int(self._lane_starts[0]), lane, window)
                examples = examples[shuffled_indices(end - first, key)]
            self._windows[lane, window] = examples
            while len(self._windows) > 2 * len(self._lane_starts):
                self._windows.popitem(last=False)
        return first, examples

    def _in_sequence(self, first: int, end: int) -> np.ndarray:
        """Return the examples in the places ``[first, end)``, before rows are shuffled."""
        size = int(self._block_starts[-1])
        parts = []
        for number in range(first // size, -(-end // size)):
            block_ends, shifts = self._pass(number)
            places = np.arange(max(first - number * size, 0), min(end - number * size, size))
            parts.append(places + shifts[np.searchsorted(block_ends, places, side="right")])
        return np.concatenate(parts)


def _blocks_in_pass(block_starts: np.ndarray, seed: int | None, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each block ends in the sequence of a pass, and the differences from places to examples."""
    blocks = np.arange(len(block_starts) - 1)
    if seed is not None:
        blocks = shuffled_indices(len(blocks), (seed, 0, number))
    sizes = np.diff(block_starts)[blocks]
    block_ends = np.cumsum(sizes)
    return block_ends, block_starts[blocks] - (block_ends - sizes)
