"""``hk.predict``: Keras's ``model.predict`` for the whole job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.lone_training import evaluation
from hvdkit.collectives.call_checks import Call, agree_on_call, attempt
from hvdkit.errors import describe
from hvdkit.keras.compiled_functions import jit_mode
from hvdkit.keras.fit_session import FitSession, check_all_ranks_call
from hvdkit.keras.inputs import DataPair, FitData, prepare_data
from hvdkit.keras.keras_callbacks import CallbackList
from hvdkit.keras.own_methods import call_own, has_own, keras_method
from hvdkit.keras.row_gathering import gather_rows, kind_of, number_of_local_rows
from hvdkit.keras.strategies import outside_strategy
from hvdkit.keras.train_steps import OUTPUTS_REMEDY

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Arrays, InputData


@outside_strategy()
@evaluation()
def predict(
    model: keras.Model,
    x: InputData,
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
        Arrays ``[rows, ...]`` in the order of the data, in the structure of the model's outputs. As in Keras, strings
            are arrays of bytes objects, and ragged and sparse outputs are RaggedTensors and SparseTensors.

    Raises:
        ValueError: ``gather`` is invalid; or as for ``hk.fit``.
        TypeError: on several ranks, an output does not have one row for each example, such as a number per batch.
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

    arguments = dict(locals())
    check_all_ranks_call("hk.predict")
    del arguments["model"], arguments["gather"]
    if has_own(model, "predict"):  # it may change what it gets from Keras, so every rank needs it
        outputs = call_own(model, "predict", predict, arguments)
        return outputs if gather == "all" or cluster.is_chief() else None

    def build() -> DataPair:
        if gather not in ("all", "chief"):
            raise ValueError(describe("gather", gather, "'all' or 'chief'", "pass one of the two"))
        return FitData(x=x, batch_size=batch_size, steps=steps).shares_for(model, has_loss=False), None

    how = f"steps={steps}, gather={gather!r}, jit_compile={jit_mode(model)}"
    shares, _ = prepare_data(f"hk.predict(batch_size={batch_size}, {how})", build)
    session = FitSession.of(model, may_be_empty=shares.may_be_empty)
    with session.running(shares):
        callback_list = CallbackList(callbacks, session, shares, verbose=verbose, epochs=1, steps=steps, trains=False)
        outputs, rows = keras_method(model, "predict")(shares, verbose=verbose, steps=steps, callbacks=callback_list)
    if cluster.size() == 1:
        return outputs
    _check_outputs(outputs, number_of_local_rows(rows))
    keep = gather == "all" or cluster.is_chief()
    gathered = tree.map_structure(lambda local: gather_rows(local, rows, keep=keep), outputs)
    return gathered if keep else None


def _check_outputs(outputs: Arrays, expected: int) -> None:
    """Compare the outputs between ranks; they must have a row for each of ``expected`` examples."""
    call = Call("hk.predict's outputs")

    def check() -> None:
        kinds: list[tuple[str, tuple[int, ...]]] = []
        for local in tree.flatten(outputs):
            kind = kind_of(local)
            if kind is None or kind[1][0] != expected:
                got = f"{type(local).__name__} of shape {getattr(local, 'shape', None)} on rank {cluster.rank()}"
                raise TypeError(describe("model's outputs", got, f"{expected} rows", OUTPUTS_REMEDY))
            kinds.append(kind)
        call.dtypes = tuple(name for name, _ in kinds)
        call.shapes = tuple(shape for _, shape in kinds)
        call.uneven = True

    call.problem = attempt(check)
    agree_on_call(call)
