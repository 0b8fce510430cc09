"""``hk.run`` as users call it: from programs, from a notebook, with mistakes, and interrupted."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.hosts import Hosts, missing
from helpers.jobs import MARK, call, environment, marked
from helpers.speed import WAIT, wait_until
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.commands.run.function_transfer import FUNCTION_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
# Jupyter's packages are in another environment, which `make tutorials-check` makes.
TUTORIALS = next((ROOT / ".cache" / "tutorials" / "lib").glob("python*/site-packages"), None)


def run_program(folder, code, **extra):
    """Run a program that is a file, as users do; return the finished process."""
    (folder / "program.py").write_text(code)
    return call([sys.executable, "program.py"], cwd=folder, env=environment(PYTHONPATH=str(ROOT), **extra))


RESULTS = """
import dataclasses, os
import hvdkit as hk
import tensorflow as tf
from helper import tripled

@dataclasses.dataclass
class Result:
    rank: int
    total: float

def make(offset):
    def inner(scale, *, add):
        cluster = hk.init()
        assert hk.init() is cluster
        print(f"naïve rank {cluster.rank}")
        total = hk.allreduce(tf.constant(scale * tripled(cluster.rank) + offset), hk.Sum)
        assert hk.broadcast_object(Result(cluster.rank, 1.0)) == Result(0, 1.0)
        return Result(cluster.rank, float(total) + add)
    return inner

def main():
    hk.init()  # in the caller, with TensorFlow: ranks are other processes
    print(tf.constant(1).numpy(), "before")
    results = hk.run(make(0.5), (2,), {"add": 100})
    assert results == [Result(0, 107.0), Result(1, 107.0)], results
    assert hk.run(lambda: os.getpid(), np=1) != [os.getpid()]
    print("after")

main()
"""


@pytest.mark.core
def test_results_of_closures_lambdas_and_classes_of_the_program(tmp_path):
    (tmp_path / "helper.py").write_text("def tripled(x):\n    return 3.0 * x\n")
    done = run_program(tmp_path, RESULTS)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("1 before", "after")
    assert sorted(lines[1:-1]) == ["[rank 0] naïve rank 0", "[rank 1] naïve rank 1"]
    assert "hvdkit run: starting 2 ranks with" in done.stderr and "Traceback" not in done.stderr


ERRORS = """
import sys, traceback
import hvdkit as hk

class Mine(Exception):
    pass

class Lost(Exception):
    def __init__(self, path, line):
        super().__init__(f"{path}:{line}")

def fail(kind):
    if kind == "mine":
        if hk.init().rank == 1:
            raise Mine("bad row", 7) from KeyError("x")
        hk.barrier()
    raise Lost("data.csv", 3)

try:
    hk.run(fail, ["mine"])
except Mine as error:
    assert error.args == ("bad row", 7)
    traceback.print_exc(file=sys.stdout)
try:
    hk.run(fail, ["lost"], np=1)
except hk.HvdkitError as error:
    traceback.print_exc(file=sys.stdout)
"""


def test_the_exception_of_the_first_rank_that_failed(tmp_path):
    done = run_program(tmp_path, ERRORS)
    assert done.returncode == 0, done.stdout + done.stderr
    mine, _, lost = done.stdout.partition('Mine: (\'bad row\', 7)\n"""')
    assert re.search(r"RemoteTraceback: on rank 1 \(\S+\):\n\"\"\"\n", mine), done.stdout
    assert "KeyError: 'x'" in mine and 'raise Mine("bad row", 7)' in mine and "hvdkit/commands" not in mine
    assert "HvdkitError: hk.run: rank 0 raised Lost: data.csv:3; shown as HvdkitError because unpickling it" in lost
    assert 'raise Lost("data.csv", 3)' in lost


ENDS = {
    "sys.exit(3)": r"hk\.run: rank 1 on \S+ ended with exit code 3",
    "os.kill(os.getpid(), 9)": r"hk\.run: rank 1 on \S+ was killed by SIGKILL",
    "ctypes.string_at(0)": r"hk\.run: rank 1 on \S+ was killed by SIGSEGV",
    "sys.exit()": r"hk\.run: rank 1 ended with exit code 0 before its function returned",
    "return threading.Lock()": r"the function's result: got a value of type _thread\.lock on rank 1, which cannot",
}


@pytest.mark.parametrize("end", at_night(ENDS, but=("sys.exit(3)",)))
def test_a_rank_that_ends_without_a_result_is_named(tmp_path, end):
    function = f"def f():\n    if hk.init().rank == 1:\n        {end}\n"
    done = run_program(tmp_path, f"import ctypes, os, sys, threading\nimport hvdkit as hk\n{function}hk.run(f)\n")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and re.search(ENDS[end], last), done.stderr
    assert last.startswith("TypeError" if "return" in end else "hvdkit.errors.HvdkitError"), last


