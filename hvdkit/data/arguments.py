"""From the arguments of :class:`hvdkit.data.GlobalBatches` to a plan: checks and defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import get_args

from hvdkit import cluster
from hvdkit.cluster.logs import get_logger
from hvdkit.data.arrays import ArraySource
from hvdkit.data.batch_plan import BatchPlan, Source
from hvdkit.data.files.source import FileSource
from hvdkit.data.growth import GrowingFiles, Growth
from hvdkit.data.mixtures import Mixture
from hvdkit.data.order import Mode, RankRows, Remainder, Shuffle
from hvdkit.data.stream import StreamSource
from hvdkit.errors import describe, integer

STREAM_BUFFER = 10_000
"""Default size of a stream's shuffle buffer, in examples."""
BLOCK_BUFFER = 2**18
"""Default number of examples in the windows of all lanes: see :mod:`hvdkit.data.block_order`."""
LANES = 16
"""Default number of lanes; ranks whose number divides it read no block twice."""
_MUCH_READING = 1.5


def plan_of(
    data: object,
    global_batch_size: int,
    *,
    shuffle_seed: int | None,
    shuffle: Mode,
    epochs: int | None,
    remainder: Remainder,
    map_fn: Callable[..., object] | None,
    shuffle_buffer: int | None,
    interleave: int | None,
    growth: Growth | None,
    rank: int | None,
    size: int | None,
) -> BatchPlan:
    """Return the plan of the arguments of ``GlobalBatches``, after checking them."""
    rank, size = _rank_and_size(rank, size)
    source = _source(data, map_fn)
    batch_size = integer("global_batch_size", global_batch_size, minimum=1)
    if batch_size < size:
        expected = f"at least {size}, the number of ranks"
        remedy = "raise it, or start fewer ranks: each needs an example in every batch"
        raise ValueError(describe("global_batch_size", batch_size, expected, remedy))
    epochs = None if epochs is None else integer("epochs", epochs, minimum=1)
    if remainder not in get_args(Remainder):
        raise ValueError(describe("remainder", remainder, "'pad' or 'drop'", "choose one of the two"))
    shuffling = _shuffle(source, batch_size, shuffle_seed, shuffle, shuffle_buffer, interleave)
    if rank == 0 and isinstance(source, FileSource | Mixture):
        _warn_about_reading(source, shuffling, batch_size, size)
    files = None
    if growth is not None:
        if growth not in get_args(Growth):
            raise ValueError(describe("growth", growth, "'append', 'replace' or None", "choose one of them"))
        if not isinstance(source, FileSource):
            remedy = "leave it out: only files are found again"
            raise TypeError(describe("growth", growth, "files, e.g. hk.data.parquet(paths)", remedy))
        files = GrowingFiles(growth, source, source)
    return BatchPlan(source, RankRows(rank, size, batch_size), shuffling, remainder, epochs, files)


def _rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return rank and size: those passed by the user, or the cluster's if both are None."""
    if rank is None and size is None:
        data_group = cluster.group(cluster.DATA)  # ranks that differ along another axis read the same rows
        return data_group.index, data_group.size
    if rank is None or size is None:
        raise ValueError(describe("rank, size", (rank, size), "both or neither", "pass the two together"))
    size = integer("size", size, minimum=1)
    rank = integer("rank", rank, minimum=0)
    if rank >= size:
        raise ValueError(describe("rank", rank, f"less than size ({size})", "ranks count from 0"))
    return rank, size


def _source(data: object, map_fn: Callable[..., object] | None) -> Source:
    """Return ``data`` as a source of examples."""
    tensorflow = sys.modules.get("tensorflow")  # already imported if data is a Dataset
    if tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
        return StreamSource(data, map_fn=map_fn)
    if map_fn is not None:
        remedy = "it is for a tf.data.Dataset; map each batch of arrays or files after it is read, or use parse="
        raise TypeError(describe("map_fn", map_fn, "None for arrays and files", remedy))
    return data if isinstance(data, FileSource | Mixture) else ArraySource(data)


