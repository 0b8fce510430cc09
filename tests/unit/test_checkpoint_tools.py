"""inspect, verify and export: correct for intact checkpoints, and reporting all damage. No ranks are started."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from helpers.faults import edited, flip
from helpers.instructions import instructions
from helpers.jobs import call, environment, without
from helpers.speed import WAIT

import hvdkit as hk
from hvdkit.checkpoint.entries import State, StateTensor
from hvdkit.checkpoint.folder import record_damage
from hvdkit.checkpoint.inspection import Inspection, Listing
from hvdkit.checkpoint.matching import match
from hvdkit.checkpoint.tensor_entry import Part, TensorEntry, coverage_problem
from hvdkit.checkpoint.tensorfile import BLOCK_BYTES, TensorFile
from hvdkit.checkpoint.verifying import bytes_to_verify
from hvdkit.checkpoint.writing import Save, Snapshot
from hvdkit.commands import cli
from hvdkit.sharding.partition import rows_of

SIZE = 3
WIDE = 2500  # rows of 4 KiB: about 10 blocks of 1 MiB
RNG = np.random.default_rng(5)
GLOBAL = {
    "model/kernel": RNG.normal(size=(3, 5)).astype(np.float32),
    "model/wide": RNG.normal(size=(WIDE, 1024)).astype(np.float32),
    "model/half": RNG.normal(size=(7,)).astype(ml_dtypes.bfloat16),
    "model/count": np.array(41, np.int64),
    "model/none": np.zeros((0, 4), np.float16),
    "tables/mod": RNG.normal(size=(WIDE, 1024)),
    "tables/div": np.arange(20, dtype=np.int32).reshape(10, 2),
    "tables/few": np.array([[1.5], [2.5]], np.float32),
    "tables/columns": np.arange(28, dtype=np.float32).reshape(4, 7),
    "tables/empty": np.zeros((0, 3), np.float32),
}
CUT = {"tables/mod": ("mod", 0), "tables/div": ("div", 0), "tables/few": ("mod", 0), "tables/columns": ("div", 1)}
CUT["tables/empty"] = ("mod", 0)
VALUES = {"position": {"global_step": 12, "data": {"epoch": 1, "seen": [1, 2]}}}


def tensor_of(name: str, rank: int) -> StateTensor:
    array = GLOBAL[name]
    if name not in CUT:
        return StateTensor(name, "replicated", array.dtype, array.shape, lambda: array, lambda _: None)
    rule, axis = CUT[name]
    index = [range(n) for n in array.shape]
    index[axis] = rows_of(rule, array.shape[axis], rank, SIZE)
    mine = array[np.ix_(*index)]
    cut = {"index": tuple(index), "partition": rule}
    return StateTensor(name, "sharded", array.dtype, array.shape, lambda: mine, lambda _: None, **cut)


def seed_of(rank: int) -> StateTensor:
    return StateTensor("seed/a b", "per_rank", np.dtype(np.uint32), (2,), lambda: np.array([rank, 9], np.uint32), print)


def write(target: Path, step: int) -> Path:
    """Save as three ranks do, in threads that exchange only files."""
    saves = []
    for rank in range(SIZE):
        state = State({e.name: e for e in [*(tensor_of(name, rank) for name in GLOBAL), seed_of(rank)]})
        snapshot = Snapshot.of(state, rank)
        snapshot.values, snapshot.rank_values = dict(VALUES), {"random/python": [rank]}
        saves.append(Save(target, snapshot, step=step, rank=rank, size=SIZE, token="t").start())
    for save in saves:
        assert save.wait(WAIT)
        assert save.error is None, save.error
    return target


@pytest.fixture
def logdir(tmp_path):
    """Return a run with two checkpoints."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for step in (4, 12):
        write(tmp_path / "run" / "checkpoints" / f"step-{step:09d}", step)
    return tmp_path / "run"


@pytest.fixture
def one(tmp_path):
    return write(tmp_path / "step-000000012", 12)


def offset(path: Path, name: str, row: int) -> int:
    """Return the offset of a tensor's row in a file."""
    with TensorFile(path) as file:
        location = file.locations[name]
        return file._data + location.start + row * location.row_bytes


# --- inspect


