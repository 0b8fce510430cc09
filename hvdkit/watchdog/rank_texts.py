"""Texts of several ranks, each line tagged with the ranks; equal ones are shown once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object, which differs between ranks


def tagged(ranks: Iterable[int], text: str) -> str:
    """Return ``text`` with the ranks before each line.

    Example:
        >>> tagged([3], "one\\ntwo")
        '[rank 3] one\\n[rank 3] two'
        >>> tagged([0, 1, 2, 5], "one")
        '[ranks 0-2,5] one'
    """
    before = tag(ranks)
    return "\n".join(f"{before} {line}" for line in text.split("\n"))


def tag(ranks: Iterable[int]) -> str:
    """Return the tag of lines of these ranks, such as ``[rank 3]``."""
    numbers = sorted(ranks)
    return f"[rank {numbers[0]}]" if len(numbers) == 1 else f"[ranks {ranges(numbers)}]"


def ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers as text, with a range for those that follow each other.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def alike(texts: Mapping[int, str]) -> list[list[int]]:
    """Return the ranks in groups whose texts differ in addresses of objects at most, in the order of their first rank.

    Example:
        >>> alike({0: "at 0x7f1", 1: "no", 2: "at 0x7f2"})
        [[0, 2], [1]]
    """
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(texts.items()):
        groups[_ADDRESS.sub("", text)].append(rank)
    return list(groups.values())
