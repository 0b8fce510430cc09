"""Paths that the proofs import from: the harness in benchmarks/, simulated hosts and failing jobs in tests/."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKERS = ROOT / "proofs" / "workers"
sys.path += [str(ROOT / folder) for folder in ("benchmarks", "tests")]