def test_a_result_that_only_the_rank_can_import(tmp_path):
    code = """
import pathlib, sys
import hvdkit as hk
def f(folder):
    (pathlib.Path(folder) / "only_there.py").write_text("class Thing: pass")
    sys.path.append(folder)
    import only_there
    return only_there.Thing()
pathlib.Path("sub").mkdir()
hk.run(f, [str(pathlib.Path("sub").resolve())], np=1)
"""
    last = run_program(tmp_path, code).stderr.splitlines()[-1]
    assert "the result of rank 0, of type only_there.Thing, cannot be unpickled here (ModuleNotFoundError" in last, last


@pytest.mark.nightly
def test_large_arguments_and_results(tmp_path):
    code = """
import glob
import numpy as np
import hvdkit as hk
def f(x):
    return x + hk.init().rank
x = np.arange(25_000_000.0)
one, two = hk.run(f, [x])
assert (one == x).all() and (two == x + 1).all() and one.nbytes == 200_000_000
"""
    done = run_program(tmp_path, code, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("hvdkit-*"))


def test_a_result_for_which_the_disk_has_no_room(tmp_path):
    code = """
import resource
import hvdkit as hk
resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, 32 << 20))  # of each file
def f(size):
    return bytes(size)
hk.run(f, [40 << 20], np=1)
"""
    last = run_program(tmp_path, code).stderr.splitlines()[-1]
    assert "the result of rank 0 (41,943," in last and "File too large; free space there" in last, last


def outside(*words):
    """Return a function that uses a lock, which cannot be pickled."""
    lock = threading.Lock()
    return lambda: [lock, *words]


def test_mistakes_are_errors_before_anything_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    lock = threading.Lock()
    for arguments, options, kind, message in (
        ((print,), {"np": 0}, ValueError, "np: got 0, expected an integer of at least 1"),
        ((print,), {"np": "two"}, TypeError, "np: got two, expected an integer"),
        ((print,), {"engine": "ssh"}, ValueError, "--engine: got ssh, expected auto or mpirun"),
        ((print(end=""),), {}, TypeError, "function: got None, expected a function; pass it without calling it"),
        ((print, "abc"), {}, TypeError, r"args: got abc, expected a tuple or list of arguments; write args=\(value,\)"),
        ((print, 3), {}, TypeError, "args: got 3, expected a tuple or list"),
        ((print, (), ["end"]), {}, TypeError, r"kwargs: got \['end'\], expected a dict"),
        (
            (outside(),),
            {},
            TypeError,
            r"the variable lock that outside\.<locals>\.<lambda> uses: got lock, which cannot",
        ),
        ((print, (1, lock)), {}, TypeError, r"args\[1\]: got lock, which cannot be pickled \(cannot pickle '_thread"),
        ((print, (), {"end": lock}), {}, TypeError, r"kwargs\['end'\]: got lock, which"),
        ((lock.acquire,), {}, TypeError, r"function lock\.acquire: got builtin_function_or_method, which"),
    ):
        with pytest.raises(kind, match=message):
            hk.run(*arguments, **options)
    with monkeypatch.context() as patch:
        patch.setenv(FUNCTION_VARIABLE, "1 token 127.0.0.1")
        with pytest.raises(
            hk.ClusterError, match=r"hk\.run: got a call on rank 0 of 1, expected a call outside of a job"
        ):
            hk.run(print)


@pytest.mark.nightly
def test_a_call_within_a_rank(tmp_path):
    code = "import hvdkit as hk\ndef f():\n    hk.init()\n    hk.run(print)\nhk.run(f)\n"
    last = run_program(tmp_path, code).stderr.splitlines()[-1]
    assert re.match(r"hvdkit.errors.ClusterError: hk.run: got a call on rank [01] of 2, expected a call outside", last)


def test_a_host_that_does_not_exist(tmp_path):
    done = run_program(tmp_path, "import hvdkit as hk\nhk.run(print, hosts='no.such.host.invalid:2')\n")
    assert re.match(r"hvdkit.errors.ClusterError: host no.such.host.invalid: ", done.stderr.splitlines()[-1]), (
        done.stderr
    )


REPLACED = """
import contextlib, io, sys
import hvdkit as hk
def f():
    print("out", "\\u2713")
    print("err", file=sys.stderr)
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    hk.run(f, np=1)
assert out.getvalue() == "[rank 0] out \\u2713\\n", out.getvalue()
assert err.getvalue().endswith("[rank 0] err\\n"), err.getvalue()
sys.stdout.reconfigure(encoding="ascii")
hk.run(f, np=1)
"""


