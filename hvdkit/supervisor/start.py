"""Start a run from the newest valid checkpoint in its logdir, or from the chief's initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdkit import cluster
from hvdkit.checkpoint.files import RunPath
from hvdkit.checkpoint.folder import list_checkpoints, record_damage, tidy
from hvdkit.checkpoint.manifest import NAME, step_of
from hvdkit.checkpoint.rank_checks import agreed_state, check_shared, run_on_chief
from hvdkit.checkpoint.restoring import restore
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import CorruptCheckpointError, describe, listed, printable
from hvdkit.sharding.variables import broadcast_variables
from hvdkit.supervisor.saved_state import Position

_MAX_SHOWN = 3  # damaged checkpoints in an error


def restore_or_initialize(
    folder: RunPath, state: Callable[[], Mapping[str, object]], *, gather: bool
) -> RunPath | None:
    """Restore and return the newest valid checkpoint in ``folder``, or broadcast the chief's values and return None.

    All ranks must share the folder, unless ``gather``; incomplete files of killed runs are removed from it. Whatever is
    named like a step and cannot be restored is damaged: it is skipped with a warning.

    Raises:
        CheckpointError: the newest checkpoint belongs to another model.
        CorruptCheckpointError: there are checkpoints, but all are damaged. They are not overwritten.
    """
    if not gather:
        check_shared(folder)
    run_on_chief("a folder without remains", lambda: tidy(folder))
    paths = run_on_chief("the list of checkpoints", lambda: list_checkpoints(folder))
    damage = []
    for path in reversed(paths):
        try:
            _restore(path, state(), gather)
        except CorruptCheckpointError as error:
            damage.append(printable(error))
            if cluster.is_chief():
                get_logger().warning("checkpoint %s is damaged; skipping it: %s", path.name, damage[-1])
        else:
            return path
    if paths:
        shown = listed(damage, _MAX_SHOWN, separator="; ")
        got = f"{printable(folder)}, in which all {len(paths)} checkpoints are damaged ({shown})"
        remedy = (
            "repair one, e.g. from a backup; to start over on purpose, move that folder away or pass another logdir"
        )
        raise CorruptCheckpointError(describe("logdir", got, "a good checkpoint, or none", remedy))
    tensors = agreed_state(state()).tensors.values()
    broadcast_variables([t.variable for t in tensors if t.kind == "replicated" and t.variable is not None])
    return None


def _restore(path: RunPath, state: Mapping[str, object], gather: bool) -> None:
    restore(path, state, gather=gather)
    position = state.get("position")
    if isinstance(position, Position) and position.step != step_of(path):  # equal on all ranks
        damage = f"{path / NAME}: position: got step {position.step}, expected {step_of(path)}, as in the folder's name"
        if cluster.is_chief():
            record_damage(path, damage)
        raise CorruptCheckpointError(damage)
