"""Save over all ranks, and agree between ranks on what to save or restore. Every rank calls every function."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from hvdkit import cluster
from hvdkit.checkpoint.entries import State
from hvdkit.checkpoint.files import naming_file
from hvdkit.checkpoint.folder import latest, tidy_one
from hvdkit.checkpoint.link import save_through_chief
from hvdkit.checkpoint.matching import without_numbers
from hvdkit.checkpoint.state import flatten
from hvdkit.checkpoint.writing import Failure, Save, Snapshot, non_finite
from hvdkit.cluster.agreement import compare, gather, unlike_places
from hvdkit.errors import CheckpointError, describe

T = TypeVar("T")
Signature: TypeAlias = list[tuple[str, str, tuple[int, ...], str, str | None]]
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
    path, flat = Path(path), agreed_state(state)
    if step is None:
        number = re.search(r"(\d+)$", path.name)
        step = int(number[1]) if number else 0
    if gather:
        save_through_chief(path, Snapshot.of(flat, cluster.rank(), in_place=True), step=step)
        return path

    def tidied() -> str:
        tidy_one(path)
        return secrets.token_hex(4)

    token = of_chief("hk.checkpoint.save()", tidied)
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
    """Take a snapshot on this rank and start writing it in the background. Does not communicate.

    With ``in_place`` the caller must not change the state until it is written, and less memory is needed. For the
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
        permitted=permitted,
        committed=committed,
        behind=not in_place,
    ).start()


def finish(save: Save) -> None:
    """Wait until the checkpoint is complete, or has failed on some rank.

    Raises:
        CheckpointError: on every rank; the message names the rank that failed.
        NonFiniteError: on every rank; the message names variable, rank and step.
    """
    while not settled(save, gather(cluster.exchange(), "the end of a save", lambda: progress_of(save))):
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
    """Return this rank's progress, as input for :func:`settled`."""
    done = save.done  # read before failure(), which is final only after the thread has ended
    failure = save.failure()
    newest = latest(save.target.parent) if failure is not None and save.rank == 0 else None
    return SaveProgress(done, failure, newest.name if newest else None)


def settled(save: Save, ranks: Sequence[SaveProgress]) -> bool:
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
        rank, failure = next((f for f in failed if not f[1].given_up), failed[0])
        if failure.non_finite:
            raise non_finite(failure.words, rank, save.step, ranks[0].newest)
        raise CheckpointError(
            f"{save.target}: not saved, rank {rank} failed: {failure.words}; what was saved before is as it was"
        )
    return True


def agreed_state(state: Mapping[str, Any]) -> State:
    """Flatten ``state`` and compare it across ranks; all ranks then use the chief's tensor names.

    Keras numbers layers per process, so a rank that created an additional layer has different names for the same model.

    Raises:
        TypeError: something in it cannot be saved.
        CollectiveMismatchError: ranks differ; the message names rank and tensor.
    """
    laid_out: list[State] = []

    def digest() -> bytes:
        laid_out.append(flatten(state))
        return hashlib.sha256(repr(_signature(laid_out[0])).encode()).digest()

    digests = gather(cluster.exchange(), "state to save or restore", digest, error=CheckpointError)
    flat = laid_out[0]
    if len(set(digests)) > 1:
        signatures = gather(cluster.exchange(), "different states to save or restore", lambda: _signature(flat))
        remedy = "build the same model on every rank"
        compare(signatures, "state", remedy, key=_without_numbers, show=_first_difference)
        for entry, (name, *_) in zip(flat.entries.values(), signatures[0], strict=False):
            entry.name = name
        flat.entries = {entry.name: entry for entry in flat.entries.values()}
    return flat


def _signature(flat: State) -> Signature:
    tensors = [(e.name, e.kind, e.shape, e.dtype.name, e.partition) for e in flat.entries.values()]
    return [*tensors, *((name, "value", (), "", None) for name in flat.values)]


def _without_numbers(signature: Signature) -> list[tuple[Any, ...]]:
    return [(without_numbers(name), *others) for name, *others in signature]


def _first_difference(odd: Signature, usual: Signature) -> tuple[str, str]:
    place = unlike_places(_without_numbers(odd), _without_numbers(usual))[0]
    got, expected = ([*map(_shown, each), "no further tensor"][place] for each in (odd, usual))
    return got, expected


def _shown(signature: tuple[Any, ...]) -> str:
    name, kind, shape, dtype, partition = signature
    return f"{name!r} ({dtype}{list(shape)}, {kind}{' ' + partition if partition else ''})"


def check_shared(folder: Path) -> None:
    """Create ``folder`` and check that every rank sees a file that the chief writes there.

    Raises:
        CheckpointError: on every rank: the folder cannot be written, or a rank does not see the file.
    """

    def leave() -> str:
        name = f".shared-{secrets.token_hex(4)}"
        with naming_file(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        return name

    def look() -> None:
        with contextlib.suppress(OSError):
            list(folder.iterdir())  # makes a network file system refresh its cache
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

    token = folder / of_chief("a folder to save in", leave)
    try:
        together("a look into the folder", look)
    finally:
        if cluster.is_chief():
            token.unlink(missing_ok=True)


def together(kind: str, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank and return this rank's result; an exception on one rank raises an error on all.

    Args:
        kind: a description for messages; the same on every rank.
        action: the function to run; may raise.

    Raises:
        Exception: the exception that ``action`` raised on this rank.
        CheckpointError: on other ranks; the message names the rank that failed.
    """
    results: list[T] = []
    gather(cluster.exchange(), kind, lambda: results.append(action()), error=CheckpointError)
    return results[0]


def of_chief(kind: str, action: Callable[[], T]) -> T:
    """Run ``action`` on the chief and return its result, which must be picklable, on every rank.

    Args and Raises as for :func:`together`.
    """
    chosen = action if cluster.is_chief() else lambda: None
    return cast(T, gather(cluster.exchange(), kind, chosen, error=CheckpointError)[0])
