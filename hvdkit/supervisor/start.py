"""Start a run from the newest valid checkpoint in its logdir, or from the chief's initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdkit import cluster
from hvdkit.checkpoint.folder import list_checkpoints, tidy
from hvdkit.checkpoint.rank_checks import agreed_state, check_shared, run_on_chief
from hvdkit.checkpoint.restoring import restore
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import CorruptCheckpointError
from hvdkit.sharding.variables import broadcast_variables


def prepare_folder(folder: Path, *, gather: bool) -> None:
    """Check that all ranks share ``folder``, and remove incomplete files of killed runs."""
    if not gather:
        check_shared(folder)
    run_on_chief("a folder without remains", lambda: tidy(folder))


def restore_or_initialize(folder: Path, state: Callable[[], Mapping[str, Any]], *, gather: bool) -> Path | None:
    """Restore and return the newest valid checkpoint in ``folder``, or broadcast the chief's values and return None.

    Damaged checkpoints are skipped with a warning.

    Raises:
        CheckpointError: the newest checkpoint belongs to another model.
        CorruptCheckpointError: there are checkpoints, but all are damaged. They are not overwritten.
    """
    paths = run_on_chief("the list of checkpoints", lambda: list_checkpoints(folder))
    damage = []
    for path in reversed(paths):
        try:
            restore(path, state(), gather=gather)
        except CorruptCheckpointError as error:
            damage.append(str(error))
            if cluster.is_chief():
                get_logger().warning("checkpoint %s is damaged; skipping it: %s", path.name, error)
        else:
            return path
    if paths:
        raise CorruptCheckpointError(
            f"{folder}: all {len(paths)} checkpoints are damaged: {'; '.join(damage)}; repair one, or pass "
            "another logdir to start over"
        )
    entries = agreed_state(state()).entries.values()
    broadcast_variables([e.variable for e in entries if e.kind == "replicated" and e.variable is not None])
    return None
