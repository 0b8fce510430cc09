"""Retention, records of damage, and malicious files: a good checkpoint survives all of them."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.faults import edited, flip, limited
from helpers.forged import array_tensor, save_as

import hvdkit as hk
from hvdkit.checkpoint.folder import clear_damage, list_checkpoints, prune, read_damage, record_damage, tidy
from hvdkit.checkpoint.manifest import Manifest, step_name
from hvdkit.checkpoint.reading import OPEN_FILES, Reader
from hvdkit.checkpoint.tensor_entry import Part, TensorEntry, coverage_problem
from hvdkit.checkpoint.tensorfile import NonFiniteTensor, not_allowed, write_file
from hvdkit.sharding.partition import rows_of

VERSION_1 = Path(__file__).parent / "recorded" / "checkpoint-version-1"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("noted", [True, False])
def test_retention_keeps_the_checkpoint_just_written_whatever_a_later_one_is(tmp_path, noted):
    """A run that could not restore step 30 continues from 20 and saves 25."""
    for step in (20, 30):
        save_as(tmp_path / step_name(step))
    flip(tmp_path / step_name(30) / "replicated.safetensors")
    if noted:
        record_damage(tmp_path / step_name(30), "a flipped byte")
    prune(save_as(tmp_path / step_name(25)), 1, None)
    kept = {name for name in names(tmp_path) if name.startswith("step-")}
    assert kept == {step_name(25), step_name(30)}
    hk.checkpoint.verify(tmp_path / step_name(25))
    if noted:
        assert hk.checkpoint.latest(tmp_path) == tmp_path / step_name(25)


def test_retention_counts_good_checkpoints_only(tmp_path):
    for step in (5, 10, 15, 20):
        save_as(tmp_path / step_name(step))
    record_damage(tmp_path / step_name(15), "row 7")
    (tmp_path / step_name(10) / "shard-00000-of-00001.safetensors").unlink()
    prune(tmp_path / step_name(20), 2, None)
    assert [name for name in names(tmp_path) if name.startswith("step-")] == [step_name(s) for s in (5, 10, 15, 20)]
    prune(save_as(tmp_path / step_name(25)), 2, 10)
    assert [name for name in names(tmp_path) if name.startswith("step-")] == [step_name(s) for s in (10, 15, 20, 25)]
    prune(tmp_path / step_name(25), None, None)
    prune(tmp_path / step_name(25), 1, 20)
    assert [name for name in names(tmp_path) if name.startswith("step-")] == [step_name(s) for s in (10, 15, 20, 25)]
    prune(tmp_path / step_name(25), 1, None)
    assert [name for name in names(tmp_path) if name.startswith("step-")] == [step_name(s) for s in (10, 15, 25)]


def test_latest_returns_no_checkpoint_with_noted_damage(tmp_path):
    for step in (20, 30):
        save_as(tmp_path / step_name(step))
    assert hk.checkpoint.latest(tmp_path) == tmp_path / step_name(30)
    flip(tmp_path / step_name(30) / "replicated.safetensors")
    with pytest.raises(hk.CorruptCheckpointError):
        hk.checkpoint.verify(tmp_path)
    assert "'w' is damaged in rows 0 to 4" in read_damage(tmp_path / step_name(30))
    assert hk.checkpoint.latest(tmp_path) == tmp_path / step_name(20)
    assert "'w' is damaged" in hk.checkpoint.inspect(tmp_path).checkpoints[1].damage
    flip(tmp_path / step_name(30) / "replicated.safetensors")  # repaired
    hk.checkpoint.verify(tmp_path)
    assert hk.checkpoint.latest(tmp_path) == tmp_path / step_name(30)
    clear_damage(tmp_path / step_name(30))


def test_a_checkpoint_with_noted_damage_is_not_read(tmp_path, monkeypatch):
    """Its disk may report errors, which must not stop a restart or a save."""
    for step in (10, 20, 30):
        save_as(tmp_path / step_name(step))
    record_damage(tmp_path / step_name(20), "row 7")
    record_damage(tmp_path / step_name(30), "row 7")
    load = Manifest.load

    def load_others(path: Path) -> Manifest:
        if path.name in (step_name(20), step_name(30)):
            raise OSError(errno.EIO, "Input/output error")
        return load(path)

    monkeypatch.setattr(Manifest, "load", load_others)
    assert hk.checkpoint.latest(tmp_path) == tmp_path / step_name(10)
    prune(save_as(tmp_path / step_name(25)), 1, None)
    assert [p.name for p in list_checkpoints(tmp_path)] == [step_name(s) for s in (20, 25, 30)]


def test_damage_is_noted_only_for_a_checkpoint_that_is_there(tmp_path):
    record_damage(tmp_path / step_name(3), "gone")
    assert names(tmp_path) == [] and read_damage(tmp_path / step_name(3)) is None


def test_a_note_of_damage_does_not_outlive_its_checkpoint(tmp_path):
    """The user removes the damaged checkpoint by hand, and the run saves that step again."""
    path = save_as(tmp_path / step_name(30))
    record_damage(path, "a flipped byte")
    shutil.rmtree(path)
    save_as(path)
    assert read_damage(path) is None and hk.checkpoint.latest(tmp_path) == path


def test_tidying_one_name_leaves_saves_of_other_names_alone(tmp_path):
    others = (
        ".writing-best2-12ab",
        ".writing-best-of-all-12ab",
        ".replaced-best2",
        ".writing-bes-12ab",
        ".writing-b.st-1",
    )
    for name in (*others, ".writing-best-12ab", ".writing-best-old", ".replaced-best"):
        (tmp_path / name).mkdir()
    tidy(tmp_path, "best")
    assert names(tmp_path) == sorted([*others, "best"])


# --- files with wrong contents


@pytest.mark.parametrize("text", ["[" * 200_000, '{"format":' * 200_000, '{"values": ' + "[" * 100_000])
def test_a_deeply_nested_manifest_is_damaged(tmp_path, text):
    save_as(tmp_path / step_name(20))
    (save_as(tmp_path / step_name(30)) / "manifest.json").write_text(text)
    with pytest.raises(hk.CorruptCheckpointError, match=r"manifest\.json: is damaged"):
        hk.checkpoint.inspect(tmp_path / step_name(30))
    assert hk.checkpoint.latest(tmp_path) == tmp_path / step_name(20)


@pytest.mark.parametrize("name", ["../step-000000020/replicated.safetensors", "/etc/passwd", "..", "", "a/b"])
@pytest.mark.parametrize("place", ["files", "parts"])
def test_a_manifest_names_files_of_its_own_folder_only(tmp_path, name, place):
    save_as(tmp_path / step_name(20))
    path = save_as(tmp_path / step_name(30))

    def change(content):
        if place == "files":
            content["files"][name] = content["files"].pop("replicated.safetensors")
        content["variables"]["w"]["parts"][0]["file"] = name

    edited(path, change)
    with pytest.raises(hk.CorruptCheckpointError, match="expected the name of a file in this folder"):
        Manifest.load(path)
    assert hk.checkpoint.latest(tmp_path) == tmp_path / step_name(20)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(size=0),
        lambda content: content.update(step="20"),
        lambda content: content.update(size=True),
        lambda content: content.update(variables=[]),
        lambda content: content["variables"].update(w=None),
    ],
)
def test_a_manifest_of_nonsense_is_damaged(tmp_path, change):
    path = save_as(tmp_path / step_name(20))
    edited(path, change)
    with pytest.raises(hk.CorruptCheckpointError):
        Manifest.load(path)


def test_a_checkpoint_of_the_first_format_is_read(tmp_path):
    path = tmp_path / step_name(7)
    shutil.copytree(VERSION_1, path)
    hk.checkpoint.verify(path)
    assert hk.checkpoint.inspect(path).rank_values == {"random/python": [[0, 5], [1, 5]]}
    manifest = Manifest.load(path)
    with Reader(path, manifest) as reader:
        np.testing.assert_array_equal(reader.whole("table"), np.arange(10, dtype=np.float32).reshape(5, 2))
        assert reader.rank_values(1) == {"random/python": [1, 5]}


def test_values_of_a_rank_that_are_missing_are_damage(tmp_path):
    path = save_as(tmp_path / step_name(20), size=2)
    manifest = Manifest.load(path)
    manifest.rank_values.append("random/numpy")
    with Reader(path, manifest) as reader, pytest.raises(hk.CorruptCheckpointError, match=r"rank 1.*random/numpy"):
        reader.rank_values(1)


def test_a_restore_opens_each_file_once_and_reads_each_byte_once(tmp_path, monkeypatch):
    """Comparing headers and manifest takes no further reads."""
    path = save_as(tmp_path / step_name(20), size=3, rows=10)
    opened = []
    open_file = os.open

    def counting_open(name, *args, **more):
        opened.append(name)
        return open_file(name, *args, **more)

    monkeypatch.setattr(os, "open", counting_open)
    manifest = Manifest.load(path)
    with Reader(path, manifest) as reader:
        reader.whole("w")
        reader.whole("table")
        for rank in range(3):
            reader.per_rank("mean", rank, 3, "mean")
        reader.all_rank_values()
        assert reader.bytes_read == sum(record.bytes for record in manifest.files.values())
    assert sorted(str(name) for name in opened) == sorted(str(file) for file in path.iterdir())


# --- many ranks


@pytest.fixture
def few_files():
    """Lower this process's limit of open files, to what 1,024 is for a checkpoint of 4,096 ranks."""
    with limited(resource.RLIMIT_NOFILE, OPEN_FILES + 40 + len([*Path("/proc/self/fd").iterdir()])):
        yield


