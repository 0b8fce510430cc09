"""Find what a training step assigns from a gradient of one rank's rows.

Optimizers average gradients over ranks; a step that uses a gradient before that uses the one of its rank's rows:

    weights      a step that moves them, takes a second gradient there and moves them back (SAM). Ranks take the second
                 one at different weights, and no comparison after the step notices it: an error, unless the move may
                 belong to single rows, as in meta-learning.
    other state  gradients that are summed for several steps. Sums are combined as by ``hk.synchronize(v, "mean")``,
                 which is exact as long as they are linear in the gradients; otherwise an error.

While the step is traced, each value that is assigned is followed back through the graph. It counts if it depends on the
batch through the operations of a tape without a collective in between. Values that are read from variables do not:
averages of weights, target networks, constraints, weights that are restored.

State with a rule of ``hk.synchronize`` is combined after the step. A layer that updates a running mean and then
subtracts it uses the mean of its rank's rows, while one process uses that of the global batch. So reads after an update
are followed forwards, too. One counts if a collective depends on it, as that of the gradients: reads for metrics and
logs do not. Updates that do not depend on the batch, or only through a collective, are skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger, warn_once
from hvdkit.compiling.operations import CALLS, LOOPS_AND_BRANCHES, Library, is_collective
from hvdkit.errors import HvdkitError, describe, see
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.keras.model_optimizers import optimizers_of
from hvdkit.keras.rank_state import StateVariable, combine_sums, has_rule, state_of
from hvdkit.sharding.shards import AnyVariable, differs_by_rank
from hvdkit.sharding.variables import variable_name

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Tensors

_PAGE = see("pitfalls#two-gradients-in-a-step-as-in-sam")
_AVERAGE = "average it first, hk.average_gradients(tape.gradient(loss, variables))"
_TAPE = "gradient_tape"  # the name scope in which tf.GradientTape computes
_SAME_ON_ALL_RANKS = {"HorovodAllreduce", "HorovodGroupedAllreduce", "HorovodAllgather", "HorovodBroadcast"}
_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}  # they do not pass values on
_CALLS = CALLS | LOOPS_AND_BRANCHES
_SELECTIONS = {"StridedSlice", "Slice", "GatherV2", "GatherNd", "Unpack", "Split", "SplitV", "While", "StatelessWhile"}
_LINEAR = {"AddV2", "Add", "AddN", "Sub", "Neg", "Identity", "Cast", "Reshape", "StopGradient", "Select"}
_LINEAR |= {"SelectV2", "EnsureShape", "UnsortedSegmentSum", "ZerosLike", "Squeeze", "ExpandDims", "ReadVariableOp"}
_LINEAR |= {"StridedSlice", "Slice", "GatherV2", "ConcatV2", "Pack", "Transpose", "Sum", "Mean"}
_PRODUCTS = {"Mul", "MulNoNan", "RealDiv", "DivNoNan"}  # linear in one factor, which is not the divisor
_READS = {"ReadVariableOp", "Placeholder"}
_UPDATES = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}


class _GradientUse(NamedTuple):
    """How a value depends on a gradient of the batch."""

    of_all_rows: bool  # not only through a selection of rows
    is_linear: bool


class _Visit(NamedTuple):
    """A tensor on the way back from an assigned value."""

    tensor: Any  # or a number, which is a constant
    is_gradient: bool = False  # the value depends on it through the operations of a tape
    is_selected: bool = False  # the value depends on some of its rows
    is_linear: bool = True


@contextlib.contextmanager
def watching_assignments(
    model: keras.Model, data: Tensors, independent: dict[int, bool], *, refuses: bool = True
) -> Iterator[None]:
    """Look at what the training step traced in this context assigns.

    Args:
        model: a Keras model.
        data: the batch of the step, with tensors of the graph that is being traced.
        independent: for the ids of state variables, whether all that is assigned is the same on every rank, whatever
            its rows: the number of a step, a moving average of weights, gathered rows; updated here.
        refuses: False if the user has declared that ranks may use gradients of their own rows.

    Raises:
        HvdkitError: at the end of the step: it assigns what N ranks cannot make equal to one process.
    """
    if not tf.inside_function() or cluster.group(cluster.DATA).size == 1:
        yield
        return
    batch = _tensors_of(data)
    # Otherwise the number of rows is a constant of the graph.
    is_of_any_size = all(not x.shape.rank or x.shape[0] is None for x in batch)
    weights = [StateVariable(variable_name(v), v) for v in model.trainable_variables if not differs_by_rank(v)]
    state = state_of(model)
    uses: dict[int, _GradientUse] = {}  # by the ids of variables
    optimizer_variables = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    replicated = [each.variable for each in (*weights, *state)] + optimizer_variables
    by_handle = {id(handle): v for v in replicated if (handle := _handle(v)) is not None}
    reads: dict[int, set[int] | None] = {}  # the ids of variables that an assigned value reads; None if of the batch

    def watched(variable: AnyVariable, method: str, *, is_state: bool) -> Callable[..., object]:
        assign = getattr(variable, method)

        def watched_assign(value: object, *args: object, **kwargs: object) -> object:
            use = _use_of_gradient(value, batch)
            if use is not None:
                before = uses.get(id(variable), use)
                uses[id(variable)] = _GradientUse(
                    before.of_all_rows or use.of_all_rows, before.is_linear and use.is_linear
                )
            if is_state:
                known = reads.get(id(variable), set())
                read = _variables_read(value, by_handle) if is_of_any_size else None
                reads[id(variable)] = None if known is None or read is None else known | read
            return assign(value, *args, **kwargs)

        return watched_assign

    with contextlib.ExitStack() as stack:
        for variables, is_state in ((weights, False), (state, True)):
            for _, variable in variables:
                methods = ("assign", "assign_add", "assign_sub") if isinstance(variable, tf.Variable) else ("assign",)
                watches = {method: watched(variable, method, is_state=is_state) for method in methods}
                stack.enter_context(swap_attributes(variable, **watches))
        yield
    for number in reads:
        independent[number] = independent.get(number, True) and _is_independent(number, reads)
    step = f"train_step of {type(model).__name__}"
    moved = [(each, uses[id(each.variable)]) for each in weights if id(each.variable) in uses]
    if refuses:
        _check_moves(step, moved)
    undeclared = [each for each in state if id(each.variable) in uses and not has_rule(each.variable)]
    _check_sums(step, [(each, uses[id(each.variable)]) for each in undeclared], refuses=refuses)


def _check_moves(step: str, moved: list[tuple[StateVariable, _GradientUse]]) -> None:
    for each, use in moved:
        if use.of_all_rows:
            raise _refusal(step, f"moves {each.name} by a gradient of this rank's rows, as SAM does")
    if moved and cluster.is_chief():
        warn_once(
            f"{step}: moves {moved[0][0].name} by a gradient of this rank's rows, as SAM does; in one process it is "
            f"that of the global batch: {_AVERAGE}, unless the moves belong to single rows, as in meta-learning; "
            f"{_PAGE}"
        )


def _check_sums(step: str, kept: list[tuple[StateVariable, _GradientUse]], *, refuses: bool) -> None:
    """Refuse what is no sum of gradients, and declare how ranks combine sums of gradients."""
    sums: list[StateVariable] = []
    others: list[str] = []
    for each, use in kept:
        if use.is_linear and tf.as_dtype(each.variable.dtype).is_floating:
            sums.append(each)
        else:
            others.append(each.name)
    if others and refuses:
        raise _refusal(step, f"keeps in {others[0]} what is not linear in a gradient of this rank's rows")
    for each in sums:
        combine_sums(each.variable)
    if sums and cluster.is_chief():
        more = f" and {len(sums) - 1} more" if len(sums) > 1 else ""
        get_logger().info(
            "%s: sums gradients of its rank's rows in %s%s; ranks combine the sums after each step, as with "
            "hk.synchronize(variable, 'mean'); gradient_accumulation_steps of Keras's optimizers exchanges less",
            step,
            sums[0].name,
            more,
        )


def _refusal(step: str, what: str) -> HvdkitError:
    expected = "the gradient of the global batch, as in one process"
    remedy = f"{_AVERAGE}; or pass loss_scope='rows' if each rank may use its own"
    return HvdkitError(describe(step, f"a step that {what}", expected, f"{remedy}; {_PAGE}"))


def _handle(variable: AnyVariable) -> tf.Tensor | None:
    """Return the handle by which graphs read a variable."""
    return getattr(variable if isinstance(variable, tf.Variable) else variable.value, "handle", None)


def _is_independent(number: int, reads: dict[int, set[int] | None]) -> bool:
    """Return True if neither a variable nor those that it follows from are assigned what follows from the batch."""
    seen: set[int] = set()
    pending = [number]
    while pending:
        read = pending.pop()
        if read in seen:
            continue
        seen.add(read)
        following = reads.get(read, set())  # weights and variables that the step does not assign
        if following is None:
            return False
        pending.extend(following)
    return True


def _variables_read(value: object, by_handle: dict[int, AnyVariable]) -> set[int] | None:
    """Return the ids of the variables from which an assigned value follows, of those that ranks hold equally.

    None if the value follows from anything else but constants and what collectives give to all ranks.
    """
    found: set[int] = set()
    seen: set[int] = set()
    pending = tf.nest.flatten(value, expand_composites=True)
    while pending:
        tensor = pending.pop()
        if not tf.is_symbolic_tensor(tensor):
            if tf.is_tensor(tensor) and tensor.dtype == tf.resource:
                if id(tensor) not in by_handle:
                    return None
                found.add(id(by_handle[id(tensor)]))
            continue
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        op = tensor.op
        if op.type == "Placeholder":
            outer = [outside for outside, inside in tensor.graph.captures if inside is tensor]
            if not outer:
                return None  # an argument, such as the batch
            pending.extend(outer)
        elif op.type == "IdentityN":  # of a custom gradient, as of hk.allreduce: results and arguments
            pending.append(op.inputs[tensor.value_index])
        elif op.type in _SAME_ON_ALL_RANKS:
            continue
        elif op.type in _CALLS or is_collective(op.type) or (op.op_def.is_stateful and op.type not in _READS):
            return None
        else:
            pending.extend(op.inputs)
    return found


def depends_on_rows(value: object, data: Tensors) -> bool:
    """Return True if a value of a step's graph depends on the rows of its batch, without a collective in between."""
    return _use_of_gradient(value, _tensors_of(data), is_gradient=True) is not None


