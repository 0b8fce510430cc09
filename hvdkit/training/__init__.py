"""Keras training for the whole job: ``hk.fit``, ``hk.evaluate`` and ``hk.predict``.

Each rank runs Keras's own ``fit`` on its share of every global batch. :mod:`hvdkit.training.shares` splits the batches,
:mod:`hvdkit.training.train_steps` runs the model's step on a share, :mod:`hvdkit.training.results` combines metrics,
and :mod:`hvdkit.training.fit_session` installs these in the model and removes them afterwards.
"""

from hvdkit.training.evaluating import evaluate
from hvdkit.training.fitting import fit
from hvdkit.training.predicting import predict

__all__ = ["evaluate", "fit", "predict"]
