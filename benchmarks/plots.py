"""Draw the report's pictures. Needs matplotlib, and of this project only figures.py.

python plots.py FOLDER RESULT.json ...
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from figures import Measured, Picture, Record

OURS = "#1f6feb"
THEIRS = "#9aa7b4"
# Grey text on a transparent background has a contrast of 4 or more on light and on dark pages.
TEXT = "#7a828c"
FAINT = "#b1bac4"
COLORS = (OURS, "#e36209", "#2da44e", "#8250df", TEXT, "#bf3989")
STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.35,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.labelcolor": TEXT,
    "axes.axisbelow": True,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "font.size": 10,
    "legend.frameon": False,
}


def main(folder: Path, *results: Path) -> None:
    """Draw all pictures of the given results into a folder."""
    plt.rcParams.update(STYLE)
    for result in results:
        for file, drawn in Record.read(result).drawn().items():
            draw = curves if isinstance(drawn, Picture) else series if drawn.series else bars
            figure = draw(drawn)
            # Without the version of matplotlib, so that the same figures give the same file.
            figure.savefig(folder / file, dpi=130, bbox_inches="tight", metadata={"Software": None})
            plt.close(figure)


def bars(measured: Measured):
    """Draw the medians as horizontal bars below their labels, with a line from the minimum to the maximum.

    The picture is narrow, so that its text remains readable on a phone.
    """
    metric = measured.metrics[0]
    found = {title: measured.values(variant, metric.name) for variant, title in measured.variants.items()}
    found = {plain(title): values for title, values in found.items() if values}
    reach = max(map(max, found.values()))
    figure, axes = plt.subplots(figsize=(5.4, 0.5 * len(found) + 1.1))
    for place, (label, values) in enumerate(found.items()):
        middle = statistics.median(values)
        color = OURS if "hvdkit" in label else THEIRS
        axes.barh(place, middle, height=0.42, color=color)
        axes.text(0, place - 0.31, label, va="bottom", color=color if color == OURS else TEXT)
        if max(values) > min(values):
            axes.plot([min(values), max(values)], [place, place], color=TEXT, linewidth=1.4, marker="|", markersize=7)
        digits = 3 if metric.digits is None else metric.digits
        axes.text(max(values) + 0.012 * reach, place, f"{middle:.{digits}f}", va="center")
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(found) - 0.6, -0.8)
    axes.set_xlim(0, reach * 1.13)
    spread = any(len(set(values)) > 1 for values in found.values())
    what = f"{metric.title}{', median with minimum and maximum' if spread else ''}; lower is better"
    axes.set_title("\n".join([*textwrap.wrap(capitalized(measured.title), 58), what]), x=0, pad=12)
    return figure


def capitalized(title: str) -> str:
    """Return a title that begins with a capital letter."""
    return title[0].upper() + title[1:]


def series(measured: Measured):
    """Draw lines over sizes, with logarithmic axes."""
    figure, axes = plt.subplots(figsize=(5.4, 4.2))
    for (variant, title), color in zip(measured.variants.items(), COLORS, strict=False):
        found = {metric.at: measured.values(variant, metric.name) for metric in measured.series}
        points = [(at, statistics.median(values)) for at, values in found.items() if values]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=plain(title))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks: list[float] = []
    for at in sorted(metric.at for metric in measured.series):
        if not ticks or at >= 8 * ticks[-1]:  # room for the label
            ticks.append(at)
    axes.set_xticks(ticks, [size(x) for x in ticks], fontsize=8.5)
    axes.set_xlabel("bytes")
    axes.set_ylabel("µs")
    axes.set_title(f"{capitalized(measured.title)}; lower is better")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15))
    return figure


def curves(picture: Picture):
    """Draw curves over powers of two, or over steps; the latter with a broad first curve below the others."""
    figure, axes = plt.subplots(figsize=(5.4, 3.6))
    looks = by_model(list(picture.curves)) if picture.doubling else covering(len(picture.curves))
    for (label, points), look in zip(picture.curves.items(), looks, strict=True):
        axes.plot(*zip(*points, strict=True), label=label, **look)
    if picture.y_log:
        axes.set_yscale("log")
    if picture.doubling:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(0, 1)
    axes.set_xlabel(picture.x_label)
    axes.set_ylabel(picture.y_label)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15)) if picture.doubling else axes.legend()
    return figure


def plain(title: str) -> str:
    """Return a title without Markdown markup."""
    return title.replace("`", "")


def covering(count: int) -> list[dict[str, Any]]:
    """Return line styles, the first one broad and faint."""
    return [{"color": FAINT, "linewidth": 6}, *({"color": color, "linewidth": 1.4} for color in COLORS)][:count]


def by_model(labels: list[str]) -> list[dict[str, Any]]:
    """Return line styles: a color for each text before the last comma, a dash pattern for each text after it."""
    models = list(dict.fromkeys(label.rpartition(", ")[0] for label in labels))
    links = list(dict.fromkeys(label.rpartition(", ")[2] for label in labels))
    split = (label.rpartition(", ") for label in labels)
    return [
        {"color": COLORS[models.index(model)], "linestyle": ("--", "-", ":")[links.index(link)], "marker": "."}
        for model, _, link in split
    ]


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit, name in ((2**20, "MB"), (2**10, "KB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count:g} B"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
