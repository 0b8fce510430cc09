"""Keras training for the whole job: ``hk.fit``, ``hk.evaluate`` and ``hk.predict``.

Each rank runs Keras's own loop on its share of every global batch, so that N ranks give the results of one process.
Users pass the whole data set on every rank; they get Keras's History, metrics or predictions, equal on all ranks. Start
with ``fitting.py``; the other two calls follow the same steps:

    inputs.py           from the arguments to shares; checks that all ranks pass the same data
    shares.py           splits global batches by rows; array_shares.py and global_batch_shares.py do so without reading
                        the rows of other ranks
    fit_session.py      replaces methods of the model while a call runs, and broadcasts the chief's variables
    train_steps.py      the model's own step, run on a share; losses.py rescales losses that are not means over rows
    keras_callbacks.py  runs the user's callbacks, and compares their decisions between ranks
    metric_combiner.py  from the ranks' metric states to the logs of one process
"""

from hvdkit.training.evaluating import evaluate
from hvdkit.training.fitting import fit
from hvdkit.training.predicting import predict

__all__ = ["evaluate", "fit", "predict"]
