"""Compare the predictions of `hvdkit plan --measured` with measurements, and with published figures.

python benchmarks/scaling.py          # half an hour; needs root, iproute2, openssh-server
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from figures import Picture, Sheet
from harness import Output, publish
from network import RATES, ROOT, Host, Hosts, limit, on_hosts
from processes import BIN, environment, launch

from hvdkit.commands.measure.cost import CYCLE_SECONDS, Link, doublings, fit_link, predict_scaling, step_cost
from hvdkit.commands.measure.measurements import Gradient, Measurements

LIMIT = 0.15
BUCKET_BYTES = 32 * 1024 * 1024  # hvdkit's default between hosts
CORES = 2  # shared by all hosts of this machine; each rank has one compute thread
SIZES = (1, 2, 3, 4)
MANY = doublings(8, 4096)
ABOUT = """Hosts in network namespaces of one machine, with links limited by `tc tbf`; one rank per host with one
compute thread. In every round, `hvdkit tune` measures the model and the links on two hosts, the steps on 1 to 4 hosts
are predicted from these measurements, and then the steps are measured. The error is the median of predicted / measured.
Unlike real hosts, these hosts share two cores. The prediction takes that into account: a step waits for the core with
the most ranks."""
SLOW_STEP = 1.0  # seconds; longer steps are timed fewer times
# Images per second of one P100 (tensorflow.org/performance/benchmarks, 2017; ResNet-101: Horovod's own
# figure for 16 GPUs, divided by 16), batches of 64; millions of weights; millions of them in the fully connected
# layers at the end, whose gradients come first; and the efficiency in Horovod's paper for 512 GPUs, 4 per server
# with one RoCE link of 25 Gbit/s.
PUBLISHED = {
    "Inception V3": (142.0, 23.9, 2.0, 0.90),
    "ResNet-101": (104.0, 44.7, 2.0, 0.90),
    "VGG-16": (154.0, 138.4, 123.6, 0.68),
}
PAPER = Link(latency=20e-6, byte=8 / 25e9, copy=1 / 100e9, wakeup=2.5e-3)


@dataclass(frozen=True, kw_only=True)
class Config(Output):
    """Compare predicted steps with measured ones."""

    models: tuple[str, ...] = ("cifar10", "resnet50")
    """Built-in models to measure on 1 to 4 hosts."""
    only_predicted: tuple[str, ...] = ("vgg16", "recommender")
    """Built-in models to measure on two hosts only, for the prediction."""
    rates: tuple[str, ...] = tuple(RATES)
    """Bandwidths of every host's link."""
    rounds: int = 4
    """Number of predictions and measurements per model and number of hosts, alternating; the median counts. Half as
    many except for the CIFAR-10 network, which has short steps."""
    steps: int = 30
    """Number of steps in each."""


def inside(host: Host, *words: object) -> list[str]:
    """Return a command that runs in this environment on a host."""
    return [*host.enter, str(BIN / words[0]), *map(str, words[1:])]


def tuned(hosts: Sequence[Host], model: str, folder: Path) -> Measurements:
    """Measure a model on two hosts."""
    file = folder / f"{model}.json"
    listed = ",".join(f"{host.address}:1" for host in hosts[:2])
    quick = ("--no-bucket", "--no-cycle", "--no-autotune", "--warm-up", 3, "--rounds", 2, "--steps", 8)
    env = environment(PYTHONPATH=str(ROOT))
    tune = inside(hosts[0], "hvdkit", "tune", "-H", listed, "--model", model, "--save", file, *quick)
    launch([tune], env=env, timeout=900)
    return Measurements.load(file)


def timed(hosts: Sequence[Host], model: str, size: int, folder: Path, steps: int) -> float:
    """Return the median seconds of a step on ``size`` hosts."""
    listed = ",".join(f"{host.address}:1" for host in hosts[:size])
    file = folder / "bench.json"
    options = ("--model", model, "--steps", steps, "--warm-up", 3, "--no-scaling", "--json", file)
    bench = inside(hosts[0], "hvdkit", "bench", "-H", listed, *options)
    launch([bench], env=environment(PYTHONPATH=str(ROOT)), timeout=900)
    return float(json.loads(file.read_text())["runs"][0]["ms_per_step"]) / 1000


def predicted(measured: Measurements, size: int) -> float:
    """Return the predicted seconds of a step on ``size`` hosts that share this machine's cores."""
    link = fit_link(measured.exchanges, measured.copy, CYCLE_SECONDS)
    slowdown = math.ceil(size / CORES) * max(1.0, measured.compute_together / measured.compute_alone)
    return step_cost(measured, size, link, slowdown=slowdown if size > 1 else 1.0, bucket_bytes=BUCKET_BYTES).total