def test_a_checkpoint_is_described(one):
    found = hk.checkpoint.inspect(one)
    assert isinstance(found, Inspection)
    assert (found.step, found.ranks, found.damage) == (12, SIZE, None)
    assert found.bytes == sum(p.stat().st_size for p in one.glob("*.safetensors"))
    assert found.versions["hvdkit"] == hk.__version__
    by_name = {v.name: v for v in found.variables}
    assert list(by_name) == [*GLOBAL, "seed/a b"]
    for name, array in GLOBAL.items():
        v = by_name[name]
        assert (v.shape, v.dtype, v.bytes) == (array.shape, array.dtype.name, array.nbytes)
        assert (v.kind, v.partition) == (("sharded", CUT[name][0]) if name in CUT else ("replicated", None))
    assert [by_name[n].parts for n in ("model/wide", "tables/mod", "tables/few", "tables/empty")] == [1, 3, 2, 0]
    assert (by_name["seed/a b"].kind, by_name["seed/a b"].bytes) == ("per_rank", SIZE * 8)
    assert found.values == VALUES
    assert found.rank_values == {"random/python": [[0], [1], [2]]}
    json.dumps(found.as_dict())


def test_the_table_shows_it_in_aligned_columns(one):
    lines = str(hk.checkpoint.inspect(one)).splitlines()
    assert lines[0] == str(one)
    assert lines[1].startswith("step 12, saved by 3 ranks, ")
    (row,) = [line for line in lines if line.startswith("tables/mod")]
    assert re.fullmatch(r"tables/mod +sharded mod +2500 x 1024 +float64 +20\.5 MB", row)
    assert any(re.fullmatch(r"position/global_step +12", line) for line in lines)
    assert any(re.fullmatch(r"model/count +replicated +scalar +int64 +8 B", line) for line in lines)
    start = lines.index("") + 1
    assert len({line.index("float") for line in lines[start:] if " float" in line}) == 1
    assert lines[-1] == "one per rank: random/python"


def test_a_run_is_listed_with_what_is_damaged(logdir):
    first, second = sorted((logdir / "checkpoints").iterdir())
    third = write(logdir / "checkpoints" / "step-000000020", 20)
    flip(first / "manifest.json", 40)
    record_damage(third, "row 7 is damaged")
    found = hk.checkpoint.inspect(logdir)
    assert isinstance(found, Listing)
    assert [c.path for c in found.checkpoints] == [first, second, third]
    assert [(c.step, c.ranks) for c in found.checkpoints] == [(None, None), (12, 3), (20, 3)]
    assert "manifest.json" in found.checkpoints[0].damage
    assert found.checkpoints[1].damage is None
    assert found.checkpoints[2].damage == "row 7 is damaged"
    assert len(found.as_dict()["checkpoints"]) == 3
    assert [line.split()[0] for line in str(found).splitlines()[3:]] == [first.name, second.name, third.name]
    assert str(found).count("DAMAGED") == 2
    assert str(hk.checkpoint.inspect(logdir / "checkpoints")) == str(found)


def test_a_missing_file_shows_without_reading_tensors(one):
    (one / "shard-00001-of-00003.safetensors").unlink()
    found = hk.checkpoint.inspect(one)
    assert "shard-00001-of-00003.safetensors: missing" in found.damage
    assert "DAMAGED" in str(found)


@pytest.mark.parametrize(
    ("what", "remedy"),
    [("nowhere", "correct the path$"), ("empty", "correct the path, or, .* wait for its first save$")],
)
def test_no_checkpoint_is_an_error_with_the_remedy(tmp_path, what, remedy):
    (tmp_path / "empty").mkdir()
    for tool in (hk.checkpoint.inspect, hk.checkpoint.verify, lambda p: hk.checkpoint.export_npy(p, tmp_path / "to")):
        with pytest.raises(hk.CheckpointError, match=f"{what}.*; {remedy}"):
            tool(tmp_path / what)


# --- verify


def test_what_is_whole_is_counted(logdir):
    told = []
    read = hk.checkpoint.verify(logdir, progress=told.append)
    held = sum(a.nbytes for a in GLOBAL.values()) + SIZE * 8
    assert (read.checkpoints, read.files, read.bytes) == (2, 2 * 4, 2 * held)
    assert sum(told) == bytes_to_verify(logdir) == 2 * held
    assert max(told) <= BLOCK_BYTES
    # 5 replicated, 3 + 3 + 2 + 3 + 0 sharded parts, 3 seeds
    assert read.tensors == 2 * 19
    assert str(read).startswith("intact: 2 checkpoint(s), 8 file(s), 38 tensor part(s), 61")


