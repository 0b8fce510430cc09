"""Report steps to the profiler in user programs that don't count them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdkit.cluster.progress import progress
from hvdkit.collectives.graphs import is_for_xla
from hvdkit.optimizer.gradients import Gradient


def report_step(grads: Sequence[Gradient], call_site: str) -> None:
    """Report to the profiler, if active, that ``grads`` are combined; inside a graph, on every execution.

    Args:
        grads: the combined gradients; a graph reports when the first of them is available.
        call_site: identifies the call site; the first call site that reports marks the end of each step.
    """
    recorder = progress().profile
    if recorder is None:
        return
    if not tf.inside_function():
        recorder.gradients_combined(call_site)
        return
    first = next((g for g in grads if g is not None), None)
    # XLA has no kernel for numpy_function.
    if first is None or is_for_xla():
        return
    values = first.values if isinstance(first, tf.IndexedSlices) else first

    def report(_: np.ndarray) -> np.int32:
        recorder.gradients_combined(call_site)
        return np.int32(0)

    tf.numpy_function(report, [tf.reshape(values, [-1])[:1]], tf.int32, name="hvdkit_profile")
