"""The Supervisor: a continued run equals an uninterrupted one, and all ranks act at the same step."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers.faults import flip
from helpers.supervised import Run, X, Y

import hvdkit as hk
from hvdkit.checkpoint.folder import list_checkpoints
from hvdkit.supervisor import PREEMPTED

pytestmark = [pytest.mark.usefixtures("removed"), pytest.mark.core(2)]


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
def test_a_continued_run_equals_one_that_went_through(shared_path, rank):
    """Also if the chief has created more layers: Keras numbers layers in the order of their creation in a process."""
    through = Run()
    with through.supervised(shared_path / "through") as sv:
        through.train(sv)
    assert sv.global_step == 20
    for stop in (2, 11, None):  # in the middle of an epoch and of an accumulation
        if stop == 11 and rank == 0:
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
        part = Run()
        with part.supervised(shared_path / "parts", save_steps=1) as sv:
            part.train(sv, until=stop)
    assert sv.global_step == 20
    assert sv.restored_from is not None
    assert part.bits() == through.bits()


def test_ranks_begin_from_the_chiefs_values_and_own_seeds(shared_path, rank):
    run = Run()
    mine = run.model.layers[0].kernel.numpy().copy()
    with run.supervised(shared_path / "run") as sv:
        assert sv.global_step == 0
        assert sv.restored_from is None
        hk.compare_variables(run.model.trainable_variables + run.optimizer.variables)
        if rank == 0:
            np.testing.assert_array_equal(run.model.layers[0].kernel.numpy(), mine)
    masks = hk.allgather_object(np.asarray(run.model.layers[2].seed_generator.state.value).tolist())
    assert len({tuple(m) for m in masks}) == hk.size()


def test_saves_by_the_chiefs_clock_are_taken_at_one_step(shared_path, rank):
    run = Run(epochs=None)
    with run.supervised(shared_path / "run", save_model_secs=0.2, max_to_keep=None) as sv:
        for x, y in sv.batches():
            run.train_step(x, y, run.batches.sample_weight)
            sv.step()
            time.sleep(0.002 * rank)
            if sv.global_step == 150:
                break
    steps = [int(path.name[5:]) for path in list_checkpoints(shared_path / "run" / "checkpoints")]
    assert len(steps) >= 2
    assert steps[-1] == 150
    for path in list_checkpoints(shared_path / "run" / "checkpoints"):
        assert hk.checkpoint.latest(path.parent) is not None
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest["values"]["position"]["global_step"] == manifest["step"] == int(path.name[5:])


@pytest.mark.ranks(2, 3)
def test_any_rank_may_ask_to_stop_and_all_stop_at_one_step(shared_path, rank, size):
    run = Run(epochs=None)
    with run.supervised(shared_path / "run") as sv:
        for _ in sv.batches():
            if sv.global_step == 3 and rank == size - 1:
                sv.request_stop()
            sv.step()
            time.sleep(0.005)
    assert sv.should_stop()
    assert 3 < sv.global_step < 400
    assert len(set(hk.allgather_object(sv.global_step))) == 1


def test_agreeing_takes_no_exchange_at_every_step(shared_path, monkeypatch):
    run = Run(epochs=None)
    exchange = type(hk.cluster.exchange())
    calls = []
    real = exchange.allgather_bytes
    monkeypatch.setattr(exchange, "allgather_bytes", lambda *args: calls.append(1) or real(*args))
    with run.supervised(shared_path / "run", summary_steps=None, check_steps=None) as sv:
        for _ in sv.batches():
            if sv.global_step == 0:
                calls.clear()
            sv.step()
            if sv.global_step == 20000:
                break
        during = len(calls)
    assert during < 200


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_one_rank_saves_and_ends_all_with_a_code_of_its_own(shared_path, rank, size, number):
    run = Run(epochs=None)
    with pytest.raises(SystemExit) as end, run.supervised(shared_path / "run") as sv:
        for _ in sv.batches():
            if sv.global_step == 2 and rank == size - 1:
                os.kill(os.getpid(), number)
            sv.step()
            time.sleep(0.002)
    assert end.value.code == PREEMPTED == 75
    assert (
        hk.checkpoint.latest(shared_path / "run") == shared_path / "run" / "checkpoints" / f"step-{sv.global_step:09d}"
    )


def test_a_loop_that_does_not_stop_is_ended_after_the_save(shared_path):
    run = Run(epochs=None)
    steps = 0
    with pytest.raises(SystemExit) as end, run.supervised(shared_path / "run") as sv:
        for _ in run.batches:  # not sv.batches()
            if steps == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            steps += 1
            sv.step()
    assert end.value.code == PREEMPTED
    assert hk.checkpoint.latest(shared_path / "run") is not None


def test_a_failed_save_is_raised_on_all_ranks_at_the_next_step(shared_path, rank, size):
    run = Run(epochs=None)
    with (
        pytest.raises(hk.CheckpointError, match=rf"rank {size - 1}.*File too large"),
        run.supervised(shared_path / "run", save_steps=5, summary_steps=None) as sv,
    ):
        for _ in sv.batches():
            sv.step()
            if sv.global_step == 9:
                sv._saver.wait()
                limit(1000 if rank == size - 1 else None)
            if sv.global_step > 9:
                time.sleep(0.01)
            assert sv.global_step < 30_000
    limit(None)
    hk.barrier()
    assert [path.name for path in (shared_path / "run" / "checkpoints").iterdir()] == ["step-000000005"]


def limit(size: int | None) -> None:
    """Limit the files of this process to ``size`` bytes: the system call fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def test_unlike_models_are_named_before_any_file_is_touched(shared_path, rank, size):
    run = Run(units=5 + (rank == size - 1))
    with pytest.raises(hk.CollectiveMismatchError, match=rf"got 'model/.*kernel.* on rank {size - 1}"):
        run.supervised(shared_path / "run").__enter__()
    assert not (shared_path / "run").exists()


