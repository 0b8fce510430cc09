"""The result of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One result of one check.

    Attributes:
        name: The check's stable name, a key of the JSON report.
        status: ``ok``; ``note``, for information; ``warning``, training starts but is slower or limited, or another
            launcher is needed; ``problem``, training does not start or gives wrong results.
        what: The finding in one sentence.
        remedy: What to type or change; never empty for a warning or a problem.
        details: The data behind ``what``, for the JSON report.

    Example:
        >>> Finding("numpy", "problem", "NumPy is not installed", "pip install numpy").status
        'problem'
    """

    name: str
    status: Status
    what: str
    remedy: str = ""
    details: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status in ("warning", "problem") and not self.remedy:
            raise ValueError(f"finding {self.name!r} has the status {self.status} but no remedy")
