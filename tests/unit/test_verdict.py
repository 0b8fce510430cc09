"""``verdict()``: from the events of the ranks to the rank that failed first, the message, and the job's exit code."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.watchdog.events import (
    Exited,
    Failed,
    Flight,
    Joined,
    Leaving,
    Message,
    Saved,
    Status,
    Training,
    decode,
)
from hvdkit.watchdog.flight_recorder import CollectiveRecord
from hvdkit.watchdog.verdict import ASKED, DIED, Alive, Judged, Lost, RankEvent, Verdict, how, shell_code, verdict

HOSTS = {rank: f"node{rank}" for rank in range(8)}
TRAINS = Training(pid=1, waiters=[])


# ---- complete histories -----------------------------------------------------------------------------------------


def first_failure(draw, rank: int, began: float, step: int | None) -> tuple[list[RankEvent], int, float | None]:
    """Draw a rank's failure: its entries, the job's expected exit code, and when a launcher notices (None: never)."""
    trains, gone = [RankEvent(rank, 0.0, TRAINS)], began + draw(st.floats(0.01, 4.0))
    verdict_is_later = draw(st.booleans())

    def ended(code: int | None) -> tuple[list[RankEvent], float | None]:
        """Return the end of the process after the reported failure: before the verdict, or caused by it."""
        entry = RankEvent(rank, gone, Exited(code=code, step=step), ordered=not verdict_is_later)
        return [entry], gone if verdict_is_later else None

    kind = draw(
        st.sampled_from(
            ["raises", "is killed", "dies", "exits", "has no hvdkit", "exits early", "os._exit(0)"]
            + ["is stopped", "hangs", "loses its host", "is silent"]
        )
    )
    code = draw(st.sampled_from([1, 3, 65, 130]))
    if kind == "raises":
        rest, noticed = ended(code)
        return (
            [*trains, RankEvent(rank, began, Failed(cause="ValueError: bad", code=code, step=step)), *rest],
            code,
            noticed,
        )
    if kind == "is killed":
        number = draw(st.sampled_from([9, 11, 6, 15]))
        return [*trains, RankEvent(rank, began, Exited(code=-number, step=step))], 128 + number, began
    if kind == "dies":
        return [*trains, RankEvent(rank, began, Exited(code=None, step=step))], 137, began
    if kind == "exits":
        rest, noticed = ended(code)
        return [*trains, RankEvent(rank, began, Leaving(step=step)), *rest], code, noticed
    if kind == "has no hvdkit":
        return [RankEvent(rank, began, Exited(code=code, step=step))], code, began
    if kind == "exits early":  # a failure only if the others need it: see history()
        rest, _ = ended(0)
        return [*trains, RankEvent(rank, began, Leaving(step=step)), *rest], 1, None
    if kind == "os._exit(0)":
        return [*trains, RankEvent(rank, began, Exited(code=0, step=step))], 1, None
    if kind == "loses its host":
        return [*trains, RankEvent(rank, began, Lost())], 1, None
    stopped = kind == "is stopped"
    verb = "hangs" if kind == "hangs" else "failed"
    judged = Judged(cause="no progress", verb=verb, code=137 if stopped else 1, step=step, dead=True)
    killed = Exited(code=-9, step=step, stopped=13.0 if stopped else None)
    return [*trains, RankEvent(rank, began, judged), RankEvent(rank, gone, killed, ordered=True)], judged.code, None


@st.composite
def histories(draw, finished: bool = False) -> tuple[int, int, int, int | None, list[RankEvent]]:
    """Return size, the rank that failed first, the job's exit code, the step, and all entries.

    Args:
        draw: Hypothesis's draw function.
        finished: if True, ranks' scripts may have ended well before the failure.
    """
    size = draw(st.integers(1, 8))
    first, began = draw(st.integers(0, size - 1)), draw(st.floats(1.0, 5.0))
    step = draw(st.none() | st.integers(0, 50))
    entries, code, noticed = first_failure(draw, first, began, step)
    is_early = code == 1 and any(isinstance(entry.event, Leaving) for entry in entries)
    at = began + 6.0  # time of the verdict
    for rank in set(range(size)) - {first}:
        entries.append(RankEvent(rank, 0.0, TRAINS))
        after = draw(st.floats(0.01, 5.0))
        kinds = ["is well", "follows", "is ordered to end", "is lost after the verdict"]
        kinds += ["is killed by the launcher"] if noticed is not None else []
        kinds += ["has finished"] if finished and not is_early else []
        kind = draw(st.sampled_from(kinds)) if rank != (first + 1) % size or not is_early else "follows"
        if kind == "follows":
            cause = "HorovodInternalError: a peer is gone"
            entries.append(RankEvent(rank, began + after, Failed(cause=cause, follows=True, step=step)))
        if kind == "has finished":
            entries += [RankEvent(rank, 0.5, Leaving(step=0)), RankEvent(rank, 0.6, Exited(code=0))]
        elif kind == "is killed by the launcher":
            killed = Exited(code=draw(st.sampled_from([-9, -15, None])), step=step)
            entries.append(RankEvent(rank, max(noticed, began) + after, killed))
        else:
            entries.append(RankEvent(rank, at, Alive()))
            ended = [Exited(code=draw(st.sampled_from([0, 1, 3, -9, -15, None])), step=step)]
            ended = [Lost()] if kind == "is lost after the verdict" else ended
            entries += [RankEvent(rank, at + after, event, ordered=True) for event in ended if draw(st.booleans())]
    last = {entry.rank: entry.event for entry in entries if isinstance(entry.event, Exited)}
    if size == len(last) and not any(event.code != 0 for event in last.values()):
        code = 0  # whatever else was reported
    return size, first, code, step, entries


@given(histories(finished=True))
@settings(max_examples=300)
def test_the_rank_that_failed_first_is_named(history):
    size, first, code, step, entries = history
    found = verdict(entries, size, HOSTS)
    if code == 0:
        assert found == Verdict(0)
        return
    if size == 1 and not any(isinstance(entry.event, (Failed, Exited, Lost, Judged)) for entry in entries):
        return  # its script has ended, and the rest is unknown
    assert (found.rank, found.code, found.host) == (first, code, f"node{first}"), found
    lost = any(isinstance(entry.event, Lost) and entry.rank == first for entry in entries)
    known = max((entry.event.step for entry in entries if getattr(entry.event, "step", None) is not None), default=None)
    assert found.step == (known if lost or step is None else step)  # ranks step together


@given(histories(), st.randoms(use_true_random=False), st.floats(0, 1))
@settings(max_examples=500)
def test_whatever_is_missing_no_other_rank_is_named(history, randoms, kept):
    size, first, _, _, entries = history
    some = [entry for entry in entries if randoms.random() < kept]
    found = verdict(some, size, HOSTS)
    assert found.rank in (None, first), (found, some)
    ended_well = {entry.rank for entry in some if isinstance(entry.event, Exited) and entry.event.code == 0}
    assert found.code != 0 or len(ended_well) == size


@pytest.mark.full
@given(histories(finished=True), st.randoms(use_true_random=False))
def test_the_order_of_what_is_known_does_not_matter(history, randoms):
    """Nor does the order of entries with equal times."""
    size, _, _, _, entries = history
    entries = [replace(entry, time=round(entry.time)) for entry in entries]
    shuffled = randoms.sample(entries, len(entries))
    assert verdict(shuffled, size, HOSTS) == verdict(entries, size, HOSTS)


@pytest.mark.full
@given(histories(finished=True), st.data())
@settings(max_examples=300)
def test_a_connection_that_breaks_loses_what_comes_last(history, data):
    """Ranks that finished before the failure are not blamed, however many of each rank's last messages are lost."""
    size, first, _, _, entries = history
    some = []
    for rank in range(size):
        own = sorted((entry for entry in entries if entry.rank == rank), key=lambda entry: entry.time)
        some += own[: data.draw(st.integers(0, len(own)))]
    assert verdict(some, size, HOSTS).rank in (None, first)


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_if_every_rank_ends_with_0_the_job_has_succeeded_whatever_was_reported(size, randoms):
    entries = [RankEvent(rank, randoms.uniform(5, 9), Exited(code=0)) for rank in range(size)]
    said: list[Message] = [
        Failed(cause="ValueError: caught"), Failed(cause="x", follows=True), Judged(cause="x"), Lost(), TRAINS,
        Leaving(), Alive(), Status(),
    ]  # fmt: skip
    for _ in range(randoms.randrange(10)):
        entries.append(RankEvent(randoms.randrange(size), randoms.uniform(0, 9), randoms.choice(said)))
    assert verdict(entries, size, HOSTS) == Verdict(0)


