"""Run ``hvdkit run`` on three hosts: some are misconfigured, or one is lost for a while."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from helpers.hosts import Hosts, missing
from helpers.jobs import BIN, environment, words
from helpers.speed import WAIT, scaled, wait_until
from resume import WORKER, losses

import hvdkit

ROOT = Path(__file__).resolve().parents[2]
STEPS = 150
OVER_GLOO = ("hvdkit", "run", "--engine", "gloo", "--check-timeout", "250")
WHY = missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no hosts: {WHY}")


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3) as several:
        yield several


def begin(hosts, *command, out, **extra):
    env = environment(PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2", **extra)
    with out.open("wb") as file:
        return hosts[0].start(command, env=env, stdout=file, stderr=file)


def test_a_host_is_lost_and_comes_back(hosts, tmp_path):
    """A host that is cut off is left out, and included again at the next start. Losses equal those of one process.

    Uses the launcher script that users copy.
    """
    out, log = tmp_path / "out", tmp_path / "log" / "losses.jsonl"
    flags = ["--steps", str(STEPS), "--dropout", "0"]
    worker = [sys.executable, str(WORKER)]
    options = {"HOSTS": hosts.list, "RESTARTS": "2", "MIN_NP": "2", "LOGS": str(tmp_path / "logs"), "PYTHON": worker[0]}
    command = [str(ROOT / "launch" / "hosts.sh"), worker[1], str(log.parent), *flags]
    process = begin(hosts, *command, out=out, HVDKIT_HEARTBEAT_SECONDS=scaled(3), **options)

    def trained(ranks):
        return log.exists() and log.read_text().count(f", {ranks}]")

    wait_until(lambda: trained(3) > 30, out.read_text)
    hosts[2].cut()
    wait_until(lambda: trained(2) > 0, out.read_text)
    hosts[2].plug_in()
    wait_until(lambda: trained(2) > 30, out.read_text)
    rank = next(pid for pid in hosts[1].processes() if words(pid)[:2] == worker)
    os.kill(rank, signal.SIGKILL)
    alone = subprocess.run([*worker, str(tmp_path / "alone"), *flags, "--rest", "0"], env=environment(), check=True)
    assert alone.returncode == 0 and process.wait(WAIT) == 0, out.read_text()

    text = out.read_text()
    said = [line.removeprefix("hvdkit run: ") for line in text.splitlines() if line.startswith("hvdkit run: ")]
    assert said.pop(0).startswith("starting 3 ranks with "), text
    assert re.match(
        r"rank 2 on 10\.77\.0\.3 (failed at step \d+: has not answered for \d+ s|is unreachable)", said[0]
    ), text
    assert said[1:3] == [
        "restarting in 1 s (restart 1 of 2)",
        f"excluding host 10.77.0.3: {said[2].split(': ')[1]}",
    ]
    assert said[3] == "2 ranks on 10.77.0.1:1, 10.77.0.2:1", text
    assert re.match(r"rank 1 on 10\.77\.0\.2 was killed by SIGKILL \(out of memory\?\) at step \d+", said[4]), text
    assert said[5:] == ["restarting in 2 s (restart 2 of 2)", f"3 ranks on {hosts.list.replace(',', ', ')}"], text
    assert "--- hvdkit run: attempt 3, 3 ranks" in (tmp_path / "logs" / "rank-2.log").read_text()
    here, there = losses(log.parent), losses(tmp_path / "alone")
    assert [step for step, _, _ in here] == list(range(1, STEPS + 1))
    assert {ranks for _, _, ranks in here} == {2, 3} and here[-1][2] == 3
    assert [loss for _, loss, _ in here] == pytest.approx([loss for _, loss, _ in there], rel=1e-3)


def listening(pid):
    """Return the addresses at which a process in another network namespace listens."""
    sockets = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    found = [words[1].partition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in sockets]
    return [socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in found]


AT_NIGHT = [pytest.param(("--interface", "eth0", *check), marks=pytest.mark.nightly) for check in ((), ("--no-check",))]


@pytest.mark.parametrize("options", [(), *AT_NIGHT])
def test_under_gloo_the_token_lies_in_a_private_file_and_one_address_is_listened_at(hosts, tmp_path, options):
    """Hosts that share their /tmp, as these do, see the same file."""
    script = "import os, sys, time; open(sys.argv[1] + os.environ['HOROVOD_RANK'], 'w').close()\n"
    script += "while not os.path.exists(sys.argv[1] + 'end'): time.sleep(0.05)"
    program = [sys.executable, "-c", script, str(tmp_path / "up-")]
    before = set(Path("/tmp").glob("hvdkit-run-*"))
    out = tmp_path / "out"
    process = begin(hosts, *OVER_GLOO, "-H", hosts.list, *options, "--", *program, out=out)
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 3, out.read_text)
    (made,) = set(Path("/tmp").glob("hvdkit-run-*")) - before
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    text = (made / "offer").read_text()
    assert text.split()[2:] == ["10.77.0.1"] and listening(process.pid) == ["10.77.0.1"]
    words = [word for one in psutil.process_iter(["cmdline"]) for word in one.info["cmdline"] or []]
    assert not [word for word in words if text.split()[1] in word]
    (tmp_path / "up-end").touch()
    assert process.wait(WAIT) == 0, out.read_text()
    assert not made.exists()


def test_a_folder_that_is_there_already_and_has_another_token_is_refused(tmp_path):
    """The folder has a random name. These hosts share /tmp; one of them finds another token in the file."""
    stub = tmp_path / "cmp"
    stub.write_text("#!/bin/sh\nexit 1\n")
    stub.chmod(0o755)
    before = set(Path("/tmp").glob("hvdkit-run-*"))
    with Hosts(2) as two:
        two[1].put(stub, Path(shutil.which("cmp")).resolve())
        process = begin(two, *OVER_GLOO, "-H", two.list, "true", out=tmp_path / "out")
        assert process.wait(WAIT) == 2
    assert re.search(
        r"host 10\.77\.0\.2: .*already exists, and does not belong to this job", (tmp_path / "out").read_text()
    )
    assert set(Path("/tmp").glob("hvdkit-run-*")) == before


def test_hosts_that_cannot_be_reached(hosts, tmp_path):
    for ssh_args, problem in (
        ("-o GlobalKnownHostsFile=/dev/null", "its host key is not known here; ssh {host} once, and accept its key"),
        ("-o PubkeyAuthentication=no", "it refuses the login; ssh-copy-id {host}; ssh must need no password"),
        ("-p 2222", "no ssh server listens there; start sshd, or pass its port: --ssh-args='-p 2222'"),
    ):
        command = ["hvdkit", "run", "-H", hosts.list, f"--ssh-args={ssh_args}", "--", "true"]
        assert begin(hosts, *command, out=tmp_path / "out").wait(WAIT) == 2, ssh_args
        text = (tmp_path / "out").read_text()
        for host in ("10.77.0.2", "10.77.0.3"):
            assert f"host {host}: {problem.format(host=host)}" in text, ssh_args


def test_hosts_with_other_software(tmp_path):
    """Each host has different files in some places; hvdkit run names all differences before it starts a process."""
    package = Path(hvdkit.__file__).parent
    about = next(file for file in metadata.files("keras") if file.name == "METADATA").locate()
    (tmp_path / "_version.py").write_text('__version__ = "0.0.9"\n')
    (tmp_path / "METADATA").write_text(re.sub(r"(?m)^Version: .*", "Version: 2.15.0", Path(about).read_text()))
    (tmp_path / "empty").mkdir()
    with Hosts(3) as hosts:
        hosts[1].put(tmp_path / "_version.py", package / "_version.py")
        hosts[1].put(tmp_path / "METADATA", Path(about))
        hosts[2].put(tmp_path / "empty", BIN)
        process = begin(hosts, "hvdkit", "run", "-H", hosts.list, "true", out=tmp_path / "out")
        assert process.wait(WAIT) == 2
    text = (tmp_path / "out").read_text()
    mine = f"Keras 2.15.0 (this host: {metadata.version('keras')}), "
    mine += f"hvdkit 0.0.9 (this host: {hvdkit.__version__}); install the same versions on all hosts"
    assert f"host 10.77.0.2: it has {mine}" in text
    assert re.search(rf"host 10\.77\.0\.3: it has no {BIN}/python\S* \(.*\); install the same environment", text), text
