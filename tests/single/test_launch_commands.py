"""What ``hvdkit run`` makes from options and facts, without launching: command lines, hosts, verdicts, restarts."""

from __future__ import annotations

import os
import re
import shlex
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hvdkit.cluster.logs import DIED
from hvdkit.cluster.report import FailureReport
from hvdkit.errors import ClusterError, NonFiniteError
from hvdkit.launch import command, engines, hosts, reach, restarts, verdict
from hvdkit.launch.choose import Chosen, EngineFacts, choose
from hvdkit.launch.config import Run
from hvdkit.launch.engines import Start
from hvdkit.launch.hosts import Host, parse_hosts
from hvdkit.launch.manifest import manifest
from hvdkit.launch.output import CLEAR, Output
from hvdkit.launch.reach import Answer
from hvdkit.machine.environment import SECRET
from hvdkit.machine.interfaces import Address
from hvdkit.machine.mpi import Mpi, Program

ROOT = Path(__file__).resolve().parents[2]
TWO = (Host("node1", 2), Host("node2", 1))
HERE = {"np": 2, "command": ("python", "train.py"), "names": ("PATH", "TF_X")}
SPREAD = HERE | {"np": 3, "hosts": TWO, "interface": "eth0", "ssh_args": "-p 2222", "prefix": "/env"}
TCP = "--mca btl_tcp_if_include eth0"


@pytest.mark.parametrize(
    ("engine", "facts", "expected"),
    [
        (
            "mpirun",
            HERE | {"root": True},
            "mpirun -np 2 --bind-to none --map-by slot --oversubscribe --allow-run-as-root -x PATH -x TF_X "
            "python train.py",
        ),
        (
            "mpirun",
            SPREAD,
            "mpirun -np 3 --bind-to none --map-by slot --oversubscribe -H node1:2,node2:1 --mca pml ob1 "
            f"--mca btl ^openib --prefix /env --mca plm_rsh_args '-p 2222' {TCP} --mca oob_tcp_if_include eth0 "
            "-x PATH -x TF_X python train.py",
        ),
        (
            "mpirun",
            SPREAD | {"mpi": Mpi("Open MPI", "5.0.11")},
            "mpirun -np 3 --bind-to none --map-by slot:OVERSUBSCRIBE --host node1:2,node2:1 --mca pml ob1 "
            f"--prefix /env --prtemca plm_ssh_args '-p 2222' {TCP} --prtemca prte_if_include eth0 "
            "-x PATH -x TF_X python train.py",
        ),
        (
            "mpirun",
            SPREAD | {"mpi": Mpi("MPICH", "5.0.2")},
            "HYDRA_LAUNCHER_EXTRA_ARGS='-p 2222' HVDKIT_LAST=1 mpirun -n 3 -bind-to none -launcher ssh "
            "-hosts node1:2,node2:1 -iface eth0 -genvlist PATH,TF_X python train.py",
        ),
        (
            "mpirun",
            SPREAD | {"mpi": Mpi("Intel MPI", "2021.17")},
            "I_MPI_PIN=0 I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS='-p 2222' mpirun -bootstrap ssh -iface eth0 "
            "-genvlist PATH,TF_X -host node1 -n 2 python train.py : -host node2 -n 1 python train.py",
        ),
        (
            "horovodrun",
            SPREAD | {"program": "horovodrun"},
            "horovodrun --mpi -np 3 -H node1:2,node2:1 --ssh-port 2222 --mpi-args '--prefix /env' "
            "--network-interfaces eth0 python train.py",
        ),
        (
            "gloo",
            SPREAD | {"program": "horovodrun", "ssh_args": "-i key -p2222"},
            "horovodrun --gloo -np 3 -H node1:2,node2:1 --ssh-identity-file key --ssh-port 2222 "
            "--network-interfaces eth0 python train.py",
        ),
        (
            "srun",
            SPREAD | {"program": "srun"},
            "srun --ntasks 3 --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=none --unbuffered --overlap "
            "--nodelist node1,node2 --nodes 2 --export=PATH,TF_X python train.py",
        ),
    ],
)
def test_command_lines(engine, facts, expected):
    assert shlex.split(str(engines.ENGINES[engine](Start(**facts)))) == shlex.split(expected)


