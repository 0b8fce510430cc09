"""Export a checkpoint's tensors as .npy files. Does not need TensorFlow."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from hvdkit.checkpoint.files import RunPath, atomic_file, checkpoint_errors, local_path, run_path, write_text
from hvdkit.checkpoint.inspection import newest_at
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.tensor_entry import TensorEntry
from hvdkit.checkpoint.tensorfile import BLOCK_BYTES
from hvdkit.errors import describe, printable

VALUES = "values.json"
# bytes of a sharded tensor to assemble at once
_MIN_WINDOW = 8 * BLOCK_BYTES
_MAX_WINDOW = 64 * BLOCK_BYTES


def export_npy(
    path: str | RunPath,
    directory: str | Path,
    names: Sequence[str] | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Write each tensor of a checkpoint as a .npy file, and its plain values as ``values.json``.

    ``model/dense/kernel`` is written to ``DIRECTORY/model/dense/kernel.npy``. Characters other than ASCII letters,
    digits and ``_.-~`` are percent-encoded (``%20``). Sharded tensors are assembled in global order. Per-rank tensors
    are written as ``NAME.rank00000.npy`` for rank 0, and so on. Peak memory is a few times 8 MiB (up to 64 MiB for
    tensors with very many parts), or one row.

    The .npy format does not support bfloat16 and float8; such tensors are converted to float32, without loss.

    Args:
        path: a checkpoint; or a folder of checkpoints or a ``logdir``, in which case the newest intact one is used.
        directory: where to write; created if missing. Each file is written atomically.
        names: tensor names, or patterns such as ``model/*``; all by default.
        overwrite: write into a folder that is not empty; files with the same names are replaced, others are kept.
        progress: called with the number of bytes of every piece written.

    Returns:
        The files that were written.

    Raises:
        ValueError: ``directory`` is not empty, or a name does not match any tensor.
        TypeError: ``names`` is a single string.
        CheckpointError: no checkpoint is found, or a file cannot be written.
        CorruptCheckpointError: the bytes differ from those saved; the message names file, tensor and rows.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> state = {"weights": {"kernel": np.ones((3, 2)), "bias": np.zeros(2)}, "step": 100}
        >>> path = hk.checkpoint.save(hk.broadcast_object(tempfile.mkdtemp()), state)
        >>> target = tempfile.mkdtemp()
        >>> files = hk.checkpoint.export_npy(path, target, ["weights/k*"])
        >>> [str(file.relative_to(target)) for file in files]
        ['weights/kernel.npy', 'values.json']
        >>> np.load(files[0], mmap_mode="r").shape
        (3, 2)
    """
    path = newest_at(run_path(path, "path"))
    directory = local_path(directory, "directory")
    manifest = Manifest.load(path)
    tensors = _select(manifest, names)
    files = _target_files(tensors, directory)
    check_target(directory, overwrite)
    with Reader(path, manifest) as reader:
        for (name, rank), file in files.items():
            tensor = tensors[name]
            _write_npy(file, _npy_dtype(tensor), tensor.shape, _read_pieces(reader, name, tensor, rank), progress)
        rank_values = reader.all_rank_values()
    values_file = directory / VALUES
    values = {"step": manifest.step, "values": manifest.values, "rank_values": rank_values}
    with checkpoint_errors(directory, "written"):
        directory.mkdir(parents=True, exist_ok=True)
    write_text(values_file, json.dumps(values, indent=1) + "\n")
    return [*files.values(), values_file]


def bytes_to_export(path: str | RunPath, names: Sequence[str] | None = None) -> int:
    """Return the number of bytes that :func:`export_npy` will report to ``progress``."""
    tensors = _select(Manifest.parse(newest_at(run_path(path, "path"))), names).values()
    return sum(t.arrays * math.prod(t.shape) * _npy_dtype(t).itemsize for t in tensors)


def check_target(directory: Path, overwrite: bool) -> None:
    """Check that ``directory`` is missing or an empty folder, or one that may be overwritten."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(describe("directory", f"{directory}, a file", "a folder", "give another"))
    if not overwrite and directory.is_dir() and any(directory.iterdir()):
        remedy = "pass another, or overwrite=True (--overwrite)"
        raise ValueError(describe("directory", f"{directory}, which is not empty", "a new or empty folder", remedy))


def _select(manifest: Manifest, names: Sequence[str] | None) -> dict[str, TensorEntry]:
    """Return the tensors that match ``names``, in the order of the manifest; all if it is None."""
    if names is None:
        return manifest.variables
    if isinstance(names, str):
        raise TypeError(describe("names", repr(names), "a list of names", f"pass [{names!r}]"))
    selected = set()
    for pattern in names:
        matches = {name for name in manifest.variables if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not matches:
            known = ", ".join(map(printable, list(manifest.variables)[:5]))
            remedy = "`hvdkit checkpoint inspect` lists all"
            raise ValueError(describe("names", repr(pattern), f"a name or pattern of tensors such as {known}", remedy))
        selected |= matches
    return {name: tensor for name, tensor in manifest.variables.items() if name in selected}


def _target_files(tensors: dict[str, TensorEntry], directory: Path) -> dict[tuple[str, int | None], Path]:
    """Return the file to write for each (tensor, rank); rank is None except for per-rank tensors."""
    files: dict[tuple[str, int | None], Path] = {}
    for name, tensor in tensors.items():
        base = directory.joinpath(*map(_escape, name.split("/")))
        ranks = range(len(tensor.parts)) if tensor.kind == "per_rank" else [None]
        for rank in ranks:
            files[name, rank] = base.with_name(f"{base.name}{'' if rank is None else f'.rank{rank:05d}'}.npy")
    if len({*files.values()}) < len(files):
        raise ValueError(describe("names", list(tensors), "names that give different files", "export some at a time"))
    return files


def _escape(component: str) -> str:
    """Return a component of a tensor's name as a valid file name; ``.``, ``..`` and an empty name are not."""
    return quote(component, safe="") if component.strip(".") else component.replace(".", "%2E") or "%"


def _npy_dtype(tensor: TensorEntry) -> np.dtype:
    dtype = np.dtype(tensor.dtype)
    return np.dtype(np.float32) if dtype.name.startswith(("bfloat16", "float8")) else dtype


def _read_pieces(reader: Reader, name: str, tensor: TensorEntry, rank: int | None) -> Iterator[np.ndarray]:
    """Yield the rows of a tensor in global order, in pieces."""
    if tensor.kind != "sharded" or not tensor.shape:
        file = reader.open(tensor.parts[rank or 0].file)
        for _, _, block in file.pieces(name, range(file.locations[name].rows)):
            yield block
        return
    rows, *others = tensor.shape
    row_bytes = max(1, math.prod(others) * np.dtype(tensor.dtype).itemsize)
    # Each part is read in whole checksum blocks. Use a larger window for more parts, so that little is read twice.
    window = min(max(_MIN_WINDOW, len(tensor.parts) * BLOCK_BYTES), _MAX_WINDOW)
    step = max(1, window // row_bytes)
    for start in range(0, rows if math.prod(tensor.shape) else 0, step):
        yield reader.sharded(name, (range(start, min(start + step, rows)), *map(range, others)))


def _write_npy(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], pieces: Iterable[np.ndarray], progress: Callable[[int], None]
) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with checkpoint_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in pieces:
            data = np.ascontiguousarray(piece, dtype)
            file.write(data.reshape(-1).view(np.uint8).data)
            progress(data.nbytes)
