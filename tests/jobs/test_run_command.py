"""``hvdkit run`` with real engines and ranks: output, exit codes, signals, restarts, and no process left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers.jobs import MARK, call, environment, marked, words
from helpers.jobs_that_fail import without_start
from helpers.speed import WAIT, scaled, wait_until

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "hvdkit", "run"]
HOST = socket.gethostname()


def start(*options, code, mark, **extra):
    """Start ranks that run ``code``; in it RANK is the rank."""
    place = "import os, signal, subprocess, sys, time\n"
    place += "RANK = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('HOROVOD_RANK', '0')))\n"
    env = environment(PYTHONPATH=str(ROOT), **{MARK: mark}, **extra)
    return subprocess.Popen(
        [*RUN, *options, "--", sys.executable, "-c", place + code],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )


def finish(process):
    out, err = process.communicate(timeout=WAIT)
    return process.returncode, out, err, (err.splitlines() or [""])[-1]


def left(mark):
    """Return the command lines of a job's remaining processes."""
    return [words(process.pid) for process in marked(mark)]


HUGE = "glibc.malloc.hugetlb=1"  # pages
SLEEPER = "subprocess.Popen(['sleep', '4000'])\nprint('up', flush=True)\n"


@pytest.mark.core
def test_output_logs_and_environment(tmp_path):
    code = (
        "for number in range(300):\n"
        "    sys.stdout.write(f'{RANK} says')\n    sys.stdout.write(f' {number} ' + 'x' * 200 + '\\n')\n"
        "names = ('MINE', 'NOT_NAMED', 'GLIBC_TUNABLES')\n"
        "print(RANK, 'has', *map(os.environ.get, names), file=sys.stderr)\n"
        "assert 'tensorflow' not in sys.modules and 'HVDKIT_RUN' not in os.environ"
    )
    logs = tmp_path / "logs"
    options = ["-np", "3", "--logs", str(logs), "--env", "MINE"]
    code, out, err, _ = finish(start(*options, code=code, mark=str(tmp_path), MINE="s3cret", NOT_NAMED="x"))
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == 900
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {rank} says {number} {'x' * 200}" for number in range(300)]
        assert (logs / f"rank-{rank}.log").read_text().count(f"{rank} says") == 300
    first, *others = err.splitlines()
    assert first.startswith("hvdkit run: starting 3 ranks with ")
    assert sorted(others) == [f"[rank {rank}] {rank} has s3cret None {HUGE}" for rank in range(3)]


@pytest.mark.core
def test_what_ranks_write_alike_is_shown_once(tmp_path):
    code = "print('alike'); print(f'of {RANK}')"
    code, out, err, _ = finish(start("-np", "2", "--output", "merged", code=code, mark=str(tmp_path)))
    assert code == 0, err
    lines = out.splitlines()
    assert {"[rank 0] of 0", "[rank 1] of 1"} < set(lines), out
    assert set(lines) - {"[rank 0] of 0", "[rank 1] of 1"} <= {"[ranks 0-1] alike", "[rank 0] alike", "[rank 1] alike"}


@pytest.mark.core
@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3"),
        # The wrapper is killed first: its program must not stay.
        ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(4000)", None, "is unreachable"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            r"was killed by SIGKILL \(out of memory\?\)",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_first_rank_that_fails_is_named_and_nothing_is_left(tmp_path, failure, code, words):
    mark = str(tmp_path)
    script = f"{SLEEPER}if RANK == 1: time.sleep(0.3); {failure}\nsignal.signal(15, signal.SIG_IGN); time.sleep(4000)"
    got, _, err, last = finish(start("-np", "3", code=script, mark=mark))
    assert got == code if code is not None else got not in (0, 2), err
    assert re.fullmatch(rf"hvdkit run: rank 1 on {HOST} {words}.*; the job ended after \d+\.\d s", last), err
    wait_until(lambda: not left(mark))