# ---- examples -----------------------------------------------------------------------------------------------------


def of(rank: int, *events: Message, at: float = 4.0, ordered: bool = False) -> list[RankEvent]:
    """Return entries of one rank, a tenth of a second apart."""
    return [RankEvent(rank, at + 0.1 * number, event, ordered) for number, event in enumerate(events)]


WELL = of(0, Alive(), at=9.0)
VICTIM = Failed(cause="HorovodInternalError: a peer is gone", follows=True, step=20)


def one(*events: Message) -> list[RankEvent]:
    """Return entries of rank 1 next to a rank 0 that is well."""
    return [*of(1, *events), *WELL]


ONE, UNKNOWN = "rank 1 on node1", "it is not known which rank failed first"
LEFT = (
    f"{ONE} left the job at step 20: ended before the others: rank 0 still needed it; every rank must make the same "
    "calls: see `hvdkit docs pitfalls#only-the-chief-enters-a-collective`"
)
BAD, LEAVES, SAVED = Failed(cause="ValueError: bad"), Leaving(step=20), (Leaving(step=5), Exited(code=75))
# What is known of two ranks, the job's exit code, and its last line.
LAST_LINES = (
    (one(TRAINS, replace(BAD, step=20)), 1, f"{ONE} failed at step 20: ValueError: bad"),
    (
        one(TRAINS, Failed(cause="KeyboardInterrupt", verb="was interrupted", code=130, step=4)),
        130,
        f"{ONE} was interrupted at step 4: KeyboardInterrupt",
    ),
    (one(replace(BAD, busy="uploading")), 1, f"{ONE} failed: ValueError: bad (busy: uploading)"),
    (one(TRAINS, Exited(code=-9, step=3)), 137, f"{ONE} was killed by SIGKILL (out of memory?) at step 3"),
    (one(TRAINS, Exited(code=-11)), 139, f"{ONE} was killed by SIGSEGV (a crash in native code)"),
    (one(Exited(code=3)), 3, f"{ONE} ended with exit code 3"),
    (one(TRAINS, Exited(code=None, step=7)), 137, f"{ONE} failed at step 7: {DIED}"),
    (one(TRAINS, Exited(code=0)), 1, f"{ONE} failed: {DIED}"),
    (
        one(TRAINS, Lost()),
        1,
        f"{ONE} is unreachable (its host is down, the network is cut, or its sentinel was killed)",
    ),
    (one(TRAINS, LEAVES, Exited(code=3)), 3, f"{ONE} failed at step 20: sys.exit(3) while other ranks continued"),
    (
        [*of(1, TRAINS, LEAVES, Exited(code=3)), *of(0, TRAINS, LEAVES, at=4.5)],
        3,
        f"{ONE} ended with exit code 3 at step 20",
    ),
    ([*one(TRAINS, LEAVES, Exited(code=0)), *of(0, TRAINS, VICTIM, at=5.0)], 1, LEFT),
    # The report of rank 0 has overtaken that of rank 1.
    ([*one(TRAINS, LEAVES), *of(0, TRAINS, VICTIM, at=3.98), *of(1, Alive(), at=9.0)], 1, LEFT),
    ([*of(1, TRAINS, *SAVED), *of(0, TRAINS, *SAVED, at=5.0)], 75, f"{ONE} ended with exit code 75 at step 5: {ASKED}"),
    (one(Exited(code=-9, stopped=13.2, step=3)), 137, f"{ONE} was stopped (SIGSTOP) for 13 s at step 3"),
    (
        one(Judged(cause="no progress for 60 s", verb="hangs", step=3, dead=True)),
        1,
        f"{ONE} hangs at step 3: no progress for 60 s",
    ),
    ([*of(1, VICTIM), *of(0, VICTIM)], 1, f"{UNKNOWN}; rank 0 reported: HorovodInternalError: a peer is gone"),
    (of(1, Exited(code=3)), 3, UNKNOWN),
    ([*of(1, Exited(code=0)), *of(0, Exited(code=0))], 0, ""),
    ([*of(1, Exited(code=-15), ordered=True), *WELL], 143, UNKNOWN),
)


