"""``hvdkit flight``: which rank waited for which, from the records of all ranks."""

from __future__ import annotations

import json
import resource

from helpers.faults import limited

from hvdkit.commands import cli
from hvdkit.commands.flight import explain, timeline, trace
from hvdkit.errors import printable
from hvdkit.watchdog import flight_file
from hvdkit.watchdog.flight_file import FlightFile, RankFlight
from hvdkit.watchdog.flight_recorder import CollectiveRecord, ranks_text

ENDED = 100.0


def record(key, start, end, *, line="train.py:7", ranks=(), step=20):
    return CollectiveRecord(1, key, f"sum of {key}", line, ranks_text(ranks), 4000, step, start, end)


def flights(*ranks, clocks=None, size=None):
    """Return a file of ranks, each a list of records; ``clocks`` are the offsets to add to their times."""
    clocks = clocks or [0.0] * len(ranks)
    return FlightFile(
        line="rank 1 on b failed",
        ended=ENDED,
        size=size or len(ranks),
        ranks=tuple(
            RankFlight(rank=rank, host=f"host-{rank}", clock=clock, records=list(records))
            for rank, (records, clock) in enumerate(zip(ranks, clocks, strict=True))
        ),
    )


def test_the_rank_that_is_missing_is_named_and_where_it_is():
    found = explain(
        flights(
            [record("a", 10.0, 11.0), record("b", 90.0, None)],
            [record("a", 10.0, 11.5, line="load.py:3", step=19)],
            [record("a", 10.0, 11.0), record("b", 92.0, None)],
        )
    )
    assert found == [
        "ranks 0, 2 wait for rank 1 in sum of b at step 20, for 10.0 s (train.py:7)",
        "  rank 1 returned from sum of a at step 19 88.5 s ago, and has not entered another (load.py:3)",
    ]


def test_a_graphs_collective_has_one_name_at_every_step():
    """Rank 1 last ran it one step earlier; its host's clock is 1,000 s behind."""
    found = explain(flights([record("g", 95.0, None)], [record("g", -910.0, -909.0)], clocks=[0.0, 1000.0]))
    assert found[0].startswith("rank 0 waits for rank 1 in sum of g") and "9.0 s ago" in found[1]
    found = explain(flights([record("g", 95.0, None)], [record("g", -905.5, -904.0)], clocks=[0.0, 1000.0]))
    assert found == ["rank 0 waits in sum of g at step 20, for 5.0 s (train.py:7); all of its ranks have entered it"]


def test_only_the_ranks_of_a_group_are_missing_in_it():
    found = explain(
        flights(
            [record("g", 95.0, None, ranks=(0, 2))],
            [],
            [record("a", 1.0, 2.0)],
        )
    )
    assert found[0].startswith("rank 0 waits for rank 2 ") and len(found) == 2


def test_ranks_that_wait_for_each_other():
    found = explain(flights([record("a", 95.0, None)], [record("b", 96.0, None, line="other.py:1")]))
    assert found == [
        "rank 0 waits for rank 1 in sum of a at step 20, for 5.0 s (train.py:7)",
        "  rank 1 is in sum of b at step 20 for 4.0 s (other.py:1)",
        "rank 1 waits for rank 0 in sum of b at step 20, for 4.0 s (other.py:1)",
        "  rank 0 is in sum of a at step 20 for 5.0 s (train.py:7)",
    ]


def test_ranks_without_records_are_named():
    """A lost host cannot send its records: the other ranks may wait for its ranks."""
    waits = [record("a", 95.0, None)]
    found = explain(flights(waits, waits, size=3))
    assert found == [
        "ranks 0, 1 wait for rank 2 in sum of a at step 20, for 5.0 s (train.py:7)",
        "no records of rank 2",
    ]
    group = [record("g", 95.0, None, ranks=(0, 3))]
    assert explain(flights(group, waits, size=4))[0].startswith("rank 0 waits for rank 3 in ")
    assert explain(flights([], size=20))[-1] == "no records of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more"


def test_a_process_set_that_was_too_large_to_record():
    (line,) = explain(flights([record("g", 95.0, None, ranks=(*range(0, 999, 2), 999))], []))
    assert line == "rank 0 waits in sum of g at step 20, for 5.0 s (train.py:7); which ranks take part is unknown"


def test_many_ranks_are_named_in_short():
    found = explain(flights(*([record("a", 95.0, None)] for _ in range(20)), []))
    assert found[0].startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more wait for rank 20 in ")
    assert found[1] == "  rank 20 has not entered a collective"


