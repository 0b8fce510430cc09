"""The data of the report's pictures; plots.py draws them in a separate environment."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Measured, Record

PLOTS = Path(__file__).with_name("plots.py")
FEWEST = 3  # ways; two figures need no picture


def drawings(record: Record) -> dict[str, dict[str, Any]]:
    """Return the pictures of a benchmark by file name."""
    found = {}
    for measured in record.measured:
        drawing = series(measured) if measured.metrics[0].at is not None else bars(measured)
        if drawing is not None:
            found[f"{record.name}-{measured.name}.png"] = drawing
    for picture in record.pictures:
        found[f"{picture.name}.png"] = {
            "kind": "curves",
            "x_label": picture.x_label,
            "y_label": picture.y_label,
            "y_log": picture.y_log,
            "doubling": picture.doubling,
            "curves": {label: [list(point) for point in points] for label, points in picture.curves.items()},
        }
    return found


def bars(measured: Measured) -> dict[str, Any] | None:
    """Return a bar for every way that has figures, with its spread; None for fewer than FEWEST."""
    metric = measured.metrics[0]
    rows = [(way, measured.values(way, metric.name)) for way in measured.ways]
    rows = [(way, values) for way, values in rows if values]
    if len(rows) < FEWEST:
        return None
    return {
        "kind": "bars",
        "x_label": metric.title,
        "labels": [plain(measured.ways[way]) for way, _ in rows],
        "ours": ["hvdkit" in measured.ways[way] for way, _ in rows],
        "middle": [statistics.median(values) for _, values in rows],
        "least": [min(values) for _, values in rows],
        "most": [max(values) for _, values in rows],
        "digits": metric.digits,
    }


def series(measured: Measured) -> dict[str, Any]:
    """Return a curve for every way over the metrics' x positions."""
    metrics = [metric for metric in measured.metrics if metric.at is not None]

    def points(way: str) -> Iterator[list[float]]:
        for metric in metrics:
            if values := measured.values(way, metric.name):
                yield [metric.at or 0.0, statistics.median(values)]

    return {
        "kind": "series",
        "x_label": "bytes",
        "y_label": "µs",
        "curves": {plain(title): list(points(way)) for way, title in measured.ways.items()},
    }


def plain(title: str) -> str:
    """Return a title without Markdown markup."""
    return title.replace("`", "")


def digest(drawing: dict[str, Any]) -> str:
    """Return a digest of the data and the drawing code; it is stored in the picture's file."""
    return hashlib.sha256(json.dumps(drawing, sort_keys=True).encode() + PLOTS.read_bytes()).hexdigest()[:16]


def is_of(file: Path, drawing: dict[str, Any]) -> bool:
    """Return True if a PNG file was drawn from exactly this data."""
    return file.exists() and b"Description\0" + digest(drawing).encode() in file.read_bytes()
