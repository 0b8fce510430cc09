"""Several sources as one, in fixed proportions.

The examples of a mixture have places, counted from the start of training: place p of epoch e is ``e*E + p``, where E is
the number of examples in an epoch. Which source a place draws from, and how many draws from that source came before,
depends on p and the weights alone, so that every position can be computed on its own. Draw k from a source of n
examples is example ``k % n`` of its pass ``k // n``: a source that is too short is repeated, in another order, and one
that is not used up is continued in the next epoch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import optree

from hvdkit.data.aligned import Nest
from hvdkit.data.arrays import ArraySource
from hvdkit.data.block_order import Lanes
from hvdkit.data.files.source import EpochReader, FileSource
from hvdkit.data.order import Order, Shuffle
from hvdkit.errors import describe, integer

if TYPE_CHECKING:
    import tensorflow as tf

_BITS = 30
_KEPT_PASSES = 2
Places = TypeVar("Places", int, np.ndarray)
Leaf: TypeAlias = "np.ndarray | tf.Tensor | tf.RaggedTensor | tf.SparseTensor"  # of a batch


class Proportions:
    """Deals the places 0, 1, ... to sources: of the first p places, source i gets its part of p, within two.

    The sources are the leaves of a Huffman tree of their weights. A node deals ``floor(p*w + 1/2)`` of its first p
    places to its first child, whose part of the node's weight is w, and the others to its second. Rounding of the
    parents counts less at every level, because the part of an inner node is at most 2/3.

    Args:
        weights: Positive numbers, one for each source. The parts of nodes are rounded to ``2**-30``.

    Example:
        >>> Proportions([2, 1, 1]).draws(np.arange(8))[0].tolist()
        [0, 1, 0, 2, 0, 1, 0, 2]
        >>> Proportions([2, 1, 1]).counts(1000)
        [500, 250, 250]
    """

    def __init__(self, weights: Sequence[float]):
        nodes = [(float(weight), i) for i, weight in enumerate(weights)]
        heapq.heapify(nodes)
        splits = []
        for node in range(len(weights), 2 * len(weights) - 1):
            light, first = heapq.heappop(nodes)
            heavy, second = heapq.heappop(nodes)
            splits.append((node, first, second, round(light / (light + heavy) * 2**_BITS)))
            heapq.heappush(nodes, (light + heavy, node))
        self._sources = len(weights)
        self._splits = splits[::-1]

    def draws(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each place, and how many earlier places draw from it, int64 like ``places``."""
        source = np.full(places.shape, 2 * self._sources - 2)
        draw = places
        for node, first, second, part in self._splits:
            is_here = source == node
            before = _part(draw, part)
            is_first = is_here & (_part(draw + 1, part) > before)
            draw = np.where(is_first, before, np.where(is_here, draw - before, draw))
            source = np.where(is_first, first, np.where(is_here, second, source))
        return source, draw

    def counts(self, places: int) -> list[int]:
        """Return how many of the first ``places`` places draw from each source."""
        counts = [places] * (2 * self._sources - 1)
        for node, first, second, part in self._splits:
            counts[first] = _part(counts[node], part)
            counts[second] = counts[node] - counts[first]
        return counts[: self._sources]


def _part(places: Places, part: int) -> Places:
    """Return ``floor(places * part / 2**30 + 1/2)`` without overflow."""
    high = places >> _BITS
    low = places & (2**_BITS - 1)
    rounded: Places = high * part + ((low * part + 2 ** (_BITS - 1)) >> _BITS)
    return rounded


