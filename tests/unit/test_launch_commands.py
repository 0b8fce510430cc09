"""How ``hvdkit run`` turns options and facts into command lines, hosts, verdicts and restarts, without launching."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.speed import WAIT, wait_until

import hvdkit
from hvdkit.commands.run import engines, hosts, preflight, restarts
from hvdkit.commands.run.attempt import Attempt
from hvdkit.commands.run.config import RunConfig
from hvdkit.commands.run.engine_choice import EngineFacts, choose
from hvdkit.commands.run.engine_process import EngineProcess
from hvdkit.commands.run.engines import CommandLine, Engine, LaunchSpec
from hvdkit.commands.run.hosts import Host, parse_hosts
from hvdkit.commands.run.job import Job, prepare
from hvdkit.commands.run.job import _hosts as job_hosts
from hvdkit.commands.run.kubernetes import manifest
from hvdkit.commands.run.output import CLEAR, OutputWriter
from hvdkit.commands.run.preflight import Answer
from hvdkit.errors import ClusterError, NonFiniteError
from hvdkit.machine.interfaces import Address
from hvdkit.machine.mpi import Mpi, MpiLauncher
from hvdkit.watchdog.events import Exited
from hvdkit.watchdog.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
TWO = (Host("node1", 2), Host("node2", 1))
HERE = {"np": 2, "command": ("python", "train.py"), "names": ("PATH", "TF_X")}
SPREAD = HERE | {"np": 3, "hosts": TWO, "interface": "eth0", "ssh_args": "-p 2222"}
FOUR = Engine("mpirun", "mpirun", Mpi("Open MPI", "4.1"), "/env")
FIVE = replace(FOUR, mpi=Mpi("Open MPI", "5.0.11"))
MPICH = replace(FOUR, mpi=Mpi("MPICH", "5.0.2"))
INTEL = replace(FOUR, mpi=Mpi("Intel MPI", "2021.17"))
OVER_MPI, GLOO = Engine("horovodrun", "horovodrun", prefix="/env"), Engine("gloo", "horovodrun")
TCP = "--mca btl_tcp_if_include eth0"


@pytest.mark.parametrize(
    ("engine", "options", "expected"),
    [
        (
            FOUR,
            HERE | {"root": True},
            "mpirun -np 2 --bind-to none --map-by slot --oversubscribe --allow-run-as-root -x PATH -x TF_X "
            "python train.py",
        ),
        (
            FOUR,
            SPREAD,
            "mpirun -np 3 --bind-to none --map-by slot --oversubscribe --host node1:2,node2:1 --mca pml ob1 "
            f"--mca btl ^openib --prefix /env --mca plm_rsh_args '-p 2222' {TCP} --mca oob_tcp_if_include eth0 "
            "-x PATH -x TF_X python train.py",
        ),
        (
            FIVE,
            SPREAD,
            "mpirun -np 3 --bind-to none --map-by slot:OVERSUBSCRIBE --host node1:2,node2:1 --mca pml ob1 "
            f"--prefix /env --prtemca plm_ssh_args '-p 2222' {TCP} --prtemca prte_if_include eth0 "
            "-x PATH -x TF_X python train.py",
        ),
        (
            MPICH,
            SPREAD,
            "HYDRA_LAUNCHER_EXTRA_ARGS='-p 2222' HVDKIT_LAST=1 mpirun -n 3 -bind-to none -launcher ssh "
            "-hosts node1:2,node2:1 -iface eth0 -genvlist PATH,TF_X python train.py",
        ),
        (
            INTEL,
            SPREAD,
            "I_MPI_PIN=0 I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS='-p 2222' mpirun -bootstrap ssh -iface eth0 "
            "-genvlist PATH,TF_X -host node1 -n 2 python train.py : -host node2 -n 1 python train.py",
        ),
        (
            OVER_MPI,
            SPREAD,
            "horovodrun --mpi -np 3 -H node1:2,node2:1 --ssh-port 2222 --mpi-args '--prefix /env' "
            "--network-interfaces eth0 python train.py",
        ),
        (
            GLOO,
            SPREAD | {"ssh_args": "-i key -p2222"},
            "horovodrun --gloo -np 3 -H node1:2,node2:1 --ssh-identity-file key --ssh-port 2222 "
            "--network-interfaces eth0 python train.py",
        ),
        (
            Engine("srun", "srun"),
            SPREAD,
            "srun --ntasks 3 --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=none --unbuffered --overlap "
            "--nodelist node1,node2 --nodes 2 --export=SLURM_PMIX_FENCE=ring,PATH,TF_X python train.py",
        ),
        (
            Engine("srun", "srun"),
            SPREAD | {"names": ("PATH", "SLURM_PMIX_FENCE")},
            "srun --ntasks 3 --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=none --unbuffered --overlap "
            "--nodelist node1,node2 --nodes 2 --export=PATH,SLURM_PMIX_FENCE python train.py",
        ),
    ],
)
def test_command_lines(engine, options, expected):
    assert shlex.split(line(engine, **options)) == shlex.split(expected)


def line(engine, **options):
    return str(engines.command_line(LaunchSpec(engine=engine, **options)))


def test_within_slurm_no_engine_needs_ssh():
    assert " -launcher slurm -hosts " in line(MPICH, **SPREAD, slurm=True)
    assert " -bootstrap slurm " in line(INTEL, **SPREAD, slurm=True)
    here = (Host(socket.gethostname(), 1),)  # the remaining host; without --host mpirun would use the lost ones, too
    job = Job(RunConfig(slurm=True), here, FOUR, (), {})
    assert job.by_slurm and not replace(job, engine=GLOO).by_slurm
    assert f"--host {socket.gethostname()}:1" in str(job.command_line(here, ("true",), None))
    assert "--host" not in str(replace(job, config=RunConfig(np=1)).command_line(here, ("true",), None))


def test_what_an_engine_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"--ssh-args: got -F conf.*mpirun"):
        line(GLOO, **SPREAD | {"ssh_args": "-F conf"})
    assert "--mpi-args '--prefix /env -mca plm_rsh_args" in line(OVER_MPI, **SPREAD | {"ssh_args": "-F conf"})
    with pytest.raises(ValueError, match=r"--interface: got 10.0.0.0/24"):
        line(MPICH, **SPREAD | {"interface": "10.0.0.0/24"})
    with pytest.raises(ValueError, match="unknown MPI"):
        line(Engine("mpirun", "mpirun"), **HERE)


def test_only_named_variables_are_passed_on_and_secrets_by_name_alone():
    environment = {"PATH": "p", "TF_X": "1", "MY_TOKEN": "s3cret", "TF_API_KEY": "s3cret", "EDITOR": "vi", "HOME": "/"}
    names = engines.select_variables(environment, ("MY_TOKEN",))
    assert names == ("MY_TOKEN", "PATH", "TF_X")
    assert set(engines.engine_environment(environment, names)) == {"MY_TOKEN", "PATH", "TF_X", "HOME"}
    for engine in (FOUR, MPICH, INTEL):
        shown = line(engine, **SPREAD | {"names": names})
        assert "MY_TOKEN" in shown and "s3cret" not in shown
    with pytest.raises(ValueError, match="--env: got MISSING, expected a variable that is set"):
        engines.select_variables(environment, ("MISSING",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"np": 2, "min_np": 3}, r"--min-np: got 3, expected at most -np \(2\)"),
        ({"np": 0}, "-np: got 0"),
        ({"np": 2, "max_restarts": -1}, "--max-restarts: got -1"),
        ({"np": 2, "engine": "mpi"}, "--engine: got mpi"),
        ({"np": 2, "hosts": "a", "slurm": True}, "hosts: got -H and --slurm, expected one"),
        ({"np": 2, "env": ("TOKEN=abc",)}, r"--env: got TOKEN=\.\.\., expected the name"),
        ({"np": 2, "k8s": True}, "--image: got none"),
        ({"np": 2, "check_timeout": -1.0}, "--check-timeout: got -1"),
        ({"np": 2, "grace": float("nan")}, "--grace: got nan"),
        ({"np": 2, "ssh_args": "-i 'key"}, r"--ssh-args: got -i 'key \(No closing quotation\)"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message) as error:
        RunConfig(**options)
    assert "abc" not in str(error.value)


def test_hosts_of_the_command_line_and_of_files(tmp_path):
    assert parse_hosts("a:2,b,a:1") == (Host("a", 3), Host("b", 1))
    file = tmp_path / "hosts"
    file.write_text("# mine\nnode1 slots=4 max_slots=8\n\nnode2:2  # two\nnode3\n")
    assert hosts.read_hostfile(file) == (Host("node1", 4), Host("node2", 2), Host("node3", 1))
    file.write_text("node1 slots=4\nnode2 slots=many\n")
    with pytest.raises(ValueError, match=r"hosts, line 2: got 'node2 slots=many'"):
        hosts.read_hostfile(file)
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="without a host"):
        hosts.read_hostfile(file)
    with pytest.raises(ValueError, match=r"--hostfile: got .*none \(No such file"):
        hosts.read_hostfile(tmp_path / "none")
    for bad in ("a:0", "a:x", "", "a,,b", "-oProxyCommand=x", "a b", "a:1:2"):
        with pytest.raises(ValueError, match="-H: got"):
            parse_hosts(bad)
    for address in ("[2001:db8::1]:2", "2001:db8::1", "[::1]", "::1 slots=2"):
        with pytest.raises(ValueError, match=r"an IPv6 address, expected a name .*/etc/hosts"):
            parse_hosts(address)
    pbs = tmp_path / "pbs"
    pbs.write_text("n1\nn1\nn2\n")
    assert job_hosts(RunConfig(), {"PBS_NODEFILE": str(pbs)}) == (Host("n1", 2), Host("n2", 1))
    assert job_hosts(RunConfig(np=2), {}) == (Host(socket.gethostname(), 2),)
    with pytest.raises(ValueError, match=r"PBS_NODEFILE: got .*none \(No such file"):
        job_hosts(RunConfig(), {"PBS_NODEFILE": str(tmp_path / "none")})


def test_hosts_of_slurm():
    variables = {"SLURM_JOB_NODELIST": "gpu[08-10],login", "SLURM_TASKS_PER_NODE": "4(x3),1"}
    assert [str(host) for host in hosts.slurm_hosts(variables)] == ["gpu08:4", "gpu09:4", "gpu10:4", "login:1"]
    with pytest.raises(ValueError, match="--slurm: got no SLURM_JOB_NODELIST"):
        hosts.slurm_hosts({})
    for wrong in ({"SLURM_TASKS_PER_NODE": "4"}, {"SLURM_TASKS_PER_NODE": "x"}, {"SLURM_JOB_NODELIST": "n[a-b]"}):
        with pytest.raises(ValueError, match="SLURM_"):
            hosts.slurm_hosts(variables | wrong)


def test_ranks_take_slots_in_order_and_no_more_than_there_are():
    assert hosts.place_ranks(parse_hosts("a:2,b:2,c:2"), 3) == (Host("a", 2), Host("b", 1))
    assert hosts.place_ranks(parse_hosts("a:2,b:2"), None) == (Host("a", 2), Host("b", 2))
    with pytest.raises(ValueError, match=r"-np: got 5, expected at most 4 ranks \(a:2, b:2\)"):
        hosts.place_ranks(parse_hosts("a:2,b:2"), 5)


def found(built, mpi=None, plugins=(), horovodrun="/bin/horovodrun"):
    """Return simulated facts about a machine."""
    facts = EngineFacts()
    program = MpiLauncher("/mpi/bin/mpirun", True, mpi) if mpi else None
    vars(facts).update(built_mpi="mpi" in built, built_gloo="gloo" in built, mpirun=program, srun_plugins=plugins)
    vars(facts)["horovodrun"] = MpiLauncher(horovodrun, True) if horovodrun else None
    return facts


def test_the_engine_follows_what_horovod_was_built_with():
    four, five = Mpi("Open MPI", "4.1.8"), Mpi("Open MPI", "5.0.3")
    both, gloo, mpi = ("mpi", "gloo"), ("gloo",), ("mpi",)
    assert choose("auto", False, found(both, four)).name == "mpirun"
    assert choose("auto", False, found(both, four)).prefix == "/mpi"
    assert choose("auto", False, found(both)).name == "gloo"
    assert choose("auto", False, found(gloo, four)).name == "gloo"
    with pytest.raises(ClusterError, match="--engine: got no mpirun"):
        choose("auto", False, found(mpi))
    with pytest.raises(ClusterError, match=r"horovodrun: got Open MPI 5\.0\.3"):
        choose("horovodrun", False, found(both, five))
    with pytest.raises(ClusterError, match="got a Horovod without Gloo"):
        choose("gloo", False, found(mpi, four))
    with pytest.raises(ClusterError, match="no horovodrun"):
        choose("gloo", False, found(both, four, horovodrun=None))
    assert choose("auto", True, found(both, four, ("none", "pmi2"))).name == "mpirun"


def test_ssh_refusals_name_the_remedy():
    for said, remedy in (
        ("Host key verification failed.", "ssh n1 once"),
        ("n1: Permission denied (publickey).", "ssh-copy-id n1"),
        ("ssh: connect to host n1 port 22: Connection refused", "sshd"),
        ("ssh: connect to host n1 port 22: Connection timed out", "firewall"),
    ):
        assert remedy in preflight.explain_failure("n1", 255, said)
    assert "install the same environment" in preflight.explain_failure("n1", 127, "bash: /env/bin/python: No such file")
    assert "kaputt" in preflight.explain_failure("n1", 1, "kaputt")


def test_the_check_compares_versions_of_hvdkit_too():
    """The probe runs here, with this environment and with another version of hvdkit."""
    (same,) = preflight.check(["n1"], lambda host, command: list(command), WAIT)
    assert same.problem is None and "lo" in same.addresses
    older = ["sed", f"s/{re.escape(hvdkit.__version__)}/0.0.9/"]
    (answer,) = preflight.check(
        ["n1"], lambda host, command: ["sh", "-c", f"{shlex.join(command)} | {shlex.join(older)}"], WAIT
    )
    assert answer.problem.startswith(f"it has hvdkit 0.0.9 (this host: {hvdkit.__version__})")

    full = ["env", "TMPDIR=/dev/null/x"]
    (answer,) = preflight.check(["n1"], lambda host, command: [*full, *command], WAIT, temporary_bytes=4096)
    assert answer.problem.startswith("TMPDIR: got /dev/null/x (Not a directory), expected a folder for")


def test_a_host_may_have_a_nightly_build(tmp_path):
    """Its distribution has another name; -S leaves out this environment's packages."""
    info = tmp_path / "keras_nightly-3.16.0.dev1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keras-nightly\nVersion: 3.16.0.dev1\n")
    nightly = ["env", f"PYTHONPATH={tmp_path}", sys.executable, "-S"]
    (answer,) = preflight.check(["n1"], lambda host, command: [*nightly, *command[1:]], WAIT)
    assert "Keras 3.16.0.dev1 (this host: " in answer.problem