@pytest.mark.full
def test_more_shards_than_a_process_may_open_files(tmp_path, few_files):
    size = 2 * OPEN_FILES + 71
    path = save_as(tmp_path / step_name(20), size=size, rows=size + 3)
    assert (path / "manifest.json").stat().st_size < 1100 * size  # nothing in it has the size of a generator
    manifest = Manifest.load(path)
    expected = np.arange((size + 3) * 2, dtype=np.float32).reshape(size + 3, 2)
    with Reader(path, manifest) as reader:
        for _ in range(2):
            np.testing.assert_array_equal(reader.whole("table"), expected)
        for rank in (0, size - 1, 5):
            assert reader.rank_values(rank) == {"random/python": [rank, 5]}
        np.testing.assert_allclose(reader.per_rank("mean", 0, 3, "mean"), np.full(3, (size - 1) / 2))
    hk.checkpoint.verify(path)
    hk.checkpoint.export_npy(path, tmp_path / "weights")
    np.testing.assert_array_equal(np.load(tmp_path / "weights" / "table.npy"), expected)
    assert hk.checkpoint.inspect(path).rank_values["random/python"][-1] == [size - 1, 5]


@pytest.mark.parametrize("rule", ["mod", "div"])
def test_parts_of_thousands_of_ranks_are_compared_without_looking_at_each_pair(rule):
    size, rows = 4096, 100_003
    ranges = (rows_of(rule, rows, rank, size) for rank in range(size))
    index = [((r.start, r.stop, r.step), (0, 8, 1)) for r in ranges]

    def saved(index):
        parts = tuple(Part(f"shard-{r}", "", i) for r, i in enumerate(index))
        return TensorEntry("sharded", (rows, 8), "float32", parts, rule)

    assert coverage_problem(saved(index)) is None
    assert "is not covered" in coverage_problem(saved(index[:-1]))
    twice = [*index[:-1], index[7]]
    assert "has elements in shard-7 and again in shard-4095" in coverage_problem(saved(twice))


