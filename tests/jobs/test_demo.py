"""The output of ``models/train.py``: whole lines, each with one tag, and a progress bar only on a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from helpers.jobs import environment
from helpers.speed import STALL

ROOT = Path(__file__).parents[2]
LIMIT = 0.8 * STALL  # seconds after which a job counts as hung
TRAIN = (sys.executable, str(ROOT / "models" / "train.py"))
SHORT = ("cifar10", "--steps", "20", "--batch-size", "16")
ALONE, MPIRUN = (), ("mpirun", "-np", "2")
HOROVODRUN, HVDKIT_RUN = ("horovodrun", "-np", "2"), (sys.executable, "-m", "hvdkit", "run", "-np", "2", "--")
# Each launcher's tag of a line of rank 0. Lines without a tag are the launcher's own, e.g. the startup messages of the
# TensorFlow that horovodrun itself loads.
TAG = {ALONE: "", MPIRUN: "", HOROVODRUN: r"\[1,0\]<std(?:out|err)>:", HVDKIT_RUN: r"\[rank 0\] "}
NAMES = {ALONE: "alone", MPIRUN: "mpirun", HOROVODRUN: "horovodrun", HVDKIT_RUN: "hvdkit run"}
NOISE = re.compile(r"absl::InitializeLog|oneDNN|cpu_feature_guard|To enable the following|^\S*\s*I0000", re.MULTILINE)


def without_terminal(*command, **extra):
    """Run ``command``; return its exit code and its output."""
    env = environment(PYTHONPATH=str(ROOT), **extra)
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT
    )
    return done.returncode, done.stdout.decode(errors="replace")


def on_terminal(*command, **extra):
    """Run ``command`` on a terminal of 100 columns; return its exit code and its output."""
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    env = environment(PYTHONPATH=str(ROOT), **{"TERM": "xterm-256color", **extra})
    env.pop("NO_COLOR", None) if "NO_COLOR" not in extra else None
    with subprocess.Popen(command, env=env, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        written = bytearray()
        try:
            while data := os.read(screen, 65536):
                written += data
        except OSError:  # the last writer has exited
            pass
        os.close(screen)
        return process.wait(timeout=LIMIT), written.decode(errors="replace")


def of_rank_0(launcher, output):
    """Return the lines of rank 0 without their tags."""
    tag = re.compile(TAG[launcher])
    return [tag.sub("", line, count=1) for line in output.splitlines() if tag.match(line)]


def shown(written):
    """Return the lines that remain on a terminal, without colors and cursor movements."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in written.split("\n")]
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in lines]


STARTING = re.compile(r"hvdkit run: starting 2 ranks with \w+ on this host, which has \d+ (core|GPU)s?.*")
AT_NIGHT = [pytest.param(launcher, marks=pytest.mark.nightly, id=NAMES[launcher]) for launcher in (HOROVODRUN, MPIRUN)]


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [HVDKIT_RUN, AT_NIGHT[0]], ids=NAMES.get)
def test_without_a_terminal_training_is_plain_lines_with_one_tag(launcher):
    code, output = without_terminal(*launcher, *TRAIN, *SHORT)
    lines = of_rank_0(launcher, output)
    assert code == 0 and "\x1b" not in output, output
    assert not [line for line in lines if not line or line.startswith("[") or NOISE.search(line)], output
    expected = [
        "digits: 1437 training images, 16 per step over 2 ranks",
        "training begins at step 0",
        "step 10, loss = ",
        "step 20, loss = ",
        "trained 20 steps in ",
        "/",  # the temporary folder, which is removed
        "held-out accuracy ",
        "all 2 ranks hold the same 1068298 weights, bit for bit (digest ",
        "finished",
    ]
    assert len(lines) == len(expected), output
    if launcher == HVDKIT_RUN:  # lines of two streams keep their order only within each stream
        others = [line for line in output.splitlines() if not re.match(r"hvdkit run: \d+ s: ", line)]  # of a slow start
        assert len(others) == len(lines) + 1 and STARTING.search(output), output
    assert all(any(line.startswith(start) for line in lines) for start in expected), output
    assert lines[-1] == "finished"


@pytest.mark.parametrize(
    ("launcher", "form"),
    [
        pytest.param(ALONE, "loop", id="alone"),
        pytest.param(HVDKIT_RUN, "fit", id="hvdkit run", marks=pytest.mark.nightly),
    ],
)
def test_on_a_terminal_a_progress_bar_grows_below_the_lines(launcher, form):
    code, written = on_terminal(*launcher, *TRAIN, *SHORT, "--form", form)
    assert code == 0 and not NOISE.search(written), written
    tag = "[rank 0] " if launcher else ""
    grown = [int(done) for done in re.findall(r"(\d+)/20(?:\x1b\[0m)? steps", written)]
    # rich writes a bar after it has drawn it: one of its thread may come after a newer one of the main thread.
    assert grown[0] == 0 and grown[-1] == 20 and len(set(grown)) > 2, grown
    lines = [line for line in shown(written) if line]
    if launcher:
        assert STARTING.fullmatch(lines.pop(0))
    assert all(line.startswith(tag) for line in lines), lines
    logged = [line.removeprefix(tag) for line in lines if "loss = " in line]
    assert [line.partition(",")[0] for line in logged] == ["step 10", "step 20"], lines
    after = lines[lines.index(tag + logged[-1]) + 1 :]  # a long line goes on in the next one, of any length
    digest = "all" if launcher else "the"  # "all 2 ranks hold the same ...", "the model has ..."
    last = ["trained", "held-out", digest, "finished"]  # and the bar, before or after the first of them
    first_words = [line.removeprefix(tag).split()[0] for line in after]
    assert [word for word in first_words if word in last] == last and "training" in first_words, lines


@pytest.mark.parametrize(
    "launcher", [HVDKIT_RUN, pytest.param(ALONE, marks=pytest.mark.nightly), *AT_NIGHT], ids=NAMES.get
)
def test_a_wrong_option_is_one_plain_message(launcher):
    code, output = without_terminal(*launcher, *TRAIN, "cifar10", "--wrong", "3", TERM="xterm-256color")
    assert code == 2 and "\x1b" not in output, output
    lines = of_rank_0(launcher, output)
    assert lines[:2] == ["Unrecognized options: --wrong, 3", f"For full helptext, run {TRAIN[1]} --help"], output
    assert output.count("--wrong") == 1


COMMAND = (sys.executable, "-m", "hvdkit", "plan", "--wrong", "3")


NOTEBOOK = {"JPY_PARENT_PID": "1", "FORCE_COLOR": "1"}  # what Jupyter sets for the commands in cells, with a terminal


def test_the_command_has_colours_on_a_terminal_unless_it_asks_for_none():
    code, written = on_terminal(*COMMAND)
    assert code == 2 and "\x1b[" in written and "--wrong" in written
    plain = without_terminal(*COMMAND)
    assert "\x1b" not in plain[1] and plain[1].startswith("Unrecognized options: --wrong, 3")
    for extra in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, NOTEBOOK):
        code, written = on_terminal(*COMMAND, **extra)
        assert (code, written.replace("\r", "")) == plain, extra


def test_in_a_notebook_ranks_have_no_terminal():
    code, written = on_terminal(*HVDKIT_RUN, sys.executable, "-c", "import sys; print(sys.stdout.isatty())", **NOTEBOOK)
    assert code == 0
    first, *others = written.replace("\r", "").splitlines()
    assert STARTING.fullmatch(first) and sorted(others) == ["[rank 0] False", "[rank 1] False"]
