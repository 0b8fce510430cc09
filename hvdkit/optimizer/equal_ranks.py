"""Compare the ranks' weights at the first step of an optimizer and at the end of ``fit``, where nothing else does.

``hk.fit`` and hvdkit's callbacks have the model, and check more (``hvdkit/keras/plain_fit.py``). They mark the
optimizers of a model that they check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import keras
import tensorflow as tf
import xxhash

from hvdkit import cluster
from hvdkit.cluster.agreement import agree, compare, gather
from hvdkit.cluster.logs import get_logger, warn_once
from hvdkit.collectives.digests import digest, tf_variable
from hvdkit.optimizer.callback_paths import check_paths, written_paths
from hvdkit.optimizer.inner_optimizers import slots_of, with_inner
from hvdkit.sharding.shards import AnyVariable, differs_by_rank
from hvdkit.sharding.variables import broadcast_variables

REMEDY = "use hk.fit, or pass hk.callbacks.BroadcastInitial() and build the model before fit"
_NO_CALLBACK = (
    "fit: no callback of hvdkit: the ranks' steps, data, logs, decisions of callbacks and state of layers are not "
    "compared, and moving statistics are not averaged; use hk.fit, or pass hk.callbacks.BroadcastInitial()"
)


def compare_start(optimizer: keras.optimizers.Optimizer, variables: Sequence[AnyVariable], *, is_fit: bool) -> None:
    """Have all ranks start with the chief's weights, slots and learning rate. Every rank calls it in its first step.

    While the step is being traced, weights can still be changed. In eager mode, its forward pass has already run; and a
    loop may broadcast after its first step, as programs for Horovod do, so only ``fit`` is checked.

    Raises:
        CollectiveMismatchError: they differ, in eager mode or with ``process_set``; or callbacks of several ranks write
            to one path.
    """
    group = optimizer._hvdkit.group
    is_late = not tf.inside_function()
    combines = any(part._hvdkit.combines for part in _distributed_parts([optimizer]))
    if cluster.size() == 1 or not (is_fit or (combines and group is None and not is_late)):
        return
    if is_fit:
        warn_of_no_callback()
    with tf.init_scope():
        known = with_values([*variables, *slots_of(optimizer)])
        exchange = cluster.exchange(group)

        def start() -> tuple[bytes, dict[str, str]]:
            return digest_of(known), written_paths(
                lambda model: any(each is optimizer for each in vars(model).values())
            )

        ranks = gather(exchange, "weights before the first step", start)
        check_paths([paths for _, paths in ranks], exchange.ranks)
        weights = [each for each, _ in ranks]
        synchronize_start(weights, known, group, is_late=is_late, what="fit" if is_fit else "training step")


def synchronize_start(
    digests: Sequence[bytes],
    variables: Sequence[AnyVariable],
    group: cluster.Group | None,
    *,
    is_late: bool = False,
    what: str = "fit",
) -> None:
    """Compare the ranks' digests; if they differ, warn and broadcast the chief's variables.

    Args:
        digests: of the trained variables and those of optimizers, on each rank.
        variables: what to broadcast.
        group: the ranks; None for all.
        is_late: whether a step has already used the variables.
        what: who trains, for the warning.

    Raises:
        CollectiveMismatchError: they differ, and it is late, or ``group`` is not None.
    """
    if len(set(digests)) == 1:
        return
    if is_late or group is not None:
        differ = "different weights, slots or learning rate before the first step", "equal ones"
        compare(digests, "model", REMEDY, ranks=cluster.exchange(group).ranks, show=lambda *_: differ)
    if cluster.is_chief():
        got = "weights, slots or a learning rate that differ between ranks before the first step"
        remedy = REMEDY if what == "fit" else "call hk.broadcast_variables before the first step"
        get_logger().warning("%s: got %s: all ranks start with the chief's; %s", what, got, remedy)
    broadcast_variables(variables)


def compare_end(variables: Iterable[AnyVariable], group: cluster.Group | None) -> None:
    """Compare the weights of a model at the end of ``fit``. Every rank must call it.

    Raises:
        CollectiveMismatchError: they differ; raised on every rank.
    """
    agree(
        cluster.exchange(group),
        lambda: digest_of(variables),
        "weights at the end of fit",
        REMEDY,
        show=lambda *_: ("different weights, although they were equal before", "equal ones"),
    )


def warn_of_no_callback() -> None:
    """Warn on the chief, once per process, that no callback of hvdkit is in a ``fit``."""
    if cluster.size() > 1 and cluster.is_chief():
        warn_once(_NO_CALLBACK)


def digest_of(variables: Iterable[AnyVariable]) -> bytes:
    """Return one digest of the values of all replicated ``variables``."""
    return xxhash.xxh3_128_digest(b"".join(digest(v) for v in variables if not differs_by_rank(v)))


@contextlib.contextmanager
def checked(optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Inside, the caller checks ``fit``: the optimizers compare nothing themselves."""
    before = {id(part): part._hvdkit_is_checked for part in _distributed_parts(optimizers)}
    mark_checked(optimizers, True)
    try:
        yield
    finally:
        for part in _distributed_parts(optimizers):
            part._hvdkit_is_checked = before.get(id(part), False)


def mark_checked(optimizers: Sequence[keras.optimizers.Optimizer], is_checked: bool) -> None:
    """Set whether hk.fit or a callback checks the current ``fit``."""
    for part in _distributed_parts(optimizers):
        part._hvdkit_is_checked = is_checked


def _distributed_parts(optimizers: Sequence[keras.optimizers.Optimizer | None]) -> list[keras.optimizers.Optimizer]:
    return [part for each in optimizers for part in with_inner(each) if hasattr(part, "_hvdkit_is_checked")]


def note_equal(optimizer: keras.optimizers.Optimizer | None) -> None:
    """Record that the ranks start with equal weights and slots."""
    for part in _distributed_parts([optimizer]):
        part._hvdkit_starts_equal = True


def with_values(variables: Sequence[AnyVariable]) -> list[AnyVariable]:
    """Return the variables that have a value: not those that are being created while a step is traced."""
    return [v for v in variables if bool(tf_variable(v).is_initialized())]
