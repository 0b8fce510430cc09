"""Atomic, checksummed checkpoints that can be restored at any number of ranks.

Names are imported lazily: inspecting checkpoints needs neither TensorFlow nor Horovod.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
