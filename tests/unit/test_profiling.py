"""The parts, trace and summary sentence of a step profile: by properties, and on a recording of two ranks.

``recorded/`` holds a real run of 2 ranks, steps 4 to 6, in which rank 1 slept 0.12 s in each batch it read:
TensorFlow's and Horovod's original files, and each rank's marks and spans.
"""

from __future__ import annotations

import gzip
import itertools
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cases import case
from helpers.speed import WAIT
from helpers.traces import check_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.cluster.progress import progress, spending
from hvdkit.profiling import collect, intervals, profile_report, timeline, trace, xplane
from hvdkit.profiling.rank_profile import RankProfile, Span, StepEnd, TimedCollective
from hvdkit.profiling.settings import ProfileSettings
from hvdkit.profiling.step_parts import PARTS, divide, match_collectives

RECORDED = Path(__file__).parent / "recorded"


def recorded(folder):
    """Return the two ranks' records, read from TensorFlow's and Horovod's files."""
    records = []
    for rank in range(2):
        document = json.loads((RECORDED / f"rank-{rank}.json").read_text())
        clock, offset = document.pop("clock"), document.pop("epoch_offset")
        record = RankProfile.from_json(document)
        file = folder / f"rank-{rank}.xplane.pb"
        file.write_bytes(gzip.decompress((RECORDED / f"{file.name}.gz").read_bytes()))
        traced = xplane.read(file, clock)
        record.spans += traced.spans
        record.collectives += traced.collectives
        if rank == 0:
            file = folder / "timeline.json"
            file.write_bytes(gzip.decompress((RECORDED / "timeline.json.gz").read_bytes()))
            record.phases += timeline.read(file, offset)
        records.append(record)
    return records


# ---- the recording --------------------------------------------------------------------------------------------


def test_a_slow_rank_and_its_reason_are_found_in_what_two_ranks_recorded(tmp_path):
    found = profile_report.mean_rows(divide(recorded(tmp_path)))
    assert [row.steps for row in found] == [3, 3]
    for row in found:
        assert sum(row.parts_ms.values()) == pytest.approx(row.step_ms, abs=1e-9)
    fast, slow = found
    assert slow.parts_ms["input"] > 100 and fast.parts_ms["input"] < 5
    assert fast.parts_ms["wait"] > 100 and slow.parts_ms["wait"] < 10
    assert slow.waited_for_ms > 100 > 10 > fast.waited_for_ms
    assert 1 < slow.parts_ms["save"] < 10  # a checkpoint at step 4
    assert fast.parts_ms["compute"] > 0 and fast.parts_ms["exchange"] > 0
    assert profile_report.summarize(found).startswith("rank 1 is the straggler: other ranks wait 1")
    assert "; its input takes 120" in profile_report.summarize(found)


def test_the_trace_of_two_ranks_is_one_that_viewers_take(tmp_path):
    records = recorded(tmp_path)
    ranks = divide(records)
    for record in records:
        record.drop_short_ops(trace.MOST_OPS, trace.SHORTEST_NS)
    trace.write(tmp_path / "trace.json.gz", records, ranks)
    document = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    named = check_trace(document)
    assert named["process_name", 0, 0].startswith("rank 0 on") and named["process_name", 1, 0].startswith("rank 1 on")
    shown = {(pid, name) for (what, pid, _), name in named.items() if what == "thread_name"}
    assert {(rank, name) for rank in (0, 1) for name in ("steps", "where the time goes", "exchanges")} <= shown
    assert any(name.startswith("Horovod hvdkit.gradients") for pid, name in shown if pid == 0)
    steps = {event["pid"]: event["args"] for event in document["traceEvents"] if event["name"] == "step 5"}
    assert set(steps) == {0, 1} and steps[1]["input ms"] > 100 > steps[0]["input ms"]
    waits = [e for e in document["traceEvents"] if e.get("cat") == "wait" and e["args"] == {"waits for rank": 1}]
    assert sum(event["dur"] for event in waits if event["pid"] == 0) > 300_000