def test_a_file_is_read_back_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(flight_file.FOLDER, str(tmp_path))
    ranks = [
        RankFlight(rank=0, host="a", clock=0.0, records=[record("a", 1.0, 2.0), record("b", 3.0, None)]),
        RankFlight(rank=1, host="b", clock=0.5, records=[record("a", 1.0, 1.5)]),
    ]
    words = flight_file.write("rank 1 on b failed", ranks, size=3)
    (path,) = tmp_path.glob("hvdkit-flight-*.json")
    assert words.startswith(f"flight recorder: {path} ") and path.stat().st_mode & 0o777 == 0o600
    assert cli.main(["flight", str(path), "--trace", str(tmp_path / "trace.json")]) == 0
    shown = capsys.readouterr().out
    assert "\nno records of rank 2\n" in shown
    assert shown.startswith("rank 1 on b failed\nrank 0 waits for ranks 1, 2 in sum of b at step 20, for ")
    drawn = json.loads((tmp_path / "trace.json").read_text())
    slices = [event for event in drawn["traceEvents"] if event["ph"] == "X"]
    assert [(one["pid"], one["name"], one["ts"]) for one in slices] == [
        (0, "sum of a", 0.0),
        (0, "waits in sum of b", 2e6),
        (1, "sum of a", 0.5e6),
    ]
    assert drawn == trace(flight_file.read(path.read_text()))


def test_without_records_there_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv(flight_file.FOLDER, str(tmp_path))
    assert flight_file.write("", [RankFlight(rank=0, host="a", clock=0.0)], size=1) == "" and not list(
        tmp_path.iterdir()
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(flight_file.FOLDER, str(tmp_path / "missing"))
    words = flight_file.write("", [RankFlight(rank=0, host="a", clock=0.0, records=[record("a", 1.0, 2.0)])], size=1)
    assert "cannot be written (No such file or directory)" in words


NOT_A_FLIGHT = "not a file of the flight recorder"
OTHER_FILES = (
    (None, "No such file or directory"),
    ("", NOT_A_FLIGHT),
    ('{"version": 1}', NOT_A_FLIGHT),
    ('{"version": 1, "line": "", "ended": 1.0, "size": "3", "ranks": []}', NOT_A_FLIGHT),
    ('{"version": 1, "line": "", "ended": 1.0, "size": 1, "ranks": [{"rank": 0}]}', NOT_A_FLIGHT),
    (
        '{"version": 1, "line": "", "ended": 1.0, "size": 1, '
        '"ranks": [{"rank": 0, "host": "a", "clock": 0.0, "records": [["a", 3]]}]}',
        NOT_A_FLIGHT,
    ),
    ('{"version": 9, "line": "", "ended": 1.0, "size": 1, "ranks": []}', "version 9"),
    ('{"version": 2, "line": "", "end": 1.0, "ranks": [{"records": [[1]]}]}', "version 2"),
    ("\x00\xff", NOT_A_FLIGHT),
)


def test_text_from_the_file_is_escaped(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HVDKIT_FLIGHT_DIR", str(tmp_path))
    evil = "\x1b]0;title\x07\x9b31m\u202e"
    records = [record("a" + evil, 10.0, None, line="train.py:7" + evil)]
    flight_file.write("the last line" + evil, [RankFlight(rank=0, host="a", clock=0.0, records=records)], 2)
    (path,) = tmp_path.glob("*.json")
    assert cli.main(["flight", str(path)]) == 0
    shown = capsys.readouterr().out
    assert printable(shown, keep="\n") == shown and shown.count(r"\x1b]0;title\x07\x9b31m\u202e") == 3


def test_other_files_are_refused(tmp_path, capsys):
    path = tmp_path / "flight.json"
    for text, words in OTHER_FILES:
        if text is not None:
            path.write_text(text)
        assert cli.main(["flight", str(path)]) == 2, text
        said = capsys.readouterr().err
        assert said.startswith("hvdkit flight: FILE: got ") and words in said, (text, said)


def test_the_timeline_shows_who_waits_and_who_does_not():
    found = flights([record("a", 88.0, 89.0), record("b", 91.0, None)], [record("a", 88.0, 89.0)], [])
    _, title, *drawn = timeline(found)
    assert title.startswith("the last 12.0 s")
    assert drawn[0] == "rank 0 " + "▒" * 6 + "·" * 9 + "█" * 45
    assert drawn[1] == "rank 1 " + "▒" * 6 + "·" * 54
    assert drawn[2] == "rank 2 " + "·" * 60
    assert timeline(flights([record("a", 88.0, 89.0)])) == []
    for start in (100.0, 100.2):  # at the end, or after it, as clocks of hosts differ
        _, title, drawn = timeline(flights([record("a", start, None)]))
        assert title.startswith("the last 0.1 s") and drawn == "rank 0 " + "·" * 59 + "█"


def test_of_many_ranks_those_are_drawn_that_the_others_wait_for():
    late = {17, 29}
    lines = timeline(flights(*([] if rank in late else [record("a", 99.0, None)] for rank in range(40))))
    assert len(lines) == 2 + 16 + 1 and lines[-1] == "and 24 more ranks"
    assert [line.split()[1] for line in lines[2:-1] if "█" not in line] == ["17", "29"]


def test_a_disk_that_is_full_keeps_no_part_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv(flight_file.FOLDER, str(tmp_path))
    with limited(resource.RLIMIT_FSIZE, 100):
        words = flight_file.write("the end", flights([record("a", 1.0, 2.0)] * 10).ranks, size=1)
    assert "cannot be written (File too large)" in words and not list(tmp_path.iterdir())
