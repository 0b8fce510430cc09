"""Keras's own ``fit`` on several ranks: all begin, go on and end alike, on data of their own.

Keras gives an optimizer no reference to the ``fit`` that it works in, so it is looked for in the first step, among the
frames of its callers. ``hk.fit`` needs none of this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import xxhash

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives import broadcast_variables
from hvdkit.collectives.batch_share import within_share
from hvdkit.collectives.digests import behind, digest
from hvdkit.collectives.shards import is_part
from hvdkit.collectives.variables import SEED_STATE
from hvdkit.errors import CollectiveMismatchError, describe

_SAMPLED_ROWS = 64
_REMEDY = "use hk.fit, or pass hk.callbacks.BroadcastInitial() and build the model before fit"


class _Beginning(NamedTuple):
    """What one rank begins with.

    Attributes:
        steps: batches per epoch and epochs; None if unknown.
        weights: digest of trainable variables, slots and learning rate.
        data: digest of sampled rows of the arrays given to ``fit``; None for anything else.
    """

    steps: tuple[Any, Any] | None
    weights: bytes
    data: bytes | None


def begin_equal(model: Any, optimizer: Any, group: cluster.Group | None) -> None:
    """Give all ranks the chief's weights if they differ; warn of ranks that train on the same arrays.

    Called in the first step of ``fit``, on every rank. While the step is traced, weights can still be changed. In eager
    mode its forward pass is done.

    Raises:
        CollectiveMismatchError: the number of steps differs; or weights do, in eager mode or with ``process_set``.
    """
    if cluster.size() == 1 or within_share():
        return
    traced, local = tf.inside_function(), _fit_frame()
    callbacks = local.get("callbacks")
    with tf.init_scope():
        # Variables that are made while the step is traced have no values yet: the comparison after fit finds them.
        slots = _slots(optimizer)
        equal = [v for v in [*model.trainable_variables, *slots] if not is_part(v) and _has_value(v)]
        params = getattr(callbacks, "params", None) or {}
        mine = _Beginning(
            (params.get("steps"), params.get("epochs")),
            _digest(equal),
            _digest_of_arrays(local.get("x"), local.get("y")),
        )
        ranks: list[_Beginning] = cluster.exchange(group).allgather(mine)
        if any(other.steps != mine.steps for other in ranks):
            got = f"(steps per epoch, epochs) {[other.steps for other in ranks]} in rank order"
            raise CollectiveMismatchError(describe("fit", got, "as many on every rank", "use hk.fit"))
        if mine.data is not None and all(other.data == mine.data for other in ranks):
            _warn(
                f"fit: each of {len(ranks)} ranks trains on the same arrays, so that an epoch is {len(ranks)} epochs; "
                "use hk.fit(model, ...), which divides each batch, or give each rank its own rows"
            )
        if any(other.weights != mine.weights for other in ranks):
            got = "weights, slots or a learning rate that differ between ranks before the first step"
            if not traced or group is not None:
                raise CollectiveMismatchError(describe("model", got, "equal ones", _REMEDY))
            _warn(f"fit: got {got}: all begin with the chief's; {_REMEDY}")
            weights = [v for v in model.variables if v.name != SEED_STATE]
            broadcast_variables([v for v in [*weights, *slots] if _has_value(v)])
        if isinstance(callbacks, keras.callbacks.CallbackList):
            guard = _Guard(group)
            guard.set_model(callbacks.model)
            guard.set_params(params)
            callbacks.callbacks.append(guard)


class _AtEpochEnd(NamedTuple):
    """What callbacks have made of one rank at the end of an epoch."""

    stops: bool
    rate: float | None
    logs: dict[str, float]


class _Guard(keras.callbacks.Callback):
    """Runs after all other callbacks of a ``fit``, and compares ranks at the end of each epoch and of training."""

    def __init__(self, group: cluster.Group | None) -> None:
        super().__init__()
        self._group, self._warned = group, False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Raise if ranks decided differently; warn if their logs differ.

        Raises:
            CollectiveMismatchError: some ranks stop, or learning rates differ.
        """
        known = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        mine = _AtEpochEnd(bool(self.model.stop_training), _rate(self.model.optimizer), known)
        ranks: list[_AtEpochEnd] = cluster.exchange(self._group).allgather(mine)
        remedy = "use hk.fit, or put hk.callbacks.MetricAverage() before callbacks that decide"
        for what, of in _DECISIONS.items():
            if len({of(each) for each in ranks}) > 1:
                got = f"{what} {[of(each) for each in ranks]} in rank order after epoch {epoch + 1}"
                raise CollectiveMismatchError(describe("callbacks", got, "the same on every rank", remedy))
        names = [name for name in known if any(each.logs.get(name) != known[name] for each in ranks)]
        if names and not self._warned:
            self._warned = True
            values = ", ".join(f"{each.logs.get(names[0])}" for each in ranks)
            _warn(
                f"fit: {names[0]} is each rank's own ({values} in rank order), also for callbacks and History; {remedy}"
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the weights.

        Raises:
            CollectiveMismatchError: on every rank: they differ.
        """
        weights = _digest([v for v in self.model.trainable_variables if not is_part(v)])
        if len(set(cluster.exchange(self._group).allgather_bytes(weights))) > 1:
            got = "weights that differ between ranks at the end of fit: they were not equal before"
            raise CollectiveMismatchError(describe("model", got, "equal ones", _REMEDY))


_DECISIONS: dict[str, Callable[[_AtEpochEnd], Any]] = {
    "stop_training": lambda each: each.stops,
    "learning rates": lambda each: each.rate,
}


def _slots(optimizer: Any) -> list[Any]:
    """Return slots and counters, without the gradients that each rank adds up between two updates."""
    parts = [optimizer, getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    sums = {id(v) for part in parts for v in getattr(part, "_accumulated_gradients", ())}
    return [v for v in optimizer.variables if id(v) not in sums]


def _rate(optimizer: Any) -> float | None:
    rate = getattr(optimizer, "learning_rate", None)
    return None if rate is None else float(np.asarray(rate))


def _digest(variables: list[Any]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(map(digest, variables)))


def _has_value(variable: Any) -> bool:
    return bool(behind(variable).is_initialized())


def _fit_frame() -> dict[str, Any]:
    """Return the local variables of Keras's ``fit`` that has called; empty if none has."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and "epoch_iterator" in frame.f_code.co_varnames:
            return dict(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def _digest_of_arrays(x: Any, y: Any) -> bytes | None:
    """Return a digest of sampled rows of arrays; None for other data."""
    arrays = [part for part in tf.nest.flatten([x, y]) if part is not None]
    if not arrays or not all(isinstance(part, (np.ndarray, tf.Tensor)) and len(part.shape) for part in arrays):
        return None
    hasher = xxhash.xxh3_128()
    for part in arrays:
        hasher.update(repr(part.shape).encode())
        for row in sorted(set(np.linspace(0, part.shape[0] - 1, _SAMPLED_ROWS).astype(int))) if part.shape[0] else ():
            hasher.update(np.asarray(part[row]).tobytes())
    return hasher.digest()


def _warn(words: str) -> None:
    if cluster.is_chief():
        get_logger().warning("%s", words)