def test_horovods_timeline_is_read_also_where_it_was_cut_off(tmp_path):
    whole = gzip.decompress((RECORDED / "timeline.json.gz").read_bytes())
    names = []
    for text in (whole, whole[: len(whole) * 2 // 3], b""):
        (tmp_path / "cut.json").write_bytes(text)
        phases = timeline.read(tmp_path / "cut.json", 0)
        assert all(phase.start <= phase.end for phase in phases)
        names.append({phase.name for phase in phases})
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "MPI_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER"} <= names[0]
    assert names[1] and not names[2]


def test_collectives_are_known_by_their_names_without_scopes_and_also_where_their_end_is_missing(tmp_path):
    """Ranks may number scopes differently, and a recording may stop before the last result arrives."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/host:CPU")
    known = ["hvdkit.clock", "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done", "a/b:Mul"]
    for number, name in enumerate(known):
        plane.event_metadata[number].name = name
    for number, name in enumerate(["name", "kernel_type", "step_id", "HorovodAllreduce", "layer_7/hvdkit.sum.step.1"]):
        plane.stat_metadata[number].name = name
    line = plane.lines.add(id=1, name="tf_Compute/1", timestamp_ns=1000)
    for number, start, step in ((0, 0, 0), (1, 10, 1), (2, 30, 1), (1, 40, 2), (3, 45, 2)):
        event = line.events.add(metadata_id=number, offset_ps=start * 1000, duration_ps=5000)
        if number in (1, 2):
            event.stats.add(metadata_id=0, ref_value=4)
            event.stats.add(metadata_id=1, ref_value=3)
            event.stats.add(metadata_id=2, int64_value=step)
    (tmp_path / "x.xplane.pb").write_bytes(space.SerializeToString())
    traced = xplane.read(tmp_path / "x.xplane.pb", 500)
    assert traced.collectives == [
        TimedCollective("hvdkit.sum.step.1", 510, 530, False),
        TimedCollective("hvdkit.sum.step.1", 540, 550, False),
    ]
    assert [(span.kind, span.start, span.end) for span in traced.spans] == [("op", 545, 550)]


def test_a_file_without_the_clock_is_refused(tmp_path):
    (tmp_path / "x.xplane.pb").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no event hvdkit\.clock"):
        xplane.read(tmp_path / "x.xplane.pb", 0)


# ---- properties -----------------------------------------------------------------------------------------------

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def moments(found):
    return {moment for start, end in found for moment in range(start, end)}


@given(spans, spans, st.integers(0, 60), st.integers(0, 60))
def test_intervals_are_sets(a, b, start, end):
    one, other = intervals.union(a), intervals.union(b)
    assert moments(one) == moments(a)
    assert all(x[1] < y[0] for x, y in itertools.pairwise(one))
    assert moments(intervals.intersection(one, other)) == moments(a) & moments(b)
    assert moments(intervals.difference(one, other)) == moments(a) - moments(b)
    assert moments(intervals.clip(one, start, end)) == moments(a) & set(range(start, end))
    assert intervals.total(one) == len(moments(a))


@st.composite
def a_record(draw, rank):
    record = RankProfile(rank, "host")
    times = sorted(draw(st.lists(st.integers(0, 400), min_size=1, max_size=5, unique=True)))
    record.marks = [StepEnd(number, at) for number, at in enumerate(times)]
    kinds = st.sampled_from(["input", "save", "op", "data"])
    for kind, start, length in draw(st.lists(st.tuples(kinds, st.integers(0, 400), st.integers(0, 90)), max_size=8)):
        # A thread's ops are nested or disjoint, so each of these has its own thread.
        record.spans.append(Span(kind, f"x/{kind}:Mul", f"thread {len(record.spans)}", start, start + length))
    names = st.sampled_from(["gradients", "norm"])
    rows = st.lists(st.tuples(names, st.integers(0, 400), st.integers(0, 90), st.booleans()), max_size=6)
    for name, start, length, blocking in draw(rows):
        record.collectives.append(TimedCollective(name, start, start + length, blocking))
    return record


@settings(max_examples=60, deadline=None)
@given(st.tuples(*(a_record(rank) for rank in range(3))))
def test_parts_add_up_whatever_was_recorded(records):
    ranks = divide(records)
    for record, one in zip(records, ranks, strict=True):
        assert [step.step for step in one.steps] == [mark.step for mark in record.marks[1:]]
        for step in one.steps:
            assert sum(step.parts.values()) == step.end - step.start
            assert set(step.parts) == set(PARTS) and min(step.parts.values()) >= 0
            assert 0 <= step.hidden <= step.parts["compute"]
        every = [moment for name in PARTS for moment in one.intervals[name]]
        assert intervals.total(every) == intervals.total(intervals.union(every))  # the parts do not overlap
        for blamed, when in one.waits_for.items():
            assert blamed != record.rank and not intervals.difference(when, one.intervals["wait"])
    for found in match_collectives(records).values():
        assert all(m.local.start <= m.last_entry <= m.local.end for m in found)
    found = profile_report.mean_rows(ranks)
    assert all(row.waited_for_ms >= 0 for row in found) and profile_report.summarize(found)
    check_trace(trace.as_json(records, ranks))


def test_each_moment_goes_to_the_first_part_that_is_true_of_it():
    late = RankProfile(1, "b", [StepEnd(0, 0), StepEnd(1, 100)])
    late.collectives = [TimedCollective("gradients", 60, 90, False), TimedCollective("agree", 95, 100, True)]
    record = RankProfile(0, "a", [StepEnd(0, 0), StepEnd(2, 100)])
    record.spans = [
        Span("input", "input", "training", 0, 10),
        Span("op", "map/Mul:Mul", "pool", 5, 8),  # outside the input time: TensorFlow prepares the next batch
        Span("op", "x/MatMul:MatMul", "pool", 15, 50),
        Span("op", "y/MatMul:MatMul", "pool", 80, 85),
    ]
    record.collectives = [TimedCollective("gradients", 40, 90, False), TimedCollective("agree", 92, 100, True)]
    (step,) = divide([record, late])[0].steps
    assert step.steps == 2  # the program counts two steps at once
    assert step.parts == {"input": 10, "save": 0, "compute": 40, "wait": 13, "exchange": 30, "other": 7}
    assert step.hidden == 5
    (row, other) = profile_report.mean_rows(divide([record, late]))
    assert (row.steps, row.step_ms) == (2, 50e-6)
    assert other.waited_for_ms == 13e-6 and row.waited_for_ms == 0


def row(rank, waited_for, **parts):
    every = {**dict.fromkeys(PARTS, 0.0), **parts}
    return profile_report.Row(rank, "host", 10, sum(every.values()), every, 0.0, waited_for, 0.0)


def test_the_sentence_says_what_the_table_shows():
    for rows, said in (
        ([], "no step was recorded"),
        ([row(0, 0.0, compute=9.0, other=1.0)], "compute takes longest: 9.0 of 10.0 ms per step"),
        (
            [row(0, 0.1, compute=3.0, exchange=7.0), row(1, 0.2, compute=4.0, exchange=6.0)],
            "no straggler (other ranks wait at most 0.2 ms per step); exchange takes longest: 6.5 of 10.0 ms per step",
        ),
        (
            [row(0, 2.0, compute=7.9, wait=2.1), row(1, 3.0, compute=8.0, wait=2.0)],
            "rank 1 is the straggler: other ranks wait 3.0 of 10.0 ms per step; its parts take no longer than those of "
            "other ranks, which take turns being late (rank 0: 2.0); exchange: 0.0",
        ),
        (
            [row(0, 0.0, compute=3.0, wait=4.0, other=3.0), row(1, 4.0, compute=4.9, wait=0.1, other=5.0)],
            "rank 1 is the straggler: other ranks wait 4.0 of 10.0 ms per step; "
            "its Python (other) takes 5.0 ms (others: 3.0)",
        ),
        (
            [row(0, 0.0, compute=3.0, wait=4.0, other=3.0), row(1, 4.5, compute=4.9, wait=0.1, other=5.0)],
            "rank 1 is the straggler: other ranks wait 4.5 of 10.0 ms per step; its Python (other) takes 5.0 ms "
            "(others: 3.0), its compute takes 4.9 ms (others: 3.0); exchange: 0.0",
        ),
        (  # rank 0 waits for rank 1 of its group, which waits for rank 2 of its other group
            [
                row(0, 0.0, compute=1.0, wait=9.0),
                row(1, 8.5, compute=2.0, wait=8.0),
                row(2, 8.0, save=9.0, compute=1.0),
            ],
            "rank 2 is the straggler: other ranks wait 8.0 of 10.0 ms per step; "
            "its save takes 9.0 ms (others: 0.0); exchange: 0.0",
        ),
    ):
        with case(said=said):
            assert profile_report.summarize(rows).startswith(said)


def test_long_host_names_are_cut_visibly(capsys):
    hosts = ["short", "x" * 20, "ip-10-0-0-123.ec2.internal"]
    profile_report.print_table([replace(row(0, 0.0), host=host) for host in hosts])
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert printed == ["short", "x" * 20, "ip-10-0-0-123.ec2.i…"]


# ---- clocks, settings, and no profile --------------------------------------------------------------------------


def test_clocks_of_other_hosts_are_known_within_their_error(monkeypatch):
    """Three ranks, as threads, with clocks seconds apart; ranks 0 and 2 report the same machine."""
    ahead, result = [0, 5_000_000_000, 0], {}
    shared, place = threading.Barrier(3), threading.local()
    sent = [None] * 3
    monkeypatch.setattr(collect, "boot_id", lambda: "b" if place.rank == 1 else "a")

    def work(rank):
        place.rank = rank

        def allgather(value):
            sent[rank] = value
            shared.wait(WAIT)
            got = list(sent)
            shared.wait(WAIT)
            return got

        result[rank] = collect.clock_offsets(allgather, lambda: time.monotonic_ns() + ahead[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    first, other, same = result[0]
    assert first == same == (0, 0)
    assert abs(other.offset - ahead[1]) <= other.error < 1_000_000_000


def test_what_the_variable_asks_for():
    assert ProfileSettings.from_environment({}) is None
    assert ProfileSettings.from_environment({"HVDKIT_PROFILE": ""}) is None
    assert ProfileSettings.from_environment({"HVDKIT_PROFILE": "a:b/c"}) == ProfileSettings(Path("a:b/c"))
    told = ProfileSettings.from_environment({"HVDKIT_PROFILE": "runs/x:30-40", "HVDKIT_PROFILE_TIMELINE": "1"})
    assert told == ProfileSettings(Path("runs/x"), 30, 40, True)
    for steps in ("2-9", "9-8"):
        with pytest.raises(ValueError, match=f"HVDKIT_PROFILE=x:{steps}: .*3 <= FIRST <= LAST"):
            ProfileSettings.from_environment({"HVDKIT_PROFILE": f"x:{steps}"})
    with pytest.raises(ValueError, match=r"HVDKIT_PROFILE: got 'a\\nb', expected a folder on one line"):
        ProfileSettings.from_environment({"HVDKIT_PROFILE": "a\nb"})


def test_without_a_profile_a_step_costs_a_look_at_an_attribute():
    assert progress().profile is None
    assert spending("input") is spending("save")  # one shared no-op context


def test_short_ops_are_left_out_of_the_trace_and_counted():
    record = RankProfile(0, "host")
    record.spans = [Span("op", "a:Mul", "t", 0, length) for length in (10, 6_000, 9_000, 8_000)]
    record.spans.append(Span("input", "input", "training", 0, 1))
    record.drop_short_ops(2, trace.SHORTEST_NS)
    assert record.left_out == 2
    assert sorted(span.end for span in record.spans) == [1, 8_000, 9_000]