def test_the_last_line():
    for entries, code, line in LAST_LINES:
        found = verdict(entries, 2, HOSTS)
        assert (found.code, found.line) == (code, line)
    found = verdict([*of(1, replace(BAD, code=65)), *of(0, TRAINS, VICTIM, at=3.0)], 3, HOSTS)  # nothing of rank 2
    assert (found.code, found.line) == (65, f"{UNKNOWN}; rank 1 reported: ValueError: bad")


def test_the_last_line_says_what_is_saved_and_once_that_the_same_command_continues():
    saved = Saved(logdir="runs/x", step=92).text
    failed = replace(verdict(one(TRAINS, Exited(code=-9, step=95)), 2, HOSTS), saved=saved)
    assert failed.last_line == (
        f"{ONE} was killed by SIGKILL (out of memory?) at step 95; "
        "saved at step 92 in runs/x: the same command continues from there"
    )
    stopped = replace(verdict([*of(1, TRAINS, *SAVED), *of(0, TRAINS, *SAVED, at=5.0)], 2, HOSTS), saved=saved)
    assert stopped.last_line == f"{ONE} ended with exit code 75 at step 5: it was asked to stop; {saved}"
    assert replace(stopped, saved="").last_line == stopped.line
    assert replace(verdict([*of(1, Exited(code=0)), *of(0, Exited(code=0))], 2, HOSTS), saved=saved).last_line == ""


