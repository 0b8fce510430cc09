"""``hvdkit checkpoint``: inspect, verify and export checkpoints.

Inspecting, verifying and exporting to .npy need neither TensorFlow nor Horovod, and run in one process regardless of
the number of ranks that saved.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from hvdkit.commands.options import UNSET
from hvdkit.commands.progress_bar import byte_progress
from hvdkit.errors import CorruptCheckpointError, describe, printable

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show the contents of a checkpoint, or list the checkpoints of a run.

    Reads only the manifests: it is fast, but does not detect a flipped byte (`verify` does). Exit code: 0; 2 if no
    checkpoint is found.

    For example:
        hvdkit checkpoint inspect runs/mnist          all of a run
        hvdkit checkpoint inspect runs/mnist --json   for programs
        hvdkit checkpoint inspect runs/mnist/checkpoints/step-000001200

    See `hvdkit docs checkpoints`.
    """

    path: Positional[Annotated[str, arg(metavar="PATH")]]
    """A checkpoint, a folder of checkpoints, or a logdir; local, or a URL such as s3://bucket/run."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Verify every byte against the checksums, and report all damage by file, tensor and rows.

    Exit code: 0 if everything is intact; 1 if something is damaged; 2 if no checkpoint is found or it cannot be read.

    For example:
        hvdkit checkpoint verify runs/mnist           all of a run
        hvdkit checkpoint verify runs/mnist/checkpoints/step-000001200

    See `hvdkit docs checkpoints`.
    """

    path: Positional[Annotated[str, arg(metavar="PATH")]]
    """A checkpoint, a folder of checkpoints, or a logdir; local, or a URL such as s3://bucket/run."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint's tensors as .npy files, or its model as a SavedModel.

    npy: one file per tensor, with sharded tensors assembled in global order, plus values.json; bfloat16 and float8
    are converted to float32. saved-model: the weights are loaded into the model that the --model function builds, and
    plain TensorFlow can serve the result. Runs in one process, regardless of the number of ranks that saved.

    For example:
        hvdkit checkpoint export runs/mnist --to weights
        hvdkit checkpoint export runs/mnist --to weights --names 'model/*'
        hvdkit checkpoint export runs/mnist --to served/1 \\
            --format saved-model --model train:build_model

    See `hvdkit docs checkpoints`.
    """

    path: Positional[Annotated[str, arg(metavar="PATH")]]
    """A checkpoint; or a folder of checkpoints or a logdir, in which case the newest intact one is exported."""
    to: Path
    """Output folder."""
    format: Literal["npy", "saved-model"] = "npy"
    """Output format."""
    names: tuple[str, ...] = ()
    """For npy: tensor names, or patterns such as 'model/*'; all by default."""
    model: Annotated[str | None, UNSET] = None
    """For saved-model: module:function that builds the model; the module may be in the current folder."""
    key: str = "model"
    """For saved-model: the model's name in the saved state."""
    overwrite: bool = False
    """Write into a folder that is not empty."""

    def __post_init__(self) -> None:
        if (self.format == "saved-model") != (self.model is not None):
            remedy = "pass both --format saved-model and --model module:function, or neither"
            raise ValueError(describe("model", self.model, "a function for a saved-model", remedy))
        if self.model is not None and not all(self.model.partition(":")):
            raise ValueError(describe("model", self.model, "module:function", "pass e.g. train:build_model"))
        if self.names and self.format != "npy":
            raise ValueError(describe("names", self.names, "none for a saved-model", "leave it out"))


Checkpoint = (
    Annotated[Inspect, subcommand("inspect")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[Export, subcommand("export")]
)


def checkpoint(config: Inspect | Verify | Export) -> int:
    """Run ``hvdkit checkpoint ...``, print on stdout, and return the exit code."""
    if isinstance(config, Verify):
        return _verify(config)
    if isinstance(config, Export):
        _export(config)
        return 0
    from hvdkit.checkpoint.inspection import inspect

    found = inspect(config.path)
    _show(json.dumps(found.as_dict(), indent=2) if config.json else found)
    return 0


def _show(result: object) -> None:
    """Print lines on stdout, with escapes for what the terminal would interpret or stdout cannot encode."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(result, keep="\n").encode(encoding, "backslashreplace").decode(encoding))


def _verify(config: Verify) -> int:
    from hvdkit.checkpoint.verifying import bytes_to_verify, verify

    try:
        with byte_progress("reading", bytes_to_verify(config.path)) as advance:
            read = verify(config.path, progress=advance)
    except CorruptCheckpointError as damage:
        _show(damage)
        return 1
    _show(read)
    return 0


def _export(config: Export) -> None:
    if config.model is not None:
        from hvdkit.cluster.tensorflow_loading import load_tensorflow

        load_tensorflow()  # without its startup messages
        from hvdkit.checkpoint.saved_model import export_saved_model

        export_saved_model(config.path, _function(config.model), config.to, key=config.key, overwrite=config.overwrite)
        _show(f"{config.to}: a SavedModel")
        return
    from hvdkit.checkpoint.export import bytes_to_export, export_npy

    names = config.names or None
    with byte_progress("writing", bytes_to_export(config.path, names)) as advance:
        files = export_npy(config.path, config.to, names, overwrite=config.overwrite, progress=advance)
    _show(f"{config.to}: {len(files) - 1} .npy file(s) and {files[-1].name}")


def _function(path: str) -> Callable[[], keras.Model]:
    """Import and return ``module:function``; like ``python -m``, also search the current folder."""
    module, _, function = path.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    found: Callable[[], keras.Model] | None = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(describe("model", path, f"a function of {module}", "name the one that builds the model"))
    return found
