"""Reading a checkpoint's tensors: the whole of a replicated one, this rank's part of a sharded one, at any N."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvdkit.checkpoint.entries import Resize
from hvdkit.checkpoint.manifest import Manifest, Part, Saved
from hvdkit.checkpoint.tensorfile import TensorFile
from hvdkit.errors import CorruptCheckpointError
from hvdkit.partition import intersect, positions

# TensorFlow takes memory over without a copy if it starts at a multiple of so many bytes, as its own does.
ALIGNMENT = 64


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array whose memory starts at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


class Reader(contextlib.AbstractContextManager["Reader"]):
    """Reads verified tensors of one checkpoint. Files are opened once, when they are first needed.

    Attributes:
        bytes_read: from all files so far, headers included.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._manifest = path, manifest
        self._files: dict[str, TensorFile] = {}

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.__exit__()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return sum(file.bytes_read for file in self._files.values())

    def replicated(self, name: str) -> np.ndarray:
        """Return a tensor that all ranks have alike.

        Raises:
            CorruptCheckpointError: its bytes are not those that were saved; it names file, tensor and rows.
        """
        saved = self._manifest.variables[name]
        out = aligned_empty(saved.shape, np.dtype(saved.dtype))
        return self.open(saved.parts[0]).read(name, out=out)

    def whole(self, name: str) -> np.ndarray:
        """Return the whole of a replicated or a sharded tensor. Raises as :meth:`replicated` and :meth:`sharded`."""
        saved = self._manifest.variables[name]
        if saved.kind == "replicated":
            return self.replicated(name)
        return self.sharded(name, tuple(map(range, saved.shape)))

    def per_rank(self, name: str, rank: int, size: int, resize: Resize) -> np.ndarray | None:
        """Return what ``rank`` of ``size`` takes of a tensor that each rank had of its own; None: keep what it has.

        Raises:
            CorruptCheckpointError: as above.
        """
        saved, then = self._manifest.variables[name], self._manifest.size
        if size == then or (resize == "keep" and rank < then):
            return self.open(saved.parts[rank]).read(name)
        if resize == "keep":
            return None
        total = sum(self.open(part).read(name).astype(np.float64) for part in saved.parts)
        return np.asarray(total / (then if resize == "mean" else size)).astype(np.dtype(saved.dtype))

    def sharded(self, name: str, index: tuple[range, ...]) -> np.ndarray:
        """Return the part of a sharded tensor at the global indices ``index``, reading only rows that are in it.

        Raises:
            CorruptCheckpointError: as above, or the saved parts do not cover it.
        """
        saved = self._manifest.variables[name]
        out = aligned_empty([len(axis) for axis in index], np.dtype(saved.dtype))
        filled = 0
        for part in saved.parts:
            filled += self._copy_part(name, saved, part, index, out)
        if filled != out.size:
            raise CorruptCheckpointError(
                f"{self._path}: {name!r} is {saved}, and of {out.size} values asked for {out.size - filled} "
                "are in no shard"
            )
        return out

    def _copy_part(self, name: str, saved: Saved, part: Part, index: tuple[range, ...], out: np.ndarray) -> int:
        """Copy what is common to ``part`` and ``index`` into ``out``; return the number of values."""
        theirs = part.ranges() or tuple(map(range, saved.shape))  # of a replicated one all
        common = [intersect(a, b) for a, b in zip(theirs, index, strict=True)]
        if not all(common):
            return 0
        source = tuple(positions(c, a) for c, a in zip(common, theirs, strict=True))
        target = tuple(positions(c, b) for c, b in zip(common, index, strict=True))
        rows = range(source[0].start, source[0].stop, source[0].step)
        file = self.open(part)
        into = out[target]
        whole = all(len(c) == len(a) for c, a in zip(common[1:], theirs[1:], strict=True))
        if whole and into.flags.c_contiguous and target[0].step == 1:
            file.read(name, rows, into)  # rows that lie as they are wanted go straight to their place
        else:
            for start, stop, block in file.pieces(name, rows):
                assert block is not None
                into[start:stop] = block[(slice(None), *source[1:])]
        return into.size

    def open(self, part: Part) -> TensorFile:
        """Return the open file that holds ``part``."""
        if part.file not in self._files:
            self._files[part.file] = self._manifest.open(self._path, part.file)
        return self._files[part.file]
