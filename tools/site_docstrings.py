"""Prepare docstrings for the site, as an extension of Griffe: cross-references, and examples as code.

Docstrings are Google's sections with Sphinx's inline markup, and mkdocstrings expects Markdown.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

PUBLIC = ("hvdkit", "hvdkit.callbacks", "hvdkit.checkpoint", "hvdkit.data", "hvdkit.layers", "hvdkit.schedules")
COMPAT = "hvdkit.compat.horovod"
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`(?P<name>[\w.]+)`")
NAME = re.compile(r"``hk\.(?P<name>[\w.]+)``")
PAGE = re.compile(r"\bdocs/(?P<name>[\w-]+)\.md\b")
LITERAL = re.compile(r"^(?P<indent> *)Examples?::?\n+(?P<body>(?:(?P=indent) +\S.*\n|\n)+)", re.MULTILINE)


class SiteDocstrings(griffe.Extension):
    """Convert the docstrings of a package after it has been read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Convert every docstring of ``pkg``."""
        names = public_names(pkg)
        for item in members(pkg):
            if item.docstring is not None:
                item.docstring.value = markdown(item.docstring.value, item, names)


def members(item: griffe.Object) -> Iterator[griffe.Object]:
    """Yield an object and all objects that are defined in it."""
    yield item
    for member in item.members.values():
        if not member.is_alias:
            yield from members(member)


def public_names(package: griffe.Module) -> dict[str, str]:
    """Return the name on the site of each object there, by the path of its definition and by its public path."""
    names = {}
    for module in PUBLIC:
        for name, member in package.modules_collection[module].members.items():
            path = f"{module}.{name}"
            if name in (package.modules_collection[module].exports or ()) or member.is_alias:
                names[path] = path
                if member.is_alias and member.target_path.startswith("hvdkit."):
                    names[member.final_target.path] = path
    return names


def markdown(text: str, item: griffe.Object, names: dict[str, str]) -> str:
    """Return a docstring with links instead of roles, and with its examples in fences."""

    def role(match: re.Match[str]) -> str:
        return link(match["name"], match["name"], item, names)

    def name(match: re.Match[str]) -> str:
        return link(f"hvdkit.{match['name']}", f"hk.{match['name']}", item, names)

    def example(match: re.Match[str]) -> str:
        body = textwrap.dedent(match["body"]).strip()
        kind = "pycon" if body.startswith(">>>") else "python"
        return textwrap.indent(f"**Example**\n\n```{kind}\n{body}\n```\n\n", match["indent"])

    text = ROLE.sub(role, text)
    text = NAME.sub(name, text)
    text = PAGE.sub(lambda match: f"[{match['name']}](../{match['name']}.md)", text)
    return LITERAL.sub(example, text + "\n").rstrip()


def link(target: str, shown: str, item: griffe.Object, names: dict[str, str]) -> str:
    """Return ``shown`` as code, linked to the entry of ``target`` if there is one."""
    scope: Any = item
    while scope is not None:
        for path in (f"{scope.path}.{target}", target):
            owner, _, member = path.rpartition(".")
            if path in names:
                return f"[`{shown}`][{names[path]}]"
            if owner in names and has_entry(item.modules_collection[owner].members.get(member)):
                return f"[`{shown}`][{names[owner]}.{member}]"
        scope = scope.parent
    return f"`{shown}`"


def has_entry(member: griffe.Object | griffe.Alias | None) -> bool:
    """Return True if the site describes this member of a class."""
    return member is not None and member.is_public and member.docstring is not None
