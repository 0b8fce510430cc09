"""Whatever is named like a step and is not a good checkpoint is damaged: named, skipped, never replaced or counted."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.faults import edited, flip, rewritten

import hvdkit as hk
from hvdkit import cluster
from hvdkit.checkpoint.folder import list_checkpoints, prune, tidy
from hvdkit.checkpoint.manifest import NAME, step_name

TIB = 2**40


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with cluster.alone():
        yield


def save(folder: Path, step: int) -> Path:
    return hk.checkpoint.save(folder / step_name(step), {"w": tf.Variable(np.full(50, step, np.float32)), "step": step})


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return the kind or the bytes of everything below ``folder``, except the notes of damage."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if not path.name.startswith(".damaged-"):
            small = path.is_file() and not path.is_symlink() and path.stat().st_size < 10**7
            found[str(path.relative_to(folder))] = path.read_bytes() if small else oct(path.lstat().st_mode)
    return found


def export(path: Path) -> None:
    hk.checkpoint.export_npy(path, path.parent / "exported")


def sparse(path: Path, size: int = TIB) -> None:
    with path.open("wb") as file:
        file.truncate(size)


MANIFESTS: dict[str, Callable[[Path], object]] = {
    "is missing": lambda path: None,
    "is a folder": lambda path: path.mkdir(),
    "is a dangling link": lambda path: path.symlink_to("nowhere"),
    "is a loop": lambda path: path.symlink_to(path),
    "is a FIFO": os.mkfifo,
    "is endless": lambda path: path.symlink_to("/dev/zero"),
    "is sparse": sparse,
    "is empty": lambda path: path.touch(),
    "is not UTF-8": lambda path: path.write_bytes(b'{"format": "\xff"}'),
    "is a number": lambda path: path.write_text("7"),
}
PLACES: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text("mine"),
    "a FIFO": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "an empty folder": lambda path: path.mkdir(),
    "a loop": lambda path: path.symlink_to(path),
}


def damaged(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a folder of three checkpoints for each damage of the newest."""
    for step in (1, 2, 3):
        save(folder / "whole", step)
    for number, (what, damage) in enumerate([*MANIFESTS.items(), *PLACES.items()]):
        run = shutil.copytree(folder / "whole", folder / str(number))
        newest = run / step_name(3)
        if what in MANIFESTS:
            (newest / NAME).unlink()
            damage(newest / NAME)
        else:
            shutil.rmtree(newest)
            damage(newest)
        yield what, run


def test_a_step_without_a_readable_manifest_is_damaged_and_stays(tmp_path, capsys):
    for what, run in damaged(tmp_path):
        newest, before = run / step_name(3), contents(run)
        assert [path.name for path in list_checkpoints(run)] == [step_name(s) for s in (1, 2, 3)], what
        assert hk.checkpoint.latest(run) == run / step_name(2), what
        overviews = hk.checkpoint.inspect(run).checkpoints
        assert [bool(each.damage) for each in overviews] == [False, False, True], what
        for tool in (hk.checkpoint.inspect, hk.checkpoint.verify, export):
            with pytest.raises(hk.CorruptCheckpointError, match=step_name(3)):
                tool(newest)
        with pytest.raises(hk.CorruptCheckpointError, match=step_name(3)):
            hk.checkpoint.verify(run)
        with pytest.raises(hk.CorruptCheckpointError, match=step_name(3)):
            hk.checkpoint.restore(newest, {"step": 0})
        prune(run / step_name(2), 2, None)
        assert contents(run) == before, what
        save(run, 4)
        prune(run / step_name(4), 1, None)  # 1 and 2 are removed, and 3 is not counted
        assert [path.name for path in list_checkpoints(run)] == [step_name(s) for s in (3, 4)], what
        prune(save(run, 5), 2, None)
        assert hk.checkpoint.latest(run) == run / step_name(5), what
        kept = {name: each for name, each in contents(run).items() if name.startswith(step_name(3))}
        assert kept == {name: each for name, each in before.items() if name.startswith(step_name(3))}, what
    capsys.readouterr()


