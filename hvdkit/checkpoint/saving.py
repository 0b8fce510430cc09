"""Save on all ranks: start the save of each rank, and wait until all have finished."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdkit import cluster
from hvdkit.checkpoint.chief_io import SaveThroughChief
from hvdkit.checkpoint.entries import State
from hvdkit.checkpoint.files import RunPath, run_path
from hvdkit.checkpoint.folder import check_replaceable, tidy
from hvdkit.checkpoint.manifest import step_of
from hvdkit.checkpoint.rank_checks import agreed_state, check_shared
from hvdkit.checkpoint.writing import CancelledSaveError, Save, Snapshot
from hvdkit.cluster import agreement
from hvdkit.errors import CheckpointError, HvdkitError, NonFiniteError, describe, integer

_POLL_SECONDS = 0.02


def save(path: str | RunPath, state: Mapping[str, object], *, step: int | None = None, gather: bool = False) -> RunPath:
    """Save ``state`` as the checkpoint ``path``; return when it is complete and on disk.

    The checkpoint is written under a temporary name and renamed at the end, so ``path`` is never incomplete. The chief
    writes replicated tensors while each rank writes its own tensors.

    Args:
        path: the checkpoint's folder, e.g. ``runs/mnist/checkpoints/step-000001200``. A checkpoint there is replaced;
            a damaged one is renamed to ``step-....damaged``. Or its URL in a store, e.g.
            ``s3://bucket/mnist/step-000001200``, where it exists as soon as its manifest does.
        state: what to save, by name: Keras models, layers and optimizers; TensorFlow and Keras variables; arrays;
            random generators; plain JSON values; objects with ``state`` and ``restore``, or that satisfy
            ``hk.checkpoint.ShardedState``; mappings and sequences of all of these.
        step: steps trained, for the manifest; by default the number at the end of the path's name, or 0.
        gather: pass True if ranks do not share a file system: the chief writes everything, and receives the other
            ranks' parts over the network in pieces of about 1 MiB.

    Returns:
        ``path``; a URL as a ``upath.UPath``.

    Raises:
        CheckpointError: a rank cannot write its part (the message names it), ranks do not share a file system, or
            ``path`` exists and is not a checkpoint. An existing checkpoint is unchanged.
        ValueError: ``step`` is not the number in a name like ``step-000001200``.
        NonFiniteError: a weight, a moving statistic or an optimizer slot is NaN or infinite; the message names
            variable, rank and step. An existing checkpoint is unchanged.
        CollectiveMismatchError: ranks have different states; the message names rank and tensor.
        TypeError: the state contains an object that cannot be saved.

    Examples:
        >>> import tempfile
        >>> import keras
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> optimizer = keras.optimizers.Adam()
        >>> optimizer.build(model.trainable_variables)
        >>> folder = hk.broadcast_object(tempfile.mkdtemp())  # one folder for all ranks
        >>> state = {"model": model, "optimizer": optimizer, "epoch": 4}
        >>> path = hk.checkpoint.save(f"{folder}/step-000000100", state)
        >>> sorted(file.name for file in path.iterdir())
        ['manifest.json', 'replicated.safetensors']
        >>> len(hk.checkpoint.inspect(path).variables)  # 2 of the model; 2 per variable and 2 of Adam
        8
    """
    path = run_path(path, "path")
    flattened = agreed_state(state)
    if step is None:
        number = re.search(r"([0-9]{1,18})$", path.name)
        step = int(number[1]) if number else 0
    elif (named := step_of(path)) is not None and named != integer("step", step, minimum=0):
        raise ValueError(describe("step", step, f"{named}, as in the name of {path}", "pass that, or leave it out"))

    def prepare() -> str:
        tidy(path.parent, path.name)
        check_replaceable(path)
        return secrets.token_hex(4)

    snapshot, token = take_snapshot("hk.checkpoint.save()", flattened, prepare)
    if not gather:
        # In a store, a probe that a killed job leaves is removed by the next save of this name.
        check_shared(path.parent if isinstance(path, Path) else path)
    save_class = SaveThroughChief if gather else Save
    finish(save_class(path, snapshot, step=step, rank=cluster.rank(), size=cluster.size(), token=token).start())
    return path


def take_snapshot(
    kind: str, state: State, prepare: Callable[[], str], *, in_place: bool = True
) -> tuple[Snapshot, str]:
    """Return this rank's snapshot, and the token of the save from ``prepare``, which the chief calls.

    Every rank calls it. If a rank's state cannot be read, or ``prepare`` raises, other ranks raise CheckpointError.

    Args:
        kind: a description for messages; the same on every rank.
        state: the state that all ranks have agreed on.
        prepare: called on the chief; returns the token.
        in_place: the state does not change until the save is complete.
    """

    def take() -> tuple[Snapshot, str]:
        token = prepare() if cluster.is_chief() else ""
        return Snapshot.of(state, cluster.rank(), in_place=in_place), token

    (snapshot, _), tokens = agreement.run_and_describe(
        cluster.exchange(), kind, take, lambda taken: taken[1], error=CheckpointError
    )
    return snapshot, tokens[0]


def finish(save: Save) -> None:
    """Wait until the checkpoint is complete. Every rank calls it; raises as :func:`all_ranks_done` does."""
    exchange = cluster.exchange()
    while not all_ranks_done(save, agreement.gather(exchange, "the end of a save", lambda: progress_of(save))):
        save.wait(_POLL_SECONDS)


class SaveProgress(NamedTuple):
    """The progress of a save on one rank, as exchanged between ranks.

    Attributes:
        done: True if this rank has finished its part.
        failure: the text of the error on this rank, or None.
        non_finite: a tensor contained NaN or an infinity.
        cancelled: this rank stopped writing only because another rank had failed.
    """

    done: bool = True
    failure: str | None = None
    non_finite: bool = False
    cancelled: bool = False


def progress_of(save: Save) -> SaveProgress:
    """Return this rank's progress, as input for :func:`all_ranks_done`."""
    done = save.done  # read before the error, which is final only after the thread has ended
    error = save.error
    if error is None:
        return SaveProgress(done)
    return SaveProgress(
        done,
        str(error) if isinstance(error, HvdkitError) else f"{type(error).__name__}: {error}",
        non_finite=isinstance(error, NonFiniteError),
        cancelled=isinstance(error, CancelledSaveError),
    )


def all_ranks_done(save: Save, ranks: Sequence[SaveProgress]) -> bool:
    """Return True if every rank is done with ``save``, given every rank's :func:`progress_of`.

    Raises:
        CheckpointError: on every rank once all are done, if a rank failed; the message names the first one.
        NonFiniteError: the same, if a tensor contained NaN or an infinity.
    """
    failed = [(rank, each) for rank, each in enumerate(ranks) if each.failure is not None]
    if failed:
        save.cancel()
    if not all(each.done for each in ranks):
        return False
    if failed:
        save.destination.discard(is_chief=save.rank == 0)
        rank, first = next((f for f in failed if not f[1].cancelled), failed[0])
        if first.non_finite:
            raise NonFiniteError(str(first.failure))
        raise CheckpointError(
            f"{save.target}: not saved, rank {rank} failed: {first.failure}; earlier checkpoints are unchanged"
        )
    return True
