"""The page of error messages is made from the sources."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hvdkit.data.division import divide

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_messages_that_users_see():
    found = importlib.util.spec_from_file_location("messages", ROOT / "tools" / "messages.py")
    messages = importlib.util.module_from_spec(found)
    found.loader.exec_module(messages)
    page = messages.page(ROOT / "hvdkit")
    with pytest.raises(ValueError, match="parts: got") as raised:
        divide("dataset", ("columns",))
    expected, _, remedy = str(raised.value).partition(", expected ")[2].partition("; ")
    section = page.partition("## `parts`\n")[2].partition("\n## ")[0]
    assert remedy in section and expected.partition("'")[0] in section.replace("\\", ""), section
    assert page.count("\n## ") > 100
