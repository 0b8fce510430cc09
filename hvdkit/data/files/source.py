"""Rows of many files as one source with random access, of which each rank reads only its own rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import optree
import xxhash

from hvdkit import cluster
from hvdkit.cluster import agreement
from hvdkit.cluster.logs import get_logger
from hvdkit.data.block_order import BlockOrder
from hvdkit.data.files.listing import File, Paths, list_files
from hvdkit.data.files.reading_ahead import BlockCache, in_order, in_threads
from hvdkit.data.indexed import Shuffle, batches_of_epoch
from hvdkit.data.order import Order, RankRows, Remainder, shuffled_indices
from hvdkit.data.permutation import Permutation
from hvdkit.errors import DataError, describe

# Up to this many examples (4 MB), the full shuffle of files is that of arrays: uniform over all permutations.
_UNIFORM_EXAMPLES = 2**20


OnError = Literal["raise", "skip"]


class FileLayout(NamedTuple):
    """What one file has, as found by :meth:`Format.scan`.

    Attributes:
        block_rows: The number of rows of each block, in the order of the file.
        kind: The columns and types as text, which must be the same in all files.
        largest_block: Its size in memory, in bytes.
        damaged: The numbers of the records that are skipped, ascending.
        problem: Why the file as a whole is skipped, or "".
    """

    block_rows: list[int]
    kind: str
    largest_block: int
    damaged: np.ndarray = np.array([], np.int64)
    problem: str = ""


class BlockRows(NamedTuple):
    """Rows of a batch that come from one block.

    Attributes:
        block: What :meth:`Format.load` returned for the block.
        rows: int64 ``[m]``: the rows in it.
        places: int64 ``[m]``: their rows in the batch.
    """

    block: Any
    rows: np.ndarray
    places: np.ndarray


class Format(Protocol):
    """How files of one format are read. All methods may be called by several threads at once."""

    name: str
    suffixes: tuple[str, ...]  # of its files in a folder; empty for all
    reads_rows: bool  # without the rest of their block

    def scan(self, file: File) -> FileLayout:
        """Return what the file has; called once per file, by one of the ranks."""

    def load(self, file: File, layout: FileLayout, block: int) -> Any:
        """Read a block. The result is kept while its rows are needed."""

    def load_rows(self, file: File, layout: FileLayout, block: int, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        """Read the distinct, ascending rows of a block without the others; return what was read, and rows in it."""

    def take(self, parts: Sequence[BlockRows], rows: int) -> Any:
        """Return a batch of ``rows`` rows: a structure of arrays."""


class FileSource:
    """Rows of files, from :func:`hvdkit.data.parquet` and its siblings.

    Attributes:
        examples: The number of rows, in all files.
        structure: A batch of one row.
        files: The files, in order.
        layouts: What each of them has.
    """

    map_fn = None
    _mapped: Callable[[Any], Any] | None = None

    def __init__(self, paths: Paths, file_format: Format, on_error: OnError = "raise"):
        if on_error not in get_args(OnError):
            raise ValueError(describe("on_error", on_error, "'raise' or 'skip'", "choose one of the two"))
        self._format = file_format
        self.files, self.layouts = _listed_and_scanned(paths, file_format, on_error)
        self._report_skipped()
        read = [(file, layout) for file, layout in zip(self.files, self.layouts, strict=True) if not layout.problem]
        for file, layout in read:
            if layout.kind != read[0][1].kind:
                got, expected = f"{layout.kind} in {file.url}", f"{read[0][1].kind}, as in {read[0][0].url}"
                raise ValueError(describe("paths", got, expected, "give files of one schema, or choose columns"))
        rows = [rows for layout in self.layouts for rows in layout.block_rows]
        self._block_starts = np.cumsum([0, *rows])
        self._blocks = [(f, b) for f, layout in enumerate(self.layouts) for b in range(len(layout.block_rows))]
        self.examples = int(self._block_starts[-1])
        if self.examples == 0:
            remedy = "check how they were written"
            raise ValueError(describe("paths", f"{len(self.files)} files without rows", "at least one row", remedy))
        self._cache = BlockCache(self._load)
        self.structure = self.read(np.zeros(1, np.int64))

    @property
    def skipped(self) -> dict[str, int]:
        """The number of records that are skipped in each file with damage; -1 for files that are skipped as a whole."""
        counts = {f.url: -1 if e.problem else len(e.damaged) for f, e in zip(self.files, self.layouts, strict=True)}
        return {url: count for url, count in counts.items() if count}

    def _report_skipped(self) -> None:
        if not self.skipped or (cluster.is_initialized() and not cluster.is_chief()):
            return
        for file, layout in zip(self.files, self.layouts, strict=True):
            if layout.problem:
                get_logger().warning("on_error='skip': skipped the file %s: %s", file.url, layout.problem)
            elif len(layout.damaged):
                get_logger().warning("on_error='skip': skipped %d record(s) of %s", len(layout.damaged), file.url)

    @property
    def format_name(self) -> str:
        """The name of the function that made the source."""
        return self._format.name

    def read_times(self, shuffle: Shuffle, batch_size: int, size: int) -> float:
        """Return how many times the n/N examples of its part a rank reads in an epoch, approximately."""
        if shuffle.mode == "blocks":
            assert shuffle.lanes is not None
            touched = [-(-(r + 1) * shuffle.lanes // size) - r * shuffle.lanes // size for r in range(size)]
            return max(touched) * size / shuffle.lanes
        if self._format.reads_rows:
            return 1
        block_rows, local_rows = self.examples / len(self._blocks), batch_size / size
        # In order, the ranks share each block; shuffled, a batch has about one row of a block.
        return block_rows if shuffle.seed is not None else max(1, min(size, block_rows / local_rows))

    def __repr__(self) -> str:
        return f"hk.data.{self._format.name}({len(self.files)} files, {self.examples} rows, {len(self._blocks)} blocks)"

    def map(self, function: Callable[[Any], Any]) -> FileSource:
        """Return a source whose batches are ``function(batch)``; for example ``(x, y)`` for Keras.

        The function is called by the threads that read, with batches of any number of rows.

        Raises:
            ValueError: The result does not have the rows of the batch.

        Example:
            >>> rows = hk.data.parquet("clicks/")  # doctest: +SKIP
            >>> pairs = rows.map(lambda batch: (batch["items"], batch["label"]))  # doctest: +SKIP
        """
        other, before = copy.copy(self), self._mapped
        other._mapped = function if before is None else lambda batch: function(before(batch))
        other._cache = BlockCache(other._load)
        other.structure = other.read(np.zeros(2, np.int64))
        for leaf in optree.tree_leaves(other.structure):
            if not getattr(leaf, "shape", ()) or leaf.shape[0] != 2:
                got = f"{type(leaf).__name__} of shape {getattr(leaf, 'shape', ())} for a batch of 2 rows"
                raise ValueError(describe("function", got, "arrays [rows, ...]", "map whole batches"))
        return other

    def order(self, shuffle: Shuffle, epoch: int, batch_size: int) -> Order | None:
        """Return the order of an epoch, in constant memory."""
        key = None if shuffle.seed is None else (shuffle.seed, epoch)
        if shuffle.mode == "blocks":
            assert shuffle.lanes is not None and shuffle.buffer is not None
            window = max(1, shuffle.buffer // shuffle.lanes)
            return BlockOrder(self._block_starts, batch_size, shuffle.lanes, window, key)
        if key is None:
            return None
        if self.examples <= _UNIFORM_EXAMPLES:
            return shuffled_indices(self.examples, key).__getitem__
        return Permutation(self.examples, key)

    def open(
        self, epoch: int, step: int, rank_rows: RankRows, shuffle: Shuffle, remainder: Remainder
    ) -> Iterator[tuple[Any, list[int], int]]:
        """Yield the rank's rows of each global batch of the epoch from ``step`` on, and its number of real examples.

        Threads read the following batches ahead. The third value is 0.
        """
        whole_blocks = shuffle.mode == "blocks" or (shuffle.seed is None and not self._format.reads_rows)
        planned = batches_of_epoch(self, epoch, step, rank_rows, shuffle, remainder, lambda indices: indices)

        def read(plan: tuple[np.ndarray, list[int], int]) -> tuple[Any, list[int], int]:
            indices, counts, digest = plan
            return self.read(indices, whole_blocks=whole_blocks), counts, digest

        for batch in in_order(read, planned):
            self._cache.next_batch()
            yield batch

    def read(self, indices: np.ndarray, *, whole_blocks: bool = False) -> Any:
        """Return the rows ``indices``, int64 ``[m]``, in this order.

        Args:
            whole_blocks: Read each block once and keep it for later calls, because its other rows are needed soon.
        """
        blocks = np.searchsorted(self._block_starts, indices, side="right") - 1
        places = np.argsort(blocks, kind="stable")
        changes = np.flatnonzero(np.diff(blocks[places])) + 1
        parts = []
        for each in np.split(places, changes):
            block = int(blocks[each[0]])
            rows = indices[each] - self._block_starts[block]
            if whole_blocks:
                parts.append(BlockRows(self._cache.get(block), rows, each))
            else:
                unique, inverse = np.unique(rows, return_inverse=True)
                f, b = self._blocks[block]
                loaded, found = self._format.load_rows(self.files[f], self.layouts[f], b, unique)
                parts.append(BlockRows(loaded, found[inverse], each))
        batch = self._format.take(parts, len(indices))
        return batch if self._mapped is None else self._mapped(batch)

    def batch_spec(self, rows: int | None) -> Any:
        """Return the ``tf.TypeSpec`` structure of a batch of ``rows`` rows; None for any number."""
        import tensorflow as tf

        def spec(leaf: Any) -> Any:
            if isinstance(leaf, tf.RaggedTensor):
                shape = [rows, *leaf.shape[1:]]
                return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
            return tf.TensorSpec([rows, *leaf.shape[1:]], tf.convert_to_tensor(leaf).dtype)

        return tf.nest.map_structure(spec, self.structure)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of rows, the columns, and a digest of all files' names, sizes and rows."""
        return {"examples": self.examples, "arrays": {"files": self.layouts[0].kind}, "rows": self.digest()}

    def identity(self, shuffle: Shuffle) -> dict[str, Any]:
        """Return what determines the global order in addition to the seed and sizes."""
        return {"shuffle": shuffle.mode, "interleave": shuffle.lanes, "files": self.digest()}

    def digest(self) -> int:
        """Return a digest of the files' sizes and rows. Their folders may differ between hosts and runs."""
        names = [(file.name, file.size) for file in self.files]
        return xxhash.xxh3_64_intdigest(repr((names, self._block_starts.tolist())).encode())

    def _load(self, block: int) -> Any:
        f, b = self._blocks[block]
        return self._format.load(self.files[f], self.layouts[f], b)


