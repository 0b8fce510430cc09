"""Run every example of the command line's help, as it is shown, at a small scale."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from helpers import data_files
from helpers.jobs import call, environment

from hvdkit import checkpoint
from hvdkit.commands import cli
from hvdkit.commands.new import New, new

ROOT = Path(__file__).resolve().parents[2]
# Options that make an example small, by its beginning; they go before the program.
SMALL = {
    "hvdkit bench --profile runs/profile -np 2 -- ": "--profile-steps 3-5",
    "hvdkit bench": "--steps 2 --warm-up 1 --batch 8 --no-scaling",
    "hvdkit build-horovod": "--no-install",
    "hvdkit doctor": "--no-run",  # tests/jobs/test_doctor.py starts ranks
    "hvdkit tune": "--steps 2 --warm-up 1 --rounds 1 --batch 1 --no-bucket --no-cycle --no-autotune",
}
# Examples that need several hosts or Slurm, and the tests that run such jobs.
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


def examples():
    """Return the examples of the table and of each docstring, in the order of the help."""
    found = {}
    for command in cli.COMMANDS.values():
        found[command.example] = None
        kind = pkgutil.resolve_name(command.config)
        for config in [kind] if dataclasses.is_dataclass(kind) else [get_args(one)[0] for one in get_args(kind)]:
            block = re.search(r"\nFor example:\n((?: {4}.*\n)+)", inspect.getdoc(config) + "\n")[1]
            lines = block.replace("\\\n", " ").splitlines()
            found |= dict.fromkeys(re.sub(r"(?<=\S) {2,}[^- ].*", "", line.strip()) for line in lines)
    return [re.sub(r" {2,}", " ", example) for example in found]


def scaled(example, folder, logdir="runs/other"):
    """Return the example with small numbers, a new run in ``logdir``, and the names of files that exist."""
    start = next((start for start in SMALL if example.startswith(start)), None)
    if start is not None:
        name, _, rest = example.removeprefix("hvdkit ").partition(" ")
        example = f"hvdkit {name} {SMALL[start]} {rest}"
    if example.endswith(" python train.py") and "--dry-run" not in example:
        example += f" --epochs 1 --logdir {logdir}"
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
    done = shell(scaled("hvdkit tune -np 2 --model cifar10 --save cifar10.json", folder), folder)
    assert done.returncode == 0, done.stdout
    return folder


def shell(command, folder):
    """Run a command as a user does, in bash or, for zsh's script, in zsh."""
    home = {"HOME": str(folder)} if "~" in command else {}  # the user's cache has the wheel of Horovod
    env = environment(PYTHONPATH=str(ROOT), **home)
    program = ["zsh", "-f", "-c", f"autoload -Uz compinit; compinit -u -D; {command}"] if "zsh" in command else None
    return call(program or ["bash", "-ec", command], cwd=folder, env=env, stderr=subprocess.STDOUT)


def test_each_example_is_run_or_another_test_runs_it():
    found = examples()
    assert {*ELSEWHERE, *FINDS_A_PROBLEM} <= {*found} and len(found) > 35
    assert not [example for example in found if "hvdkit" not in example.lower()]
    for name, text in ELSEWHERE.values():
        assert text in (ROOT / "tests" / "jobs" / name).read_text()


@pytest.mark.parametrize("example", [example for example in examples() if example not in ELSEWHERE])
def test_an_example_runs(folder, tmp_path, example):
    if "completion zsh" in example and shutil.which("zsh") is None:
        pytest.skip("no zsh (Debian: zsh)")
    (folder / ".local/share/bash-completion/completions").mkdir(parents=True, exist_ok=True)
    where = tmp_path if example.startswith("hvdkit new") else folder
    if example.startswith("hvdkit checkpoint export"):  # into a folder that is empty
        shutil.rmtree(folder / shlex.split(example)[5].partition("/")[0], ignore_errors=True)
    done = shell(scaled(example, folder, tmp_path / "run"), where)
    assert done.returncode == (1 if example in FINDS_A_PROBLEM else 0), done.stdout
    assert done.stdout or "completion" in example, "prints nothing"
