"""The benchmarks' harness: ratios within rounds, goals, failing variants, and a report that matches the results."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import page
import peers
import processes
import pytest
import report
from figures import Goal, Measured, Metric, Picture, Record, Round, Sheet
from harness import MISSED, Benchmark, Case, Config, Variant, main, measure
from helpers.speed import WAIT
from processes import RunFailed, Unavailable

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
MS = Metric(name="ms", title="ms/step")


def measured(*rounds: Round, goals=(), variants=("ours", "theirs"), **more) -> Measured:
    titles = {variant: f"the variant `{variant}`" for variant in variants}
    return Measured(name="two", title="on 2 ranks", metrics=[MS], variants=titles, goals=goals, rounds=rounds, **more)


def of(ours: float, theirs: float) -> Round:
    return Round(results={"ours": {"ms": ours}, "theirs": {"ms": theirs}})


def record(*cases: Measured, **more) -> Record:
    environment = {"cores": 2, "cpu": "a CPU", "memory_gb": 8, "kernel": "6", "python": "3.11", "versions": {"x": "1"}}
    texts = {"name": "mine", "title": "My work", "about": "What it is.", "command": "python benchmarks/mine.py"}
    return Record(**texts, recorded="2026-01-02", environment=environment, measured=cases, **more)


def test_the_median_of_ratios_counts_and_not_the_ratio_of_medians():
    """A slow minute that hits one round: ratios 2, 3, 4; the ratio of medians would be 30 / 11."""
    goals = [Goal(upper="theirs", lower="ours", relation=">=", limit=limit) for limit in (3.0, 3.01)]
    case = measured(of(10, 30), of(11, 22), of(100, 400), goals=goals)
    met, missed = case.verdicts()
    assert met.value == missed.value == 3.0
    assert (met.word, missed.word) == ("met", "MISSED")


def test_differences_single_values_and_other_metrics():
    rounds = [Round(results={"ours": {"ms": ms, "stall": ms / 20}, "theirs": {"ms": ms - 1}}) for ms in (10, 20, 30)]
    goals = [
        Goal(upper="ours", lower="theirs", difference=True, limit=1.0),
        Goal(upper="ours", limit=19),
        Goal(upper="ours", lower="ours", metric="stall", lower_metric="ms", limit=0.05),
    ]
    assert [(v.value, v.met) for v in measured(*rounds, goals=goals).verdicts()] == [
        (1, True),
        (20, False),
        (0.05, True),
    ]


def test_a_way_that_failed_is_no_figure_and_no_goal_met():
    goals = [Goal(upper="theirs", lower="ours", relation=">=", limit=2), Goal(upper="absent", lower="ours", limit=9)]
    broken = Round(results={"ours": {"ms": 1.0}}, failed={"theirs": "exit code 1"})
    case = measured(
        of(10, 30), broken, goals=goals, variants=("ours", "theirs", "absent"), unavailable={"absent": "no such thing"}
    )
    assert case.compared("theirs", "ours", "ms") == [3.0]
    assert case.trouble("theirs") == "failed in 1 of 2 rounds: exit code 1"
    assert case.verdicts()[0].met
    assert case.verdicts()[1].word == "not measured: absent not available: no such thing"
    assert not case.verdicts()[1].met
    table = page.table(case)
    assert "| the variant `theirs` (failed in 1 of 2 rounds: exit code 1) | 30.0 |" in table
    assert "| the variant `absent` | not available: no such thing |" in table


def test_the_page():
    goal = Goal(upper="theirs", lower="ours", relation=">=", limit=2, headline=True, about="Theirs / ours")
    case = measured(of(10, 30), of(12, 30), goals=[goal], reference="ours")
    curve = Picture(name="curve", x_label="x", y_label="y", curves={"a": [[0, 1], [1, 2]]})
    sheet = Sheet(title="More", header=["a", "b"], rows=[["x|y", 1]])
    made = record(case, pictures=[curve], sheets=[sheet], notes=["a note"])
    text = page.page([made], {"mine": "By hand.\n"}, "benchmarks")
    assert "| [Theirs / ours](#my-work) | ≥ 2 | 2.75 | met |" in text
    assert "| variant | ms/step: median (min-max) | / ours |" in text
    assert "| the variant `ours` | 11.0 (10.0-12.0) |  |" in text
    assert "| the variant `theirs` | 30.0 (30.0-30.0) | 2.75 |" in text
    assert "- theirs / ours = 2.750, goal ≥ 2: met" in text
    for part in ("## My work", "![My work](benchmarks/curve.png)", "| x\\|y | 1 |", "- a note", "By hand.", "a CPU"):
        assert part in text


def test_a_busy_machine_is_named():
    for load, busy in ((5.0, False), (7.0, True)):
        case = measured(Round(results={"ours": {"ms": 1.0}}, load=load))
        assert ("busy with other work" in page.environment(record(case))) == busy


def test_a_record_is_read_as_it_was_written(tmp_path):
    goal = Goal(upper="theirs", lower="ours", limit=2)
    made = record(measured(of(1, 2), of(3, 4), goals=[goal]), sheets=[Sheet(title="", header=["a"], rows=[["b"]])])
    made.write(tmp_path / "mine.json")
    assert (tmp_path / "mine.json").read_text().count('\n    {"results": {"ours"') == 2  # a line for each round
    assert page.section(Record.read(tmp_path / "mine.json")) == page.section(made)
    (tmp_path / "mine.json").write_text('{"name": "mine"}')
    with pytest.raises(ValueError, match=r"mine\.json: got .* expected a benchmark's results"):
        Record.read(tmp_path / "mine.json")


def test_rounds_go_on_where_a_way_fails(tmp_path, capfd):
    ran: list[str] = []

    def works(folder: Path) -> dict[str, float]:
        ran.append("works")
        assert not list(folder.iterdir())
        return {"ms": 10.0}

    def fails(_: Path) -> dict[str, float]:
        ran.append("fails")
        raise RunFailed("exit code 1: Oops", "the tail of its output")

    def confused(_: Path) -> dict[str, float]:
        return {"ms": 1 / len(ran[:0])}

    def empty(_: Path) -> dict[str, float]:
        return {"us": 1.0}

    def absent(_: Path) -> dict[str, float]:
        ran.append("absent")
        raise Unavailable("no such library")

    variants = [
        Variant(name=run.__name__, title=run.__name__, run=run) for run in (works, fails, confused, empty, absent)
    ]
    goals = [Goal(upper="fails", lower="works", limit=1)]
    case = Case(name="two", title="two", variants=variants, metrics=[MS], goals=goals, reference="works")
    benchmark = Benchmark(name="mine", title="My work", about="What it is.", cases=lambda _: [case])
    assert main(benchmark, ["--rounds", "6", "--json", str(tmp_path / "mine.json")]) == MISSED
    assert (ran.count("works"), ran.count("fails"), ran.count("absent")) == (6, 2, 1)
    assert "the tail of its output" in capfd.readouterr().err
    (found,) = Record.read(tmp_path / "mine.json").measured
    assert found.values("works", "ms") == [10.0] * 6
    assert found.unavailable == {"absent": "no such library"}
    assert found.trouble("confused") == "failed in 2 of 6 rounds: ZeroDivisionError: division by zero"
    assert found.trouble("empty") == "failed in 2 of 6 rounds: it gave us, expected ms"
    assert Record.read(tmp_path / "mine.json").command == "python benchmarks/mine.py --rounds 6"
    with pytest.raises(SystemExit, match=r"--only: got no, expected some of absent, confused, empty, fails, works"):
        main(benchmark, ["--only", "no"])


def test_the_order_of_a_round_is_shuffled_by_the_seed():
    variants = [Variant(name=name, title=name, run=lambda _: {"ms": 1.0}) for name in "abcd"]
    case = Case(name="four", title="four", variants=variants, metrics=[MS])
    orders = [[tuple(r.order) for r in measure(case, Config(rounds=8, seed=seed)).rounds] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert {order[0] for order in orders[0]} != {"a"}
    assert all(sorted(order) == list("abcd") for order in orders[0])


@pytest.mark.full
def test_processes_that_fail_take_too_long_or_have_children():
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); "
    for ending, timeout, message in (
        ("raise ValueError('for a reason')", WAIT, "exit code 1: ValueError: for a reason"),
        ("import time; time.sleep(60)", 0.5, "not done after 0 s"),
    ):
        with pytest.raises(RunFailed, match=message):
            processes.launch([[sys.executable, "-c", code + ending]], timeout=timeout)
    with pytest.raises(Unavailable, match=r"^no such option$"):
        processes.launch([[sys.executable, "-c", "import sys; sys.exit('not available: no such option')"]])
    assert processes.launch([["echo", "one"], ["sleep", "0"]]) == "one\n"
    assert not marked()


@pytest.mark.full
def test_an_interrupt_leaves_nothing_behind(tmp_path):
    """Ctrl-C reaches the harness while a run's process, and its child in another session, are working."""
    script = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from harness import *
