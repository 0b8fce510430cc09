"""Three hosts, one of which dies, is cut off, or is slow; hosts are network namespaces, everything else is real."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers.hosts import Hosts, missing
from helpers.jobs import environment
from helpers.jobs_that_fail import PATHS, across, run
from helpers.speed import WAIT, scaled, slowdown, wait_until

WHY = missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no hosts: {WHY}")


RING = """
import numpy as np
import hvdkit as hk
from hvdkit.commands.doctor.algorithm import detect_algorithm
cluster = hk.init()
mine = np.random.default_rng(cluster.rank).normal(size=500_000).astype("float32")
total = hk.allreduce(mine, hk.Sum)
every = hk.allgather_object(mine)
if cluster.is_chief:
    print("added up by:", detect_algorithm(every, total))
"""


def test_large_messages_go_round_a_ring():
    """Holds for any launcher: this mpirun is started without hvdkit."""
    env = environment(PYTHONPATH=PATHS, TF_CPP_MIN_LOG_LEVEL="2")
    with Hosts(4) as hosts:
        command = ["mpirun", "-np", "4", *across("mpirun", hosts.list, env), sys.executable, "-c", RING]
        process = hosts[0].start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 0 and "added up by: ring" in output, output


FAMILY = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
for number in range(300):
    if os.fork() == 0:
        if number == 299:
            os.setpgrp()
            signal.signal(signal.SIGHUP, lambda *_: (folder / "woken").touch())
            (folder / "ready").touch()
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


def test_no_process_of_a_dying_host_goes_on(tmp_path):
    """Linux continues a stopped group of processes, and sends it SIGHUP, when the last parent in its session ends."""
    for _ in range(5):
        with Hosts(1) as (host,):
            host.start([sys.executable, "-c", FAMILY, str(tmp_path)])
            wait_until((tmp_path / "ready").exists)
            host.kill()
        (tmp_path / "ready").unlink()
    assert not (tmp_path / "woken").exists()


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("hvdkit run", "hvdkit run: rank 1 on 10.77.0.2 "),
        pytest.param("mpirun", "hvdkit: rank 1 on host-b ", marks=pytest.mark.nightly),
        pytest.param("horovodrun --gloo", "hvdkit: rank 1 on host-b ", marks=pytest.mark.nightly),
    ],
)
def test_a_host_dies(launcher, words):
    with Hosts(3) as hosts:
        ending = run("wait", launcher, ranks=3, hosts=hosts, act=hosts[1].kill)
    assert ending.last.startswith(words), ending.output
    assert ending.code > 0 and not ending.left and ending.seconds < 5 * slowdown(), (ending.seconds, ending.left)


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("horovodrun --gloo", marks=pytest.mark.nightly)])
def test_a_host_is_cut_off(launcher):
    with Hosts(3) as hosts:
        ending = run("wait", launcher, ranks=3, hosts=hosts, act=hosts[1].cut, HVDKIT_HEARTBEAT_SECONDS=scaled(4))
    expected = r"has not answered for \d+ s: its host is (down, or the network is cut|cut off, or it was stopped)"
    assert ending.last.startswith("hvdkit: rank 1 on host-b failed at step "), ending.output
    assert re.search(expected, ending.last), ending.last
    assert ending.code > 0, ending.output  # the launcher was ended, but did not crash
    # Only ssh's processes are left on the host that was cut off; its ranks have ended too.
    assert not [words for words in ending.left if "ssh" not in words.split()[0]], ending.left
    assert ending.seconds < 15 * slowdown()


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("horovodrun --gloo", "hvdkit: rank 1 on host-b"),
        pytest.param("mpirun", "hvdkit: rank 1 on host-b", marks=pytest.mark.nightly),
        pytest.param("hvdkit run", "hvdkit run: rank 1 on 10.77.0.2", marks=pytest.mark.nightly),
    ],
)
def test_a_stopped_rank_alone_on_its_host(launcher, words):
    """The rank's sentinel detects that it is stopped."""
    with Hosts(3) as hosts:
        ending = run("SIGSTOP", launcher, ranks=3, hosts=hosts, HVDKIT_HEARTBEAT_SECONDS=scaled(2))
    assert ending.last.startswith(f"{words} failed at step 20: has been stopped (SIGSTOP) for "), ending.output
    assert ending.code > 0 and not ending.left, (ending.code, ending.left)
    assert ending.seconds < 12 * slowdown()


@pytest.mark.nightly
@pytest.mark.parametrize("at", [0, 1])
def test_a_lone_rank_that_computes_is_no_failure(at):
    """The rank holds Python's lock for twice the heartbeat's limit, but its host still acknowledges packets."""
    with Hosts(2) as hosts:
        ending = run("busy", "mpirun", at=at, hosts=hosts, HVDKIT_HEARTBEAT_SECONDS=scaled(2))
    assert ending.code == 0 and not ending.last, ending.output
    assert ending.output.count("has trained 40 steps") == 2 and ending.seconds > 3 + 4, ending.seconds


def test_a_slow_link_is_no_failure():
    """At 1 Mbit/s a step of 4 KB is slow, but the job trains all its steps."""
    with Hosts(3) as hosts:

        def slow_down() -> None:
            for number in range(3):
                hosts[number].slow_down("1mbit")

        ending = run(
            "none", "mpirun", ranks=3, hosts=hosts, act=slow_down, steps=150, HVDKIT_HEARTBEAT_SECONDS=scaled(3)
        )
    assert ending.code == 0 and not ending.last, ending.output
    assert ending.output.count("has trained 150 steps") == 3 and ending.seconds > 3, ending.seconds
