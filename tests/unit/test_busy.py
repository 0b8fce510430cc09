"""``hk.busy``: work that is invisible from outside the process."""

from __future__ import annotations

import socket
import threading

import pytest
from helpers.cases import case

import hvdkit as hk
from hvdkit.watchdog.channel import receive_now
from hvdkit.watchdog.events import Busy
from hvdkit.watchdog.reporter import reporter


@pytest.fixture
def sentinel(monkeypatch):
    """Return the sentinel's end of a connection to this process."""
    mine, theirs = socket.socketpair()
    monkeypatch.setattr(reporter(), "_socket", mine)
    theirs.settimeout(60)
    yield theirs
    mine.close()
    theirs.close()


def stacks_of_this_rank():
    return reporter()._thread.stacks(reporter().recorder, reporter().reason, "")


def test_busy_is_reported_without_a_world_nested_and_in_any_thread(sentinel):
    def elsewhere():
        with hk.busy("packing\nfiles"):
            inside.set()
            leave.wait()

    inside, leave = threading.Event(), threading.Event()
    with hk.busy("uploading"):
        with hk.busy("waiting for the archive"):
            assert reporter().reason == "waiting for the archive"
        thread = threading.Thread(target=elsewhere)
        thread.start()
        inside.wait()
        stacks = stacks_of_this_rank()
        assert "busy: packing files, " in stacks.text and stacks.where.startswith("busy: packing files; in ")
    assert reporter().reason == "packing files"
    leave.set()
    thread.join()
    assert reporter().reason is None and "busy" not in stacks_of_this_rank().where
    with pytest.raises(KeyError), hk.busy("failing"):
        raise KeyError
    assert reporter().reason is None
    said = ["uploading", "waiting for the archive", "uploading", "packing files", "packing files", None]
    assert [receive_now(sentinel) for _ in range(8)] == [Busy(reason=one) for one in [*said, "failing", None]]


def test_busy_wants_a_reason():
    words = r"reason: got .*, expected a non-empty string; describe what .* does: hk\.busy"
    for reason, kind in ((None, TypeError), (3, TypeError), ("", ValueError), (" \n", ValueError)):
        with case(reason=reason), pytest.raises(kind, match=words):
            hk.busy(reason)