def test_a_save_to_the_name_of_a_damaged_step_keeps_what_was_there(tmp_path):
    for what, run in damaged(tmp_path):
        before = {name[len(step_name(3)) :]: x for name, x in contents(run).items() if name.startswith(step_name(3))}
        for _ in range(2):
            save(run, 3)
            found = contents(run)
            aside = f"{step_name(3)}.damaged"
            assert {name[len(aside) :]: x for name, x in found.items() if name.startswith(aside)} == before, what
            assert hk.checkpoint.latest(run) == run / step_name(3), what


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path):
    """The user passes the logdir instead of a new folder in it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("weeks of work")
    for gather in (False, True):
        with pytest.raises(hk.CheckpointError, match=r"path: got .*, which exists and is not a checkpoint.*another"):
            hk.checkpoint.save(tmp_path / "run", {"step": 3}, gather=gather)
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "notes.txt"]
    (tmp_path / "empty").mkdir()
    hk.checkpoint.save(tmp_path / "empty", {"step": 3})
    assert hk.checkpoint.restore(tmp_path / "empty", {"step": 0}) == {"step": 3}
    with pytest.raises(ValueError, match=r"step: got 5, expected 7, as in the name"):
        hk.checkpoint.save(tmp_path / step_name(7), {"step": 3}, step=5)


def test_a_killed_replacement_leaves_the_good_one(tmp_path):
    """Both folders exist after a partial copy: the good one stays, and the damaged one is renamed."""
    replaced = tmp_path / f".replaced-{step_name(3)}"
    path = save(tmp_path, 3)
    shutil.copytree(path, replaced)
    (path / NAME).unlink()
    tidy(tmp_path)
    assert hk.checkpoint.latest(tmp_path) == tmp_path / step_name(3)
    assert (tmp_path / f"{step_name(3)}.damaged").is_dir() and not replaced.exists()
    shutil.copytree(tmp_path / step_name(3), replaced)
    tidy(tmp_path)
    assert not replaced.exists()
    for path in (tmp_path / step_name(3), tmp_path / f".replaced-{step_name(4)}"):
        path.mkdir(exist_ok=True)
        (path / NAME).unlink(missing_ok=True)
    (tmp_path / step_name(4)).symlink_to("nowhere")
    tidy(tmp_path)
    assert (tmp_path / f".replaced-{step_name(4)}").is_dir()


# --- what a run does


def session(logdir: Path, **options) -> hk.Supervisor:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    return hk.Supervisor(logdir, model=model, **{"save_model_secs": None, "summary_steps": None, **options})


def trained(logdir: Path) -> Path:
    """Leave checkpoints of steps 1, 2 and 3."""
    with session(logdir, save_steps=1, asynchronous=False) as sv:
        for _ in range(3):
            sv.step()
    return logdir / "checkpoints"


def test_a_run_whose_manifests_are_lost_does_not_begin_anew(tmp_path):
    """E.g. an rsync that was interrupted, or an fsck."""
    folder = trained(tmp_path / "run")
    for path in folder.iterdir():
        (path / NAME).unlink()
    before = contents(folder)
    remedy = r"all 3 checkpoints are damaged.*manifest\.json: missing.*to start over on purpose, move that folder away"
    for gather in (False, True):
        with pytest.raises(hk.CorruptCheckpointError, match=remedy):
            session(tmp_path / "run", gather=gather).__enter__()
        assert contents(folder) == before
    folder.rename(tmp_path / "away")
    with session(tmp_path / "run") as sv:
        assert sv.global_step == 0
        sv.step()
    assert hk.checkpoint.latest(tmp_path / "run").name == step_name(1)


def test_a_run_whose_newest_checkpoint_is_unreadable_takes_the_one_before(tmp_path, caplog):
    for number, (what, damage) in enumerate([*MANIFESTS.items(), *PLACES.items()]):
        folder = trained(tmp_path / str(number))
        newest = folder / step_name(3)
        shutil.move(newest, tmp_path / "old")
        if what in MANIFESTS:
            shutil.move(tmp_path / "old", newest)
            (newest / NAME).unlink()
        else:
            shutil.rmtree(tmp_path / "old")
        damage(newest / NAME if what in MANIFESTS else newest)
        before = contents(folder)
        caplog.clear()
        with session(tmp_path / str(number)) as sv:
            assert sv.global_step == 2, what
            sv.close()
        assert f"{step_name(3)} is damaged; skipping it: {newest}" in caplog.text, what
        assert contents(folder) == before, what


def test_a_run_says_that_its_checkpoints_have_disappeared(tmp_path, caplog):
    with session(tmp_path / "run", asynchronous=False) as sv:
        sv.step()
        (tmp_path / "run" / "checkpoints").rmdir()
        sv.save()
        assert f"{tmp_path}/run/checkpoints has disappeared" in caplog.text
        caplog.clear()
        sv.step()
        sv.save()
        assert "disappeared" not in caplog.text
        sv.step()
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "away")
        sv.save()
        assert f"{tmp_path}/run/checkpoints/{step_name(2)} has disappeared" in caplog.text
    with session(tmp_path / "run") as sv:
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        caplog.clear()
        sv.step()
        sv.save()
        assert f"{step_name(3)} has disappeared" in caplog.text
    assert hk.checkpoint.latest(tmp_path / "run").name == step_name(4)


def test_a_disk_that_reports_an_error_costs_one_checkpoint(tmp_path, monkeypatch):
    open_file = os.open
    for file in (NAME, "replicated.safetensors"):
        folder = trained(tmp_path / file)

        broken = str(folder / step_name(3) / file)

        def fails_at(path, *args, broken=broken, **more):
            if str(path) == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return open_file(path, *args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fails_at)
            with session(tmp_path / file) as sv:
                assert sv.global_step == 2
                sv.close()
        with session(tmp_path / file) as sv:  # the disk works again
            assert sv.global_step == 3
            sv.close()


def test_a_logdir_whose_name_is_not_utf_8(tmp_path):
    """The note of damage names it, and is read again."""
    logdir = tmp_path / os.fsdecode(b"run-\xff\n")
    folder = trained(logdir)
    flip(folder / step_name(3) / "replicated.safetensors")
    for _ in range(2):
        with session(logdir) as sv:
            assert sv.global_step == 2
            sv.close()
    note = (folder / f".damaged-{step_name(3)}").read_text("ascii")
    assert r"run-\udcff\n/checkpoints" in note and note.count("\n") == 1
    assert hk.checkpoint.inspect(folder).checkpoints[2].damage == note.strip()


def test_notes_of_damage_are_read_from_regular_files_only(tmp_path):
    path = save(tmp_path, 3)
    note = tmp_path / f".damaged-{path.name}"
    kinds = [os.mkfifo, lambda p: p.symlink_to("/dev/zero"), Path.mkdir, lambda p: p.symlink_to("nowhere")]
    for make in kinds:
        make(note)
        assert note.name in hk.checkpoint.inspect(path).damage
        assert hk.checkpoint.latest(tmp_path) is None
        save(tmp_path, 3)  # renames the checkpoint, and removes the note
        assert not os.path.lexists(note) and hk.checkpoint.latest(tmp_path) == path
    sparse(note)
    assert len(hk.checkpoint.inspect(path).damage) <= 4 * 2**14
    note.write_text("\x1b]0;title\x07 row 7\nrow 8")
    assert hk.checkpoint.inspect(path).damage == r"\x1b]0;title\x07 row 7\nrow 8"


# --- contents


def test_a_header_must_be_that_of_the_manifest(tmp_path):
    """Restoring 50 rows into which 25 are read would leave the memory of others in the rest."""

    def change_shape(entries):
        entries["w"]["shape"] = [-25]

    def swap(entries):
        entries["w"]["shape"] = [5, 10]

    def change_dtype(entries):
        entries["w"]["dtype"] = "I32"

    def shorten(entries):
        entries["w"] |= {"shape": [25], "data_offsets": [0, 100]}

    def move(entries):
        entries["w"]["data_offsets"] = [8, 208]

    def forget(entries):
        entries["v"] = entries.pop("w")

    for number, change in enumerate([change_shape, swap, change_dtype, shorten, move, forget]):
        path = save(tmp_path, number + 1)
        rewritten(path, "replicated.safetensors", change)
        variable = tf.Variable(np.zeros(50, np.float32))
        for tool in (
            lambda path, variable=variable: hk.checkpoint.restore(path, {"w": variable}),
            hk.checkpoint.verify,
            lambda path, number=number: hk.checkpoint.export_npy(path, tmp_path / f"to-{number}"),
        ):
            with pytest.raises(hk.CorruptCheckpointError, match=r"replicated\.safetensors: "):
                tool(path)
        np.testing.assert_array_equal(variable, np.zeros(50))


def test_a_step_other_than_the_folders_is_damage(tmp_path, caplog):
    folder = trained(tmp_path / "run")
    edited(folder / step_name(3), lambda content: content["values"]["position"].update(global_step=7))
    shutil.copytree(folder / step_name(2), folder / step_name(9))
    with session(tmp_path / "run") as sv:
        assert sv.global_step == 2
        sv.close()
    assert f"{step_name(3)}/manifest.json: position: got step 7, expected 3" in caplog.text
    assert f"{step_name(9)}/manifest.json: step: got 2, expected 9, as in the folder's name" in caplog.text


@pytest.mark.full
def test_a_value_of_the_wrong_type_costs_one_checkpoint(tmp_path, caplog):
    wrong = [
        ("position", "x"),
        ("position", {"global_step": "3", "data": None}),
        ("position", {"global_step": True, "data": None}),
        ("position", {"data": None}),
        ("position", {"global_step": 2, "data": "x"}),
        ("state/best", {"a": 1}),
    ]
    for number, (name, value) in enumerate(wrong):
        logdir = tmp_path / str(number)
        data = hk.data.GlobalBatches(np.arange(8), 2)
        with session(logdir, save_steps=1, asynchronous=False, state={"best": 0.5}, data=data) as sv:
            sv.step()
            sv.step()
        newest = logdir / "checkpoints" / step_name(2)
        edited(newest, lambda content, name=name, value=value: content["values"].update({name: value}))
        caplog.clear()
        with session(logdir, state={"best": 0.5}, data=data) as sv:
            assert sv.global_step == 1, value
            sv.close()
        assert f"{newest}/manifest.json: value '{name}': " in caplog.text and ": got " in caplog.text
