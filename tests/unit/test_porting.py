"""The mechanical port of tests/programs, and the comparison of results."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from helpers import porting, ports

TOLERANCE = 1e-4
FURTHER = {"contrastive": 2, "retrieval": 2}
DOCUMENT = Path(__file__).parents[2] / "docs" / "cookbook.md"


def test_the_comparison_notices_every_leaf():
    """The comparison rejects a result in which any leaf differs slightly."""
    expected = porting.as_values(
        {"history": {"loss": [0.5, 0.25], "epochs": [0, 1]}, "weights": [np.ones((2, 2), "f4")], "name": "a"}
    )
    changes = [
        {"history": {"loss": [0.5, 0.2502], "epochs": [0, 1]}},
        {"history": {"loss": [0.5, 0.25], "epochs": [0, 2]}},
        {"history": {"loss": [0.5], "epochs": [0, 1]}},
        {"history": {"loss": [0.5, np.nan], "epochs": [0, 1]}},
        {"history": {"epochs": [0, 1]}},
        {"weights": [np.array([[1, 1], [1, 0.999]], "f4")]},
        {"weights": []},
        {"name": "b"},
    ]
    for change in changes:
        comparison = porting.Comparison(TOLERANCE)
        comparison.values({**expected, **porting.as_values(change)}, expected)
        assert len(comparison.problems) == 1, change
    same = porting.Comparison(TOLERANCE)
    same.values(expected, expected)
    assert not same.problems


def test_a_port_is_three_kinds_of_lines():
    """The import, hk.init() and the calls; more only for losses that couple rows."""
    for name in ports.names():
        made = ports.port(ports.source(name))
        assert made.inserted == 2 and made.calls >= 1 and made.extra == FURTHER.get(name, 0), name
        compile(made.text, name, "exec")
        assert max(len(line) for line in made.text.splitlines()) <= 85, name  # the site shows it whole


def test_every_kind_of_call_is_ported():
    made = ports.port('"""Doc."""\n\nimport keras\nscore = self.model.evaluate(x)\n    # port: y = hk.allgather(y)\n')
    assert made.text.splitlines()[2:] == [
        "import hvdkit as hk",
        "hk.init()",
        "import keras",
        "score = hk.evaluate(self.model, x)",
        "    y = hk.allgather(y)",
    ]
    assert (made.inserted, made.calls, made.extra, made.lines) == (2, 1, 1, 4)


def test_the_lines_of_a_port_that_differ_are_known():
    source = '"""Doc."""\nimport keras\nmodel.fit(x)\nx = y  # port: x = hk.allgather(y)\n'
    made = ports.port(source)
    assert [made.text.splitlines()[number - 1] for number in made.changed] == [
        "import hvdkit as hk",
        "hk.init()",
        "hk.fit(model, x)",
        "x = hk.allgather(y)",
    ]


def test_the_cookbook_has_every_program_once():
    listed = re.findall(
        r"^- \[`(\w+)`\]\(\.\./tests/programs/\1\.py\)(?: \*\*\+(\d+)\*\*)?: \S", DOCUMENT.read_text(), re.M
    )
    assert sorted(name for name, _ in listed) == ports.names()
    assert {name: int(number or 0) for name, number in listed} == {
        name: ports.port(ports.source(name)).extra for name in ports.names()
    }
