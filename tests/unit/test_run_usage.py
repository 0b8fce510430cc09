"""``hvdkit run`` where it starts nothing: wrong usage, and dry runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from hvdkit.cluster import engine
from hvdkit.commands.cli import main
from hvdkit.commands.run.host_probe import temporary_problem
from hvdkit.machine.launcher import ALONE

WRONG = (
    (["-np", "2", "--"], "program: got none"),
    (["-np", "2", "--", "no-such-program"], "program: got no-such-program"),
    (["-np", "3", "--", "train.py", "--lr", "1"], "write: hvdkit run -np 3 -- python train.py --lr 1"),
    (["-np", "2", "no_such.py"], "has no such file, and write: hvdkit run -np 2 -- python no_such.py"),
    (["train.py", "-np", "3"], "write: hvdkit run -np 3 -- python train.py"),
    (["train.py"], "write: hvdkit run -np 2 -- python train.py"),
    (["-n", "2", "python", "x.py"], "did you mean: hvdkit run -np 2 -- python x.py"),
    (["-np2", "python", "x.py"], "did you mean: hvdkit run -np 2 -- python x.py"),
    (["--hlep"], "did you mean: hvdkit run --help"),
    (["--hlep", "--", "python", "x.py"], "did you mean: hvdkit run --help -- python x.py"),
    (["--hlep", "-np", "2", "--", "python", "x.py"], "did you mean: hvdkit run --help -np 2 -- python x.py"),
    (["--verbose", "-np", "2", "python"], "Unrecognized options: --verbose"),
    (["-np", "two", "python"], "-np: got two, expected a whole number"),
    (["--grace", "long", "python"], "--grace: got long, expected a number"),
    (["-np", "two", "python"], "for example: hvdkit run -np 4 -- python train.py"),
    (["-np", "0", "python"], "for example: hvdkit run -np 4 -- python train.py"),
    (["--", "python"], "-np: got none"),
    (["-np", "100000", "--", "python"], "-H localhost:100000 to start them all the same"),
    (["-np", "3", "-H", "localhost:2", "--", "python"], "-np: got 3, expected at most 2 ranks (localhost:2)"),
    (["-np", "2", "-H", "no-such-host.invalid:2", "--", "python"], "no-such-host.invalid: its name is unknown"),
    (["-np", "2", "--hostfile", "none", "--", "python"], "--hostfile: got none (No such file or directory)"),
    (["-H", "localhost:2", "--min-np", "3", "--", "python"], "--min-np: got 3"),
    (["-np", "2", "--slurm", "--", "python"], "--slurm: got no SLURM_JOB_NODELIST"),
    (["-np", "2", "--env", "NOT_SET_ANYWHERE", "--", "python"], "--env: got NOT_SET_ANYWHERE"),
    (["-np", "2", "--logs", "/dev/null/x", "--", "python"], "--logs: got /dev/null/x"),
    (["-np", "2", "--metrics-port", "abc", "--", "python"], "--metrics-port: got abc, expected a port from 0 to 65535"),
    (["-np", "2", "--metrics-port", "70000", "--", "python"], "--metrics-port: got 70000, expected a port"),
    (["-np", "2", "--metrics-port", "192.0.2.1:0", "--", "python"], "--metrics-port: got 192.0.2.1:0 ("),
)


def test_wrong_usage_is_told_before_anything_starts(capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for arguments, words in WRONG:
        assert main(["run", *arguments]) == 2, arguments
        assert words in capsys.readouterr().err, arguments


def test_a_script_is_run_by_this_interpreter(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for arguments in (["-np", "2"], ["-np", "2", "--"]):
        assert main(["run", "--dry-run", *arguments, "train.py", "--lr", "1"]) == 0
        assert capsys.readouterr().out.endswith(f"{sys.executable} train.py --lr 1\n")
    assert main(["run", "train.py", "-np", "2"]) == 2
    error = capsys.readouterr().err
    assert "program: got train.py -np 2, expected options before the program" in error
    assert "write: hvdkit run -np 2 -- python train.py" in error


def test_options_of_the_script_before_the_script(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.py").write_text("parser.add_argument('--epochs'); parser.add_argument('--logdir')\n")
    write = "write: hvdkit run -np 2 -- python story.py"
    for arguments, expected in (
        ("-np 2 --epochs 3 story.py", f"{write} --epochs 3"),
        ("-np 2 --epochs 3 -- story.py", f"{write} --epochs 3"),
        ("-np 2 --epochs=3 story.py", f"{write} --epochs=3"),
        ("--epochs 3 -np 2 python story.py", f"{write} --epochs 3"),
        ("-np 2 --epochs 3 story.py --lr 0.1", f"{write} --lr 0.1 --epochs 3"),
        ("-np 2 --verbose story.py --lr 0.1", f"{write} --lr 0.1 --verbose"),
        ("-np 2 --verbose python story.py", f"{write} --verbose"),
        ("--epochs 3 story.py -np 2", f"{write} --epochs 3"),
        ("-n 2 --epochs 3 story.py", f"{write} --epochs 3"),
        (
            "-np 2 --name 'a b' --epochs 3 story.py",
            "write: hvdkit run -np 2 --name 'a b' -- python story.py --epochs 3",
        ),
        ("-np 2 --logdir runs/x story.py", f"{write} --logdir runs/x"),  # not a misspelled --logs
        ("-np 2 --epochs 3", "for example: hvdkit run -np 4 -- python train.py"),
    ):
        assert main(["run", *shlex.split(arguments)]) == 2, arguments
        error = capsys.readouterr().err
        assert expected == error.rstrip().splitlines()[-1].partition(" (")[0], (arguments, error)
        if "write: " in expected:
            option = next(word for word in expected.split() if word.startswith(("--e", "--v", "--logd")))
            assert error.startswith(f"hvdkit run: no option {option.partition('=')[0]}; "), error
            command = shlex.split(expected.partition("hvdkit ")[2])
            assert main([command[0], "--dry-run", *command[1:]]) == 0
            capsys.readouterr()
    assert main(["check", "-np", "2", "--epochs", "3", "story.py"]) == 2
    assert "write: hvdkit check -np 2 -- story.py --epochs 3" in capsys.readouterr().err


def test_a_dry_run_starts_nothing(capsys, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    assert main(["run", "-np", "2", "--dry-run", "--engine", "mpirun", "--env", "MY_TOKEN", "--", "python", "a b"]) == 0
    shown = capsys.readouterr().out
    assert "mpirun -np 2 " in shown and "-x MY_TOKEN" in shown and shown.endswith("python 'a b'\n")
    assert "s3cret" not in shown
    assert main(["run", "-np", "2", "--dry-run", "--engine", "gloo", "--", "python", "train.py"]) == 0
    assert re.fullmatch(r"\S*horovodrun --gloo -np 2 python train\.py\n", capsys.readouterr().out)


def test_a_full_disk_is_named_before_anything_starts(capsys, monkeypatch, tmp_path):
    """Open MPI failed after 70 s with lines of PMIx, none of which named the disk."""
    monkeypatch.setenv("TMPDIR", "/dev/null/x")
    command = ["run", "-np", "2", "--engine", "mpirun", "--", "true"]
    assert main(command) == 2
    named = "TMPDIR: got /dev/null/x (Not a directory), expected a folder for temporary files that can be written"
    assert named in capsys.readouterr().err
    (tmp_path / "read-only").mkdir(mode=0o555)
    for folder, missing, needed in (("", 0, 16 << 20), ("not/yet", 0, 16 << 20), ("read-only", os.geteuid(), 4096)):
        problem = temporary_problem({"TMPDIR": str(tmp_path / folder)}, needed)
        assert (problem is not None) == bool(missing), problem
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=True)
    try:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        assert main(command) == 2
        written = capsys.readouterr().err
        assert f"TMPDIR: got {tmp_path} (No space left on device)" in written
        assert "with 16 MiB of free space; free space there, or export TMPDIR=/another/folder" in written
        assert not list(tmp_path.iterdir())
        monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(tmp_path))  # as in a rank of plain mpirun
        for used, words in ((0, ""), (1 << 20, f"the disk of {tmp_path} is full, where Open MPI writes")):
            with (tmp_path / "used").open("wb") as file:
                file.write(bytes(used))
            engine._warn_of_full_disk(ALONE)
            written = capsys.readouterr().err
            assert words in written and bool(words) == bool(written)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