def _shuffle(
    source: Source, batch_size: int, seed: int | None, mode: Mode, buffer: int | None, interleave: int | None
) -> Shuffle:
    """Return the checked arguments about the order of examples, with the defaults of the source."""
    seed = None if seed is None else integer("shuffle_seed", seed, minimum=0)
    buffer = None if buffer is None else integer("shuffle_buffer", buffer, minimum=1)
    if mode not in get_args(Mode):
        raise ValueError(describe("shuffle", mode, "'full' or 'blocks'", "choose one of the two"))
    if isinstance(source, StreamSource) and seed is not None:
        buffer = buffer or STREAM_BUFFER
    if mode == "full":
        for name, value in (
            ("shuffle_buffer", None if isinstance(source, StreamSource) else buffer),
            ("interleave", interleave),
        ):
            if value is not None:
                remedy = "leave it out; it is for shuffle='blocks' on files"
                raise TypeError(describe(name, value, "None for a full shuffle", remedy))
        return Shuffle(seed, buffer=buffer)
    if not all(isinstance(each, FileSource) for each in (source.sources if isinstance(source, Mixture) else [source])):
        remedy = "leave it out: arrays are shuffled whole, and streams with shuffle_buffer"
        raise TypeError(describe("shuffle", mode, "files, e.g. hk.data.parquet(paths)", remedy))
    lanes = min(LANES, batch_size) if interleave is None else integer("interleave", interleave, minimum=1)
    if lanes > batch_size:
        remedy = "lower it, or raise global_batch_size: each lane has a row of every batch"
        raise ValueError(describe("interleave", lanes, f"at most {batch_size}, the global batch size", remedy))
    return Shuffle(seed, "blocks", buffer or BLOCK_BUFFER, lanes)


def _warn_about_reading(source: FileSource | Mixture, shuffle: Shuffle, batch_size: int, size: int) -> None:
    """Warn the user if ranks read much more of large files than their part."""
    times = source.read_times(shuffle, batch_size, size)
    if times < _MUCH_READING or source.is_small:
        return
    lanes = min(-(-(shuffle.lanes or LANES) // size), batch_size // size) * size
    remedy = f"interleave={lanes}" if shuffle.mode == "blocks" else "shuffle='blocks'"
    get_logger().warning(
        "shuffle: got %r with %r on %d rank(s), with which each reads about %.3g times its part of the files; pass %s",
        shuffle.mode,
        source,
        size,
        times,
        remedy,
    )


def keras_parts(structure: object) -> int:
    """Return the number of parts of data for Keras: 1 (x), 2 (x, y) or 3 (x, y, sample_weight)."""
    if isinstance(structure, list) or (isinstance(structure, tuple) and not 1 <= len(structure) <= 3):
        got = f"a {type(structure).__name__} of {len(structure)}"
        expected = "x, (x, y) or (x, y, sample_weight), as Keras takes them"
        raise TypeError(describe("arrays_or_source", got, expected, "pass several inputs as ([a, b], y), in a tuple"))
    return len(structure) if isinstance(structure, tuple) else 1


def require_pairs(source: Source) -> None:
    """Raise TypeError unless the data are ``(x, y)``, for ``with_sample_weight=True``."""
    structure = source.structure
    if not isinstance(structure, tuple) or len(structure) != 2:
        got = f"a {type(structure).__name__}"
        remedy = "pass (x, y), or read .sample_weight after each batch"
        raise TypeError(describe("arrays_or_source", got, "a tuple (x, y) for with_sample_weight=True", remedy))


def warn_about_filler(examples: int | None, batch_size: int) -> None:
    """Warn the user about Keras's metrics if the last batch of an epoch may be short and is padded."""
    if examples is None:
        get_logger().warning(
            "remainder: got 'pad', for a stream of unknown length, whose last batch may be short; the gradients are "
            "right, but Keras's metrics will count that batch as a full one; pass remainder='drop', or call hk.fit"
        )
    elif short := examples % batch_size:
        get_logger().warning(
            "remainder: got 'pad', and an epoch's last batch has %d examples of %d; the gradients are right, but "
            "Keras's metrics will count these as a full batch; for exact metrics pass remainder='drop', or use hk.fit",
            short,
            batch_size,
        )
