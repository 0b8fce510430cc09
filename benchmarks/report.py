"""Write docs/benchmarks.md and its pictures from the results and notes in benchmarks/ and proofs/.

python benchmarks/report.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import page
import peers
import tyro
from figures import Record
from processes import Unavailable

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "benchmarks", ROOT / "proofs")
DOCUMENT = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "benchmarks"
PLOTS = Path(__file__).with_name("plots.py")
ORDER = (
    "dense", "fit", "compiled", "allreduce", "ring", "scaling", "embedding", "large_table", "input", "checkpoint",
    "store", "startup", "loss_curves", "resume", "comeback", "many_ranks", "large_input", "failure", "control_plane",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the page and its pictures."""

    plots_python: Path | None = None
    """Python of an environment with matplotlib to use instead of building one."""


def records(*folders: Path) -> dict[Path, Record]:
    """Read all results in these folders, in the order of their sections."""
    found = {file: Record.read(file) for folder in folders for file in (folder / "results").glob("*.json")}
    for file, record in found.items():
        if record.name != file.stem:
            raise ValueError(f"{file}: got the results of {record.name}, expected {file.stem}'s; rename the file")
    places = {name: number for number, name in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda item: (places.get(item[1].name, len(ORDER)), item[1].name)))


def document(found: Iterable[Record]) -> str:
    """Return docs/benchmarks.md."""
    notes = {file.stem: file.read_text(encoding="utf-8") for folder in FOLDERS for file in folder.glob("notes/*.md")}
    return page.page(found, notes, PICTURES.name)


def draw(found: Mapping[Path, Record], python: Path | None) -> None:
    """Draw all pictures, and remove those that are not in the results."""
    wanted = {PICTURES / file for record in found.values() for file in record.drawn()}
    for file in set(PICTURES.glob("*.png")) - wanted:
        file.unlink()
    PICTURES.mkdir(exist_ok=True)
    subprocess.run([peers.python("plots", python), PLOTS, PICTURES, *found], check=True)


def main() -> int:
    """Write the page and pictures; return 1 if the pictures could not be drawn."""
    config = tyro.cli(Report, description=__doc__)
    found = records(*FOLDERS)
    DOCUMENT.write_text(document(found.values()), encoding="utf-8")
    print(f"report: {DOCUMENT}")
    try:
        draw(found, config.plots_python)
    except Unavailable as why:
        print(f"the figures were not drawn: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
