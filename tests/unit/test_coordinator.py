"""The coordinator with simulated sentinels and clock: when a job fails, which rank is blamed, which get orders."""

from __future__ import annotations

import errno
import os
import select
import selectors
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.instructions import instructions

from hvdkit.machine import processes
from hvdkit.watchdog import coordinator as module
from hvdkit.watchdog import job_end
from hvdkit.watchdog.coordinator import Coordinator
from hvdkit.watchdog.events import (
    End,
    Exited,
    Failed,
    Flight,
    GiveFlight,
    GiveStacks,
    Joined,
    Leaving,
    Message,
    Raised,
    Release,
    Saved,
    Stacks,
    Status,
    Training,
    Unwound,
    WriteLine,
)
from hvdkit.watchdog.flight_recorder import CollectiveRecord, ranks_text
from hvdkit.watchdog.lines import Lines, Writer
from hvdkit.watchdog.member import Member
from hvdkit.watchdog.settings import WatchdogSettings
from hvdkit.watchdog.verdict import DIED

FEW, MANY = 64, 512
STEP = 0.1  # seconds of the simulated clock
TRAINS = Training(pid=1, waiters=[])
FOLLOWS = Failed(cause="HorovodInternalError: a peer is gone", follows=True, text="what follows")


class Job:
    """A coordinator, and sentinels that report healthy ranks unless the test changes that."""

    def __init__(
        self, size: int, *, trains: bool = True, returns: bool = True, lines: Lines | None = None, **settings: float
    ) -> None:
        self.now = 1000.0
        module.time = job_end.time = SimpleNamespace(monotonic=lambda: self.now)
        self.lines: list[str] = []
        self.written: list[list[str]] = [[] for _ in range(size)]  # by the sentinel of each rank
        self.sent: list[list[Message]] = [[] for _ in range(size)]
        self.coordinator = Coordinator(
            size,
            WatchdogSettings(**settings),
            selectors.DefaultSelector(),
            [],
            "token",
            lines=lines or SimpleNamespace(line=self.lines.append, finish=lambda seconds: True),
            under_run=not returns,
        )
        self.asked: list[int] = []  # ranks asked for their last collectives
        self.silent: set[int] = set()
        self.status = [Status() for _ in range(size)]
        self.stopped: dict[int, float] = {}
        for rank in range(size):
            self.join(rank)
            if trains:
                self.say(rank, TRAINS)
        self._reported_at = self.now

    def join(self, rank: int, place: str = "") -> Member:
        connection = SimpleNamespace(is_cut_off=lambda seconds: False, is_open=True)
        connection.close = lambda: setattr(connection, "is_open", False)
        peer = SimpleNamespace(connection=connection)
        joined = Joined(rank=rank, size=len(self.sent), host=f"host-{rank // 8}", place=place or f"place-{rank // 8}")
        return self.coordinator.join(joined, lambda order: self.obey(rank, order), peer)

    def obey(self, rank: int, order: Message) -> None:
        """Record an order; ranks have no collectives to send. Their sentinels write lines, those of other ranks too."""
        if isinstance(order, GiveFlight):
            self.asked.append(rank)
        elif isinstance(order, WriteLine):
            self.written[rank].append(order.text)
        else:
            self.sent[rank].append(order)

    def member(self, rank: int) -> Member:
        return self.coordinator.members[rank]

    def say(self, rank: int, message: Message) -> None:
        self.coordinator.handle(self.member(rank), message, self.now)

    def lose(self, rank: int, number: int | None = None) -> None:
        """Close the connection of a rank's sentinel, with a kernel error if ``number`` is given."""
        self.silent.add(rank)
        self.coordinator._connection_ended(self.member(rank), self.now, number)

    def report(self, rank: int) -> None:
        status = self.status[rank]
        if rank in self.stopped:
            status = Status(step=status.step, stopped=self.now - self.stopped[rank])
        self.say(rank, status)

    def run(self, seconds: float) -> None:
        """Advance the clock; sentinels report as usual."""
        until = self.now + seconds
        while self.now < until:
            self.now += STEP
            if self.now - self._reported_at >= 2.0:
                self._reported_at = self.now
                for rank in range(len(self.sent)):
                    if rank not in self.silent and self.member(rank).is_running:
                        self.report(rank)
            while self.asked:
                self.say(self.asked.pop(), Flight(records=[]))
            self.coordinator.tick(self.now)

    def heard(self, rank: int, kind: type[Message]) -> int:
        """Return the number of orders of this kind sent to the sentinel of ``rank``."""
        return Counter(type(order) for order in self.sent[rank])[kind]

    @property
    def line(self) -> str:
        """The last line, or ''."""
        return next((line for line in reversed(self.lines) if line.startswith("hvdkit: ")), "")


@pytest.fixture(autouse=True)
def real_clock(monkeypatch):
    """Restore the clock that a :class:`Job` replaces."""
    for one in (module, job_end):
        monkeypatch.setattr(one, "time", one.time)


def assert_goes_on(job: Job) -> None:
    assert job.coordinator.verdict is None and not job.lines
    assert not any(isinstance(order, End) for orders in job.sent for order in orders)


# ---- failures -----------------------------------------------------------------------------------------------------