def test_a_host_may_write_what_is_not_utf_8():
    """For example an ssh server's banner."""
    script = "printf 'out\\377'; printf 'Permission denied\\377' >&2; exit 255"
    ((output, problem),) = preflight.run_on(["n1"], lambda host, command: list(command), ["sh", "-c", script], "", WAIT)
    assert output == "out\ufffd" and "ssh-copy-id n1" in problem


def answer(host, server, name="eth0", client="10.0.0.1", mask="255.255.255.0"):
    return Answer(host, None, {"lo": [("127.0.0.1", "255.0.0.0")], name: [(server, mask)]}, client, server)


def test_the_interface_between_hosts():
    mine = [Address("eth0", "10.0.0.1"), Address("docker0", "172.17.0.1"), Address("lo", "127.0.0.1")]
    one, two = answer("a", "10.0.0.2"), answer("b", "10.0.0.3")
    unknown = replace(answer("c", "10.0.0.4", "ens3"), server="-")  # a host may not know its own address
    assert preflight.network([one, two], None, mine) == preflight.Network("eth0", ("10.0.0.1",))
    assert preflight.network([one, answer("b", "10.0.0.3", "ens3")], None, mine).interface == "10.0.0.0/24"
    assert preflight.network([one, two], "eth0", mine).addresses == ("10.0.0.1",)
    for named, answers, message in (
        (None, [answer("a", "172.17.0.2", client="172.17.0.1")], "got docker0, by which a is reached"),
        (None, [answer("a", "10.0.0.2", client="192.168.7.7")], "got 192.168.7.7"),
        (None, [one, answer("b", "10.9.0.3", "ens3")], "one network that all hosts are in"),
        (None, [one, unknown, answer("b", "10.0.0.3", "ib0")], "one network that all hosts are in"),
        # The system may report an address without a netmask.
        (None, [answer("a", "10.0.0.2", mask=None), answer("b", "10.0.0.3", "ens3", mask=None)], "one network that"),
        ("lo", [one], "lo, which reaches no other host"),
        ("ib0", [one], "ib0, which this host does not have"),
        ("eth0", [one, answer("b", "10.0.0.3", "ens3")], "eth0, which is missing on b"),
    ):
        with pytest.raises(ClusterError, match=f"--interface: .*{message}"):
            preflight.network(answers, named, mine)


