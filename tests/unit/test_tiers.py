"""Tiers of tests: marks choose the tier and the numbers of ranks, and a wrong mark is an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import run as runner
from helpers import speed, time_limit
from helpers.tiers import EXAMPLES_VARIABLE, MARKS, selects

from hvdkit.machine.environment import ineffective_settings

pytest_plugins = ["pytester"]

TESTS = """
import pytest
def test_plain(): pass
@pytest.mark.core
def test_core(): pass
@pytest.mark.nightly
def test_nightly(): pass
@pytest.mark.full
def test_full(): pass
@pytest.mark.core
@pytest.mark.ranks(1, 3)
def test_sizes(): pass
"""
OF_ONE_PROCESS = TESTS.replace("@pytest.mark.ranks(1, 3)\n", "")
EVERY = ["plain", "core", "nightly", "full", "sizes"]


@pytest.fixture
def names(pytester):
    """Return a function that lists the tests of a text that a tier runs in a folder on some ranks."""
    pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"    {mark}: -\n" for mark in MARKS))

    def select(folder, tier, ranks=1, text=TESTS):
        path = pytester.path / folder / "test_it.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        items, _ = pytester.inline_genitems("--import-mode=importlib", path)
        return [item.name.removeprefix("test_") for item in items if selects(tier, ranks, item)]

    return select


@pytest.mark.parametrize(
    ("folder", "tier", "expected"),
    [
        ("jobs", "core", ["core", "sizes"]),
        ("jobs", "rest", ["plain", "full"]),
        ("jobs", "all", ["plain", "core", "full", "sizes"]),
        ("jobs", "nightly", EVERY),
        ("unit", "core", ["plain", "core", "sizes"]),
    ],
)
def test_each_tier_runs_its_tests(names, folder, tier, expected):
    assert names(folder, tier, text=OF_ONE_PROCESS) == expected


@pytest.mark.parametrize(
    ("tier", "ranks", "expected"),
    [
        ("core", 2, ["core"]),
        ("core", 3, ["sizes"]),
        ("all", 3, ["sizes"]),
        ("nightly", 3, EVERY),
        ("nightly", 2, EVERY),
        ("nightly", 1, ["sizes"]),
    ],
)
def test_a_mark_names_the_numbers_of_ranks(names, tier, ranks, expected):
    assert names("parallel", tier, ranks) == expected


def test_a_mark_names_the_numbers_of_ranks_of_the_nightly_tier(names):
    text = TESTS.replace("ranks(1, 3)", "ranks(1, 2, 3)\n@pytest.mark.nightly(3)")
    text = text.replace("mark.core\n", "mark.core(2)\n")
    assert [names("parallel", "core", n, text) for n in (1, 2, 3)] == [[], ["core", "sizes"], []]
    assert [names("parallel", "all", n, text) for n in (1, 3)] == [["sizes"], []]
    assert names("parallel", "nightly", 3, text) == EVERY


def test_a_wrong_number_of_ranks_of_the_nightly_tier_is_an_error(names):
    with pytest.raises(pytest.UsageError, match=r"got nightly\(5,\), expected numbers from 1 to 4"):
        names("parallel", "core", 3, TESTS.replace("ranks(1, 3)", "ranks(1, 3)\n@pytest.mark.nightly(5)"))


def test_a_test_never_runs_on_fewer_ranks_than_its_mark_names(names):
    text = TESTS.replace("ranks(1, 3)", "ranks(3, 4)")
    assert "sizes" not in names("parallel", "nightly", 2, text)
    assert names("parallel", "nightly", 3, text) == EVERY


def test_the_mark_of_a_case_counts_more_than_that_of_its_function(names):
    text = """
import pytest
@pytest.mark.core
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.full)])
def test_n(n): pass
"""
    found = {tier: names("jobs", tier, text=text) for tier in ("core", "rest", "nightly")}
    assert found == {"core": ["n[1]"], "rest": ["n[3]"], "nightly": ["n[1]", "n[2]", "n[3]"]}


def test_a_test_may_be_in_the_core_at_some_numbers_of_ranks_only(names):
    text = TESTS.replace(
        "@pytest.mark.core\n@pytest.mark.ranks(1, 3)", "@pytest.mark.core(2)\n@pytest.mark.ranks(2, 3)"
    )
    found = {
        (tier, ranks): "sizes" in names("parallel", tier, ranks, text) for tier in ("core", "rest") for ranks in (2, 3)
    }
    assert found == {("core", 2): True, ("core", 3): False, ("rest", 2): False, ("rest", 3): True}


def test_without_a_tier_a_test_that_needs_more_ranks_is_skipped(pytester, monkeypatch):
    monkeypatch.delenv("HVDKIT_TEST_RECORDS", raising=False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "1")
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name.replace('RANK', 'SIZE')}", "2")
    (pytester.path / "conftest.py").write_text((runner.ROOT / "tests/conftest.py").read_text())
    pytester.mkdir("parallel").joinpath("test_it.py").write_text(TESTS.replace("ranks(1, 3)", "ranks(3, 4)"))
    result = pytester.inline_run("--import-mode=importlib", "-p", "no:cacheprovider")
    passed, skipped, failed = result.listoutcomes()
    assert (len(passed), len(skipped), len(failed)) == (4, 1, 0)
    assert "needs at least 3 ranks, got 2; it is marked ranks(3, 4)" in str(skipped[0].longrepr)


@pytest.mark.parametrize("mark", ["ranks(0)", "ranks()", "ranks('two')"])
def test_a_wrong_number_of_ranks_is_an_error(names, mark):
    with pytest.raises(pytest.UsageError, match="expected numbers from 1 to 4"):
        names("parallel", "core", 2, TESTS.replace("ranks(1, 3)", mark))


def test_ranks_are_for_tests_of_all_ranks(names):
    with pytest.raises(pytest.UsageError, match="mark of tests/parallel"):
        names("jobs", "core")


def test_names_are_the_same_at_each_start(names):
    test = """
import pytest

@pytest.mark.parametrize("function", [print, lambda: 0], ids=str)
def test_it(function): ...
"""
    with pytest.raises(pytest.UsageError, match=r"got an address in a name.*pass ids="):
        names("parallel", "core", 2, test)


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--tier", "hourly"], "invalid choice: 'hourly'"), (["test_it.py"], "'slow' not found")]
)
def test_an_unknown_tier_or_mark_is_an_error(tmp_path, arguments, words):
    (tmp_path / "conftest.py").write_text((runner.ROOT / "tests/conftest.py").read_text())
    (tmp_path / "setup.cfg").write_text((runner.ROOT / "setup.cfg").read_text())
    (tmp_path / "test_it.py").write_text(TESTS.replace("mark.full", "mark.slow"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "--override-ini",
        f"pythonpath={runner.ROOT / 'tests'}",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "HVDKIT_TEST_RECORDS"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    result = subprocess.run([*command, *arguments], **run)
    assert result.returncode != 0 and words in result.stdout + result.stderr


def test_variables_of_the_runner_are_not_reported_by_jobs_as_settings():
    names = (EXAMPLES_VARIABLE, speed.VARIABLE, time_limit.UNTIL)
    assert ineffective_settings(dict.fromkeys(names, "1")) is None
