"""``hk.evaluate``: Keras's ``model.evaluate`` for the whole job."""

from __future__ import annotations

from typing import Any

from hvdkit.training.fit_session import Session
from hvdkit.training.inputs import FitData, prepare
from hvdkit.training.keras_callbacks import Callbacks, checked_model
from hvdkit.training.shares import Shares


def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
) -> Any:
    """Return the loss and metrics that ``model.evaluate`` returns in one process. Every rank must call it.

    Args:
        model: a compiled Keras model; all ranks get the chief's weights.
        x, y, sample_weight, steps, return_dict: as for ``model.evaluate``; users pass the whole data set on every rank.
        batch_size: rows per global batch; at least the number of ranks. Default 32. None for a
            ``hk.data.GlobalBatches``, of which the first epoch is read.
        verbose: as for ``model.evaluate``; only the chief prints.
        callbacks: as for :func:`hvdkit.fit`.

    Returns:
        Keras's list, number or dict, the same on every rank.

    Raises:
        ValueError, CollectiveMismatchError, HvdkitError: as for :func:`hvdkit.fit`.

    Example::

        loss, accuracy = hk.evaluate(model, x_test, y_test)
    """

    def build() -> list[Shares | None]:
        checked_model(model)
        given = FitData(x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps=steps)
        return [given.shares()]

    own = prepare(f"hk.evaluate(batch_size={batch_size}, steps={steps})", build)[0]
    assert own is not None
    session = Session.of(model, may_be_empty=own.may_be_empty)
    with session.running():
        listed = Callbacks(callbacks, session, own, verbose=verbose, epochs=1, steps=steps, trains=False)
        return model.evaluate(own, verbose=verbose, steps=steps, callbacks=listed, return_dict=return_dict)
