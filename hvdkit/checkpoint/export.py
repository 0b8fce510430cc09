"""Export a checkpoint's tensors as .npy files. Does not need TensorFlow."""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from hvdkit.checkpoint.files import naming_file, write_text
from hvdkit.checkpoint.inspecting import newest_at
from hvdkit.checkpoint.manifest import Manifest, TensorEntry
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.tensorfile import BLOCK_BYTES
from hvdkit.errors import describe

VALUES = "values.json"
_LEAST_BYTES, _MOST_BYTES = 8 * BLOCK_BYTES, 64 * BLOCK_BYTES


def export_npy(
    path: str | Path,
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
        CheckpointError: no checkpoint is found, or a file cannot be written.
        CorruptCheckpointError: the bytes differ from those saved; the message names file, tensor and rows.

    Example::

        hk.checkpoint.export_npy("runs/mnist", "weights", ["model/*"])
        kernel = np.load("weights/model/dense/kernel.npy", mmap_mode="r")
    """
    path, directory = newest_at(Path(path)), Path(directory)
    manifest = Manifest.load(path)
    chosen = _chosen(manifest, names)
    targets = _targets(chosen, directory)
    check_target(directory, overwrite)
    with Reader(path, manifest) as reader:
        for (name, number), target in targets.items():
            saved = chosen[name]
            _write_npy(target, _portable(saved), saved.shape, _pieces(reader, name, saved, number), progress)
        rank_values = reader.all_rank_values()
    values = directory / VALUES
    plain = {"step": manifest.step, "values": manifest.values, "rank_values": rank_values}
    with naming_file(directory, "written"):
        directory.mkdir(parents=True, exist_ok=True)
    write_text(values, json.dumps(plain, indent=1) + "\n")
    return [*targets.values(), values]


def exported_bytes(path: str | Path, names: Sequence[str] | None = None) -> int:
    """Return the number of bytes that :func:`export_npy` will report to ``progress``."""
    chosen = _chosen(Manifest.parse(newest_at(Path(path))), names)
    copies = {name: len(s.parts) if s.kind == "per_rank" else 1 for name, s in chosen.items()}
    return sum(math.prod(s.shape) * _portable(s).itemsize * copies[name] for name, s in chosen.items())


def check_target(directory: Path, overwrite: bool) -> None:
    """Check that ``directory`` is missing or empty, or may be overwritten.

    Raises:
        ValueError: it is not empty, or is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(describe("directory", f"{directory}, a file", "a folder", "give another"))
    if not overwrite and directory.is_dir() and any(directory.iterdir()):
        remedy = "give another, or overwrite=True (--overwrite)"
        raise ValueError(describe("directory", f"{directory}, which is not empty", "a new or empty folder", remedy))


def _chosen(manifest: Manifest, names: Sequence[str] | None) -> dict[str, TensorEntry]:
    if names is None:
        return manifest.variables
    if isinstance(names, str):
        raise TypeError(describe("names", repr(names), "a list of names", f"pass [{names!r}]"))
    chosen = set()
    for wanted in names:
        found = {name for name in manifest.variables if name == wanted or fnmatch.fnmatchcase(name, wanted)}
        if not found:
            known = ", ".join(list(manifest.variables)[:5])
            remedy = "`hvdkit checkpoint inspect` lists all"
            raise ValueError(describe("names", repr(wanted), f"a name or pattern of tensors such as {known}", remedy))
        chosen |= found
    return {name: saved for name, saved in manifest.variables.items() if name in chosen}


def _targets(chosen: dict[str, TensorEntry], directory: Path) -> dict[tuple[str, int | None], Path]:
    """Return the target file of each tensor; for per-rank tensors, of each (tensor, rank)."""
    targets: dict[tuple[str, int | None], Path] = {}
    for name, saved in chosen.items():
        base = directory.joinpath(*(_safe(word) for word in name.split("/")))
        ranks = range(len(saved.parts)) if saved.kind == "per_rank" else [None]
        for rank in ranks:
            targets[name, rank] = base.with_name(f"{base.name}{'' if rank is None else f'.rank{rank:05d}'}.npy")
    if len({*targets.values()}) < len(targets):
        raise ValueError(describe("names", list(chosen), "names that give different files", "export some at a time"))
    return targets


def _safe(word: str) -> str:
    return quote(word, safe="") if word.strip(".") else word.replace(".", "%2E") or "%"


def _portable(saved: TensorEntry) -> np.dtype:
    dtype = np.dtype(saved.dtype)
    return np.dtype(np.float32) if dtype.name.startswith(("bfloat16", "float8")) else dtype


def _pieces(reader: Reader, name: str, saved: TensorEntry, rank: int | None) -> Iterator[np.ndarray]:
    """Yield the rows of a tensor in global order, in pieces."""
    if saved.kind != "sharded" or not saved.shape:
        part = saved.parts[rank or 0]
        file = reader.open(part)
        for _, _, block in file.pieces(name, range(file.layouts[name].rows)):
            assert block is not None
            yield block
        return
    rows, *others = saved.shape
    row_bytes = max(1, math.prod(others) * np.dtype(saved.dtype).itemsize)
    # Each part is read in whole checksum blocks. Use a larger window for more parts, so that little is read twice.
    window = min(max(_LEAST_BYTES, len(saved.parts) * BLOCK_BYTES), _MOST_BYTES)
    step = max(1, window // row_bytes)
    for start in range(0, rows if math.prod(saved.shape) else 0, step):
        yield reader.sharded(name, (range(start, min(start + step, rows)), *map(range, others)))


def _write_npy(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], pieces: Iterable[np.ndarray], progress: Callable[[int], None]
) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with naming_file(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, head)
                for piece in pieces:
                    data = np.ascontiguousarray(piece, dtype)
                    file.write(data.reshape(-1).view(np.uint8).data)
                    progress(data.nbytes)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
