"""Broadcast and comparison of variables, with errors that name the first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import tensorflow as tf
import xxhash

from hvdkit import cluster
from hvdkit.cluster.agreement import agree, compare, differing_indices, gather
from hvdkit.collectives import tensors
from hvdkit.collectives.call_checks import check_root
from hvdkit.collectives.digests import digest, tf_variable
from hvdkit.sharding.shards import AnyVariable, differs_by_rank

# Variables are sent in batches of about this many bytes, to avoid a second copy of the whole model.
_BATCH_BYTES = 64 * 2**20
_REMEDY = "build the same model on every rank"
T = TypeVar("T")
_Signature: TypeAlias = tuple[str, tuple[int, ...], str]


def broadcast_variables(variables: Iterable[AnyVariable], root: int = 0) -> None:
    """Set every variable to its value on rank ``root``. What all ranks hold already, bit for bit, is not sent.

    Args:
        variables: TensorFlow or Keras variables, the same list (order, names, shapes, dtypes) on every rank;
            e.g. ``model.variables + optimizer.variables`` of a built optimizer. Variables that are not replicated are
            skipped: shards, sharded optimizer slots, and states of Keras's random generators, because equal ones would
            give all ranks the same dropout masks.
        root: the rank whose values are sent.

    Raises:
        ValueError: ``root`` is not a rank.
        TypeError: ``variables`` contains something other than variables.
        CollectiveMismatchError: the lists differ; it names the rank and the first variable that differs. Then no
            variable is changed.

    Examples:
        >>> import keras
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])  # each rank draws its own weights
        >>> optimizer = keras.optimizers.Adam()
        >>> optimizer.build(model.trainable_variables)
        >>> hk.broadcast_variables(model.variables + optimizer.variables)
        >>> digest = hk.compare_variables(model.variables)  # raises an error if they differ
    """
    broadcast_and_gather(variables, lambda: None, root)


def broadcast_and_gather(
    variables: Iterable[AnyVariable], value: Callable[[], T], root: int = 0, *, of_ranks: Iterable[AnyVariable] = ()
) -> list[T]:
    """Do as :func:`broadcast_variables`, and return ``value()`` of every rank, from the same exchange.

    ``of_ranks`` are those of ``variables`` of which a rank has its own value after steps, such as accumulated
    gradients. They are sent only if others differ, too: the ranks have not trained together then.
    """
    replicated = [v for v in variables if not differs_by_rank(v)]

    def describe() -> tuple[list[_Signature], list[bytes], T]:
        check_root(root)
        signatures = [_signature(v) for v in replicated]
        return signatures, [digest(v) for v in replicated] if cluster.size() > 1 else [], value()

    everywhere = gather(cluster.exchange(), f"broadcast_variables(root={root})", describe)
    signatures = [each for each, _, _ in everywhere]
    # Names may differ (Keras numbers layers in order of creation), but shapes and dtypes must not.
    compare(signatures, "variables", _REMEDY, key=lambda each: [kind for _, *kind in each], show=_first_difference)
    if cluster.size() > 1:
        digests = zip(*(each for _, each, _ in everywhere), strict=True)
        differing = [v for v, values in zip(replicated, digests, strict=True) if len(set(values)) > 1]
        kept = {id(v) for v in of_ranks}
        if any(id(v) not in kept for v in differing):
            broadcast_compared(differing, root)
    return [each for _, _, each in everywhere]


def broadcast_compared(variables: list[AnyVariable], root: int = 0) -> None:
    """Set every variable to its value on rank ``root``. The ranks have compared their lists: shapes and dtypes."""
    if cluster.size() == 1:
        return
    for number, batch in enumerate(_batches(variables)):
        flat = tf.concat([tf.reshape(tf.convert_to_tensor(v), [-1]) for v in batch], axis=0)
        sizes = [int(tf.TensorShape(v.shape).num_elements() or 0) for v in batch]
        parts = tf.split(tensors.broadcast(flat, root, f"hvdkit.variables.{number}"), sizes)
        for variable, part in zip(batch, parts, strict=True):
            variable.assign(tf.reshape(part, variable.shape))


def compare_variables(variables: Iterable[AnyVariable]) -> str:
    """Check that variables have the same values on all ranks, bit for bit; return a digest of the values.

    Variables that are not replicated, such as shards, sharded optimizer slots and states of Keras's random generators,
    are skipped. Every rank must call it. The cost is a digest of all values (XXH3, about as fast as memory is read) and
    one small exchange.

    Args:
        variables: TensorFlow or Keras variables, the same list on every rank.

    Returns:
        12 hexadecimal digits, equal on every rank.

    Raises:
        CollectiveMismatchError: values differ; on every rank, it names the first rank and variable.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> weights = tf.Variable([1.0, 2.0])
        >>> hk.compare_variables([weights])
        '4e3f300133c7'
    """
    replicated = [v for v in variables if not differs_by_rank(v)]
    remedy = (
        "begin with hk.broadcast_variables and update with hk.DistributedOptimizer (the moving statistics of "
        "BatchNormalization follow each rank's own examples: compare trainable_variables then)"
    )

    def unequal(odd: list[bytes], usual: list[bytes]) -> tuple[str, str]:
        if len(odd) != len(usual):
            return f"{len(odd)} variables", f"{len(usual)}"
        return f"different values of {variable_name(replicated[differing_indices(odd, usual)[0]])}", "equal ones"

    exchange = cluster.exchange()
    digests = agree(exchange, lambda: [digest(v) for v in replicated], "values of variables", remedy, show=unequal)
    return xxhash.xxh3_128_hexdigest(b"".join(digests[0]))[:12]


def variable_name(variable: AnyVariable) -> str:
    """Return a Keras variable's path, or a TensorFlow variable's name."""
    return str(getattr(variable, "path", None) or variable.name)


def _signature(variable: AnyVariable) -> _Signature:
    tf_variable(variable)
    return variable_name(variable), tuple(variable.shape), tf.as_dtype(variable.dtype).name


def _first_difference(odd: list[_Signature], usual: list[_Signature]) -> tuple[str, str]:
    index = differing_indices(*([kind for _, *kind in signatures] for signatures in (odd, usual)))[0]
    got, expected = (
        [*map(_format_signature, signatures), f"only {len(signatures)} variables"][index] for signatures in (odd, usual)
    )
    return got, expected


def _format_signature(signature: _Signature) -> str:
    name, shape, dtype = signature
    return f"{name} ({dtype}{list(shape)})"


def _batches(variables: list[AnyVariable]) -> list[list[AnyVariable]]:
    """Split the list into batches of one dtype and at most about ``_BATCH_BYTES``."""
    batches: list[list[AnyVariable]] = []
    bytes_left = 0
    for variable in variables:
        dtype = tf.as_dtype(variable.dtype)
        nbytes = int(tf.TensorShape(variable.shape).num_elements() or 0) * dtype.size
        if not batches or tf.as_dtype(batches[-1][0].dtype) != dtype or nbytes > bytes_left:
            batches.append([])
            bytes_left = _BATCH_BYTES
        batches[-1].append(variable)
        bytes_left -= nbytes
    return batches
