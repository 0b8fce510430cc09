"""Finds the rank that holds up a hanging job, and formats the stacks of all ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdkit.watchdog.events import Stacks, Status

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_HEADER_END = "its stacks, most recent call first:"


def furthest_behind(status: Mapping[int, Status], stacks: Mapping[int, Stacks], idle_longest: int) -> int:
    """Return the rank that is furthest behind: the others wait for it.

    Ranks are compared by steps, then by eager collectives begun; on a tie, a rank outside of a collective is behind one
    that waits in it. If all are equal, return the rank that has been idle longest.

    Args:
        status: state of each running rank.
        stacks: stacks of the ranks that answered.
        idle_longest: the rank that has been idle longest.
    """

    def progress(rank: int) -> tuple[int, int, bool]:
        return status[rank].step or 0, status[rank].count, stacks[rank].waiting

    last = min(sorted(stacks), key=progress, default=idle_longest)
    return idle_longest if not stacks or progress(last) == max(map(progress, stacks)) else last


def texts(stacks: Mapping[int, Stacks]) -> list[str]:
    """Return the stacks of all ranks in rank order, tagged with the rank; identical stacks are included once.

    Example:
        >>> same = Stacks(text="its stacks, most recent call first:\\nf")
        >>> texts({0: same, 1: same})[1]
        '[rank 1] its stacks are the same as those of rank 0'
    """
    first_ranks: dict[str, int] = {}
    found = []
    for rank, one in sorted(stacks.items()):
        text = one.text
        header, _, body = text.partition("\n")
        first = first_ranks.setdefault(_ADDRESS.sub("", body), rank)
        if body and first != rank:
            text = header.replace(_HEADER_END, f"its stacks are the same as those of rank {first}")
        found.append("\n".join(f"[rank {rank}] {line}" for line in text.splitlines()))
    return found
