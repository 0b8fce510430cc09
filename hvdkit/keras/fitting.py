"""``hk.fit``: Keras's ``model.fit`` for the whole job."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import keras
from keras import tree

from hvdkit import cluster
from hvdkit.checkpoint.files import RunPath
from hvdkit.cluster.logs import get_logger
from hvdkit.data import GlobalBatches
from hvdkit.errors import describe
from hvdkit.internals import array_slicing, data_adapter_utils
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.keras.checking.step_recording import StepRecorder
from hvdkit.keras.chief import is_on_chief, mark_on_chief
from hvdkit.keras.compiled_functions import jit_mode
from hvdkit.keras.fit_session import FitSession, check_all_ranks_call, check_model
from hvdkit.keras.global_batch_shares import GlobalBatchShares
from hvdkit.keras.inputs import DataPair, FitData, prepare_data
from hvdkit.keras.keras_callbacks import WRITERS, CallbackList
from hvdkit.keras.loss_scopes import LossScope
from hvdkit.keras.model_optimizers import warn_of_float8, warn_of_repeated_rows
from hvdkit.keras.own_methods import call_own, has_own, is_patched, keras_method, patched_on_chief
from hvdkit.keras.strategies import outside_strategy
from hvdkit.keras.supervisor_callback import SupervisorCallback, closing_sessions
from hvdkit.layers.batch_norm import warn_of_local_statistics
from hvdkit.supervisor.reports import RunSummary
from hvdkit.supervisor.signals import EndNotice
from hvdkit.watchdog.ending import is_interrupt
from hvdkit.watchdog.rank_texts import tag

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Arrays, InputData

# Arguments of hk.fit that must be the same on every rank, besides those that _call_text converts.
_COMPARED = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "validation_steps",
    "validation_batch_size",
    "validation_freq",
    "shuffle",
    "validation_split",
)


@outside_strategy()
@patched_on_chief("fit")
def fit(
    model: keras.Model,
    x: InputData | None = None,
    y: Arrays | None = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str = "auto",
    callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None = None,
    validation_split: float = 0.0,
    validation_data: InputData | None = None,
    shuffle: bool | str = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: Arrays | None = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    logdir: str | RunPath | None = None,
    loss_scope: LossScope = "auto",
) -> keras.callbacks.History:
    """Train a model on all ranks with the results of ``model.fit`` in one process on the same data.

    Users call it on every rank with the same arguments and the whole data set. Each global batch is split by rows: rank
    r of N works on rows ``r * b // N`` to ``(r + 1) * b // N`` of a batch of b rows. All ranks start with the chief's
    weights; every optimizer of the model becomes a ``hk.DistributedOptimizer`` permanently. The returned
    History, the logs passed to callbacks at the end of an epoch, and the weights equal those of one process, up to
    rounding. Afterwards, all ranks may ``model.save`` and load the same file: it is written under a temporary name and
    then renamed.

    Args:
        model: a compiled Keras model.
        x: an array, or arrays in lists, tuples and dicts, a ``tf.data.Dataset`` of global batches, or a
            ``hk.data.GlobalBatches``, whose epochs are those of ``fit``.
        y: the labels, if ``x`` is arrays.
        batch_size: rows per global batch, over all ranks; at least the number of ranks. Default 32, as in Keras.
        epochs: number of the last epoch, as in Keras.
        verbose: as in Keras, but only the chief prints. "auto" is a progress bar in terminals and notebooks, otherwise
            a line per epoch.
        callbacks: Keras callbacks, the same list on every rank. Keras's callbacks that write files run on the chief and
            may be passed on the chief only; all others run on every rank. They may call ``self.model.predict`` and
            other methods of the model, which then run as in plain Keras.
        validation_split: fraction of arrays to hold out for validation, from their end.
        validation_data: ``(x, y)`` or ``(x, y, sample_weight)``, or what ``x`` may be.
        shuffle: False keeps the order of arrays.
        class_weight: weights of the classes in the loss.
        sample_weight: weights of the rows of arrays in the loss.
        initial_epoch: number of the first epoch, from 0.
        steps_per_epoch: global batches per epoch.
        validation_steps: global batches of the validation data to evaluate.
        validation_batch_size: rows per global batch of the validation data. Default ``batch_size``.
        validation_freq: epochs between validations, or a list of epochs after which to validate.
        logdir: a folder that all ranks share, or its URL in an object store, in which the run is saved every ten
            minutes, and at the end of epochs as long as saves take less than a tenth of the time. The next call with
            this folder continues: within the epoch with arrays and ``GlobalBatches``, otherwise the epoch in which the
            run ended begins again. Callbacks continue with their counters and best values.
            ``hk.callbacks.SupervisorCallback`` saves at other times.
        loss_scope: where losses are computed: "rows" on each rank's rows, right for means and sums over rows; "batch"
            by every rank on the gathered labels and predictions of the global batch, right for any loss, e.g. Dice.
            "auto" finds out which losses are means of their rows in the first step, which gathers all that it does not
            know. Metric functions are always tested.

    Returns:
        Keras's ``History``, the same on every rank: the epochs of this call, of which a complete run has none.

    Raises:
        ValueError: ``batch_size`` is less than the number of ranks, ``loss_scope`` is invalid, a metric's state cannot
            be combined, or Keras does not accept the arguments.
        CollectiveMismatchError: ranks differ in their arguments, data or model.
        HvdkitError: a required feature is not supported; the message names it and what is supported.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> model.compile(keras.optimizers.SGD(0.02), "mse")
        >>> x, y = np.ones((96, 4), "float32"), np.ones((96, 1), "float32")  # the whole data set, on every rank
        >>> history = hk.fit(model, x, y, batch_size=32, epochs=3, validation_split=1 / 3, verbose=0)
        >>> [round(loss, 4) for loss in history.history["val_loss"]]  # the same for any number of ranks
        [0.4096, 0.1678, 0.0687]
        >>> digest = hk.compare_variables(model.variables)  # equal on all ranks
    """
    arguments = dict(locals())
    check_all_ranks_call("hk.fit")
    del arguments["model"], arguments["logdir"], arguments["loss_scope"]
    if has_own(model, "fit"):
        return _call_own_fit(model, arguments, logdir, loss_scope)
    call = _call_text(model, {**arguments, "loss_scope": loss_scope})
    validation_arguments: dict[str, Any] = {}

    def build() -> DataPair:
        check_model(model)
        if loss_scope not in get_args(LossScope):
            remedy = "leave it out for 'auto'"
            raise ValueError(describe("loss_scope", repr(loss_scope), "'auto', 'rows' or 'batch'", remedy))
        training = (x, y, sample_weight)
        validation = validation_data
        if validation_split and validation is None:
            training, validation = array_slicing.train_validation_split(training, validation_split=validation_split)
        train_x, train_y, train_weight = training
        training_shares = FitData(
            x=train_x,
            y=train_y,
            sample_weight=train_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            initial_epoch=initial_epoch,
        ).shares_for(model)
        if isinstance(training_shares, GlobalBatchShares):
            training_shares.check_epochs(epochs)
            if logdir is not None:
                training_shares.check_saved()
        if validation is None:
            return training_shares, None
        val_x, val_y, val_weight = data_adapter_utils.unpack_x_y_sample_weight(validation)
        validation_arguments.update(
            x=val_x,
            y=val_y,
            sample_weight=val_weight,
            batch_size=validation_batch_size or (None if isinstance(val_x, GlobalBatches) else batch_size),
        )
        late = FitData(**validation_arguments, steps=validation_steps, argument="validation_data", is_late=True)
        return training_shares, late.shares_for(model)

    shares, validation_shares = prepare_data(call, build)
    recorder = StepRecorder.from_environment()
    callback_objects = tree.flatten(callbacks or [])
    if recorder is not None:  # this program is checked: it ends after some steps, and writes no files
        logdir = None
        callback_objects = [recorder, *(each for each in callback_objects if not (_saves(each) or is_on_chief(each)))]
    if logdir is not None:
        callback_objects = [SupervisorCallback(logdir, save_epochs=True), *callback_objects]
    data = [each for each in (shares, validation_shares) if each is not None]
    with contextlib.ExitStack() as stack:
        if not any(map(_saves, callback_objects)):
            stack.enter_context(_warning_if_interrupted())
        if recorder is not None:
            stack.enter_context(recorder.observing(model))
        stack.enter_context(closing_sessions(callback_objects))
        session = FitSession.of(
            model,
            may_be_empty=any(each.may_be_empty for each in data),
            loss_scope=loss_scope,
            may_gather=not any(each.has_whole_tensors for each in data),
        )
        session.steps.check_earlier_step()
        warn_of_repeated_rows(model)
        warn_of_float8(model)
        warn_of_local_statistics(model)
        stack.enter_context(session.running(*data))
        stack.enter_context(_validating_by(model, validation_arguments))
        callback_list = CallbackList(
            callback_objects, session, shares, validation_shares, verbose=verbose, epochs=epochs, steps=steps_per_epoch
        )
        began = time.monotonic()
        history = keras_method(model, "fit")(
            shares,
            epochs=epochs,
            verbose=verbose,
            callbacks=callback_list,
            validation_data=validation_shares,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_freq=validation_freq,
        )
        if cluster.is_chief() and recorder is None:
            _report_end(callback_list, time.monotonic() - began, epochs, history, shares.mean_batch_size)
        return history


def _call_own_fit(
    model: keras.Model, arguments: Mapping[str, object], logdir: str | RunPath | None, loss_scope: LossScope
) -> keras.callbacks.History:
    """Call the ``fit`` of the model's class, or on the chief what a tracker's autolog has put in its place."""
    is_autolog = cluster.size() > 1 and is_patched("fit") and type(model).fit is keras.Model.fit
    known = tree.flatten(arguments["callbacks"] or [])
    calls = 0

    def run(model: keras.Model, **passed: Any) -> keras.callbacks.History:
        nonlocal calls
        calls += 1
        if logdir is not None and calls > 1:
            got = f"one folder, and {type(model).__name__}.fit, which calls super().fit several times"
            remedy = "leave it out, and pass a SupervisorCallback with its own folder to each"
            raise ValueError(describe("logdir", got, "a folder for each training", remedy))
        for callback in tree.flatten(passed.get("callbacks") or []) if is_autolog else ():
            if not any(callback is each for each in known):
                mark_on_chief(callback)
        return fit(model, **passed, logdir=logdir, loss_scope=loss_scope)

    history: keras.callbacks.History = call_own(model, "fit", fit, arguments, run)
    return history


def _call_text(model: keras.Model, arguments: Mapping[str, object]) -> str:
    """Return the call as a text of the arguments that are the same on every rank."""
    weights = arguments["class_weight"]
    shown = {name: arguments[name] for name in _COMPARED} | {
        "class_weight": sorted(weights.items()) if isinstance(weights, dict) else weights,
        "loss_scope": arguments["loss_scope"],
        "jit_compile": jit_mode(model),
    }
    return f"hk.fit({', '.join(f'{name}={value}' for name, value in shown.items())})"


def _saves(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback writes files, e.g. checkpoints."""
    return isinstance(callback, (*WRITERS, SupervisorCallback))


