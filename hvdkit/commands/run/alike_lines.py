"""Lines that several ranks write alike, shown once: ``[ranks 0-3] Total params: 161``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hvdkit.watchdog.rank_texts import tag

# Seconds that a line waits for other ranks to write it, too; lines and bytes that wait at most.
WAIT_SECONDS = 0.5
# The same for ranks that start: one may load its libraries later than another.
START_SECONDS = 2.0
_MOST_LINES = 200
_MOST_BYTES = 1 << 20
# hvdkit's own lines are already tagged, for launchers without tags. Rank 0 writes some of other ranks.
_TAG = re.compile(rb"\[rank (\d+)\] ")
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(eq=False)
class _Line:
    channel: int
    plain: bytes  # without colors
    text: bytes
    until: float
    ranks: list[int] = field(default_factory=list)

    @property
    def tagged(self) -> bytes:
        return self.text if _TAG.match(self.text) else tag(self.ranks).encode() + b" " + self.text


class AlikeLines:
    """Joins lines that ranks write alike, apart from colors. The lines of each rank keep their order.

    Example:
        >>> lines = AlikeLines()
        >>> lines.begin(2)
        >>> for rank in (0, 1):
        ...     lines.add(rank, 1, b"epoch 1", now=0.0)
        >>> lines.take(now=0.0)
        [(1, b'[ranks 0-1] epoch 1')]
    """

    def __init__(self) -> None:
        self._waiting: list[_Line] = []
        self._bytes = 0  # of the lines that wait
        self._running: set[int] = set()

    def begin(self, size: int) -> None:
        """Expect lines of this many ranks."""
        self._running = set(range(size))

    def ended(self, rank: int) -> None:
        """Expect no more lines of this rank."""
        self._running.discard(rank)

    @property
    def is_full(self) -> bool:
        """True if so many lines wait that they have to be taken before others are added."""
        return len(self._waiting) > _MOST_LINES or self._bytes > _MOST_BYTES

    def add(self, rank: int, channel: int, text: bytes, now: float, *, seconds: float = WAIT_SECONDS) -> None:
        """Add a line of a rank, which waits for ``seconds``; if 0, lines before it do not wait any longer either."""
        own = _TAG.match(text)
        if own is not None and int(own[1]) == rank:
            text = text[own.end() :]
        if not seconds:
            self._waiting.append(_Line(channel, text, text, now, [rank]))
            return
        plain = _ESCAPE.sub(b"", text)
        last = max((index for index, line in enumerate(self._waiting) if rank in line.ranks), default=-1)
        following = self._waiting[last + 1 :]
        line = next((each for each in following if each.plain == plain and each.channel == channel), None)
        if line is None:
            line = _Line(channel, plain, text, now + seconds)
            self._waiting.insert(last + 1, line)
            self._bytes += len(text)
        line.ranks.append(rank)
        if rank == 0:  # the only one with a terminal, and so with colors
            line.text = text

    def hurry(self, rank: int) -> None:
        """Let the lines of a rank wait no longer: it has begun a progress bar, which is shown below them."""
        for line in self._waiting:
            if rank in line.ranks:
                line.until = 0.0

    def take(self, now: float, *, everything: bool = False) -> list[tuple[int, bytes]]:
        """Return the channel and the tagged text of each line whose wait is over, and of those before it."""
        is_over = everything or self.is_full
        number = len(self._waiting) if is_over else self._number_due(now)
        taken = self._waiting[:number]
        del self._waiting[:number]
        self._bytes = sum(len(line.text) for line in self._waiting)
        return [(line.channel, line.tagged) for line in taken]

    def _number_due(self, now: float) -> int:
        """Return the number of lines up to the last one that has waited long enough, and of complete ones after it."""
        number = 0
        for index, line in enumerate(self._waiting, 1):
            if now >= line.until or (index == number + 1 and self._running <= set(line.ranks)):
                number = index
        return number
