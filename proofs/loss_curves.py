"""Train the CIFAR-10 network with the same global batch on 1, 2 and 4 ranks, and compare the losses step by step.

    python proofs/loss_curves.py

The ranks see the same examples in the same order with the same distortion, so the curves differ only by rounding:
sums are taken in a different order. A high learning rate would make training chaotic and amplify rounding errors, so
the rate is a fifth of the tutorial's.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass

import paths
import tyro
from figures import Picture, Sheet
from harness import Output, publish
from processes import BIN, environment, launch

LIMIT = 2e-4
ABOUT = """The CIFAR-10 tutorial's network on real images. A step has 128 examples over all ranks: the same examples in
the same order with the same distortion. The curves differ only by rounding, because sums are taken in a different
order."""


@dataclass(frozen=True, kw_only=True)
class LossCurves(Output):
    """Compare losses over numbers of ranks."""

    steps: int = 100
    """Steps to train."""
    np: tuple[int, ...] = (1, 2, 4)
    """World sizes; the others are compared with the first."""


def main() -> int:
    """Run every world size, record the curves; return MISSED if one differs by more than the limit."""
    config = tyro.cli(LossCurves, description=__doc__)
    curves = {size: losses(size, config.steps) for size in config.np}
    first = curves[config.np[0]]
    differences = {
        size: [abs(ours - theirs) / theirs for ours, theirs in zip(curve, first, strict=True)]
        for size, curve in curves.items()
    }
    rows = [[size, f"{curves[size][-1]:.6f}", f"{max(found):.1e}"] for size, found in differences.items()]
    header = ["ranks", f"loss at step {config.steps}", f"largest relative difference from {config.np[0]}"]
    worst = max(max(found) for found in differences.values())
    return publish(
        "loss_curves",
        f"One global batch on {', '.join(map(str, config.np))} ranks",
        ABOUT,
        config,
        folder="proofs",
        missed=worst > LIMIT,
        sheets=[Sheet(title="", header=header, rows=rows)],
        pictures=[
            Picture(
                name="loss_curves",
                x_label="step (128 examples over all ranks)",
                y_label="loss",
                curves={f"{size} rank{'s' if size > 1 else ''}": points(curve) for size, curve in curves.items()},
            )
        ],
        notes=[f"largest difference allowed {LIMIT:.0e}: {'met' if worst <= LIMIT else 'MISSED'}"],
    )


def points(curve: list[float]) -> list[tuple[float, float]]:
    """Return (step, loss)."""
    return [(float(step), loss) for step, loss in enumerate(curve, start=1)]


def losses(size: int, steps: int) -> list[float]:
    """Return the loss over the global batch at each step, read from the chief's TensorBoard file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, str(paths.ROOT / "models" / "train.py"), "cifar10", "--steps", str(steps)]
        options = ["--learning-rate", "0.02", "--warmup-steps", "0", "--log-every", "1", "--logdir", folder]
        command = [str(BIN / "mpirun"), "-np", str(size), *script, *options]
        launch([command], env=environment(threads=None), timeout=900)
        events = EventAccumulator(f"{folder}/summaries", size_guidance={"scalars": 0})
        events.Reload()
        return [event.value for event in events.Scalars("loss")]


if __name__ == "__main__":
    sys.exit(main())