def test_within_slurm_no_engine_needs_ssh():
    mpich = engines.mpirun(Start(**SPREAD | {"mpi": Mpi("MPICH", "5.0.2"), "slurm": True}))
    intel = engines.mpirun(Start(**SPREAD | {"mpi": Mpi("Intel MPI", "2021.17"), "slurm": True}))
    assert " -launcher slurm -hosts " in str(mpich) and " -bootstrap slurm " in str(intel)
    job = command.Job(Run(slurm=True), (), Chosen("mpirun", "mpirun"), (), {})
    assert job.by_slurm and not replace(job, chosen=Chosen("gloo", "horovodrun")).by_slurm
    here = (Host(socket.gethostname(), 1),)  # the one that is left: an mpirun without -H would take the lost ones, too
    assert f"-H {socket.gethostname()}:1" in str(job.command_line(here, ("true",)))
    assert "-H" not in str(replace(job, config=Run(np=1)).command_line(here, ("true",)))


def test_what_an_engine_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"--ssh-args: got -F conf.*mpirun"):
        engines.horovodrun(Start(**SPREAD | {"ssh_args": "-F conf"}), gloo=True)
    over_mpi = engines.horovodrun(Start(**SPREAD | {"ssh_args": "-F conf"})).argv
    assert "--prefix /env -mca plm_rsh_args '-F conf'" in over_mpi
    with pytest.raises(ValueError, match=r"--interface: got 10.0.0.0/24"):
        engines.mpich(Start(**SPREAD | {"interface": "10.0.0.0/24"}))
    with pytest.raises(ValueError, match="unknown MPI"):
        engines.mpirun(Start(**HERE, mpi=Mpi("unknown MPI", "")))


