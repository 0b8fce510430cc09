"""Atomic, checksummed checkpoints that can be restored at any number of ranks.

``state.py`` flattens models, optimizers and values into named entries. ``saving.py`` writes them: each rank its shard
file, the chief the replicated file and the manifest, which is renamed into place when all ranks are done.
``restoring.py`` matches saved names to entries, and reads and verifies the rows that each rank needs. Start reading
with ``entries.py`` and ``manifest.py``; ``tensorfile.py`` is the file format, ``folder.py`` a folder of checkpoints.

Names are imported lazily: inspecting checkpoints needs neither TensorFlow nor Horovod.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
