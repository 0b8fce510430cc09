"""Collect all ranks' records on the chief, align their clocks, and write the trace and the report."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdkit.profiling import clocks, profile_report, trace
from hvdkit.profiling.record import RankProfile
from hvdkit.profiling.step_parts import divide

# Limit on the spans of all ranks together, because every rank receives all of them.
_MOST_SPANS = 600_000


def together(folder: Path, record: RankProfile, raw: bytes, exchange: Any, say: Callable[[str], None]) -> None:
    """Send every rank's record to the chief, which writes the output folder and prints the report.

    Args:
        folder: output folder for ``trace.json.gz``, ``profile.json`` and, for TensorBoard, ``plugins/profile/``.
        record: this rank's record.
        raw: the output of TensorFlow's profiler on this rank.
        exchange: exchanges objects among all ranks.
        say: prints a line for the user.
    """
    ranks = len(exchange.allgather(None))
    found = clocks.offsets(exchange.allgather)
    for problem in record.problems:
        say(f"profile: {problem}")
    parts = exchange.allgather_bytes(_packed(record, ranks))
    _keep_raw(folder, record, raw, exchange)
    if record.rank:
        return
    records = [
        RankProfile.from_json(json.loads(zlib.decompress(part))).moved(*one)
        for part, one in zip(parts, found, strict=True)
    ]
    _write(folder, records, say)


def _packed(record: RankProfile, ranks: int) -> bytes:
    most = _MOST_SPANS // ranks
    spans = [span for span in record.spans if span.kind in ("op", "data")]
    if len(spans) > most:
        kept = set(sorted(spans, key=lambda span: span.start - span.end)[:most])
        record.left_out = len(spans) - most
        record.spans = [span for span in record.spans if span.kind not in ("op", "data") or span in kept]
    return zlib.compress(json.dumps(record.as_json()).encode(), 1)


def _keep_raw(folder: Path, record: RankProfile, raw: bytes, exchange: Any) -> None:
    """Write TensorFlow's files in TensorBoard's layout: one run, with each rank as a host."""
    run = exchange.broadcast(time.strftime("%Y_%m_%d_%H_%M_%S"), 0)
    target = folder / "plugins" / "profile" / run / f"{record.host}.rank-{record.rank}.xplane.pb"
    try:
        if raw:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(raw)
    except OSError as error:
        record.problems.append(f"{target} cannot be written ({error.strerror})")
    places = exchange.allgather(str(target) if raw else None)
    missing = exchange.broadcast([rank for rank, path in enumerate(places) if path and not Path(path).exists()], 0)
    if missing:  # their hosts do not share a file system with the chief's
        sent = exchange.allgather_bytes(raw if record.rank in missing else b"")
        if record.rank == 0:
            with contextlib.suppress(OSError):  # optional: the trace does not need them
                for rank in missing:
                    Path(places[rank]).parent.mkdir(parents=True, exist_ok=True)
                    Path(places[rank]).write_bytes(sent[rank])


def _write(folder: Path, records: Sequence[RankProfile], say: Callable[[str], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ranks = divide(records)
    found = profile_report.rows(ranks)
    problems = [f"rank {record.rank}: {problem}" for record in records for problem in record.problems]
    for record in records:
        trace.shortened(record)
    path = folder / "trace.json.gz"
    trace.write(path, records, ranks)
    profile_report.write(folder / "profile.json", ranks, problems)
    if not found:
        say("profile: no step was recorded; the run was too short, or nothing counts its steps: see docs/profiling.md")
        return
    profile_report.show(found, sys.stdout)
    sys.stdout.flush()
    if partly := [str(record.rank) for record in records if record.problems]:
        say(f"profile: not all was recorded on rank {', '.join(partly)}: do not rely on its row, or on the sentence")
    sure = max(record.clock_error for record in records) / 1e6
    clocks_are = "one clock" if sure == 0 else f"clocks aligned to {sure:.3f} ms"
    say(f"profile: {path} ({path.stat().st_size / 1e6:.1f} MB, {clocks_are}); open it with https://ui.perfetto.dev")
