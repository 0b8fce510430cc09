"""Kill -9 at every system call of a save, of one rank, the chief or all, at 1 to 4 ranks: no saved state is lost."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from helpers.jobs import call
from helpers.speed import WAIT

from hvdkit.checkpoint.writing import Save, Snapshot

DRIVER = Path(__file__).with_name("save_driver.py")


@pytest.fixture(scope="module")
def cases():
    done = call([sys.executable, DRIVER])
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_stage_of_a_save_was_met(cases):
    for size in (1, 2, 3, 4):
        chief = [c for c in cases if c["size"] == size and c["victim"] == 0 and c["killed"]]
        assert len({c["stage"] for c in chief}) >= 20
    assert sum(c["killed"] for c in cases) > 300


def test_there_is_always_a_whole_checkpoint_the_old_one_or_the_new_one(cases):
    for case in cases:
        assert (case["found"], case["value"]) in [("step-000000001", 1.0), (case["name"], 2.0)], case
        if not case["killed"]:
            assert case["value"] == 2.0


def test_old_ones_and_new_ones_both_occur(cases):
    assert {c["value"] for c in cases if c["killed"]} == {1.0, 2.0}


def test_no_rubbish_stays_and_the_next_save_works(cases):
    for case in cases:
        assert all(not name.startswith(".") for name in case["left"]), case
        assert case["after"] == ["step-000000003", 3.0], case


def test_the_chief_may_take_the_last_report_at_once(tmp_path, monkeypatch):
    """Once the report exists, the folder may be renamed while the rank that wrote it has not returned yet."""
    replace = Path.replace

    def taken(self, target):
        replace(self, target)
        target.parent.rename(tmp_path / "step-1")

    monkeypatch.setattr(Path, "replace", taken)
    save = Save(tmp_path / "step-1", Snapshot(), step=1, rank=1, size=2, token="token").start()
    assert save.wait(WAIT) and save.error is None
    assert (tmp_path / "step-1" / "rank-00001.json").exists()


def test_a_save_behind_the_training_gives_way_to_it(tmp_path):
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own, seen = priority(), []
    for background in (True, False):
        options = {"step": 1, "rank": 0, "size": 1, "token": "token", "background": background}
        save = Save(
            tmp_path / f"step-{int(background)}", Snapshot(), **options, after_commit=lambda: seen.append(priority())
        )
        assert save.start().wait(WAIT)
    assert seen == [min(own + 10, 19), own] and priority() == own