def test_output_appears_in_what_replaces_the_standard_files(tmp_path):
    done = run_program(tmp_path, REPLACED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[rank 0] out ?\n" and "hvdkit run: starting 1 rank with" in done.stderr


SLEEPS = """
import pathlib, signal, sys, time
import hvdkit as hk
def f(deaf):
    rank = hk.init().rank
    if deaf:
        signal.signal(signal.SIGINT, lambda *_: pathlib.Path(f"heard-{rank}").touch())
    pathlib.Path(f"up-{rank}").touch()
    while True:
        time.sleep(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
try:
    hk.run(f, [sys.argv[1] == "deaf"])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    "numbers",
    at_night([(signal.SIGINT,), (signal.SIGINT, signal.SIGINT), (signal.SIGKILL,)], but=[(signal.SIGINT,)]),
)
def test_all_ranks_end_with_their_caller(tmp_path, numbers):
    """After Ctrl-C, after the second one if ranks do not end, and after kill -9 of the caller."""
    (tmp_path / "program.py").write_text(SLEEPS)
    env = environment(PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path), **{MARK: str(tmp_path)})
    command = [sys.executable, "program.py", "deaf" if len(numbers) > 1 else ""]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for number, name in zip(numbers, ("up", "heard"), strict=False):
            wait_until(lambda: len(list(tmp_path.glob(f"{name}-*"))) == 2)  # noqa: B023
            process.send_signal(number)
        out, err = process.communicate(timeout=WAIT)
    finally:
        process.kill()
    wait_until(lambda: not marked(str(tmp_path)))
    assert not list(tmp_path.glob("hvdkit-function-*"))
    if signal.SIGINT in numbers:
        assert (process.returncode, out) == (0, "interrupted\n"), err


NOTEBOOK = r'''
import sys
import nbformat
from nbclient import NotebookClient

cells = [
    "import hvdkit as hk, tensorflow as tf",
    """def steps(limit):
    hk.init()
    @tf.function
    def count():
        n = tf.constant(0)
        while n < limit:  # AutoGraph needs the source of the cell
            n += 1
        return n
    print("counting")
    return int(count())""",
    "assert hk.run(steps, [5], np=2) == [5, 5]",
    """def fail():
    raise ValueError("in a cell")
hk.run(fail, np=1)""",
]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
client = NotebookClient(notebook, kernel_name="python3", timeout=600, allow_errors=True, coalesce_streams=True)
client.execute()
started, failed = (cell.outputs for cell in client.nb.cells[2:])
streams = {one.name: one.text for one in started if one.output_type == "stream"}
assert [one.output_type for one in started] == ["stream"] * 2, started
assert sorted(streams["stdout"].splitlines()) == ["[rank 0] counting", "[rank 1] counting"], streams
(error,) = [one for one in failed if one.output_type == "error"]
assert (error.ename, error.evalue) == ("ValueError", "in a cell")
text = "\n".join(error.traceback)
assert "on rank 0" in text and 'raise ValueError("in a cell")' in text.split("direct cause")[0], text
'''


@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None and TUTORIALS is None,
    reason="no Jupyter: run `make tutorials-check`, which installs it",
)
def test_in_a_notebook(tmp_path):
    (tmp_path / "execute.py").write_text(NOTEBOOK)
    path = os.pathsep.join(filter(None, [str(ROOT), str(TUTORIALS or "")]))
    env = environment(PYTHONPATH=path, HOME=str(tmp_path))
    done = call([sys.executable, "execute.py"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.skipif((WHY := missing()) is not None, reason=f"no hosts: {WHY}")
@pytest.mark.parametrize("engine", ["auto", "gloo"])
def test_ranks_on_other_hosts(tmp_path, engine):
    code = """
import sys
import numpy as np
import hvdkit as hk
def f(x):
    cluster = hk.init()
    return cluster.hosts[cluster.rank], float(hk.allreduce(x, hk.Sum).sum())
print(hk.run(f, [np.ones(1_000_000)], np=2, hosts=sys.argv[1], engine=sys.argv[2]))
"""
    (tmp_path / "program.py").write_text(code)
    with Hosts(2) as hosts:
        options = {"env": environment(PYTHONPATH=str(ROOT)), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        program = [sys.executable, str(tmp_path / "program.py"), hosts.list, engine]
        text = hosts[0].start(program, text=True, **options).communicate(timeout=WAIT)[0]
    assert "[('host-a', 2000000.0), ('host-b', 2000000.0)]" in text, text
