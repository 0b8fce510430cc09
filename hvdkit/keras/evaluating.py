"""``hk.evaluate``: Keras's ``model.evaluate`` for the whole job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras

from hvdkit.cluster.lone_training import evaluation
from hvdkit.keras.compiled_functions import jit_mode
from hvdkit.keras.fit_session import FitSession, check_all_ranks_call, check_model
from hvdkit.keras.inputs import DataPair, FitData, prepare_data
from hvdkit.keras.keras_callbacks import CallbackList
from hvdkit.keras.own_methods import call_own, has_own, keras_method
from hvdkit.keras.strategies import outside_strategy

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Arrays, InputData


@outside_strategy()
@evaluation()
def evaluate(
    model: keras.Model,
    x: InputData | None = None,
    y: Arrays | None = None,
    batch_size: int | None = None,
    verbose: int | str = "auto",
    sample_weight: Arrays | None = None,
    steps: int | None = None,
    callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None = None,
    return_dict: bool = False,
) -> float | list[float] | dict[str, float]:
    """Return the loss and metrics that ``model.evaluate`` returns in one process. Every rank must call it.

    Args:
        model: a compiled Keras model; all ranks get the chief's weights.
        x: the whole data set, on every rank, as for ``hk.fit``.
        y: the labels, if ``x`` is arrays.
        batch_size: rows per global batch; at least the number of ranks. Default 32. None for a
            ``hk.data.GlobalBatches``, of which the first epoch is read.
        verbose: as in Keras, but only the chief prints.
        sample_weight: weights of the rows of arrays in the loss and the weighted metrics.
        steps: global batches to evaluate; default: all.
        callbacks: as for ``hk.fit``.
        return_dict: return a dict instead of a list.

    Returns:
        The loss, or a list or dict of the loss and metrics, as in Keras; the same on every rank.

    Raises:
        ValueError, CollectiveMismatchError, HvdkitError: as for ``hk.fit``.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> model.compile(loss="mse", metrics=["mae"])
        >>> x, y = np.ones((100, 4)), 2 * np.ones((100, 1))  # the whole data set, on every rank
        >>> hk.evaluate(model, x, y, verbose=0)
        [4.0, 2.0]
    """

    arguments = dict(locals())
    check_all_ranks_call("hk.evaluate")
    del arguments["model"]
    result: float | list[float] | dict[str, float]
    if has_own(model, "evaluate"):
        result = call_own(model, "evaluate", evaluate, arguments)
        return result

    def build() -> DataPair:
        check_model(model)
        data = FitData(x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps=steps)
        return data.shares_for(model), None

    shares, _ = prepare_data(
        f"hk.evaluate(batch_size={batch_size}, steps={steps}, jit_compile={jit_mode(model)})", build
    )
    session = FitSession.of(model, may_be_empty=shares.may_be_empty, may_gather=not shares.has_whole_tensors)
    with session.running(shares):
        callback_list = CallbackList(callbacks, session, shares, verbose=verbose, epochs=1, steps=steps, trains=False)
        result = keras_method(model, "evaluate")(
            shares, verbose=verbose, steps=steps, callbacks=callback_list, return_dict=return_dict
        )
        return result
