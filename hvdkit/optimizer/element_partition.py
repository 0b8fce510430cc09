"""Assign elements of the replicated variables to ranks, for sharded optimizer state.

The variables of each dtype are concatenated in flat buffers of at most 64 MiB (or one larger variable). Each buffer is
padded by less than N elements and split into N equal parts, one per rank. A rank therefore updates some variables
completely, others not at all, and at most two per buffer partially. Complete variables are updated in place; partial
ones through a proxy variable that uses memory only during the step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.collectives.graphs import true_at_run_time
from hvdkit.collectives.ops import ReduceOp
from hvdkit.optimizer.average import combine
from hvdkit.optimizer.compression import reduce_scatter, wire_dtype
from hvdkit.optimizer.gradients import Gradient, PlacedGradients
from hvdkit.optimizer.reduction import Reduction
from hvdkit.sharding.partition import flat_ranges, flat_shard_size
from hvdkit.sharding.shards import AnyVariable, FlatShard, holding_of, inner_variable

# Each buffer is held in memory twice during its exchange; larger buffers are not faster.
_MAX_BYTES = 64 * 2**20


class PartProxy(keras.Variable):
    """Proxy for the elements of a variable that this rank updates: shape ``[k]``, where k may be 0.

    Keras creates slots of this shape, under the name of the variable.
    """

    def __init__(self, variable: AnyVariable, elements: int):
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


class _FlatBuffer(NamedTuple):
    """Concatenated variables: their indices in the list, their element counts, and the elements per rank."""

    indices: tuple[int, ...]
    counts: tuple[int, ...]
    shard_size: int
    name: str

    @property
    def padding(self) -> int:
        return self.shard_size * cluster.size() - sum(self.counts)


class ElementPartition:
    """The part of a list of variables that this rank updates. If the list is empty, every rank updates whole variables.

    Args:
        variables: TensorFlow or Keras variables, the same list on every rank. Shards and local variables are updated
            directly.

    Attributes:
        variables: the same.
        targets: for each variable, the variable itself if this rank updates all of it, otherwise a :class:`PartProxy`.
    """

    def __init__(self, variables: Sequence[AnyVariable]):
        self.variables = tuple(variables)
        self._buffers = tuple(_flat_buffers(self.variables))
        self._shards: dict[int, FlatShard] = {}
        for buffer in self._buffers:
            ranges = flat_ranges(buffer.counts, cluster.rank(), cluster.size())
            for index, elements in zip(buffer.indices, ranges, strict=True):
                self._shards[index] = FlatShard(tuple(self.variables[index].shape), elements)
        self.targets = tuple(self._target_of(index) for index in range(len(self.variables)))
        self._indices: dict[int, int] = {}
        for index, pair in enumerate(zip(self.variables, self.targets, strict=True)):
            self._indices |= {id(inner_variable(variable)): index for variable in pair}
        self._release()

    def _target_of(self, index: int) -> AnyVariable:
        variable = self.variables[index]
        shard = self._shards.get(index)
        if shard is None or len(shard.elements) == math.prod(shard.shape):
            return variable
        with tf.device(inner_variable(variable).device):
            return PartProxy(variable, len(shard.elements))

    def __contains__(self, variable: AnyVariable) -> bool:
        return bool(self._indices) and id(inner_variable(variable)) in self._indices

    def target_of(self, variable: AnyVariable) -> AnyVariable:
        """Return the target of a variable or proxy; the variable itself if it is not in the list."""
        return self.targets[self._indices[id(inner_variable(variable))]] if variable in self else variable

    def original_of(self, variable: AnyVariable) -> AnyVariable:
        """Return the variable of a target; a variable that is not in the list is returned unchanged."""
        return self.variables[self._indices[id(inner_variable(variable))]] if variable in self else variable

    def shard(self, variable: AnyVariable) -> FlatShard | None:
        """Return the elements of a variable that this rank updates; None for a shard, a local or another variable."""
        return self._shards.get(self._indices[id(inner_variable(variable))]) if variable in self else None

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Inside, the proxies hold the elements of the variables."""
        try:
            for index, proxy in self._proxies():
                proxy.set_elements(self._slice(inner_variable(self.variables[index]).read_value(), index))
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Free the memory of the proxies."""
        for _, proxy in self._proxies():
            # The length must not be known statically, or TensorFlow rejects the change of shape.
            proxy.set_elements(tf.zeros(tf.cast(~true_at_run_time(), tf.int32)[None], proxy.dtype))

    def _proxies(self) -> Iterator[tuple[int, PartProxy]]:
        for index, target in enumerate(self.targets):
            if isinstance(target, PartProxy) and 0 not in target.shape:
                yield index, target

    def slice_gradients(self, placed: PlacedGradients) -> PlacedGradients:
        """Return this rank's elements of replicated gradients."""
        if not self.variables:
            return placed
        results = []
        for grad, variable in zip(placed.grads, placed.variables, strict=True):
            index = self._indices[id(inner_variable(variable))]
            whole = grad is None or self.targets[index] is self.variables[index]
            results.append(grad if whole else self._slice(self._dense(grad, index), index))
        return placed.with_grads(results)

    def _slice(self, whole: tf.Tensor, index: int) -> tf.Tensor:
        elements = self._shards[index].elements
        return tf.reshape(whole, [-1])[elements.start : elements.stop]

    def _dense(self, grad: tf.Tensor | tf.IndexedSlices, index: int) -> tf.Tensor:
        variable = self.variables[index]
        if isinstance(grad, tf.IndexedSlices):
            grad = tf.math.unsorted_segment_sum(grad.values, grad.indices, variable.shape[0])
        return tf.cast(grad, variable.dtype)

    def combine(self, placed: PlacedGradients, reduction: Reduction) -> PlacedGradients:
        """Combine the gradients over ranks (Average or Sum) and return this rank's elements. Ranks must have agreed.

        There is one exchange per buffer, in which each rank sends and receives (N-1)/N of the gradients' bytes.
        Missing gradients and None are sent as zeros. Gradients of shards and local variables are combined as usual, and
        so are all of them if the partition is empty.
        """
        if not self.variables:
            return combine(placed, reduction, reduction.call_site)
        pairs = zip(placed.variables, placed.kinds, strict=True)
        indices = [self._indices[id(inner_variable(v))] for v, kind in pairs if kind == "replicated"]
        return combine(placed, reduction, reduction.call_site, partial(self._reduce, indices))

    def _reduce(self, indices: Sequence[int], grads: Sequence[Gradient], reduction: Reduction) -> list[Gradient]:
        grads_by_index = {index: grad for index, grad in zip(indices, grads, strict=True) if grad is not None}
        combined: dict[int, tf.Tensor] = {}
        for buffer in self._buffers:
            if grads_by_index.keys() & set(buffer.indices):
                combined |= self._reduce_buffer(buffer, grads_by_index, reduction)
        return [combined[index] if index in grads_by_index else None for index in indices]

    def _reduce_buffer(
        self, buffer: _FlatBuffer, grads: dict[int, tf.Tensor | tf.IndexedSlices], reduction: Reduction
    ) -> dict[int, tf.Tensor]:
        dtype = tf.as_dtype(self.variables[buffer.indices[0]].dtype)
        flat = [
            tf.reshape(self._dense(grads[index], index), [-1]) if index in grads else tf.zeros([count], dtype)
            for index, count in zip(buffer.indices, buffer.counts, strict=True)
        ]
        flat = tf.concat([*flat, tf.zeros([buffer.padding], dtype)], axis=0)
        shard = reduce_scatter(flat, reduction.op, wire_dtype(reduction.compression), f"{reduction.name}_{buffer.name}")
        if reduction.op == ReduceOp.Sum and reduction.ranks_per_batch > 1:
            shard /= reduction.ranks_per_batch
        shard.set_shape([buffer.shard_size])
        lengths = [len(self._shards[index].elements) for index in buffer.indices]
        pieces = tf.split(shard, [*lengths, buffer.shard_size - sum(lengths)])
        pairs = zip(buffer.indices, pieces, strict=False)
        return {index: tf.reshape(piece, self.targets[index].shape) for index, piece in pairs}

    def constrain(self, variables: Sequence[AnyVariable], grads: Sequence[Gradient]) -> None:
        """Apply the constraints of ``variables`` that have a gradient and of which this rank doesn't update all.

        Keras has applied them to variables that this rank updates completely.
        """
        if not self.variables:
            return
        for variable, grad in zip(variables, grads, strict=True):
            is_part = grad is not None and isinstance(self.target_of(variable), PartProxy)
            if is_part and variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    def gather(self, variables: Sequence[AnyVariable]) -> None:
        """Gather the updated elements of ``variables`` from the ranks that own them, on every rank."""
        if not self.variables:
            return
        indices = {self._indices[id(inner_variable(variable))] for variable in variables if variable in self}
        for buffer in self._buffers:
            if not indices.isdisjoint(buffer.indices):
                self._gather_buffer(buffer, indices)

    def _gather_buffer(self, buffer: _FlatBuffer, indices: set[int]) -> None:
        local = [inner_variable(self.targets[index]) for index in buffer.indices if self._shards[index].elements]
        padding = buffer.shard_size - sum(len(self._shards[index].elements) for index in buffer.indices)
        dtype = tf.as_dtype(self.variables[buffer.indices[0]].dtype)
        parts = [*(tf.reshape(variable.read_value(), [-1]) for variable in local), tf.zeros([padding], dtype)]
        whole = tensors.allgather(tf.concat(parts, axis=0), f"hvdkit.weights_{buffer.name}")
        whole.set_shape([buffer.shard_size * cluster.size()])
        pieces = tf.split(whole, [*buffer.counts, buffer.padding])
        for index, piece in zip(buffer.indices, pieces, strict=False):
            # Assign this rank's own variables as well: all then share the receive buffer, without duplicates.
            if index in indices:
                inner_variable(self.variables[index]).assign(tf.reshape(piece, self.variables[index].shape))


def _flat_buffers(variables: Sequence[AnyVariable]) -> Iterator[_FlatBuffer]:
    by_dtype: dict[str, list[list[int]]] = {}
    filled: dict[str, int] = {}
    for index, variable in enumerate(variables):
        if holding_of(variable) is not None:
            continue
        dtype = tf.as_dtype(variable.dtype)
        size = math.prod(variable.shape) * dtype.size
        lists = by_dtype.setdefault(dtype.name, [])
        if not lists or filled[dtype.name] + size > _MAX_BYTES:
            lists.append([])
            filled[dtype.name] = 0
        lists[-1].append(index)
        filled[dtype.name] += size
    for dtype, lists in by_dtype.items():
        for number, indices in enumerate(lists):
            counts = tuple(math.prod(variables[index].shape) for index in indices)
            shard_size = flat_shard_size(sum(counts), cluster.size())
            yield _FlatBuffer(tuple(indices), counts, shard_size, f"{dtype}{f'_{number}' if number else ''}")