def test_hosts_that_fail_twice_in_a_row_are_left_out_and_others_come_back():
    book = restarts.HostPool(parse_hosts("a:2,b:2,c:2"), np=6, min_slots=2)
    everybody = {"a", "b", "c"}
    book.failed("b")
    book.failed("c")
    book.failed("b")
    assert book.next(everybody) == parse_hosts("a:2,b:2,c:2")  # two failures, but not in a row
    book.failed("b")
    assert book.next(everybody) == parse_hosts("a:2,c:2")
    assert book.next({"a", "b"}) == parse_hosts("a:2")
    assert book.next(everybody) == parse_hosts("a:2,c:2")  # c is included again
    assert book.next({"b"}) == parse_hosts("b:2")  # the other hosts are gone
    assert book.next(set()) is None
    assert restarts.HostPool(parse_hosts("a:2,b:2"), np=3, min_slots=3).next({"a"}) is None


def attempt(found, *members, code=1, last_line="", was_ended=False):
    """Return an attempt of two ranks at its end, given the verdict and how the ranks that began and mpirun ended."""
    made = Attempt(Job(RunConfig(), TWO, FOUR, (), {}), (Host("node1", 2),), preflight.THIS_HOST, ["true"], None, None)
    exited = {rank: SimpleNamespace(exited=None if code is None else Exited(code=code)) for rank, code in members}
    made._coordinator = SimpleNamespace(
        judge=lambda: found, members=exited, notified=False, flight="", verdict=None, saved="saved at step 4"
    )
    made._engine = SimpleNamespace(code=code, last_line=last_line, was_ended=was_ended)
    return made