def test_one_failure_among_many_is_ordered_to_every_rank_once():
    job = Job(200)
    job.say(7, Failed(cause="ValueError: the disk is full", step=3, text="its traceback"))
    for rank in range(8, 108):
        job.say(rank, FOLLOWS)
    job.run(0.5)
    assert [job.heard(rank, End) for rank in range(200)] == [1] * 200
    for rank in range(200):
        job.say(rank, Unwound())
    job.run(5)
    assert [(job.heard(rank, End), job.heard(rank, Release)) for rank in range(200)] == [(1, 1)] * 200
    line = "rank 7 on host-0 failed at step 3: ValueError: the disk is full"
    assert job.lines == ["[rank 7] its traceback", f"hvdkit: {line}"]
    assert job.sent[0][-2:] == [End(code=1, unwind=3.0, line=line), Release(code=1)]


def test_only_the_first_tracebacks_of_many_are_written():
    job = Job(FEW)
    for rank in range(40):
        job.say(rank, Failed(cause="ValueError: bad", text=f"traceback {rank}"))
    job.run(10)
    lines = "\n".join(job.lines).splitlines()
    assert sum("] traceback" in line for line in lines) == 16 and "[rank 0] traceback 0" in lines
    assert sum("24 more tracebacks are left out" in line for line in lines) == 1
    assert lines[-1] == "hvdkit: rank 0 on host-0 failed: ValueError: bad"


@pytest.mark.parametrize("failure", ["an error", "a hang"])
def test_a_reader_that_is_paused_does_not_hold_up_the_end_and_gets_all_lines_later(failure):
    reader, written = os.pipe()
    earlier = b"." * (1 << 20)  # more than a pipe buffers
    lines = Writer(written)
    lines.write(earlier)
    job = Job(3, patience=60.0, lines=lines)
    if failure == "an error":
        job.say(1, Failed(cause="ValueError: bad", text="its stacks 1"))
        job.say(2, Exited(code=-9))
    else:
        hang(job, 5, 4, 5, idle=61.0)
        job.run(2.3)
        answer(job)
    job.run(2.0)
    assert job.heard(0, End) == 1 and lines.waiting > len(earlier)
    read = b""
    # The last lines may have been read before the writer knows that they are written.
    while (has_more := bool(select.select([reader], [], [], 0.01)[0])) or not lines.finish(0.0):
        read += os.read(reader, 1 << 16) if has_more else b""
    texts = (
        ["[rank 1] its stacks 1"]
        if failure == "an error"
        else [f"[rank {rank}] its stacks {rank}" for rank in range(3)]
    )
    line = "hvdkit: " + job.coordinator.judge().line
    assert read.removeprefix(earlier).decode().splitlines() == [*texts, line]
    os.close(reader)
    os.close(written)


def test_victims_wait_for_the_rank_that_caused_their_error():
    job = Job(4)
    for rank in (0, 1):
        job.say(rank, FOLLOWS)
    job.run(1.0)
    assert_goes_on(job)
    job.say(2, Failed(cause="ValueError: late"))
    job.run(0.5)
    assert job.coordinator.verdict is not None and job.coordinator.verdict.rank == 2


def test_an_error_that_every_rank_raises_is_awaited_from_all_of_them():
    job = Job(4)
    for rank in range(4):
        assert_goes_on(job)
        job.say(rank, Failed(cause="ValueError: bad", text="a traceback"))
        job.run(0.2)
    job.run(0.3)
    assert job.coordinator.verdict is not None and job.coordinator.verdict.common
    assert "as every rank did" in job.coordinator.verdict.line


def test_an_error_of_one_rank_ends_the_job_after_a_second():
    job = Job(4)
    job.say(2, Failed(cause="ValueError: bad"))
    job.run(1.3)
    assert job.coordinator.verdict is not None and job.coordinator.verdict.rank == 2


def test_victims_alone_end_the_job_without_blaming_a_rank():
    job = Job(3)
    job.say(1, FOLLOWS)
    job.run(1.5)
    assert_goes_on(job)
    job.run(8)
    assert "it is not known which rank failed first; rank 1 reported: HorovodInternalError" in job.line


def test_the_last_line_names_the_newest_save_that_any_rank_has_reported():
    job = Job(3)
    for rank in range(3):
        job.say(rank, Saved(logdir="runs/x"))
    assert job.coordinator.saved == "nothing was saved yet in runs/x: the same command starts from the beginning"
    job.say(1, Saved(logdir="runs/x", step=80))
    job.say(0, Saved(logdir="runs/x", step=90))  # the chief, at once
    job.join(0)  # its sentinel was replaced
    job.say(2, Exited(code=-9, step=95))
    job.run(1)
    assert job.line == (
        "hvdkit: rank 2 on host-0 was killed by SIGKILL (out of memory?) at step 95; "
        "saved at step 90 in runs/x: the same command continues from there"
    )


def test_a_rank_that_is_killed_is_named_and_the_others_end_at_once():
    """A killed process cannot take part in an orderly end, so collectives could block the others."""
    job = Job(3)
    job.status[1] = Status(step=7)
    job.run(3)
    job.say(1, Exited(code=-9, step=7))
    job.run(1)
    assert job.line == "hvdkit: rank 1 on host-0 was killed by SIGKILL (out of memory?) at step 7"
    assert [job.heard(rank, End) for rank in range(3)] == [1, 0, 1]
    assert job.sent[0][-1] == End(code=137)
    for rank in (0, 2):
        job.say(rank, Exited(code=-9))
    job.run(1)
    assert job.coordinator.over and len(job.lines) == 1


