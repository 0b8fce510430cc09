"""Read a checkpoint's tensors: all of a replicated one, or a rank's part of a sharded one at any number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import numpy as np

from hvdkit.checkpoint.entries import Resize, StateTensor
from hvdkit.checkpoint.files import RunPath
from hvdkit.checkpoint.manifest import NAME, Manifest
from hvdkit.checkpoint.tensor_entry import Part, TensorEntry
from hvdkit.checkpoint.tensorfile import BLOCK_BYTES, TensorFile
from hvdkit.data.aligned import aligned_empty
from hvdkit.errors import CorruptCheckpointError
from hvdkit.sharding.partition import FLAT, boxes_of, intersect, positions

# Processes are often limited to 1024 open files, and a checkpoint has one file for each rank that saved.
OPEN_FILES = 64


class Reader(contextlib.AbstractContextManager["Reader"]):
    """Reads verified tensors of one checkpoint. Each file's header is read once, on first use.

    At most :data:`OPEN_FILES` files are open at a time, regardless of the number of ranks that saved. Every method that
    reads raises CorruptCheckpointError if bytes differ from those saved; the message names file, tensor and rows.

    Attributes:
        bytes_read: bytes read from all files so far, including headers.
    """

    def __init__(self, path: RunPath, manifest: Manifest):
        self._path = path
        self._manifest = manifest
        self._files: dict[str, TensorFile] = {}
        self._open: dict[str, TensorFile] = {}  # least recently used first
        self._totals: dict[str, np.ndarray | np.float64] = {}

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return sum(file.bytes_read for file in self._files.values())

    def part(self, tensor: StateTensor, name: str, rank: int, size: int) -> np.ndarray | None:
        """Return the part of a tensor for ``rank`` of ``size``, or None to keep its value.

        Args:
            tensor: the tensor to restore, with the index for that rank.
            name: its name in the checkpoint.
            rank, size: a rank of this job, and its number of ranks.
        """
        if tensor.kind == "replicated":
            return self.whole(name)
        if tensor.kind == "per_rank":
            return self.per_rank(name, rank, size, tensor.resize)
        assert tensor.index is not None
        return self.sharded(name, tensor.index, flat=tensor.partition == FLAT)

    def whole(self, name: str) -> np.ndarray:
        """Return an entire replicated or sharded tensor."""
        tensor = self._manifest.variables[name]
        if tensor.kind == "replicated":
            out = aligned_empty(tensor.shape, np.dtype(tensor.dtype))
            return self.open(tensor.parts[0].file).read(name, out=out)
        return self.sharded(name, tuple(map(range, tensor.shape)))

    def per_rank(self, name: str, rank: int, size: int, resize: Resize) -> np.ndarray | None:
        """Return the value of a per-rank tensor for ``rank`` of ``size``, or None to keep the current value."""
        tensor = self._manifest.variables[name]
        saved_size = self._manifest.size
        if size == saved_size or (resize == "keep" and rank < saved_size):
            return self.open(tensor.parts[rank].file).read(name)
        if resize == "keep":
            return None
        divisor = saved_size if resize == "mean" else size
        return np.asarray(self._total(name) / divisor).astype(np.dtype(tensor.dtype))

    def _total(self, name: str) -> np.ndarray | np.float64:
        """Return the float64 sum over the ranks that saved; each file is read once for all such tensors."""
        if name not in self._totals:
            tensors = self._manifest.variables
            floats = {n for n, t in tensors.items() if t.kind == "per_rank" and np.dtype(t.dtype).kind not in "iub"}
            for parts in zip(*([(n, part) for part in tensors[n].parts] for n in sorted(floats | {name})), strict=True):
                for n, part in parts:
                    self._totals[n] = self._totals.get(n, 0.0) + self.open(part.file).read(n).astype(np.float64)
        return self._totals.pop(name)

    def sharded(self, name: str, index: tuple[range, ...], *, flat: bool = False) -> np.ndarray:
        """Return the part of a sharded tensor at the global indices ``index``, reading only the rows needed.

        If ``flat``, the index is one range of elements in row-major order.
        """
        tensor = self._manifest.variables[name]
        if flat:
            return self._read_elements(name, tensor, index[0])
        if tensor.partition == FLAT:
            return self._read_box_of_flat(name, tensor, index)
        out = aligned_empty([len(axis) for axis in index], np.dtype(tensor.dtype))
        copied = sum(self._copy_part(name, tensor, part, index, out) for part in tensor.parts)
        self._check_complete(name, tensor, out.size, copied)
        return out

    def _check_complete(self, name: str, tensor: TensorEntry, expected: int, copied: int) -> None:
        if copied != expected:
            missing = f"of {expected} values asked for {expected - copied} are in no shard"
            raise CorruptCheckpointError(f"{self._path}: {name!r} is {tensor}, and {missing}")

    def _read_elements(self, name: str, tensor: TensorEntry, elements: range) -> np.ndarray:
        """Return contiguous elements of a tensor in row-major order, for any saved partition."""
        if tensor.kind == "replicated" and len(elements) == math.prod(tensor.shape):
            return self.whole(name).reshape(-1)
        out = aligned_empty([len(elements)], np.dtype(tensor.dtype))
        boxes = [(elements,)] if tensor.partition == FLAT else boxes_of(tensor.shape, elements)
        copied = start = 0
        for box in boxes:  # in element order
            lengths = [len(axis) for axis in box]
            target = out[start : start + math.prod(lengths)].reshape(lengths)
            copied += sum(self._copy_part(name, tensor, part, box, target) for part in tensor.parts)
            start += target.size
        self._check_complete(name, tensor, out.size, copied)
        return out

    def _read_box_of_flat(self, name: str, tensor: TensorEntry, index: tuple[range, ...]) -> np.ndarray:
        """Return the box at ``index`` of a tensor that was saved with the "flat" rule."""
        if not index:
            return self._read_elements(name, tensor, range(1)).reshape(())
        rows, *others = index
        width = math.prod(tensor.shape[1:])
        lengths = [len(axis) for axis in index]
        if rows.step == 1 and tuple(others) == tuple(map(range, tensor.shape[1:])):
            return self._read_elements(name, tensor, range(rows.start * width, rows.stop * width)).reshape(lengths)
        out = aligned_empty(lengths, np.dtype(tensor.dtype))
        selection = slice(None, None, rows.step), *(slice(axis.start, axis.stop, axis.step) for axis in others)
        block_rows = max(1, BLOCK_BYTES // max(1, width * out.itemsize * rows.step))
        for first in range(0, len(rows) if out.size else 0, block_rows):
            chunk = rows[first : first + block_rows]
            block = self._read_elements(name, tensor, range(chunk[0] * width, (chunk[-1] + 1) * width))
            out[first : first + block_rows] = block.reshape(-1, *tensor.shape[1:])[selection]
        return out

    def _copy_part(self, name: str, tensor: TensorEntry, part: Part, index: tuple[range, ...], out: np.ndarray) -> int:
        """Copy the intersection of ``part`` and ``index`` into ``out``; return the number of values."""
        part_index = part.ranges() or tuple(map(range, tensor.index_lengths))  # a replicated part covers all
        common = [intersect(a, b) for a, b in zip(part_index, index, strict=True)]
        if not all(common):
            return 0
        source = tuple(positions(c, a) for c, a in zip(common, part_index, strict=True))
        target = tuple(positions(c, b) for c, b in zip(common, index, strict=True))
        rows = range(source[0].start, source[0].stop, source[0].step)
        file = self.open(part.file)
        into = out[target]
        has_whole_rows = all(len(c) == len(a) for c, a in zip(common[1:], part_index[1:], strict=True))
        if has_whole_rows and into.flags.c_contiguous and target[0].step == 1:
            file.read(name, rows, into)  # contiguous on both sides: read in place
        else:
            for start, stop, block in file.pieces(name, rows):
                into[start:stop] = block[(slice(None), *source[1:])]
        return into.size

    def rank_values(self, rank: int) -> Mapping[str, object]:
        """Return the plain values specific to ``rank``, by name."""
        name = self._manifest.shards.get(rank)
        return self._manifest.rank_values_in(rank, None if name is None else self.open(name))

    def all_rank_values(self) -> dict[str, list[object]]:
        """Return the plain values of every rank that saved, ``{name: [rank 0's, rank 1's, ...]}``."""
        ranks = range(self._manifest.size if self._manifest.rank_values else 0)
        by_rank = [self.rank_values(rank) for rank in ranks]
        return {name: [values[name] for values in by_rank] for name in self._manifest.rank_values}

    def open(self, name: str) -> TensorFile:
        """Return the file ``name`` of the checkpoint, whose header was verified; use it before opening the next one."""
        if name not in self._files:
            self._files[name] = self._open_verified(name)
        self._open.pop(name, None)
        if len(self._open) >= OPEN_FILES:
            self._open.pop(next(iter(self._open))).close()
        self._open[name] = self._files[name]
        return self._files[name]

    def _open_verified(self, name: str) -> TensorFile:
        if name not in self._manifest.files:
            raise CorruptCheckpointError(f"{self._path / NAME}: {name} is not among its files")
        file = TensorFile(self._path / name, self._manifest.files[name])
        for tensor, part in self._manifest.parts_by_file[name]:
            problem = self._manifest.mismatch(file, tensor, part)
            if problem is not None:
                file.close()
                raise CorruptCheckpointError(problem)
        return file