def test_unlike_data_are_named(shared_path, rank):
    run = Run()
    run.batches = hk.data.GlobalBatches((X + (rank == 1), Y), 20, shuffle_seed=1)
    with pytest.raises(hk.CollectiveMismatchError, match=r"data: got other .* on rank 1, expected"):
        run.supervised(shared_path / "run").__enter__()


def damage(path: Path) -> None:
    """Flip a bit of the weights, on the chief."""
    if hk.is_chief():
        flip(path / "replicated.safetensors", -40)
    hk.barrier()


@pytest.mark.full
def test_a_damaged_checkpoint_is_passed_over_and_never_removed(shared_path):
    folder = shared_path / "run" / "checkpoints"
    run = Run()
    with run.supervised(shared_path / "run", save_steps=2, asynchronous=False) as sv:
        run.train(sv, until=6)
    damage(folder / "step-000000006")
    again = Run()
    with again.supervised(shared_path / "run", save_steps=2, max_to_keep=1) as sv:
        assert sv.restored_from == folder / "step-000000004"
        again.train(sv, until=10)
    hk.barrier()
    kept = sorted(path.name for path in folder.glob("step*"))
    assert kept == ["step-000000006.damaged", "step-000000010"]


def test_a_loss_that_is_not_finite_is_named_and_never_saved(shared_path, rank, size):
    run = Run(epochs=None)
    with (
        pytest.raises(hk.NonFiniteError, match=rf"nan at step 6 on rank {size - 1}"),
        run.supervised(shared_path / "run", save_steps=3) as sv,
    ):
        for _ in sv.batches():
            bad = sv.global_step >= 5 and rank == size - 1
            sv.step(loss=float("nan") if bad else 1.0)
    hk.barrier()
    assert hk.checkpoint.latest(shared_path / "run").name == "step-000000003"


def test_ranks_without_a_common_folder_are_told_or_served_by_the_chief(shared_path, rank):
    own = shared_path / f"host-{rank}" / "run"
    with pytest.raises(hk.CheckpointError, match=rf"rank {max(1, rank)} on .* does not share .*gather=True"):
        Run().supervised(own).__enter__()
    through = Run()
    with through.supervised(shared_path / "through") as sv:
        through.train(sv)
    for stop in (7, None):
        part = Run()
        with part.supervised(own, gather=True, save_steps=1) as sv:
            part.train(sv, until=stop)
    assert part.bits() == through.bits()
    assert (own / "checkpoints").exists() == (rank == 0)


@pytest.mark.ranks(2, 3)
def test_plain_iterables_of_unequal_length_end_together(shared_path, rank, size):
    data = [np.float32(rank + i) for i in range(11 + 5 * rank)]
    with hk.Supervisor(shared_path / "run", data=data, save_model_secs=None) as sv:
        for value in sv.batches():
            total = hk.allreduce(value, hk.Sum)
            assert total == sum(r + sv.global_step for r in range(size))
            sv.step()
    assert sv.global_step == 11


def test_summaries_hold_each_step_once_after_a_run_that_was_lost(shared_path, rank, size):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Run()
    with first.supervised(shared_path / "run") as sv:
        for _ in sv.batches():
            sv.step(loss=float(rank))
            if sv.global_step == 4:
                sv.save()
            if sv.global_step == 10:
                break
        sv._saver.step = 10  # as if killed: steps after 4 are not saved
    hk.barrier()
    second = Run()
    with second.supervised(shared_path / "run") as sv:
        assert sv.global_step == 4
        for _ in sv.batches():
            sv.step(loss=float(rank))
            sv.histogram("weights", second.model.layers[0].kernel)
    hk.barrier()
    events = EventAccumulator(str(shared_path / "run" / "summaries"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(2, 21, 2))
    assert {e.value for e in events.Scalars("loss")} == {(size - 1) / 2}  # the ranks' mean
    assert len(events.Tensors("weights")) > 0


def test_options_that_differ_are_named_before_any_file_is_touched(shared_path, rank):
    with pytest.raises(hk.CollectiveMismatchError, match="save_steps: got 3 on rank 1, expected 2, as on rank 0"):
        Run().supervised(shared_path / "run", save_steps=3 if rank == 1 else 2).__enter__()
    assert not (shared_path / "run").exists()


def test_scalars_of_other_names_are_named(shared_path, rank):
    with (
        pytest.raises(hk.CollectiveMismatchError, match=r"got \['loss', 'rate'\] on rank 1, expected \['loss'\]"),
        Run().supervised(shared_path / "run", summary_steps=1) as sv,
    ):
        sv.step(loss=1.0, **({"rate": 0.1} if rank == 1 else {}))