@pytest.mark.core
@pytest.mark.parametrize(
    ("failure", "end"),
    [
        ("print('ready')\nhk.init(", "1: SyntaxError: '(' was never closed"),
        pytest.param(
            "import no_such_module", "1: ModuleNotFoundError: No module named 'no_such_module'", marks=pytest.mark.full
        ),
        pytest.param(
            "print('ValueError: of a log', file=sys.stderr); print('the end', file=sys.stderr); sys.exit(1)",
            "1",
            marks=pytest.mark.full,
        ),
        ("print('ValueError: of a log', file=sys.stderr); sys.exit(4)", "4"),
    ],
)
def test_an_error_before_init_is_in_the_last_line_and_the_engine_is_silent(tmp_path, failure, end):
    code, _, err, last = finish(start("-np", "2", code=failure, mark=str(tmp_path)))
    assert code == int(end[0]) and "[mpirun]" not in err, err
    assert re.fullmatch(
        rf"hvdkit run: rank [01] on {HOST} ended with exit code {end[0]}(, as every rank did)?"
        rf"{re.escape(end[1:])}; the .* \d+\.\d s",
        last,
    ), err


@pytest.mark.core
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 75),
        (signal.SIGINT, 130),
        (signal.SIGKILL, -signal.SIGKILL),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_hvdkit_run_ends_all_ranks(tmp_path, number, code):
    mark = str(tmp_path)
    script = (
        f"def save(*_): time.sleep(0.4 * (RANK + 1)); open({mark!r} + f'/saved-{{RANK}}', 'w'); sys.exit(75)\n"
        f"for number in (2, 10, 15): signal.signal(number, save)\n{SLEEPER}"
        f"open({mark!r} + f'/up-{{RANK}}', 'w'); time.sleep(4000)"
    )
    process = start("-np", "3", "--max-restarts", "1", code=script, mark=mark)
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 3)
    process.send_signal(number)
    got, _, err, _ = finish(process)
    assert got == code and "restarting" not in err, err
    if number != signal.SIGKILL:  # a rank that has saved must not end those still saving
        assert len(list(tmp_path.glob("saved-*"))) == 3
    wait_until(lambda: not left(mark))


FIT = """
import keras, numpy as np
import hvdkit as hk
hk.init()
class Note(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2: open({folder!r} + f'/up-{{RANK}}', 'w')
model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(256), keras.layers.Dense(1)])
model.compile('adam', 'mse')
x = np.ones((640, 20), 'float32')
hk.fit(model, x, x[:, :1], batch_size=64, epochs=1_000_000, verbose=0, callbacks=[Note()])
"""


@pytest.mark.nightly
def test_ctrl_c_ends_a_fit_that_saves_nothing_though_one_rank_may_wait_for_the_other(tmp_path):
    """One rank raises KeyboardInterrupt, while another may have entered a collective, in which it would wait."""
    process = start("-np", "2", "--grace", f"{4 * WAIT:g}", code=FIT.format(folder=str(tmp_path)), mark=str(tmp_path))
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
    process.send_signal(signal.SIGINT)
    code, _, err, last = finish(process)  # waits less than the grace
    assert code == 130 and "Traceback" not in err and "its ranks were ended" in last, err
    assert "interrupted: nothing was saved" in err, err
    wait_until(lambda: not left(str(tmp_path)))


def test_ctrl_c_while_ranks_start_shows_no_traceback(tmp_path):
    code = f"import threading\nopen({str(tmp_path)!r} + f'/up-{{RANK}}', 'w')\n"
    code += "print('waiting', file=sys.stderr)\nthreading.Event().wait()"
    process = start("-np", "2", code=code, mark=str(tmp_path))
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
    process.send_signal(signal.SIGINT)
    code, out, err, _ = finish(process)
    assert code == 130 and not out and "waiting" in err, err
    assert "Traceback" not in err and "KeyboardInterrupt" not in err, err


