"""The position of training in the data: what is saved and restored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdkit.cluster.logs import get_logger
from hvdkit.data.batch_plan import BatchPlan, DataState
from hvdkit.errors import describe, integer

_REMEDIES = {
    "seed": "pass the same shuffle_seed as before",
    "examples": "pass the data set of the saved run, or start over",
    "batch_size": "pass the same global_batch_size as before, whatever the number of ranks",
    "remainder": "pass the same remainder as before",
    "steps_per_epoch": "pass the data set of the saved run, or start over",
    "shuffle": "pass the same shuffle as before",
    "shuffle_buffer": "pass the same shuffle_buffer as before",
    "interleave": "pass the same interleave as before, whatever the number of ranks",
    "weights": "pass the same weights as before",
    "sources": "pass the sources of the saved run, or start over",
    "files": "pass the files of the saved run, or start over",
    "growth": "pass the same growth as before",
    "file_names": "pass the files of the saved run, or start over",
    "earlier_files": "pass the files of the saved run, or start over",
    "first_epoch": "pass what GlobalBatches.state returned, unchanged",
    "first_step": "pass what GlobalBatches.state returned, unchanged",
    "order_check": "use the NumPy of the saved run: this version shuffles differently",
}


class DataPosition:
    """The next batch of a plan. Datasets for Keras start here, and a Supervisor saves it.

    An iterator advances its position. A dataset does not, because it reads ahead: its position is where training began,
    and ``state_at`` is the state of any later step.

    Attributes:
        plan: The present plan; another one when files are added or restored, or the length of a stream is known.
        epoch: The epoch, from 0.
        step: The step in it, from 0.
        moves: How many times the position was set, other than by reading.
    """

    def __init__(self, plan: BatchPlan):
        self.plan = plan
        self.epoch = 0
        self.step = 0
        self.moves = 0

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches in an epoch; None for a stream of unknown length."""
        return self.plan.steps_per_epoch

    @property
    def state(self) -> DataState:
        """The state to save: a JSON-compatible dict."""
        return self.plan.state_of(self.epoch, self.step)

    def state_at(self, global_step: int) -> DataState:
        """Return the state after ``global_step`` batches since the start of training; see BatchPlan."""
        return self.plan.state_at(global_step, read=self.step)

    def fingerprint(self) -> dict[str, object]:
        """Return a fingerprint of the data and their order, equal on all ranks."""
        return self.plan.fingerprint()

    def restore(self, state: DataState) -> None:
        """Continue from a saved state; that of a run on arrays has no effect.

        Raises TypeError or ValueError for the state of other data or settings; then the position does not change.
        """
        if not isinstance(state, dict):
            raise TypeError(describe("state", state, "what GlobalBatches.state returned", "pass it unchanged"))
        if "array_seed" in state:  # of a run on arrays, see ArrayPosition: its order is another
            return
        plan = self.plan
        if plan.files is not None:
            plan = plan.with_files(plan.files.restored(state))
        _check_state(state, plan.identity)
        if plan.steps_per_epoch is None and (steps := state["steps_per_epoch"]) is not None:  # a stream, read before
            plan = plan.with_length(integer("state['steps_per_epoch']", steps, minimum=1))
        epoch, step = plan.checked_position(state["epoch"], state["step"], "state['epoch']", "state['step']")
        self.plan = plan
        self._set(epoch, step)

    def move_to(self, epoch: int, step: int) -> None:
        """Continue at a step of an epoch that reads the present files."""
        self._set(*self.plan.checked_position(epoch, step))

    def learn_length(self, steps: int | None) -> None:
        """Keep the number of batches of a stream that has been read to the end of an epoch."""
        if steps is not None:
            self.plan = self.plan.with_length(steps)

    def end_epoch(self, steps: int) -> None:
        """Continue with the next epoch, after one of ``steps`` batches."""
        self.plan = self.plan.with_length(steps)
        self.epoch += 1
        self.step = 0

    def add_new_files(self, epoch: int | None) -> list[str]:
        """Read the files that were added from an epoch on, by default the next; return their names. A collective."""
        before = self.plan.files
        if before is None:
            remedy = "pass GlobalBatches(growth='append') or 'replace'"
            raise TypeError(describe("growth", None, "'append' or 'replace'", remedy))
        if self.step == self.plan.steps_per_epoch:
            self.end_epoch(self.step)
        if self.step:
            got = f"step {self.step} of epoch {self.epoch}"
            remedy = "read the epoch to its end"
            raise ValueError(describe("add_new_files", got, "the end of an epoch", remedy))
        epoch = self.epoch if epoch is None else integer("epoch", epoch, minimum=self.epoch)
        min_rows = self.plan.batch_size if self.plan.remainder == "drop" else 1
        files = before.grown(epoch, self.plan.global_step(epoch, 0), min_rows)
        if files is None:
            return []
        self.plan = self.plan.with_files(files)
        self._set(epoch, 0)
        new = [name for name in files.source.names if name not in before.source.names]
        if self.plan.rank_rows.rank == 0:
            get_logger().info("data: epoch %d reads %d new file(s); now %r", epoch, len(new), files.source)
        return new

    def _set(self, epoch: int, step: int) -> None:
        self.epoch = epoch
        self.step = step
        self.moves += 1


