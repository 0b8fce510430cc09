"""Progress bars of commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from hvdkit.machine.terminal import is_terminal


@contextlib.contextmanager
def byte_progress(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of bytes if stderr is a terminal."""
    if not is_terminal(sys.stderr):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda count: bar.advance(task, count)
