"""Which epochs a ``fit`` has trained: whole ones, and those of which it trained a part."""

from __future__ import annotations


class TrainedEpochs:
    """The epochs and steps of a ``fit``.

    Attributes:
        whole: number of epochs that were trained from their first to their last step.
        steps: steps in all epochs.
        continued: number of the epoch, from 1, that an earlier run had begun and this one completed, or None.
        unfinished: number of the epoch, from 1, in which this ``fit`` ended before its last step, or None.

    Example:
        >>> trained = TrainedEpochs()
        >>> trained.add(1, steps=11, of=13, begun=2, is_stopped=False)
        >>> trained.add(2, steps=13, of=13, begun=0, is_stopped=False)
        >>> trained.whole, trained.continued, trained.unfinished, trained.steps
        (1, 2, None, 24)
    """

    def __init__(self) -> None:
        self.whole = 0
        self.steps = 0
        self.continued: int | None = None
        self.unfinished: int | None = None

    def add(self, epoch: int, *, steps: int, of: int | None, begun: int, is_stopped: bool) -> None:
        """Add an epoch that has ended.

        Args:
            epoch: its number, from 0.
            steps: steps that were trained in it.
            of: steps of a whole epoch, or None if they are unknown.
            begun: steps of it that an earlier run has trained.
            is_stopped: whether its last step asked to stop.
        """
        self.steps += steps
        if not steps:
            return
        if is_stopped if of is None else begun + steps < of:
            self.unfinished = epoch + 1
        elif begun:
            self.continued = epoch + 1
        else:
            self.whole += 1