WELL, UNKNOWN = Verdict(0), Verdict(1, "it is not known which rank failed first")


def test_an_engine_that_lingers_fails_no_job():
    judged = attempt(WELL, (0, 0), (1, 0), code=-15)._judge()
    assert judged.code == 0 and judged.line.startswith(
        "mpirun ended with exit code -15 after all ranks had ended with 0"
    )
    assert attempt(WELL, (0, 0), (1, 0), code=-15, was_ended=True)._judge() == Verdict(0)


def test_a_rank_that_failed_is_named_with_its_exit_code_whatever_the_engine_says():
    found = Verdict(3, "failed at step 4: ValueError: bad", 1, "node1", 4)
    judged = attempt(found, (0, -9), (1, 3))._judge()
    assert (judged.code, judged.rank, judged.final) == (3, 1, False)
    assert re.fullmatch(r"rank 1 on node1 failed at step 4: ValueError: bad; the job ended after \d\.\d s", judged.line)
    saved = attempt(Verdict(75, "ended with exit code 75", 1, "node1"), (0, 75), (1, 75), code=75)
    assert not saved._judge().final
    saved._coordinator.notified = True  # Slurm has announced the end of the job
    assert saved._judge().final


def test_an_engine_that_fails_is_quoted(monkeypatch):
    last = "There are not enough slots"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    judged = attempt(UNKNOWN, last_line=last)._judge()
    assert "started (hvdkit run was started in rank 3 of a job of mpirun (Open MPI)); mpirun: There are" in judged.line
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    judged = attempt(UNKNOWN, last_line=last)._judge()
    assert judged.code == 1
    assert judged.line.startswith(
        "mpirun ended with exit code 1 before any rank started; mpirun: There are not enough slots; the job ended after"
    )
    judged = attempt(UNKNOWN, (0, None), code=-15, last_line=last)._judge()
    assert judged.code == 143 and judged.line.startswith("rank 1 of 2 never started; mpirun: There are not")
    failed = attempt(UNKNOWN, (0, 3), code=-15, was_ended=True)
    failed._coordinator.verdict = Verdict(3, UNKNOWN.summary)
    judged = failed._judge()
    assert judged.code == 3 and judged.line.startswith("rank 1 of 2 never started; rank 0 ended with exit code 3; the")
    judged = attempt(UNKNOWN, (0, 0), (1, None), code=0)._judge()
    assert judged.code == 1 and judged.line.startswith(UNKNOWN.summary)  # never 0 if a rank is missing


