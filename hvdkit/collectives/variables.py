"""Variables from one rank to all, after a comparison that names what differs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import xxhash

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.collectives.agreement import Call, agree, attempt, check_root
from hvdkit.collectives.digests import behind, digest
from hvdkit.collectives.shards import is_part
from hvdkit.errors import CollectiveMismatchError

# Variables are sent in pieces of about this many bytes, so that a model needs no second copy of itself.
_PIECE_BYTES = 64 * 2**20

SEED_STATE = "seed_generator_state"
"""Keras's name for the state of a random generator, which is each rank's own."""


def broadcast_variables(variables: Iterable[Any], root: int = 0) -> None:
    """Give every variable the value it has on rank ``root``.

    Args:
        variables: TensorFlow or Keras variables, the same list (order, names, shapes, dtypes) on every rank;
            e.g. ``model.variables + optimizer.variables`` of a built optimizer. Shards and divided slots among them
            are each rank's own, and left as they are.
        root: the rank whose values count.

    Raises:
        ValueError: ``root`` is no rank.
        TypeError: ``variables`` holds something else.
        CollectiveMismatchError: the lists differ; it names the rank and the first variable that differs. No
            variable is changed then.

    Example::

        hk.broadcast_variables(model.variables + optimizer.variables)
    """
    listed = [v for v in variables if not is_part(v)]
    call = Call(f"broadcast_variables(root={root})")

    def prepare() -> None:
        check_root(root)
        call.payload = [_signature(v) for v in listed]

    call.problem = attempt(prepare)
    _compare([c.payload for c in agree(call)])
    if cluster.size() == 1:
        return
    for number, piece in enumerate(_pieces(listed)):
        _broadcast_piece(piece, root, f"hvdkit.variables.{number}")


def compare_variables(variables: Iterable[Any]) -> str:
    """Compare the values of variables over all ranks, bit for bit; return a digest of them that all ranks share.

    Shards and divided slots among them, each rank's own, are left out.

    Every rank calls it. It costs a digest of all values (XXH3, about as fast as memory is read) and
    one small exchange.

    Raises:
        CollectiveMismatchError: values differ; it names the first rank and variable, on every rank.

    Example::

        print(f"equal on all ranks: {hk.compare_variables(model.variables)}")
    """
    listed = [v for v in variables if not is_part(v)]
    call = Call("compare_variables()")

    def prepare() -> None:
        call.payload = [digest(v) for v in listed]

    call.problem = attempt(prepare)
    digests = [other.payload for other in agree(call)]
    for rank, other in enumerate(digests):
        if len(other) != len(digests[0]):
            raise CollectiveMismatchError(
                f"variables: rank {rank} has {len(other)}, rank 0 has {len(digests[0])}; build one model everywhere"
            )
        for variable, first, theirs in zip(listed, digests[0], other, strict=False):
            if first != theirs:
                raise CollectiveMismatchError(
                    f"variables: {variable_name(variable)} on rank {rank} differs from rank 0; begin with "
                    "hk.broadcast_variables and update with hk.DistributedOptimizer (the moving statistics of "
                    "BatchNormalization follow each rank's own examples: compare trainable_variables then)"
                )
    return xxhash.xxh3_128_hexdigest(b"".join(digests[0]))[:12]


def variable_name(variable: Any) -> str:
    """Return a Keras variable's path, or a TensorFlow variable's name."""
    return str(getattr(variable, "path", None) or variable.name)


def _signature(variable: Any) -> tuple[str, tuple[int, ...], str]:
    behind(variable)
    return variable_name(variable), tuple(variable.shape), tf.as_dtype(variable.dtype).name


def _compare(signatures: list[list[tuple[str, tuple[int, ...], str]]]) -> None:
    first = signatures[0]
    for rank, other in enumerate(signatures):
        if other == first:
            continue
        for mine, theirs in zip(first, other, strict=False):
            # Names alone may differ (Keras numbers layers as they are made): shape and dtype must not.
            if mine[1:] != theirs[1:]:
                raise CollectiveMismatchError(
                    f"variables: {theirs[0]} is {theirs[2]}{list(theirs[1])} on rank {rank}, but {mine[0]} is "
                    f"{mine[2]}{list(mine[1])} on rank 0; build the same model on every rank"
                )
        if len(other) != len(first):
            longer, owner = (other, rank) if len(other) > len(first) else (first, 0)
            extra = longer[min(len(other), len(first))][0]
            raise CollectiveMismatchError(
                f"variables: rank {rank} has {len(other)}, rank 0 has {len(first)} ({extra} is on rank {owner} only); "
                "build the same model on every rank"
            )


def _pieces(variables: list[Any]) -> list[list[Any]]:
    """Cut the list into runs of one dtype and at most about ``_PIECE_BYTES``."""
    pieces: list[list[Any]] = []
    room = 0
    for variable in variables:
        dtype = tf.as_dtype(variable.dtype)
        needs = int(tf.TensorShape(variable.shape).num_elements() or 0) * dtype.size
        if not pieces or tf.as_dtype(pieces[-1][0].dtype) != dtype or needs > room:
            pieces.append([])
            room = _PIECE_BYTES
        pieces[-1].append(variable)
        room -= needs
    return pieces


def _broadcast_piece(variables: list[Any], root: int, name: str) -> None:
    flat = tf.concat([tf.reshape(tf.convert_to_tensor(v), [-1]) for v in variables], axis=0)
    sizes = [int(tf.TensorShape(v.shape).num_elements() or 0) for v in variables]
    for variable, part in zip(variables, tf.split(tensors.broadcast(flat, root, name), sizes), strict=True):
        variable.assign(tf.reshape(part, variable.shape))
