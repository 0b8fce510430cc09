"""Save on all ranks: start the background save of each rank, and wait until all have finished."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdkit import cluster
from hvdkit.checkpoint.chief_io import save_through_chief
from hvdkit.checkpoint.entries import State
from hvdkit.checkpoint.folder import latest, tidy
from hvdkit.checkpoint.rank_checks import agreed_state, check_shared, run_on_chief
from hvdkit.checkpoint.writing import Failure, Save, Snapshot, non_finite_error
from hvdkit.cluster.agreement import gather
from hvdkit.errors import CheckpointError

_POLL_SECONDS = 0.02


def save(path: str | Path, state: Mapping[str, Any], *, step: int | None = None, gather: bool = False) -> Path:
    """Save ``state`` as the checkpoint ``path``; return when it is complete and on disk.

    The checkpoint is written under a temporary name and renamed at the end, so ``path`` is never incomplete. The chief
    writes replicated tensors while each rank writes its own tensors.

    Args:
        path: the checkpoint's folder, e.g. ``runs/mnist/checkpoints/step-000001200``; replaced if it exists.
        state: models, optimizers, variables, ... by name; see :func:`hvdkit.checkpoint.state.flatten`.
        step: steps trained, for the manifest; by default the number at the end of the path's name, or 0.
        gather: pass True if ranks do not share a file system: the chief writes everything, and receives the other
            ranks' parts over the network in pieces of about 1 MiB.

    Returns:
        ``path``.

    Raises:
        CheckpointError: a rank cannot write its part (the message names it), or ranks do not share a file system.
            An existing checkpoint is unchanged.
        NonFiniteError: a weight, a moving statistic or an optimizer slot is NaN or infinite; the message names
            variable, rank and step. An existing checkpoint is unchanged.
        CollectiveMismatchError: ranks have different states; the message names rank and tensor.
        TypeError: the state contains an object that cannot be saved.

    Example::

        hk.checkpoint.save("ckpt/step-000000100", {"model": model, "optimizer": optimizer, "global_step": 100})
    """
    path, flattened = Path(path), agreed_state(state)
    if step is None:
        number = re.search(r"(\d+)$", path.name)
        step = int(number[1]) if number else 0
    if gather:
        save_through_chief(path, Snapshot.of(flattened, cluster.rank(), in_place=True), step=step)
        return path

    def prepare() -> str:
        tidy(path.parent, path.name)
        return secrets.token_hex(4)

    token = run_on_chief("hk.checkpoint.save()", prepare)
    check_shared(path.parent)
    finish(begin(path, flattened, step=step, token=token, in_place=True))
    return path


def begin(
    path: Path,
    state: State,
    *,
    step: int,
    token: str,
    before_commit: Callable[[], None] = lambda: None,
    after_commit: Callable[[], None] = lambda: None,
    in_place: bool = False,
) -> Save:
    """Take a snapshot on this rank and start writing it in the background. Does not communicate.

    With ``in_place`` less memory is needed, but the caller must not change the state until it is written. For the
    other arguments see :class:`Save`.
    """
    snapshot = Snapshot.of(state, cluster.rank(), in_place=in_place)
    return Save(
        path,
        snapshot,
        step=step,
        rank=cluster.rank(),
        size=cluster.size(),
        token=token,
        before_commit=before_commit,
        after_commit=after_commit,
        background=not in_place,
    ).start()


def finish(save: Save) -> None:
    """Wait until the checkpoint is complete or a rank has failed. Every rank calls it.

    Raises:
        CheckpointError: on every rank; the message names the rank that failed.
        NonFiniteError: on every rank; the message names variable, rank and step.
    """
    while not all_ranks_done(save, gather(cluster.exchange(), "the end of a save", lambda: progress_of(save))):
        save.wait(_POLL_SECONDS)


class SaveProgress(NamedTuple):
    """The progress of a save on one rank, as exchanged between ranks.

    Attributes:
        done: True if this rank has finished its part.
        failure: the failure on this rank, or None.
        newest: on the chief, if the save failed: the name of the checkpoint that a restart would use.
    """

    done: bool = True
    failure: Failure | None = None
    newest: str | None = None


def progress_of(save: Save) -> SaveProgress:
    """Return this rank's progress, as input for :func:`all_ranks_done`."""
    done = save.done  # read before failure(), which is final only after the thread has ended
    failure = save.failure()
    newest = latest(save.target.parent) if failure is not None and save.rank == 0 else None
    return SaveProgress(done, failure, newest.name if newest else None)


def all_ranks_done(save: Save, ranks: Sequence[SaveProgress]) -> bool:
    """Return True if every rank is done with ``save``, given every rank's :func:`progress_of`.

    Raises:
        CheckpointError: on every rank once all are done, if a rank failed; the message names the first one.
        NonFiniteError: the same, if a tensor contained NaN or an infinity.
    """
    failed = [(rank, each.failure) for rank, each in enumerate(ranks) if each.failure is not None]
    if failed:
        save.cancel()
    if not all(each.done for each in ranks):
        return False
    if failed:
        save.clean_up()
        rank, failure = next((f for f in failed if not f[1].cancelled), failed[0])
        if failure.non_finite:
            raise non_finite_error(failure.message, rank, save.step, ranks[0].newest)
        raise CheckpointError(
            f"{save.target}: not saved, rank {rank} failed: {failure.message}; what was saved before is as it was"
        )
    return True
