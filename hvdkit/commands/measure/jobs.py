"""Jobs that measure: started like those of ``hvdkit run``, they return the measurements of each rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hvdkit.cluster.log_filter import CHATTER
from hvdkit.commands.measure import worker
from hvdkit.commands.measure.config import MeasureOptions
from hvdkit.commands.measure.measurements import Document, MeasureRequest, RankMeasurement
from hvdkit.commands.run import restarts
from hvdkit.commands.run.job import prepare
from hvdkit.commands.run.output import OutputWriter
from hvdkit.errors import HvdkitError


def measure_ranks(
    config: MeasureOptions, request: MeasureRequest, variables: Mapping[str, str], np: int | None = None
) -> list[RankMeasurement]:
    """Run a job in which every rank measures what is requested; return the measurements in rank order.

    Raises:
        SystemExit: the job has failed with this exit code; its output has the reason.
        HvdkitError: the job has succeeded, but printed no results.
    """
    program = [sys.executable, "-m", worker.__name__, json.dumps(asdict(request))]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    code, results = launch(config, program, {**quiet, **variables}, np)
    if code:
        raise SystemExit(code)
    if results is None:
        raise HvdkitError("the ranks ended without printing their measurements; see their output above")
    return [RankMeasurement.from_json(result) for result in results]


def launch(
    config: MeasureOptions, program: Sequence[str], variables: Mapping[str, str], np: int | None = None
) -> tuple[int, list[Document] | None]:
    """Run ``program`` on all ranks; return its exit code, and the results printed by the chief, if any."""
    job = prepare(config.run_config(np), program, variables)
    output = ResultsFilter({1: sys.stdout.buffer, 2: sys.stderr.buffer})
    verdict = restarts.run(job, program, output)
    return verdict.code, output.results


class ResultsFilter(OutputWriter):
    """Writes the output of all ranks, except the chief's line of results, which it reads."""

    results: list[Document] | None = None

    def select(self, data: bytes) -> bytes:
        """Return the lines without the results and known noise."""
        mark = worker.MARK.encode()
        lines = data.splitlines(keepends=True)
        for line in lines:
            _, found, results = line.partition(mark)
            if found:
                self.results = json.loads(results)
        shown = [line for line in lines if mark not in line and not any(c.encode() in line for c in CHATTER)]
        return b"".join(shown)