def _tensors_of(data: Tensors) -> list[tf.Tensor]:
    return [x for x in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(x)]


def _use_of_gradient(value: object, batch: Sequence[tf.Tensor], *, is_gradient: bool = False) -> _GradientUse | None:
    """Return how a value depends on a gradient of ``batch`` that no collective has combined; None if it does not.

    With ``is_gradient``, the value counts as a gradient.
    """
    graphs = {x.graph for x in batch}  # of the step, whose other arguments are not the batch
    batch_references = {x.ref() for x in batch}
    libraries: dict[int, Library] = {}  # by the ids of graphs
    seen: set[tuple[object, ...]] = set()
    pending = [_Visit(tensor, is_gradient) for tensor in tf.nest.flatten(value, expand_composites=True)]
    uses: list[_GradientUse] = []
    while pending:
        visit = pending.pop()
        tensor = visit.tensor
        if not tf.is_symbolic_tensor(tensor):  # a constant
            continue
        if visit.is_gradient and tensor.ref() in batch_references:
            uses.append(_GradientUse(not visit.is_selected, visit.is_linear))
            continue
        op = tensor.op
        if op.type == "IdentityN":  # of a custom gradient, as of hk.allreduce: results and arguments
            pending.append(visit._replace(tensor=op.inputs[tensor.value_index]))
            continue
        if op.type == "Placeholder":
            outer = [outside for outside, inside in tensor.graph.captures if inside is tensor]
            is_argument = not outer and tensor.graph not in graphs  # of a function that the step calls
            if visit.is_gradient and is_argument:
                uses.append(_GradientUse(not visit.is_selected, visit.is_linear))
            pending.extend(visit._replace(tensor=each) for each in outer)
            continue
        key = (op, *visit[1:])
        if key in seen or op.type in _SHAPES or is_collective(op.type):
            continue
        seen.add(key)
        nodes: list[tf.compat.v1.NodeDef] = []
        if op.type in _CALLS:
            if id(op.graph) not in libraries:
                libraries[id(op.graph)] = Library(op.graph)
            nodes = list(libraries[id(op.graph)].nodes(op.node_def.attr))
        if any(is_collective(node.op) for node in nodes):
            continue
        inputs = [x for x in op.inputs if x.dtype not in (tf.resource, tf.variant)]
        is_gradient = visit.is_gradient or any(
            _TAPE in name.split("/") for name in (op.name, *(node.name for node in nodes))
        )
        is_linear = visit.is_linear
        if not is_gradient and is_linear:
            is_linear = op.type in _LINEAR or (op.type in _PRODUCTS and _is_linear_product(op, batch))
        selects = op.type in _SELECTIONS or _select_rows(nodes)
        for number, x in enumerate(inputs):
            is_index = op.type == "GatherV2" and number > 0
            is_selected = visit.is_selected or (selects and not is_index)
            pending.append(_Visit(x, is_gradient, is_selected, is_linear))
    if not uses:
        return None
    return _GradientUse(any(use.of_all_rows for use in uses), all(use.is_linear for use in uses))


def _is_linear_product(op: tf.Operation, batch: Sequence[tf.Tensor]) -> bool:
    """Return True if one factor depends on a gradient of ``batch``, and it is not a divisor."""
    first, second = (_use_of_gradient(x, batch) is not None for x in op.inputs)
    return not second if op.type.startswith(("Real", "Div")) else not (first and second)


def _select_rows(nodes: Sequence[tf.compat.v1.NodeDef]) -> bool:
    """Return True if nodes of functions select rows of a tensor, not a number of its shape."""
    shapes = {node.name for node in nodes if node.op in _SHAPES}
    return any(node.op in _SELECTIONS and node.input[0].split(":")[0] not in shapes for node in nodes)


# ---- reads after updates --------------------------------------------------------------------------------------------


def warn_of_reads_after_update(variables: list[AnyVariable], data: Tensors) -> None:
    """Warn on the chief, once, of variables that the step in the current graph reads after it has assigned to them.

    Call it after the step, for the variables that are combined then. In eager mode it does nothing.
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


def _is_used_after_update(graph: tf.Graph, handle: tf.Tensor, data: Tensors) -> bool:
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
        if is_collective(op.type):
            return True
        pending.extend(user for output in op.outputs for user in output.consumers())
    return False
