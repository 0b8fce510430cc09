"""Run one step of the build: log and forward every line, and clean up child processes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from hvdkit.errors import BuildError
from hvdkit.machine.subprocesses import end_process_tree

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


def _cause(lines: Sequence[str], count: int = 4) -> str:
    """Return the first line with an error and the lines after it, or else the last lines."""
    stripped = [line.strip() for line in lines if line.strip()]
    errors = [index for index, line in enumerate(stripped) if _CAUSE.search(line)]
    start = errors[0] if errors else max(0, len(stripped) - count)
    text = "\n".join(f"  {line[:300]}" for line in stripped[start : start + count])
    if any("Killed" in stripped[index] and "cc1plus" in stripped[index] for index in errors):
        text += "\n  The compiler ran out of memory: use --jobs 1."
    return text
