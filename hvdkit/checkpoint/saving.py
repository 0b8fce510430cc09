"""Saving over all ranks, and what ranks agree on to save or restore. Every function here is called by every rank."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hvdkit import cluster
from hvdkit.checkpoint.entries import State
from hvdkit.checkpoint.files import naming_file
from hvdkit.checkpoint.folder import latest, tidy_one
from hvdkit.checkpoint.link import save_through_chief
from hvdkit.checkpoint.matching import without_numbers
from hvdkit.checkpoint.state import flatten
from hvdkit.checkpoint.writing import Failure, Save, Snapshot, non_finite
from hvdkit.errors import CheckpointError, CollectiveMismatchError, CorruptCheckpointError, describe

T = TypeVar("T")
_POLL_SECONDS = 0.02


def save(path: str | Path, state: Mapping[str, Any], *, step: int | None = None, gather: bool = False) -> Path:
    """Save ``state`` as the checkpoint ``path``; return when it is whole and on the disk.

    It is written under another name and renamed at the end: ``path`` is there whole, or not at all, whatever happens.
    Replicated tensors are written by the chief, each rank's own by itself, at the same time.

    Args:
        path: the checkpoint's folder, e.g. ``runs/mnist/checkpoints/step-000001200``. One of that name is replaced.
        state: names of models, optimizers, variables, ... ; see :func:`hvdkit.checkpoint.state.flatten`.
        step: steps trained, for the manifest; by default the number at the end of the path's name, or 0.
        gather: True where ranks do not share a file system: the chief writes everything, and gets the others' parts
            over the network in pieces of about 1 MiB.

    Returns:
        ``path``.

    Raises:
        CheckpointError: a rank cannot write its part (it is named), or ranks do not see one file system. What was
            there before is as it was.
        NonFiniteError: a weight, a moving statistic or an optimizer slot is NaN or infinite; it names variable, rank
            and step. What was there before is as it was.
        CollectiveMismatchError: ranks have different states; it names rank and tensor.
        TypeError: the state holds something that cannot be saved.

    Example::

        hk.checkpoint.save("ckpt/step-000000100", {"model": model, "optimizer": optimizer, "global_step": 100})
    """
    path, flat = Path(path), agreed_state(state)
    if step is None:
        number = re.search(r"(\d+)$", path.name)
        step = int(number[1]) if number else 0
    if gather:
        save_through_chief(path, Snapshot.of(flat, cluster.rank(), in_place=True), step=step)
        return path
    token = cluster.exchange().broadcast(secrets.token_hex(4), 0)
    together(lambda: tidy_one(path) if cluster.is_chief() else None)
    check_shared(path.parent)
    finish(begin(path, flat, step=step, token=token, in_place=True))
    return path


def begin(
    path: Path,
    state: State,
    *,
    step: int,
    token: str,
    permitted: Callable[[], None] = lambda: None,
    committed: Callable[[], None] = lambda: None,
    in_place: bool = False,
) -> Save:
    """Take a snapshot on this rank and begin to write it, behind the training. Exchanges nothing.

    With ``in_place`` the caller changes nothing until it is written, and less memory is needed. For the other
    arguments see :class:`Save`.
    """
    snapshot = Snapshot.of(state, cluster.rank(), in_place=in_place)
    return Save(
        path,
        snapshot,
        step=step,
        rank=cluster.rank(),
        size=cluster.size(),
        token=token,
        permitted=permitted,
        committed=committed,
        behind=not in_place,
    ).start()


def finish(save: Save) -> None:
    """Wait until the checkpoint is whole, or has failed on some rank.

    Raises:
        CheckpointError: on every rank, naming the one that failed.
        NonFiniteError: on every rank, naming variable, rank and step.
    """
    while not settled(save, cluster.exchange().allgather(progress_of(save))):
        save.wait(_POLL_SECONDS)


class Progress(NamedTuple):
    """How far one rank is with a save, as ranks exchange it.

    Attributes:
        done: this rank has nothing left to do.
        failure: what went wrong on it, or None.
        newest: on the chief, if the save failed: the name of the checkpoint that a restart would use.
    """

    done: bool = True
    failure: Failure | None = None
    newest: str | None = None


def progress_of(save: Save) -> Progress:
    """Return this rank's part for :func:`settled`."""
    done = save.done  # read first: a thread that is alive has not failed for good
    failure = save.failure()
    newest = latest(save.target.parent) if failure is not None and save.rank == 0 else None
    return Progress(done, failure, newest.name if newest else None)


