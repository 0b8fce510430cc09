"""Run examples of the help, as they are shown, at a small scale; tests/unit/test_cli.py parses all of them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import data_files
from helpers.help_examples import help_examples
from helpers.jobs import call, environment
from helpers.tiers import at_night

from hvdkit import checkpoint
from hvdkit.commands import cli
from hvdkit.commands.new import New, new

ROOT = Path(__file__).resolve().parents[2]
# Options that make an example small, by its beginning; they go before the program.
SMALL = {
    "hvdkit build-horovod": "--no-install",
    "hvdkit tune": "--steps 2 --warm-up 1 --rounds 1 --batch 1 --no-bucket --no-cycle --no-autotune",
}
EXAMPLES = (
    "hvdkit new my_project --form loop --cluster slurm",
    "hvdkit run -np 4 --max-restarts 3 -- python train.py",
    "hvdkit run -np 4 --dry-run -- python train.py",
    "hvdkit flight /tmp/hvdkit-flight-20261123-120000-4242.json --trace trace.json",
    "hvdkit build-horovod",
    "hvdkit checkpoint verify runs/mnist/checkpoints/step-000001200",
    "hvdkit checkpoint export runs/mnist --to served/1 --format saved-model --model train:build_model",
    "hvdkit data inspect clicks/ --ranks 64",
    "hvdkit data index 'images/train-*'",
    "HVDKIT_TUNED=cifar10.json horovodrun -np 2 python train.py",
    "hvdkit plan --measured cifar10.json --ranks 8..4096 --bandwidth 25Gbit",
)
TUNE = "hvdkit tune -np 2 --model cifar10 --save cifar10.json"  # writes what examples with its file read
SLOW = {EXAMPLES[0], EXAMPLES[1], *(example for example in EXAMPLES if "cifar10.json" in example)}
# Commands, and examples that need several hosts or Slurm, which other files of tests run.
COMMANDS_ELSEWHERE = {"bench": "jobs/test_bench_command.py", "doctor": "jobs/test_doctor.py"}
COMMANDS_ELSEWHERE["docs"] = "unit/test_docs_command.py"
COMMANDS_ELSEWHERE["check"] = "jobs/test_check_command.py"
ELSEWHERE = {
    "hvdkit run -H node1:4,node2:4 -- python train.py": ("test_run_on_hosts.py", '"run", "-H", hosts.list'),
    "hvdkit run --slurm -- python train.py": ("test_slurm.py", "hvdkit run --slurm --engine mpirun"),
}
FINDS_A_PROBLEM = {"hvdkit data inspect clicks/ --ranks 64"}  # exit code 1, with a remedy
FLIGHT = "/tmp/hvdkit-flight-20261123-120000-4242.json"
STEP = "step-000001200"
HANGS = """
import hvdkit as hk
hk.init()
hk.allreduce(1.0)
if hk.rank() == 1:
    raise SystemExit(3)
hk.allreduce(2.0)
"""


def scaled(example, folder, logdir="runs/other"):
    """Return the example with small numbers, a new run in ``logdir``, and the names of files that exist."""
    start = next((start for start in SMALL if example.startswith(start)), None)
    if start is not None:
        name, _, rest = example.removeprefix("hvdkit ").partition(" ")
        example = f"hvdkit {name} {SMALL[start]} {rest}"
    if example.endswith(" python train.py") and "--dry-run" not in example:
        example += f" --epochs 1 --logdir {logdir}"
        example = example.replace("run -np 4 ", "run -np 2 ")
    newest = checkpoint.latest(folder / "runs" / "mnist")
    return example.replace(FLIGHT, str(folder / "flight.json")).replace(STEP, newest.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with what the examples name: a project and its run, data files, a flight recorder's file."""
    folder = tmp_path_factory.mktemp("examples") / "project"
    new(New(path=folder, form="loop"))
    env = environment(PYTHONPATH=str(ROOT))
    train = [sys.executable, "train.py", "--epochs", "1", "--logdir", "runs/mnist"]
    assert call(train, cwd=folder, env=env).returncode == 0
    for name, write in (("clicks/a", data_files.write_parquet), ("logs/day_1", data_files.write_criteo)):
        (folder / name).parent.mkdir()
        write(folder / f"{name}.parquet" if "clicks" in name else folder / name, range(40))
    (folder / "images").mkdir()
    data_files.write_tfrecord(folder / "images" / "train-0", range(40))
    (folder / "fails.py").write_text(HANGS)
    run = [sys.executable, "-m", "hvdkit", "run", "-np", "2", "--", sys.executable, "fails.py"]
    done = call(run, cwd=folder, env=env)
    flight = re.search(r"^flight recorder: (\S+) .*; see `hvdkit docs failures`$", done.stderr, re.MULTILINE)
    assert done.returncode != 0 and flight, done.stderr
    shutil.move(flight[1], folder / "flight.json")
    return folder


@pytest.fixture(scope="module")
def tuned(folder):
    """Write what examples with the file of `hvdkit tune` read."""
    done = shell(scaled(TUNE, folder), folder)
    assert done.returncode == 0, done.stdout


def shell(command, folder):
    """Run a command in bash, as a user does."""
    home = {"HOME": str(folder)} if "~" in command else {}  # the user's cache has the wheel of Horovod
    env = environment(PYTHONPATH=str(ROOT), **home)
    return call(["bash", "-ec", command], cwd=folder, env=env, stderr=subprocess.STDOUT)


@pytest.mark.core
def test_each_command_is_run_here_or_by_another_file():
    found = help_examples()
    assert {*EXAMPLES, TUNE, *ELSEWHERE} <= {*found}
    run = {example.split()[1] for example in (*EXAMPLES, TUNE) if example.startswith("hvdkit ")}
    assert run | {*COMMANDS_ELSEWHERE} == {*cli.COMMANDS}
    assert all((ROOT / "tests" / path).exists() for path in COMMANDS_ELSEWHERE.values())
    for name, text in ELSEWHERE.values():
        assert text in (ROOT / "tests" / "jobs" / name).read_text()


@pytest.mark.parametrize("example", at_night(EXAMPLES, but=[each for each in EXAMPLES if each not in SLOW]))
def test_an_example_runs(folder, tmp_path, example, request):
    if "cifar10.json" in example:
        request.getfixturevalue("tuned")
    where = tmp_path if example.startswith("hvdkit new") else folder
    if example.startswith("hvdkit checkpoint export"):  # into a folder that is empty
        shutil.rmtree(folder / shlex.split(example)[5].partition("/")[0], ignore_errors=True)
    done = shell(scaled(example, folder, tmp_path / "run"), where)
    assert done.returncode == (1 if example in FINDS_A_PROBLEM else 0), done.stdout
    assert done.stdout, "prints nothing"
