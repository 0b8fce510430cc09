"""Examples with categorical features: synthetic ones with a known best loss, Criteo's files, MovieLens's ratings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

CRITEO_DENSE, CRITEO_CATEGORIES = 13, 26


@dataclass(frozen=True)
class Clicks:
    """Examples of a click model.

    Attributes:
        name: name for log lines.
        dense: ``[n, d]`` float32.
        ids: ``[n, f]`` int64, one column per feature.
        labels: ``[n, 1]`` float32, 0 or 1.
        rows: number of different ids of each feature.
        held_out: number of examples, at the end, that are not trained on.
        best: expected loss and AUC of the best possible model on the held-out examples; None if not known.
        lists: features with any number of ids; see :class:`inputs.click_files.ClickFiles`.
        shuffle: how ``hk.data.GlobalBatches`` shuffles the examples.
    """

    name: str
    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    rows: tuple[int, ...]
    held_out: int
    best: tuple[float, float] | None = None
    lists: tuple[str, ...] = ()
    shuffle: Literal["full"] = "full"

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.labels)

    @property
    def example(self) -> dict[str, np.ndarray]:
        """Inputs of one example."""
        return {"dense": self.dense[:1], "ids": self.ids[:1]}

    def part(self, held_out: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return inputs and labels of one part."""
        cut = len(self.labels) - self.held_out
        rows = slice(cut, None) if held_out else slice(0, cut)
        return {"dense": self.dense[rows], "ids": self.ids[rows]}, self.labels[rows]


def planted_clicks(examples: int = 60_000, *, features: int = 26, rows: int = 1000, seed: int = 0) -> Clicks:
    """Generate examples with known click probability: every id of every feature has an effect, and so do the numbers.

    Ids follow Zipf's law; p = 1 / (1 + exp(-(sum of the effects of the ids + w . dense))).
    """
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.5, (examples, features)) - 1, rows - 1)
    dense = rng.normal(size=(examples, CRITEO_DENSE)).astype(np.float32)
    effects = rng.normal(size=(features, rows)) * 1.5 / np.sqrt(features)
    weights = rng.normal(size=CRITEO_DENSE) * 0.15
    logits = effects[np.arange(features), ids].sum(1) + dense @ weights
    probability = 1 / (1 + np.exp(-logits))
    labels = (rng.random(examples) < probability).astype(np.float32)
    held_out = examples // 6
    p, y = probability[-held_out:], labels[-held_out:]
    loss = float(-np.mean(y * np.log(p) + (1 - y) * np.log1p(-p)))
    return Clicks("planted clicks", dense, ids, labels[:, None], (rows,) * features, held_out, (loss, auc(y, p)))


def load_criteo(path: Path, *, rows: int = 100_000, limit: int | None = None) -> Clicks:
    """Read Criteo's format: label, 13 counts and 26 hexadecimal categories per line, tab-separated; any may be empty.

    Counts become log(1 + max(count, 0)), categories are taken modulo ``rows``.

    Raises:
        ValueError: A line has the wrong number of columns; the message names it.
    """
    dense, ids, labels = [], [], []
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if limit is not None and number > limit:
                break
            words = line.rstrip("\n").split("\t")
            if len(words) != 1 + CRITEO_DENSE + CRITEO_CATEGORIES:
                expected = f"{1 + CRITEO_DENSE + CRITEO_CATEGORIES}, separated by tabs"
                raise ValueError(f"{path}: line {number} has {len(words)} columns, expected {expected}")
            labels.append(float(words[0]))
            dense.append([float(word or 0) for word in words[1 : 1 + CRITEO_DENSE]])
            ids.append([int(word or "0", 16) % rows for word in words[1 + CRITEO_DENSE :]])
    counts = np.log1p(np.maximum(np.array(dense, np.float32), 0))
    return _clicks(f"Criteo, {path.name}", counts, np.array(ids), labels, (rows,) * CRITEO_CATEGORIES)


def load_movielens(path: Path) -> Clicks:
    """Read MovieLens's ``ratings.csv`` (userId,movieId,rating,timestamp); a rating of 4 or more is a click."""
    table = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 1, 2), ndmin=2)
    ids = table[:, :2].astype(np.int64)
    rows = tuple(int(n) + 1 for n in ids.max(0))
    dense = np.ones((len(ids), 1), np.float32)
    return _clicks(f"MovieLens, {path.name}", dense, ids, table[:, 2] >= 4, rows)


def _clicks(name: str, dense: np.ndarray, ids: np.ndarray, labels: object, rows: tuple[int, ...]) -> Clicks:
    order = np.random.default_rng(0).permutation(len(ids))
    clicked = np.asarray(labels, np.float32)[order, None]
    return Clicks(name, dense[order], ids[order], clicked, rows, max(1, len(ids) // 6))


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under the ROC curve: how often a click scores above a non-click (Mann and Whitney, 1947)."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels.ravel(), scores.ravel())) if len(np.unique(labels)) == 2 else float("nan")