def test_the_lines_of_an_engine(tmp_path):
    """After a failure they are held back; the last one that is not a ruler is kept to be quoted."""
    line = CommandLine(("sh", "-c", "echo before; echo; echo -----; printf rest; exit 7"))
    with (tmp_path / "out").open("wb") as file, selectors.DefaultSelector() as selector:
        output = OutputWriter({1: file, 2: file})
        engine = EngineProcess("mpirun", line, dict(os.environ), selector, output)
        while selector.get_map():
            for key, _ in selector.select():
                engine.read(key, hold=False)
        assert engine.last_line == "before"
        engine.flush(hold=True)
        assert engine.last_line == "rest"
        assert output.finish(WAIT)
        assert (tmp_path / "out").read_text() == "[mpirun] before\n[mpirun] \n[mpirun] -----\n"
        engine.write_held()
        assert output.finish(WAIT)
        assert (tmp_path / "out").read_text().endswith("[mpirun] rest\n")
        engine.end(0.0)
        until = time.monotonic() + WAIT
        while engine.code is None:
            assert time.monotonic() < until
        engine.tick(time.monotonic())
    assert engine.code == 7 and not engine.was_ended  # it had already ended


@pytest.mark.parametrize("found", [UNKNOWN, Verdict(3, "failed: ValueError: bad", 1, "node1")])
def test_the_file_of_the_flight_recorder_is_named(found):
    made = attempt(found, (0, 1), (1, 3))
    made._coordinator.flight = "flight recorder: /tmp/file"
    assert made._judge().flight == "flight recorder: /tmp/file"


