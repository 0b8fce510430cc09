"""Run several variants of the same workload in interleaved rounds, and record the results.

A script defines what to compare, and :func:`main` does the rest:

    VARIANTS = [Variant(name="hvdkit", title="hvdkit", run=one_run), Variant(name="peer", title="a peer", run=another)]
    CASE = Case(name="two", title="on two ranks", variants=VARIANTS, metrics=[Metric(name="ms", title="ms/step")],
                goals=[Goal(upper="peer", lower="hvdkit", relation=">=", limit=1.5)], reference="hvdkit")
    main(Benchmark(name="mine", title="My work", about="What it is.", cases=lambda config: [CASE]))

Every round runs each variant once in fresh processes, in random order. If a variant fails, the others still run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import random
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import page
import tyro
from figures import Goal, Measured, Metric, Record, Round
from processes import RunFailed, Unavailable
from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
MISSED = 3  # exit code if a goal is missed or a variant failed, as opposed to an error in the benchmark
# Options with paths on this machine, which do not change what is measured.
ELSEWHERE = ("--json", "--peer-python", "--data-dir")
GIVE_UP = 2  # a variant that has failed this often is not run again
PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}  # independent of the terminal's width

Results = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant of the workload.

    Attributes:
        name: used in goals and ``--only``.
        title: used in tables.
        run: does the work once in the given empty folder, and returns figures by metric; raises ``RunFailed``
            or ``Unavailable``. None if the case's ``together`` measures it.
    """

    name: str
    title: str
    run: Callable[[Path], Results] | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """Variants of the same workload, to be compared; see :class:`figures.Measured` for the other fields.

    Attributes:
        rounds: number of rounds, instead of the command line's.
        together: runs one job that measures all variants, and returns each round's results by variant.
    """

    name: str
    title: str
    variants: Sequence[Variant]
    metrics: Sequence[Metric]
    goals: Sequence[Goal] = ()
    reference: str | None = None
    rounds: int | None = None
    together: Callable[[Path], Sequence[Mapping[str, Results]]] | None = None


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go."""

    json: Path | None = None
    """Write the results here. Default: results/NAME.json next to the script, from which docs/benchmarks.md is made."""


@dataclass(frozen=True, kw_only=True)
class Config(Output):
    """Measure, print the tables and record them."""

    rounds: int = 5
    """Number of rounds; every variant runs once per round."""
    only: tuple[str, ...] = ()
    """Run only these variants; results are only recorded with --json."""
    quick: bool = False
    """Run one short round to check that every variant works; results are only recorded with --json."""
    seed: int = 0
    """Seed of the order of variants in each round."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The measurements of a script.

    Attributes:
        name: name of the script and of its results file.
        about: a paragraph for the report that describes the work and what all variants have in common.
        cases: returns the cases to run, given the command line's config.
        config: class of that config.
    """

    name: str
    title: str
    about: str
    cases: Callable[[Any], Sequence[Case]]
    config: type[Config] = Config


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, print them, write the results; return MISSED if a goal is missed or a variant failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    config = tyro.cli(benchmark.config, prog=f"{benchmark.name}.py", description=benchmark.about, args=given)
    known = {variant.name for case in benchmark.cases(config) for variant in case.variants}
    if unknown := set(config.only) - known:
        sys.exit(f"--only: got {', '.join(sorted(unknown))}, expected some of {', '.join(sorted(known))}")
    try:
        with _interruptible():
            measured = [measure(case, config) for case in benchmark.cases(config)]
    except KeyboardInterrupt:
        print("interrupted; nothing is recorded", file=sys.stderr)
        return 130
    return publish(benchmark.name, benchmark.title, benchmark.about, config, given, measured=measured)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, which ends running processes, and enable Ctrl-C, which background jobs ignore."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def measure(case: Case, config: Config) -> Measured:
    """Run all rounds of a case."""
    variants = {variant.name: variant for variant in case.variants if not config.only or variant.name in config.only}
    count = 1 if config.quick else case.rounds or config.rounds
    unavailable: dict[str, str] = {}
    rounds = _together(case) if case.together else list(_rounds(case, variants, count, config.seed, unavailable))
    return Measured(
        name=case.name,
        title=case.title,
        metrics=case.metrics,
        variants={variant.name: variant.title for variant in variants.values()},
        goals=[goal for goal in case.goals if {goal.upper, goal.lower or goal.upper} <= set(variants)],
        reference=case.reference,
        rounds=rounds,
        unavailable=unavailable,
    )


def _together(case: Case) -> list[Round]:
    """Run the single job that measures all variants."""
    assert case.together is not None
    load = machine.load_average()
    try:
        with _any_failure(), tempfile.TemporaryDirectory() as folder:
            return [Round(results=results, load=load) for results in case.together(Path(folder))]
    except RunFailed as why:
        print(f"{case.name} failed: {why}\n{why.tail}", file=sys.stderr)
        return [Round(results={}, failed={variant.name: str(why) for variant in case.variants}, load=load)]


def _run(variant: Variant, metric: str) -> Results:
    """Run a variant once; raise RunFailed or Unavailable if it gives no figure."""
    assert variant.run is not None, f"{variant.name}: neither the variant's run nor the case's together is set"
    with _any_failure(), tempfile.TemporaryDirectory() as folder:
        results = dict(variant.run(Path(folder)))
        if metric not in results:
            raise RunFailed(f"it gave {', '.join(results) or 'nothing'}, expected {metric}")
        return results


@contextlib.contextmanager
def _any_failure() -> Iterator[None]:
    """Turn any exception in a variant's own code into its failure, so that the other variants still run."""
    try:
        yield
    except (RunFailed, Unavailable):
        raise
    except Exception as error:
        raise RunFailed(f"{type(error).__name__}: {error}", traceback.format_exc()) from error


