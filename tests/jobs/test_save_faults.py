"""Kill -9 at every system call of a save, of one rank, the chief or all, at 1 and 3 ranks: no saved state is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from helpers.jobs import call

DRIVER = Path(__file__).with_name("save_driver.py")


def test_there_is_always_a_whole_checkpoint_the_old_one_or_the_new_one():
    done = call([sys.executable, DRIVER])
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    for size in (1, 3):  # every stage of a save was met
        chief = [c for c in cases if c["size"] == size and c["victim"] == 0 and c["killed"]]
        assert len({c["stage"] for c in chief}) >= 20
    assert sum(c["killed"] for c in cases) > 150
    for case in cases:
        assert (case["found"], case["value"]) in [("step-000000001", 1.0), (case["name"], 2.0)], case
        assert case["killed"] or case["value"] == 2.0, case
        # No rubbish stays, and the next save works.
        assert all(not name.startswith(".") for name in case["left"]), case
        assert case["after"] == ["step-000000003", 3.0], case
    assert {c["value"] for c in cases if c["killed"]} == {1.0, 2.0}
