"""Run one step of the build, or pip: log and forward every line, and clean up child processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from hvdkit.errors import BuildError, describe
from hvdkit.machine.subprocesses import end_process_tree

# Variables that change what pip installs, and to which folder.
_PIP_VARIABLES = ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_HASHES", "PIP_NO_BINARY")
_SHOWN_LINES = 4
_CAUSE = re.compile(r"(\berror:|CMake Error|ERROR:|No space left|Killed)")


def run(
    command: Sequence[str],
    *,
    log: Path,
    failure: str,
    env: Mapping[str, str],
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run ``command``, and append its output to ``log``.

    The child and its descendants are terminated if this process is interrupted.

    Raises:
        BuildError: the command cannot start or does not exit with 0; the message starts with ``failure``, quotes the
            lines that show the cause and ends with the log's path.
    """
    lines: list[str] = []
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        try:
            child = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise BuildError(f"{failure}: {error}; the log is {log}") from error
        assert child.stdout is not None
        try:
            for line in child.stdout:
                file.write(line)
                lines.append(line)
                if on_line:
                    on_line(line)
            status = child.wait()
        finally:
            if child.poll() is None:
                end_process_tree(psutil.Process(child.pid))
                child.wait()
    if status:
        raise BuildError(f"{failure} (exit {status}):\n{_cause(lines)}\nThe whole log is {log}")


def _cause(lines: Sequence[str]) -> str:
    """Return the first line with an error and the lines after it, or else the last lines."""
    stripped = [line.strip() for line in lines if line.strip()]
    errors = [index for index, line in enumerate(stripped) if _CAUSE.search(line)]
    start = errors[0] if errors else max(0, len(stripped) - _SHOWN_LINES)
    text = "\n".join(f"  {line[:300]}" for line in stripped[start : start + _SHOWN_LINES])
    if any("Killed" in stripped[index] and "cc1plus" in stripped[index] for index in errors):
        text += "\n  The compiler ran out of memory: use --jobs 1."
    return text


def run_pip(*arguments: str, log: Path, failure: str, variables: Mapping[str, str] | None = None) -> None:
    """Run pip with ``arguments``, like :func:`run`."""
    env = {name: value for name, value in os.environ.items() if name not in _PIP_VARIABLES}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **(variables or {})}
    run([*pip_command(), *arguments], log=log, failure=failure, env=env)


def pip_command() -> list[str]:
    """Return the command that runs pip for this Python.

    Environments created by ``uv`` or ``python -m venv --without-pip`` lack pip; Python's bundled wheel is a zip file
    that can be run directly.

    Raises:
        BuildError: neither is available.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    bundled = sorted(wheel for folder in folders for wheel in Path(folder, "_bundled").glob("pip-*.whl"))
    if not bundled:
        remedy = "apt install python3-venv, or 'uv pip install pip' into this environment"
        raise BuildError(describe("pip", "none for this Python", "pip or Python's ensurepip", remedy))
    return [sys.executable, str(bundled[-1] / "pip")]
