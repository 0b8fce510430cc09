"""Divide the graph of a step into stages that run one after another: programs for XLA, and what stays outside.

Each operation is inside or outside. With d its inputs and control inputs,

    level(op) = max over d of  level(d)      if d and op are of the same kind
                               level(d) + 1  otherwise

Levels of operations inside are even, of those outside odd, from -1; those of exchanges are 1 and above, so that what
follows an exchange is never in one stage with what does not. The operations of one level are one stage, which
depends on lower levels only. So the order of side effects stays that of the graph, exchanges between ranks included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from hvdkit.compiling.operations import (
    HEAVY,
    LOOKUPS,
    TRIVIAL,
    Library,
    has_values_shape,
    is_collective,
    reason_outside,
)

_LEAST_OPERATIONS = 24  # of a program without a heavy one
_BEFORE = -1
_SOURCES = ("Placeholder", "Const")
# Operations next to an exchange, which record it and keep it in the graph.
_OF_EXCHANGES = ("Assert", "RandomUniform", "Timestamp", "VarHandleOp", "AssignVariableOp", "PyFuncStateless")
_COPIES = ("Identity", "AssignVariableOp")
_PREFIX = "hvdkit_"  # of the names of hvdkit's own checks, such as the tests of a model's first step


@dataclass(eq=False)
class Stage:
    """Operations that run together. Stages run in the order of levels."""

    level: int
    operations: list[tf.Operation] = field(default_factory=list)  # in an order in which they can run

    @property
    def is_program(self) -> bool:
        """Return True if the stage is worth a program."""
        if self.level % 2:
            return False
        kinds = Counter(op.type for op in self.operations)
        others = sum(number for kind, number in kinds.items() if kind not in TRIVIAL)
        return any(kind in HEAVY for kind in kinds) or others >= _LEAST_OPERATIONS


class Stages:
    """The stages of the graph of a function, in which shapes are known.

    Attributes:
        all: in the order in which they run.
        outside: the reason and the first operation of each kind that stays outside, except checks and exchanges.
        levels_of_exchanges: levels with an exchange between ranks.
        library: the functions of the graph.
    """

    def __init__(self, graph: tf.Graph) -> None:
        operations = _in_order(graph)
        library = Library(graph)
        reasons: dict[tf.Operation, str] = {}
        for op in operations:
            if op.type not in _SOURCES and (reason := reason_outside(op, library)) is not None:
                reasons[op] = reason
        self.outside = _summary(reasons)
        is_outside = set(reasons)
        _add_of_values(operations, is_outside, library)
        _add_lookups(operations, is_outside)
        _add_copies(operations, is_outside)
        exchanges = {
            op
            for op in operations
            if is_collective(op.type) or any(is_collective(node.op) for node in library.nodes(op.node_def.attr))
        }
        self.library = library
        self.all = _divided(operations, is_outside, exchanges)
        self.levels_of_exchanges = {stage.level for stage in self.all if exchanges & set(stage.operations)}


def dependencies(op: tf.Operation) -> list[tf.Operation]:
    """Return the operations that run before ``op``."""
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def _in_order(graph: tf.Graph) -> list[tf.Operation]:
    """Return the operations that a call of the function runs; each comes after those that it depends on.

    The order of creation is not enough: the gradient of a loop adds inputs to the loop.
    """
    done: set[tf.Operation] = set()
    order: list[tf.Operation] = []
    pending = [*(tensor.op for tensor in graph.outputs if tensor is not None), *graph.control_outputs]
    pending.sort(key=lambda op: op._id, reverse=True)
    while pending:
        op = pending[-1]
        if op in done:
            pending.pop()
            continue
        missing = [each for each in dependencies(op) if each not in done]
        if missing:
            pending.extend(sorted(missing, key=lambda each: each._id, reverse=True))
            continue
        done.add(op)
        order.append(pending.pop())
    return order


def _add_of_values(operations: Sequence[tf.Operation], is_outside: set[tf.Operation], library: Library) -> None:
    """Add what follows from tensors whose shapes are unknown before an operation outside has run."""
    unknown: set[int] = set()
    for op in operations:
        takes_unknown = any(id(tensor) in unknown for tensor in op.inputs)
        takes_outside = any(tensor.op in is_outside for tensor in op.inputs)
        follows = takes_unknown or (takes_outside and any(map(has_values_shape, op.outputs)))
        if op.type in _SOURCES or not (follows or op in is_outside):
            continue
        is_outside.add(op)
        unknown |= {id(tensor) for tensor in op.outputs if has_values_shape(tensor)}
        unknown |= {id(tensor) for tensor in library.placeholders(op)}


def _add_lookups(operations: Sequence[tf.Operation], is_outside: set[tf.Operation]) -> None:
    """Add what can run before everything else: operations outside, and lookups by ids of the batch, with their inputs.

    A program then need not be divided for them; and TensorFlow checks the ids.
    """
    after_heavy: set[tf.Operation] = set()
    for op in operations:
        if op.type in HEAVY or any(each in after_heavy for each in dependencies(op)):
            after_heavy.add(op)
    first = [op for op in operations if op not in after_heavy and (op in is_outside or op.type in LOOKUPS)]
    pending = list(first)
    while pending:
        op = pending.pop()
        if op.type not in _SOURCES:
            is_outside.add(op)
        pending += [each for each in dependencies(op) if each not in is_outside and each.type not in _SOURCES]


def _add_copies(operations: Sequence[tf.Operation], is_outside: set[tf.Operation]) -> None:
    """Add what only copies the result of an operation outside.

    There is nothing to compile in it. And what only the chief has, such as a note that it has kept a row, would make
    another program of the one that it is part of.
    """
    for op in operations:
        if op.type in _COPIES and op.inputs[-1].op in is_outside:
            is_outside.add(op)


def _divided(
    operations: Sequence[tf.Operation], is_outside: set[tf.Operation], exchanges: set[tf.Operation]
) -> list[Stage]:
    later: dict[tf.Operation, int] = {}
    while True:
        levels = _levels(operations, is_outside, exchanges, later)
        found = _later(operations, is_outside, levels)
        if found.items() <= later.items():
            break
        later |= found
    stages: dict[int, Stage] = {}
    for op, level in levels.items():
        stages.setdefault(level, Stage(level)).operations.append(op)
    return [stages[level] for level in sorted(stages)]


def _levels(
    operations: Sequence[tf.Operation],
    is_outside: set[tf.Operation],
    exchanges: set[tf.Operation],
    least: Mapping[tf.Operation, int],
) -> dict[tf.Operation, int]:
    """Return the level of each operation, in their order; ``least`` has levels that some operations have at least."""
    levels: dict[tf.Operation, int] = {}
    for op in operations:
        if op.type in _SOURCES:
            continue
        mine = op in is_outside
        level = max(least.get(op, _BEFORE), 1 if op in exchanges else _BEFORE if mine else 0)
        for each in dependencies(op):
            if each in levels:
                level = max(level, levels[each] + (mine != (each in is_outside)))
        levels[op] = level
    return levels


def _later(
    operations: Sequence[tf.Operation], is_outside: set[tf.Operation], levels: Mapping[tf.Operation, int]
) -> dict[tf.Operation, int]:
    """Return the levels to which operations can move so that a list which they make is used in their own stage."""
    limits: dict[tf.Operation, int] = {}  # the highest level for which the levels of all that follows suffice
    users: dict[tf.Operation, list[tf.Operation]] = {}
    for op in levels:
        for each in dependencies(op):
            users.setdefault(each, []).append(op)
    top = max(levels.values(), default=0)
    moved: dict[tf.Operation, int] = {}
    for op in reversed(operations):
        if op not in levels or op in is_outside:
            continue
        after = users.get(op, [])
        limits[op] = min([top, *(levels[each] - 1 if each in is_outside else limits[each] for each in after)])
        of_lists = [user for tensor in op.outputs if tensor.dtype == tf.variant for user in tensor.consumers()]
        level = max((levels[user] for user in of_lists if user in levels), default=levels[op])
        if levels[op] < level <= limits[op]:
            moved[op] = level
    return moved


def _summary(reasons: dict[tf.Operation, str]) -> list[str]:
    """Return for users: for each kind of operation the first one's name and the reason."""
    shown: dict[str, str] = {}
    for op, reason in reasons.items():
        is_check = op.name.rpartition("/")[2].startswith(_PREFIX)
        is_of_hvdkit = op.type in _OF_EXCHANGES or is_collective(op.type) or is_check
        if not is_of_hvdkit and op.type not in shown:
            shown[op.type] = f"{op.type} {op.name!r} ({reason})"
    return list(shown.values())
