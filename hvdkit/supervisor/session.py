"""The Supervisor: start or resume, save, write summaries and stop consistently on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy.typing as npt

from hvdkit import cluster
from hvdkit.checkpoint.files import RunPath, run_path
from hvdkit.checkpoint.rank_checks import agreed_state, run_on_chief
from hvdkit.checkpoint.state import flatten
from hvdkit.cluster.progress import progress, spending
from hvdkit.data.position import ArrayPosition, DataPosition
from hvdkit.errors import CheckpointError, HvdkitError, describe
from hvdkit.layers import average_moving_statistics, synchronize_batch_normalization
from hvdkit.optimizer.equal_ranks import note_equal
from hvdkit.optimizer.mixin import ranks_of
from hvdkit.sharding.shards import AnyVariable
from hvdkit.supervisor import saved_state
from hvdkit.supervisor.agreements import Agreements, agree_on_arguments, means_over_ranks
from hvdkit.supervisor.divergence import DivergenceDetector, replicated
from hvdkit.supervisor.lock import lock_of
from hvdkit.supervisor.lockstep import lockstep
from hvdkit.supervisor.pace import crosses
from hvdkit.supervisor.reports import RunStart, RunSummary, report_start
from hvdkit.supervisor.saver import Saver
from hvdkit.supervisor.signals import PREEMPTED
from hvdkit.supervisor.start import restore_or_initialize
from hvdkit.supervisor.summaries import Summaries, open_summaries
from hvdkit.watchdog.reporter import reporter

# Sessions of fits. After an error, hk.fit closes its session; that of a plain fit is closed when the next one begins.
# No weak references: the signal handlers of a garbage-collected session would stay installed.
_in_fit: set[Supervisor] = set()


class Supervisor:
    """Run a training session over all ranks: the successor of ``tf.train.Supervisor``.

    On entry, all ranks compare their models. Then the newest valid checkpoint in ``logdir`` is restored, regardless of
    the number of ranks that saved it, or all ranks start from the chief's initial values. After a crash, users start
    the same command again and training resumes from the last save, bitwise identically on the same number of ranks.

    Ranks agree on saving and stopping a few times per second, not at every step, and act at the same step. Saves are
    written in the background, one at a time. SIGTERM, SIGINT and SIGUSR1 are requests to stop: the ranks save and end
    with exit code 75.

    Args:
        logdir: the run's folder, shared by all ranks: ``checkpoints/`` and TensorBoard's ``summaries/``. Or the URL of
            one in an object store, e.g. ``s3://bucket/run``.
        model: a built Keras model.
        optimizer: its optimizer; by default the one it was compiled with.
        data: batches for ``batches``; the position of a ``hk.data.GlobalBatches`` is saved and restored.
        variables: additional replicated TensorFlow or Keras variables.
        state: anything else to save, by name, as for ``hk.checkpoint.save``.
        save_model_secs: seconds between saves, by the chief's clock; None to disable.
        save_steps: also save every ``save_steps`` steps.
        max_to_keep: number of newest checkpoints to keep; None keeps all.
        keep_every: also keep checkpoints whose step is a multiple of it.
        summary_steps: steps between writes of the scalars passed to ``step``, averaged over ranks; None to disable.
        check_steps: steps between comparisons of parameters and slots over ranks, in addition to one after the first
            step; None to disable.
        asynchronous: write timed saves in the background.
        gather: for ranks without a shared file system: the chief writes everything, and training waits for saves.
        stop_on_nonfinite: raise NonFiniteError if the loss passed to ``step`` is NaN or infinite, which is checked
            when the ranks agree and before every save, or if a save finds NaN or infinite weights, moving statistics or
            optimizer slots. False: warn and continue. Such a checkpoint is never kept in either case.

    Attributes:
        logdir: as passed.
        global_step: number of steps trained, over all runs.
        restored_from: the checkpoint from which this run resumed, or None.
        preempted: whether all ranks have agreed to stop because of a signal.
        trained: after the session has ended, on the chief: its steps, seconds, newest checkpoint; otherwise None.

    Raises:
        ValueError: ``logdir`` is a URL that cannot be a logdir.
        CheckpointError: on entry: ``logdir`` is in use by another run, not shared, not writable, or belongs to another
            model. From ``step`` and ``save``: a save failed on some rank; the previous checkpoint is unchanged.
        CorruptCheckpointError: on entry: there are checkpoints in ``logdir``, but all are damaged.
        CollectiveMismatchError: ranks have different models or data, or their parameters have diverged.

    Examples:
        >>> import tempfile
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> data = np.ones((24, 4), "float32"), np.ones((24, 1), "float32")
        >>> batches = hk.data.GlobalBatches(data, 12, shuffle_seed=0, epochs=5)
        >>> logdir = hk.broadcast_object(tempfile.mkdtemp())  # one folder for all ranks, e.g. "runs/line"
        >>> with hk.Supervisor(logdir, model=model, data=batches, save_model_secs=60) as sv:
        ...     for x, y in sv.batches(until=6):
        ...         sv.step(loss=model.train_on_batch(x, y))
        >>> sv.global_step, hk.checkpoint.latest(logdir).name
        (6, 'step-000000006')

        The same command continues from the last save:

        >>> with hk.Supervisor(logdir, model=model, data=batches, save_model_secs=60) as sv:
        ...     for x, y in sv.batches():
        ...         sv.step(loss=model.train_on_batch(x, y))
        ...     sv.summary(accuracy=0.75)
        ...     sv.histogram("weights", model.layers[0].kernel)
        ...     sv.image("inputs", np.random.rand(4, 28, 28, 1))
        >>> sv.restored_from.name, sv.global_step, sv.preempted
        ('step-000000006', 10, False)
    """

    def __init__(
        self,
        logdir: str | RunPath,
        *,
        model: keras.Model | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        data: Iterable[object] | DataPosition | ArrayPosition | None = None,
        variables: Iterable[AnyVariable] = (),
        state: Mapping[str, object] | None = None,
        save_model_secs: float | None = 600,
        save_steps: int | None = None,
        max_to_keep: int | None = 5,
        keep_every: int | None = None,
        summary_steps: int | None = 100,
        check_steps: int | None = 1000,
        asynchronous: bool = True,
        gather: bool = False,
        stop_on_nonfinite: bool = True,
    ):
        counts = {"save_steps": save_steps, "max_to_keep": max_to_keep, "keep_every": keep_every}
        intervals = {"summary_steps": summary_steps, "check_steps": check_steps}
        saved_state.check_intervals({**counts, **intervals}, save_model_secs)
        switches = {"asynchronous": asynchronous, "gather": gather, "stop_on_nonfinite": stop_on_nonfinite}
        self._options = {**counts, **intervals, "save_model_secs": save_model_secs, **switches}
        self.logdir = run_path(logdir, "logdir")
        self.restored_from: RunPath | None = None
        self._folder = self.logdir / "checkpoints"
        self._data = data
        self._model = model
        self._optimizer = saved_state.built_optimizer(model, optimizer)
        self._position = saved_state.Position(data)
        self._state = saved_state.state_to_save(model, self._optimizer, variables, state, self._position)
        self._lock = lock_of(self.logdir)
        self._saver = Saver(
            self._folder,
            self._state,
            keep=(max_to_keep, keep_every),
            gather=gather,
            asynchronous=asynchronous,
            permitted=self._check_permitted,
            stop_on_nonfinite=stop_on_nonfinite,
        )
        self._summaries: Summaries | None = None  # on the chief, from the first session on
        self._summary_steps = summary_steps
        self._gather = gather
        self._detector: DivergenceDetector | None = None
        if check_steps:
            self._detector = DivergenceDetector(
                lambda: replicated(model, self._optimizer), every=check_steps, first=True
            )
        self._agreements = Agreements(
            self._saver, self._begin_save, save_steps=save_steps, save_model_secs=save_model_secs
        )
        self._open = False
        self._is_reported_by_fit = False
        self.trained: RunSummary | None = None

    def __enter__(self) -> Supervisor:
        for failed in list(_in_fit):
            with contextlib.suppress(CheckpointError):  # its folder may be gone
                failed.close()
        agree_on_arguments(self._options, self._data)
        agreed_state(self._state())  # before any file is touched
        if self._model is not None:
            synchronize_batch_normalization(self._model, process_set=ranks_of(self._optimizer))
        run_on_chief("the lock of a logdir", self._lock.acquire)
        try:
            rate = saved_state.current_rate(self._optimizer)
            self.restored_from = restore_or_initialize(self._folder, self._state, gather=self._gather)
            self._summaries = open_summaries(self.logdir / "summaries", resume_at=self.global_step)
        except BaseException:
            self._lock.release()
            raise
        note_equal(self._optimizer)
        new_rate = saved_state.current_rate(self._optimizer)
        report_start(self.global_step, self.restored_from, self._folder, rate, new_rate)
        self._start = RunStart(step=self.global_step)
        progress().flight.notes.expect_examples(self._position.examples_per_step)
        self._saver.start(self.restored_from, self.global_step)
        self._agreements.begin()
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            reporter().note_raised(error)
        try:
            if kind is None:
                if not self.preempted:
                    step = self.global_step
                    self._agreements.agree(step, saves=self._saver.step != step, last=True)
                average_moving_statistics(self._model, process_set=ranks_of(self._optimizer))
                if not self.preempted and cluster.is_chief():
                    self.trained = self._start.summary(self._position, self._saver.newest or self._folder, self.logdir)
                    if not self._is_reported_by_fit:
                        self.trained.report()
        finally:
            self.close()
        if kind is None and self.preempted:
            raise SystemExit(PREEMPTED)

    def enter_fit(self, *, reports: bool = True) -> None:
        """Enter the session from a callback of ``fit``. If a plain ``fit`` raises, the next session closes this one.

        Args:
            reports: whether the session reports its end; ``hk.fit`` does so itself.
        """
        self._is_reported_by_fit = not reports
        self.__enter__()
        _in_fit.add(self)

    def end_epoch(self, *, saves: bool, has_changed: bool) -> None:
        """Save at the end of an epoch, unless saves would take more than a tenth of the time. Every rank calls it.

        Args:
            saves: False to save only what has changed.
            has_changed: whether the state may have changed since the last step, after which it may have been saved.
        """
        if self._saver.step == self.global_step:
            if has_changed:
                self.save(wait=False)
        elif saves and not self._saver.busy and run_on_chief("the end of an epoch", self._saver.is_affordable):
            self.save(wait=False)

    def close(self) -> None:
        """End the session on this rank without saving, after an error, when other ranks may not respond."""
        _in_fit.discard(self)
        if self._open:
            self._open = False
            self._agreements.end()
            try:
                self._saver.abandon()
                if self._summaries is not None:
                    self._summaries.close()
            finally:
                self._lock.release()

    @property
    def preempted(self) -> bool:
        """Whether all ranks have agreed to stop because of a signal; the same on all ranks after every step."""
        return self._agreements.preempted_by is not None

    @property
    def global_step(self) -> int:
        """Number of steps trained, over all runs."""
        return self._position.step

    def batches(self, until: int | None = None) -> Iterator[Any]:
        """Yield batches of ``data`` until they end or all ranks have agreed to stop, at the same step on all ranks.

        Args:
            until: also stop when ``global_step`` reaches this number.

        Yields:
            What ``data`` yields: this rank's rows.

        Raises:
            HvdkitError: the Supervisor has no ``data``.
        """
        if self._data is None or isinstance(self._data, DataPosition | ArrayPosition):
            raise HvdkitError(describe("data", self._data, "batches", "pass data= to hk.Supervisor, or loop yourself"))
        source = iter(self._data) if self._position.follows_data else lockstep(self._data)
        while not self._agreements.stopping and (until is None or self.global_step < until):
            try:
                with spending("input"):
                    batch = next(source)
            except StopIteration:
                return
            yield batch

    def step(self, **scalars: npt.ArrayLike) -> None:
        """Record the end of a step. Every rank must call it after every step.

        Args:
            **scalars: numbers or scalar tensors, e.g. ``loss=loss``; only read when needed. Their means over ranks are
                written to the summaries.

        Raises:
            CheckpointError: a save failed on some rank, or another run has taken over ``logdir``.
            CollectiveMismatchError: parameters have diverged between ranks.
            NonFiniteError: ``loss`` or a variable to save is NaN or infinite on some rank.
        """
        self.advance(1, scalars)

    def advance(self, steps: int, scalars: Mapping[str, object], *, prefetched: bool = False) -> None:
        """Record several more steps, whose data may have been prefetched; for callbacks. See ``step``.

        Args:
            steps: number of steps.
            scalars: as for ``step``, of the last of them.
            prefetched: whether ``data`` may be ahead of the steps, as in ``fit``, whose logs may have arrays and text.

        Raises:
            CheckpointError, CollectiveMismatchError, NonFiniteError: as for ``step``.
            SystemExit: the loop continues after all ranks agreed to stop.
        """
        self._require_open()
        if self._agreements.preempted_by is not None:  # the loop did not stop after the ranks agreed to
            raise SystemExit(PREEMPTED)
        before = self._position.step
        self._position.advance(steps, prefetched=prefetched)
        now = self._position.step
        progress().at_step(now)
        if scalars and crosses(self._summary_steps, before, now):
            means = means_over_ranks(scalars, are_logs=prefetched)
            if self._summaries is not None:
                self._summaries.scalars(now, **means)
        if self._detector is not None:
            self._detector.check(now)
        self._agreements.end_step(before, now, scalars.get("loss"))

    def summary(self, **scalars: npt.ArrayLike) -> None:
        """Write the chief's scalars at the current step; other ranks do nothing.

        Args:
            **scalars: numbers or scalar tensors by tag.
        """
        if self._summaries is not None:
            self._summaries.scalars(self.global_step, **scalars)

    def histogram(self, name: str, values: npt.ArrayLike) -> None:
        """Write a histogram of the chief's values at the current step; other ranks do nothing.

        Args:
            name: the tag.
            values: numbers of any shape.
        """
        if self._summaries is not None:
            self._summaries.histogram(self.global_step, name, values)

    def image(self, name: str, images: npt.ArrayLike) -> None:
        """Write the chief's images at the current step; other ranks do nothing.

        Args:
            name: the tag.
            images: ``[n, height, width, channels]``, uint8 or floats 0 to 1.
        """
        if self._summaries is not None:
            self._summaries.image(self.global_step, name, images)

    def save(self, *, wait: bool = True) -> RunPath:
        """Save now, after ``step``. Every rank must call it.

        Args:
            wait: False to write in the background.

        Returns:
            The folder of the checkpoint, which is complete with ``wait``.

        Raises:
            CheckpointError: a rank could not write its part; the previous checkpoint is unchanged.
            NonFiniteError: a variable is NaN or infinite on some rank; the previous checkpoint is unchanged. With
                ``wait``, raised even with ``stop_on_nonfinite=False``, because a complete checkpoint doesn't exist.

        Examples:
            >>> import tempfile
            >>> import tensorflow as tf
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> best = tf.Variable(0.0, name="best")
            >>> logdir = hk.broadcast_object(tempfile.mkdtemp())  # one folder for all ranks
            >>> with hk.Supervisor(logdir, variables=[best], save_model_secs=None) as sv:
            ...     for step in range(5):
            ...         sv.step(loss=0.5)
            ...         if step == 2:
            ...             print(sv.save().name)
            step-000000003
        """
        self._require_open()
        path = self._begin_save()
        if wait or not self._saver.asynchronous:
            self._saver.wait()
            if wait and self._saver.dropped is not None:
                raise self._saver.dropped
        return path

    def request_stop(self) -> None:
        """Request all ranks to stop; any rank may call it. They agree within a second, and ``batches`` ends.

        Examples:
            >>> import tempfile
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> logdir = hk.broadcast_object(tempfile.mkdtemp())  # one folder for all ranks
            >>> batches = hk.data.GlobalBatches(np.arange(64), 64)  # without end
            >>> with hk.Supervisor(logdir, data=batches, save_model_secs=None) as sv:
            ...     for batch in sv.batches():
            ...         sv.step()
            ...         if hk.is_chief() and sv.global_step == 10:
            ...             sv.request_stop()
            >>> sv.global_step >= 10, sv.should_stop()
            (True, True)
        """
        self._agreements.wants_stop = True

    def should_stop(self) -> bool:
        """Return True once all ranks have agreed to stop; the same on all ranks after every step.

        Examples:
            A loop without ``batches``:

            >>> import tempfile
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> logdir = hk.broadcast_object(tempfile.mkdtemp())  # one folder for all ranks
            >>> with hk.Supervisor(logdir, state={"task": "counting"}, save_model_secs=None) as sv:
            ...     while not sv.should_stop():
            ...         sv.step()
            ...         if sv.global_step == 10:
            ...             sv.request_stop()
        """
        return self._agreements.stopping

    def _require_open(self) -> None:
        if not self._open:
            raise HvdkitError("Supervisor: used outside its session; put the loop in `with hk.Supervisor(...) as sv:`")

    def _check_permitted(self) -> None:
        """Before a checkpoint is complete, on the chief: the logdir is still locked, and the summaries are there."""
        self._lock.verify()
        if self._summaries is not None:
            self._summaries.publish()

    def _begin_save(self) -> RunPath:
        if self._summaries is not None:  # a run that resumes from this checkpoint must find the steps before
            self._summaries.flush()
        return self._saver.begin(self.global_step)


def restored_of_ranks(session: Supervisor) -> list[AnyVariable]:
    """Return the variables of which each rank has restored its own value: none if the run has begun here."""
    tensors = [] if session.restored_from is None else flatten(session._state()).tensors.values()
    return [t.variable for t in tensors if t.kind == "per_rank" and t.variable is not None]