def test_all_damage_is_told_with_file_tensor_and_rows(logdir):
    first, second = sorted((logdir / "checkpoints").iterdir())
    shard = first / "shard-00000-of-00003.safetensors"
    flip(shard, offset(shard, "tables/mod", 300))
    flip(shard, offset(shard, "tables/mod", 310))
    flip(shard, offset(shard, "tables/mod", 700))
    flip(shard, offset(shard, "tables/div", 1))
    (first / "shard-00001-of-00003.safetensors").unlink()
    flip(second / "replicated.safetensors", 60)
    with pytest.raises(hk.CorruptCheckpointError) as caught:
        hk.checkpoint.verify(logdir)
    assert sorted(str(caught.value).splitlines()) == sorted(
        [
            f"{first}/shard-00001-of-00003.safetensors: missing, though manifest.json names it",
            f"{shard}: 'tables/mod' is damaged in rows 256 to 383 (checksum differs)",
            f"{shard}: 'tables/mod' is damaged in rows 640 to 767 (checksum differs)",
            f"{shard}: 'tables/div' is damaged in rows 0 to 3 (checksum differs)",
            f"{second}/replicated.safetensors: its header is damaged (checksum differs)",
        ]
    )


def test_neighbouring_blocks_are_one_run(one):
    shard = one / "replicated.safetensors"
    for row in (0, 256, 512, 2499):
        flip(shard, offset(shard, "model/wide", row))
    with pytest.raises(hk.CorruptCheckpointError) as caught:
        hk.checkpoint.verify(one)
    assert re.findall(r"rows \d+ to \d+", str(caught.value)) == ["rows 0 to 767", "rows 2304 to 2499"]


def test_a_file_that_was_cut_short_names_the_rows_that_are_gone(one):
    shard = one / "shard-00002-of-00003.safetensors"
    whole, cut = shard.stat().st_size, offset(shard, "tables/mod", 500)
    with shard.open("r+b") as file:
        file.truncate(cut)
    with pytest.raises(hk.CorruptCheckpointError) as caught:
        hk.checkpoint.verify(one)
    told = str(caught.value)
    assert f"{shard}: has {cut} bytes, but {whole} were written" in told
    assert f"{shard}: 'tables/mod' is damaged in rows 384 to 832" in told
    assert "shard-00001" not in told and "replicated" not in told


def test_an_edited_manifest_is_told(one):
    file = one / "manifest.json"
    file.write_text(file.read_text().replace('"step": 12', '"step": 13'))
    with pytest.raises(hk.CorruptCheckpointError, match=r"manifest\.json: was changed after it was written"):
        hk.checkpoint.verify(one)


def test_a_manifest_and_a_file_of_two_saves_do_not_fit(one, tmp_path, monkeypatch):
    monkeypatch.setitem(GLOBAL, "model/kernel", GLOBAL["model/kernel"] + 1)
    other = write(tmp_path / "step-000000013", 13)
    (other / "replicated.safetensors").replace(one / "replicated.safetensors")
    with pytest.raises(hk.CorruptCheckpointError, match=r"replicated\.safetensors: its header is damaged"):
        hk.checkpoint.verify(one)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([((0, 4, 1), (0, 3, 1)), ((4, 6, 1), (0, 3, 1))], None),
        ([((0, 6, 2), (0, 3, 1)), ((1, 6, 2), (0, 3, 1))], None),
        ([((0, 6, 1), (0, 1, 1)), ((0, 6, 1), (1, 3, 1))], None),
        ([((0, 6, 2), (0, 3, 1)), ((1, 6, 2), (0, 2, 1)), ((1, 6, 2), (2, 3, 1)), ((6, 6, 1), (0, 3, 1))], None),
        ([((0, 4, 1), (0, 3, 1))], "6 of 18 elements are in no file"),
        ([((0, 4, 1), (0, 3, 1)), ((3, 5, 1), (0, 3, 1))], "in f0 and again in f1"),
        ([((0, 6, 2), (0, 3, 1)), ((0, 6, 3), (0, 3, 1))], "in f0 and again in f1"),
        ([((0, 7, 1), (0, 3, 1))], "lies outside"),
        ([((0, 6, 1),)], "lies outside"),
        ([], "18 of 18 elements are in no file"),
    ],
)
def test_parts_cover_a_tensor_exactly_once(parts, told):
    saved = TensorEntry(
        "sharded", (6, 3), "float32", tuple(Part(f"f{i}", "", index) for i, index in enumerate(parts)), "x"
    )
    assert (coverage_problem(saved) or "") == "" if told is None else told in coverage_problem(saved)


