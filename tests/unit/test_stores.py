"""Runs and checkpoints in an object store: a real S3 server, and faults between it and the run."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
import weakref
from collections import Counter

import keras
import numpy as np
import pytest
from helpers.locks import held
from helpers.object_store import BUCKET, RUN, SECRET, STEP_1, STEP_2, make_impatient, state, value_of
from helpers.tiers import at_night
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from upath import UPath

import hvdkit as hk
from hvdkit.checkpoint import stores
from hvdkit.checkpoint.entries import StateTensor
from hvdkit.checkpoint.folder import list_checkpoints
from hvdkit.checkpoint.stores import open_store
from hvdkit.checkpoint.writing import Save, Snapshot
from hvdkit.commands.cli import main
from hvdkit.supervisor import lock as store_lock

pytestmark = pytest.mark.full


def train(logdir, epochs, **options):
    keras.utils.set_random_seed(7)
    x = np.random.default_rng(7).normal(size=(48, 4)).astype("float32")
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(1)])
    model.compile("adam", "mse")
    history = hk.fit(model, x, x[:, :1], batch_size=16, epochs=epochs, logdir=logdir, verbose=0, **options)
    return history.history["loss"], [weight.tobytes() for weight in model.get_weights()]


@pytest.mark.core
def test_a_run_in_a_store_continues_as_one_in_a_folder(store, tmp_path):
    train(RUN, 2)
    losses, weights = train(RUN, 4)
    expected_losses, expected_weights = train(tmp_path, 4)
    assert weights == expected_weights
    assert losses == expected_losses[2:]
    newest = hk.checkpoint.latest(RUN)
    assert (newest.name, str(newest)) == ("step-000000012", f"{RUN}/checkpoints/step-000000012")
    names = store.names("run/checkpoints/step-000000012")
    assert names == ["manifest.json", "replicated.safetensors", "shard-00000-of-00001.safetensors"]
    assert hk.checkpoint.verify(RUN).checkpoints == len(hk.checkpoint.inspect(RUN).checkpoints)
    assert ".lock" not in store.names("run")


class Failing(keras.callbacks.Callback):
    """Raises in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise OSError("the disk of the tracker is full")


def test_a_fit_that_raises_releases_the_logdir(store):
    """The next run, on another host, does not wait for the lock of a run that has ended."""
    with pytest.raises(OSError, match="the disk of the tracker is full"):
        train(RUN, 4, callbacks=[Failing()])
    assert ".lock" not in store.names("run")
    assert hk.checkpoint.verify(RUN).checkpoints


