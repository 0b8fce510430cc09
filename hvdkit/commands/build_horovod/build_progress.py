"""Show the progress of a build: a bar on a terminal, otherwise one plain line per step."""

from __future__ import annotations

import re
import time

from rich import progress as bars
from rich.console import Console

_PERCENT = re.compile(r"^\[ *(\d+)%\]")


class BuildProgress:
    """Report the steps of a build, and the percentage within the compiler's step, on stderr."""

    def __init__(self, *, verbose: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._verbose = verbose
        self._started = time.monotonic()
        self._percent = 0
        self._bar: bars.Progress | None = None
        if self._console.is_terminal and not verbose:
            self._bar = bars.Progress(
                bars.SpinnerColumn(),
                bars.TextColumn("{task.description}"),
                bars.BarColumn(),
                bars.TaskProgressColumn(),
                bars.TimeElapsedColumn(),
                console=self._console,
            )

    def __enter__(self) -> BuildProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar:
            if kind is None:
                self._finish_step()
            self._bar.stop()

    def step(self, text: str) -> None:
        """Start the next step; its length is unknown until :meth:`line` receives a percentage."""
        self._percent = 0
        if self._bar:
            self._finish_step()
            self._bar.add_task(text, total=None)
        else:
            self._say(text)

    def line(self, text: str) -> None:
        """Process one line of the build's output; make's ``[ 42%]`` updates the bar."""
        if self._verbose:
            self._console.out(text, end="", highlight=False)
        match = _PERCENT.match(text)
        if not match:
            return
        percent = int(match[1])
        if self._bar:
            self._bar.update(self._bar.task_ids[-1], total=100, completed=percent)
        elif percent // 10 > self._percent // 10:
            self._say(f"  {percent}%")
        self._percent = max(percent, self._percent)

    def _finish_step(self) -> None:
        if self._bar and self._bar.task_ids:
            last = self._bar.tasks[-1]
            total = last.total or 1
            self._bar.update(last.id, total=total, completed=total)

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._started
        self._console.out(f"build-horovod [{seconds:4.0f} s] {text}", highlight=False)
