"""Combine the metric states of all ranks into the metrics of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import tree

from hvdkit import cluster
from hvdkit.cluster import Group
from hvdkit.cluster.agreement import gather
from hvdkit.collectives import Sum, grouped_allreduce
from hvdkit.errors import HvdkitError, describe
from hvdkit.keras.metric_checks import metric_states

Logs = Mapping[str, object]


class MetricCombiner:
    """Combines the logs of an epoch or an evaluation, so that they equal those of one process.

    ``factor`` returns the factor by which this rank's loss was scaled in the last step.
    """

    def __init__(self, model: keras.Model, factor: Callable[[], float]) -> None:
        self._model = model
        self._factor = factor
        self._original = model._get_metrics_result_or_logs

    def combine(self, logs: object, *, keeps_totals: bool = False, of_batch: bool = False) -> Any:
        """Return the logs for Keras to report. Every rank must call it.

        Args:
            logs: the return value of the last step.
            of_batch: return logs of a batch: Keras passes what the step has returned to callbacks, also if it is the
                metrics' names with other values.
            keeps_totals: leave the states of the job in the metrics, as in one process. Keras resets the metrics, or
                has them reset, before the next step.
        """
        size = cluster.group(cluster.DATA).size
        group = cluster.data_group()
        if size == 1 or not isinstance(logs, Mapping):
            return tree.map_structure(np.asarray, logs if of_batch else self._original(logs))
        variables = metric_states(self._model)
        local = self.states()
        values = [value for _, value in local]
        for (_, variable), total in zip(variables, grouped_allreduce(values, Sum, process_set=group), strict=True):
            is_mean = getattr(variable, "aggregation", "sum") == "mean"
            variable.assign(total / size if is_mean else total)
        # Copy the values: a metric may return its variable, which is reset to the local value below.
        results = tree.map_structure(np.asarray, self._model.get_metrics_result())
        totals = self.states()
        self.restore(local)
        if of_batch or set(logs) != set(results):
            results = self._with_means(_flat(logs), self._model.get_metrics_result(), results, group)
        if keeps_totals:
            self.restore(totals)
        return results

    def states(self) -> list[tuple[keras.Variable, np.ndarray]]:
        """Return the variables of the metrics with their values."""
        return [(variable, np.asarray(variable)) for _, variable in metric_states(self._model)]

    def restore(self, states: list[tuple[keras.Variable, np.ndarray]]) -> None:
        """Set variables to values that :meth:`states` returned."""
        for variable, value in states:
            variable.assign(value)

    def keep_on_first_rank(self) -> None:
        """Zero the sums of all data ranks but the first, after all ranks got the states of the job."""
        if cluster.group(cluster.DATA).index == 0:
            return
        for variable, value in self.states():
            if getattr(variable, "aggregation", "sum") == "sum" and np.any(value):
                variable.assign(np.zeros_like(value))

    def _with_means(self, logs: Logs, local_results: Logs, results: Logs, group: Group | None) -> dict[str, object]:
        """Return the logs of the last step: combined results of metrics, and row-weighted means of other numbers.

        A step may return the result of a metric under another name, as that of a tracker as the loss.
        """
        local = {
            key: (np.asarray(value), [name for name, result in local_results.items() if _equal(value, result)])
            for key, value in logs.items()
        }
        kind = f"logs of the last step ({', '.join(sorted(local))})"
        ranks = gather(cluster.exchange(group), kind, lambda: (self._factor(), local))
        total = sum(factor for factor, _ in ranks)
        combined: dict[str, object] = {}
        for key in logs:
            names = [name for name in results if all(name in each[key][1] for factor, each in ranks if factor)]
            if names:
                combined[key] = results[key if key in names else names[0]]
                continue
            if local[key][0].dtype.kind in "OSU":
                combined[key] = _same_text(key, [each[key][0] for factor, each in ranks if factor])
                continue
            terms = [factor * each[key][0].astype("float64") for factor, each in ranks if factor]
            combined[key] = np.sum(terms, axis=0).astype(local[key][0].dtype) / np.asarray(total, local[key][0].dtype)
        return combined


def _same_text(key: str, values: list[np.ndarray]) -> np.ndarray:
    """Return the text that a step has returned on all ranks, or raise on all of them if it differs."""
    if not all(np.array_equal(value, values[0]) for value in values):
        got = ", ".join(repr(value.item()) for value in values)
        raise HvdkitError(describe(f"logs[{key!r}]", got, "one text on all ranks", "return numbers of rows"))
    return values[0]


def _flat(logs: Logs) -> dict[str, object]:
    """Flatten nested logs, as for callbacks: a step may return a dict of compiled metrics."""
    flat: dict[str, object] = {}
    for key, value in logs.items():
        flat |= _flat(value) if isinstance(value, Mapping) else {key: value}
    return flat


def _equal(value: object, other: object) -> bool:
    arrays = np.asarray(value), np.asarray(other)
    is_text = any(array.dtype.kind in "OSU" for array in arrays)
    return not is_text and np.array_equal(*arrays, equal_nan=True)
