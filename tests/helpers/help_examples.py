"""The examples in the help of hvdkit's commands."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from typing import get_args

from hvdkit.commands import cli


def help_examples() -> list[str]:
    """Return the examples of the table of commands and of each docstring, in the order of the help."""
    found: dict[str, None] = {}
    for command in cli.COMMANDS.values():
        found[command.example] = None
        kind = pkgutil.resolve_name(command.config)
        for config in [kind] if dataclasses.is_dataclass(kind) else [get_args(one)[0] for one in get_args(kind)]:
            block = re.search(r"\nFor example:\n((?: {4}.*\n)+)", f"{inspect.getdoc(config)}\n")
            assert block is not None, config
            lines = block[1].replace("\\\n", " ").splitlines()
            found |= dict.fromkeys(re.sub(r"(?<=\S) {2,}[^- ].*", "", line.strip()) for line in lines)
    return [re.sub(r" {2,}", " ", example) for example in found]