def compare(hosts: Sequence[Host], model: str, rate: str, config: Config) -> tuple[Measurements, list[list[object]]]:
    """Return the last measurement of a model, and a row for each number of hosts with predicted and measured steps."""
    expected: dict[int, list[float]] = {size: [] for size in SIZES}
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(config.rounds if model == "cifar10" else (config.rounds + 1) // 2):
            measured = tuned(hosts, model, Path(name))
            for size in SIZES:
                expected[size].append(predicted(measured, size))
                steps = config.steps if expected[size][-1] < SLOW_STEP else max(3, config.steps // 6)
                found[size].append(timed(hosts, model, size, Path(name), steps))
    rows: list[list[object]] = []
    for size in SIZES:
        ratios = [guess / real for guess, real in zip(expected[size], found[size], strict=True)]
        error = f"{100 * (statistics.median(ratios) - 1):+.0f} %"
        rows.append([model, RATES.get(rate, rate), size, _spread(found[size]), _spread(expected[size]), error])
        print(*rows[-1], file=sys.stderr, flush=True)
    return measured, rows


def _spread(seconds: Sequence[float]) -> str:
    """Return median, minimum and maximum in milliseconds."""
    return f"{1e3 * statistics.median(seconds):.0f} ({1e3 * min(seconds):.0f}-{1e3 * max(seconds):.0f})"


def measure(hosts: Hosts, config: Config) -> tuple[dict[str, Measurements], list[list[object]]]:
    """Return each model's measurement on two hosts with links of the first rate, and the rows of all rates."""
    every: dict[str, Measurements] = {}
    rows: list[list[object]] = []
    for rate in config.rates:
        limit(hosts, rate)
        for model in config.models:
            measured, more = compare(list(hosts), model, rate, config)
            every.setdefault(model, measured)
            rows += more
        if rate == config.rates[0]:
            with tempfile.TemporaryDirectory() as name:
                every |= {model: tuned(list(hosts), model, Path(name)) for model in config.only_predicted}
    return every, rows


def extrapolated(every: dict[str, Measurements]) -> tuple[Sheet, Picture]:
    """Return the predicted efficiency of all models on many ranks, by link."""
    rows: list[list[object]] = []
    curves: dict[str, list[list[float]]] = {}
    for model, measured in every.items():
        for bandwidth in (1e9, 25e9):
            made = predict_scaling(measured, MANY, bandwidth=bandwidth)
            rows.append([model, f"{bandwidth / 1e9:.0f} Gbit/s", *(f"{100 * made.efficiency(n):.0f} %" for n in MANY)])
            curves[f"{model}, {bandwidth / 1e9:.0f} Gbit/s"] = [[n, made.efficiency(n)] for n in MANY]
    header = ["model", "link", *map(str, MANY)]
    title = "Predicted efficiency by number of ranks, each with one core of this machine and its own link"
    return Sheet(title=title, header=header, rows=rows), Picture(
        name="scaling", x_label="ranks", y_label="predicted efficiency", curves=curves, doubling=True
    )


def published() -> Sheet:
    """Return the prediction for 512 GPUs of 2017 and the figures of Horovod's paper."""
    rows: list[list[object]] = []
    for name, (speed, weights, late, efficiency) in PUBLISHED.items():
        # Convolutions: 40 gradients of equal size, computed one after the other; fully connected layers: all at once.
        early = [Gradient(int(4e6 * (weights - late) / 40), 1 - i / 60) for i in range(40)]
        gradients = (*early, Gradient(int(4e6 * late), 0.35))
        compute = 64 / speed
        measured = Measurements(
            model=name, batch=64, ranks=1, local_ranks=4, compute_alone=compute, compute_together=compute,
            spread=0.01 * compute, gradients=gradients, copy=0.0, exchanges=(),
        )  # fmt: skip
        found = step_cost(measured, 512, PAPER, bucket_bytes=64 * 1024 * 1024)
        megabytes = f"{measured.gradient_bytes / 1e6:.0f} MB"
        rows.append([name, megabytes, f"{100 * compute / found.total:.0f} %", f"{100 * efficiency:.0f} %"])
    header = ["model", "gradients", "predicted", "published"]
    title = "512 P100 GPUs, 4 per server with one link of 25 Gbit/s, messages of 64 MB (Horovod's default)"
    return Sheet(title=title, header=header, rows=rows)


def main() -> int:
    """Compare predictions with measurements, and record both."""
    config = tyro.cli(Config, description=__doc__)
    return on_hosts("scaling", len(SIZES), lambda hosts: report(*measure(hosts, config), config))


def report(every: dict[str, Measurements], rows: list[list[object]], config: Config) -> int:
    """Record the measurements; return MISSED if a prediction is off by more than the limit."""
    sheet, picture = extrapolated(every)
    worst = max(abs(float(str(row[-1]).split()[0])) for row in rows) / 100
    header = ["model", "link", "hosts", "measured ms", "predicted ms", "error"]
    return publish(
        "scaling",
        "Predicted and measured scaling",
        ABOUT,
        config,
        missed=worst > LIMIT,
        sheets=[Sheet(title="Predicted and measured steps", header=header, rows=rows), sheet, published()],
        pictures=[picture],
        notes=[
            f"largest error {100 * worst:.0f} %, goal ≤ {100 * LIMIT:.0f} %: {'met' if worst <= LIMIT else 'MISSED'}"
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