# --- values that are not finite


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.complex64, ml_dtypes.float8_e5m2]
)
@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "inf"), (-2.0, None)])
def test_values_that_are_not_finite_are_found(dtype, value, shown):
    block = np.linspace(-4, 4, 1000).reshape(100, 10).astype(dtype)
    block[-1, -1] = value
    assert not_allowed(block, "finite") == shown
    assert not_allowed(block, "infinite") == (shown if shown == "nan" else None)
    assert not_allowed(block, "any") is None
    assert not_allowed(-block, "finite") == shown
    assert not_allowed(block[:0], "finite") is None


def test_the_largest_numbers_are_finite():
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        most = np.array([ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min, 0], dtype)
        assert not_allowed(most, "finite") is None
    assert not_allowed(np.array([2**31 - 1], np.int32), "finite") is None


def test_the_tensor_and_its_rows_are_named(tmp_path):
    rows = 40_000  # of 64 bytes: more than one block
    table = np.zeros((rows, 16), np.float32)
    table[rows - 5, 3] = np.inf
    tensors = [array_tensor("a", np.ones(3)), array_tensor("table", table, "finite")]
    with pytest.raises(NonFiniteTensor, match=r"table: got inf in rows 32768 to 39999, expected finite numbers"):
        write_file(tmp_path / "file", tensors)
    write_file(tmp_path / "other", [array_tensor("table", table, "infinite")])


def test_verify_finds_ranks_whose_values_are_missing(tmp_path):
    path = save_as(tmp_path / step_name(20), size=2)
    hk.checkpoint.verify(path)
    edited(path, lambda content: content["rank_values"].append("random/numpy"))
    with pytest.raises(hk.CorruptCheckpointError) as caught:
        hk.checkpoint.verify(path)
    assert all(f"lacks values of rank {rank} ('random/numpy')" in str(caught.value) for rank in (0, 1))

    def forget_rank_1(content):
        content["rank_values"].remove("random/numpy")
        del content["files"]["shard-00001-of-00002.safetensors"]

    edited(path, forget_rank_1)
    with pytest.raises(hk.CorruptCheckpointError, match=r"shard-00001-of-00002\.safetensors is not among its files"):
        hk.checkpoint.verify(path)