def test_of_two_that_fail_the_earlier_one_is_named_and_both_tracebacks_are_kept():
    early = of(1, Failed(cause="ValueError: one", text="one"), at=3.0)
    late = of(0, Failed(cause="ValueError: two", text="two"), at=3.1)
    follows = of(2, Failed(cause="x", text="follows", follows=True), at=3.05)
    found = verdict([*late, *follows, *early], 3, HOSTS)
    assert found.rank == 1 and found.texts == ("[rank 0] two", "[rank 1] one") and not found.common


def test_an_unknown_failure_without_a_traceback_writes_none():
    found = verdict([*of(1, VICTIM, at=2.0), *of(0, TRAINS)], 3, HOSTS)  # nothing of rank 2
    assert found.rank is None and found.texts == ()


def test_the_same_traceback_of_several_ranks_is_kept_once():
    same = [Failed(cause="ValueError: one", text=f"<Dense at 0x7f{rank}>\nValueError: one") for rank in range(3)]
    raised = [one for rank in range(3) for one in of(rank, same[rank], at=3.0 + rank / 10)]
    expected = "[ranks 0-2] <Dense at 0x7f0>\n[ranks 0-2] ValueError: one"
    found = verdict(raised, 3, HOSTS)
    assert found.rank == 0 and found.texts == (expected,) and found.common
    assert " failed, as every rank did: " in found.line
    other = of(1, Failed(cause="ValueError: two", text="two"), at=2.0)
    found = verdict([*raised[:1], *raised[-1:], *other], 3, HOSTS)
    assert found.rank == 1 and [text.partition("]")[0] for text in found.texts] == ["[ranks 0,2", "[rank 1"]
    assert found.common and "as every rank did" not in found.line


def test_a_rank_that_has_finished_is_not_blamed_for_what_another_one_fails_at_later():
    """Rank 2's script ends; rank 0 raises; rank 1 waits for rank 0 in a collective, which fails."""
    left, raised = of(2, TRAINS, Leaving(step=9), Exited(code=0), at=1.0), of(0, Failed(cause="ValueError: x"), at=2.0)
    found = verdict([*left, *raised, *of(1, VICTIM, at=2.1)], 3, HOSTS)
    assert found.line == "rank 0 on node0 failed at step 20: ValueError: x"
    # Of two ranks that left, the first one is named.
    again = of(0, TRAINS, Leaving(step=9), Exited(code=0), at=1.2)
    assert verdict([*left, *again, *of(1, VICTIM, at=2.1)], 3, HOSTS).rank == 2