def test_only_named_variables_are_passed_on_and_secrets_by_name_alone():
    environment = {"PATH": "p", "TF_X": "1", "MY_TOKEN": "s3cret", "TF_API_KEY": "s3cret", "EDITOR": "vi", "HOME": "/"}
    names = engines.passed_on(environment, ("MY_TOKEN",), SECRET)
    assert names == ("MY_TOKEN", "PATH", "TF_X")
    assert set(engines.engine_environment(environment, names)) == {"MY_TOKEN", "PATH", "TF_X", "HOME"}
    for mpi in ("Open MPI", "MPICH", "Intel MPI"):
        line = engines.mpirun(Start(**SPREAD | {"names": names, "mpi": Mpi(mpi, "4.1")}))
        assert "MY_TOKEN" in str(line) and "s3cret" not in str(line)
    with pytest.raises(ValueError, match="--env: got MISSING, expected a variable that is set"):
        engines.passed_on(environment, ("MISSING",), SECRET)


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
        ({"np": 2, "grace": -1.0}, "--grace: got -1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message) as error:
        Run(**options)
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
    for bad in ("a:0", "a:x", "", "a,,b", "-oProxyCommand=x", "a b"):
        with pytest.raises(ValueError, match="-H: got"):
            parse_hosts(bad)
    pbs = tmp_path / "pbs"
    pbs.write_text("n1\nn1\nn2\n")
    assert hosts.pbs_hosts({"PBS_NODEFILE": str(pbs)}) == (Host("n1", 2), Host("n2", 1))
    assert hosts.pbs_hosts({}) is None


def test_hosts_of_slurm():
    variables = {"SLURM_JOB_NODELIST": "gpu[08-10],login", "SLURM_TASKS_PER_NODE": "4(x3),1"}
    assert [str(host) for host in hosts.slurm_hosts(variables)] == ["gpu08:4", "gpu09:4", "gpu10:4", "login:1"]
    with pytest.raises(ValueError, match="--slurm: got no SLURM_JOB_NODELIST"):
        hosts.slurm_hosts({})
    for wrong in ({"SLURM_TASKS_PER_NODE": "4"}, {"SLURM_TASKS_PER_NODE": "x"}, {"SLURM_JOB_NODELIST": "n[a-b]"}):
        with pytest.raises(ValueError, match="SLURM_"):
            hosts.slurm_hosts(variables | wrong)


def test_ranks_take_slots_in_order_and_no_more_than_there_are():
    assert hosts.placed(parse_hosts("a:2,b:2,c:2"), 3) == (Host("a", 2), Host("b", 1))
    assert hosts.placed(parse_hosts("a:2,b:2"), None) == (Host("a", 2), Host("b", 2))
    with pytest.raises(ValueError, match=r"-np: got 5, expected at most 4 ranks \(a:2, b:2\)"):
        hosts.placed(parse_hosts("a:2,b:2"), 5)


def found(built, mpi=None, plugins=(), horovodrun="/bin/horovodrun"):
    """Facts as they would be on some machine."""
    facts = EngineFacts()
    program = Program("/mpi/bin/mpirun", True, mpi) if mpi else None
    vars(facts).update(built_mpi="mpi" in built, built_gloo="gloo" in built, mpirun=program, srun_plugins=plugins)
    vars(facts)["horovodrun"] = Program(horovodrun, True) if horovodrun else None
    return facts


def test_the_engine_follows_what_horovod_was_built_with():
    four, five = Mpi("Open MPI", "4.1.8"), Mpi("Open MPI", "5.0.3")
    both, gloo, mpi = ("mpi", "gloo"), ("gloo",), ("mpi",)
    assert choose("auto", False, found(both, four)).engine == "mpirun"
    assert choose("auto", False, found(both, four)).prefix == "/mpi"
    assert choose("auto", False, found(both)).engine == "gloo"
    assert choose("auto", False, found(gloo, four)).engine == "gloo"
    with pytest.raises(ClusterError, match="--engine: got no mpirun"):
        choose("auto", False, found(mpi))
    with pytest.raises(ClusterError, match=r"horovodrun: got Open MPI 5\.0\.3"):
        choose("horovodrun", False, found(both, five))
    with pytest.raises(ClusterError, match="got a Horovod without Gloo"):
        choose("gloo", False, found(mpi, four))
    with pytest.raises(ClusterError, match="no horovodrun"):
        choose("gloo", False, found(both, four, horovodrun=None))
    assert choose("auto", True, found(both, four, ("none", "pmi2"))).engine == "mpirun"


def test_ssh_refusals_name_the_remedy():
    for said, remedy in (
        ("Host key verification failed.", "ssh n1 once"),
        ("n1: Permission denied (publickey).", "ssh-copy-id n1"),
        ("ssh: connect to host n1 port 22: Connection refused", "sshd"),
        ("ssh: connect to host n1 port 22: Connection timed out", "firewall"),
    ):
        assert remedy in reach.refusal("n1", 255, said)
    assert "install the same environment" in reach.refusal("n1", 127, "bash: /env/bin/python: No such file")
    assert "kaputt" in reach.refusal("n1", 1, "kaputt")


def answer(host, server, name="eth0", client="10.0.0.1", mask="255.255.255.0"):
    return Answer(host, None, {}, {"lo": [("127.0.0.1", "255.0.0.0")], name: [(server, mask)]}, client, server)


def test_the_interface_between_hosts():
    mine = [Address("eth0", "10.0.0.1"), Address("docker0", "172.17.0.1"), Address("lo", "127.0.0.1")]
    one, two = answer("a", "10.0.0.2"), answer("b", "10.0.0.3")
    assert reach.network([one, two], None, mine) == reach.Network("eth0", ("10.0.0.1",))
    assert reach.network([one, answer("b", "10.0.0.3", "ens3")], None, mine).interface == "10.0.0.0/24"
    assert reach.network([one, two], "eth0", mine).addresses == ("10.0.0.1",)
    for named, answers, message in (
        (None, [answer("a", "172.17.0.2", client="172.17.0.1")], "got docker0, by which a is reached"),
        (None, [answer("a", "10.0.0.2", client="192.168.7.7")], "got 192.168.7.7"),
        (None, [one, answer("b", "10.9.0.3", "ens3")], "one network that all hosts are in"),
        ("lo", [one], "lo, which reaches no other host"),
        ("ib0", [one], "ib0, which this host does not have"),
        ("eth0", [one, answer("b", "10.0.0.3", "ens3")], "eth0, which b has not"),
    ):
        with pytest.raises(ClusterError, match=f"--interface: .*{message}"):
            reach.network(answers, named, mine)


def test_hosts_that_fail_twice_in_a_row_are_left_out_and_others_come_back():
    book = restarts.Hosts(parse_hosts("a:2,b:2,c:2"), np=6, least=2)
    everybody = {"a", "b", "c"}
    book.failed("b")
    book.failed("c")
    book.failed("b")
    assert book.next(everybody) == parse_hosts("a:2,b:2,c:2")  # twice, but not in a row
    book.failed("b")
    assert book.next(everybody) == parse_hosts("a:2,c:2")
    assert book.next({"a", "b"}) == parse_hosts("a:2")
    assert book.next(everybody) == parse_hosts("a:2,c:2")  # c is taken in again
    assert book.next({"b"}) == parse_hosts("b:2")  # nobody else is there
    assert book.next(set()) is None
    assert restarts.Hosts(parse_hosts("a:2,b:2"), np=3, least=3).next({"a"}) is None


def course(*events, size=3):
    """An attempt of which the events are told: (rank, code, signals), or (rank, None) for a lost one."""
    told = verdict.Course(size, "mpirun")
    for rank in range(size):
        told.began(rank, f"node{rank}")
    for rank, code, *signals in events:
        told.lost(rank) if code is None else told.ended(rank, code, list(signals))
    return told


@pytest.mark.parametrize(
    ("events", "code", "line"),
    [
        ([(0, 0), (1, 0), (2, 0)], 0, ""),
        ([(2, 3), (0, 1), (1, -15, 15)], 3, "rank 2 on node2 ended with exit code 3; the job ended after 12.3 s"),
        ([(2, -9), (0, 1)], 137, r"rank 2 on node2 was killed by SIGKILL \(out of memory\?\); the job ended"),
        ([(0, -15, 15), (1, -11)], 139, "rank 1 on node1 was killed by SIGSEGV"),
        ([(1, None), (0, 1)], 1, "rank 1 on node1 is out of reach"),
        ([(1, 75, 15), (0, 75, 15), (2, 75, 15)], 75, "rank 1 on node1 ended with exit code 75"),  # Slurm's signal
        ([(0, 0), (1, 0)], 1, "rank 2 on node2 did not say how it ended"),  # never 0 where a rank is missing
    ],
)
def test_verdicts(events, code, line):
    judged = course(*events).verdict(0 if code in (0, 1) else 1, 12.3)
    assert judged.code == code and judged.stopped == (code == 75)
    assert re.match(line, judged.line) if line else judged.line == ""


def test_an_engine_that_lingers_fails_no_job():
    told = course((0, 0), (1, 0), (2, 0))
    judged = told.verdict(-15, 1.0)
    assert judged.code == 0 and judged.line.startswith("mpirun ended with exit code -15 after all ranks had ended with")
    told.engine_ended_by_us = True
    assert told.verdict(-15, 1.0) == verdict.Verdict(0, "")
    told = course((0, 0), (1, 0))
    told.engine_ended_by_us = True
    assert told.verdict(-15, 1.0).code == 143  # never 0 where a rank is missing


def report(rank, cause, verb="failed", **fields):
    """What a rank's hvdkit hands over about a failure of ``rank``."""
    return FailureReport(rank=rank, host=f"node{rank}", verb=verb, cause=cause, **fields)


def test_a_rank_that_reports_why_it_fails_is_quoted():
    told = course()
    told.said(2, report(2, "ClusterError: another rank left the job", follows=True))
    told.ended(2, 1, [])
    assert told.failing and told.first is None
    told.said(1, report(1, "ValueError: bad batch"))
    told.said(0, report(0, "OSError: later"))
    told.ended(1, 1, [])
    assert told.verdict(1, 1.0).line == "rank 1 on node1 failed: ValueError: bad batch; the job ended after 1.0 s"
    told = course((2, 1))  # the first whose end is known here need not be the first that failed
    told.said(0, report(1, DIED, step=7, died=True))
    told.ended(1, -9, [])
    judged = told.verdict(1, 1.0)
    assert (judged.rank, judged.code) == (1, 137)
    assert judged.line.startswith("rank 1 on node1 was killed by SIGKILL (out of memory?) at step 7;")
    told = course()  # it had left, and its process was still there when the others had ended
    told.said(0, report(2, "ended before the others", verb="left the job", step=7))
    told.ended(0, 1, [])
    told.ended(1, 1, [])
    told.ranks[2].ended_by_us = True
    told.ended(2, -15, [])
    assert told.verdict(143, 1.0).code == 1


def test_if_every_rank_ends_with_0_the_job_has_succeeded_whatever_was_reported():
    told = course()
    told.said(1, report(1, "ValueError: caught after all"))
    for rank in range(3):
        told.ended(rank, 0, [])
    assert not told.failing and told.verdict(0, 1.0) == verdict.Verdict(0, "")
    assert told.verdict(1, 1.0).code == 0


def test_what_a_program_writes_into_the_pipe_need_not_be_a_report():
    whole = report(1, "ValueError: \u00e9", step=3)
    assert FailureReport.decode(whole.encode()) == whole
    for wrong in (
        b"",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff",
        b'{"rank": 1}',
        whole.encode().replace(b'"step": 3', b'"step": "3"'),
        whole.encode().replace(b'"rank": 1', b'"rank": "1"'),
        whole.encode().replace(b'"rank"', b'"other"'),
    ):
        assert FailureReport.decode(wrong) is None, wrong


def test_a_rank_that_calls_mpi_abort_is_found():
    told = course((0, -15, 15), (1, -9, 15), (2, -15, 15))
    told.engine_lines = ["MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD", "with errorcode 6."]
    judged = told.verdict(6, 1.0)
    assert (judged.code, judged.rank) == (6, 2) and "called MPI_Abort with 6" in judged.line
    told = verdict.Course(2, "mpirun", engine_lines=["There are not enough slots"])
    assert "before any rank began, saying: There are not enough slots" in told.verdict(1, 1.0).line


def test_non_finite_values_end_attempts():
    assert NonFiniteError.exit_code == 65
    assert restarts.is_final(verdict.Verdict(65, "")) and not restarts.is_final(verdict.Verdict(1, ""))


def test_lines_are_whole_and_progress_bars_keep_what_is_left_of_them(tmp_path):
    out = (tmp_path / "out").open("wb")
    output = Output({1: out, 2: out}, tmp_path)
    output.feed(0, 1, b"be")
    output.feed(1, 1, b"other\n")
    output.feed(0, 1, b"gun\n 10%\r 50%\r")
    output.feed(0, 1, b"100%\r\n[rank 0] tagged\n[rank 2] said\nrest")
    output.ended(0)
    out.close()
    assert (tmp_path / "out").read_bytes().splitlines() == [
        b"[rank 1] other", b"[rank 0] begun", b"[rank 0] 100%", b"[rank 0] tagged", b"[rank 2] said", b"[rank 0] rest",
    ]  # fmt: skip
    assert (tmp_path / "rank-0.log").read_bytes() == b"begun\n 10%\r 50%\r100%\r\n[rank 0] tagged\n[rank 2] said\nrest"


def test_on_a_terminal_rank_0s_progress_stays_below_the_lines():
    screen, terminal = os.openpty()
    with os.fdopen(terminal, "wb", buffering=0) as file:
        output = Output({1: file, 2: file})
        output.feed(0, 1, b" 10%\r")
        output.feed(1, 1, b" 11%\r")  # not rank 0's: not shown
        output.feed(1, 1, b"epoch 1\n")
        expected = CLEAR + b"[rank 0]  10%" + CLEAR + b"[rank 1] epoch 1\r\n" + CLEAR + b"[rank 0]  10%"
        shown = b""
        while len(shown) < len(expected):  # a terminal hands out a line at a time
            shown += os.read(screen, 4096)
    os.close(screen)
    assert shown == expected


def test_the_manifest_is_an_mpijob_and_the_one_to_copy_is_made_so():
    config = Run(np=4, k8s=True, image='registry/it:1"', slots_per_worker=2, max_restarts=3, min_np=2, gpu=True)
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
            manifest(Run(**{"np": 4, "k8s": True, "image": "i", "slots_per_worker": 2} | wrong), ["python"])
    shown = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
    copied = Run(np=4, k8s=True, image="registry.example/train:1", slots_per_worker=2, max_restarts=3, name="train")
    assert shown == yaml.safe_load(manifest(copied, ["python", "train.py"]))
