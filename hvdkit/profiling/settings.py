"""Profiling settings from ``HVDKIT_PROFILE``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import describe

VARIABLE = "HVDKIT_PROFILE"
TIMELINE = "HVDKIT_PROFILE_TIMELINE"
FIRST = 10
LAST = 20
_FORMAT = re.compile(r"(?P<folder>.+?)(:(?P<first>\d+)-(?P<last>\d+))?")


@dataclass(frozen=True)
class ProfileSettings:
    """Settings to profile the steps ``first`` to ``last`` of a run, counted from 1, and write into ``folder``."""

    folder: Path
    first: int = FIRST
    last: int = LAST
    timeline: bool = False  # record Horovod's timeline as well

    def __post_init__(self) -> None:
        if not 3 <= self.first <= self.last:
            expected = "3 <= FIRST <= LAST: the first step traces the graph, and the profiler starts in another"
            raise ValueError(describe("steps to profile", f"{self.first}-{self.last}", expected, "pass other steps"))

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which a rank has these settings."""
        timeline = {TIMELINE: "1"} if self.timeline else {}
        return {VARIABLE: f"{self.folder}:{self.first}-{self.last}", **timeline}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ProfileSettings | None:
        """Return the settings in the environment, or None if profiling is off.

        Raises:
            ValueError: the variable cannot be parsed.

        Example:
            >>> ProfileSettings.from_environment({"HVDKIT_PROFILE": "runs/profile:50-60"})
            ProfileSettings(folder=PosixPath('runs/profile'), first=50, last=60, timeline=False)
        """
        text = environment.get(VARIABLE, "")
        if not text:
            return None
        match = _FORMAT.fullmatch(text)
        if match is None:
            remedy = f"write e.g. {VARIABLE}=runs/profile:{FIRST}-{LAST}"
            raise ValueError(describe(VARIABLE, ascii(text), "a folder on one line", remedy))
        first = match["first"] or FIRST
        last = match["last"] or LAST
        try:
            return cls(Path(match["folder"]), int(first), int(last), environment.get(TIMELINE) == "1")
        except ValueError as error:
            raise ValueError(f"{VARIABLE}={text}: {error}") from None
