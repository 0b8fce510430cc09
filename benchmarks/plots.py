"""Draw the report's pictures: reads {file: [digest, drawing]} as JSON from stdin. Needs matplotlib alone."""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

OURS, THEIRS, SPREAD, TEXT, FAINT = "#1f6feb", "#9aa7b4", "#30363d", "#24292f", "#d0d7de"
COLOURS = (OURS, "#e36209", "#2da44e", "#8250df", "#6e7781", "#bf3989")
# An opaque ground of its own: readable on light pages and dark ones alike.
STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#eaeef2",
    "axes.axisbelow": True,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "font.size": 10,
    "legend.frameon": False,
}


def main() -> None:
    """Draw all."""
    plt.rcParams.update(STYLE)
    for file, (digest, drawing) in json.load(sys.stdin).items():
        figure = {"bars": bars, "series": series, "curves": curves}[drawing["kind"]](drawing)
        figure.savefig(file, dpi=130, bbox_inches="tight", metadata={"Description": digest, "Software": None})
        plt.close(figure)


def bars(drawing: dict[str, Any]):
    """Horizontal bars, the medians; a line from the least to the most."""
    count, middle = len(drawing["labels"]), drawing["middle"]
    figure, axes = plt.subplots(figsize=(8.5, 0.42 * count + 0.9))
    places = range(count)
    axes.barh(places, middle, height=0.62, color=[OURS if ours else THEIRS for ours in drawing["ours"]])
    reach = max(drawing["most"])
    for place, value, least, most in zip(places, middle, drawing["least"], drawing["most"], strict=True):
        if most > least:
            axes.plot([least, most], [place, place], color=SPREAD, linewidth=1.4, marker="|", markersize=7)
        digits = 3 if drawing["digits"] is None else drawing["digits"]
        axes.text(max(value, most) + 0.012 * reach, place, f"{value:.{digits}f}", va="center")
    axes.set_yticks(list(places), drawing["labels"])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, reach * 1.1)
    spread = ": median, with least and most" if drawing["most"] != drawing["least"] else ""
    axes.set_xlabel(drawing["x_label"] + spread)
    return figure


def series(drawing: dict[str, Any]):
    """Lines over sizes, both axes logarithmic."""
    figure, axes = plt.subplots(figsize=(7.6, 4.2))
    for (label, points), colour in zip(drawing["curves"].items(), COLOURS, strict=False):
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({x for points in drawing["curves"].values() for x, _ in points})
    axes.set_xticks(ticks, [size(x) for x in ticks], fontsize=8.5)
    axes.set_xlabel(drawing["x_label"])
    axes.set_ylabel(drawing["y_label"])
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02))
    return figure


def curves(drawing: dict[str, Any]):
    """Curves over steps, the first of which the others should cover; or over powers of two."""
    figure, axes = plt.subplots(figsize=(8.5, 3.8))
    looks = by_model(list(drawing["curves"])) if drawing["doubling"] else covering(len(drawing["curves"]))
    for (label, points), look in zip(drawing["curves"].items(), looks, strict=True):
        axes.plot(*zip(*points, strict=True), label=label, **look)
    if drawing["y_log"]:
        axes.set_yscale("log")
    if drawing["doubling"]:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(0, 1)
    axes.set_xlabel(drawing["x_label"])
    axes.set_ylabel(drawing["y_label"])
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02)) if drawing["doubling"] else axes.legend()
    return figure


def covering(count: int) -> list[dict[str, Any]]:
    """Return looks of which the first is broad and faint."""
    return [{"color": FAINT, "linewidth": 6}, *({"color": colour, "linewidth": 1.4} for colour in COLOURS)][:count]


def by_model(labels: list[str]) -> list[dict[str, Any]]:
    """Return a colour for what stands before the last comma, and a line for each of what comes after."""
    models = list(dict.fromkeys(label.rpartition(", ")[0] for label in labels))
    links = list(dict.fromkeys(label.rpartition(", ")[2] for label in labels))
    split = (label.rpartition(", ") for label in labels)
    return [
        {"color": COLOURS[models.index(model)], "linestyle": ("--", "-", ":")[links.index(link)], "marker": "."}
        for model, _, link in split
    ]


def size(count: float) -> str:
    """Return bytes as people say them."""
    for unit, name in ((2**20, "MB"), (2**10, "KB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count:g} B"


if __name__ == "__main__":
    main()
