"""``hvdkit check``: run the first steps of a program on one rank and on several, and compare them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from hvdkit.commands.options import check_minimum
from hvdkit.commands.run import restarts
from hvdkit.commands.run.config import EngineKind, RunConfig
from hvdkit.commands.run.job import prepare
from hvdkit.commands.run.output import OutputWriter
from hvdkit.errors import HvdkitError, counted, describe
from hvdkit.keras.checking.step_comparison import compare_recordings
from hvdkit.keras.checking.step_records import RECORD_VARIABLE, Recording

_PROGRAM = "hvdkit.commands.check.program"


@dataclass(frozen=True, kw_only=True)
class CheckSteps:
    """Compare the first training steps of a program on one rank with those on several ranks.

    The program is a Python script that calls hk.fit. It runs twice, until the last step of its first hk.fit, with the
    same seed, weights and global batches, and without the dropout of Keras's layers. Callbacks that write files, and
    logdir=, are left out. The losses, metrics, gradients and variables are printed, the likely cause of a difference,
    and its remedy. Exit code: 0 if nothing is different, 1 if something is; that of the program if it fails.

    For example:
        hvdkit check -np 2 train.py
        hvdkit check -np 4 --steps 5 -- python train.py --batch 64

    See `hvdkit docs keras`.
    """

    np: Annotated[int, arg(aliases=["-np"])] = 2
    """Number of ranks to compare with one; on this machine."""
    steps: int = 3
    """Number of steps."""
    engine: EngineKind = "auto"
    """Launcher of the ranks, as for hvdkit run."""

    def __post_init__(self) -> None:
        if self.np < 2:
            raise ValueError(describe("-np", self.np, "at least 2", "pass the number of ranks of your job, or 2"))
        check_minimum(self, {"steps": 1})
        self.run_config(self.np)

    def run_config(self, np: int) -> RunConfig:
        """Return the options to start ``np`` ranks."""
        return RunConfig(np=np, engine=self.engine)


def check(config: CheckSteps, program: Sequence[str]) -> int:
    """Run the program twice, and print the comparison. Return the exit code.

    Raises:
        ValueError: an option or the program is invalid; nothing has been started.
        ClusterError: an engine is missing.
        HvdkitError: the program has ended without a step of ``hk.fit``.
    """
    script = _script(program)
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-check-"))
    try:
        one = folder / "one.npz"
        many = folder / "many.npz"
        code = _record(config, 1, script, f"{config.steps}:{one}")
        code = code or _record(config, config.np, script, f"{config.steps}:{many}:{one}")
        if code:
            return code
        result = compare_recordings(Recording.load(one), Recording.load(many))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(result)
    return 0 if result.is_equal else 1


def _script(program: Sequence[str]) -> list[str]:
    """Return the script with its arguments: ``train.py --lr 1`` or ``python train.py --lr 1``.

    Example:
        >>> _script(["python", "/dev/null", "--lr", "1"])
        ['/dev/null', '--lr', '1']
    """
    words = list(program)
    if words and Path(words[0]).name.startswith("python") and not words[0].endswith(".py"):
        words = words[1:]
    remedy = "write: hvdkit check -np 2 train.py"
    if not words or words[0].startswith("-"):
        raise ValueError(describe("program", " ".join(program) or "none", "a Python script", remedy))
    if not Path(words[0]).exists():
        got = f"{words[0]} (no such file in {Path.cwd()})"
        raise ValueError(describe("program", got, "a Python script", remedy))
    return words


def _record(config: CheckSteps, ranks: int, script: Sequence[str], request: str) -> int:
    """Run the script on some ranks, which write a recording; return the exit code."""
    print(f"hvdkit check: {script[0]} on {counted(ranks, 'rank')}", file=sys.stderr, flush=True)
    program = [sys.executable, "-m", _PROGRAM, *script]
    job = prepare(config.run_config(ranks), program, {RECORD_VARIABLE: request})
    code = restarts.run(job, program, OutputWriter({1: sys.stdout.buffer, 2: sys.stderr.buffer})).code
    if code:
        print(
            f"hvdkit check: {script[0]} failed on {counted(ranks, 'rank')} with exit code {code}",
            file=sys.stderr,
            flush=True,
        )
    elif not Path(request.split(":")[1]).exists():
        got = f"{script[0]}, which has ended on {counted(ranks, 'rank')} without a step of hk.fit"
        raise HvdkitError(
            describe("program", got, "a script that calls hk.fit", "train with hk.fit, or use hk.check_step")
        )
    return code