def test_a_program_without_hvdkit_that_fails_leaves_the_others_a_second_to_report():
    job = Job(2, trains=False)
    job.say(1, Exited(code=3))
    job.run(0.7)
    assert_goes_on(job)
    job.run(1)
    assert job.line == "hvdkit: rank 1 on host-0 ended with exit code 3"


@pytest.mark.parametrize("why", ["a rank has failed", "a signal has come"])
def test_a_rank_whose_sentinel_joins_too_late_is_ended_at_once(why):
    job = Job(2, trains=False, returns=False)
    late = job.coordinator.members.pop(1)
    del job.coordinator._running[1]
    if why == "a rank has failed":
        job.say(0, Exited(code=3))
    else:
        job.coordinator.stop_requested = True
    job.silent.add(1)
    job.run(5.0)
    peer = SimpleNamespace(connection=SimpleNamespace(send=job.sent[1].append, is_open=True))
    job.coordinator.server.welcome = lambda peer, rank, answer: peer.connection.send(answer)
    job.coordinator._join(peer, late.joined)
    assert job.sent[1][-1] == End(code=3 if why == "a rank has failed" else 1)


def test_ranks_have_their_time_to_unwind_though_another_one_has_left():
    job = Job(3)
    job.say(1, Leaving(step=3))
    job.say(2, Failed(cause="ValueError: the disk is full"))
    job.run(0.4)
    job.say(1, Exited(code=0))
    job.run(1.0)
    assert not job.lines and job.coordinator.verdict is not None
    for rank in (0, 2):
        job.say(rank, Unwound())
    job.run(0.5)
    assert job.lines == ["hvdkit: rank 2 on host-0 failed at step 3: ValueError: the disk is full"]


def test_ctrl_c_ends_a_rank_that_waits_for_an_interrupted_one_and_none_that_may_be_saving():
    job = Job(3)
    job.coordinator.stop_requested = True
    job.say(1, Failed(cause="KeyboardInterrupt", verb="was interrupted", code=130))
    assert [type(order) for order in job.sent[1]] == [End] and job.sent[1][0].code == 130
    job.say(1, Unwound())
    assert job.sent[1][-1] == Release(code=130)
    job.say(0, Status(in_graph=[CollectiveRecord(9, "g", "allreduce", "train.py:7", "", 4, 1, 1.0, None)]))
    job.run(1.0)
    assert [type(order) for order in job.sent[0]] == [End] and not job.sent[2]


# ---- ranks that wait for others -----------------------------------------------------------------------------------


def in_graph(key: str, since: float) -> Status:
    record = CollectiveRecord(9, key, f"allreduce of {key}", "train.py:7", "", 4, 1, since, None)
    return Status(idle=20.0, in_graph=[record])


CAUGHT = Raised(cause="FileNotFoundError: part-3.csv", text="its traceback")


def test_a_rank_whose_program_caught_an_exception_is_blamed_while_others_wait_in_a_graph():
    job = Job(3)
    job.run(4)
    job.say(1, CAUGHT)
    job.status[1] = Status(has_raised=True)
    job.status[0] = job.status[2] = in_graph("sum", job.now)
    job.run(3)
    assert_goes_on(job)  # the others may raise the same exception
    job.run(10)
    assert job.line == (
        "hvdkit: rank 1 on host-0 failed: FileNotFoundError: part-3.csv (caught by the program; rank 0 waits in "
        "allreduce of sum (train.py:7))"
    )
    assert job.lines[0] == "[rank 1] its traceback"
    assert [job.heard(rank, End) for rank in range(3)] == [1, 1, 1]


def test_exceptions_on_all_ranks_that_programs_catch_do_not_end_the_job():
    """For example a batch_size that is refused: the program goes on with another one, later than the others."""
    job = Job(3)
    for rank in range(3):
        job.say(rank, CAUGHT)
        job.status[rank] = Status(has_raised=True)
    job.status[0] = job.status[1] = replace(in_graph("next", job.now), has_raised=True)
    job.run(25)
    assert_goes_on(job)


def test_an_exception_after_which_the_rank_goes_on_with_the_others_does_not_end_the_job():
    job = Job(2)
    job.say(1, CAUGHT)
    job.status[1] = Status(has_raised=False)  # it has completed a collective since then
    job.status[0] = in_graph("sum", job.now)
    job.run(25)
    assert_goes_on(job)


def test_a_rank_that_is_busy_after_an_exception_is_waited_for():
    """For example while it uploads its log; then it goes on with the others."""
    job = Job(2)
    job.say(1, CAUGHT)
    job.status[1] = Status(has_raised=True, busy="uploading the log")
    job.status[0] = in_graph("sum", job.now)
    job.run(25)
    assert_goes_on(job)
    job.status[1] = Status(has_raised=True)
    job.run(10)
    assert job.coordinator.verdict.rank == 1