@pytest.mark.core
def test_commands_read_stores(store, tmp_path, capsys):
    hk.checkpoint.save(STEP_1, state(1))
    assert main(["checkpoint", "inspect", RUN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["step"] == 1
    assert main(["checkpoint", "verify", STEP_1]) == 0
    assert main(["checkpoint", "export", RUN, "--to", str(tmp_path / "out")]) == 0
    assert np.all(np.load(tmp_path / "out" / "weights.npy") == 1)


@pytest.mark.core
def test_the_manifest_is_written_last_and_removed_first(store):
    hk.checkpoint.save(STEP_1, state(1))
    assert [r.key for r in store.requests if r.method == "PUT"][-1] == "run/step-000000001/manifest.json"
    store.requests.clear()
    with hk.Supervisor(RUN, state={"a": 1}, save_steps=1, max_to_keep=2, summary_steps=None) as supervisor:
        for _ in range(4):
            supervisor.step()
    removed = [r.key for r in store.requests if r.method == "DELETE" and "/step-000000001" in r.key]
    assert removed[0] == "run/checkpoints/step-000000001/manifest.json"
    names = {name.split("/")[0] for name in store.names("run/checkpoints")}
    assert names == {".recent", "step-000000003", "step-000000004"}


def test_a_save_makes_as_many_requests_however_many_checkpoints_are_kept(store):
    counts = {}
    for kept in (2, 9):
        logdir = f"s3://{BUCKET}/keeps-{kept}"
        with hk.Supervisor(logdir, state={"a": np.ones(3)}, save_model_secs=None, max_to_keep=kept) as session:
            for _ in range(kept + 3):
                session.step(loss=0.5)
                session.save()
                requests = [r for r in store.requests if ".lock" not in r.key]
                store.requests.clear()
        counts[kept] = Counter(request.method for request in requests)
        assert len(list_checkpoints(open_store(f"{logdir}/checkpoints", "folder"))) == kept
    assert counts[2] == counts[9]
    assert sum(counts[9].values()) <= 22


@pytest.mark.nightly
@pytest.mark.parametrize("replaces", [False, True])
def test_a_save_that_fails_at_any_request_leaves_the_last_good_one(store, replaces):
    path = STEP_1 if replaces else STEP_2
    hk.checkpoint.save(STEP_1, state(1))
    for failing in itertools.count():
        store.requests.clear()
        store.fault = lambda request, failing=failing: 403 if request.number >= failing else None
        try:
            hk.checkpoint.save(path, state(2))
            done = True
        except hk.CheckpointError as error:
            assert SECRET not in str(error)
            done = False
        asked = len(store.requests)
        store.fault = lambda request: None
        assert value_of(hk.checkpoint.latest(RUN)) in ((2,) if done else (1, 2))
        if asked <= failing:
            break
    assert failing > 5
    hk.checkpoint.save(path, state(3))
    assert value_of(path) == 3
    assert len(store.names(path.removeprefix(f"s3://{BUCKET}/"))) == 2  # what failed saves left is removed


@pytest.mark.parametrize("fault", at_night([500, 503, 429, "cut", "refuse"], but=[503, "cut", "refuse"]))
def test_faults_that_pass_cost_nothing(store, fault):
    seen = set()

    def once(request):
        is_first = (request.method, request.key) not in seen
        seen.add((request.method, request.key))
        return fault if is_first else None

    store.fault = once
    hk.checkpoint.save(STEP_1, state(1))
    assert value_of(STEP_1) == 1


def test_training_goes_on_while_the_store_is_down(store):
    down = threading.Event()
    store.fault = lambda request: "refuse" if down.is_set() else None
    steps_while_down = 0
    with hk.Supervisor(RUN, state={"a": 1}, save_model_secs=0.2, summary_steps=1) as supervisor:
        down.set()
        end = time.monotonic() + 2
        while time.monotonic() < end:
            supervisor.step(loss=0.5)
            steps_while_down += 1
        down.clear()
    assert steps_while_down > 20
    assert hk.checkpoint.latest(RUN).name == f"step-{steps_while_down:09}"


def test_the_training_thread_makes_no_request_for_a_save(store, monkeypatch):
    """So the blocking part of a save to a store is that of one to a folder: the snapshot."""
    threads = []
    request = stores.request

    def noted(*arguments, **options):
        threads.append(threading.current_thread().name)
        return request(*arguments, **options)

    monkeypatch.setattr(stores, "request", noted)
    with hk.Supervisor(RUN, state={"a": np.ones(9)}, save_model_secs=None, summary_steps=1) as supervisor:
        supervisor.step(loss=0.5)
        threads.clear()
        supervisor.save(wait=False)
        for _ in range(20):
            supervisor.step(loss=0.5)
        seen = list(threads)
        supervisor._saver.wait()
        seen += [name for name in threads if name == "hvdkit-save"]
    assert set(seen) <= {"hvdkit-save", "hvdkit-lock", "hvdkit-summaries"}
    assert "hvdkit-save" in seen


@pytest.mark.nightly
def test_an_outage_at_any_request_of_a_save_costs_no_checkpoint(store, monkeypatch):
    make_impatient(monkeypatch)
    with hk.Supervisor(RUN, state={"a": 1}, save_model_secs=None, max_to_keep=1, summary_steps=1) as supervisor:
        for at in range(0, 16, 3):
            store.requests.clear()
            ends: list[float] = []

            def fault(request, at=at, ends=ends):
                if request.number == at:
                    ends.append(time.monotonic() + 1)
                return "refuse" if ends and time.monotonic() < ends[0] else None

            store.fault = fault
            supervisor.step(loss=0.5)
            supervisor.save()
            assert ends
            store.fault = lambda request: None
            assert hk.checkpoint.latest(RUN).name == f"step-{supervisor.global_step:09}"


def test_a_store_that_does_not_answer_is_no_damage(store, monkeypatch):
    make_impatient(monkeypatch)
    hk.checkpoint.save(STEP_1, state(1))
    store.fault = lambda request: 503 if "manifest" in request.key and request.method == "GET" else None
    with pytest.raises(hk.CheckpointError, match="store did not answer"):
        hk.checkpoint.latest(RUN)


def test_the_memory_of_a_snapshot_is_free_during_the_upload(store):
    values = np.ones((100, 3))
    alive = weakref.ref(values)
    tensor = StateTensor("a", "replicated", values.dtype, values.shape, lambda kept=values: kept, lambda _: None)
    del values
    seen = []
    store.fault = lambda request: seen.append(alive() is not None) if "replicated" in request.key else None
    save = Save(open_store(STEP_1, "path"), Snapshot([tensor]), step=1, rank=0, size=1, token="ab", background=True)
    del tensor
    save.start().wait(60)
    assert save.error is None
    assert seen == [False]


def test_damage_is_named_skipped_and_never_replaced(store):
    import s3fs

    hk.checkpoint.save(STEP_1, state(1))
    hk.checkpoint.save(STEP_2, state(2))
    key = f"{BUCKET}/run/step-000000002/replicated.safetensors"
    filesystem = s3fs.S3FileSystem(skip_instance_cache=True)
    content = bytearray(filesystem.cat_file(key))
    content[-3] ^= 4
    filesystem.pipe_file(key, bytes(content))
    with pytest.raises(hk.CorruptCheckpointError, match=r"step-000000002/replicated\.safetensors.*'weights'.*rows 0"):
        hk.checkpoint.restore(STEP_2, state(0))
    assert hk.checkpoint.latest(RUN).name == "step-000000001"
    hk.checkpoint.save(STEP_2, state(3))
    assert value_of(STEP_2) == 3
    assert bytes(content) == filesystem.cat_file(f"{BUCKET}/run/step-000000002.damaged/replicated.safetensors")
    assert store.names("run/step-000000002.damaged") == ["manifest.json", "replicated.safetensors"]
    assert hk.checkpoint.latest(RUN).name == "step-000000002"
    filesystem.rm_file(f"{BUCKET}/run/step-000000002.damaged/replicated.safetensors")
    filesystem.rm_file(f"{BUCKET}/run/step-000000001/replicated.safetensors")
    with pytest.raises(hk.CorruptCheckpointError, match=r"replicated\.safetensors: missing"):
        hk.checkpoint.restore(STEP_1, state(0))


def test_only_the_rows_that_are_needed_are_read(store):
    table = hk.PartitionedVariable((40_000, 32), name="table", seed=1)
    hk.checkpoint.save(STEP_1, {"table": table, "small": np.ones(3)})
    store.requests.clear()
    hk.checkpoint.restore(STEP_1, {"small": np.zeros(3)})
    assert not [r for r in store.requests if r.method == "GET" and "shard" in r.key]


@pytest.mark.core
def test_what_cannot_be_a_logdir_is_an_error_before_training(store):
    cases = (
        ("s3://no-such-bucket/run", hk.CheckpointError, "no-such-bucket.*create the bucket"),
        ("s3://", ValueError, "a bucket and a folder"),
        ("nosuch://bucket/run", ValueError, "nosuch"),
        ("https://example.org/run", ValueError, "written"),
        ("zip://a::s3://bucket/b.zip", ValueError, "expected"),
    )
    for url, kind, text in cases:
        with pytest.raises(kind, match=text):
            train(url, 1)
    store.fault = lambda request: 403
    with pytest.raises(hk.CheckpointError, match="credentials") as caught:
        train(RUN, 1)
    assert SECRET not in str(caught.value)


def test_a_path_keeps_the_options_of_its_client(store, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    path = UPath(STEP_1, endpoint_url=store.environment["AWS_ENDPOINT_URL"])
    hk.checkpoint.save(path, state(1))
    assert value_of(path) == 1


def test_a_full_disk_for_the_local_copies_is_named(store, monkeypatch, tmp_path):
    missing = tmp_path / "missing"
    monkeypatch.setattr("tempfile.tempdir", str(missing))
    with pytest.raises(hk.CheckpointError, match=f"{missing}.*cannot be written"):
        hk.checkpoint.save(STEP_1, state(1))
    assert hk.checkpoint.latest(RUN) is None


def test_local_copies_of_a_killed_run_are_removed(store, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in (f"hvdkit-{kind}-{socket.gethostname()}-1" for kind in ("save", "summaries")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("left")
        os.utime(tmp_path / name, (0, 0))
    train(RUN, 1)
    assert not list(tmp_path.glob("hvdkit-*"))


def test_a_second_run_is_refused_and_a_dead_one_replaced(store, monkeypatch):
    monkeypatch.setattr(store_lock, "BEAT_SECONDS", 0.3)
    monkeypatch.setattr(store_lock, "LEASE_SECONDS", 3.0)
    first = store_lock.lock_of(open_store(RUN, "logdir"))
    with held(first):
        with pytest.raises(hk.CheckpointError, match="this process"):
            store_lock.StoreLock(first._path.parent).acquire()
        path = first._path
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
        second = store_lock.StoreLock(path.parent)
        with pytest.raises(hk.CheckpointError, match=r"got s3://bucket/run, which another run writes to \(pid"):
            second.acquire()
        first.verify()
        first._ended.set()  # as if it were killed
        time.sleep(0.5)
        second.acquire()
        with pytest.raises(hk.CheckpointError, match="which another run has taken"):
            first.verify()
        second.verify()
        second.release()
    assert ".lock" not in store.names("run")


def test_a_lock_of_a_process_that_has_ended_here_is_replaced_at_once(store):
    lock = store_lock.StoreLock(open_store(RUN, "logdir"))
    holder = {**store_lock.describe_this_run(), "pid": 2**22 + 1, "id": "00"}
    lock._path.fs.pipe_file(lock._path.path, json.dumps(holder).encode())
    began = time.monotonic()
    lock.acquire()
    assert time.monotonic() - began < store_lock.LEASE_SECONDS / 2
    lock.release()


@pytest.mark.nightly
def test_a_lock_without_a_process_is_treated_as_one_of_an_unknown_run(store, monkeypatch):
    monkeypatch.setattr(store_lock, "LEASE_SECONDS", 0.3)
    for pid in (None, "17", 1.5, True, 0, -1, 10**30):
        lock = store_lock.StoreLock(open_store(RUN, "logdir"))
        holder = {**store_lock.describe_this_run(), "pid": pid, "id": "00"}
        lock._path.fs.pipe_file(lock._path.path, json.dumps(holder).encode())
        lock.acquire()  # after the lease, as nothing writes to the lock
        lock.release()


def test_a_lock_that_another_program_changes_is_held(store, monkeypatch):
    lock = store_lock.StoreLock(open_store(RUN, "logdir"))
    lock._path.fs.pipe_file(lock._path.path, b"one")
    monkeypatch.setattr("time.sleep", lambda seconds: lock._path.fs.pipe_file(lock._path.path, b"two"))
    with pytest.raises(hk.CheckpointError, match="got s3://bucket/run, which another run writes to"):
        lock.acquire()


def test_events_of_repeated_steps_are_removed(store, tmp_path):
    for until in (4, 8):
        with hk.Supervisor(RUN, state={"a": 1}, save_model_secs=None, summary_steps=2) as supervisor:
            while supervisor.global_step < until:
                supervisor.step(loss=0.5)
    steps = []
    for name in store.names("run/summaries"):
        (tmp_path / name).write_bytes(open_store(f"{RUN}/summaries/{name}", "name").read_bytes())
        events = LegacyEventFileLoader(str(tmp_path / name)).Load()
        steps += [event.step for event in events if event.summary.value]
    assert steps == [2, 4, 6, 8]