def test_a_rank_that_is_killed_while_it_exits_is_not_blamed_for_one_that_does_not_exit():
    """In MPI_Finalize it no longer runs Python, and can only be killed."""
    killed = of(0, TRAINS, Leaving()) + of(0, Exited(code=-9), at=9.0, ordered=True)
    late = of(1, TRAINS, Leaving()) + of(1, Failed(cause="Horovod", verb="did not exit"), at=6.0)
    found = verdict(killed + late, 2, HOSTS)
    assert (found.code, found.line) == (1, "rank 1 on node1 did not exit: Horovod")
    by_itself = of(0, TRAINS, Leaving()) + of(0, Exited(code=-9), at=5.0)
    assert verdict(by_itself + late, 2, HOSTS).rank == 0


def test_the_ranks_can_exit_normally_unless_one_is_dead():
    assert verdict([*of(1, Failed(cause="x")), *WELL], 2).orderly
    assert verdict([*of(1, Leaving(), Exited(code=3)), *WELL], 2).orderly
    for dead in ([Exited(code=-9)], [Lost()], [Judged(cause="x", dead=True)]):
        assert not verdict([*of(1, *dead), *WELL], 2).orderly


def test_how_programs_end():
    assert how(3) == "ended with exit code 3" and how(-9) == "was killed by SIGKILL (out of memory?)"
    assert how(-200) == "was killed by signal 200"
    assert [shell_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


# ---- messages -----------------------------------------------------------------------------------------------------

RECORD = CollectiveRecord(7, "eager 1", "sum", "a.py:1", "0:2:1", 12, None, 1.5, None)
SAMPLES = [
    Joined(rank=1, size=2, host="a", place="a/b"),
    Training(pid=3, waiters=[4, 5], step=None),
    Status(step=3, idle=0.5, waits=RECORD),
    Flight(records=[RECORD, RECORD._replace(key="sum", ranks="", step=3, end=2.5)]),
    Failed(cause="ValueError: é", text="x" * 10),
    Exited(code=None, signals=[15]),
    Saved(logdir="runs/\u00e9", step=None),
]


def test_a_message_is_what_it_was_after_the_connection():
    assert [decode(message.encode()) for message in SAMPLES] == SAMPLES


def test_what_a_program_sends_need_not_be_a_message():
    whole = Failed(cause="ValueError: é", step=3).encode()
    wrong = [b"", b"[]", b"null", b"3", b"[" * 100_000, b"\xff", b'{"kind": "Failed"}', b'{"kind": "Nothing"}']
    wrong += [b'{"kind": []}', whole.replace(b'"step": 3', b'"step": "3"'), whole.replace(b'"cause"', b'"other"')]
    record = b'[7, "eager 1", "sum", "a.py:1", "0:2:1", 12, null, 1.5, null]'
    for field in (record, b"[]", b"3", b"{}", b"null", b'["eager 1"]', record.replace(b'"0:2:1"', b"[0, 1]")):
        flight = b'{"kind": "Flight", "records": [%b]}' % field
        assert field is not record or decode(flight) == Flight(records=[RECORD])
        wrong += [] if field is record else [flight]
        wrong += [] if field in (record, b"null") else [b'{"kind": "Status", "waits": %b}' % field]
    wrong += [b'{"kind": "Status", "now": 1%b}' % (b"0" * 400)]
    wrong += [b'{"kind": "Exited", "code": 0, "signals": [[]]}', b'{"kind": "Flight", "records": 3}']
    for one in wrong:
        with pytest.raises(ValueError, match="not a message"):
            decode(one)
    randoms = random.Random(1)
    for _ in range(500):  # truncated messages and flipped bytes
        cut = bytearray(whole[: randoms.randrange(len(whole))] or b"x")
        cut[randoms.randrange(len(cut))] ^= 1 << randoms.randrange(8)
        with pytest.raises(ValueError, match="not a message"):
            decode(bytes(cut))