def test_ranks_in_different_graphs_end_the_job():
    """Rank 1 has left the loop and trains its next model."""
    job = Job(2)
    job.status = [in_graph("loop", job.now), in_graph("next", job.now)]
    job.run(15)
    assert "failed: CollectiveMismatchError: waits in allreduce of next (train.py:7), but rank 0 in" in job.line


def test_a_long_wait_is_reported_again_and_again_and_does_not_end_the_job():
    job = Job(2)
    job.status = [in_graph("sum", job.now), Status(last="allgather (train.py:3)")]
    job.run(29)
    assert_goes_on(job)
    job.run(5)
    here = "rank 1 is in no collective (working)"
    assert job.written == [  # each rank's standard error has its own line, once
        [f"[rank 0] has waited for rank 1 for 30 s in allreduce of sum (train.py:7) (on host-0); {here}"],
        ["[rank 1] is in no collective (working); its last one was allgather (train.py:3) (on host-0)"],
    ]
    job.run(20)
    assert list(map(len, job.written)) == [1, 1]
    job.run(15)
    assert list(map(len, job.written)) == [2, 2] and "for 60 s" in job.written[0][1]
    job.status[0] = Status()
    job.run(5)
    job.status[0] = in_graph("another", job.now)
    job.run(34)
    assert list(map(len, job.written)) == [3, 3] and "for 30 s in allreduce of another" in job.written[0][2]
    assert job.coordinator.verdict is None and not job.lines


def test_a_long_wait_of_many_ranks_is_16_lines_and_their_number():
    job = Job(MANY)
    job.status = [in_graph("sum", job.now)] * (MANY - 1) + [Status()]
    job.run(34)
    counts = list(map(len, job.written))
    assert counts == [2] + [1] * 15 + [0] * (MANY - 16)
    assert job.written[0][1] == f"hvdkit: {MANY - 1} of {MANY} ranks wait; {MANY - 16} are left out"


# ---- the end of scripts -------------------------------------------------------------------------------------------


def test_ranks_that_all_leave_are_released_at_once():
    job = Job(3)
    for rank in range(3):
        job.say(rank, Leaving())
        assert job.heard(0, Release) == 0
    job.run(STEP)
    assert [job.sent[rank] for rank in range(3)] == [[Release(all_leave=True)]] * 3
    for rank in range(3):
        job.say(rank, Exited(code=0))
    job.run(5)
    assert job.coordinator.over
    assert_goes_on(job)


def test_a_single_rank_that_leaves_is_released_after_a_while_and_not_blamed():
    job = Job(3)
    job.say(1, Leaving())
    job.run(1.8)
    assert job.heard(1, Release) == 0
    job.run(0.5)
    assert job.sent[1] == [Release()] and not job.sent[0]
    job.say(1, Exited(code=0))
    job.run(60)
    assert_goes_on(job)


STAYS = Leaving(keeps_horovod=True)


def test_with_process_sets_a_rank_is_released_once_all_others_are_idle():
    job = Job(3)
    job.status = [Status(idle=20.0), Status(idle=20.0), Status(idle=0.5)]  # rank 2 computes, and rank 0 waits for it
    job.say(1, STAYS)
    job.run(20_000)
    assert job.heard(1, Release) == 0
    job.status[2] = Status(idle=20.0)
    job.run(3)
    assert job.sent[1] == [Release()] and not job.sent[0]


@pytest.mark.parametrize("ranks", ["", "0:2:1"])
def test_a_rank_that_another_waits_for_in_an_eager_collective_is_released(ranks):
    job = Job(4)
    waits = CollectiveRecord(9, "eager 9", "allreduce", "train.py:3", ranks, 4, 1, 0.0, None)
    job.status = [Status(idle=20.0, waits=waits), Status(), Status(idle=0.5), Status()]
    for rank in (1, 3):
        job.say(rank, STAYS)
        job.run(4)
    assert job.heard(1, Release) == job.heard(3, Release) == 0
    while not job.sent[1] and not job.sent[3]:
        job.run(0.1)
    assert [job.heard(rank, Release) for rank in (1, 3)] == ([1, 0] if ranks else [0, 1])
    job.say(1 if ranks else 3, Exited(code=0))
    job.say(0, FOLLOWS)
    job.run(5)
    assert job.line.startswith(f"hvdkit: rank {1 if ranks else 3} on host-0 left the job"), job.lines


def test_a_rank_does_not_wait_for_one_that_was_released_and_waits_in_mpi():
    job = Job(2)
    job.status[0] = Status(idle=20.0)
    job.say(1, STAYS)
    job.run(15)
    assert job.heard(1, Release) == 1
    job.say(0, STAYS)
    job.run(10)
    assert job.heard(0, Release) == 1


def test_idle_time_before_a_rank_left_does_not_count():
    job = Job(3)
    job.status[0] = Status(idle=20.0)  # waited for rank 1, then for rank 2
    for rank in (1, 2):
        job.run(5)
        job.say(rank, STAYS)
    job.run(7)
    assert job.heard(1, Release) == job.heard(2, Release) == 0
    while not job.sent[1] and not job.sent[2]:
        job.run(0.1)
    assert job.sent[2] == [Release()] and not job.sent[1]  # the last that left


