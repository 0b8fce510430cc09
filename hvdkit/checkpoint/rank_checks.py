"""Checks before a save or restore that ranks have the same state, folder and manifest. Every rank calls them all."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar, cast

from hvdkit import cluster
from hvdkit.checkpoint.entries import State, is_optional, key_of
from hvdkit.checkpoint.files import PROBE, RunPath, exists, make_folder, names_in, remove_file, write_text
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.matching import without_numbers
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.state import flatten
from hvdkit.cluster import agreement
from hvdkit.cluster.agreement import Problem, run_on_all_ranks
from hvdkit.errors import CheckpointError, describe

T = TypeVar("T")
Entry: TypeAlias = tuple[str, str, tuple[int, ...], str, str | None]  # name, kind, shape, dtype and partition
Signature: TypeAlias = list[Entry]


def run_on_chief(kind: str, action: Callable[[], T]) -> T:
    """Run ``action`` on the chief and return its result, which must be picklable, on every rank.

    If it raises, other ranks raise CheckpointError with the message of the chief. ``kind`` describes it in messages.
    """
    value = action if cluster.is_chief() else lambda: None
    return cast(T, agreement.gather(cluster.exchange(), kind, value, error=CheckpointError)[0])


def agreed_state(state: Mapping[str, object]) -> State:
    """Flatten ``state`` and compare it across ranks; all ranks then use the chief's tensor names.

    Keras numbers layers per process, so the same model has other names on a rank that created an additional layer.

    Raises:
        TypeError: something in it cannot be saved.
        CollectiveMismatchError: ranks differ; the message names rank and tensor.
    """
    kind = "state to save or restore"
    flattened, digests = agreement.run_and_describe(
        cluster.exchange(), kind, lambda: flatten(state), _digest, error=CheckpointError
    )
    return _with_names_of_chief(flattened, digests)


def _with_names_of_chief(state: State, digests: list[bytes]) -> State:
    """Compare a state across ranks, given the digest of each, and rename its tensors and values as on the chief."""
    if len(set(digests)) > 1:
        kind = "different states to save or restore"
        signatures = agreement.gather(cluster.exchange(), kind, lambda: _signature(state))
        remedy = "build the same model on every rank"
        agreement.compare(signatures, "state", remedy, key=_without_numbers, show=_first_difference)
        names = [name for name, *_ in signatures[0]]
        for tensor, name in zip(state.tensors.values(), names, strict=False):
            tensor.name = name
        state.values = dict(zip(names[len(state.tensors) :], state.values.values(), strict=True))
        state.tensors = {tensor.name: tensor for tensor in state.tensors.values()}
    return state


def _digest(state: State) -> bytes:
    return hashlib.sha256(repr(_signature(state)).encode()).digest()


def _signature(state: State) -> Signature:
    tensors = [(t.name, t.kind, t.shape, t.dtype.name, t.partition) for t in state.tensors.values()]
    kinds = {name: "value of each rank" if value.per_rank else "value" for name, value in state.values.items()}
    return [*tensors, *((name, kind, (), "", None) for name, kind in kinds.items())]


def _without_numbers(signature: Signature) -> Signature:
    return [(without_numbers(name), kind, shape, dtype, rule) for name, kind, shape, dtype, rule in signature]


def _first_difference(odd: Signature, usual: Signature) -> tuple[str, str]:
    index = agreement.differing_indices(_without_numbers(odd), _without_numbers(usual))[0]
    got, expected = ([*map(_describe_tensor, each), "no further tensor"][index] for each in (odd, usual))
    return got, expected


def _describe_tensor(signature: Entry) -> str:
    name, kind, shape, dtype, partition = signature
    return f"{name!r} ({dtype}{list(shape)}, {kind}{' ' + partition if partition else ''})"


class Opened(NamedTuple):
    """A checkpoint and the state to restore from it, after all ranks have agreed on both.

    Attributes:
        state: this rank's state.
        manifest: the manifest, identical on every rank.
        indices: with ``gather``: for every rank, the index of its part of each tensor, in the order of the state.
        rank_values: with ``gather``: the plain values of every rank that saved.
    """

    state: State
    manifest: Manifest
    indices: list[list[tuple[range, ...] | None]]
    rank_values: Mapping[int, Mapping[str, object]]


class _Opening(NamedTuple):
    """A rank's message at the start of a restore: the digest of its state, and the manifest's checksum or its problem.

    With ``gather``, also what :class:`Opened` has of that rank.
    """

    digest: bytes
    checksum: str | None
    problem: Problem | None
    indices: list[tuple[range, ...] | None]
    manifest: Manifest | None
    rank_values: dict[int, Mapping[str, object]]


def open_checkpoint(path: RunPath, into: Mapping[str, object], *, gather: bool = False) -> Opened:
    """Flatten ``into``, read the manifest of ``path``, and compare both across ranks, in one exchange.

    Every rank reads the manifest and sends its checksum, because a manifest has an entry for each rank and tensor and
    may be large. With ``gather`` only the chief reads, and sends it.

    Raises:
        TypeError, CollectiveMismatchError: on every rank: as for :func:`agreed_state`; these come first.
        CheckpointError: on every rank: ``Manifest.load`` fails on the chief, or a rank reads a different manifest.
    """

    def read() -> tuple[State, Manifest | Exception | None]:
        state = flatten(into)
        try:
            if cluster.is_chief():
                return state, Manifest.load(path)
            return state, None if gather else _parse(path)
        except Exception as error:
            return state, error

    def describe_reading(own: tuple[State, Manifest | Exception | None]) -> _Opening:
        state, found = own
        manifest = found if isinstance(found, Manifest) else None
        sent = manifest if gather else None
        return _Opening(
            _digest(state),
            None if manifest is None else manifest.checksum,
            Problem.of(found, CheckpointError) if isinstance(found, Exception) else None,
            [tensor.index for tensor in state.tensors.values()] if gather else [],
            sent,
            {} if sent is None else read_rank_values(path, sent, state, range(cluster.size())),
        )

    kind = "state and checkpoint to restore"
    (state, found), ranks = agreement.run_and_describe(
        cluster.exchange(), kind, read, describe_reading, error=CheckpointError
    )
    state = _with_names_of_chief(state, [each.digest for each in ranks])
    chief = ranks[0]
    if chief.problem is not None:
        if cluster.is_chief() and isinstance(found, Exception):
            raise found
        raise chief.problem.error(f"a manifest: rank 0 raised {chief.problem.text}")
    manifest = chief.manifest if gather else found
    if not gather and len({each.checksum for each in ranks}) > 1:
        manifest = _read_again(path, str(chief.checksum))
    assert isinstance(manifest, Manifest)
    keys = {key_of(name) for name in manifest.variables}
    is_present = [not is_optional(name) or key_of(name) in keys for name in state.tensors]
    state.tensors = dict(itertools.compress(state.tensors.items(), is_present))
    indices = [list(itertools.compress(each.indices, is_present)) for each in ranks]
    return Opened(state, manifest, indices, chief.rank_values)


def _parse(path: RunPath) -> Manifest:
    _refresh(path.parent)
    return Manifest.parse(path)


def _read_again(path: RunPath, checksum: str) -> Manifest:
    """Return the manifest, which some rank did not find, or found another one before the chief had finished."""

    def read() -> Manifest:
        manifest = _parse(path)
        if manifest.checksum != checksum:
            here = cluster.cluster()
            got = f"a different manifest on rank {here.rank} ({here.hosts[here.rank]}) than on rank 0 ({here.hosts[0]})"
            remedy = "restore from a file system that all ranks share, or pass gather=True"
            raise CheckpointError(describe(str(path), got, "one checkpoint", remedy))
        return manifest

    return run_on_all_ranks(cluster.exchange(), "every rank's manifest", read, error=CheckpointError)


def read_rank_values(
    path: RunPath, manifest: Manifest, state: State, ranks: Iterable[int]
) -> dict[int, Mapping[str, object]]:
    """Return the plain values of those of ``ranks`` that saved; of no rank if ``state`` has no such values."""
    if not any(value.per_rank for value in state.values.values()):
        return {}
    with Reader(path, manifest) as reader:
        return {rank: reader.rank_values(rank) for rank in ranks if rank < manifest.size}


def check_shared(folder: RunPath) -> None:
    """Create ``folder`` and check that every rank sees a file that the chief writes there.

    Otherwise every rank raises CheckpointError.
    """

    def create_probe() -> str:
        name = f"{PROBE}{secrets.token_hex(4)}"
        make_folder(folder)
        write_text(folder / name, "")
        return name

    def check_probe() -> None:
        _refresh(folder)
        if not exists(probe):
            here = cluster.cluster()
            host = here.hosts[here.rank]
            chief = here.hosts[0]
            got = f"{folder}, which rank {here.rank} on {host} does not share with rank 0 on {chief}"
            remedy = "pass one on a shared file system, or pass gather=True: everything then goes through the chief"
            raise CheckpointError(describe("logdir", got, "a folder that all ranks see", remedy))

    probe = folder / run_on_chief("a folder to save in", create_probe)
    try:
        run_on_all_ranks(cluster.exchange(), "a look into the folder", check_probe, error=CheckpointError)
    finally:
        if cluster.is_chief():
            remove_file(probe)


def _refresh(folder: RunPath) -> None:
    """List a local folder, which makes a network file system refresh its cache."""
    if not isinstance(folder, Path):
        return
    with contextlib.suppress(OSError):
        names_in(folder)
