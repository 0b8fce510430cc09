"""Stores whose clock is wrong, or whose listings lag behind: runs and checkpoints there stay right."""

from __future__ import annotations

import time

import numpy as np
import pytest
from helpers.locks import held
from helpers.object_store import BUCKET, RUN, STEP_1, STEP_2, make_impatient, state, value_of
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.checkpoint.folder import list_checkpoints, record_damage, tidy
from hvdkit.checkpoint.stores import open_store
from hvdkit.commands.cli import main
from hvdkit.supervisor import lock as store_lock

pytestmark = pytest.mark.full
HOUR = 3600.0
DELAY = 3600.0  # seconds, so that nothing becomes visible during a test


def train(until, **options):
    """Count steps until ``until``; return the checkpoint from which the run continued."""
    counts = {"count": np.zeros(2)}
    options = {"save_steps": 1, "max_to_keep": 2, "summary_steps": 2, **options}
    with hk.Supervisor(RUN, state=counts, asynchronous=False, **options) as supervisor:
        while supervisor.global_step < until:
            supervisor.step(loss=0.5)
    return None if supervisor.restored_from is None else supervisor.restored_from.name


def saved():
    return [path.name for path in list_checkpoints(open_store(f"{RUN}/checkpoints", "folder"))]


@pytest.mark.parametrize("skew", at_night([-HOUR, HOUR], but=[HOUR]))
def test_the_clock_of_the_store_does_not_matter(store, skew):
    store.skew = skew
    store.refuses_skew = False
    assert train(3) is None
    assert train(5) == "step-000000003"
    assert saved() == ["step-000000004", "step-000000005"]
    assert hk.checkpoint.verify(RUN).checkpoints == 2


@pytest.mark.parametrize("skew", [-HOUR, HOUR])
def test_the_lock_does_not_read_the_clock_of_the_store(store, monkeypatch, skew):
    monkeypatch.setattr(store_lock, "BEAT_SECONDS", 0.3)
    monkeypatch.setattr(store_lock, "LEASE_SECONDS", 2.0)
    store.skew = skew
    store.refuses_skew = False
    with held(store_lock.lock_of(open_store(RUN, "logdir"))) as first:
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
        second = store_lock.StoreLock(first._path.parent)
        with pytest.raises(hk.CheckpointError, match="another run writes to"):
            second.acquire()
        first.verify()


@pytest.mark.parametrize("skew", [-HOUR, HOUR])
def test_a_refused_time_is_named_with_its_remedy(store, monkeypatch, skew):
    make_impatient(monkeypatch)
    hk.checkpoint.save(STEP_1, state(1))
    store.skew = skew
    calls = (
        lambda: train(1),
        lambda: hk.checkpoint.save(STEP_2, state(2)),
        lambda: hk.checkpoint.restore(STEP_1, state(0)),
        lambda: hk.checkpoint.latest(RUN),
        lambda: hk.checkpoint.verify(STEP_1),
    )
    for call in calls:
        began = time.monotonic()
        with pytest.raises(hk.CheckpointError, match=r"clock of this host differs from the store's by 60 minutes.*NTP"):
            call()
        assert time.monotonic() - began < 20
    store.skew = 0
    assert hk.checkpoint.latest(RUN).name == "step-000000001"


@pytest.mark.nightly
def test_a_run_does_not_need_fresh_listings(store):
    store.listing_delay = DELAY
    assert train(3) is None
    assert train(5) == "step-000000003"
    assert saved() == ["step-000000004", "step-000000005"]
    assert hk.checkpoint.latest(RUN).name == "step-000000005"
    assert hk.checkpoint.verify(RUN).checkpoints == 2
    assert [found.damage for found in hk.checkpoint.inspect(RUN).checkpoints] == [None, None]
    store.listing_delay = 0
    folders = {name.split("/")[0] for name in store.names("run/checkpoints")}
    assert folders == {".recent", "step-000000004", "step-000000005"}


def test_objects_that_are_listed_after_their_removal_do_not_count(store):
    train(4)
    store.listing_delay = DELAY
    assert train(6) == "step-000000004"
    assert saved() == ["step-000000005", "step-000000006"]
    store.listing_delay = 0
    assert len(saved()) == 2


def test_a_save_replaces_one_that_no_listing_shows(store):
    store.listing_delay = DELAY
    for value in (1, 2, 3):
        hk.checkpoint.save(STEP_1, state(value))
        assert value_of(STEP_1) == value
        assert hk.checkpoint.latest(RUN).name == "step-000000001"
    hk.checkpoint.save(STEP_2, state(4))
    assert hk.checkpoint.latest(RUN).name == "step-000000002"
    store.listing_delay = 0
    assert len(store.names("run/step-000000001")) == 2


def test_a_name_without_a_step_can_be_used_again_after_its_removal(store):
    import s3fs

    path = f"{RUN}/final"
    hk.checkpoint.save(path, state(1))
    store.listing_delay = DELAY
    s3fs.S3FileSystem(skip_instance_cache=True).rm(f"{BUCKET}/run/final", recursive=True)
    hk.checkpoint.save(path, state(2))
    assert value_of(path) == 2


def test_what_a_listing_hides_is_not_removed(store):
    hk.checkpoint.save(STEP_2, state(2))
    store.listing_delay = DELAY
    hk.checkpoint.save(STEP_1, state(1))
    hk.checkpoint.save(STEP_2, state(3))
    tidy(open_store(RUN, "folder"))
    store.listing_delay = 0
    manifest = open_store(f"{STEP_1}/manifest.json", "path")
    content = manifest.read_bytes()
    manifest.unlink()
    store.listing_delay = DELAY  # now listings show the folder, and not its manifest
    manifest.write_bytes(content)
    tidy(open_store(RUN, "folder"))
    store.listing_delay = 0
    tidy(open_store(RUN, "folder"))
    assert (value_of(STEP_1), value_of(STEP_2)) == (1, 3)


def test_damage_that_no_listing_shows_is_known_and_kept(store):
    import s3fs

    store.listing_delay = DELAY
    for value in (1, 2):
        hk.checkpoint.save(f"{RUN}/step-{value:09}", state(value))
    record_damage(open_store(STEP_2, "path"), "found by a test")
    assert hk.checkpoint.latest(RUN).name == "step-000000001"
    for value in (3, 4):  # each replaces a damaged checkpoint
        hk.checkpoint.save(STEP_2, state(value))
        assert value_of(hk.checkpoint.latest(RUN)) == value
        record_damage(open_store(STEP_2, "path"), "found by a test")
    filesystem = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    for number, value in (("", 2), ("1", 3)):
        folder = f"{BUCKET}/run/step-000000002.damaged{number}"
        assert filesystem.exists(f"{folder}/manifest.json")
        assert value_of(f"s3://{folder}") == value


def test_commands_do_not_need_fresh_listings(store, capsys):
    store.listing_delay = DELAY
    hk.checkpoint.save(STEP_1, state(1))
    for command in ("inspect", "verify"):
        for path in (RUN, STEP_1):
            assert main(["checkpoint", command, path]) == 0
    assert "DAMAGED" not in capsys.readouterr().out
