"""The options of ``hvdkit bench`` and ``hvdkit tune``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from hvdkit.commands.measure.measurements import MeasureRequest
from hvdkit.commands.measure.workloads import BATCHES, USUAL_OPTIMIZERS, ModelName, OptimizerName
from hvdkit.commands.options import UNSET, check_minimum, check_output
from hvdkit.commands.run.config import EngineKind, RunConfig
from hvdkit.errors import describe
from hvdkit.profiling.settings import FIRST, LAST, ProfileSettings

DEFAULT_RANKS = 2
_STEPS = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """The ranks to start, as for ``hvdkit run``, and the workload that they run."""

    np: Annotated[int | None, arg(aliases=["-np"], help_behavior_hint="")] = None
    """Ranks to start; by default 2, or as many as the hosts of -H have slots."""
    hosts: Annotated[str | None, arg(aliases=["-H"], help_behavior_hint="")] = None
    """Hosts and their slots, e.g. node1:4,node2:4; a host without a number has one slot."""
    engine: EngineKind = "auto"
    """Launcher of the ranks, as for hvdkit run."""
    interface: Annotated[str | None, UNSET] = None
    """Network interface between hosts, as for hvdkit run."""
    ssh_args: str = ""
    """Arguments for ssh, as for hvdkit run."""

    model: ModelName = "cifar10"
    """Model to train: mlp (100 MB of gradients), cifar10 (the CIFAR-10 tutorial's network), resnet50 and vgg16 (on
    32x32 images), or recommender (26 sharded tables)."""
    batch: Annotated[int | None, UNSET] = None
    """Examples per step on each rank; the default depends on the model."""
    steps: int = 30
    """Steps to time, after the warm-up."""
    warm_up: int = 10
    """Warm-up steps."""
    rounds: int = 1
    """Number of repetitions; the medians over all rounds are reported, to reduce the effect of other load."""
    optimizer: Annotated[OptimizerName | None, UNSET] = None
    """Optimizer; the default depends on the model."""

    def __post_init__(self) -> None:
        self.run_config()  # validates the options of hvdkit run
        check_minimum(self, {"batch": 1, "steps": 1, "warm_up": 1, "rounds": 1})

    @property
    def batch_size(self) -> int:
        """Examples per step on each rank."""
        return BATCHES[self.model] if self.batch is None else self.batch

    @property
    def optimizer_name(self) -> str:
        """The name of the optimizer."""
        return self.optimizer or USUAL_OPTIMIZERS[self.model]

    @property
    def request(self) -> MeasureRequest:
        """The request to each rank, which measures nothing yet."""
        return MeasureRequest(
            model=self.model,
            batch=self.batch_size,
            optimizer=self.optimizer_name,
            steps=self.steps,
            warm_up=self.warm_up,
            rounds=self.rounds,
        )

    def run_config(self, np: int | None = None) -> RunConfig:
        """Return the ``hvdkit run`` options to start the ranks, or ``np`` ranks."""
        np = self.np if np is None else np
        return RunConfig(
            np=DEFAULT_RANKS if np is None and self.hosts is None else np,
            hosts=self.hosts,
            engine=self.engine,
            interface=self.interface,
            ssh_args=self.ssh_args,
        )


@dataclass(frozen=True, kw_only=True)
class Bench(MeasureOptions):
    """Time a training step on multiple ranks, and show where its time goes.

    Without a program, a built-in model is trained on random data; with a program, its steps are profiled.

    For example:
        hvdkit bench -np 2 --model cifar10
        hvdkit bench -np 2 --model cifar10 --profile runs/profile
        hvdkit bench --profile runs/profile -np 2 -- python train.py

    See `hvdkit docs profiling`.
    """

    scaling: bool = True
    """Also time a single rank, with the same number of threads."""
    profile: Annotated[Path | None, UNSET] = None
    """Profile some steps, and write the trace of all ranks into this folder."""
    profile_steps: Annotated[str | None, UNSET] = None
    """Steps of a program to profile, FIRST-LAST counted from 1; by default 10-20."""
    timeline: bool = False
    """Add Horovod's own timeline to the profile: the phases of each tensor on rank 0. This slows down rank 0."""
    json: Annotated[Path | None, UNSET] = None
    """Also write the results into this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile is None and (self.timeline or self.profile_steps is not None):
            flag = "--timeline" if self.timeline else "--profile-steps"
            raise ValueError(describe("--profile", "none", f"a folder, for {flag}", "pass --profile FOLDER"))
        if self.profile is not None:
            self.profile_settings(self.profile)

    def profile_settings(self, folder: Path) -> ProfileSettings:
        """Return the settings to profile a program."""
        steps = f"{FIRST}-{LAST}" if self.profile_steps is None else self.profile_steps
        match = _STEPS.fullmatch(steps)
        if match is None:
            raise ValueError(describe("--profile-steps", steps, "FIRST-LAST", "write e.g. 50-60"))
        return ProfileSettings(folder, int(match[1]), int(match[2]), self.timeline)


@dataclass(frozen=True, kw_only=True)
class Tune(MeasureOptions):
    """Find the best settings for a model on this cluster, and save them with the measurements.

    For example:
        hvdkit tune -np 2 --model cifar10 --save cifar10.json
        HVDKIT_TUNED=cifar10.json horovodrun -np 2 python train.py
        hvdkit plan --measured cifar10.json --ranks 8..4096

    See `hvdkit docs tuning`.
    """

    save: Path
    """Output file for the measurements (JSON)."""
    model: ModelName = "cifar10"
    """The built-in model most similar to yours; see hvdkit bench --help."""
    steps: int = 10
    """Steps per measurement."""
    rounds: int = 3
    """Measurements per setting; settings alternate."""
    warm_up: int = 5
    """Warm-up steps."""
    bucket: bool = True
    """Try other bucket sizes for gradients."""
    cycle: bool = True
    """Try other values of HOROVOD_CYCLE_TIME, each in a separate job."""
    autotune: bool = True
    """Try Horovod's own search for settings (250 steps)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("--save", self.save)
