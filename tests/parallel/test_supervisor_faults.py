"""Damage, full disks and lost locks under a Supervisor: saved state stays, and the message names the file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from helpers.faults import edited, flip, rewritten

import hvdkit as hk

pytestmark = pytest.mark.usefixtures("removed")


def session(logdir: Path, **options) -> hk.Supervisor:
    """Return a session with a model of 400 kB whose weights encode the step, and a different seed on each rank."""
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(1000, use_bias=False), keras.layers.Dropout(0.1)])
    return hk.Supervisor(logdir, model=model, **{"save_model_secs": None, "summary_steps": None, **options})


def weights(sv: hk.Supervisor) -> keras.Variable:
    return sv._state()["model"].trainable_variables[0]


def train(sv: hk.Supervisor, steps: int) -> None:
    for _ in range(steps):
        weights(sv).assign_add(np.ones((100, 1000), np.float32))
        sv.step()


def trained(logdir: Path) -> None:
    """Leave checkpoints of steps 2 and 4."""
    with session(logdir, save_steps=2, asynchronous=False) as sv:
        weights(sv).assign(np.zeros((100, 1000), np.float32))
        train(sv, 4)


def on_chief(action, *args) -> None:
    if hk.is_chief():
        action(*args)
    hk.barrier()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 3)


def edit(file: Path) -> None:
    file.write_text(file.read_text().replace('"step": 4', '"step": 5'))


SHARD = f"shard-{hk.size() - 1:05d}-of-{hk.size():05d}.safetensors"
DAMAGE = {
    "a flipped byte": ("replicated.safetensors", flip, "is damaged in rows .* to"),
    "a flipped byte in a header": ("replicated.safetensors", lambda f: flip(f, 30), "its header is damaged"),
    "a flipped byte in a shard": (SHARD, lambda f: flip(f, -2), "is damaged in rows"),
    "a shard cut short": (SHARD, cut, "bytes, but .* were written"),
    "a missing shard": (SHARD, Path.unlink, "missing, though"),
    "an edited manifest": ("manifest.json", edit, "changed after it was written"),
    "a manifest cut short": ("manifest.json", cut, "is damaged|changed after"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_taken(shared_path, what, caplog):
    name, damage, words = DAMAGE[what]
    trained(shared_path / "run")
    on_chief(damage, shared_path / "run" / "checkpoints" / "step-000000004" / name)
    caplog.clear()
    with session(shared_path / "run") as sv:
        assert sv.global_step == 2
        np.testing.assert_array_equal(weights(sv).numpy(), np.full((100, 1000), 2.0))
    assert (shared_path / "run" / "checkpoints" / "step-000000004").is_dir()
    if hk.is_chief():
        said = " ".join(record.getMessage() for record in caplog.records)
        assert "step-000000004 is damaged; skipping it" in said
        assert name in said
        assert re.search(words, said), said


def seed_shape(entries: dict[str, Any]) -> None:
    next(entry for name, entry in entries.items() if "seed" in name)["shape"] = [-2]


def position_of_numpy(entries: dict[str, Any]) -> None:
    values = json.loads(entries["__metadata__"]["rank_values"])
    values["random/numpy"]["state"]["pos"] = 10**6  # NumPy would read memory beyond its 624 numbers
    entries["__metadata__"]["rank_values"] = json.dumps(values)


FORGED = {
    "manifest.json: missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json: is a FIFO": lambda path: [(path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")],
    r"manifest.json: value 'position': got 'x'": lambda path: edited(path, lambda c: c["values"].update(position="x")),
    "manifest.json: variables: got None": lambda path: edited(path, lambda c: c.update(variables=None)),
    rf"{SHARD}: .*shape\[0\]: got -2": lambda path: rewritten(path, SHARD, seed_shape),
    rf"{SHARD}: value 'random/numpy': pos: got 1000000": lambda path: rewritten(path, SHARD, position_of_numpy),
}


def test_damage_of_each_class_is_met_by_all_ranks_together(shared_path, caplog):
    """What only one rank reads, too: all take the checkpoint before; if there is none, all raise the same error."""
    trained(shared_path / "run")
    for number, (words, forge) in enumerate(FORGED.items()):
        run = shared_path / str(number)
        on_chief(shutil.copytree, shared_path / "run", run)
        on_chief(forge, run / "checkpoints" / "step-000000004")
        caplog.clear()
        with session(run) as sv:
            assert sv.global_step == 2, words
            sv.close()
        if hk.is_chief():
            said = " ".join(record.getMessage() for record in caplog.records)
            assert re.search(rf"step-000000004 is damaged; skipping it: .*{words}", said), said
        hk.barrier()
    for path in (shared_path / "run" / "checkpoints").iterdir():
        on_chief((path / "manifest.json").unlink)
    with pytest.raises(hk.CorruptCheckpointError) as caught:
        session(shared_path / "run").__enter__()
    errors = hk.allgather_object(str(caught.value))
    assert all("all 2 checkpoints are damaged" in text and "to start over on purpose" in text for text in errors)
    left = [*(shared_path / "run" / "checkpoints").glob("*/*.safetensors")]
    assert len(left) == 2 * (1 + hk.size())  # nothing was removed


def test_retention_never_leaves_damaged_checkpoints_alone(shared_path):
    """Step 30 is damaged: the run continues from 20, and saves 25 with room for one checkpoint."""
    folder = shared_path / "run" / "checkpoints"
    with session(shared_path / "run", save_steps=10, asynchronous=False) as sv:
        weights(sv).assign(np.zeros((100, 1000), np.float32))
        train(sv, 30)
    on_chief(shutil.rmtree, folder / "step-000000010")
    on_chief(flip, folder / "step-000000030" / "replicated.safetensors")
    for _ in range(3):  # it restarts before its first save
        sv = session(shared_path / "run", max_to_keep=1).__enter__()
        assert sv.restored_from == folder / "step-000000020"
        train(sv, 2)
        sv.close()
        hk.barrier()
        assert hk.checkpoint.latest(shared_path / "run") == folder / "step-000000020"
    with session(shared_path / "run", max_to_keep=1) as sv:
        train(sv, 5)
        saved = sv.save()
        hk.barrier()
        assert hk.checkpoint.latest(shared_path / "run") == saved == folder / "step-000000025"
        assert sorted(path.name for path in folder.glob("step-*")) == ["step-000000025", "step-000000030"]
    with session(shared_path / "run", max_to_keep=1) as sv:  # another run on the same folder
        assert sv.global_step == 25
        np.testing.assert_array_equal(weights(sv).numpy(), np.full((100, 1000), 25.0))
        train(sv, 6)
    hk.barrier()
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000000030", "step-000000031"]
    assert hk.checkpoint.latest(shared_path / "run") == folder / "step-000000031"


@pytest.mark.core
def test_a_checkpoint_that_was_repaired_is_used_again(shared_path):
    trained(shared_path / "run")
    newest = shared_path / "run" / "checkpoints" / "step-000000004"
    for step in (2, 4):
        on_chief(flip, newest / "replicated.safetensors")
        with session(shared_path / "run", save_model_secs=None) as sv:
            assert sv.global_step == step
            sv.close()
        hk.barrier()
    assert hk.checkpoint.latest(shared_path / "run") == newest


def test_a_run_that_lost_its_logdir_to_another_saves_no_more(shared_path):
    sv = session(shared_path / "run", asynchronous=False).__enter__()
    train(sv, 2)
    sv.save()
    holder = '{"host": "other", "pid": 7, "user": "x", "command": "python train.py", "since": "now"}'
    on_chief((shared_path / "run" / ".lock").write_text, holder)
    train(sv, 1)
    with pytest.raises(hk.CheckpointError, match=r"another run has taken \(pid 7 on other"):
        sv.save()
    sv.close()
    hk.barrier()
    assert hk.checkpoint.latest(shared_path / "run").name == "step-000000002"
    assert (shared_path / "run" / ".lock").read_text() == holder


@pytest.fixture
def small_disk(shared_path):
    """Yield a disk with room for two checkpoints of 400 kB."""
    disk = shared_path / "disk"
    mounted = mount(disk)
    if not hk.broadcast_object(mounted):
        pytest.skip("mounting a small file system takes root")
    yield disk
    hk.barrier()
    on_chief(lambda: subprocess.run(["umount", "-l", disk], check=True))


def mount(disk: Path) -> bool:
    """Mount it on the chief's host, which runs all ranks of these tests."""
    if not hk.is_chief():
        return False
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1150k", "tmpfs", disk]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


