"""What a run says on the chief when it begins and when it ends."""

from __future__ import annotations

from pathlib import Path

from hvdkit.cluster.logs import get_logger
from hvdkit.errors import printable


def report_start(step: int, restored_from: Path | None, folder: Path) -> None:
    """Log the step at which training begins, and why."""
    source = f"from {restored_from}" if restored_from else f"(no checkpoint in {folder})"
    get_logger().info("training begins at step %d %s", step, source)


def report_rate(given: float | None, saved: float | None) -> None:
    """Warn if the checkpoint has another learning rate than the program."""
    if saved != given:
        message = "continuing with the saved learning rate %g, not %g; to change it, assign it within the session"
        get_logger().warning(message, saved, given)


def report_end(steps: int, seconds: float, step: int, newest: Path, logdir: Path) -> None:
    """Log what this session has trained: ``steps`` in ``seconds``, up to ``step``, and the newest checkpoint."""
    if not steps:
        get_logger().info("no steps were trained: the run is already at step %d (%s)", step, printable(newest))
        return
    rate = steps / max(seconds, 1e-9)
    text = (
        "trained %d steps in %.1f s (%.3g steps/s), to step %d; newest checkpoint: %s; curves: tensorboard --logdir %s"
    )
    get_logger().info(text, steps, seconds, rate, step, printable(newest), printable(logdir))