class Mixture:
    """Several sources in fixed proportions, from :func:`hvdkit.data.mixture`.

    Attributes:
        sources: The sources.
        weights: The weight of each source.
        examples: E, the number of examples in an epoch.
        structure: A batch.
    """

    def __init__(
        self, sources: Sequence[ArraySource | FileSource], weights: Sequence[float], epoch_examples: int | None
    ):
        self.sources = list(sources)
        self.weights = [float(weight) for weight in weights]
        self.examples = epoch_examples or sum(source.examples for source in sources)
        self.structure = sources[0].structure
        self._proportions = Proportions(self.weights)
        self._first_examples = np.cumsum([0, *(source.examples for source in sources)])

    def counts(self, examples: int) -> list[int]:
        """Return how many of the first ``examples`` examples of the training come from each source.

        Example:
            >>> mixture([np.arange(6), np.arange(4)], [3, 1]).counts(100)
            [75, 25]
        """
        return self._proportions.counts(integer("examples", examples, minimum=0))

    def order(self, shuffle: Shuffle, epoch: int, batch_size: int) -> Order:
        """Return the order of an epoch. Examples are numbered through all sources."""
        orders = [_order_of_draws(source, self._seeded(shuffle, i)) for i, source in enumerate(self.sources)]
        lanes = None
        if shuffle.mode == "blocks":
            assert shuffle.lanes is not None
            lanes = Lanes(self.examples, batch_size, shuffle.lanes)
            counts = np.array([self._proportions.counts(int(at) + epoch * self.examples) for at in lanes.starts])
            orders = []
            for i, source in enumerate(self.sources):
                assert isinstance(source, FileSource)
                orders.append(source.block_order(self._seeded(shuffle, i), counts[:, i]))

        def of(positions: np.ndarray) -> np.ndarray:
            lane, places = (positions, positions) if lanes is None else lanes(positions)
            source, draws = self._proportions.draws(places + epoch * self.examples)
            examples = np.empty(positions.shape, np.int64)
            for i, order in enumerate(orders):
                is_here = source == i
                examples[is_here] = self._first_examples[i] + order(lane[is_here], draws[is_here])
            return examples

        return of

    def reader(self, shuffle: Shuffle) -> EpochReader:
        """Return a reader for an epoch."""
        readers = [
            each.reader(shuffle) if isinstance(each, FileSource) else EpochReader(each.read) for each in self.sources
        ]

        def read(indices: np.ndarray) -> Nest:
            source = np.searchsorted(self._first_examples, indices, side="right") - 1
            parts = []
            rows = []
            for i in np.unique(source).tolist():
                rows.append(np.flatnonzero(source == i))
                numbers = indices[rows[-1]] - self._first_examples[i]
                parts.append(readers[i].read(numbers))
            if len(parts) == 1:
                return parts[0]
            places = np.argsort(np.concatenate(rows))
            return optree.tree_map(lambda *leaves: _interleaved(leaves, places), *parts)

        def next_batch() -> None:
            for each in readers:
                each.next_batch()

        return EpochReader(read, next_batch)

    def read_times(self, shuffle: Shuffle, batch_size: int, size: int) -> float:
        """Return how many times its part of the files a rank reads in an epoch, approximately."""
        times = [s.read_times(shuffle, batch_size, size) if isinstance(s, FileSource) else 1 for s in self.sources]
        return float(np.average(times, weights=self.weights))

    @property
    def is_small(self) -> bool:
        """Whether the blocks of each source take at most a GiB of memory."""
        return all(source.is_small for source in self.sources if isinstance(source, FileSource))

    def batch_spec(self, rows: int | None) -> Nest:
        """Return the ``tf.TypeSpec`` structure of a batch of ``rows`` rows; None for any number.

        Raises:
            ValueError: The sources have unlike batches.
        """
        specs = [source.batch_spec(rows) for source in self.sources]
        for i, spec in enumerate(specs):
            if spec != specs[0]:
                remedy = "use source.map(function) to make them alike"
                raise ValueError(
                    describe(f"sources[{i}]", f"batches of {spec}", f"{specs[0]}, as of sources[0]", remedy)
                )
        return specs[0]

    def fingerprint(self) -> dict[str, object]:
        """Return the fingerprints of the sources, and their weights."""
        each = [source.fingerprint() for source in self.sources]
        arrays = {f"sources[{i}]": fingerprint["arrays"] for i, fingerprint in enumerate(each)}
        rows = [fingerprint["rows"] for fingerprint in each]
        return {"examples": self.examples, "weights": self.weights, "arrays": arrays, "rows": rows}

    def identity(self, shuffle: Shuffle) -> dict[str, object]:
        """Return what determines the global order in addition to the seed and sizes."""
        sources = [{"examples": source.examples, **source.identity(shuffle)} for source in self.sources]
        return {"weights": self.weights, "sources": sources}

    @staticmethod
    def _seeded(shuffle: Shuffle, source: int) -> Shuffle:
        """Return the shuffle of a source: sources of equal length have unlike orders."""
        if shuffle.seed is None:
            return shuffle
        words = np.random.SeedSequence([shuffle.seed, source]).generate_state(1, np.uint64)
        return replace(shuffle, seed=int(words[0]))