def test_a_full_disk_leaves_the_checkpoint_before_and_no_rubbish(shared_path, small_disk):
    folder = small_disk / "run" / "checkpoints"
    with (
        pytest.raises(hk.CheckpointError, match=r"rank 0 failed.*No space left on device.*free space"),
        session(small_disk / "run", save_steps=2, max_to_keep=None) as sv,
    ):
        train(sv, 400)
    hk.barrier()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["step-000000002", "step-000000004"]
    assert hk.checkpoint.latest(folder).name == "step-000000004"
    hk.barrier()
    on_chief(shutil.rmtree, folder / "step-000000002")
    with session(small_disk / "run", max_to_keep=None) as sv:  # room again: it continues from step 4
        assert sv.global_step == 4
        train(sv, 1)
    assert hk.checkpoint.latest(folder).name == "step-000000005"


def test_a_read_only_disk_is_named_before_training_begins(shared_path, small_disk):
    trained_path = small_disk / "run"
    trained(trained_path)
    hk.barrier()
    on_chief(lambda: subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True))
    with pytest.raises(hk.CheckpointError, match=r"run.*Read-only file system"):
        session(trained_path).__enter__()
    # Reading must not need write permission.
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(1000, use_bias=False), keras.layers.Dropout(0.1)])
    hk.checkpoint.restore(hk.checkpoint.latest(trained_path), {"model": model})
    np.testing.assert_array_equal(model.trainable_variables[0].numpy(), np.full((100, 1000), 4.0))


def test_what_a_killed_run_left_half_written_is_removed(shared_path):
    trained(shared_path / "run")
    folder = shared_path / "run" / "checkpoints"
    on_chief(lambda: (folder / ".writing-step-000000006-12ab").mkdir())
    on_chief(lambda: (folder / ".writing-step-000000006-12ab" / "replicated.safetensors").write_bytes(b"half"))
    on_chief(lambda: (folder / "step-000000004").rename(folder / ".replaced-step-000000004"))
    with session(shared_path / "run") as sv:
        assert sv.global_step == 4
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000002", "step-000000004"]