def _check_state(state: Mapping[str, object], identity: Mapping[str, object]) -> None:
    """Raise ValueError unless ``state`` is of the data and settings of ``identity``, so that its position is valid."""
    missing = {"epoch", "step", *identity} - set(state)
    if missing:
        raise ValueError(
            describe("state", f"no {sorted(missing)}", "what GlobalBatches.state returned", "pass it unchanged")
        )
    may_be_unknown = {"examples", "steps_per_epoch"}  # for a stream
    for key, expected in identity.items():
        if state[key] != expected and not (key in may_be_unknown and None in (state[key], expected)):
            raise ValueError(describe(f"state[{key!r}]", state[key], f"{expected!r}, as now", _REMEDIES[key]))


class ArrayPosition:
    """The position of training in arrays, which a Supervisor saves and restores.

    Attributes:
        steps_per_epoch: batches in an epoch.
        epoch, step: the first batch of the next pass over the arrays.
        seed: the seed of the epochs' orders; None for Keras's own order.
        repeated: steps of training that an earlier run on other data has repeated.
    """

    def __init__(self, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.epoch = 0
        self.step = 0
        self.seed: int | None = None
        self.repeated = 0

    @property
    def state(self) -> DataState:
        """The state to save."""
        return self.state_at(self.repeated + self.epoch * self.steps_per_epoch + self.step)

    def state_at(self, global_step: int) -> DataState:
        """Return the state to save after ``global_step`` batches since the start of training."""
        epoch, step = divmod(global_step - self.repeated, self.steps_per_epoch)
        return {"epoch": epoch, "step": step, "steps_per_epoch": self.steps_per_epoch, "array_seed": self.seed}

    def restore(self, state: DataState) -> None:
        """Continue from a saved state; the state of other data than arrays has no effect.

        With another batch size, training continues after as many batches as it had trained on.
        """
        if "array_seed" not in state:
            return
        seed = state["array_seed"]
        steps = integer("state['steps_per_epoch']", state.get("steps_per_epoch"), minimum=1)
        epoch = integer("state['epoch']", state.get("epoch"), minimum=0)
        step = integer("state['step']", state.get("step"), minimum=0)
        self.seed = self.seed if seed is None else integer("state['array_seed']", seed, minimum=0)
        self.epoch, self.step = divmod(epoch * steps + step, self.steps_per_epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Read ``epoch`` next: from its start, unless a step within it was restored."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.step = 0

    def permutation(self, rows: np.ndarray) -> np.ndarray:
        """Return row numbers, of the arrays or a batch, in the order of the seed and the epoch."""
        return np.random.default_rng([self.seed or 0, self.epoch, rows[0]]).permutation(rows)
