"""How a run begins: alone on its logdir, from the newest good checkpoint, or from the chief's initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdkit import cluster
from hvdkit.checkpoint.folder import listed, tidy
from hvdkit.checkpoint.restoring import restore
from hvdkit.checkpoint.saving import agreed_state, check_shared, of_chief
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives import broadcast_variables
from hvdkit.errors import CorruptCheckpointError


def prepare_folder(folder: Path, *, gather: bool) -> None:
    """See that all ranks share ``folder``, and remove what a killed run left half written there."""
    if not gather:
        check_shared(folder)
    of_chief("a folder without remains", lambda: tidy(folder))


def restore_or_initialise(folder: Path, state: Callable[[], Mapping[str, Any]], *, gather: bool) -> Path | None:
    """Restore the newest good checkpoint of ``folder``; return it, or None after a start from the chief's values.

    A damaged one is named and skipped.

    Raises:
        CheckpointError: the newest is of another model.
        CorruptCheckpointError: there are checkpoints, and none is good. They are not overwritten.
    """
    paths = of_chief("the list of checkpoints", lambda: listed(folder))
    damage = []
    for path in reversed(paths):
        try:
            restore(path, state(), gather=gather)
        except CorruptCheckpointError as error:
            damage.append(str(error))
            if cluster.is_chief():
                get_logger().warning("checkpoint %s is damaged, and skipped: %s", path.name, error)
        else:
            return path
    if paths:
        raise CorruptCheckpointError(
            f"{folder}: none of its {len(paths)} checkpoints is whole: {'; '.join(damage)}; repair one, or give "
            "another logdir to begin anew"
        )
    replicated = [e.variable for e in agreed_state(state()).entries.values() if e.kind == "replicated"]
    broadcast_variables([v for v in replicated if v is not None])
    return None
