"""What options of several commands have in common."""

from __future__ import annotations

from tyro.conf import arg

UNSET = arg(help_behavior_hint="")
"""Mark of an option whose default is None: its help does not show that, and says in words what happens without it."""
