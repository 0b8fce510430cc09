"""Assign elements of the replicated variables to ranks, for sharded optimizer state.

The variables of each dtype are concatenated into groups; a new group starts beyond 64 MiB. Each group is padded by less
than N elements and split into N equal parts, one per rank. A rank therefore updates some variables completely, others
not at all, and at most two per group partially. Complete variables are updated in place; partial ones through a proxy
variable that uses memory only during the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.collectives.ops import ReduceOp
from hvdkit.optimizer.average import Averaging, combine_kinds
from hvdkit.optimizer.compression import reduce_scatter, wire_dtype
from hvdkit.optimizer.gradients import Gradient, PlacedGradients
from hvdkit.sharding.partition import flat_ranges, flat_shard_size
from hvdkit.sharding.shards import FlatShard, holding_of

# Each group is held in memory twice during its exchange; larger groups are not faster.
_MOST_BYTES = 64 * 2**20


class PartProxy(keras.Variable):
    """Proxy for the elements of a variable that this rank updates: shape ``[k]``, where k may be 0.

    Keras creates slots of this shape, under the name of the variable.
    """

    def __init__(self, variable: Any, elements: int):
        self._whole_path = getattr(variable, "path", None) or str(variable.name).replace("/", "_").replace(":", "_")
        name = str(variable.name).split("/")[-1].split(":")[0]
        super().__init__("zeros", (elements,), variable.dtype, trainable=False, name=name)

    @property
    def path(self) -> str:
        """The path of the original variable."""
        return self._whole_path

    def set_elements(self, values: tf.Tensor) -> None:
        """Assign ``values`` of any length; empty values free the memory."""
        tf.raw_ops.AssignVariableOp(resource=self._value.handle, value=values)


class _Group(NamedTuple):
    """Concatenated variables: their positions in the list, their element counts, and the elements per rank."""

    places: tuple[int, ...]
    counts: tuple[int, ...]
    share: int
    name: str

    @property
    def padding(self) -> int:
        return self.share * cluster.size() - sum(self.counts)


class Parts:
    """The part of a list of variables that this rank updates.

    Args:
        variables: TensorFlow or Keras variables, the same list on every rank. Shards and local variables are updated
            directly.

    Attributes:
        variables: the same.
        listed: for each variable, the variable itself if this rank updates all of it, otherwise a :class:`PartProxy`.
    """

    def __init__(self, variables: Sequence[Any]):
        self.variables = tuple(variables)
        self._groups = tuple(_groups(self.variables))
        self._runs: dict[int, FlatShard] = {}
        for group in self._groups:
            runs = flat_ranges(group.counts, cluster.rank(), cluster.size())
            for place, run in zip(group.places, runs, strict=True):
                self._runs[place] = FlatShard(tuple(self.variables[place].shape), run)
        self.listed = tuple(self._stand_in(place) for place in range(len(self.variables)))
        self._places: dict[int, int] = {}
        for place, pair in enumerate(zip(self.variables, self.listed, strict=True)):
            self._places |= {id(_inner(variable)): place for variable in pair}
        self.release()

    def _stand_in(self, place: int) -> Any:
        variable, run = self.variables[place], self._runs.get(place)
        if run is None or len(run.elements) == math.prod(run.shape):
            return variable
        with tf.device(_inner(variable).device):
            return PartProxy(variable, len(run.elements))

    def place(self, variable: Any) -> int | None:
        """Return the position of a variable or its proxy in the list; None if it is not in the list."""
        return self._places.get(id(_inner(variable)))

    def run(self, place: int) -> FlatShard | None:
        """Return the elements of variable ``place`` that this rank updates; None for a shard or local variable."""
        return self._runs.get(place)

    def load(self) -> None:
        """Copy the variables' elements into the proxies."""
        for place, part in self._cut():
            part.set_elements(self._take(_inner(self.variables[place]).read_value(), place))

    def release(self) -> None:
        """Free the memory of the proxies."""
        for _, part in self._cut():
            # The length must not be known statically, or TensorFlow rejects the change of shape.
            part.set_elements(tf.zeros(tf.cast(tf.timestamp(), tf.int32)[None] * 0, part.dtype))

    def _cut(self) -> Iterator[tuple[int, PartProxy]]:
        for place, part in enumerate(self.listed):
            if isinstance(part, PartProxy) and 0 not in part.shape:
                yield place, part

    def take(self, grads: Sequence[Any], places: Sequence[int]) -> list[Any]:
        """Return this rank's elements of replicated gradients."""
        results = []
        for grad, place in zip(grads, places, strict=True):
            whole = grad is None or self.listed[place] is self.variables[place]
            results.append(grad if whole else self._take(self._dense(grad, place), place))
        return results

    def _take(self, whole: tf.Tensor, place: int) -> tf.Tensor:
        run = self._runs[place].elements
        return tf.reshape(whole, [-1])[run.start : run.stop]

    def _dense(self, grad: Any, place: int) -> tf.Tensor:
        variable = self.variables[place]
        if isinstance(grad, tf.IndexedSlices):
            grad = tf.math.unsorted_segment_sum(grad.values, grad.indices, variable.shape[0])
        return tf.cast(grad, variable.dtype)

    def combine(self, found: PlacedGradients, how: Averaging) -> list[Gradient]:
        """Combine the gradients over ranks (Average or Sum) and return this rank's elements. Ranks must have agreed.

        There is one exchange per group, in which each rank sends and receives (N-1)/N of the gradients' bytes.
        Missing gradients and None are sent as zeros. Gradients of shards and local variables are combined as usual.

        Args:
            found: complete gradients of variables in the list, or of their proxies.
            how: the same on all ranks, without weight.
        """
        pairs = zip(found.variables, found.kinds, strict=True)
        places = [self._places[id(_inner(v))] for v, kind in pairs if kind == "replicated"]
        return combine_kinds(found, how, lambda replicated: self._reduce(replicated, places, how))

    def _reduce(self, grads: Sequence[Any], places: Sequence[int], how: Averaging) -> list[Any]:
        given = {place: grad for place, grad in zip(places, grads, strict=True) if grad is not None}
        combined: dict[int, Any] = {}
        for group in self._groups:
            if given.keys() & set(group.places):
                combined |= self._reduce_group(group, given, how)
        return [combined[place] if place in given else None for place in places]

    def _reduce_group(self, group: _Group, given: dict[int, Any], how: Averaging) -> dict[int, tf.Tensor]:
        dtype = tf.as_dtype(self.variables[group.places[0]].dtype)
        flat = [
            tf.reshape(self._dense(given[place], place), [-1]) if place in given else tf.zeros([count], dtype)
            for place, count in zip(group.places, group.counts, strict=True)
        ]
        flat = tf.concat([*flat, tf.zeros([group.padding], dtype)], axis=0)
        mine = reduce_scatter(flat, how.op, wire_dtype(how.compression), f"hvdkit.gradients_{group.name}")
        if how.op == ReduceOp.Sum and how.copies > 1:
            mine /= how.copies
        mine.set_shape([group.share])
        lengths = [len(self._runs[place].elements) for place in group.places]
        pieces = tf.split(mine, [*lengths, group.share - sum(lengths)])
        return {p: tf.reshape(piece, self.listed[p].shape) for p, piece in zip(group.places, pieces, strict=False)}

    def publish(self, places: Sequence[int]) -> None:
        """Gather the updated elements of the variables at ``places`` from the ranks that own them, on every rank."""
        wanted = set(places)
        for group in self._groups:
            if wanted & set(group.places):
                self._publish_group(group, wanted)

    def _publish_group(self, group: _Group, wanted: set[int]) -> None:
        mine = [tf.reshape(_inner(self.listed[p]).read_value(), [-1]) for p in group.places if self._runs[p].elements]
        rest = group.share - sum(len(self._runs[place].elements) for place in group.places)
        dtype = tf.as_dtype(self.variables[group.places[0]].dtype)
        flat = tf.concat([*mine, tf.zeros([rest], dtype)], axis=0)
        whole = tensors.allgather(flat, f"hvdkit.weights_{group.name}")
        whole.set_shape([group.share * cluster.size()])
        pieces = tf.split(whole, [*group.counts, group.padding])
        for place, piece in zip(group.places, pieces, strict=False):
            # Assign this rank's own variables as well: all then share the receive buffer, without duplicates.
            if place in wanted:
                _inner(self.variables[place]).assign(tf.reshape(piece, self.variables[place].shape))


def _groups(variables: Sequence[Any]) -> Iterator[_Group]:
    by_dtype: dict[str, list[list[int]]] = {}
    filled: dict[str, int] = {}
    for place, variable in enumerate(variables):
        if holding_of(variable) is not None:
            continue
        dtype = tf.as_dtype(variable.dtype)
        size = math.prod(variable.shape) * dtype.size
        lists = by_dtype.setdefault(dtype.name, [])
        if not lists or filled[dtype.name] + size > _MOST_BYTES:
            lists.append([])
            filled[dtype.name] = 0
        lists[-1].append(place)
        filled[dtype.name] += size
    for dtype, lists in by_dtype.items():
        for number, places in enumerate(lists):
            counts = tuple(math.prod(variables[place].shape) for place in places)
            share = flat_shard_size(sum(counts), cluster.size())
            yield _Group(tuple(places), counts, share, f"{dtype}{f'_{number}' if number else ''}")


def _inner(variable: Any) -> tf.Variable:
    return getattr(variable, "_value", variable)