def mixture(
    sources: Sequence[FileSource | Nest], weights: Sequence[float], *, epoch_examples: int | None = None
) -> Mixture:
    """Return several sources as one, in fixed proportions, for ``hk.data.GlobalBatches``.

    Of the first p examples of the training, ``p * weights[i] / sum(weights)`` are from source i, within two;
    ``mixture.counts(p)`` returns the exact numbers. With ``shuffle="blocks"`` this holds at the end of each epoch, and
    before within two examples per lane.

    A source that ends before the epoch is repeated, in another order. The next epoch continues each source after its
    last draw, so that every example of a source is drawn equally often, within one.

    Args:
        sources: Sources of files, or structures of arrays, whose batches have the same structure, dtypes and shapes.
        weights: A positive number for each source.
        epoch_examples: E, the number of examples in an epoch; default: the sum over the sources.

    Returns:
        The mixture, a source for ``hk.data.GlobalBatches``.

    Raises:
        TypeError: A source is a ``tf.data.Dataset`` or is not data.
        ValueError: A weight is not positive and finite, the lengths differ, or batches are unlike.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> web, app = np.zeros(1000, "int32"), np.ones(50, "int32")  # or hk.data.parquet("web/"), ...
        >>> both = hk.data.mixture([web, app], [0.8, 0.2], epoch_examples=500)
        >>> batches = hk.data.GlobalBatches(both, 100, shuffle_seed=0, rank=0, size=1)
        >>> [int(batch.sum()) for batch in batches.one_epoch()]  # 20 of 100 are from app
        [20, 20, 20, 20, 20]
    """
    each = [source if isinstance(source, FileSource) else ArraySource(source) for source in sources]
    if not each or len(weights) != len(each):
        got = f"{len(weights)} weights for {len(each)} sources"
        raise ValueError(describe("weights", got, "a weight for each source, and a source", "pass lists of one length"))
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(describe("weights", weight, "positive numbers", "leave out sources that are not used"))
    if epoch_examples is not None:
        integer("epoch_examples", epoch_examples, minimum=1)
    mixed = Mixture(each, weights, epoch_examples)
    mixed.batch_spec(None)  # checks that batches are alike
    return mixed


def _order_of_draws(
    source: ArraySource | FileSource, shuffle: Shuffle
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that maps draws to examples; its first argument, lanes, is not used."""
    order_of_pass = lru_cache(_KEPT_PASSES)(lambda number: source.order(shuffle, number, 1))

    def of(_: np.ndarray, draws: np.ndarray) -> np.ndarray:
        passes, places = np.divmod(draws, source.examples)
        examples = places.copy()
        for number in np.unique(passes).tolist():
            if (order := order_of_pass(number)) is not None:
                is_here = passes == number
                examples[is_here] = order(places[is_here])
        return examples

    return of


def _interleaved(parts: Sequence[Leaf], places: np.ndarray) -> Leaf:
    """Return rows ``places`` of the concatenated parts: arrays, or dense, ragged or sparse tensors."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)[places]
    import tensorflow as tf

    if not isinstance(parts[0], tf.SparseTensor):
        return tf.gather(tf.concat(parts, axis=0), places)
    whole = tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
    rows = tf.gather(np.argsort(places), whole.indices[:, :1])
    indices = tf.concat([rows, whole.indices[:, 1:]], axis=1)
    return tf.sparse.reorder(tf.SparseTensor(indices, whole.values, whole.dense_shape))
