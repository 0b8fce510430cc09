"""When ``hk.fit`` compares what the ranks' models compute: before the first batch if it can, otherwise after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.collectives import broadcast_object
from hvdkit.keras.array_shares import ArrayShares
from hvdkit.keras.rank_functions import FirstRows, compare_functions, rows_to_compare
from hvdkit.keras.shares import Shares
from hvdkit.keras.train_steps import is_complete


class FunctionComparison:
    """Compares a model once in evaluation or prediction, and once in training.

    Args:
        model: a Keras model.
        tests_rows: returns whether a model that compares the rows of a batch is an error.
    """

    def __init__(self, model: keras.Model, tests_rows: Callable[[], bool]) -> None:
        self._model = model
        self._tests_rows = tests_rows
        self._trains = False  # whether the model has been compared, or is about to be, as one that trains
        self._first_rows: FirstRows | None = FirstRows() if cluster.size() > 1 else None  # None: it has been compared

    def observe(self, data: Any) -> None:
        """Keep the first rows of a batch, in a step that may be traced."""
        if self._first_rows is not None:
            self._first_rows.observe(data, rows_to_compare(self._model))

    def before(self, data: Shares | None, *, trains: bool = False) -> None:
        """Compare the models before the first batch is read. Every rank must call it.

        If the data are not arrays, models with known inputs compute made-up rows, and all models are compared after the
        first batch.
        """
        if trains and not self._trains and cluster.size() > 1:
            self._trains = True
            self._first_rows = self._first_rows or FirstRows()
        if self._first_rows is None:
            return
        number = broadcast_object(rows_to_compare(self._model))  # a Sequential is built with the rows of a rank's batch
        rows = data.first_inputs(number) if isinstance(data, ArrayShares) else None
        if self._is_complete_on_all_ranks():
            self._first_rows = None if rows is not None else self._first_rows
            self._compare(rows)

    def after(self) -> None:
        """Compare the models after the first batch, if not before it. Every rank must call it."""
        if self._first_rows is not None:
            first_rows = self._first_rows
            self._first_rows = None
            rows = first_rows.broadcast()
            if self._is_complete_on_all_ranks():
                self._compare(rows, is_reading=True)

    def _is_complete_on_all_ranks(self) -> bool:
        return all(gather(cluster.exchange(), "whether the model is built", lambda: is_complete(self._model)))

    def _compare(self, rows: Any, *, is_reading: bool = False) -> None:
        compare_functions(self._model, rows, tests_rows=self._tests_rows(), trains=self._trains, is_reading=is_reading)
