"""Keras callbacks for plain ``model.fit`` on several ranks, in which every rank calls ``fit`` on its own data.

They give all ranks the chief's initial values, combine metrics, save and resume, warm up the learning rate, log steps,
and stop on non-finite losses or diverged ranks. Pass them on every rank, in the same order: most of them call
collectives. ``hk.fit`` needs only those for saving, learning rates and logs. Start with ``broadcast.py``, the smallest;
``supervisor_callback.py`` runs the whole session of ``hk.supervisor``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
