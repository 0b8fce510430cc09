"""Callbacks for ``model.fit`` on several ranks. Pass hvdkit's callbacks on every rank, in the same order."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
