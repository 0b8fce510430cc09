"""Tiers of tests: marks choose the tier and the numbers of ranks, and a wrong mark is an error."""

from __future__ import annotations

import subprocess
import sys

import pytest
import run as runner

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


@pytest.fixture
def collected(tmp_path):
    """Return a function that lists the tests that a tier runs in a folder on some ranks."""
    (tmp_path / "conftest.py").write_text((runner.ROOT / "tests/conftest.py").read_text())

    def collect(folder, tier, ranks=1, text=TESTS):
        path = tmp_path / folder / "test_it.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        launched = (
            "import os, sys, pytest; os.environ.update(OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_SIZE=sys.argv[1], "
        )
        launched += "OMPI_COMM_WORLD_LOCAL_RANK='0', OMPI_COMM_WORLD_LOCAL_SIZE=sys.argv[1]); "
        launched += f"sys.path.insert(0, {str(runner.ROOT / 'tests')!r}); sys.exit(pytest.main(sys.argv[2:]))"
        options = ["-q", "--collect-only", "--strict-markers", "--import-mode=importlib", "-p", "no:cacheprovider"]
        options += ["--rootdir", str(tmp_path), "--tier", tier, str(path)]
        command = [sys.executable, "-c", launched, str(ranks), *options]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        names = (
            []
            if result.returncode
            else [line.rpartition("::test_")[2] for line in result.stdout.splitlines() if "::test_" in line]
        )
        return names, result.stdout + result.stderr

    return collect


def test_each_tier_runs_its_tests(collected):
    every = ["plain", "core", "nightly", "full", "sizes"]
    for folder, tier, expected in [
        ("jobs", "core", ["core", "sizes"]),
        ("jobs", "rest", ["plain", "full"]),
        ("jobs", "all", ["plain", "core", "full", "sizes"]),
        ("jobs", "nightly", every),
        ("unit", "core", ["plain", "core", "sizes"]),
    ]:
        assert collected(folder, tier, text=OF_ONE_PROCESS)[0] == expected, (folder, tier)


def test_a_mark_names_the_numbers_of_ranks(collected):
    assert collected("parallel", "core", ranks=2)[0] == ["core"]
    assert collected("parallel", "core", ranks=3)[0] == ["sizes"]
    assert collected("parallel", "all", ranks=3)[0] == ["sizes"]
    assert collected("parallel", "nightly", ranks=3)[0] == ["plain", "core", "nightly", "full", "sizes"]
    assert collected("parallel", "nightly", ranks=1)[0] == ["sizes"]


@pytest.mark.parametrize(
    ("tier", "text", "words"),
    [
        ("hourly", TESTS, "invalid choice: 'hourly'"),
        ("core", TESTS.replace("mark.full", "mark.slow"), "'slow' not found in `markers`"),
        ("core", TESTS.replace("ranks(1, 3)", "ranks(0)"), "expected numbers from 1 to 4"),
        ("core", TESTS.replace("ranks(1, 3)", "ranks()"), "expected numbers from 1 to 4"),
    ],
)
def test_an_unknown_tier_or_mark_is_an_error(collected, tier, text, words):
    names, output = collected("parallel", tier, ranks=2, text=text)
    assert not names and words in output
