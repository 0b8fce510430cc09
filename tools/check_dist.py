"""Run the commands of docs/install.md on the built archives, each section in an empty folder with a new environment.

make dist-check      # about 10 minutes on two cores; longer if the user's cache has no Horovod for this TensorFlow

It also builds from two clones, compares the bytes and runs ``twine check``. A table shows the seconds of each command.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from check_docs import BLOCK, RUN_BY, commands_of

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "install.md"
COMPILERS = ("c++", "cc", "clang", "cmake", "g++", "gcc", "make", "nvcc", "x86_64-linux-gnu-g", "aarch64-linux-gnu-g")
SECONDS = 1800  # only a command that hangs takes this long, on any machine
BASE_PYTHON = os.path.realpath(sys.executable)
WHEEL, SDIST = "hvdkit-*-py3-none-any.whl", "hvdkit-*.tar.gz"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A section of the document, the archive to install, and what the host lacks."""

    section: str
    archive: str = WHEEL
    compiler: bool = True
    index: bool = True


CASES = (
    Case(section="With pip"),
    Case(section="With pip", archive=SDIST),
    Case(section="With uv"),
    Case(section="With uv", archive=SDIST),
    Case(section="The host that builds"),
    Case(section="Every other host", compiler=False, index=False),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Install the built archives as docs/install.md says, and train on two ranks."""

    only: str = ""
    """Check only sections whose title contains this text, e.g. uv."""

    log: Path = field(default_factory=lambda: Path(tempfile.gettempdir(), "hvdkit-dist.log"))
    """File for the output of all commands."""


def commands(section: str) -> list[str]:
    """Return the commands of ``section`` that name this file as their runner."""
    text = DOCUMENT.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n#")[0]
    blocks = [block for block in BLOCK.finditer(text) if block["info"] == "sh"]
    named = [block for block in blocks if (found := RUN_BY.search(block["before"])) and "check_dist" in found["path"]]
    return [command for block in named for command in commands_of(block["body"])]


def program() -> str:
    """Return the document's ``two_ranks.py``."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return next(block["body"] for block in BLOCK.finditer(text) if block["info"] == "python file=two_ranks.py")


def link_programs(folder: Path, compiler: bool) -> None:
    """Fill ``folder`` with links to the programs of a host: this Python, uv, and those on PATH.

    Programs in environments and, unless ``compiler`` is true, compilers are left out.
    """
    folder.mkdir()
    (folder / "python3").symlink_to(BASE_PYTHON)
    (folder / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    for directory in map(Path, os.environ["PATH"].split(os.pathsep)):
        if not directory.is_dir() or (directory.parent / "pyvenv.cfg").exists():
            continue
        for tool in directory.iterdir():
            if (compiler or not tool.name.startswith(COMPILERS)) and not (folder / tool.name).is_symlink():
                (folder / tool.name).symlink_to(tool)


def host_environment(case: Case, programs: Path, wheels: Path) -> dict[str, str]:
    """Return the variables of a host that has ``programs``, without what ``case`` lacks."""
    dropped = [
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "UV_PYTHON",
        "UV_SYSTEM_PYTHON",
        *(() if case.index else ("PIP_FIND_LINKS",)),
    ]
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    offline = {} if case.index else {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    return {
        **kept,
        **offline,
        "PATH": str(programs),
        "PIP_REQUIRE_VIRTUALENV": "1",
        "WHEELS": str(wheels),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def check(case: Case, dist: Path, wheels: Path, log: Path) -> Iterator[tuple[str, float, bool]]:
    """Run the commands of ``case``; yield each with its seconds and whether it succeeded, until one fails."""
    archive = next(dist.glob(case.archive)).name
    with tempfile.TemporaryDirectory(prefix="hvdkit-dist-") as name:
        folder = Path(name, "empty")
        folder.mkdir()
        programs = Path(name, "programs")
        link_programs(programs, case.compiler)
        (folder / "two_ranks.py").write_text(program(), encoding="utf-8")
        if case.index:  # otherwise it comes from the folder of wheels
            shutil.copy(dist / archive, folder)
        env = host_environment(case, programs, wheels)
        for command in commands(case.section):
            command = command.replace(next(dist.glob(WHEEL)).name, archive)
            started = time.monotonic()
            succeeded = run(command, folder, env, log)
            yield command, time.monotonic() - started, succeeded
            if not succeeded:
                return


def run(command: str, folder: Path, env: dict[str, str], log: Path) -> bool:
    """Run one command, append its output to ``log``, and return whether it succeeded.

    Each command runs in a new shell, in which ``folder/env`` is activated again once it exists.
    """
    activate = "[ ! -e env/bin/activate ] || . env/bin/activate"
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {command}\n")
        file.flush()
        words = ["bash", "-c", f"{activate}\n{command}"]
        done = subprocess.run(words, cwd=folder, env=env, stdout=file, stderr=file, timeout=SECONDS)
    # Before it is installed, hvdkit must not be found: no other environment is on PATH.
    return done.returncode == 0 and (not command.startswith("hvdkit") or (folder / "env" / "bin" / "hvdkit").exists())


def build_twice(dist: Path) -> bool:
    """Build from two clones, at different times and with different umasks; return whether the bytes are equal."""
    digests = []
    for umask in (0o022, 0o077):
        with tempfile.TemporaryDirectory(prefix="hvdkit-clone-") as clone:
            subprocess.run(["git", "clone", "--quiet", str(ROOT), clone], check=True, umask=umask)
            command = [sys.executable, "tools/build_dist.py", "--out", str(dist)]
            subprocess.run(command, cwd=clone, check=True, umask=umask, stdout=subprocess.DEVNULL)
        files = sorted(dist.iterdir())
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
    for file, *both in zip(files, *digests, strict=True):
        print(f"{file.name}: {' and '.join(dict.fromkeys(both))} from two clones")
    return digests[0] == digests[1]


def main() -> int:
    """Build and check the archives, run the sections, print the table; return 1 if anything fails."""
    options = tyro.cli(Options)
    options.log.write_text("")
    print(f"output of all commands: {options.log}")
    with tempfile.TemporaryDirectory(prefix="hvdkit-dist-") as name:
        dist, wheels = Path(name, "dist"), Path(name, "wheels")
        dist.mkdir()
        good = [build_twice(dist)]
        good += [subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()]).returncode == 0]
        print("\n| section | archive | seconds | command |\n|---|---|---|---|")
        for case in CASES:
            if options.only in case.section:
                for command, seconds, succeeded in check(case, dist, wheels, options.log):
                    kind = "sdist" if case.archive == SDIST else "wheel"
                    outcome = f"{seconds:.1f}" if succeeded else "**fails**"
                    print(f"| {case.section} | {kind} | {outcome} | `{command}` |", flush=True)
                    good.append(succeeded)
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