def settled(save: Save, ranks: Sequence[Progress]) -> bool:
    """Return True once every rank is done with ``save``, given every rank's :func:`progress_of`.

    Raises:
        CheckpointError: on every rank once all are done, if one failed; it names the first that did.
        NonFiniteError: the same, if a tensor held NaN or an infinity.
    """
    failed = [(rank, each.failure) for rank, each in enumerate(ranks) if each.failure is not None]
    if failed:
        save.cancel()
    if not all(each.done for each in ranks):
        return False
    if failed:
        save.clean_up()
        rank, failure = next((f for f in failed if not f[1].given_up), failed[0])
        if failure.non_finite:
            raise non_finite(failure.words, rank, save.step, ranks[0].newest)
        raise CheckpointError(
            f"{save.target}: not saved, rank {rank} failed: {failure.words}; what was saved before is as it was"
        )
    return True


def agreed_state(state: Mapping[str, Any]) -> State:
    """Lay out ``state`` and compare it over ranks; all ranks then call its tensors by the chief's names.

    Keras numbers layers as a process makes them, so that a rank that made one more has other names for the same model.

    Raises:
        TypeError: something in it cannot be saved.
        CollectiveMismatchError: ranks differ; it names rank and tensor.
    """
    flat = together(lambda: flatten(state))
    tensors = [(e.name, e.kind, e.shape, e.dtype.name, e.partition) for e in flat.entries.values()]
    signature = [*tensors, *((name, "value", (), "", None) for name in flat.values)]
    digest = hashlib.sha256(repr(signature).encode()).digest()
    if len(set(cluster.exchange().allgather_bytes(digest))) > 1:
        signatures = cluster.exchange().allgather(signature)
        _compare(signatures)
        for entry, (name, *_) in zip(flat.entries.values(), signatures[0], strict=False):
            entry.name = name
        flat.entries = {entry.name: entry for entry in flat.entries.values()}
    return flat


def _compare(signatures: list[list[tuple[Any, ...]]]) -> None:
    first = signatures[0]
    for rank, other in enumerate(signatures):
        for mine, theirs in zip(first, other, strict=False):
            if (without_numbers(mine[0]), *mine[1:]) != (without_numbers(theirs[0]), *theirs[1:]):
                raise CollectiveMismatchError(
                    f"state: rank {rank} has {_shown(theirs)}, but rank 0 has {_shown(mine)}; build the same model on "
                    "every rank"
                )
        if len(first) != len(other):
            longer, owner = (first, 0) if len(first) > len(other) else (other, rank)
            extra = longer[min(len(first), len(other))]
            raise CollectiveMismatchError(
                f"state: only rank {owner} of ranks 0 and {rank} has {_shown(extra)}; build one model everywhere"
            )


def _shown(signature: tuple[Any, ...]) -> str:
    name, kind, shape, dtype, partition = signature
    return f"{name!r} ({dtype}{list(shape)}, {kind}{' ' + partition if partition else ''})"


def check_shared(folder: Path) -> None:
    """Make ``folder`` and see that every rank finds there what the chief writes.

    Raises:
        CheckpointError: on every rank: the folder cannot be written, or a rank does not see it.
    """
    token = folder / f".shared-{cluster.exchange().broadcast(secrets.token_hex(4), 0)}"

    def leave() -> None:
        with naming_file(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()

    def look() -> None:
        with contextlib.suppress(OSError):
            list(folder.iterdir())  # has a network file system look again
        if not token.exists():
            here = cluster.cluster()
            raise CheckpointError(
                describe(
                    "logdir",
                    f"{folder}, which rank {here.rank} on {here.hosts[here.rank]} does not share with rank 0 on "
                    f"{here.hosts[0]}",
                    "a folder that all ranks see",
                    "give one on a shared file system, or pass gather=True: everything then goes through the chief",
                )
            )

    together(lambda: leave() if cluster.is_chief() else None)
    try:
        together(look)
    finally:
        if cluster.is_chief():
            token.unlink(missing_ok=True)


class _Outcome(NamedTuple):
    """How one rank fared: whether it met damage, and the words of its error, if it had one."""

    corrupt: bool
    words: str | None


def together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it fails on one, raise on all: elsewhere a CheckpointError that names it."""
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    words = None if problem is None else _words(problem)
    outcomes = cluster.exchange().allgather(_Outcome(isinstance(problem, CorruptCheckpointError), words))
    if problem is not None:
        raise problem
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome, _Outcome):
            raise CollectiveMismatchError(
                f"rank {rank} exchanges something else ({outcome!r}) while rank {cluster.rank()} saves, restores "
                "or begins a session; make the same calls in the same order on every rank"
            )
        if outcome.words is not None:
            raise (CorruptCheckpointError if outcome.corrupt else CheckpointError)(f"rank {rank}: {outcome.words}")
    return result


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