def _listed_and_scanned(paths: Paths, file_format: Format, on_error: OnError) -> tuple[list[File], list[FileLayout]]:
    """Return the files and their layouts. Each rank scans a part of the files.

    Raises:
        Exception: ``paths`` are invalid, or this rank's part of the files cannot be read.
        DataError: On other ranks.
        CollectiveMismatchError: Ranks see different files.
    """
    files: list[File] = []

    def scan(file: File) -> FileLayout:
        try:
            return file_format.scan(file)
        except DataError as error:
            if on_error == "raise":
                raise
            return FileLayout([], "", 0, problem=str(error))

    if not cluster.is_initialized():
        files = list_files(paths, file_format.suffixes)
        return files, in_threads(scan, files)
    exchange, rank, size = cluster.exchange(), cluster.rank(), cluster.size()

    def names_and_sizes() -> list[tuple[str, int]]:
        files.extend(list_files(paths, file_format.suffixes))
        return [(file.name, file.size) for file in files]

    listed = agreement.gather(exchange, "a list of data files", names_and_sizes, error=DataError)
    agreement.compare(listed, "paths", "let every host see the same files", show=_first_difference)
    scanned = agreement.gather(
        exchange, "the rows of data files", lambda: in_threads(scan, files[rank::size]), error=DataError
    )
    return files, [scanned[i % size][i // size] for i in range(len(files))]


def _first_difference(odd: list[tuple[str, int]], usual: list[tuple[str, int]]) -> tuple[str, str]:
    index = agreement.differing_indices(odd, usual)[0]
    got, expected = (
        f"{each[index][0]} of {each[index][1]} bytes" if index < len(each) else "no further file"
        for each in (odd, usual)
    )
    return got, expected