@pytest.mark.parametrize(
    ("number", "codes", "code", "words"),
    [
        (15, (75, 75), 75, "SIGTERM: all ranks saved and ended"),
        (15, (75, 0), 75, "SIGTERM: all ranks saved and ended"),
        (15, (0, 0), 0, "SIGTERM: its ranks were ended"),
        (15, (75, -9), 143, "SIGTERM: its ranks were ended"),
        (2, (130, 130), 130, "SIGINT: its ranks were ended"),
    ],
)
def test_a_job_that_was_stopped_is_not_started_again(number, codes, code, words):
    made = attempt(UNKNOWN, *enumerate(codes))
    made._stopped_by = signal.Signals(number)
    judged = made._judge()
    assert judged.code == code and judged.final and judged.line.startswith(f"{words}; the job ended after")
    says_saved = judged.last_line.endswith("; saved at step 4")  # otherwise, the chief has said so at the signal
    assert says_saved == (code not in (0, 75))


def test_non_finite_values_end_attempts():
    assert NonFiniteError.exit_code == 65
    assert restarts.is_final(Verdict(65)) and not restarts.is_final(Verdict(1))


def test_lines_are_whole_and_progress_bars_keep_what_is_left_of_them(tmp_path):
    out = (tmp_path / "out").open("wb")
    output = OutputWriter({1: out, 2: out}, tmp_path)
    output.feed(0, 1, b"be")
    output.feed(1, 1, b"other\n")
    output.feed(0, 1, b"gun\n 10%\r 50%\r")
    output.feed(0, 1, b"100%\r\n[rank 0] tagged\n[rank 2] said\nrest")
    output.ended(0)
    assert output.finish(WAIT)
    out.close()
    assert (tmp_path / "out").read_bytes().splitlines() == [
        b"[rank 1] other", b"[rank 0] begun", b"[rank 0] 100%", b"[rank 0] tagged", b"[rank 2] said", b"[rank 0] rest",
    ]  # fmt: skip
    assert (tmp_path / "rank-0.log").read_bytes() == b"begun\n 10%\r 50%\r100%\r\n[rank 0] tagged\n[rank 2] said\nrest"


def shown(tmp_path, mode, *outputs):
    """Return the lines that are written of ``outputs``, pairs of rank and data, of 3 ranks."""
    with (tmp_path / "out").open("wb") as out:
        output = OutputWriter({1: out, 2: out}, tmp_path, mode)
        output.begin(3)
        for rank, data in outputs:
            output.feed(rank, 1, data)
        output.line("hvdkit run: the end")
        assert output.finish(WAIT)
    return (tmp_path / "out").read_text().splitlines()


def test_lines_that_ranks_write_alike_are_shown_once_and_each_ranks_lines_keep_their_order(tmp_path):
    same = b"\n".join(b"line %d" % number for number in range(3)) + b"\n"
    found = shown(
        tmp_path, "merged", (1, same), (0, b"first\n" + same), (2, same.replace(b"line", b"\x1b[1mline\x1b[0m"))
    )
    lines = [f"[ranks 0-2] line {number}" for number in range(3)]
    assert found == ["[rank 0] first", *lines, "hvdkit run: the end"]
    crossed = shown(tmp_path, "merged", (0, b"a\nb\na\n"), (1, b"b\na\n"), (2, b"[rank 2] a\n[rank 1] other\n"))
    assert crossed == ["[ranks 0,2] a", "[rank 1] other", "[ranks 0-1] b", "[ranks 0-1] a", "hvdkit run: the end"]


