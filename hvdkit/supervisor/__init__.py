"""Training sessions: initialize or restore, save, write summaries, and stop all ranks at the same step.

A session gets a model, its optimizer and the data, and owns a ``logdir``: checkpoints and TensorBoard summaries. Ranks
exchange a message every few steps (``agreements.py``, ``pace.py``), and then save or stop at the same step. Start with
``session.py``; every other file holds one of its parts and can be read alone.

``Supervisor`` is imported on first use: signals, locks and the pace don't need TensorFlow.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
