"""Find declared state that a training step reads after its update, where it still follows the rows of one rank.

``hk.synchronize`` combines state after the step. A layer that updates a running mean and then subtracts it uses the
mean of its rank's rows, while one process uses that of the global batch. After a step has been traced, reads of such a
variable are followed forwards through the graph. One counts if a collective depends on it, as that of the gradients:
reads for metrics and logs do not. Updates that do not depend on the batch, or only through a collective, are skipped.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.logs import warn_once
from hvdkit.errors import see
from hvdkit.keras.moved_weights import depends_on_rows
from hvdkit.sharding.shards import AnyVariable
from hvdkit.sharding.variables import variable_name

_COLLECTIVE = "Horovod"  # the beginning of the types of Horovod's ops
_UPDATES = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}


def warn_of_reads_after_update(variables: list[AnyVariable], data: Any) -> None:
    """Warn on the chief, once, of variables that the step in the current graph reads after it has assigned to them.

    Call it after the step. In eager mode it does nothing.

    Args:
        variables: those that are combined after the step.
        data: the batch of the step.
    """
    if not tf.inside_function() or not cluster.is_chief():
        return
    graph = tf.compat.v1.get_default_graph()
    for variable in variables:
        handle = getattr(variable, "_value", variable).handle  # of a Keras variable, whose value may be cast
        inside = next((placeholder for outside, placeholder in graph.captures if outside is handle), None)
        if inside is not None and _is_used_after_update(graph, inside, data):
            warn_once(
                f"{variable_name(variable)}: read after its update in the same step, when it is still that of each "
                "rank's rows; in one process it is that of the global batch: use it before the update, or update it "
                f"from hk.allreduce of the batch's sums; {see('pitfalls#state-that-is-updated-from-the-batch')}"
            )


def _is_used_after_update(graph: Any, handle: tf.Tensor, data: Any) -> bool:
    """Return True if a collective depends on a value of the variable that was read after an update by the batch."""
    place = {op: i for i, op in enumerate(graph.get_operations())}  # in the order of the program
    users = handle.consumers()
    updates = [op for op in users if op.type in _UPDATES and depends_on_rows(op.inputs[1], data)]
    if not updates:
        return False
    first = min(place[op] for op in updates)
    pending = [op for op in users if op.type == "ReadVariableOp" and place[op] > first]
    seen: set[tf.Operation] = set()
    while pending:
        op = pending.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type.startswith(_COLLECTIVE):
            return True
        pending.extend(user for output in op.outputs for user in output.consumers())
    return False
