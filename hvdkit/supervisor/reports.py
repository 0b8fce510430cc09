"""What a run says on the chief when it begins and when it ends."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdkit import cluster
from hvdkit.checkpoint.files import RunPath
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import counted, printable
from hvdkit.machine.replacing import replaced
from hvdkit.supervisor.saved_state import Position

SUMMARY_VARIABLE = "HVDKIT_SUMMARY"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a session or a call of ``hk.fit`` has trained.

    Attributes:
        steps: steps that it has trained.
        seconds: since it began.
        examples_per_step: rows of a global batch, on average; None if unknown.
        epochs: whole epochs that ``hk.fit`` has trained; None in a loop.
        continued_epoch: number of the epoch that an earlier run had begun and this one completed, from 1, or None.
        unfinished_epoch: number of the epoch in which ``hk.fit`` ended before its last step, from 1, or None.
        stopped: where ``hk.fit`` ended early, e.g. "after epoch 3 of 5"; if there was nothing to train, what had ended
            the run, e.g. "by EarlyStopping"; or "".
        step: steps of all runs with this folder; None without a folder.
        checkpoint: the newest one; None without a folder.
        logdir: the folder of the run, or None.
    """

    steps: int
    seconds: float
    examples_per_step: float | None = None
    epochs: int | None = None
    continued_epoch: int | None = None
    unfinished_epoch: int | None = None
    stopped: str = ""
    step: int | None = None
    checkpoint: RunPath | None = None
    logdir: RunPath | None = None

    @property
    def line(self) -> str:
        """The summary for people.

        Example:
            >>> RunSummary(steps=65, seconds=6.5, epochs=5, examples_per_step=128).line
            'trained 5 epochs, 65 steps in 6.5 s (1,280 examples/s)'
            >>> RunSummary(steps=50, seconds=5.0, epochs=3, continued_epoch=2, examples_per_step=128).line
            'trained the rest of epoch 2 and 3 epochs, 50 steps in 5.0 s (1,280 examples/s)'
        """
        if not self.steps and self.checkpoint is not None:
            where = f"step {self.step} ({printable(self.checkpoint)})"
            empty = "" if self.epochs is None else "; History is empty"
            if self.stopped:
                return f"nothing to train: the run was stopped {self.stopped} at {where}; pass another logdir{empty}"
            return (
                f"nothing to train: the run is already at {where}; pass more epochs or steps, or another logdir{empty}"
            )
        epochs = f"{self._epochs}, " if self._epochs else ""
        to = "" if self.step is None else f", to step {self.step}"
        parts = [f"trained {epochs}{counted(self.steps, 'step')} in {self.seconds:.1f} s ({self._rate}){to}"]
        if self.stopped:
            parts.append(f"stopped {self.stopped}")
        if self.checkpoint is not None:
            parts.append(f"newest checkpoint: {printable(self.checkpoint)}")
        if self.logdir is not None:
            parts.append(f"curves: tensorboard --logdir {printable(self.logdir)}")
        return "; ".join(parts)

    @property
    def _epochs(self) -> str:
        """The epochs in words, in their order; empty in a loop."""
        parts = [] if self.continued_epoch is None else [f"the rest of epoch {self.continued_epoch}"]
        unfinished = [] if self.unfinished_epoch is None else [f"part of epoch {self.unfinished_epoch}"]
        if self.epochs or (self.epochs is not None and not parts and not unfinished):
            parts.append(counted(self.epochs, "epoch"))
        *first, last = [*parts, *unfinished] or [""]
        return f"{', '.join(first)} and {last}" if first else last

    @property
    def _rate(self) -> str:
        rate = self.steps / max(self.seconds, 1e-9)
        if self.examples_per_step is None:
            return f"{rate:.3g} steps/s"
        return f"{float(f'{rate * self.examples_per_step:.3g}'):,.10g} examples/s"

    def report(self, *, logs: bool = True) -> None:
        """Log the line, if ``logs``, and write the file that ``HVDKIT_SUMMARY`` names. Called on the chief."""
        if logs:
            get_logger().info("%s", self.line)
        file = os.environ.get(SUMMARY_VARIABLE)
        if not file:
            return
        path = Path(file)
        facts = {**asdict(self), "ranks": cluster.size()}
        try:
            with replaced(path, path.with_name(f".{path.name}.{os.getpid()}")) as temporary:
                temporary.write_text(json.dumps(facts, default=str) + "\n")
        except OSError as error:  # the training is done, and nothing else is lost
            get_logger().warning("%s: the summary was not written: %s", SUMMARY_VARIABLE, error)


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The step, and the time of the monotonic clock, at which a session began."""

    step: int
    time: float = field(default_factory=time.monotonic)

    def summary(self, position: Position, checkpoint: RunPath, logdir: RunPath) -> RunSummary:
        """Return what has been trained since."""
        return RunSummary(
            steps=position.step - self.step,
            seconds=time.monotonic() - self.time,
            examples_per_step=position.examples_per_step,
            step=position.step,
            checkpoint=checkpoint,
            logdir=logdir,
        )


def report_start(
    step: int, restored_from: RunPath | None, folder: RunPath, given_rate: float | None, rate: float | None
) -> None:
    """Log on the chief the step at which training begins; warn if the checkpoint has another learning rate."""
    if not cluster.is_chief():
        return
    source = f"from {restored_from}" if restored_from else f"(no checkpoint in {folder})"
    get_logger().info("training begins at step %d %s", step, source)
    if rate != given_rate:
        message = "continuing with the saved learning rate %g, not %g; to change it, assign it within the session"
        get_logger().warning(message, rate, given_rate)
