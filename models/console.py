"""Output of training for the user: lines from the chief, and a progress bar on its terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

import hvdkit as hk  # before TensorFlow: a launched rank must load it and MPI in this order
from hvdkit.cluster.tensorflow_loading import load_tensorflow
from hvdkit.machine.terminal import on_terminal

load_tensorflow()  # without its startup messages, also in a process without a launcher


def say(text: str) -> None:
    """Print lines on the chief in one write: launchers tag each write, and ``print`` writes the line end separately."""
    if hk.is_chief():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of ``steps`` on the chief's terminal, below the log lines; without a terminal, show nothing.

    Yields a function to call with the number of steps done.
    """
    if not hk.is_chief() or not on_terminal():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps,"), TimeRemainingColumn()
    with Progress(*columns, TextColumn("left"), console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task("training", total=steps)

        def above(record: logging.LogRecord) -> bool:
            bar.console.print(record.getMessage(), markup=False, highlight=False)
            return False

        log = logging.getLogger("hvdkit")
        log.addFilter(above)
        try:
            yield lambda done: bar.update(task, completed=done)
        finally:
            log.removeFilter(above)
