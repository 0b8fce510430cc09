"""Train the CIFAR-10 network with one global batch size on 1, 2 and 4 ranks, and compare the losses step by step.

    python benchmarks/loss_curves.py --plot docs/loss_curves.png

The ranks see the same examples in the same order, distorted alike, so the curves differ by rounding alone: sums are
taken in another order. A high learning rate would make training itself chaotic and blow any rounding up, so the
rate is a fifth of the tutorial's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 2e-4


def main() -> int:
    """Run every world size and print the largest difference of each from one rank; exit 1 beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps to train (default: 100)")
    parser.add_argument("--np", type=int, nargs="+", default=[1, 2, 4], help="world sizes (default: 1 2 4)")
    parser.add_argument("--plot", type=Path, help="also draw the curves into this PNG file")
    args = parser.parse_args()
    curves = {size: losses(size, args.steps) for size in args.np}
    first = curves[args.np[0]]
    print(f"step 1: loss {first[0]:.6f}; step {len(first)}: loss {first[-1]:.6f}")
    worst = 0.0
    for size, curve in curves.items():
        relative = [abs(ours - theirs) / theirs for ours, theirs in zip(curve, first, strict=True)]
        worst = max(worst, *relative)
        print(
            f"np={size}: largest relative difference from np={args.np[0]} is {max(relative):.1e} in {len(curve)} steps"
        )
    if args.plot:
        draw(curves, args.plot)
    return int(worst > LIMIT)


def losses(size: int, steps: int) -> list[float]:
    """Return the loss over the global batch at each step, read from the chief's TensorBoard file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    bin_folder = Path(sys.executable).parent
    env = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, str(ROOT / "models" / "train.py"), "cifar10", "--steps", str(steps)]
        options = ["--learning-rate", "0.02", "--warmup-steps", "0", "--log-every", "1", "--logdir", folder]
        command = [str(bin_folder / "mpirun"), "-np", str(size), *script, *options]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=900)
        events = EventAccumulator(f"{folder}/summaries", size_guidance={"scalars": 0})
        events.Reload()
        return [event.value for event in events.Scalars("loss")]


def draw(curves: dict[int, list[float]], file: Path) -> None:
    """Draw the curves above their differences."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 6))
    first = next(iter(curves.values()))
    for size, curve in curves.items():
        above.plot(range(1, len(curve) + 1), curve, label=f"{size} ranks", linewidth=4 / size**0.5)
        difference = [abs(ours - theirs) / theirs for ours, theirs in zip(curve, first, strict=True)]
        below.semilogy(range(1, len(curve) + 1), [max(d, 1e-9) for d in difference])
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel("relative difference from the first")
    below.set_xlabel("step (128 examples over all ranks)")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
