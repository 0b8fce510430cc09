"""The workflows agree with the Makefile and with the table of versions; `make lint` checks their schema."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import compatibility
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))


def jobs(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def test_workflows_call_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for path in FILES:
        called = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(step.get("run", "") for step in steps(path))))
        for job in jobs(path).values():
            called |= {*job.get("strategy", {}).get("matrix", {}).get("target", [])}
        assert called and called <= targets, path.name


def test_the_makefile_works_in_a_path_with_spaces(tmp_path):
    """Nothing splits the path into words: it occurs only between quotes."""
    folder = tmp_path / "a path"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "requirements").symlink_to(ROOT / "requirements")
    for name in ("setup.cfg", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    env = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}  # make may run this test
    for target in ("smoke", "test-nightly", "lint", "docs-check"):
        command = ["make", "--dry-run", "--no-print-directory", f"PYTHON={sys.executable}", target]
        recipes = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout
        assert str(folder) not in re.sub(r'"[^"]*"', "", recipes)


def test_each_row_of_the_table_has_a_job():
    rows = jobs(FOLDER / "compatibility.yml")["row"]["strategy"]["matrix"]["include"]
    named = [(row["tensorflow"], row["python"], row["mpi"]) for row in rows]
    assert named == [(row.tensorflow, row.python, row.mpi) for row in compatibility.ROWS]


def test_tests_on_hosts_and_under_slurm_run_every_night():
    """They are skipped without root or without these packages."""
    helpers = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "helpers").glob("*.py"))
    needed = {name for names in re.findall(r"\(Debian: ([^)]+)\)", helpers) for name in names.split(", ")}
    install, run = (step["run"] for step in jobs(FOLDER / "nightly.yml")["nightly"]["steps"] if "run" in step)
    assert len(needed) >= 5 and needed <= {*install.split()}
    assert run.startswith("sudo ") and run.endswith("make test-nightly")


def test_only_the_job_that_publishes_may_identify_itself():
    """It runs no code of this project."""
    allowed = [
        (path.name, name)
        for path in FILES
        for name, job in jobs(path).items()
        if "write" in job.get("permissions", {}).values()
    ]
    assert allowed == [("release.yml", "publish")]
    assert not any("run" in step for step in jobs(FOLDER / "release.yml")["publish"]["steps"])
    for path in FILES:
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
