"""Collectives: tensors through Horovod, objects through mpi4py if MPI is available.

Numbers, NumPy arrays and tensors go in, from every rank; results of the same kind come out, with the gradient of the
global function. Start with ``reductions.py`` and ``gathers.py``, the public functions: each describes itself as a
``Collective``, which ``calls.py`` runs, eagerly or in a graph:

    conversion.py         to tensors, and from results back to the caller's type
    process_sets.py       the ranks that take part
    call_checks.py        before an eager collective, ranks compare their calls, and send small values along
    numpy_collectives.py  results of small values, computed by each rank
    tensors.py            larger values and graphs: Horovod's ops; dtypes.py defines what is sent
    graphs.py             names, order and XLA; graph_recorder.py records what runs, for the flight recorder
    batch_share.py        the weight of this rank's gradients if ranks have different numbers of rows

Others: ``objects.py`` (Python objects, barrier), ``asynchronous.py``, ``joining.py``, ``rank_ops.py`` (rank and size as
ops), ``ops.py`` (reductions), ``digests.py`` (of variables and batches), ``weak_registry.py`` (values that belong to
objects).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
