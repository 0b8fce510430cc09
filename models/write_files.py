"""Write examples to files that the models train on with --data-dir, each rank reading its own rows.

python models/write_files.py clicks clicks
python models/write_files.py clicks logs --format criteo
python models/write_files.py images images
python models/write_files.py images images --data cifar10 --data-dir cifar-10-batches-bin
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import console  # noqa: F401, before keras: it loads TensorFlow without its startup messages

# isort: split
import cifar10
import tyro
from inputs import ImageFiles, planted_clicks, write_criteo, write_images, write_parquet

from hvdkit.commands import parsing
from hvdkit.errors import describe


@dataclass(frozen=True, kw_only=True)
class ClickExport:
    """Write generated clicks, as Parquet files or in Criteo's format."""

    folder: tyro.conf.Positional[Path]
    """Folder for the files."""
    format: Literal["parquet", "criteo"] = "parquet"
    """Columns label, dense, c0 to c21, and items (lists); or lines of label, 13 counts and 26 categories."""
    examples: int = 120_000
    """Number of examples to generate."""
    rows: int = 5000
    """Number of different ids of each feature."""
    files: int = 8
    """Number of files."""
    seed: int = 0
    """Seed of the examples."""

    def write(self) -> None:
        """Write the files."""
        write = write_parquet if self.format == "parquet" else write_criteo
        write(planted_clicks(self.examples, rows=self.rows, seed=self.seed), self.folder, self.files)


@dataclass(frozen=True, kw_only=True)
class ImageExport:
    """Write images as TFRecord files, of tf.train.Example with image (uint8 [32, 32, 3], as bytes) and label."""

    folder: tyro.conf.Positional[Path]
    """Folder for the files."""
    data: Literal["digits", "cifar10", "synthetic"] = "digits"
    """Images: scikit-learn's digits, CIFAR-10 (needs --data-dir), or generated."""
    data_dir: Path | None = None
    """Folder with CIFAR-10's binary files."""
    files: int = 8
    """Number of files to train on; one more is held out."""

    def write(self) -> None:
        """Write the files."""
        data = cifar10.Config(data=self.data, data_dir=self.data_dir).load()
        assert not isinstance(data, ImageFiles)
        write_images(data, self.folder, self.files)


Command = (
    Annotated[ClickExport, tyro.conf.subcommand("clicks")] | Annotated[ImageExport, tyro.conf.subcommand("images")]
)


def main() -> None:
    """Read the command line and write the files."""
    config = parsing.parse(Command, description=__doc__)
    if config.folder.exists() and any(config.folder.iterdir()):
        raise SystemExit(describe("folder", config.folder, "an empty or new folder", "remove it, or pass another"))
    config.write()
    print(f"wrote {len([*config.folder.iterdir()])} files to {config.folder}")


if __name__ == "__main__":
    main()