@pytest.mark.nightly
def test_an_error_of_every_rank_before_init_is_shown_once(tmp_path):
    together = f"import hvdkit as hk\nfrom pathlib import Path\nPath({str(tmp_path)!r}, f'up-{{RANK}}').touch()\n"
    together += f"while len(list(Path({str(tmp_path)!r}).glob('up-*'))) < 3: time.sleep(0.01)\nhk.size()"
    code, _, err, last = finish(start("-np", "3", code=together, mark=str(tmp_path)))
    lines = without_start(err).splitlines()
    assert code == 1 and sum("Traceback" in line for line in lines) == 1, err
    assert lines[0].startswith("[ranks 0-2] Traceback"), err
    assert re.search(
        r"rank \d on .* ended with exit code 1, as every rank did: .*hk\.init\(\): not called yet", last
    ), err


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(tmp_path):
    mark = str(tmp_path)
    script = f"def note(name): open({mark!r} + f'/{{name}}-{{RANK}}', 'w')\n"
    script += "signal.signal(2, lambda *_: note('heard')); note('up')\nwhile True: time.sleep(1)"
    process = start("-np", "2", code=script, mark=mark)
    for name in ("up", "heard"):
        wait_until(lambda: len(list(tmp_path.glob(f"{name}-*"))) == 2)  # noqa: B023
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    wait_until(lambda: not left(mark))


def start_first(folder, code, *options):
    """Start a job of two ranks. The second never starts, as on a host with a file system that does not respond."""
    mpirun = folder / "mpirun"
    mpirun.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 4.1.8" && exit\n'
        f'while [ "$1" != {sys.executable} ]; do shift; done\n'
        'OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "$@" &\nexec sleep 4000\n'
    )
    mpirun.chmod(0o755)
    path = f"{folder}{os.pathsep}{environment()['PATH']}"
    return start("-np", "2", "--engine", "mpirun", *options, code=code, mark=str(folder), PATH=path)


def test_a_rank_that_fails_ends_a_job_whose_other_ranks_have_not_begun(tmp_path):
    code, _, err, last = finish(start_first(tmp_path, "sys.exit(3)"))
    assert code == 3 and "hvdkit run: rank 1 of 2 never started; rank 0 ended with exit code 3; the job" in last, err
    wait_until(lambda: not left(str(tmp_path)))


def test_a_signal_ends_a_job_whose_other_ranks_have_not_begun(tmp_path):
    code = f"open({str(tmp_path)!r} + '/up', 'w'); time.sleep(4000)"
    process = start_first(tmp_path, code, "--grace", f"{4 * WAIT:g}")  # seconds that ranks have to save
    wait_until((tmp_path / "up").exists)
    process.send_signal(signal.SIGTERM)
    code, _, err, _ = finish(process)  # waits less than the grace
    assert code == 143, err
    wait_until(lambda: not left(str(tmp_path)))


def test_under_gloo_no_secret_is_on_a_command_line_and_the_exit_code_is_kept(tmp_path):
    mark = str(tmp_path)
    script = f"open({mark!r} + f'/up-{{RANK}}', 'w').write(os.environ['TOKEN'])\n"
    script += f"while not os.path.exists({mark!r} + '/end'): time.sleep(0.05)\nsys.exit(RANK and 5)"
    process = start("-np", "2", "--engine", "gloo", "--env", "TOKEN", code=script, mark=mark, TOKEN="s3cret")
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
    assert not [one.pid for one in psutil.process_iter(["cmdline"]) if "s3cret" in " ".join(one.info["cmdline"] or [])]
    (tmp_path / "end").touch()
    code, _, err, last = finish(process)
    assert (tmp_path / "up-0").read_text() == "s3cret"
    assert code == 5 and f"rank 1 on {HOST} ended with exit code 5" in last, err


def writer(folder):
    """Ranks of which 0 writes more than all buffers hold; rank 1 exits with the exit code in the file ``code``."""
    return (
        f"from pathlib import Path; folder = Path({str(folder)!r})\n"
        "for number in range(30 if RANK else 40_000): print(number, 'x' * 1000, flush=True)\n"
        "(folder / f'written-{RANK}').touch()\n"
        "while RANK and not (folder / 'code').exists(): time.sleep(0.01)\n"
        "sys.exit(int((folder / 'code').read_text()) if RANK else 0)"
    )