def test_verify_tells_of_parts_that_do_not_cover(one):
    def change(content):
        for name in ("tables/div", "seed/a b"):
            del content["variables"][name]["parts"][2]

    edited(one, change)
    with pytest.raises(hk.CorruptCheckpointError) as caught:
        hk.checkpoint.verify(one)
    assert "'tables/div', int32[10, 2] (sharded div), is not covered: 6 of 20 elements" in str(caught.value)
    assert "'seed/a b', uint32[2] (per_rank), has 2 parts, expected 3" in str(caught.value)


# --- export to .npy


def test_every_tensor_comes_back_in_global_order(one, tmp_path):
    told = []
    files = hk.checkpoint.export_npy(one, tmp_path / "to", progress=told.append)
    for name, array in GLOBAL.items():
        read = np.load(tmp_path / "to" / f"{name}.npy")
        expected = array.astype(np.float32) if name == "model/half" else array
        assert (read.shape, read.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(read, expected)
    for rank in range(SIZE):
        seed = np.load(tmp_path / "to" / "seed" / f"a%20b.rank{rank:05d}.npy")
        np.testing.assert_array_equal(seed, np.array([rank, 9], np.uint32))
    values = json.loads((tmp_path / "to" / "values.json").read_text())
    assert values == {"step": 12, "values": VALUES, "rank_values": {"random/python": [[0], [1], [2]]}}
    there = {p for p in (tmp_path / "to").rglob("*") if p.is_file()}
    assert there == {*files} and len(files) == len(GLOBAL) + SIZE + 1
    assert sum(told) == sum(a.nbytes for a in GLOBAL.values()) + 7 * 2 + SIZE * 8  # bfloat16 doubles


def test_chosen_names_of_the_newest_whole_checkpoint_of_a_run(logdir, tmp_path):
    (logdir / "checkpoints" / "step-000000012" / "replicated.safetensors").unlink()
    files = hk.checkpoint.export_npy(logdir, tmp_path / "to", ["model/k*", "tables/few"])
    assert [p.relative_to(tmp_path / "to").as_posix() for p in files] == [
        "model/kernel.npy",
        "tables/few.npy",
        "values.json",
    ]
    assert json.loads(files[-1].read_text())["step"] == 4
    with pytest.raises(ValueError, match=r"names: got 'modle', expected .*model/kernel"):
        hk.checkpoint.export_npy(logdir, tmp_path / "other", ["modle"])
    assert not (tmp_path / "other").exists()


def test_a_folder_with_something_in_it_is_refused(one, tmp_path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").write_text("dear")
    with pytest.raises(ValueError, match=r"directory: got .*not empty.*--overwrite"):
        hk.checkpoint.export_npy(one, tmp_path / "to")
    assert [p.name for p in (tmp_path / "to").iterdir()] == ["mine"]
    hk.checkpoint.export_npy(one, tmp_path / "to", overwrite=True)
    assert (tmp_path / "to" / "mine").read_text() == "dear"
    assert (tmp_path / "to" / "model" / "kernel.npy").exists()


def test_a_damaged_tensor_leaves_no_file(one, tmp_path):
    shard = one / "shard-00001-of-00003.safetensors"
    flip(shard, offset(shard, "tables/mod", 600))
    with pytest.raises(hk.CorruptCheckpointError, match=r"shard-00001.*'tables/mod' is damaged in rows 512 to 639"):
        hk.checkpoint.export_npy(one, tmp_path / "to", ["tables/*"])
    assert not [p for p in (tmp_path / "to").rglob("*") if "mod" in p.name]


def test_verify_and_export_take_bounded_memory(one, tmp_path):
    """The two large tensors have 10 and 20 MB; at most three pieces of 8 MiB are in memory."""
    tracemalloc.start()
    try:
        hk.checkpoint.verify(one)
        verified = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        hk.checkpoint.export_npy(one, tmp_path / "to")
        exported = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert verified < 3 * BLOCK_BYTES
    assert exported < 25 * BLOCK_BYTES


# --- the command line


def hvdkit(*arguments: object) -> int:
    return cli.main(["checkpoint", *map(str, arguments)])


def test_inspect_on_the_command_line(logdir, capsys):
    assert hvdkit("inspect", logdir) == 0
    assert capsys.readouterr().out == f"{hk.checkpoint.inspect(logdir)}\n"
    newest = logdir / "checkpoints" / "step-000000012"
    assert hvdkit("inspect", newest, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["ranks"], shown["damage"]) == (12, SIZE, None)
    assert shown["values"] == VALUES
    table = next(v for v in shown["variables"] if v["name"] == "tables/columns")
    assert table == {
        "name": "tables/columns",
        "kind": "sharded",
        "shape": [4, 7],
        "dtype": "float32",
        "partition": "div",
        "parts": 3,
        "bytes": 112,
    }
    assert hvdkit("inspect", logdir, "--json") == 0
    assert [c["step"] for c in json.loads(capsys.readouterr().out)["checkpoints"]] == [4, 12]


def test_exit_codes_of_verify(logdir, capsys):
    assert hvdkit("verify", logdir) == 0
    assert capsys.readouterr().out.startswith("intact: 2 checkpoint(s)")
    shard = logdir / "checkpoints" / "step-000000004" / "shard-00000-of-00003.safetensors"
    flip(shard, offset(shard, "tables/mod", 0))
    assert hvdkit("verify", logdir) == 1
    assert capsys.readouterr() == (f"{shard}: 'tables/mod' is damaged in rows 0 to 127 (checksum differs)\n", "")
    assert hvdkit("verify", logdir / "nowhere") == 2
    assert "nowhere, which does not exist" in capsys.readouterr().err


def test_export_on_the_command_line(one, tmp_path, capsys):
    assert hvdkit("export", one, "--to", tmp_path / "to", "--names", "tables/*") == 0
    assert capsys.readouterr().out == f"{tmp_path}/to: 5 .npy file(s) and values.json\n"
    np.testing.assert_array_equal(np.load(tmp_path / "to" / "tables" / "columns.npy"), GLOBAL["tables/columns"])
    assert hvdkit("export", one, "--to", tmp_path / "to") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert hvdkit("export", one, "--to", tmp_path / "to", "--overwrite") == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--format", "saved-model"], "pass both --format saved-model and --model"),
        (["--model", "a:b"], "pass both --format saved-model and --model"),
        (["--format", "saved-model", "--model", "ab"], "expected module:function"),
        (["--format", "saved-model", "--model", "json:nothing"], "expected a function of json"),
        (["--format", "saved-model", "--model", "a:b", "--names", "c"], "names: got"),
    ],
)
def test_wrong_arguments_of_export(one, tmp_path, capsys, arguments, told):
    assert hvdkit("export", one, "--to", tmp_path / "to", *arguments) == 2
    assert told in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert not (tmp_path / "to").exists()


