"""Checks before a save or restore that ranks have the same state, folder and manifest. Every rank calls them all."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from hvdkit import cluster
from hvdkit.checkpoint.entries import State
from hvdkit.checkpoint.files import checkpoint_errors
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.matching import without_numbers
from hvdkit.checkpoint.state import flatten
from hvdkit.cluster import agreement
from hvdkit.errors import CheckpointError, describe

T = TypeVar("T")
Signature: TypeAlias = list[tuple[str, str, tuple[int, ...], str, str | None]]


def run_on_all_ranks(kind: str, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank and return this rank's result. If it raises on one rank, all ranks raise an error.

    Args:
        kind: a description for messages; the same on every rank.
        action: the function to run; may raise.

    Raises:
        Exception: the exception that ``action`` raised on this rank.
        CheckpointError: on other ranks; the message names the rank that failed.
    """
    results: list[T] = []
    agreement.gather(cluster.exchange(), kind, lambda: results.append(action()), error=CheckpointError)
    return results[0]


def run_on_chief(kind: str, action: Callable[[], T]) -> T:
    """Run ``action`` on the chief and return its result, which must be picklable, on every rank.

    Args and Raises as for :func:`run_on_all_ranks`.
    """
    value = action if cluster.is_chief() else lambda: None
    return cast(T, agreement.gather(cluster.exchange(), kind, value, error=CheckpointError)[0])


def agreed_state(state: Mapping[str, Any]) -> State:
    """Flatten ``state`` and compare it across ranks; all ranks then use the chief's tensor names.

    Keras numbers layers per process, so the same model has other names on a rank that created an additional layer.

    Raises:
        TypeError: something in it cannot be saved.
        CollectiveMismatchError: ranks differ; the message names rank and tensor.
    """
    exchange = cluster.exchange()
    flattened = State()

    def digest() -> bytes:
        nonlocal flattened
        flattened = flatten(state)
        return hashlib.sha256(repr(_signature(flattened)).encode()).digest()

    digests = agreement.gather(exchange, "state to save or restore", digest, error=CheckpointError)
    if len(set(digests)) > 1:
        signatures = agreement.gather(exchange, "different states to save or restore", lambda: _signature(flattened))
        remedy = "build the same model on every rank"
        agreement.compare(signatures, "state", remedy, key=_without_numbers, show=_first_difference)
        for tensor, (name, *_) in zip(flattened.tensors.values(), signatures[0], strict=False):
            tensor.name = name
        flattened.tensors = {tensor.name: tensor for tensor in flattened.tensors.values()}
    return flattened


def _signature(state: State) -> Signature:
    tensors = [(t.name, t.kind, t.shape, t.dtype.name, t.partition) for t in state.tensors.values()]
    return [*tensors, *((name, "value", (), "", None) for name in state.values)]


def _without_numbers(signature: Signature) -> list[tuple[Any, ...]]:
    return [(without_numbers(name), *others) for name, *others in signature]


def _first_difference(odd: Signature, usual: Signature) -> tuple[str, str]:
    index = agreement.differing_indices(_without_numbers(odd), _without_numbers(usual))[0]
    got, expected = ([*map(_describe_tensor, each), "no further tensor"][index] for each in (odd, usual))
    return got, expected


def _describe_tensor(signature: tuple[Any, ...]) -> str:
    name, kind, shape, dtype, partition = signature
    return f"{name!r} ({dtype}{list(shape)}, {kind}{' ' + partition if partition else ''})"


def agreed_manifest(path: Path, *, gather: bool = False) -> Manifest:
    """Return the manifest of ``path``, identical on every rank.

    Every rank reads it and compares its checksum with the chief's, because a manifest has an entry for each rank and
    tensor and may be large. With ``gather`` the chief sends it.

    Raises:
        CheckpointError: on every rank: ``Manifest.load`` fails or a rank reads a different manifest.
    """
    if gather or cluster.size() == 1:
        return run_on_chief("a manifest", lambda: Manifest.load(path))
    checksum = run_on_chief("a manifest", lambda: Manifest.load(path).checksum)

    def read() -> Manifest:
        _refresh(path.parent)
        manifest = Manifest.parse(path)
        if manifest.checksum != checksum:
            here = cluster.cluster()
            got = f"a different manifest on rank {here.rank} ({here.hosts[here.rank]}) than on rank 0 ({here.hosts[0]})"
            remedy = "restore from a file system that all ranks share, or pass gather=True"
            raise CheckpointError(describe(str(path), got, "one checkpoint", remedy))
        return manifest

    return run_on_all_ranks("every rank's manifest", read)


def check_shared(folder: Path) -> None:
    """Create ``folder`` and check that every rank sees a file that the chief writes there.

    Raises:
        CheckpointError: on every rank: the folder cannot be written, or a rank does not see the file.
    """

    def create_probe() -> str:
        name = f".shared-{secrets.token_hex(4)}"
        with checkpoint_errors(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        return name

    def check_probe() -> None:
        _refresh(folder)
        if not probe.exists():
            here = cluster.cluster()
            host = here.hosts[here.rank]
            chief = here.hosts[0]
            got = f"{folder}, which rank {here.rank} on {host} does not share with rank 0 on {chief}"
            remedy = "pass one on a shared file system, or pass gather=True: everything then goes through the chief"
            raise CheckpointError(describe("logdir", got, "a folder that all ranks see", remedy))

    probe = folder / run_on_chief("a folder to save in", create_probe)
    try:
        run_on_all_ranks("a look into the folder", check_probe)
    finally:
        if cluster.is_chief():
            probe.unlink(missing_ok=True)


def _refresh(folder: Path) -> None:
    """List a folder, which makes a network file system refresh its cache."""
    with contextlib.suppress(OSError):
        list(folder.iterdir())