def test_a_line_that_no_other_rank_writes_waits_for_a_moment_only(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        output = OutputWriter({1: out, 2: out}, shown="merged")
        output.begin(2)
        output.feed(0, 1, b"alone\n")
        output.tick(time.monotonic())
        assert output.finish(WAIT) and not (tmp_path / "out").read_bytes()
        output.tick(time.monotonic() + 1.0)
        output.ended(1)
        output.feed(0, 1, b"the last rank\n")
        assert output.finish(WAIT)
    assert (tmp_path / "out").read_text().splitlines() == [f"[rank 0] {x}" for x in ("alone", "the last rank")]


@pytest.mark.parametrize("mode", ["all", "merged"])
def test_more_lines_than_may_wait_are_written_in_their_order(tmp_path, mode):
    data = b"".join(b"line %d\n" % number for number in range(1000))
    found = shown(tmp_path, mode, (0, data))
    assert found == [*(f"[rank 0] line {number}" for number in range(1000)), "hvdkit run: the end"]


def test_output_of_rank_0_or_in_files_only(tmp_path):
    outputs = [(rank, b"of %d\n" % rank) for rank in range(3)]
    assert shown(tmp_path, "rank0", *outputs) == ["[rank 0] of 0", "hvdkit run: the end"]
    assert shown(tmp_path, "files", *outputs) == ["hvdkit run: the end"]
    assert (tmp_path / "rank-2.log").read_text() == "of 2\n" * 2
    with pytest.raises(ValueError, match=r"--output: got files, without --logs"):
        RunConfig(np=2, output="files")


CHATTER = b"""WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:17959.23 %d port.cc:153] oneDNN custom operations are on. You may see slightly different numerical results.
I0000 00:00:17959.24 %d cpu_feature_guard.cc:227] This TensorFlow binary is optimized.
To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild TensorFlow.
"""


@pytest.mark.parametrize("level", [None, "0"])
def test_startup_messages_of_programs_that_import_tensorflow_first(tmp_path, monkeypatch, level):
    """Each rank writes them, with its own numbers, before hk.init()."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    with (tmp_path / "out").open("wb") as out:
        output = OutputWriter({1: out, 2: out}, tmp_path)
        output.begin(2)
        for rank in (0, 1):
            text = CHATTER % (rank, rank)
            for part in (text[:100], text[100:]):
                output.feed(rank, 2, part, is_starting=True)
        assert output.has_output == (level == "0")  # otherwise the progress of the start remains
        output.feed(0, 2, b"E0000 00:00:1 cuda.cc:1] no GPU\n", is_starting=True)
        output.feed(0, 1, b"I0000 of the program\n", is_starting=True)
        output.feed(0, 2, b"I0000 later\n")
        output.end()
        assert output.finish(WAIT)
    lines = (tmp_path / "out").read_text().splitlines()
    own = ["[rank 0] E0000 00:00:1 cuda.cc:1] no GPU", "[rank 0] I0000 of the program", "[rank 0] I0000 later"]
    assert lines[-3:] == own and (lines == own) == (level is None), lines
    assert (tmp_path / "rank-1.log").read_bytes() == CHATTER % (1, 1)


def test_the_level_of_tensorflows_messages_is_set_before_ranks_start(monkeypatch):
    config = RunConfig(np=2)
    for value, expected in ((None, ["1", "2"]), ("0", ["0", "0"])):
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
        if value is not None:
            monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", value)
        job = prepare(config, ["python"])
        levels = [job.program(["python"], rank)["environment"]["TF_CPP_MIN_LOG_LEVEL"] for rank in (0, 1)]
        assert levels == expected
        assert not [name for name in job.program(["python"], 0)["environment"] if "ONEDNN" in name]


def test_a_line_without_an_end_is_written_in_parts(tmp_path):
    """As of a program that writes binary data, which otherwise would stay in memory until the job ends."""
    with (tmp_path / "out").open("wb") as out, selectors.DefaultSelector() as selector:
        output = OutputWriter({1: out, 2: out})
        for _ in range(40):
            output.feed(0, 1, b"x" * (1 << 16))
        line = CommandLine(("sh", "-c", f"head -c {40 << 16} /dev/zero"))
        engine = EngineProcess("mpirun", line, dict(os.environ), selector, output)
        while selector.get_map():
            for key, _ in selector.select():
                engine.read(key, hold=False)
        engine.flush(hold=False)
        output.ended(0)
        assert output.finish(WAIT)
    lines = (tmp_path / "out").read_bytes().splitlines()
    assert all(len(line) < 1.2e6 for line in lines)
    assert sum(line.count(b"x") for line in lines) == sum(line.count(b"\0") for line in lines) == 40 << 16


def test_on_a_terminal_rank_0s_progress_stays_below_the_lines():
    screen, terminal = os.openpty()
    with os.fdopen(terminal, "wb", buffering=0) as file:
        output = OutputWriter({1: file, 2: file})
        output.feed(0, 1, b" 10%\r")
        output.feed(1, 1, b" 11%\r")  # not rank 0's: not shown
        output.feed(1, 1, b"epoch 1\n")
        expected = CLEAR + b"[rank 0]  10%" + CLEAR + b"[rank 1] epoch 1\r\n" + CLEAR + b"[rank 0]  10%"
        shown = b""
        while len(shown) < len(expected):  # a terminal returns one line at a time
            shown += os.read(screen, 4096)
    os.close(screen)
    assert shown == expected


def test_a_progress_bar_on_a_terminal_leaves_no_trace_in_a_file(tmp_path):
    screen, terminal = os.openpty()
    with os.fdopen(terminal, "wb", buffering=0) as shown, (tmp_path / "out").open("wb") as out:
        output = OutputWriter({1: out, 2: shown})
        output.feed(0, 2, b" 10%\r")
        output.feed(1, 1, b"epoch 1\n")
        assert output.finish(WAIT)
    os.close(screen)
    assert (tmp_path / "out").read_bytes() == b"[rank 1] epoch 1\n"


def test_the_manifest_is_an_mpijob_and_the_one_to_copy_is_made_so():
    config = RunConfig(np=4, k8s=True, image='registry/it:1"', slots_per_worker=2, max_restarts=3, min_np=2, gpu=True)
    job = yaml.safe_load(manifest(config, ["python", "train.py", "--name", "a b: c"]))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    assert (launcher["replicas"], worker["replicas"], job["spec"]["slotsPerWorker"]) == (1, 2, 2)
    container = launcher["template"]["spec"]["containers"][0]
    assert container["image"] == 'registry/it:1"'
    assert container["command"][-5:] == ["--", "python", "train.py", "--name", "a b: c"]
    assert container["command"][:6] == ["hvdkit", "run", "-np", "4", "--hostfile", "/etc/mpi/hostfile"]
    assert worker["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
    for wrong in ({"np": 3}, {"np": None}, {"name": "A_b"}, {"env": ("TOKEN",)}):
        with pytest.raises(ValueError, match=r"-np|--name|--env"):
            manifest(RunConfig(**{"np": 4, "k8s": True, "image": "i", "slots_per_worker": 2} | wrong), ["python"])
    shown = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
    copied = RunConfig(
        np=4, k8s=True, image="registry.example/train:1", slots_per_worker=2, max_restarts=3, name="train"
    )
    assert shown == yaml.safe_load(manifest(copied, ["python", "train.py"]))


def test_what_a_killed_mpirun_leaves_is_removed(tmp_path):
    """Open MPI 4 has a folder of 8 MiB for each mpirun, with its PID, which it cannot remove after SIGKILL."""
    here = tmp_path / f"ompi.{socket.gethostname()}.{os.getuid()}"
    elsewhere = tmp_path / f"ompi.{socket.gethostname()}-other.{os.getuid()}"  # if hosts share TMPDIR
    script = f"mkdir -p {here}/pid.$$/1 {here}/pid.1 {elsewhere}/pid.$$; touch {here}/pid.$$/1/data; kill -9 $$"
    line = CommandLine(("sh", "-c", script))
    with selectors.DefaultSelector() as selector:
        output = OutputWriter({})
        engine = EngineProcess("mpirun", line, {**os.environ, "TMPDIR": str(tmp_path)}, selector, output)
        wait_until(lambda: engine.code is not None)
        assert len(list(here.iterdir())) == 2
        engine.remove_files()
    assert [path.name for path in here.iterdir()] == ["pid.1"]  # of another job
    assert len(list(elsewhere.iterdir())) == 1
