"""``hk.predict``: Keras's ``model.predict`` for the whole job."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from keras.src import tree

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.collectives.call_checks import Call, agree_on_call, attempt
from hvdkit.errors import describe
from hvdkit.training.fit_session import Session
from hvdkit.training.inputs import FitData, prepare
from hvdkit.training.keras_callbacks import Callbacks
from hvdkit.training.shares import DataRank, Shares

_PIECE_BYTES = 64 * 2**20
"""Bytes of each rank's predictions per exchange."""


def predict(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    *,
    gather: Literal["all", "chief"] = "all",
) -> Any:
    """Return the predictions that ``model.predict`` returns in one process. Every rank must call it.

    Args:
        model: a Keras model; all ranks get the chief's weights.
        x, steps: as for ``model.predict``; users pass the whole data set on every rank.
        batch_size: rows per global batch; at least the number of ranks. Default 32. None for a
            ``hk.data.GlobalBatches``, of which the first epoch is read.
        verbose: as for ``model.predict``; only the chief prints.
        callbacks: as for :func:`hvdkit.fit`.
        gather: "all" returns all rows on every rank; "chief" returns them on the chief, and None on other ranks.

    Returns:
        Arrays ``[rows, ...]`` in the order of the data, in the structure of the model's outputs.

    Raises:
        ValueError: ``gather`` is invalid; or as for :func:`hvdkit.fit`.
        TypeError: the model's outputs are not dense arrays.
        CollectiveMismatchError, HvdkitError: as for :func:`hvdkit.fit`.

    Example::

        scores = hk.predict(model, x_test)
    """

    def build() -> list[Shares | None]:
        if gather not in ("all", "chief"):
            raise ValueError(describe("gather", gather, "'all' or 'chief'", "pass one of the two"))
        return [FitData(x=x, batch_size=batch_size, steps=steps).shares()]

    own = prepare(f"hk.predict(batch_size={batch_size}, steps={steps}, gather={gather!r})", build)[0]
    assert own is not None
    session = Session.of(model, may_be_empty=own.may_be_empty)
    with session.running():
        listed = Callbacks(callbacks, session, own, verbose=verbose, epochs=1, steps=steps, trains=False)
        outputs, rows = model.predict(own, verbose=verbose, steps=steps, callbacks=listed)
    order = _order(rows, DataRank.here().size)
    _check(outputs, rows)
    keep = gather == "all" or cluster.is_chief()
    return (
        tree.map_structure(lambda local: _in_order(_gathered(local, keep), order), outputs) if keep else _help(outputs)
    )


def _help(outputs: Any) -> None:
    for local in tree.flatten(outputs):
        _gathered(local, keep=False)


def _check(outputs: Any, rows: np.ndarray) -> None:
    """Compare the outputs between ranks; they must be dense, with one row per example."""
    place = DataRank.here()
    expected = sum(int(np.subtract(*place.bounds(int(b))[::-1])) for b in rows)
    call = Call("hk.predict's outputs")

    def check() -> None:
        for local in tree.flatten(outputs):
            if not isinstance(local, np.ndarray) or not local.ndim or len(local) != expected:
                got = f"{type(local).__name__} of shape {getattr(local, 'shape', None)} on rank {cluster.rank()}"
                remedy = "return dense tensors [rows, ...] from the model"
                raise TypeError(describe("model's outputs", got, f"an array of {expected} rows", remedy))
        call.dtypes = tuple(local.dtype.name for local in tree.flatten(outputs))
        call.shapes = tuple(local.shape for local in tree.flatten(outputs))
        call.uneven = True

    call.problem = attempt(check)
    agree_on_call(call)


def _gathered(local: np.ndarray, keep: bool) -> list[np.ndarray]:
    """Return the rows of all data ranks in rank order, or nothing without ``keep``. Every rank must call it."""
    along = cluster.group(cluster.DATA)
    exchange = cluster.exchange(None if along.size == cluster.size() else along)
    flat = np.ascontiguousarray(local).reshape(-1).view(np.uint8)
    lengths = gather(exchange, "bytes of hk.predict's outputs", lambda: flat.size)
    parts = [np.empty(length if keep else 0, np.uint8) for length in lengths]
    for start in range(0, max(lengths), _PIECE_BYTES):
        for part, received in zip(
            parts, exchange.allgather_bytes(flat[start : start + _PIECE_BYTES].tobytes()), strict=True
        ):
            if keep:
                part[start : start + len(received)] = np.frombuffer(received, np.uint8)
    return [part.view(local.dtype).reshape(-1, *local.shape[1:]) for part in parts] if keep else []


def _order(rows: np.ndarray, size: int) -> list[list[tuple[int, int]]]:
    """Return for each rank the bounds of its rows of each global batch, within the complete data.

    Example:
        >>> _order(np.array([4, 3]), 2)
        [[(0, 2), (4, 5)], [(2, 4), (5, 7)]]
    """
    starts = np.cumsum(rows) - rows
    bounds = []
    for index in range(size):
        pairs = [DataRank(index, size).bounds(int(b)) for b in rows]
        bounds.append([(int(s) + first, int(s) + last) for s, (first, last) in zip(starts, pairs, strict=True)])
    return bounds


def _in_order(parts: list[np.ndarray], order: list[list[tuple[int, int]]]) -> np.ndarray:
    """Return the ranks' rows in the order of the data."""
    total = sum(len(part) for part in parts)
    whole = np.empty((total, *parts[0].shape[1:]), parts[0].dtype)
    for part, bounds in zip(parts, order, strict=True):
        at = 0
        for first, last in bounds:
            whole[first:last] = part[at : at + last - first]
            at += last - first
    return whole
