"""Training sessions: initialize or restore, save, write summaries, and stop all ranks at the same step.

``Supervisor`` is imported on first use: signals, locks and the pace don't need TensorFlow.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
