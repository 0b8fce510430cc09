"""Collectives: tensors through Horovod, objects through mpi4py if MPI is available."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
