"""Finds the rank that the others wait for when a job hangs, and prints the stacks of all ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdkit.watchdog.events import Stacks, Status

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_LIKE = "its stacks, most recent call first:"


def least_done(status: Mapping[int, Status], stacks: Mapping[int, Stacks], idle_longest: int) -> int:
    """Return the rank that has done least: the others wait for it.

    Ranks are compared by steps, then by eager collectives begun; of equal ones, a rank outside of a collective has done
    less. If all are equal, it is the one that has been idle longest.

    Args:
        status: of the ranks that run.
        stacks: of those that answered.
        idle_longest: the rank that has been idle longest.
    """

    def done(rank: int) -> tuple[int, int, bool]:
        return status[rank].step or 0, status[rank].count, stacks[rank].waiting

    least = min(sorted(stacks), key=done, default=idle_longest)
    return idle_longest if not stacks or done(least) == max(map(done, stacks)) else least


def texts(stacks: Mapping[int, Stacks]) -> list[str]:
    """Return the stacks of all ranks in rank order, tagged; those that several ranks share are printed once.

    Example:
        >>> same = Stacks(text="its stacks, most recent call first:\\nf")
        >>> texts({0: same, 1: same})[1]
        '[rank 1] its stacks are the same as those of rank 0'
    """
    printed: dict[str, int] = {}
    found = []
    for rank, one in sorted(stacks.items()):
        header, _, body = one.text.partition("\n")
        first = printed.setdefault(_ADDRESS.sub("", body), rank)
        same = bool(body) and first != rank
        text = header.replace(_LIKE, f"its stacks are the same as those of rank {first}") if same else one.text
        found.append("\n".join(f"[rank {rank}] {line}" for line in text.splitlines()))
    return found
