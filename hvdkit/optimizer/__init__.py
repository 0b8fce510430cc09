"""Gradients in, updates out: average gradients over ranks, and update variables with any Keras optimizer.

Every rank passes its own gradients; all ranks get the same combined ones. Sharded variables are updated by the ranks
that hold them. Start with ``average.py``, which handles dense tensors, rows and None (``gradients.py`` checks and
classifies them), and with ``distributed.py``, which makes a Keras optimizer distributed.

A distributed optimizer is a copy (``copies.py``) whose class has a mixin (``mixin.py``). ``reduction.py`` holds its
options. If each rank keeps 1/N of the slots, ``element_partition.py`` divides the variables. ``row_updates.py`` updates
only the rows in a gradient; ``tables.py`` handles tables that have their own optimizer. ``inner_optimizers.py`` finds
those inside others. ``equal_ranks.py`` compares the ranks' weights before the first step. ``tape.py`` combines
gradients for custom training loops.
"""
