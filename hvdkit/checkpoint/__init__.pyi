from .export import export_npy as export_npy
from .folder import latest as latest
from .inspection import inspect as inspect
from .restoring import restore as restore
from .saved_model import export_saved_model as export_saved_model
from .saving import save as save
from .state import ShardedState as ShardedState
from .verifying import verify as verify
