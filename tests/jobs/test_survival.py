"""Runs that survive: the README's, which is killed, stopped and continued; and one with signals at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.jobs import BIN, MARK, call, environment, marked, words
from helpers.speed import WAIT, wait_until

SCRIPT = Path(__file__).parents[2] / "models" / "train.py"


def start(launcher, ranks, *flags):
    command = [*launcher, str(ranks), sys.executable, str(SCRIPT), "linear", *flags]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def until_saved(process, logdir, step=1):
    """Wait for a checkpoint after ``step``."""
    deadline = time.monotonic() + WAIT
    while not any(int(p.name[5:]) >= step for p in (logdir / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks_of(process):
    return [
        p for p in psutil.Process(process.pid).children(recursive=True) if SCRIPT.name in " ".join(words(p.pid)[:3])
    ]


@pytest.mark.core
def test_a_run_is_killed_stopped_continued_with_fewer_ranks_and_inspected(tmp_path):
    logdir = tmp_path / "line"
    flags = ["--logdir", str(logdir), "--save-model-secs", "0.5", "--sleep", "0.02", "--epochs", "40"]
    process = start(["horovodrun", "-np"], 3, *flags)
    until_saved(process, logdir)
    os.kill(ranks_of(process)[-1].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode != 0
    assert "training begins at step 0 (no checkpoint in " in output

    process = start(["mpirun", "--bind-to", "none", "-np"], 2, *flags)
    until_saved(process, logdir, 60)
    for rank in ranks_of(process):
        rank.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 75, output
    begun = int(re.search(r"training begins at step (\d+) from", output)[1])
    saved = int(re.search(r"SIGINT: saved at step (\d+)", output)[1])
    assert 0 < begun < saved

    process = start(["horovodrun", "-np"], 1, "--logdir", str(logdir), "--epochs", "40")
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 0, output
    assert f"training begins at step {saved} from" in output
    epochs = [int(number) for number in re.findall(r"epoch (\d+), loss", output)]
    assert epochs[-1] == 40
    assert epochs == list(range(epochs[0], 41))
    assert "finished" in output

    assert len(list((logdir / "checkpoints").glob("step-*"))) == 1  # max_to_keep=1
    shown = call([BIN / "hvdkit", "checkpoint", "inspect", logdir])
    assert shown.returncode == 0, shown.stderr
    assert "1000" in shown.stdout


SURVIVING = Path(__file__).with_name("surviving.py")
ROUNDS = "HVDKIT_TEST_ROUNDS"
PHASES = ("start", "train", "save", "end")
FAULTS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP, SIGKILL")
TARGETS = ("rank 0", "rank 1", "launcher")


class Chaos:
    """The same command, again and again, with a signal at a random moment of each attempt."""

    def __init__(self, folder):
        self.folder, self.logdir, self.results = folder, folder / "run", folder / "results"
        self.temporary, self.flights = folder / "tmp", folder / "flights"
        for made in (self.results, self.temporary, self.flights):
            made.mkdir()
        self.seconds = dict.fromkeys(PHASES, 0.0)  # of each phase of the undisturbed run

    def start(self):
        paths = f"{SCRIPT.parents[1]}{os.pathsep}{SCRIPT.parents[1] / 'tests'}"
        folders = {"TMPDIR": str(self.temporary), "HVDKIT_FLIGHT_DIR": str(self.flights)}
        command = [BIN / "hvdkit", "run", "-np", "2", "--", sys.executable, SURVIVING, self.logdir, self.results]
        return subprocess.Popen(
            command,
            env=environment(PYTHONPATH=paths, TF_CPP_MIN_LOG_LEVEL="2", **{MARK: str(self.folder)}, **folders),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
        )

    def undisturbed(self):
        """Run to the end; measure the seconds of its phases, and return the state of each rank."""
        began, process = time.monotonic(), self.start()
        at = {}
        for line in process.stdout:
            at.setdefault(line.split("] ")[-1].strip(), time.monotonic())
        assert process.wait(WAIT) == 0, at
        steps = [moment for line, moment in at.items() if line.startswith("step ")]
        step = (steps[-1] - steps[0]) / (len(steps) - 1)
        self.seconds = {"start": steps[0] - began, "train": step, "save": 3 * step, "end": time.monotonic() - at["end"]}
        return self.state()

    def state(self):
        state = [(self.results / f"rank-{rank}").read_bytes() for rank in (0, 1)]
        assert {path.name[:5] for path in (self.logdir / "checkpoints").iterdir()} == {"step-"}  # nothing unfinished
        shutil.rmtree(self.logdir)
        return state

    def disturb(self, chance):
        """Start the command, send a signal, and wait for its end; return its exit code and output, or None."""
        phase, fault, target = chance.choice(PHASES), chance.choice(FAULTS), chance.choice(TARGETS)
        offset, lines = chance.uniform(0, self.seconds[phase]), chance.randint(1, 12)
        process, output = self.start(), []
        try:
            while phase != "start" and (line := process.stdout.readline()):
                output.append(line)
                step = int(found[1]) if (found := re.search(r"step (\d+)$", line)) else None
                lines -= step is not None
                is_save = phase == "save" and step is not None and step % 3 == 0
                if line.endswith("end\n") or (lines <= 0 and (phase == "train" or is_save)):
                    break
            time.sleep(offset)
            ranks = [one for one in marked(str(self.folder)) if SURVIVING.name in " ".join(words(one.pid)[1:2])]
            chosen = process if target == "launcher" else next(iter(ranks[int(target[-1]) :]), process)
            for name in fault.split(", "):
                with contextlib.suppress(psutil.NoSuchProcess):
                    chosen.send_signal(signal.Signals[name])
                time.sleep(min(offset, 1.0) if name == "SIGSTOP" else 0)
            rest, _ = process.communicate(timeout=WAIT)
        finally:
            process.kill()
        wait_until(lambda: not marked(str(self.folder)), lambda: str(marked(str(self.folder))))
        summary = f"{phase}, {fault}, {target}: {process.returncode}\n{''.join(output)}{rest}"
        names = [path.name for path in self.temporary.iterdir()]
        # Of a killed rank, TensorFlow's generated modules remain, and their bytecode.
        left = [name for name in names if not name.startswith(("__autograph_", "__pycache__"))]
        if chosen is process and "SIGKILL" in fault:  # a launcher that was killed cannot remove its files
            shutil.rmtree(self.temporary)
            self.temporary.mkdir()
        else:
            assert not left, (left, summary)
        return process.returncode, summary


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))  # one test of all rounds would exceed the runner's stall limit
def test_signals_at_random_moments_change_nothing(tmp_path, part):
    rounds = int(os.environ.get(ROUNDS, "4"))
    seed = random.randrange(1 << 32)
    chance, chaos = random.Random(seed), Chaos(tmp_path)
    expected, log = chaos.undisturbed(), [f"seed {seed}"]
    for _ in range(rounds):
        code, output = chaos.disturb(chance)
        log.append(output)
        if code == 0:  # the signal came too late
            assert chaos.state() == expected, "\n".join(log)
        assert "is damaged" not in output, "\n".join(log)
        # Outside the loop, while modules are imported for example, SIGINT is Python's KeyboardInterrupt.
        assert "Traceback" not in output or ", SIGINT, " in output.partition("\n")[0], "\n".join(log)
    process = chaos.start()
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 0, "\n".join([*log, output])
    assert chaos.state() == expected, "\n".join(log)
