"""Finds the rank that holds up a hanging job, and formats the stacks of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.watchdog.events import Stacks, Status
from hvdkit.watchdog.rank_texts import alike, tagged

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
    headers = {rank: one.text.partition("\n")[0] for rank, one in stacks.items()}
    bodies = {rank: one.text.partition("\n")[2] for rank, one in stacks.items()}
    found = {}
    for ranks in alike(bodies):
        for rank in ranks:
            text = stacks[rank].text
            if bodies[rank] and rank != ranks[0]:
                text = headers[rank].replace(_HEADER_END, f"its stacks are the same as those of rank {ranks[0]}")
            found[rank] = tagged([rank], text)
    return [found[rank] for rank in sorted(found)]