def test_a_rank_that_keeps_horovod_running_is_not_blamed_for_the_errors_of_others():
    job = Job(3)
    job.say(1, STAYS)
    job.run(30)
    job.say(2, FOLLOWS)
    job.run(0.5)
    job.say(0, Exited(code=None))
    job.run(5)
    assert job.line.startswith("hvdkit: rank 0 on host-0 failed: died without"), job.lines
    assert job.heard(1, End) == 1


def test_a_rank_that_dies_while_it_keeps_horovod_running_has_failed():
    job = Job(3)
    job.say(1, STAYS)
    job.run(30)
    job.say(1, Exited(code=None))
    job.run(5)
    assert job.line.startswith(f"hvdkit: rank 1 on host-0 failed: {DIED}"), job.lines


def test_a_rank_that_others_still_needed_is_blamed():
    job = Job(3)
    job.status[0] = Status(step=20)
    job.say(1, Leaving(step=20))
    job.run(0.5)
    job.say(0, FOLLOWS)
    job.run(15)  # the coordinator waits for its exit code, which does not come
    assert job.line.startswith("hvdkit: rank 1 on host-0 left the job at step 20: ended before the others: rank 0")


def test_scripts_that_end_with_a_code_keep_it():
    job = Job(2)
    job.say(1, Leaving(step=4))
    job.run(2.5)
    job.say(1, Exited(code=3, step=4))
    job.run(8)
    assert job.line == "hvdkit: rank 1 on host-0 failed at step 4: sys.exit(3) while other ranks continued"
    assert job.coordinator.verdict.code == 3


def test_after_exit_code_75_the_others_have_their_grace_to_save():
    job = Job(3, grace=20.0)
    job.say(1, Leaving(step=4))
    job.say(1, Exited(code=75, step=4))
    job.run(19)
    assert_goes_on(job)
    job.say(0, Leaving(step=4))
    job.say(0, Exited(code=75, step=4))
    job.run(3)
    assert job.coordinator.verdict.code == 75 and job.coordinator.verdict.rank == 1
    assert job.heard(2, End) == 1


def test_os_exit_with_0_is_a_failure_unless_all_ranks_do_so():
    job = Job(2)
    job.say(1, Exited(code=0))
    job.run(0.2)
    assert_goes_on(job)
    job.run(0.5)
    assert job.line == f"hvdkit: rank 1 on host-0 failed: {DIED}"
    job = Job(2)
    for rank in range(2):
        job.say(rank, Exited(code=0))
        job.run(0.2)
    job.run(5)
    assert_goes_on(job)


# ---- ranks that are stopped or unreachable ------------------------------------------------------------------------


def test_a_rank_that_is_stopped_is_blamed_after_the_heartbeats_limit():
    job = Job(3, heartbeat=10.0)
    job.status[1] = Status(step=5)
    job.run(3)
    job.stopped[1] = job.now
    job.report(1)
    job.run(9.5)
    assert_goes_on(job)
    job.run(1.5)
    assert job.line == "hvdkit: rank 1 on host-0 failed at step 5: has been stopped (SIGSTOP) for 10 s"
    assert job.coordinator.verdict.code == 137


def test_a_job_that_is_suspended_as_a_whole_goes_on_later():
    """Its ranks are seen to continue one after the other."""
    job = Job(3, heartbeat=10.0)
    for rank in range(3):
        job.stopped[rank] = job.now
        job.report(rank)
        job.run(0.3)
    job.run(3600)
    assert_goes_on(job)
    for rank in range(3):
        del job.stopped[rank]
        job.report(rank)
        job.run(0.5)
    job.run(30)
    assert_goes_on(job)
    job.stopped[2] = job.now
    job.report(2)
    job.run(12)
    assert job.coordinator.verdict.rank == 2


def test_a_silent_sentinel_of_another_host_has_a_minute_unless_its_host_is_silent():
    """A host without a free core, or one that swaps, still acknowledges packets: its ranks are healthy."""
    job = Job(3, heartbeat=10.0)
    job.status = [Status(step=9)] * 3
    for seconds in (14.5, 58.0):
        job.silent.add(1)
        job.run(seconds)
        assert_goes_on(job)
        job.silent.clear()
        job.run(4)
    job.silent.add(1)
    job.run(63)
    assert "rank 1 on host-0 failed at step 9: has not answered for 60 s: its host is cut off" in job.line

    job = Job(3, heartbeat=10.0)
    job.member(1).peer.connection.is_cut_off = lambda seconds: True
    job.silent.add(1)
    job.run(13)
    assert "rank 1 on host-0 failed: has not answered for 10 s: its host is cut off" in job.line


def test_no_sentinel_is_blamed_for_the_time_when_the_coordinator_was_stopped():
    job = Job(3, heartbeat=10.0)
    for seconds in (3.0, 30.0, 3000.0):
        job.run(10)
        job.now += seconds
    job.run(20)
    assert_goes_on(job)


def test_a_sentinel_that_comes_back_is_no_failure():
    job = Job(3)
    for _ in range(2):
        job.run(1)
        job.lose(1)
        job.run(4.5)
        job.silent.clear()
        job.join(1)
    job.run(20)
    assert_goes_on(job)
    job.lose(1)
    job.run(6)
    assert "rank 1 on host-0 is unreachable (its host is down, the network is cut, or its" in job.line


