"""The proof on large files, at a small size."""

import subprocess
import sys
from pathlib import Path

import pytest
from figures import Record
from helpers.speed import STALL

PROOF = Path(__file__).resolve().parents[2] / "proofs" / "large_input.py"


@pytest.mark.nightly
def test_a_run_that_is_killed_within_an_epoch_continues_on_other_ranks(tmp_path):
    command = [sys.executable, str(PROOF), "--gigabytes", "0.01", "--json", str(tmp_path / "found.json")]
    ended = subprocess.run([*command, "--data-dir", str(tmp_path)], timeout=0.8 * STALL, check=False, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    record = Record.read(tmp_path / "found.json")
    assert any("equal; each example is used once" in note for note in record.notes)
    reading = next(sheet for sheet in record.sheets if sheet.title.startswith("Reading"))
    assert [row[0] for row in reading.rows] == [0, 1, 2, 3]
    assert len(list(tmp_path.glob("*-rows/*.parquet"))) == 40
