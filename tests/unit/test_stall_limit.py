"""Horovod reports and ends stalled collectives only after the watchdog would, unless the user has set its limits."""

from __future__ import annotations

import os

import pytest

from hvdkit.cluster.settings import set_stall_limit

LIMIT, REPORT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"
DAY = 86_400


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {LIMIT: str(600 + DAY), REPORT: str(600 + DAY)}),
        ({"HVDKIT_WATCHDOG_SECONDS": "0"}, {LIMIT: "0", REPORT: str(DAY)}),  # no limit at all
        ({"HVDKIT_HEARTBEAT_SECONDS": "0"}, {LIMIT: "660"}),  # no watchdog: Horovod's report is the only one
        ({LIMIT: "300"}, {LIMIT: "300"}),
        ({REPORT: "20"}, {LIMIT: str(600 + DAY), REPORT: "20"}),
    ],
)
def test_limits_of_horovod(monkeypatch, given, expected):
    monkeypatch.setattr(os, "environ", given.copy())
    set_stall_limit()
    assert {name: os.environ[name] for name in (LIMIT, REPORT) if name in os.environ} == expected