from processes import launch
run = lambda folder: launch([["sh", "-c", "setsid sleep 601 & touch {tmp_path}/began; exec sleep 602"]])
variants = [Variant(name="a", title="a", run=run)]
case = Case(name="a", title="a", variants=variants, metrics=[Metric(name="ms", title="ms")])
sys.exit(main(Benchmark(name="a", title="a", about="a", cases=lambda _: [case]), []))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + WAIT
    while not (tmp_path / "began").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert marked()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 130, errors
    assert not marked()


def marked() -> list[int]:
    """Return the processes of runs started by this process or its children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"BENCHMARK_RUN_ID=" in environment and f"PYTEST_CURRENT_TEST={here()}".encode() in environment:
            found.append(int(folder.name))
    return found


def here() -> str:
    return os.environ["PYTEST_CURRENT_TEST"].partition("[")[0].rpartition(" ")[0]


def test_a_peer_that_cannot_be_made_is_not_available(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(peers, "CACHE", tmp_path / "file")  # a file, so no folder can be created in it
    monkeypatch.setattr(peers, "_failed", {})
    for _ in range(2):  # only the first call tries
        with pytest.raises(Unavailable, match=r"^the environment plots cannot be created: .*Not a directory"):
            peers.python("plots")
    assert peers.python("plots", Path("/some/python")) == Path("/some/python")
    for pins in peers.PINS.glob("*.txt"):  # --no-deps: only pinned packages are installed
        lines = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
        assert lines and all(re.match(r"[\w.-]+==[\w.]+(; python_version [<>=]+ \"3\.11\")?$", line) for line in lines)


def test_the_report_is_what_the_results_say():
    """If this fails, run `python benchmarks/report.py`."""
    found = report.records(*report.FOLDERS)
    assert found
    assert report.DOCUMENT.read_text(encoding="utf-8") == report.document(found.values())
    pictures = {file.name for file in report.PICTURES.glob("*.png")}
    assert pictures == {file for record in found.values() for file in record.drawn()}


def test_a_result_under_another_name_is_refused(tmp_path):
    record().write(tmp_path / "results" / "yours.json")
    with pytest.raises(ValueError, match="got the results of mine, expected yours's"):
        report.records(tmp_path)


def test_every_benchmark_and_note_has_a_place():
    assert {file.stem for folder in report.FOLDERS for file in folder.glob("notes/*.md")} <= set(report.ORDER)
    for file in (file for folder in report.FOLDERS for file in folder.rglob("*.py")):
        lines = file.read_text().splitlines()
        assert len(lines) <= 350, file
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno <= 60, f"{file}:{node.lineno}"
