"""A shuffle for files that are read in blocks: blocks are permuted, then rows within windows of them.

A Parquet file is read by row groups, and other files fastest in long runs. A full shuffle would read a block for each
row, and a shuffle of the global batches' rows would make every rank read every block. So the epoch's rows are divided
into lanes:

    n   examples             B   examples in a global batch          b   examples in a short last batch, n mod B
    S   full batches, n // B              L   lanes, 1 <= L <= B

1. The blocks, in pseudo-random order, form one sequence of n examples.
2. Lane l has rows ``[l*B//L, (l+1)*B//L)`` of every global batch. Its examples are a contiguous part of the sequence:
   in a batch of c rows of this lane, ``S*c`` examples, and those of its rows that are less than b.
3. The examples of a lane are read in order, in windows of w examples. Each window is shuffled.

A rank r of N has rows ``[r*B//N, (r+1)*B//N)``, so if N divides L, it reads whole lanes, that is n/N examples of the
epoch and at most two blocks more per lane. The order itself does not depend on N. A batch has examples of L windows,
from L places of the sequence.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from hvdkit.data.order import shuffled_indices


class BlockOrder:
    """The order of an epoch: maps positions ``[0, n)``, in steps of B, to examples.

    Takes 16 bytes per block, and 8 bytes for each row of the windows that this rank reads.

    Args:
        starts: int64 ``[blocks + 1]``: the first example of each block, and n.
        batch_size: B.
        lanes: L.
        window: w, in examples of a lane; at least 1.
        key: Integers >= 0, for example the seed and the epoch; None keeps the order of blocks and rows, and only
            divides them among lanes.

    Example:
        >>> order = BlockOrder(np.array([0, 4, 8]), batch_size=4, lanes=2, window=1, key=None)
        >>> order(np.arange(8)).reshape(2, 4).tolist()  # each lane has a block, and two rows of each batch
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    def __init__(self, starts: np.ndarray, batch_size: int, lanes: int, window: int, key: tuple[int, ...] | None):
        examples, self._batch_size, self._window, self._key = int(starts[-1]), batch_size, window, key
        blocks = np.arange(len(starts) - 1) if key is None else shuffled_indices(len(starts) - 1, (*key, 0))
        sizes = np.diff(starts)[blocks]
        self._block_ends = np.cumsum(sizes)  # in the sequence
        self._shifts = starts[blocks] - (self._block_ends - sizes)  # from places in the sequence to examples
        steps, short = divmod(examples, batch_size)
        self._first_rows = np.arange(lanes + 1) * batch_size // lanes
        self._first_examples = steps * self._first_rows + np.minimum(short, self._first_rows)  # in the sequence
        self._windows: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the example at each position, int64 of the shape of ``positions``."""
        step, row = np.divmod(np.ravel(positions), self._batch_size)
        lane = np.searchsorted(self._first_rows, row, side="right") - 1
        first = self._first_rows[lane]
        window, place = np.divmod(step * (self._first_rows[lane + 1] - first) + row - first, self._window)
        changes = np.flatnonzero((np.diff(lane) != 0) | (np.diff(window) != 0)) + 1
        examples = np.empty(row.shape, np.int64)
        for start, stop in zip([0, *changes], [*changes, len(row)], strict=True):
            examples[start:stop] = self._window_of(int(lane[start]), int(window[start]))[place[start:stop]]
        return examples.reshape(np.shape(positions))

    def _window_of(self, lane: int, window: int) -> np.ndarray:
        """Return the examples of a window, in their order."""
        examples = self._windows.get((lane, window))
        if examples is None:
            start = int(self._first_examples[lane]) + window * self._window
            places = np.arange(start, min(start + self._window, int(self._first_examples[lane + 1])))
            if self._key is not None:
                places = places[shuffled_indices(len(places), (*self._key, 1, lane, window))]
            examples = places + self._shifts[np.searchsorted(self._block_ends, places, side="right")]
            self._windows[lane, window] = examples
            while len(self._windows) > 2 * len(self._first_rows):
                self._windows.popitem(last=False)
        return examples