def test_the_tools_import_no_tensorflow(one, tmp_path):
    """Nor Horovod or MPI: the tools run on machines that only have the files."""
    code = """
import sys
from hvdkit.commands.cli import main
checkpoint, to = sys.argv[1:]
for arguments in (["inspect", checkpoint], ["verify", checkpoint], ["export", checkpoint, "--to", to]):
    assert main(["checkpoint", *arguments]) == 0, arguments
"""
    code = without("tensorflow", "keras", "horovod", "mpi4py") + code
    done = call([sys.executable, "-c", code, one, tmp_path / "to"])
    assert done.returncode == 0, done.stderr
    assert "intact: 1 checkpoint(s)" in done.stdout and (tmp_path / "to" / "values.json").exists()


def test_a_bar_is_shown_on_a_terminal_only(one):
    """The bar goes to stderr, here a terminal of 80 columns; stdout has only the result."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "hvdkit", "checkpoint", "verify", str(one)]
    done = subprocess.run(command, env=environment(TERM="xterm"), stdout=subprocess.PIPE, stderr=follower, timeout=WAIT)
    os.close(follower)
    shown = os.read(leader, 2**16).decode()
    os.close(leader)
    assert done.returncode == 0
    assert done.stdout.startswith(b"intact: ") and done.stdout.count(b"\n") == 1
    assert "reading" in shown and "MB" in shown


def test_matching_costs_the_same_for_each_key():
    """A checkpoint of 2,000 arrays, each with its own key, took most of its restore to find them."""
    costs = []
    for keys in (100, 400):
        names = [f"array-{number}" for number in range(keys)]
        float32 = np.dtype(np.float32)
        tensors = {name: StateTensor(name, "replicated", float32, (2,), list, lambda _: None) for name in names}
        variables = {name: TensorEntry("replicated", (2,), "float32", ()) for name in names}
        manifest = SimpleNamespace(variables=variables, values={}, rank_values={})
        found = match(manifest, State(tensors=tensors), Path("x"))
        assert found == dict(zip(names, names, strict=True))
        costs.append(instructions(lambda: match(manifest, State(tensors=tensors), Path("x"))))  # noqa: B023
    assert costs[1] < 5 * costs[0], costs
