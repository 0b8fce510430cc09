"""Write docs/benchmarks.md and its pictures from benchmarks/results and benchmarks/notes.

python benchmarks/report.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import page
import peers
import tyro
from drawings import PLOTS, digest, drawings, is_of
from figures import Record
from processes import Unavailable

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "benchmarks"
ORDER = (
    "dense", "fit", "allreduce", "ring", "scaling", "embedding", "large_table", "checkpoint", "startup",
    "loss_curves", "resume", "comeback", "failure", "control_plane",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the page and its pictures."""

    plots_python: Path | None = None
    """Python of an environment with matplotlib to use instead of building one."""


def records(folder: Path = HERE / "results") -> list[Record]:
    """Read all results, in the order of their sections."""
    found = []
    for file in folder.glob("*.json"):
        record = Record.read(file)
        if record.name != file.stem:
            raise ValueError(f"{file}: got the results of {record.name}, expected {file.stem}'s; rename the file")
        found.append(record)
    known = {name: number for number, name in enumerate(ORDER)}
    return sorted(found, key=lambda record: (known.get(record.name, len(ORDER)), record.name))


def document(found: list[Record], folder: Path = HERE / "notes") -> str:
    """Return docs/benchmarks.md."""
    notes = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.md")}
    pictures = {record.name: [f"{PICTURES.name}/{file}" for file in drawings(record)] for record in found}
    return page.page(found, notes, pictures)


def draw(found: list[Record], python: Path | None) -> None:
    """Draw changed pictures and remove unused ones; print a message if they cannot be drawn."""
    wanted = {PICTURES / file: drawing for record in found for file, drawing in drawings(record).items()}
    for file in set(PICTURES.glob("*.png")) - set(wanted):
        file.unlink()
    changed = {str(f): (digest(drawing), drawing) for f, drawing in wanted.items() if not is_of(f, drawing)}
    if not changed:
        return
    PICTURES.mkdir(exist_ok=True)
    command = [str(peers.python("plots", python)), str(PLOTS)]
    subprocess.run(command, input=json.dumps(changed), text=True, check=True)


def main() -> int:
    """Write the page and pictures; return 1 if the pictures could not be drawn."""
    config = tyro.cli(Report, description=__doc__)
    found = records()
    DOCUMENT.write_text(document(found), encoding="utf-8")
    print(f"report: {DOCUMENT}")
    try:
        draw(found, config.plots_python)
    except Unavailable as why:
        print(f"its pictures are not drawn: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