def _report_end(
    callbacks: CallbackList, seconds: float, epochs: int, history: keras.callbacks.History, rows: float | None
) -> None:
    """Report what a ``fit`` has trained. Without a Supervisor, ``verbose=0`` logs nothing."""
    trained = callbacks.trained
    of_session = next((each.supervisor.trained for each in callbacks.supervisors if each.supervisor is not None), None)
    summary = of_session or RunSummary(steps=trained.steps, seconds=seconds)
    last = history.epoch[-1] + 1 if history.epoch else epochs
    stopped = f"after epoch {last} of {epochs}" if last < epochs else ""
    if trained.unfinished is not None:
        stopped = f"in epoch {trained.unfinished} of {epochs}"
    stopped = next((f"by {each.stopped_by}" for each in callbacks.supervisors if each.stopped_by), stopped)
    summary = replace(
        summary,
        epochs=trained.whole,
        continued_epoch=trained.continued,
        unfinished_epoch=trained.unfinished,
        examples_per_step=rows,
        stopped=stopped,
    )
    summary.report(logs=of_session is not None or bool(callbacks.verbose and summary.steps))


@contextlib.contextmanager
def _warning_if_interrupted() -> Iterator[None]:
    """Warn on the chief, after Ctrl-C or SIGTERM, that nothing was saved."""
    remedy = "nothing was saved; hk.fit(logdir='runs/a') saves the run, and the same command continues it"
    own_tag = f"{tag([cluster.rank()])} " if cluster.size() > 1 else ""
    notice = EndNotice(f"{own_tag}ended by SIGTERM: {remedy}") if cluster.is_chief() else contextlib.nullcontext()
    try:
        with notice:
            yield
    except BaseException as error:
        # Another rank may have been interrupted first, while this one waited for it in a collective.
        has_left = isinstance(error, SystemExit) and error.code == 128 + signal.SIGINT
        if cluster.is_chief() and (has_left or is_interrupt(error)):
            get_logger().warning("interrupted: %s", remedy)
        raise


def _validating_by(model: keras.Model, arguments: dict[str, object]) -> contextlib.AbstractContextManager[None]:
    """Call the model's own ``evaluate``, if it has one, with the user's validation data, as Keras does."""
    if not has_own(model, "evaluate") or not arguments:
        return contextlib.nullcontext()
    own = model.evaluate

    def evaluate(*args: object, **kwargs: object) -> object:
        # Keras passes the data again, and reads them from its iterator over the shares.
        is_validation = kwargs.get("_use_cached_eval_dataset", False)
        return own(**kwargs | arguments) if is_validation else own(*args, **kwargs)

    return swap_attributes(model, evaluate=evaluate)