@pytest.mark.parametrize("end", ["failure", "signal"])
def test_a_reader_that_is_paused_does_not_hold_up_the_end(tmp_path, end):
    mark = str(tmp_path)
    process = start("-np", "2", code=writer(tmp_path), mark=mark)
    wait_until((tmp_path / "written-1").exists)
    if end == "signal":
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 143  # although its output has not been read
        process.communicate()
    else:
        (tmp_path / "new").write_text("3")
        (tmp_path / "new").rename(tmp_path / "code")
        wait_until(lambda: len(left(mark)) == 1)  # hvdkit run, which waits for its reader
        code, out, err, last = finish(process)
        assert code == 3 and f"hvdkit run: rank 1 on {HOST} ended with exit code 3" in last, err
        lines = {rank: [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")] for rank in (0, 1)}
        assert lines[1] == [f"[rank 1] {number} {'x' * 1000}" for number in range(30)]
        whole = lines[0][:-1]  # rank 0 was ended while writing the last one
        assert whole == [f"[rank 0] {number} {'x' * 1000}" for number in range(len(whole))]
    wait_until(lambda: not left(mark))


def test_a_reader_that_pauses_for_longer_than_the_heartbeat_loses_nothing(tmp_path):
    (tmp_path / "code").write_text("0")
    process = start("-np", "2", code=writer(tmp_path), mark=str(tmp_path), HVDKIT_HEARTBEAT_SECONDS=scaled(1))
    wait_until((tmp_path / "written-1").exists)
    time.sleep(4 * float(scaled(1)))
    assert not (tmp_path / "written-0").exists()  # it waits, too: hvdkit run does not keep everything in memory
    code, out, err, _ = finish(process)
    assert code == 0 and len(err.splitlines()) == 1, err  # the first line of hvdkit run
    numbers = {
        rank: [line.split()[2] for line in out.splitlines() if line.startswith(f"[rank {rank}]")] for rank in (0, 1)
    }
    assert numbers == {0: list(map(str, range(40_000))), 1: list(map(str, range(30)))}


@pytest.mark.core
def test_it_starts_again_and_says_so(tmp_path):
    script = (
        f"tries = {str(tmp_path)!r} + f'/tries-{{RANK}}'\nopen(tries, 'a').write('x')\n"
        "sys.exit(0 if len(open(tries).read()) == 3 else 4 if RANK else time.sleep(4000))"
    )
    options = ["-np", "2", "--max-restarts", "2", "--backoff", "0.1", "--logs", str(tmp_path)]
    code, _, err, _ = finish(start(*options, code=script, mark=str(tmp_path)))
    assert code == 0, err
    assert err.count("rank 1 on") == 2
    assert "restarting in 0.1 s (restart 1 of 2)" in err and "in 0.2 s (restart 2 of 2)" in err
    assert (tmp_path / "rank-1.log").read_text().count("--- hvdkit run: attempt") == 3
    # Wrong usage is not retried: it would fail again.
    code, _, err, _ = finish(start(*options, code="sys.exit(2)", mark=str(tmp_path)))
    assert (code, err.count("restarting")) == (2, 0)


ARGUMENTS = ["a", ":", "b", "", "new\nline", "q'u\"o $HOME `id`", "-x", "--", "-np", "ü", os.fsdecode(b"\xff")]


@pytest.mark.parametrize("engine", ["mpirun", "gloo"])
def test_a_program_gets_its_arguments_as_they_are(engine):
    """Also if what a dry run prints is run."""
    code = "import os, sys; print([os.fsencode(word) for word in sys.argv[1:]])"
    env = environment(PYTHONPATH=str(ROOT))

    def command(*options, arguments):
        return [*RUN, "-np", "2", "--engine", engine, *options, "--", sys.executable, "-c", code, *arguments]

    done = call(command(arguments=ARGUMENTS), env=env)
    expected = str(list(map(os.fsencode, ARGUMENTS)))
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {expected}" for rank in (0, 1)], done.stderr
    printed = call(command("--dry-run", arguments=ARGUMENTS[:-1]), env=env, check=True).stdout
    done = call(printed, env=env, shell=True)
    assert done.stdout.count(str(list(map(os.fsencode, ARGUMENTS[:-1])))) == 2, (printed, done.stdout, done.stderr)


def test_lines_that_look_like_failures_of_ranks_are_only_lines(tmp_path):
    """An old log, or the output of a nested job: it neither fails the job nor changes which rank is blamed."""
    line = f"hvdkit: rank 0 on {HOST} failed at step 7: ValueError: of another job"
    for code in (0, 3):
        script = f"print({line!r}, flush=True)\nprint('[rank 0] ' + {line!r}, file=sys.stderr, flush=True)\n"
        script += f"time.sleep(0.5 * RANK)\nif RANK: sys.exit({code})\nif {code}: time.sleep(60)"
        options = ["-np", "2", "--max-restarts", "1", "--backoff", "0.1"]
        got, _, err, last = finish(start(*options, code=script, mark=str(tmp_path)))
        assert got == code and err.count("restarting") == (1 if code else 0), err
        assert f"hvdkit run: rank 1 on {HOST} ended with exit code 3" in last if code else err.count("hvdkit run") == 1


def test_non_finite_values_are_not_tried_again(tmp_path):
    options = ["-np", "2", "--max-restarts", "3", "--backoff", "0.1"]
    code, _, err, last = finish(start(*options, code="sys.exit(65 if RANK else 0)", mark=str(tmp_path)))
    assert code == 65 and "restarting in" not in err, err
    assert last.startswith("hvdkit run: not restarting: exit code 65 means that values became NaN or infinite")


def test_rank_0_has_a_terminal_where_hvdkit_run_has_one(tmp_path):
    screen, terminal = os.openpty()
    shown = bytearray()

    def read():
        try:
            while data := os.read(screen, 4096):
                shown.extend(data)
                for number in range(3):
                    if b"[rank 0] %d/2" % number in shown:
                        (tmp_path / str(number)).touch()
        except OSError:
            pass

    # Each rank continues once rank 0's output is on the screen.
    code = "import os, sys, time; from pathlib import Path; print(sys.stdout.isatty())\n"
    code += "print('begin', os.environ['OMPI_COMM_WORLD_RANK'])\n"
    code += "for i in range(3):\n    print(f'\\r{i}/2', end='')\n"
    code += f"    while not Path({str(tmp_path)!r}, str(i)).exists(): time.sleep(0.01)\nprint()"
    command = [*RUN, "-np", "2", "--", sys.executable, "-c", code]
    process = subprocess.Popen(command, env=environment(PYTHONPATH=str(ROOT)), stdout=terminal, stderr=terminal)
    os.close(terminal)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert process.wait(timeout=WAIT) == 0
    finally:
        process.kill()
    reader.join(timeout=WAIT)
    os.close(screen)
    text = shown.decode()
    assert "[rank 0] True" in text and "[rank 1] False" in text
    assert "\r\x1b[K[rank 0] 1/2" in text  # while it grows
    assert text.index("[rank 0] begin 0") < text.index("[rank 0] 0/2")
    assert len(re.findall(r"\[(?:rank 1|ranks 0-1)\] 2/2", text)) == 1 and "[rank 1] 1/2" not in text


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("hosts.sh", {"HOSTS": "localhost:2", "RESTARTS": "0"}),
        ("slurm.sbatch", {"SLURM_JOB_NODELIST": HOST, "SLURM_TASKS_PER_NODE": "2", "RESTARTS": "0"}),
    ],
)
def test_launchers_to_copy(tmp_path, launcher, variables):
    (tmp_path / "train.py").write_text("import sys; print('trained', sys.argv[1]); sys.exit(int(sys.argv[1]))")
    for code in ("0", "3"):
        command = ["bash", str(ROOT / "launch" / launcher), str(tmp_path / "train.py"), code]
        env = environment(PYTHONPATH=str(ROOT), LOGS=str(tmp_path / "logs"), **variables)
        done = call(command, env=env, cwd=tmp_path)
        assert done.returncode == int(code), done.stderr
        lines = {f"[rank {rank}] trained {code}" for rank in (0, 1)}
        found = set(done.stdout.splitlines())
        # The job may end with the first rank that fails, before the other one has begun.
        assert found == lines if code == "0" else found and found <= lines, done.stdout
    alone = call(["bash", ROOT / "launch" / launcher])
    assert alone.returncode == 2 and f"launch/{launcher} models/train.py cifar10" in alone.stderr
