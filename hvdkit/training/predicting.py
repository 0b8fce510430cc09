"""``hk.predict``: Keras's ``model.predict`` for the whole job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
from keras.src import tree

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.collectives.call_checks import Call, agree_on_call, attempt
from hvdkit.errors import describe
from hvdkit.training.fit_session import FitSession
from hvdkit.training.inputs import DataPair, FitData, prepare_data
from hvdkit.training.keras_callbacks import CallbackList
from hvdkit.training.shares import DataRank, data_group

_CHUNK_BYTES = 64 * 2**20
"""Bytes of each rank's predictions per exchange."""


def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: int | str = "auto",
    steps: int | None = None,
    callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None = None,
    *,
    gather: Literal["all", "chief"] = "all",
) -> Any:
    """Return the predictions that ``model.predict`` returns in one process. Every rank must call it.

    Args:
        model: a Keras model; all ranks get the chief's weights.
        x: the whole data set, on every rank, as for ``hk.fit``.
        batch_size: rows per global batch; at least the number of ranks. Default 32. None for a
            ``hk.data.GlobalBatches``, of which the first epoch is read.
        verbose: as in Keras, but only the chief prints.
        steps: global batches to read; default: all.
        callbacks: as for ``hk.fit``.
        gather: "all" returns all rows on every rank; "chief" returns them on the chief, and None on other ranks.

    Returns:
        Arrays ``[rows, ...]`` in the order of the data, in the structure of the model's outputs.

    Raises:
        ValueError: ``gather`` is invalid; or as for ``hk.fit``.
        TypeError: the model's outputs are not dense arrays.
        CollectiveMismatchError, HvdkitError: as for ``hk.fit``.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        >>> scores = hk.predict(model, np.ones((100, 4)), verbose=0)  # all rows, on every rank
        >>> scores.shape, scores[0].tolist()
        ((100, 1), [4.0])
    """

    def build() -> DataPair:
        if gather not in ("all", "chief"):
            raise ValueError(describe("gather", gather, "'all' or 'chief'", "pass one of the two"))
        return FitData(x=x, batch_size=batch_size, steps=steps).shares(), None

    shares, _ = prepare_data(f"hk.predict(batch_size={batch_size}, steps={steps}, gather={gather!r})", build)
    session = FitSession.of(model, may_be_empty=shares.may_be_empty)
    with session.running(shares):
        callback_list = CallbackList(callbacks, session, shares, verbose=verbose, epochs=1, steps=steps, trains=False)
        outputs, rows = model.predict(shares, verbose=verbose, steps=steps, callbacks=callback_list)
    _check_outputs(outputs, len(_row_numbers(rows, DataRank.local())))
    keep = gather == "all" or cluster.is_chief()
    gathered = tree.map_structure(lambda local: _gather_rows(local, rows, keep=keep), outputs)
    return gathered if keep else None


def _check_outputs(outputs: Any, expected: int) -> None:
    """Compare the outputs between ranks; they must be dense, with a row for each of ``expected`` examples."""
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


def _gather_rows(local: np.ndarray, rows: np.ndarray, *, keep: bool) -> np.ndarray:
    """Return the rows of all data ranks in the order of the data; none unless ``keep``. Every rank must call it."""
    exchange = cluster.exchange(data_group())
    flat = np.ascontiguousarray(local).reshape(-1).view(np.uint8)
    lengths = gather(exchange, "bytes of hk.predict's outputs", lambda: flat.size)
    parts = [np.empty(length if keep else 0, np.uint8) for length in lengths]
    for start in range(0, max(lengths), _CHUNK_BYTES):
        chunks = exchange.allgather_bytes(flat[start : start + _CHUNK_BYTES].tobytes())
        for part, chunk in zip(parts, chunks, strict=True):
            if keep:
                part[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
    if not keep:
        return local[:0]
    ordered = np.empty((rows.sum(), *local.shape[1:]), local.dtype)
    for index, part in enumerate(parts):
        ordered[_row_numbers(rows, DataRank(index, len(parts)))] = part.view(local.dtype).reshape(-1, *local.shape[1:])
    return ordered


def _row_numbers(rows: np.ndarray, data_rank: DataRank) -> np.ndarray:
    """Return which rows of the complete data a rank has, given the rows of each global batch.

    Example:
        >>> _row_numbers(np.array([4, 3]), DataRank(1, 2)).tolist()
        [2, 3, 5, 6]
    """
    rows = rows.astype(np.int64)
    first = np.cumsum(rows) - rows
    start, end = data_rank.bounds(rows)
    return np.concatenate(list(map(np.arange, first + start, first + end)))