def test_a_lost_sentinel_of_hvdkit_run_does_not_come_back():
    job = Job(3, returns=False)
    job.lose(1)
    job.run(0.5)
    assert job.coordinator.verdict.rank == 1 and job.coordinator.verdict.code == 1


def test_a_rank_of_this_host_whose_sentinel_gets_no_core_is_healthy():
    """The kernel reports that a process here has ended, so silence proves nothing."""
    job = Job(3)
    job.join(1, processes.place())
    job.say(1, Training(pid=os.getpid()))
    job.silent.add(1)
    job.run(600)
    assert_goes_on(job)
    job.silent.clear()
    job.run(5)
    assert_goes_on(job)


def test_a_rank_of_this_host_that_is_stopped_with_its_sentinel_is_blamed():
    job = Job(3)
    with subprocess.Popen(["sleep", "600"]) as stopped:
        os.kill(stopped.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        job.join(1, processes.place())
        job.say(1, Training(pid=stopped.pid))
        job.silent.add(1)
        job.run(20)
        stopped.kill()
    assert "rank 1 on host-0 has not answered for 15 s" in job.line.replace("failed: ", "")


def test_a_killed_sentinel_of_a_rank_of_this_host_has_a_minute_to_be_replaced():
    job = Job(2)
    job.join(1, processes.place())
    job.say(1, Training(pid=os.getpid()))
    job.lose(1)
    job.run(50)
    assert_goes_on(job)
    job.run(30)
    assert job.coordinator.verdict.rank == 1


def test_sentinels_report_well_within_the_limit():
    spans = [WatchdogSettings(heartbeat=10.0).interval(size) for size in (2, 64, 128, 256, 512, 1024, 4096, 100_000)]
    assert spans == [2.0, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0, 4.0]
    assert WatchdogSettings(heartbeat=10.0).welcome(256).interval == 3.0


# ---- hangs --------------------------------------------------------------------------------------------------------


def hang(job: Job, *counts: int, idle: float) -> None:
    """Have all ranks report these counts, and no activity for ``idle`` seconds."""
    for rank, count in enumerate(counts):
        job.status[rank] = Status(step=3, count=count, idle=idle)


def answer(job: Job, **waiting: bool) -> None:
    for rank in range(len(job.sent)):
        text, where = f"its stacks {rank}", f"in step, train.py:{rank}"
        job.say(rank, Stacks(text=text, where=where, waiting=waiting.get(f"rank{rank}", True)))


def test_a_job_hangs_if_nothing_moves_on_any_rank_and_the_one_that_has_done_least_is_blamed():
    job = Job(3, patience=60.0)
    hang(job, 5, 4, 5, idle=50.0)
    job.run(5)
    assert [job.heard(rank, GiveStacks) for rank in range(3)] == [0, 0, 0]
    hang(job, 5, 4, 5, idle=61.0)
    job.run(2.3)
    assert [job.heard(rank, GiveStacks) for rank in range(3)] == [1, 1, 1]
    assert_goes_on(job)
    answer(job)
    job.run(0.5)
    assert job.lines[:3] == [f"[rank {rank}] its stacks {rank}" for rank in range(3)]
    why = "no progress for 61 s (in step, train.py:1); the stacks of all ranks are above"
    assert job.line == f"hvdkit: rank 1 on host-0 hangs at step 3: {why}"
    job.run(10)
    assert [job.heard(rank, GiveStacks) for rank in range(3)] == [1, 1, 1]


def test_of_ranks_that_have_done_the_same_the_one_that_is_not_in_a_collective_is_blamed():
    job = Job(3, patience=60.0)
    hang(job, 5, 5, 5, idle=61.0)
    job.run(2.3)
    answer(job, rank2=False)
    job.run(0.5)
    assert job.coordinator.verdict.rank == 2


def test_a_rank_that_does_not_answer_does_not_hold_up_the_verdict():
    job = Job(3, patience=60.0)
    hang(job, 5, 4, 5, idle=61.0)
    job.run(8)
    assert job.coordinator.verdict.rank is not None and "hangs" in job.line


@pytest.mark.parametrize("holds_off", ["one rank works", "a rank is busy", "there is no limit"])
def test_ranks_that_may_wait_for_one_that_works_do_not_hang(holds_off):
    job = Job(3, patience=0.0 if holds_off == "there is no limit" else 60.0)
    hang(job, 5, 5, 5, idle=300.0)
    if holds_off == "one rank works":
        job.status[1] = Status(step=3, count=5, idle=0.5)
    if holds_off == "a rank is busy":
        hang(job, 5, 5, 5, idle=3000.0)
        job.status[1] = Status(step=3, count=5, busy="uploading")
    job.run(10)
    assert_goes_on(job)
    assert [job.heard(rank, GiveStacks) for rank in range(3)] == [0, 0, 0]


def test_other_ranks_wait_six_times_as_long_for_one_that_works():
    job = Job(3, patience=60.0)
    hang(job, 5, 5, 5, idle=361.0)
    job.status[1] = Status(step=3, count=4, idle=0.5)
    job.run(2.3)
    answer(job)
    job.run(0.5)
    assert job.coordinator.verdict.rank == 1


def test_late_exits_of_all_ranks_are_a_failure_and_those_of_some_are_not():
    late = Status(step=3, idle=121.0, is_late=True)
    job = Job(3, patience=600.0)
    for rank in range(3):
        job.say(rank, Leaving())
    job.status = [late, Status(step=3), late]  # the handlers of rank 1 work
    job.run(4000)
    assert_goes_on(job)
    job.status[0] = Status(step=3, idle=9000.0, is_late=True)
    job.run(10)
    assert_goes_on(job)
    job.status[1] = late
    job.run(2.3)
    for rank in range(3):
        job.say(rank, Stacks(text="it no longer runs Python", where="in f, a.py:1" * (rank == 1), waiting=rank != 1))
    job.run(0.5)
    why = "no progress for 9000 s (in f, a.py:1); the stacks of all ranks are above"
    assert job.line == f"hvdkit: rank 1 on host-0 did not exit at step 3: {why}"
    assert [job.heard(rank, End) for rank in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("ended", [1, 2])
def test_late_exits_that_end_while_stacks_are_collected_are_no_failure(ended):
    job = Job(2, patience=600.0)
    for rank in range(2):
        job.say(rank, Leaving())
    job.status = [Status(step=3, idle=121.0, is_late=True) for _ in range(2)]
    while not job.heard(0, GiveStacks):
        job.run(0.1)
    for rank in range(ended):
        job.say(rank, Exited(code=0))
    job.status[1] = Status(step=3)
    job.run(20)
    assert job.coordinator.verdict is None


def test_late_exits_do_not_shorten_the_limits_of_ranks_that_train():
    late = Status(step=3, idle=5000.0, is_late=True)
    job = Job(3, patience=60.0)
    job.say(0, Leaving(keeps_horovod=True))
    job.status = [late, Status(step=3, idle=0.5), Status(step=3, idle=61.0)]
    job.run(10)
    assert_goes_on(job)
    job.status[2] = Status(step=3, idle=361.0)  # not hidden by the longer idle time of rank 0
    job.run(8)
    assert job.coordinator.verdict is not None and "hangs at step 3" in job.line
    job = Job(3, patience=60.0)
    job.status = [late, late, Status(step=3, idle=61.0)]  # a thread of rank 2 does not end
    job.run(8)
    assert job.coordinator.verdict is not None


# ---- ranks that wait for each other -------------------------------------------------------------------------------


def waits(name: str, ranks: tuple[int, ...] = ()) -> CollectiveRecord:
    return CollectiveRecord(1, f"eager {name}", f"{name}()", f"train.py:{name}", ranks_text(ranks), 0, None, 1.0, None)


def test_two_eager_collectives_that_wait_for_each_other():
    job = Job(3)
    job.status[0], job.status[1] = Status(waits=waits("a")), Status(waits=waits("b"))
    job.run(12)
    words = (
        "CollectiveMismatchError: waits in b() (train.py:b), but rank 0 in a() (train.py:a), and neither can continue"
    )
    assert f"rank 1 on host-0 failed: {words}" in job.line


def test_a_collective_that_a_late_rank_will_enter_is_waited_in():
    job = Job(3)
    job.status[0], job.status[1] = Status(waits=waits("a", (0, 1, 2))), Status(waits=waits("b", (1, 2)))
    job.run(60)
    assert job.written[0][0] == (
        "[rank 0] has waited for rank 1, 2 for 30 s in a() (train.py:a) (on host-0); rank 1 waits in b() (train.py:b)"
    )
    assert_goes_on(job)
    for rank in range(3):
        job.status[rank] = Status()
    job.run(10)
    assert_goes_on(job)


# ---- many ranks: instructions are counted, time is not measured ---------------------------------------------------


MESSAGES = {
    "a status": Status(step=7, idle=0.1),
    "a wait": Status(step=7, waits=waits("a")),
    "a stop": Status(step=7, stopped=1.0),
    "a hang": Status(step=7, idle=700.0),
    "hk.init()": TRAINS,
    "an error": Failed(cause="ValueError: x", text="x" * 100),
    "an error that another rank caused": FOLLOWS,
    "the end of a script": Leaving(step=9),
    "a death": Exited(code=-9),
    "a saved rank": Exited(code=75),
    "an end": Exited(code=0),
    "an unwound rank": Unwound(),
    "stacks": Stacks(text="x" * 100),
    "collectives": Flight(records=[]),
}


def assert_costs_the_same(prepare: Callable[[Job], Callable[[], object]]) -> None:
    """Check that the call that ``prepare`` returns takes as many instructions among many ranks as among few."""
    few, many = (instructions(prepare(Job(size))) for size in (FEW, MANY))
    assert 0 < many <= 1.05 * few, (few, many)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_costs_the_same_whatever_the_number_of_ranks(name):
    def prepare(job: Job) -> Callable[[], object]:
        for rank in range(0, len(job.sent), 2):  # every second rank has already sent the same
            job.say(rank, MESSAGES[name])
        return lambda: job.say(5, MESSAGES[name])

    assert_costs_the_same(prepare)


@pytest.mark.parametrize("name", [None, "a status", "a wait", "a stop", "a hang", "the end of a script", "an end"])
def test_a_look_at_the_clock_costs_the_same_whatever_the_number_of_ranks(name):
    def prepare(job: Job) -> Callable[[], object]:
        for rank in (3, 5) if name else ():
            job.say(rank, MESSAGES[name])
        job.run(1.0)
        return lambda: (job.coordinator.pause(job.now), job.coordinator.tick(job.now + STEP))

    assert_costs_the_same(prepare)


def test_what_a_sentinel_asks_at_every_turn_costs_the_same_whatever_the_number_of_ranks():
    def prepare(job: Job) -> Callable[[], object]:
        found = job.coordinator
        return lambda: (found.launcher_waits, found.over, found.all_ended)

    assert_costs_the_same(prepare)


def test_ranks_that_leave_cost_the_same_whatever_their_number():
    """The cost of checking the clock is paid once, for the first rank released."""

    def cost(size: int) -> int:
        job = Job(size)
        for rank in range(size // 2):
            job.say(rank, Leaving())
        return instructions(lambda: job.coordinator.tick(job.now))

    assert cost(MANY) < 1.1 * cost(FEW)


def test_a_rank_whose_script_has_ended_may_end_with_an_exit_code_that_is_not_known():
    job = Job(3)
    job.say(1, Leaving())
    job.run(3.0)
    job.say(1, Exited(code=None))
    job.run(1.0)
    assert_goes_on(job)


def test_stacks_that_ranks_share_are_printed_once():
    job = Job(4, patience=60.0)
    hang(job, 5, 5, 4, 5, idle=61.0)
    job.run(2.3)
    for rank in range(4):
        line = "train.py:1 in step" if rank == 2 else "hvdkit.py:9 in wait"
        text = f"at step 5; its stacks, most recent call first:\nThread 0x7f{rank}:\n{line}"
        job.say(rank, Stacks(text=text, waiting=rank != 2))
    job.run(1.0)
    assert job.lines[:-1] == [
        "[rank 0] at step 5; its stacks, most recent call first:\n[rank 0] Thread 0x7f0:\n[rank 0] hvdkit.py:9 in wait",
        "[rank 1] at step 5; its stacks are the same as those of rank 0",
        "[rank 2] at step 5; its stacks, most recent call first:\n[rank 2] Thread 0x7f2:\n[rank 2] train.py:1 in step",
        "[rank 3] at step 5; its stacks are the same as those of rank 0",
    ]
    assert "rank 2 " in job.lines[-1]


def test_the_stacks_of_the_rank_that_hangs_and_of_some_others_are_written():
    job = Job(FEW, patience=60.0)
    hang(job, *[4 if rank == 40 else 5 for rank in range(FEW)], idle=61.0)
    job.run(2.3)
    answer(job)
    job.run(1.0)
    *texts, left_out, last = job.lines
    assert texts == [f"[rank {rank}] its stacks {rank}" for rank in (*range(15), 40)]
    assert left_out == "hvdkit: the stacks of 48 more ranks are left out"
    assert "rank 40 " in last and last.endswith("; the stacks of 16 ranks are above")


def test_the_clock_of_another_host_is_known_from_the_message_that_took_least():
    job = Job(2)
    for late in (0.3, 0.01, 0.2):
        job.now += 1.0
        job.say(1, Status(now=job.now - late - 500.0))
    assert abs(job.member(1).clock_offset - 500.01) < 1e-6


def test_a_host_that_the_kernel_cannot_reach_is_blamed_at_once():
    job = Job(3)
    job.run(4.0)
    job.lose(1, errno.ETIMEDOUT)
    job.run(0.5)
    assert job.line.startswith("hvdkit: rank 1 on host-0 failed: has not answered for "), job.lines
    assert "its host is down" in job.line


@pytest.mark.parametrize("others", ["are killed", "report errors that follow"])
def test_a_host_that_dies_is_blamed_though_other_ranks_end_before_its_sentinels_could_be_back(others):
    job = Job(10)
    job.lose(8)
    job.lose(9)
    job.run(0.2)
    for rank in range(8):
        job.say(rank, Exited(code=None) if others == "are killed" else FOLLOWS)
    job.run(3.0)
    assert job.line.startswith("hvdkit: rank 8 on host-1 is unreachable (its host is down"), job.lines


def test_a_sentinel_that_was_killed_is_not_taken_for_its_host():
    job = Job(10)
    job.lose(8)
    job.run(0.2)
    job.say(1, Failed(cause="ValueError: bad"))
    job.run(0.5)
    job.join(8)
    job.say(8, TRAINS)
    job.run(4.0)
    assert "rank 8 on" not in job.line and "ValueError: bad" in job.line


def test_the_end_of_a_job_does_not_wait_for_a_host_that_is_cut_off():
    job = Job(3)
    job.run(4.0)
    job.silent.add(1)
    job.member(1).peer.connection.is_cut_off = lambda seconds: True
    job.run(10.5)
    assert job.line.startswith("hvdkit: rank 1 on host-0 failed: has not answered for "), job.lines
    assert job.member(1).lost_at is not None and not job.member(1).is_running


def test_a_job_that_is_suspended_with_its_sentinels_goes_on_later():
    job = Job(3, heartbeat=10.0)
    job.run(4)
    job.silent |= {0, 1, 2}
    job.run(60)
    assert_goes_on(job)
    job.silent -= {0, 2}
    job.run(58)
    assert_goes_on(job)
    job.run(5)
    assert job.coordinator.verdict.rank == 1
