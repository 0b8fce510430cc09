"""Combine the metric states of all ranks into the metrics of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from keras.src import tree

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.collectives import Sum, grouped_allreduce
from hvdkit.layers import average_moving_statistics
from hvdkit.training.metric_checks import states

Logs = Mapping[str, Any]


class Results:
    """The logs of an epoch or an evaluation, equal to those of one process.

    Args:
        model: a compiled Keras model.
        original: its ``_get_metrics_result_or_logs``.
        factor: returns the factor of this rank's last step.
    """

    def __init__(self, model: Any, original: Callable[[Any], Any], factor: Callable[[], float]) -> None:
        self._model, self._original, self._factor = model, original, factor

    def at_end(self, logs: Any) -> Any:
        """Average the moving statistics at the end of an epoch or an evaluation, and return :meth:`combined`."""
        average_moving_statistics(self._model)  # before they are evaluated, saved or exported
        return self.combined(logs)

    def combined(self, logs: Any) -> Any:
        """Return the logs for Keras to report. Every rank must call it.

        Args:
            logs: the return value of the last step.
        """
        along = cluster.group(cluster.DATA)
        if along.size == 1:
            return tree.map_structure(np.asarray, self._original(logs))
        variables = states(self._model)
        local = [np.asarray(v) for _, v in variables]
        group = None if along.size == cluster.size() else along
        for (_, variable), total in zip(variables, grouped_allreduce(local, Sum, process_set=group), strict=True):
            is_mean = getattr(variable, "aggregation", "sum") == "mean"
            variable.assign(total / along.size if is_mean else total)
        # Copy the values: a metric may return its variable, which is reset to the local value below.
        whole = tree.map_structure(np.asarray, self._model.get_metrics_result())
        for (_, variable), value in zip(variables, local, strict=True):
            variable.assign(value)
        if not isinstance(logs, Mapping):
            return tree.map_structure(np.asarray, self._original(logs))
        if set(logs) == set(whole):
            return whole
        return self._with_means(_flat(logs), self._model.get_metrics_result(), whole, group)

    def _with_means(self, logs: Logs, own: Logs, whole: Logs, group: Any) -> dict[str, Any]:
        """Return the logs of the last step: combined results of metrics, and row-weighted means of other numbers."""
        local = {key: (np.asarray(value), key in own and _equal(value, own[key])) for key, value in logs.items()}
        kind = f"logs of the last step ({', '.join(sorted(local))})"
        ranks = gather(cluster.exchange(group), kind, lambda: (self._factor(), local))
        total = sum(factor for factor, _ in ranks)
        results: dict[str, Any] = {}
        for key in logs:
            if all(each[key][1] for factor, each in ranks if factor):
                results[key] = whole[key]
                continue
            parts = [factor * each[key][0].astype("float64") for factor, each in ranks if factor]
            results[key] = np.sum(parts, axis=0).astype(local[key][0].dtype) / np.asarray(total, local[key][0].dtype)
        return results


def _flat(logs: Logs) -> dict[str, Any]:
    """Flatten nested logs, as for callbacks: a step may return a dict of compiled metrics."""
    found: dict[str, Any] = {}
    for key, value in logs.items():
        found |= _flat(value) if isinstance(value, Mapping) else {key: value}
    return found


def _equal(value: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(value), np.asarray(other), equal_nan=True)