def _rounds(
    case: Case, variants: Mapping[str, Variant], count: int, seed: int, unavailable: dict[str, str]
) -> Iterator[Round]:
    """Run the rounds, each in its own random order; add variants that cannot be run to ``unavailable``."""
    failures = dict.fromkeys(variants, 0)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal, refresh_per_second=1) as bar:
        task = bar.add_task(case.name, total=count * len(variants))
        for number in range(count):
            order = [name for name in variants if name not in unavailable and failures[name] < GIVE_UP]
            random.Random(f"{seed} {number}").shuffle(order)
            started, load = time.perf_counter(), machine.load_average()
            results: dict[str, Results] = {}
            failed: dict[str, str] = {}
            for name in order:
                bar.update(task, description=f"{case.name}: {name}")
                try:
                    results[name] = _run(variants[name], case.metrics[0].name)
                except Unavailable as why:
                    unavailable[name] = str(why)
                    console.print(f"{case.name}: {name} is not available: {why}", **PLAIN)
                except RunFailed as why:
                    failed[name] = str(why)
                    failures[name] += 1
                    console.print(f"{case.name}: {name} failed: {why}\n{why.tail}", **PLAIN)
                bar.advance(task)
            first = case.metrics[0]
            shown = ", ".join(
                f"{n} {page.number(results[n][first.name], first.digits)}" for n in variants if n in results
            )
            seconds = time.perf_counter() - started
            line = f"{case.name}: round {number + 1}/{count} ({seconds:.0f} s): {shown} [{first.title}]"
            console.print(line, **PLAIN)
            yield Round(results=results, failed=failed, order=order, load=load)


def publish(
    name: str,
    title: str,
    about: str,
    config: Any,
    given: Sequence[str] | None = None,
    *,
    folder: str = "benchmarks",
    missed: bool = False,
    measured: Sequence[Measured] = (),
    **parts: Any,
) -> int:
    """Print the results with the command, the date and the environment, and write them to a file.

    Args:
        name: name of the script and of its results file.
        title: heading of the report's section.
        about: a paragraph for the report.
        config: an :class:`Output`; with ``quick`` or ``only``, results are only written to its ``json``.
        given: the command line's arguments; by default this process's.
        folder: folder of the script.
        missed: True if a goal that is not part of the cases is missed.
        measured: the cases.
        **parts: sheets, pictures and notes of the :class:`figures.Record`.

    Returns:
        MISSED if a goal is missed or a variant failed, otherwise 0.
    """
    words = list(sys.argv[1:] if given is None else given)
    for option in ELSEWHERE:  # specific to this machine
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    settings = {
        field.name: value if isinstance(value := getattr(config, field.name), (int, float, str)) else repr(value)
        for field in dataclasses.fields(config)
        if field.name not in ("json", "only", "quick", "peer_python", "data_dir")
    }
    record = Record(
        name=name,
        title=title,
        about=" ".join(about.split()),
        command=shlex.join(["python", f"{folder}/{name}.py", *words]),
        recorded=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        environment=machine.environment(),
        settings=settings,
        measured=measured,
        **parts,
    )
    print(page.section(record))
    partial = getattr(config, "quick", False) or getattr(config, "only", ())
    target = config.json or (None if partial else ROOT / folder / "results" / f"{name}.json")
    if target is not None:
        record.write(target)
        print(f"results: {target}", file=sys.stderr)
    missed = missed or not all(verdict.met for m in measured for verdict in m.verdicts())
    return MISSED if missed or any(r.failed for m in measured for r in m.rounds) else 0
